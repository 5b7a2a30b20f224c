"""A head's photographs as one PNG for use outside the page: names, the sink's mark, and the colours' scale in it."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

from sinklab.reports.overlays import Example, HeadExamples, opacity
from sinklab.reports.palette import CLASS_NAME, HEAT_RAMP, INK, MUTED, blend, rgb

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

SIDE, GAP, LINE = 280, 16, 18
SINK = "#00b8d4"
SCALE = (200, 10)


def overlay_png(shown: HeadExamples) -> bytes:
    """The crops above, the same under their heat below, with file names, the sink's token and a scale of attention."""
    from PIL import Image, ImageDraw

    across = max(len(shown.examples), 2)
    top, under = GAP + 2 * LINE, GAP + 2 * LINE + 2 * SIDE + GAP // 2
    sheet = Image.new("RGB", ((SIDE + GAP) * across + GAP, under + 2 * LINE + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    title = f"layer {shown.layer}, head {shown.head}: {CLASS_NAME.get(shown.label, shown.label)}"
    title += f", sunk in {shown.events} of {shown.images}"
    pen.text((GAP, GAP - 4), title, fill=INK, font_size=15)
    _scale(sheet, pen, (sheet.width - GAP - SCALE[0], GAP + LINE // 2))
    for place, example in enumerate(shown.examples):
        left = GAP + place * (SIDE + GAP)
        _panels(sheet, pen, example, (left, top))
        pen.text((left, under), fitting(pen, example.photograph.image, SIDE, 13), fill=INK, font_size=13)
        mark = left
        if example.box is None:  # the sink has no place in the picture: its mark stands beside its name
            pen.rectangle((left, under + LINE + 1, left + 12, under + LINE + 13), outline=SINK, width=3)
            mark += LINE
        pen.text((mark, under + LINE), fitting(pen, f"sink: {example.sink}", SIDE - LINE, 13), fill=MUTED, font_size=13)
    written = io.BytesIO()
    sheet.save(written, format="PNG")
    return written.getvalue()


def fitting(pen: ImageDraw, words: str, width: float, size: float) -> str:
    """The words, or their end after "…", so that they are no wider than `width` pixels: a name's end tells it apart."""
    if pen.textlength(words, font_size=size) <= width:
        return words
    while len(words) > 1 and pen.textlength("…" + words, font_size=size) > width:
        words = words[1:]
    return "…" + words


def _scale(sheet: Image, pen: ImageDraw, corner: tuple[int, int]) -> None:
    """0 to 1 in the heat's colours, as they look on a mid grey picture."""
    x, y = corner
    pen.text((x, y - LINE + 2), "attention given to the sink", fill=MUTED, font_size=11)
    for step in range(SCALE[0]):
        share = step / (SCALE[0] - 1)
        cover = opacity(share)
        heat = [round(128 * (1 - cover) + channel * cover) for channel in rgb(blend(HEAT_RAMP, share))]
        pen.line((x + step, y, x + step, y + SCALE[1]), fill=(heat[0], heat[1], heat[2]))
    for share, anchor in ((0.0, "la"), (0.5, "ma"), (1.0, "ra")):
        pen.text((x + share * (SCALE[0] - 1), y + SCALE[1] + 1), f"{share:g}", fill=MUTED, font_size=11, anchor=anchor)


def _panels(sheet: Image, pen: ImageDraw, example: Example, corner: tuple[int, int]) -> None:
    """The crop, and below it the grey one with heat and frame."""
    from PIL import Image

    photograph = _opened(example.photograph.uri).convert("RGB")
    scale = SIDE / max(photograph.size)
    size = (round(photograph.width * scale), round(photograph.height * scale))
    x, y = corner
    for row, panel in enumerate((photograph, _composed(photograph, example))):
        sheet.paste(panel.resize(size, Image.Resampling.LANCZOS), (x, y + row * (SIDE + GAP // 2)))
    if example.box is not None:
        left, high, wide, tall = (each * scale for each in example.box)
        left, high = x + left, y + SIDE + GAP // 2 + high
        pen.rectangle((left - 2, high - 2, left + wide + 2, high + tall + 2), outline="#00e5ff", width=3)


def _composed(photograph: Image, example: Example) -> Image:
    """The grey photograph with its heat map on it."""
    from PIL import Image

    grey = photograph.convert("L").convert("RGBA")
    extent = (round(example.extent[0]), round(example.extent[1]))
    grey.alpha_composite(_opened(example.heat_uri).resize(extent, Image.Resampling.NEAREST))
    return grey.convert("RGB")


def _opened(uri: str) -> Image:
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1])))
