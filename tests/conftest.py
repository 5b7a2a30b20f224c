"""Lets tests say `import reference`: this folder holds what several test files share.

One thread: tiny operations, where cores are shared, cost most when threads wait for each other.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in every process that is started
sys.path.insert(0, str(Path(__file__).parent))
