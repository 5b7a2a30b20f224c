"""`import sinklab` and `sinklab --help` are light: torch and the model libraries load where they are used."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median

import pytest

HEAVY = {"torch", "torchvision", "timm", "open_clip", "transformers", "pandas", "numpy", "pyarrow", "PIL", "matplotlib"}

REPORT = "import json, sys, time; print(json.dumps([sorted(sys.modules), time.process_time()]), file=sys.stderr)"
IMPORT = f"import sinklab; {REPORT}"
HELP = f"""
import sys
sys.argv = ["sinklab", *{{arguments!r}}]
from sinklab.cli import main
try:
    main()
except SystemExit as end:
    assert end.code in (None, 0), end.code
{REPORT}
"""


def loaded(program: str) -> tuple[set[str], float]:
    """What a fresh interpreter has loaded after a program, and the CPU seconds that it took."""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    modules, seconds = json.loads(ended.stderr.splitlines()[-1])
    return set(modules), seconds


def test_importing_the_package_loads_no_heavy_library() -> None:
    modules, _ = loaded(IMPORT)
    assert "sinklab" in modules
    assert not modules & HEAVY


@pytest.mark.parametrize(
    "arguments", [["--help"], ["diagnose", "--help"], ["doctor", "--help"], ["train", "--help"], ["models"]]
)
def test_help_and_the_list_of_names_load_no_heavy_library(arguments: list[str]) -> None:
    modules, _ = loaded(HELP.format(arguments=arguments))
    assert "sinklab.cli" in modules
    assert not modules & HEAVY


def test_a_refused_option_is_answered_before_torch_is_loaded() -> None:
    program = HELP.format(arguments=["diagnose", "--resume", "--overwrite"]).replace("(None, 0)", "(2,)")
    modules, _ = loaded(program)
    assert "torch" not in modules


def test_importing_the_package_takes_a_blink() -> None:
    def cost() -> float:
        return loaded(IMPORT)[1] - loaded(REPORT)[1]

    assert median(cost() for _ in range(3)) < 0.3


def test_help_takes_less_than_a_second_more_than_typer_itself() -> None:
    def cost() -> float:
        return loaded(HELP.format(arguments=["--help"]))[1] - loaded(f"import typer; {REPORT}")[1]

    assert median(cost() for _ in range(3)) < 1.0
