"""From a matplotlib figure to bytes on disk and to markup in the page, the same bytes on every run.

A figure saved to disk keeps its light colours on a white ground. One inside the page has its colours replaced by CSS
variables and its ids made unique, so that several figures can stand in one document and follow its theme.
"""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING

from sinklab.reports.palette import CSS_VARIABLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PNG_DPI = 160


def svg_markup(figure: Figure, name: str) -> str:
    """The figure as SVG text; text stays text, and ids come from `name` instead of a random salt."""
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return re.sub(r"[ \t]+\n", "\n", written.getvalue())


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG on white at PNG_DPI, without a date or a version inside."""
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=PNG_DPI, facecolor="white", metadata={"Software": None})
    return written.getvalue()


def inline_svg(markup: str, name: str, alt: str) -> str:
    """An SVG that may stand inside the page: themed, transparent, scaled by its box, with `alt` as its label."""
    body = markup[markup.index("<svg") :]
    opening, body = body.split(">", 1)
    view_box = re.search(r'viewBox="([^"]+)"', opening)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # The first patch of a figure is its ground; the page's card lies there instead.
    body = re.sub(r'<g id="patch_1">.*?</g>', "", body, count=1, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', body)
    for colour, variable in CSS_VARIABLE.items():
        body = body.replace(colour, f"var({variable})")
    box = view_box.group(1) if view_box else "0 0 1 1"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box}" '
        f'role="img" aria-label="{escape(alt)}">{body.strip()}'
    )
