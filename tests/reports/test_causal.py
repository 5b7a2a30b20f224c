"""The causal section: it says what the saved verdicts say, draws every head, and forces no verdict."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic_effects import BROADCASTS, EDITS, HEADS, NOPS, Edited, write_effects
from synthetic_run import SavedRun, synthetic_run

from sinklab.reports import causal_figures, drawing
from sinklab.reports.causal import class_findings, class_lines, verdict_sentence
from sinklab.reports.causal_method import failed_checks, method_facts
from sinklab.reports.effects import CAUSAL_CLASSES, Causal, effects_table, head_rows, read_causal, shown_blocks
from sinklab.reports.page import write_report
from sinklab.reports.wording import number

WIDTHS = pytest.mark.parametrize("width", [drawing.WIDE, drawing.NARROW], ids=["wide", "narrow"])


def causal_of(path: Path, heads: Any = HEADS, **patch: Any) -> Causal:
    found = read_causal(path, write_effects(synthetic_run(path, overlays=False), heads, **patch).config)
    assert found is not None
    return found


def quick_run(path: Path, heads: Any = HEADS, **given: Any) -> SavedRun:
    """Edited heads in a run whose other figures take no time: it has no sinks of its own."""
    return write_effects(synthetic_run(path, plants=(), overlays=False), heads, **given)


def page_of(run: SavedRun) -> str:
    return write_report(run).read_text(encoding="utf-8")


def words(markup: str) -> str:
    page = re.sub(r"<(style|svg).*?</\1>", "", markup, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


class Cells(HTMLParser):
    """The rows of every table below the heading “causal”, as lists of the words in their cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(page[page.index('id="causal"') : page.index('id="counts"')])

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True
        elif tag == "small" and self.inside:
            self.rows[-1][-1] += "|"

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, text: str) -> None:
        if self.inside:
            self.rows[-1][-1] += text.strip()


@pytest.mark.parametrize("behaves", ["nop", "broadcast", "neither"])
@pytest.mark.parametrize("named", CAUSAL_CLASSES)
def test_the_sentence_on_a_class_says_what_its_verdict_says(tmp_path: Path, named: str, behaves: str) -> None:
    heads = [Edited(layer=1, head=head, named=named, behaves=behaves) for head in range(3)]
    causal = causal_of(tmp_path, heads)
    lead = words({each["name"]: each["lead"] for each in class_findings(causal)}[named])
    top = words(verdict_sentence(causal))
    if behaves == named:
        assert "the interventions agree" in lead and "behave as such when edited (3 heads, 24 images" in lead
        assert f"behave as {'NOPs' if named == 'nop' else 'broadcasts'} (3 of 3 agree)" in top
    else:
        like = {"nop": "like NOPs", "broadcast": "like broadcasts", "neither": "like neither class"}[behaves]
        assert "the interventions do not agree" in lead and like in lead
        assert "against what was observed (0 of 3 agree, 3 do not)" in top


def test_the_heads_that_do_not_agree_and_those_without_a_verdict_are_named(tmp_path: Path) -> None:
    nop, broadcast = class_findings(causal_of(tmp_path))
    assert [head for head, _, _ in nop["against"]] == ["L3H1"] and nop["against"][0][1] == "like a broadcast"
    assert nop["undecided"] == [("4 images, fewer than the 20 that a verdict needs", "L4H2")]
    assert nop["tally"] == "Of 5 edited NOP heads, 3 agree, 1 does not and 1 is undecided."
    assert broadcast["against"] == [] and broadcast["tally"] == "Of 2 edited broadcast heads, all agree."


CARRYING = (
    "a donor's value moves all tokens alike and towards the donor, and zeroing an ordinary token's value does little"
)


def test_a_broadcast_that_carries_content_is_worded_and_marked_as_one(tmp_path: Path) -> None:
    heads = [Edited(layer=1, head=head, named="broadcast", behaves="broadcast", reason=CARRYING) for head in range(3)]
    causal = causal_of(tmp_path, heads)
    causal.verdicts.loc[causal.verdicts["level"] == "class", "reason"] = CARRYING
    numbers = class_findings(causal)[1]["numbers"]
    assert "the donor’s value moves all tokens alike and towards the donor (shared energy 0.7" in numbers
    assert "control changes the" in numbers and "while zero changes the" in numbers and "mean" not in numbers
    table, blocks = effects_table(causal), {name: shown_blocks(causal, name) for name in CAUSAL_CLASSES}
    figure = causal_figures.draw_effects(table, causal.edits, blocks, carried=True)
    signs = {label.get_text().split()[0]: label.get_text()[:-1] for label in figure.axes[1].get_xticklabels()}
    assert "▲" in signs["zero"] and "▽" in signs["control"]
    assert not any(sign in signs[edit] for edit in ("mean", "donor", "route") for sign in "▽▲")
    drawn = causal_figures.effects_figure(causal)
    assert drawn is not None and "not trading it for another" not in str(drawn)
    assert "not trading it for another" in str(causal_figures.effects_figure(causal_of(tmp_path / "constant")))


def test_thin_evidence_is_undecided_and_never_a_class(tmp_path: Path) -> None:
    thin = [Edited(layer=1, head=0, images=4), Edited(layer=2, head=0, images=7)]
    causal = causal_of(tmp_path, thin)
    finding = class_findings(causal)[0]
    assert "NOP: undecided." in finding["lead"] and "it is not settled" in finding["lead"]
    assert "agree" not in words(finding["lead"]) and finding["tally"] == "Of 2 edited NOP heads, all are undecided."
    said = "the class of the NOP heads stays undecided (0 of 2 agree, 2 undecided; "
    assert said + "0 head with enough images, fewer than 2)" in words(verdict_sentence(causal))
    assert finding["numbers"] == ""  # no class mean, so none is quoted


def test_a_class_without_heads_says_so_everywhere(tmp_path: Path) -> None:
    run = quick_run(tmp_path, NOPS)
    text = words(page_of(run))
    assert "Broadcast: no evidence. No broadcast head was edited: no head had enough events of this class." in text
    assert "no broadcast head was there to test" in text and "no broadcast heads;" in text
    assert "Effects on broadcast heads" not in text and " nan" not in text and "None" not in text


def test_a_verdict_on_no_heads_is_no_evidence_and_keeps_its_reason(tmp_path: Path) -> None:
    run = quick_run(tmp_path, NOPS)
    with (tmp_path / "tables/causal_verdicts.csv").open("a") as file:
        file.write("class,broadcast,1+,-1,-1,0,0,undecided,,no event of this class\n")
    causal = read_causal(run.path, run.config)
    assert causal is not None
    assert "No broadcast head was edited: no event of this class." in class_findings(causal)[1]["lead"]
    assert "no broadcast head was there to test" in verdict_sentence(causal)


def test_a_class_that_was_not_asked_for_is_not_said_to_lack_heads(tmp_path: Path) -> None:
    causal = causal_of(tmp_path, NOPS, classes=["nop"])
    assert "this class was not asked for" in class_findings(causal)[1]["lead"]


@WIDTHS
def test_the_figure_has_a_dot_for_every_head_and_edit_at_its_effect(tmp_path: Path, width: float) -> None:
    causal = causal_of(tmp_path)
    table = effects_table(causal)
    blocks = {name: shown_blocks(causal, name) for name in CAUSAL_CLASSES}
    figure = causal_figures.draw_effects(table, causal.edits, blocks, width)
    for name, axes in zip(CAUSAL_CLASSES, figure.axes, strict=True):
        dots = [line for line in axes.lines if line.get_label() == f"_dot-{name}"]
        mine = [head for head in HEADS if head.named == name]
        assert len(dots) == sum(len(EDITS) - len(head.without) for head in mine)
        drawn = sorted(np.asarray(dot.get_ydata(), dtype=float)[0] for dot in dots)
        planted = table[(table["class"] == name) & (table["drawn"] == "dot")]["mean"]
        assert np.allclose(drawn, sorted(planted))
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim() and figure.axes[0].get_ylim()[0] == 0


def test_bars_are_the_means_of_later_layers_and_dots_of_layer_0_are_hollow(tmp_path: Path) -> None:
    table = effects_table(causal_of(tmp_path))
    bars = table[table["drawn"] == "bar"]
    assert set(bars["blocks"]) == {"1+"}
    assert set(table[(table["drawn"] == "dot") & (table["class"] == "nop")]["blocks"]) == {"0", "1+"}
    saved = pd.read_csv(tmp_path / "tables/effects.csv", dtype={"blocks": str})
    saved = saved[(saved["level"] == "class") & (saved["blocks"] == "1+") & (saved["measure"] == "patch_change")]
    saved = saved[(saved["kind"] == "edit") & (saved["joint"] == 0)]
    assert np.allclose(sorted(bars["mean"]), sorted(saved["mean"]))


def test_bars_of_layer_0_stand_in_only_where_no_later_layer_has_a_mean_and_are_said_to(tmp_path: Path) -> None:
    causal = causal_of(tmp_path, [Edited(layer=0, head=head) for head in range(2)])
    figure = causal_figures.effects_figure(causal)
    assert figure is not None and set(figure.table[figure.table["drawn"] == "bar"]["blocks"]) == {"0"}
    assert "bars over 2 of them (layer 0, paler, for no head of a later layer has a mean, 24 images)" in figure.counts
    assert "the NOP heads of layer 0 behave as NOPs" in verdict_sentence(causal)


def test_an_axis_is_logarithmic_only_where_a_panel_would_be_all_slivers(tmp_path: Path) -> None:
    causal = causal_of(tmp_path)
    table = effects_table(causal)
    assert causal_figures.threshold(table) == 0
    slivers = table.assign(mean=table["mean"].where(table["class"] != "nop", table["mean"] / 100))
    slivers["high"] = slivers["low"] = np.nan
    assert 0 < causal_figures.threshold(slivers) <= slivers.loc[slivers["drawn"] == "bar", "mean"].min()
    figure = causal_figures.draw_effects(slivers, causal.edits, {"nop": "1+", "broadcast": "1+"})
    assert figure.axes[0].get_yscale() == "symlog" and figure.axes[0].get_ylim()[0] == 0


def test_the_caption_states_heads_and_images(tmp_path: Path) -> None:
    figure = causal_figures.effects_figure(causal_of(tmp_path))
    assert figure is not None
    assert "n = 5 NOP heads, bars over 3 of them (layers ≥ 1, 24 images); 2 broadcast heads" in figure.counts


def test_the_numbers_of_the_class_tables_are_those_of_the_csv(patched_run: SavedRun) -> None:
    rows = Cells((patched_run.path / "report.html").read_text(encoding="utf-8")).rows
    saved = pd.read_csv(patched_run.path / "tables/effects.csv", dtype={"blocks": str})
    saved = saved[(saved["level"] == "class") & (saved["class"] == "nop") & (saved["blocks"] == "1+")]
    saved = saved[saved["joint"] == 0].set_index(["measure", "name"])
    for name in ("zero", "route", "ordinary - zero", "donor - ordinary"):
        shown = next(row for row in rows if row and row[0] == name.replace(" - ", " − ") and "|" in row[1])
        for place, measure in enumerate(("patch_change", "cls_change", "shared_energy", "donor_cosine", "kl")):
            mean, low, high = (number(saved[each][measure, name]) for each in ("mean", "low", "high"))
            wanted = f"{mean}|{low} to {high}".replace("-", "−")
            assert shown[1 + place] == wanted, (name, measure)
        assert shown[-2:] == ["3", "24"]


def test_the_table_of_heads_has_each_head_once_with_its_verdict(patched_run: SavedRun) -> None:
    rows = Cells((patched_run.path / "report.html").read_text(encoding="utf-8")).rows
    shown = {row[0]: row for row in rows if row and re.fullmatch(r"L\d+H\d+", row[0])}
    verdicts = pd.read_csv(patched_run.path / "tables/causal_verdicts.csv").query("level == 'head'")
    assert len([row for row in rows if row and re.fullmatch(r"L\d+H\d+", row[0])]) == len(verdicts) == len(HEADS)
    for row in verdicts.to_dict("records"):
        cells = shown[f"L{row['layer']}H{row['head']}"]
        assert cells[2].lower() == row["verdict"] and cells[-1] == row["reason"]
        assert cells[3] == {"True": "yes", "False": "no"}.get(str(row["agrees"]), "–")
        assert int(cells[-2]) == row["images"]


def test_an_edit_that_was_not_made_is_a_dash_and_the_reason_is_given(tmp_path: Path) -> None:
    causal = causal_of(tmp_path)
    thin = next(row for row in head_rows(causal) if (row["layer"], row["head"]) == (4, 2))
    assert np.isnan(thin["cells"][causal.edits.index("mean")].mean)
    assert "No held-out image has an event of L4H2" in dict(method_facts(causal))["Images"]


def test_a_run_without_any_mean_edit_has_no_column_for_it(tmp_path: Path) -> None:
    heads = [Edited(layer=1, head=head, without=("mean",)) for head in range(2)]
    causal = causal_of(tmp_path, heads)
    assert "mean" not in causal.edits and "mean could not be measured" in class_findings(causal)[0]["numbers"]


def test_a_classifiers_measures_are_shown_only_where_there_is_one(tmp_path: Path, patched_run: SavedRun) -> None:
    with_head = words((patched_run.path / "report.html").read_text(encoding="utf-8"))
    without = words(page_of(quick_run(tmp_path)))
    assert "base ‖ edited, nats" in with_head and "base ‖ edited, nats" not in without


def test_joint_edits_are_drawn_and_tabled_only_where_there_are_any(tmp_path: Path, patched_run: SavedRun) -> None:
    assert (patched_run.path / "figures/fig6-joint-effects.csv").is_file()
    text = words((patched_run.path / "report.html").read_text(encoding="utf-8"))
    assert text.count("heads edited at once : relative change") == 2
    run = quick_run(tmp_path, joint=False)
    assert "edited at once" not in words(page_of(run)) and not (tmp_path / "figures/fig6-joint-effects.csv").exists()


def test_a_run_that_was_not_patched_has_one_sentence_with_the_command_and_nothing_else(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path)
    plain = page_of(run)
    assert plain.count("sinklab patch RUN") == 1 and "Nothing was intervened on" in plain
    assert 'id="causal"' not in plain and "#causal" not in plain and not list((tmp_path / "figures").glob("fig6*"))
    unfinished = run.config | {"patch": {"status": "running"}}
    run.config = unfinished
    assert "begun but have left no table of effects (status “running”)" in page_of(run)


def test_a_run_without_sinks_is_not_told_to_patch_them(quiet_run: SavedRun) -> None:
    text = words((quiet_run.path / "report.html").read_text(encoding="utf-8"))
    assert "no head sinks, so sinklab patch RUN would find no head to edit" in text


def test_names_that_are_markup_stay_text(tmp_path: Path) -> None:
    nasty = "<script>alert(1)</script> & $x$"
    heads = [Edited(layer=1, head=0, reason=nasty), Edited(layer=1, head=1, behaves="broadcast", reason=nasty),
             Edited(layer=1, head=2, images=3, reason=nasty)]  # fmt: skip
    run = quick_run(tmp_path, heads, notes=[nasty], command=["sinklab", nasty], device=nasty,
                        definition=nasty, heldout={"sentence": nasty}, status=nasty)  # fmt: skip
    page = page_of(run)
    assert "<script" not in page and words(page).count("<script>alert(1)</script>") >= 7


def test_an_edit_of_another_name_is_shown_and_cannot_break_the_figure(tmp_path: Path) -> None:
    run = quick_run(tmp_path)
    path = tmp_path / "tables/effects.csv"
    path.write_text(path.read_text().replace(",zero_ordinary,", ",<b>$\\frac$,"))
    page = page_of(run)
    assert "<b>$" not in page and "&lt;b&gt;$" in page and "an edit of this run’s plan" in page


@pytest.mark.parametrize(
    ("checks", "failures"),
    [
        ({}, 0),
        ({"null_edits": 10, "null_bit_identical": True}, 0),
        ({"null_edits": 10, "null_bit_identical": 9}, 1),
        ({"null_edits": 10, "null_bit_identical": False, "identity_error_max": 1e-3, "identity_tolerance": 1e-6}, 2),
        ({"identity_error_max": float("nan"), "identity_tolerance": 1e-6}, 1),
        ({"identity_error_max": None, "identity_tolerance": 1e-6}, 0),
    ],
)
def test_a_check_that_failed_is_an_alarm(tmp_path: Path, checks: dict[str, Any], failures: int) -> None:
    assert len(failed_checks(causal_of(tmp_path, checks=checks))) == failures


def test_a_lowered_minimum_is_said_and_an_unlowered_one_is_not(tmp_path: Path) -> None:
    lowered = dict(method_facts(causal_of(tmp_path / "a")))["Heads"]
    assert "The usual minimum of 50 events was lowered to 10" in lowered and "5 NOP heads and 2 broadcast" in lowered
    usual = dict(method_facts(causal_of(tmp_path / "b", min_events_used=50)))["Heads"]
    assert "lowered" not in usual


def test_heads_named_by_hand_are_not_said_to_be_chosen(tmp_path: Path) -> None:
    causal = causal_of(tmp_path, settings={"options": {"heads": [[1, 0]]}})
    assert "named by hand" in dict(method_facts(causal))["Heads"]


def test_a_bare_entry_in_run_json_still_makes_a_page(tmp_path: Path) -> None:
    run = quick_run(tmp_path, BROADCASTS)
    run.config["patch"] = {"status": "complete"}
    text = words(page_of(run))
    assert "Broadcast: the interventions agree." in text and "None" not in text and " nan" not in text


def test_the_causal_part_does_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    one, other = quick_run(tmp_path / "one"), quick_run(tmp_path / "other")
    for name in ("effects", "causal_verdicts"):
        path = other.path / f"tables/{name}.csv"
        first, *rest = path.read_text().splitlines(keepends=True)
        path.write_text(first + "".join(reversed(rest)))
    assert page_of(one) == page_of(other)


def test_a_running_experiment_is_said_to_be_unfinished(tmp_path: Path) -> None:
    run = quick_run(tmp_path, status="running")
    text = words(page_of(run))
    assert "The interventions are not complete." in text and "(not finished yet)" in text


@pytest.mark.parametrize("changed", ["rule", "definition", "nothing"])
def test_interventions_of_another_rule_are_not_mixed_in(tmp_path: Path, changed: str) -> None:
    run = quick_run(tmp_path)
    settings = {name: run.config[name] for name in ("rule", "definition")}
    other = {"rule": {**settings["rule"], "fraction": 0.5}, "definition": "counts"}
    run.config["patch"]["settings"] |= settings | ({changed: other[changed]} if changed in other else {})
    page = page_of(run)
    said = "belong to another rule or definition and are not shown" in words(page)
    assert said == (changed != "nothing") and ('id="causal"' in page) != said
    assert ("sinklab patch RUN --overwrite" in words(page)) == said
    assert (tmp_path / "figures/fig6-causal-effects.svg").is_file() != said


def test_the_terminals_lines_are_those_of_the_page(tmp_path: Path) -> None:
    causal = causal_of(tmp_path)
    nop, broadcast = class_lines(causal)
    assert nop.startswith("The NOP heads") and broadcast.startswith("The broadcast heads") and "<" not in nop
    assert nop[1:-1] in words(str(verdict_sentence(causal))) and broadcast[1:-1] in words(str(verdict_sentence(causal)))


def test_the_verdict_counts_the_heads_of_the_blocks_that_it_speaks_of(tmp_path: Path) -> None:
    first = Edited(layer=0, head=5, named="broadcast", behaves="neither")
    later = [Edited(layer=10, head=head, named="broadcast", behaves="broadcast", images=1) for head in (2, 3)]
    causal = causal_of(tmp_path, [first, *later])
    verdicts = causal.verdicts
    own = (verdicts["level"] == "class") & (verdicts["blocks"] == "0")
    verdicts.loc[own, ["verdict", "agrees", "reason"]] = ["neither", "False", ""]
    said = "The broadcast head of layer 0 behaves like neither, against what was observed (one head)."
    assert class_lines(causal)[1] == said
    finding = class_findings(causal)[1]
    assert "In layer 0 the head observed as a broadcast behaves like neither class when edited (1 head" in words(
        finding["lead"]
    )
    assert "over the images of the one head in layer 0," in finding["numbers"]
    figure = causal_figures.effects_figure(causal)
    assert figure is not None and "95 % intervals over images, as each is of one head" in figure.reading


def test_heads_of_layer_0_are_not_counted_to_a_verdict_on_later_layers(tmp_path: Path) -> None:
    line = class_lines(causal_of(tmp_path))[0]
    assert line == "The NOP heads of layers ≥ 1 behave as NOPs (2 of 4 agree, 1 does not, 1 undecided)."


def test_intervals_of_several_heads_are_said_to_be_over_heads(tmp_path: Path) -> None:
    figure = causal_figures.effects_figure(causal_of(tmp_path))
    assert figure is not None and "95 % intervals over heads;" in figure.reading


@pytest.mark.parametrize(("run", "whole", "saves"), [(312, 288, False), (288, 288, False), (100, 288, True)])
def test_passes_are_compared_only_where_some_were_saved(tmp_path: Path, run: int, whole: int, saves: bool) -> None:
    timings = {"blocks_run": run, "blocks_whole": whole}
    said = dict(method_facts(causal_of(tmp_path, timings=timings)))["Time"]
    assert said.startswith(f"{run} passes of an image through a layer") and ("times as many" in said) == saves
