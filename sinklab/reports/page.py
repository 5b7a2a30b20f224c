"""`write_report`: from a run folder's tables to tables/*.csv, figures/* and one self-contained report.html.

Nothing here runs a model, and nothing depends on the time or the machine: the same run gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from markupsafe import Markup

from sinklab.reports import (
    branches,
    captions,
    causal,
    causal_method,
    causal_plan,
    effects,
    overlay_sheet,
    overlays,
    phase,
    sections,
    strips,
    sureness,
    tables,
    task,
    wording,
)
from sinklab.reports.causal_figures import effects_figure, joint_figure
from sinklab.reports.figures import fullness
from sinklab.reports.nouns import Words
from sinklab.reports.palette import CLASS_NAME, CLASSES, HEAT_RAMP, KIND_GLYPH, KIND_NAME
from sinklab.reports.saved import read_spectrum, reading
from sinklab.reports.stale import remove_stale_figures
from sinklab.reports.verdict import Verdict, give_verdict
from sinklab.sinks.classify import SinkDefinition, with_own
from sinklab.sinks.rule import SinkRule
from sinklab.sinks.table import GATED, counts_per_image, kind_by_layer, sensitivity, sink_table

if TYPE_CHECKING:
    import pandas as pd


PAPER = "A Unifying View of Attention Sinks: From Mechanisms to Architectural Interventions"
"""The paper whose definitions, figures and tables the report repeats, by its full title."""


class SavedRun(Protocol):
    """What a report needs of a run: its folder, its tables, and a way to write files into it."""

    path: Path

    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def heads(self) -> pd.DataFrame: ...
    def write_text(self, name: str, text: str, /) -> Any: ...
    def write_bytes(self, name: str, content: bytes, /) -> Any: ...
    def write_table(self, name: str, table: pd.DataFrame, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Every table that the page shows, computed once from the saved ones."""

    words: Words
    rule: SinkRule
    definition: SinkDefinition
    definitions: list[SinkDefinition]
    """The run's own first."""
    heads: pd.DataFrame
    table: pd.DataFrame
    kinds: pd.DataFrame
    counts: pd.DataFrame
    own_counts: pd.DataFrame
    sensitivity: pd.DataFrame
    routes: pd.DataFrame
    has_spectrum: bool
    gated: bool
    """Whether the heads' gated updates were measured beside the ungated ones."""
    verdict: Verdict
    how_sure: list[str]
    task: list[dict[str, Any]]
    """What a controlled task says of the edits, a table a head; empty without."""
    causal: effects.Causal | None
    """None for a run without interventions, or with interventions under another rule or definition."""
    phases: pd.DataFrame | None
    """tables/phase.csv, of a run whose model's values are phases."""


def write_report(run: SavedRun) -> Path:
    """Write RUN/tables/*.csv, RUN/figures/*.{svg,png,csv} and RUN/report.html; returns the page's path.

    Reads only what the run has saved. Overlays, spectrum and events may each be missing; the page then says so.
    """
    found = gather(run)
    drawn = draw_figures(found)
    kept = {f"{figure.name}.{ending}" for figure in drawn.values() for ending in ("svg", "png", "csv")}
    saved = overlays.read_overlays(run.path)
    shown: list[overlays.HeadExamples] = []
    photographs: list[overlays.Photograph] = []
    if saved is not None and not found.words.pictures:
        drawn |= strips.strip_figures(saved[0], found.table, found.words, found.rule, found.definition)
        kept |= {f"{figure.name}.{ending}" for figure in drawn.values() for ending in ("svg", "png", "csv")}
    elif saved is not None:
        columns, listed = saved
        with reading(run.path / "overlays/pictures.json"):
            shown, photographs = overlays.examples_by_head(run.path, columns, listed, found.table, run.config)
        kept |= {"overlays.csv", *(f"{head.name}.png" for head in shown)}
        run.write_table("figures/overlays.csv", tables.labelled(columns, rule=found.rule.name))
    _write_tables(run, found)
    for figure in drawn.values():
        run.write_text(f"figures/{figure.name}.svg", figure.svg)
        run.write_bytes(f"figures/{figure.name}.png", figure.png)
        run.write_table(f"figures/{figure.name}.csv", _with_labels(figure, found))
    for head in shown:
        run.write_bytes(f"figures/{head.name}.png", overlay_sheet.overlay_png(head))
    told = branches.read_branches(run.path, run.config)
    with reading(run.path / "run.json"):
        page = render(run.config, found, drawn, shown, photographs, told)
    run.write_text("report.html", page)
    remove_stale_figures(run.path, kept)
    return run.path / "report.html"


def gather(run: SavedRun) -> Findings:
    """Everything that the page counts, from the run's tables."""
    rule = SinkRule.from_dict(run.config["rule"])
    definition = SinkDefinition.from_saved(run.config["definition"])
    definitions = sorted(with_own(definition), key=lambda each: each != definition)
    heads, words = run.heads, Words.of(run.config)
    table = tables.head_table(heads, sink_table(heads, rule, definitions), rule, definitions)
    own_counts = counts_per_image(heads, [rule], definitions)
    routes, has_spectrum = _routes(run.path / "tables/spectrum.csv", table)
    grid = sensitivity(heads, rule, definitions)
    edited = None if causal.judged_otherwise(run.config) else effects.read_causal(run.path, run.config)
    said = None if edited is None else task.read_task(run.path)
    return Findings(
        words=words,
        rule=rule,
        definition=definition,
        definitions=definitions,
        heads=heads,
        table=table,
        kinds=kind_by_layer(heads),
        counts=counts_per_image(heads, tables.report_rules(rule), definitions),
        own_counts=own_counts,
        sensitivity=grid,
        routes=routes,
        has_spectrum=has_spectrum,
        gated=set(GATED) <= set(heads.columns),
        verdict=give_verdict(heads, table, own_counts, rule, definition, words),
        how_sure=sureness.how_sure(heads, table, grid, rule, definition, words),
        causal=edited,
        task=[] if said is None else task.task_tables(said),
        phases=phase.read_phases(run.path / "tables/phase.csv"),
    )


def _routes(spectrum: Path, table: pd.DataFrame) -> tuple[pd.DataFrame, bool]:
    """Lemma 3's table, and whether the run has a spectrum: a model without query and key weights has none."""
    routes = tables.route_table(table, read_spectrum(spectrum))
    return routes, bool(routes["sigma1_share"].notna().any())


def draw_figures(found: Findings) -> dict[str, captions.Drawn]:
    """The page's figures by the section that holds them; those about sunk heads are absent if no head sinks."""
    events = int(found.table["events"].sum())
    images = int(found.verdict.numbers["images"])
    counted = captions.Counted(images=images, events=events, rule=found.rule.label, words=found.words)
    drawn: dict[str, captions.Drawn] = {}
    if found.causal is not None:
        named = {"effects": effects_figure(found.causal), "joint": joint_figure(found.causal)}
        drawn |= {name: figure for name, figure in named.items() if figure is not None}
    if found.phases is not None:
        drawn |= phase.phase_figures(found.phases, found.words)
    if not len(found.table):
        return drawn
    drawn |= {
        "kinds": captions.kinds_figure(found.kinds, counted),
        "frequency": captions.frequency_figure(found.table, found.definition, counted),
    }
    if events:
        for definition in found.definitions:
            own = definition == found.definition
            plane = captions.plane_figure(found.table, definition, counted, own)
            drawn["plane" if own else f"plane_{definition.name}"] = plane
        if found.has_spectrum:
            drawn["routes"] = captions.routes_figure(found.routes, found.definition, counted)
    return drawn


def _with_labels(figure: captions.Drawn, found: Findings) -> pd.DataFrame:
    """The plotted numbers with the rule and the definition that they rest on."""
    if figure.name.startswith(("fig4", "phase")):
        return tables.labelled(figure.table, rule="none")
    if figure.name.startswith("fig6") and found.causal is not None:
        named_so = str(found.causal.patch.get("definition", "causal"))
        return tables.labelled(figure.table, rule=found.rule.name, definition=named_so)
    if figure.name.startswith("overlay"):
        return tables.labelled(figure.table, rule=found.rule.name, definition=found.definition.name)
    columns = [str(name) for name in figure.table]
    named = [name.removeprefix("class_") for name in columns if name.startswith("class_")]
    return tables.labelled(figure.table, rule=found.rule.name, definition="+".join(named))


def _write_tables(run: SavedRun, found: Findings) -> None:
    rule = {"rule": found.rule.name, "rule_sentence": found.rule.sentence(found.words.a_noun)}
    run.write_table("tables/heads.csv", tables.labelled(found.table, rule=found.rule.name))
    run.write_table("tables/counts_per_image.csv", found.counts)
    run.write_table("tables/table14.csv", tables.labelled(tables.table_14(found.own_counts), **rule))
    run.write_table("tables/table15.csv", tables.table_15(found.counts, found.words.first, found.rule))
    run.write_table("tables/sensitivity.csv", tables.labelled(found.sensitivity, rule=found.rule.name))
    sunk = found.routes[found.routes["events"] > 0]
    run.write_table("tables/routes.csv", tables.labelled(sunk, rule=found.rule.name))


def render(
    config: dict[str, Any],
    found: Findings,
    drawn: dict[str, captions.Drawn],
    shown: list[overlays.HeadExamples],
    photographs: list[overlays.Photograph],
    told: dict[str, Any] | None = None,
) -> str:
    """The page as text; every name that a user chose is escaped."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    assets = files("sinklab") / "assets"
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FunctionLoader(lambda name: (assets / name).read_text(encoding="utf-8")),
    )  # fmt: skip
    environment.filters |= {"number": wording.number, "fixed": wording.fixed, "percent": wording.percent,
                            "settled": wording.settled}  # fmt: skip
    environment.globals |= {"plural": wording.plural, "fullness": fullness, "class_name": CLASS_NAME,
                            "classes": CLASSES, "kind_name": KIND_NAME, "kind_glyph": KIND_GLYPH,
                            "paper": PAPER}  # fmt: skip
    return environment.get_template("report.html.j2").render(
        style=Markup((assets / "report.css").read_text(encoding="utf-8")),
        versions=sections.library_versions(config),
        w=found.words,
        skipped=sections.skipped_inputs(config),
        size=sections.size_words(config, found.words),
        size_facts=sections.size_facts(config, found.words),
        token_facts=sections.token_facts(config, found.words),
        notes=sections.notes(config),
        update_words=sections.update_words(config),
        counted=sections.counted_inputs(config, found.verdict.numbers["images"], found.words),
        config=config,
        model=config.get("model", {}),
        images=config.get("images", {}),
        found=found,
        branches=told,
        verdict=found.verdict,
        drawn=drawn,
        layers=sections.layer_sections(found.table, found.definition),
        table_14=sections.records(tables.table_14(found.own_counts)),
        table_15=sections.records(tables.table_15(found.counts, found.words.first, found.rule)),
        grids=[(each, sections.grid_tables(tables.sensitivity_grid(found.sensitivity, each)))
               for each in found.definitions],
        routes=sections.strongest_first(found.routes[found.routes["events"] > 0]),
        shown=shown,
        photographs=photographs,
        strips=[key for key in drawn if key.startswith("strip")],
        heat_ramp=[(colour, round(overlays.opacity(place / (len(HEAT_RAMP) - 1)), 3))
                   for place, colour in enumerate(HEAT_RAMP)],
        phases=_phase_words(found),
        **_causal_words(config, found),
        broken=sections.records(found.table[found.table["not_finite"] > 0]),
    )  # fmt: skip


def _phase_words(found: Findings) -> dict[str, str] | None:
    """What is said of the phases; None for a run without."""
    if found.phases is None:
        return None
    return phase.phase_words(found.phases, found.heads, found.rule, found.definition, found.words)


def _causal_words(config: dict[str, Any], found: Findings) -> dict[str, Any]:
    """What the causal section shows; without interventions, the one sentence that stands in its place."""
    saved = found.causal
    if saved is None:
        sentence = causal.absent(config, found.verdict.numbers["events"])
        return {"causal": None, "causal_sentence": sentence, "other_rule": causal.judged_otherwise(config)}
    shared = {
        "causal": saved,
        "other_rule": False,
        "plan": causal_plan.plan_shown(saved),
        "task": found.task,
        "failed": causal_method.failed_checks(saved),
        "facts": causal_method.method_facts(saved),
    }
    if shared["plan"]:
        return shared | {"causal_sentence": causal_plan.plan_sentence(saved)}
    classes = effects.CAUSAL_CLASSES
    return shared | {
        "causal_sentence": causal.verdict_sentence(saved),
        "findings": causal.class_findings(saved),
        "meanings": {name: saved.words.say(meaning) for name, meaning in effects.EDIT_MEANING.items()},
        "measures": [saved.headings(name) for name in saved.measures],
        "class_tables": [(name, effects.class_groups(saved, name)) for name in classes],
        "edited": effects.head_rows(saved),
        "joint_tables": [(name, effects.joint_rows(saved, name)) for name in classes],
    }
