"""A finished run judged by another rule or definition: its folder then tells one truth, the new one, in every file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from command_line import PICTURE, in_process, write_checkpoint, write_pictures

import sinklab
from sinklab.errors import InputError
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.rule import SinkRule

OWN = SinkDefinition(name="generous", axis="value_ratio_out", nop=0.97, broadcast=1.02)
RULE = SinkRule.mass(0.3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> sinklab.Model:
    return sinklab.load(str(write_checkpoint(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), 6)


def files(run: sinklab.Diagnosis) -> set[str]:
    return {path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()}


def test_a_definition_of_ones_own_is_in_every_file_of_its_run(
    model: sinklab.Model, pictures: Path, tmp_path: Path
) -> None:
    run = sinklab.diagnose(model, pictures, tmp_path / "run", size=PICTURE, rule=RULE, definition=OWN)
    expected = OWN.classify(run.sinks)
    assert {"nop", "broadcast"} <= set(expected)
    assert run.config["definition"] == run.summary["definition"] == OWN.as_dict()
    assert run.sinks["class_generous"].tolist() == expected.tolist()
    assert {"class_causal", "class_counts"} <= set(run.sinks.columns)
    assert run.summary["by_definition"]["generous"]["nop"]["total"] == (expected == "nop").sum()

    shown = pd.read_parquet(run.path / "overlays/columns.parquet").drop_duplicates(["image", "layer", "head"])
    keys = ["image", "layer", "head"]
    both = shown.merge(run.sinks[[*keys, "class_generous"]], on=keys)
    assert len(both) == len(shown) > 0 and (both["class"] == both["class_generous"]).all()

    assert {"class_generous", "class_causal", "class_counts"} <= set(run.table("heads"))
    assert "nop_generous" in run.table("table15")
    assert set(run.table("table14")["definition"]) == {"generous", "causal", "counts"}
    grid = run.table("sensitivity")
    published = grid[grid["published"] & (grid["definition"] == "generous")]
    assert published["nop"].sum() == (expected == "nop").sum()
    page = (run.path / "report.html").read_text()
    assert "By the definition “generous”" in page and page.count('class="own"') >= 6
    for name in ("fig7-value-and-rank", "fig7-value-and-rank-causal", "fig7-value-and-rank-counts"):
        assert f'id="{name}"' in page and (run.path / f"figures/{name}.svg").is_file()

    (run.path / "report.html").unlink()
    assert in_process("report", run.path).returncode == 0
    assert (run.path / "report.html").read_text() == page


def test_a_published_name_with_other_thresholds_is_refused_before_the_scan() -> None:
    with pytest.raises(InputError, match="'causal' belongs to the published definition"):
        replace(SinkDefinition.causal(), nop=0.1)


def test_a_definition_by_a_column_that_is_no_value_ratio_is_refused_before_the_scan(
    model: sinklab.Model, pictures: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="'sharp' goes by inflow"):
        sinklab.diagnose(
            model, pictures, tmp_path / "run", size=PICTURE, definition=SinkDefinition(name="sharp", axis="inflow")
        )
    assert not (tmp_path / "run").exists()


def test_a_run_of_old_that_kept_a_name_alone_is_reported(model: sinklab.Model, pictures: Path, tmp_path: Path) -> None:
    run = sinklab.diagnose(
        model, pictures, tmp_path / "run", size=PICTURE, rule=RULE, definition="counts", report=False
    )
    config = json.loads((run.path / "run.json").read_text()) | {"definition": "counts"}
    (run.path / "run.json").write_text(json.dumps(config))
    assert "By the definition “counts”" in sinklab.open_run(run.path).report().read_text()


def test_a_run_judged_again_holds_the_files_of_a_run_judged_so_at_once(
    model: sinklab.Model, pictures: Path, tmp_path: Path
) -> None:
    again = sinklab.diagnose(model, pictures, tmp_path / "a", size=PICTURE, rule=SinkRule.mass(0.2), definition=OWN)
    assert any(name.startswith("figures/overlay-") for name in files(again))
    judged = {"rule": SinkRule.mass(0.9), "definition": "counts"}
    again = sinklab.diagnose(model, pictures, tmp_path / "a", size=PICTURE, resume=True, **judged)
    atonce = sinklab.diagnose(model, pictures, tmp_path / "b", size=PICTURE, **judged)
    assert files(again) == files(atonce)
    for name in files(atonce) - {"run.json"}:
        if not name.startswith(("heads/", ".")) and name != "report.html":
            assert (again.path / name).read_bytes() == (atonce.path / name).read_bytes(), name


def test_a_report_that_tells_of_another_rule_does_not_outlive_it(
    model: sinklab.Model, pictures: Path, tmp_path: Path
) -> None:
    run = sinklab.diagnose(model, pictures, tmp_path / "run", size=PICTURE, rule=SinkRule.mass(0.2))
    same = sinklab.diagnose(
        model, pictures, tmp_path / "run", size=PICTURE, rule=SinkRule.mass(0.2), resume=True, report=False
    )
    assert (same.path / "report.html").is_file()  # nothing changed, so it still holds
    sinklab.diagnose(model, pictures, tmp_path / "run", size=PICTURE, rule=RULE, resume=True, report=False)
    left = files(run)
    assert "report.html" not in left and not any(name.startswith("figures/") for name in left)
    assert {name for name in left if name.startswith("tables/")} == {"tables/spectrum.csv"}


def test_what_a_run_took_stands_when_there_was_nothing_left_to_do(
    model: sinklab.Model, pictures: Path, tmp_path: Path
) -> None:
    before = sinklab.diagnose(model, pictures, tmp_path / "run", size=PICTURE, report=False).config["timings"]
    after = sinklab.diagnose(model, pictures, tmp_path / "run", size=PICTURE, report=False, resume=True)
    assert after.config["timings"] == before and before["images"] == 6 and before["seconds"] > 0


@pytest.mark.parametrize("rule", [("strict", "--epsilon", "0.4"), ("mass",)], ids=lambda rule: rule[0])
def test_a_run_counted_at_another_attention_can_be_judged_by_the_rules_that_do_not_count(
    pictures: Path, tmp_path: Path, rule: tuple[str, ...]
) -> None:
    model = write_checkpoint(tmp_path / "model")
    words = ("diagnose", model, pictures, "-o", tmp_path / "run", "--size", PICTURE, "--device", "cpu", "--no-report")
    assert in_process(*words, "--attention", "0.6").returncode == 0
    counted = sinklab.open_run(tmp_path / "run").heads
    ended = in_process(*words, "--resume", "--rule", *rule)
    assert ended.returncode == 0, ended.stderr
    run = sinklab.open_run(tmp_path / "run")
    assert run.config["rule"]["name"] == rule[0] and run.config["rule"]["attention"] == 0.6  # Table 15 says it so
    pd.testing.assert_frame_equal(run.heads, counted, check_exact=True)

    refused = in_process(*words, "--resume")  # relaxed, which would need queries counted at 0.5
    assert refused.returncode == 2 and "--attention 0.6 → 0.5" in refused.stderr
    assert in_process(*words, "--resume", "--attention", "0.6").returncode == 0
