"""The colours and markers of every figure and table: one meaning, one colour, throughout a report.

Orange, blue and grey for the classes, purple, teal and sand for the token kinds stay apart for the common kinds of
colour blindness; a token kind also has a marker of its own, so that no figure rests on colour alone. Figures are drawn
in the light theme's colours. Where one stands inside the page, `sinklab.reports.svg` swaps each of these colours for
the CSS variable named here, so that it follows the reader's light or dark theme.
"""

from __future__ import annotations

INK = "#1c2128"
MUTED = "#5f6873"
GRID = "#dde1e7"
PAPER = "#fefefd"
QUIET = "#c3c9d1"

CLASSES = ("nop", "broadcast", "intermediate")
CLASS_COLOUR = {"nop": "#d55e00", "broadcast": "#0072b2", "intermediate": "#7d8590"}
ON_CLASS = {"nop": "#1b2028", "broadcast": "#fefeff", "intermediate": "#1b2029"}
"""Text on a full cell of that class: dark or light, whichever reads better on it."""
CLASS_NAME = {"nop": "NOP", "broadcast": "broadcast", "intermediate": "intermediate", "none": "no event"}

ROLE = {"cls": "cls", "bos": "cls", "register": "register", "special": "register", "patch": "patch", "text": "patch",
        "token": "patch"}  # fmt: skip
"""The kind of a vision model's token that one of a sequence's looks like: no run has both. Summary, extra, ordinary."""
KINDS = tuple(ROLE)
_COLOUR = {"cls": "#aa4499", "register": "#1f9386", "patch": "#bfa23a"}
KIND_COLOUR = {kind: _COLOUR[role] for kind, role in ROLE.items()}
KIND_NAME = {"cls": "[CLS]", "register": "register", "patch": "patch", "bos": "first token", "special": "special token",
             "text": "text token", "token": "ordinary token", "none": "none"}  # fmt: skip
KIND_MARKER = {kind: {"cls": "o", "register": "D", "patch": "s"}[role] for kind, role in ROLE.items()}
KIND_GLYPH = {kind: {"cls": "●", "register": "◆", "patch": "■"}[role] for kind, role in ROLE.items()} | {"none": "–"}

MOVING, RESTING = "#6f63c9", "#a9745b"
"""What attention does to phases, and what leaves them: no class of head, so none of the classes' colours."""

CSS_VARIABLE = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--line",
    PAPER: "--card",
    QUIET: "--quiet",
    **{colour: f"--{name}" for name, colour in CLASS_COLOUR.items()},
    **{colour: f"--on-{name}" for name, colour in ON_CLASS.items()},
    **{colour: f"--{name}" for name, colour in _COLOUR.items()},
    MOVING: "--moving",
    RESTING: "--resting",
}

LAYER_RAMP = ("#d9e86b", "#a4cd4f", "#68aa48", "#357f46", "#1d5a3d")
"""Layer 0 to the last, in greens, which no class and no token kind has; light to dark to print in grey."""

HEAT_RAMP = ("#0d0a3c", "#5b1a8b", "#b5367a", "#ee6a4f", "#fba238", "#fde74c")
"""Attention 0 to 1 on a photograph: dark to light, monotone in luminance."""


def layer_colours(layers: int) -> list[str]:
    """One colour a layer, evenly spaced along LAYER_RAMP."""
    return [blend(LAYER_RAMP, position / max(layers - 1, 1)) for position in range(layers)]


def blend(ramp: tuple[str, ...], position: float) -> str:
    """The colour at `position` (0 to 1) of a ramp of hex colours, linear in sRGB."""
    position = min(max(position, 0.0), 1.0) * (len(ramp) - 1)
    left = min(int(position), len(ramp) - 2)
    share = position - left
    channels = zip(rgb(ramp[left]), rgb(ramp[left + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in channels)


def rgb(colour: str) -> tuple[int, int, int]:
    """Red, green and blue (0 to 255) of "#rrggbb"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
