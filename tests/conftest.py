"""Lets tests say `import reference`: this folder holds what several test files share.

One thread: tiny operations, where cores are shared, cost most when threads wait for each other.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in every process that is started
sys.path.insert(0, str(Path(__file__).parent))
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background, where a shell has Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Within, torch computes in one thread: small models are slower with more, and sums are taken in one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
