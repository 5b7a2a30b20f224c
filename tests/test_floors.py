"""The architecture, as a test: who may import whom, how long a file may be, and what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import sinklab

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sinklab"
FLOORS = {
    **dict.fromkeys(
        (
            "cli",
            "cli_diagnose",
            "cli_patch",
            "cli_train",
            "cli_train_lm",
            "cli_train_vit",
            "cli_evaluate",
            "cli_compare",
            "comparison",
            "board",
            "__main__",
            "diagnosis",
            "patching",
            "reopened",
            "trained",
            "watching",
        ),
        5.0,
    ),
    "reports": 4.0,
    "interventions": 3.0,
    **dict.fromkeys(("sinks", "training"), 2.0),
    "handle": 1.5,
    "inputs": 1.6,
    **dict.fromkeys(("models", "data", "hooks"), 1.0),
    **dict.fromkeys(
        ("run", "config", "device", "parts", "sealed", "atomic", "settings", "errors", "terminal", "terminal_training"),
        0.0,
    ),
}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, full name) of every sinklab module or name that a module's text imports, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "sinklab")
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*above, *([node.module] if node.module else [])])
            if home.split(".")[0] == "sinklab":
                yield from ((node.lineno, f"{home}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            yield from ((node.lineno, name) for name in names if name.split(".")[0] == "sinklab")


def home_of(name: str) -> str | None:
    """The module or package right below sinklab that a dotted name belongs to; None for the package itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else None


def allowed(importer: str, target: str) -> bool:
    """May `importer` import `target`? Downwards, within itself, and among the modules of the lowest and top floors."""
    if importer == target or FLOORS[target] < FLOORS[importer]:
        return True
    return FLOORS[target] == FLOORS[importer] and FLOORS[importer] in (0.0, 5.0)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_import_goes_down_or_stays_at_home(path: Path) -> None:
    places = path.relative_to(PACKAGE).with_suffix("").parts
    assert places[0] in FLOORS, f"{places[0]} has no floor: give it one in this test and in the design"
    wrong = []
    for line, name in imported(path.read_text(), ".".join(("sinklab", *places[:-1]))):
        target = home_of(name)
        if target is None and name != "sinklab.__version__":
            wrong.append(f"line {line} imports {name}: import the module itself, not the package's front door")
        elif target is not None and not allowed(places[0], target):
            wrong.append(f"line {line} imports {name}: floor {FLOORS[places[0]]:g} may not reach {FLOORS[target]:g}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import sinklab.cli", ["sinklab.cli"]),
        ("from sinklab.hooks import seam, site", ["sinklab.hooks.seam", "sinklab.hooks.site"]),
        ("def f():\n    from ..reports import page", ["sinklab.reports.page"]),
        ("if TYPE_CHECKING:\n    from .scan import scan", ["sinklab.sinks.scan.scan"]),
        ("import_module('sinklab.cli')", ["sinklab.cli"]),
        ("import sinklabs, torch", []),
    ],
)
def test_imports_are_found_wherever_they_stand(text: str, names: list[str]) -> None:
    assert [name for _, name in imported(text, "sinklab.sinks")] == names


def test_upward_and_sideways_imports_are_told_apart_from_downward_ones() -> None:
    assert allowed("cli", "reports") and allowed("handle", "models") and allowed("run", "parts")
    assert allowed("cli", "diagnosis") and allowed("sinks", "sinks")
    assert not allowed("models", "hooks") and not allowed("hooks", "data") and not allowed("sinks", "reports")
    assert not allowed("models", "handle") and not allowed("run", "models") and not allowed("sinks", "training")


def test_the_public_names_are_few_and_all_resolve() -> None:
    assert len(sinklab.__all__) <= 25
    assert len(set(sinklab.__all__)) == len(sinklab.__all__)
    assert [name for name in sinklab.__all__ if getattr(sinklab, name, None) is None] == []
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sinklab.no_such_name


@pytest.mark.parametrize("path", [PACKAGE / "__init__.py", *SOURCES], ids=lambda path: path.stem)
def test_no_file_is_longer_than_three_hundred_and_twenty_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 320


def test_no_module_has_a_name_that_says_nothing() -> None:
    said_nothing = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
    assert not [path for path in PACKAGE.rglob("*") if path.stem.lower() in said_nothing]


def test_no_file_holds_a_path_of_the_machine_that_it_was_written_on() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    personal = re.compile(rf"(?<![\w.~-])/(?:{'|'.join(('work', 'home', 'root'))})/")
    found = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in content and (match := personal.search(content.decode("utf-8", "replace"))):
            found.append(f"{name}: {match[0]}")
    assert not found
