"""Pages that several tests read: made once, because drawing figures takes a second."""

from __future__ import annotations

import pytest
from synthetic_effects import write_effects
from synthetic_run import SavedRun, synthetic_run

from sinklab.reports.page import write_report

NASTY = ('<b>&"x.png', "folder/it's $x$.png", "日本.png", "javascript:alert(1).png")


@pytest.fixture(scope="session")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """Both classes, a head that is not finite, skipped images, file names that want to be markup; page written."""
    skipped = [{"image": "<script>alert(1)</script>.jpg", "reason": "truncated & unreadable"}]
    run = synthetic_run(tmp_path_factory.mktemp("full"), images=NASTY, broken=((0, 1),), skipped=skipped)
    write_report(run)
    return run


@pytest.fixture(scope="session")
def quiet_run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """No head sinks; page written."""
    run = synthetic_run(tmp_path_factory.mktemp("quiet"), plants=())
    write_report(run)
    return run


@pytest.fixture(scope="session")
def patched_run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """NOP and broadcast heads that were edited: most agree, one does not, one is undecided; page written."""
    run = write_effects(synthetic_run(tmp_path_factory.mktemp("patched")), classifier=True)
    write_report(run)
    return run
