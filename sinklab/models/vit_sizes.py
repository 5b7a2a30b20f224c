"""The paper's sizes of vision transformer, and a small one: numbers only, so that naming one loads nothing."""

from __future__ import annotations

SIZES: dict[str, dict[str, int]] = {
    "S": {"dim": 384, "depth": 12, "heads": 6},
    "B": {"dim": 768, "depth": 12, "heads": 12},
    "L": {"dim": 1024, "depth": 24, "heads": 16},
    "G": {"dim": 1536, "depth": 40, "heads": 16},
    "tiny": {"dim": 64, "depth": 6, "heads": 4, "image": 64, "patch": 8},
}
