"""Lets tests say `import reference`: this folder holds what several test files share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
