"""The page: what it says for runs of every kind, that it is whole and safe, and that it is the same every time."""

from __future__ import annotations

import re
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from synthetic_run import BROADCAST, NOP, Plant, SavedRun, synthetic_heads, synthetic_run

from sinklab.reports.page import write_report
from sinklab.reports.sections import layer_sections
from sinklab.reports.tables import head_table
from sinklab.run import Run
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.rule import SinkRule
from sinklab.sinks.table import head_schema, sink_table

VOID = {"meta", "br", "img", "hr", "input", "link", "stop"}


class Outline(HTMLParser):
    """Checks that every element is closed in turn, and keeps what tests ask for."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.figures: list[dict[str, list[str]]] = []
        self.errors: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[name] for name in ("href", "src", "xlink:href") if name in given]
        if tag == "figure":
            self.figures.append({"labels": [], "links": []})
        if self.figures and "figure" in self.open:
            if given.get("role") == "img":
                self.figures[-1]["labels"].append(given.get("aria-label", ""))
            if tag == "a":
                self.figures[-1]["links"].append(given["href"])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.errors.append(f"</{tag}> at {self.getpos()} closes {self.open[-1:]}")
        else:
            self.open.pop()


def page_of(run: SavedRun) -> str:
    return (run.path / "report.html").read_text(encoding="utf-8")


def words_of(run: SavedRun) -> str:
    page = re.sub(r"<style>.*?</style>", "", page_of(run), flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())


@pytest.mark.parametrize("which", ["full_run", "quiet_run", "patched_run"])
def test_every_element_is_closed_and_every_id_is_unique(which: str, request: pytest.FixtureRequest) -> None:
    outline = Outline(page_of(request.getfixturevalue(which)))
    assert not outline.errors and not outline.open
    assert [name for name, count in Counter(outline.ids).items() if count > 1] == []


@pytest.mark.parametrize("which", ["full_run", "quiet_run", "patched_run"])
def test_nothing_is_fetched_and_every_link_leads_somewhere(which: str, request: pytest.FixtureRequest) -> None:
    run: SavedRun = request.getfixturevalue(which)
    page, outline = page_of(run), Outline(page_of(run))
    assert "default-src 'none'" in page and "<script" not in page and "@import" not in page
    later = {"run.json", "summary.json"}  # written by the run itself, not by the report
    for link in outline.links:
        if link.startswith("#"):
            assert link[1:] in outline.ids, link
        elif not link.startswith("data:image/"):
            assert link in later or (run.path / link).is_file(), link


def test_every_figure_says_what_is_seen_with_numbers_and_lies_beside_its_csv(full_run: SavedRun) -> None:
    figures = Outline(page_of(full_run)).figures
    assert len(figures) >= 7  # Figs. 4, 5, 7 twice, Lemma 3, one head of each class
    for figure in figures:
        assert figure["labels"] and all(re.search(r"\d", label) and len(label) > 40 for label in figure["labels"])
        tables = [link for link in figure["links"] if link.endswith(".csv")]
        assert tables and len(pd.read_csv(full_run.path / tables[0])) > 0


def test_every_drawn_figure_is_saved_as_svg_and_png_of_the_same_name(full_run: SavedRun) -> None:
    for name in ("fig4-token-kinds", "fig5-event-frequency", "fig7-value-and-rank", "lemma3-routes"):
        assert (full_run.path / f"figures/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (full_run.path / f"figures/{name}.svg").read_text()


def test_every_caption_states_its_images_and_events(full_run: SavedRun) -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page_of(full_run), flags=re.DOTALL)
    for caption in captions:
        assert re.search(r"n = 4 images, (6 events \(|\d events of this head \()relaxed rule", caption), caption


@pytest.mark.parametrize("name", ["heads", "table14", "sensitivity", "routes"])
def test_every_table_names_its_rule_and_its_definitions(full_run: SavedRun, name: str) -> None:
    table = pd.read_csv(full_run.path / f"tables/{name}.csv")
    assert set(table["rule"]) == {"relaxed"}
    assert "definition" in table or {"class_causal", "class_counts"} <= set(table)


def test_names_that_are_markup_stay_text(full_run: SavedRun) -> None:
    page = page_of(full_run)
    assert "<b>" not in page.replace("<summary><b>", "") and "<script>alert" not in page
    words = words_of(full_run)
    for name in ('<b>&"x.png', "folder/it's $x$.png", "日本.png", "<script>alert(1)</script>.jpg"):
        assert name in unescape(page)
    assert "truncated & unreadable" in words


def test_the_pages_counts_are_those_of_the_tables(full_run: SavedRun) -> None:
    heads = pd.read_csv(full_run.path / "tables/heads.csv")
    words = words_of(full_run)
    sinking = int((heads["events"] > 0).sum())
    assert f"{sinking} of {len(heads)} heads sink" in words and sinking == 2  # the third was planted, then broken
    table = pd.read_csv(full_run.path / "tables/table14.csv").set_index(["blocks", "definition", "kind"])
    later = table.loc[("1+", "causal", "all")]
    means = " ".join(f"{later[name]:.2f}" for name in ("nop", "broadcast", "intermediate", "all"))
    assert f"causal any {means} {later['events']}" in words


def test_a_plain_title_stands_before_the_papers_number(full_run: SavedRun, patched_run: SavedRun) -> None:
    for run in (full_run, patched_run):
        titles = re.findall(r"<figure[^>]*>\s*<h3>(.*?)</h3>", page_of(run), flags=re.DOTALL)
        assert titles and not [title for title in titles if re.match(r"(<span>)?(Fig|Table|Lemma)", title)]
    assert "The paper” is A Unifying View of Attention Sinks: From Mechanisms" in words_of(full_run)


def test_a_head_of_mixed_class_is_marked_in_the_layer_table(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, images=tuple("abcde"), plants=(NOP,), overlays=False)
    sunk = run.heads.index[(run.heads["layer"] == 1) & (run.heads["head"] == 0)]
    run.heads.loc[sunk[:2], "value_ratio_out"] = 0.3
    write_report(run)
    assert "NOP (3 of 5)" in words_of(run) and "L1H0 is a NOP in 3 of its 5 events" in words_of(run)


def test_every_term_of_the_glossary_is_used_on_the_page(full_run: SavedRun) -> None:
    page = page_of(full_run)
    place = page.index('id="glossary"')
    terms = re.findall(r"<dt>(.*?)</dt>", page[place : page.index("</dl>", place)])
    rest = re.sub(r"<style>.*?</style>|<[^>]+>", " ", page[:place], flags=re.DOTALL).lower()
    for term in terms:
        for word in re.sub(r"<[^>]+>", "", term).split(", "):
            assert word.lower().removesuffix("s") in rest, word


@pytest.mark.parametrize("scaled", [True, False], ids=["with LayerScale", "without"])
def test_layer_scale_is_spoken_of_where_there_is_one(tmp_path: Path, scaled: bool) -> None:
    run = synthetic_run(tmp_path, plants=(), overlays=False)
    run.config["model"] |= {} if scaled else {"layer_scale": None}
    write_report(run)
    words = words_of(run).replace("no LayerScale", "")
    assert ("LayerScale" in words) == scaled


def test_images_that_were_listed_and_not_measured_are_said(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, plants=(), overlays=False)
    run.config["images"]["count"] = 6
    write_report(run)
    assert "Images 4 of 6 listed images from photos" in words_of(run)


@pytest.mark.parametrize(("frequency", "said"), [(1.0, "at least 90"), (0.5, "the most frequent one does so on 50")])
def test_what_is_said_of_frequent_heads_fits_the_run(tmp_path: Path, frequency: float, said: str) -> None:
    run = synthetic_run(tmp_path, plants=(Plant(layer=1, head=0, frequency=frequency),), overlays=False)
    write_report(run)
    assert said in words_of(run)


def test_heads_that_are_not_finite_are_said_loudly(full_run: SavedRun) -> None:
    words = words_of(full_run)
    assert "1 head is not finite." in words and "layer 0, head 1: 4 of 4 images" in words
    assert 'class="alert loud"' in page_of(full_run)


def test_skipped_images_are_said_and_listed(full_run: SavedRun) -> None:
    assert "1 image was skipped and is in no number" in words_of(full_run)


def test_a_run_without_sinks_says_so_and_draws_no_sunk_heads(quiet_run: SavedRun) -> None:
    words = words_of(quiet_run)
    assert "No head sinks. In none of 4 images did any of 6 heads meet the rule" in words
    assert "(Fig. 7 of the paper) places sunk heads" in words and "no attention column to show" in words
    assert not list((quiet_run.path / "figures").glob("fig7*")) and (quiet_run.path / "tables/table15.csv").is_file()


def test_the_page_comes_in_its_promised_order(full_run: SavedRun) -> None:
    anchors = ["verdict", "provenance", "definitions", "layers", "fig4-token-kinds", "fig5-event-frequency"]
    anchors += ["fig7-value-and-rank", "counts", "sensitivity", "routes", "photographs", "glossary"]
    places = [page_of(full_run).index(f'id="{anchor}"') for anchor in anchors]
    assert places == sorted(places)


def test_the_same_run_gives_the_same_bytes_in_any_order_of_rows(tmp_path: Path) -> None:
    one = synthetic_run(tmp_path / "one")
    other = synthetic_run(tmp_path / "other")
    other.heads = other.heads.sample(frac=1, random_state=1)
    write_report(one)
    write_report(other)
    files = sorted(path.relative_to(one.path) for path in one.path.rglob("*") if path.is_file())
    different = [name for name in files if (one.path / name).read_bytes() != (other.path / name).read_bytes()]
    assert len(files) > 20 and different == []


def test_the_run_decides_which_definition_leads(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, plants=(NOP, BROADCAST), definition="counts")
    write_report(run)
    words = words_of(run)
    assert "definition “counts”. A head counts under" in words and "By the other definition, “causal”" in words
    assert "median_value_ratio_head" in pd.read_csv(tmp_path / "figures/fig7-value-and-rank.csv")


def test_a_bare_run_has_a_page(tmp_path: Path) -> None:
    """No spectrum, no overlays, and a run.json with only what counting needs."""
    run = synthetic_run(tmp_path, overlays=False)
    (tmp_path / "tables/spectrum.csv").unlink()
    run.config = {name: run.config[name] for name in ("rule", "definition")} | {"status": "running"}
    write_report(run)
    words = words_of(run)
    assert "This run is not complete." in words and "kept no spectrum" in words and "kept no attention column" in words
    assert not Outline(page_of(run)).errors and "None" not in words and " nan" not in words


@pytest.mark.parametrize(
    ("frequency", "opened"), [((1.0, 0.25), [1]), ((0.25, 0.25), [1, 2])], ids=["one is steady", "none is steady"]
)
def test_layers_with_steady_heads_stand_open_or_else_all_with_events(
    frequency: tuple[float, float], opened: list[int]
) -> None:
    plants = [Plant(layer=1, head=0, frequency=frequency[0]), Plant(layer=2, head=0, frequency=frequency[1])]
    heads = synthetic_heads(images=tuple("abcd"), layers=4, plants=plants)
    rule, definition = SinkRule.relaxed(), SinkDefinition.causal()
    sections = layer_sections(head_table(heads, sink_table(heads, rule), rule, [definition]), definition)
    assert [each["layer"] for each in sections if each["open"]] == opened


def test_many_heads_without_events_share_a_row_and_one_that_is_not_finite_keeps_its_own() -> None:
    heads = synthetic_heads(images=("a", "b"), layers=2, heads=12, plants=(NOP,), broken=((1, 5),))
    rule, definition = SinkRule.relaxed(), SinkDefinition.causal()
    section = layer_sections(head_table(heads, sink_table(heads, rule), rule, [definition]), definition)[1]
    assert [row["head"] for row in section["rows"]] == [0, 5] and len(section["heads"]) == 12
    assert section["quiet"].startswith("Heads 1–4 and 6–11: no event; mean inflow 0.")


def test_a_run_folder_of_the_real_kind_is_reported(tmp_path: Path) -> None:
    made = synthetic_run(tmp_path / "made")
    with Run.create(tmp_path / "run", settings={"options": {}}) as run:
        with run.part_writer(schema=head_schema()) as parts:
            parts.add(0, made.heads[head_schema().names])
        run.update(**{name: made.config[name] for name in ("model", "images", "rule", "definition")}, status="complete")
        page = write_report(run)
    assert page == tmp_path / "run/report.html" and Run.open(tmp_path / "run").table("table14")["events"].sum() > 0
