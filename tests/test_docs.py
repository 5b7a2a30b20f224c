"""The documentation says what is so: its Python runs, its options exist, its columns are all, its links lead somewhere.

In the tutorial and the how-to, blocks marked `python` run from top to bottom in one namespace, in a folder with three
pictures in photos/; the tutorial's `sinklab` commands (blocks marked `sh`) run between them.
"""

from __future__ import annotations

import inspect
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from command_line import write_pictures
from typer.testing import CliRunner

import sinklab
from sinklab.cli import app
from sinklab.hooks import site
from sinklab.sinks.table import head_schema

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = {name: {word for option in command.params for word in option.opts} for name, command in COMMANDS.items()}
TRAINED = {
    name: {word for option in command.params for word in option.opts}
    for name, command in COMMANDS["train"].commands.items()
}
OPTIONS["train"] = set().union(*TRAINED.values())
ELSEWHERE = {"--nproc-per-node", "--epochs"}
"""Options of torchrun and of benchmarks/vit_study.py."""


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(text: str, *languages: str) -> list[tuple[str, str]]:
    """(language, content) of the fenced blocks in those languages, in order; "" is a fence that names none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(language, content) for language, content in found if language in languages]


def commands(text: str) -> list[list[str]]:
    """What follows the word sinklab, for each line of a block that calls it."""
    lines = [line.strip() for _, content in blocks(text, "", "sh") for line in content.splitlines()]
    called = [line for line in lines if line.startswith("sinklab ") or " -m sinklab " in line]
    return [words[words.index("sinklab") + 1 :] for words in (shlex.split(line, comments=True) for line in called)]


def anchors(text: str) -> set[str]:
    """The names by which GitHub's headings are linked to: lower case, spaces as hyphens, no punctuation."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with pictures; classes that a page registers are forgotten afterwards."""
    write_pictures(tmp_path / "photos", 3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(site, "_registered", dict(site._registered))
    return tmp_path


def run_python(content: str, name: str, space: dict[str, Any]) -> None:
    exec(compile(content, name, "exec", dont_inherit=True), space)


def run_command(words: list[str]) -> None:
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, f"sinklab {' '.join(words)}: {ended.output}{ended.exception!r}"


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=lambda path: path.name)
def test_every_python_block_compiles(path: Path) -> None:
    for _, content in blocks(path.read_text(encoding="utf-8"), "python"):
        compile(textwrap.dedent(content), path.name, "exec", dont_inherit=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_tutorial_can_be_followed_step_by_step(workplace: Path) -> None:
    pytest.importorskip("skimage")
    space: dict[str, Any] = {}
    for language, content in blocks(page("tutorial.md"), "python", "sh"):
        if language == "python":
            run_python(content, "tutorial.md", space)
        else:
            for line in content.splitlines():
                run_command(shlex.split(line)[1:])
    assert {path.name for path in (workplace / "runs").iterdir()} == {"demo", "mine", "mine-mass"}
    assert all((run / "report.html").is_file() for run in (workplace / "runs").iterdir())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_how_tos_python_runs_from_top_to_bottom(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformer_lens")
    space: dict[str, Any] = {}
    for _, content in blocks(page("how-to.md"), "python"):
        run_python(content, "how-to.md", space)
    assert [proof.update is not None for proof in sinklab.prove(space["mine"], space["pixels"][:1])] == [True, True]
    assert set(space["reader"].norms) == {0, 1}
    assert space["values"].shape[:2] == (2, 17) and space["pattern"].shape[2:] == (17, 17)
    assert "blocks.1.attention" in capsys.readouterr().out
    maps = space["reads"].patterns
    assert set(maps) == {site.layer for site in space["small"].sites}
    assert all(torch.allclose(each.sum(-1), torch.ones(()), atol=1e-5) for each in maps.values())


def test_the_controlled_tasks_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    space: dict[str, Any] = {}
    for _, content in blocks(page("controlled-tasks.md"), "python"):
        run_python(content, "controlled-tasks.md", space)
    assert space["without"].shape == space["swapped"].shape == space["inputs"].shape
    assert "donor_state" in capsys.readouterr().out


def test_the_controlled_tasks_page_names_every_table_of_a_training(tmp_path: Path) -> None:
    from sinklab.training.toy import train_toy
    from sinklab.training.toy_config import make_config

    sizes = ["tokens=6", "dim=8", "steps=2", "batch=4", "evaluation_batches=2", "evaluation_size=8"]
    written = {
        path.name
        for kind in ("nop", "nop-branch", "broadcast", "pathway")
        for path in (train_toy(tmp_path / kind, make_config(kind, "laptop", sizes)).path / "tables").iterdir()
    }
    assert {f"tables/{name}" for name in written} == set(
        re.findall(r"`(tables/\w+\.csv)`", page("controlled-tasks.md"))
    )


def test_the_language_models_page_names_every_table_figure_part_and_ablation(tmp_path: Path) -> None:
    from sinklab.data.text import open_text
    from sinklab.models.lm_config import ABLATIONS, SIZES
    from sinklab.reports.training import write_training_report
    from sinklab.training.lm import train_lm
    from sinklab.training.lm_config import make_lm_config

    (tmp_path / "clocks.txt").write_bytes(b"the phases of many clocks meet, and one by one they agree. " * 20)
    sizes = ["steps=2", "batch=2", "context=8", "stride=8", "sample=2", "model.layers=1", "model.hidden=4"]
    configs = [make_lm_config(name, [*sizes, "model.phases=4"]) for name in ("phase-tiny", "phase-tiny+no-ffn")]
    run = train_lm(tmp_path / "run", configs, text=open_text(tmp_path / "clocks.txt"), sweep="lr")
    write_training_report(run)
    text = page("language-models.md")
    written = {f"tables/{path.name}" for path in (run.path / "tables").iterdir()}
    assert written | {"tables/sinks.csv"} == set(re.findall(r"`(tables/\w+\.csv)`", text))
    drawn = re.findall(r"<h3>(.*?)</h3>", (run.path / "report.html").read_text(encoding="utf-8"))
    assert drawn and all(title.partition(",")[0] in text for title in drawn)
    assert {*ABLATIONS, *SIZES} <= set(re.findall(r"`([\w+-]+)`", text))


def test_the_vision_training_page_names_every_table_figure_and_part_of_the_report(tmp_path: Path) -> None:
    from sinklab.reports.training import write_training_report
    from sinklab.training.vit import train_vit
    from sinklab.training.vit_config import make_config
    from sinklab.watching import sink_scores

    sizes = ["image=16", "dim=12", "depth=2", "heads=2", "views=2", "projector_hidden=8", "projector_dim=4", "slices=8"]
    sizes += ["batch=4", "epochs=1", "warmup_epochs=0.5", "procedural=8", "validation_images=4", "score_images=2"]
    configs = [make_config(name, sizes) for name in ("baseline-tiny", "global-penalty-tiny")]
    run = train_vit(tmp_path / "run", configs, score=sink_scores)
    assert run is not None
    write_training_report(run)
    text = page("vision-training.md").partition("## The report")[2].partition("\n## ")[0].replace("'", "’")
    written = {f"tables/{path.name}" for path in (run.path / "tables").iterdir()}
    assert written | {f"tables/table{number}.csv" for number in (14, 15)} == set(
        re.findall(r"`(tables/\w+\.csv)`", text)
    )
    shown = (run.path / "report.html").read_text(encoding="utf-8")
    parts = re.findall(r"<h3>(.*?)</h3>", shown) + re.findall(r'<h2 id="(?!figures|files)\w+">(.*?)</h2>', shown)
    assert len(parts) == 10 and {f"| {part} |" for part in parts} <= set(re.findall(r"(?m)^\| [^|]+ \|", text))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_is_one_of_sinklabs_with_its_own_options(path: Path) -> None:
    for words in commands(path.read_text(encoding="utf-8")):
        assert words[0] in OPTIONS, words
        named = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        own = TRAINED[words[1]] if words[0] == "train" else OPTIONS[words[0]]
        assert named <= own | ELSEWHERE, words


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_option_named_in_the_text_exists(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", prose))
    assert named <= ELSEWHERE.union(*OPTIONS.values())


def option_table() -> dict[str, tuple[str, str]]:
    """(commands, default) of each option in the reference, by its long name."""
    part = page("reference.md").partition("| option |")[2].partition("Of `patch`:")[0]
    rows = re.findall(r"^\| (`-[^|]*`) \| (\w+) \| ([^|]*)\|", part, flags=re.MULTILINE)
    return {names.split("`")[-2]: (where, default.strip(" `")) for names, where, default in rows}


def test_the_reference_lists_every_option_of_the_right_commands() -> None:
    listed = option_table()
    for name in ("diagnose", "doctor"):
        options = {word for word in OPTIONS[name] if word.startswith("--")}
        assert options == {option for option, (where, _) in listed.items() if where in (name, "both")}


def test_the_defaults_in_the_reference_are_the_programs() -> None:
    defaults = {max(option.opts, key=len): option.default for option in COMMANDS["diagnose"].params}
    for option, (_, shown) in option_table().items():
        default = defaults[option]
        if isinstance(default, bool):
            assert shown == "", option
        elif default is not None:
            assert shown == str(default), option


def test_the_thresholds_in_the_reference_are_the_programs() -> None:
    rule, listed = sinklab.SinkRule(), option_table()
    shown = [float(listed[option][1]) for option in ("--attention", "--fraction", "--epsilon", "--mass")]
    assert shown == [rule.attention, rule.fraction, rule.epsilon, rule.threshold]


def test_the_reference_describes_every_column_of_the_head_table_in_order() -> None:
    part = page("reference.md").partition("## The head table")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", part, flags=re.MULTILINE) == head_schema().names


def test_the_types_in_the_reference_are_those_of_the_schema() -> None:
    part = page("reference.md").partition("## The head table")[2].partition("\n## ")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| (\w+)", part, flags=re.MULTILINE))
    words = {"string": "text", "float": "float32"}
    assert shown == {entry.name: words.get(str(entry.type), str(entry.type)) for entry in head_schema()}


def test_the_reference_lists_the_options_of_patch() -> None:
    part = page("reference.md").partition("Of `patch`:")[2].partition("| exit code |")[0]
    rows = re.findall(r"^\| (`--[^|]*`) \| ([^|]*)\|", part, flags=re.MULTILINE)
    listed = {name: default.strip() for names, default in rows for name in re.findall(r"`(--[a-z0-9-]+)`", names)}
    options = {max(option.opts, key=len): option.default for option in COMMANDS["patch"].params}
    assert set(listed) == {name for name in options if name.startswith("--")}
    for name in ("--heads", "--class", "--per-class", "--block0", "--min-events", "--min-events-analysis", "--heldout"):
        assert listed[name] == str(options[name]), name
    for name in ("--metric", "--bootstrap", "--seed", "--rows"):
        assert listed[name] == str(options[name]), name


def test_the_reference_describes_every_column_and_edit_of_the_effects() -> None:
    from sinklab.interventions.design import EDITS
    from sinklab.interventions.measure import effect_schema

    part = page("reference.md").partition("## Effects")[2].partition("\n## ")[0]
    listed = re.findall(
        r"^\| (`[^|]*`) \| [a-z]+[a-z0-9, ]* \|", part.partition("| effect column |")[2], flags=re.MULTILINE
    )
    assert {name for names in listed for name in re.findall(r"`(\w+)`", names)} == set(effect_schema().names)
    assert re.findall(r"^\| `(\w+)` \|", part.partition("Donors are")[0], flags=re.MULTILINE) == list(EDITS)


def test_the_reference_names_everything_public() -> None:
    part = page("reference.md").partition("## Python")[2]
    assert set(sinklab.__all__) <= set(re.findall(r"`(\w+)`", part))


@pytest.mark.parametrize("name", ["load", "attach", "diagnose", "patch", "open_run", "find_images", "prove"])
def test_the_signatures_in_the_reference_name_the_parameters_in_their_order(name: str) -> None:
    (shown,) = re.findall(rf"^\| `{name}` \| `{name}\((.*?)\)` \|", page("reference.md"), flags=re.MULTILINE)
    listed = [part.partition("=")[0].strip(" *") for part in shown.split(",")]
    own = inspect.signature(getattr(sinklab, name)).parameters
    assert [part for part in listed if part not in ("", "inputs", "kwargs", "fields")] == [
        key for key, value in own.items() if value.kind not in (value.VAR_POSITIONAL, value.VAR_KEYWORD)
    ]


def test_the_reference_names_every_key_and_file_of_a_run(workplace: Path) -> None:
    model = sinklab.load("timm:vit_tiny_patch16_224", random_weights=True, image_size=32)
    run = sinklab.diagnose(model, "photos/", output="run", size=32, rule=sinklab.SinkRule.mass(0.01))
    named = set(re.findall(r"`([^`]+)`", page("reference.md")))
    assert set(run.config) <= named and set(run.summary) <= named
    assert {*run.config["model"], *run.config["images"], *run.config["options"], *run.config["timings"]} <= named
    assert {f"tables/{path.name}" for path in (run.path / "tables").iterdir()} <= named
    assert {path.name for path in run.path.iterdir() if path.is_file() and not path.name.startswith(".")} <= named


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_relative_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        assert not heading or heading in anchors(linked.read_text(encoding="utf-8")), target
