"""Photographs with the attention that each patch gives to the sink laid over them, and the sink marked.

Read from a run's `overlays/`: `columns.parquet` holds A_is for every query i of some events, `pictures.json` the crops
that the model saw. In the page a photograph is stored once and every heat map is a PNG of one pixel a patch.
"""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.reports.palette import HEAT_RAMP, blend, rgb
from sinklab.reports.saved import reading
from sinklab.reports.sections import prefix_names
from sinklab.reports.wording import fixed
from sinklab.sealed import read_sealed

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image

HEADS_SHOWN = 4
"""At most so many heads of a class are shown."""
IMAGES_SHOWN = 4
"""At most so many photographs of a head are shown."""
NEARLY_ALL = 0.995
"""Attention from which on two decimals would print 1.00."""
LARGEST_SIDE = 448
LARGEST_JPEG = 80_000
MOST_OPAQUE = 0.5
"""Opacity of the heat where all attention goes to the sink; the picture is still seen through it."""


@dataclass(frozen=True, kw_only=True)
class Photograph:
    """One crop as the model saw it, ready for the page: `uri` is a data URI, width and height are its pixels."""

    key: str
    image: str
    uri: str
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class Example:
    """One photograph under one head: heat over the patch grid, and where the sink is."""

    photograph: Photograph
    heat_uri: str
    extent: tuple[float, float]
    """Width and height, in the photograph's pixels, that the patch grid covers."""
    box: tuple[float, float, float, float] | None
    """x, y, width, height of the sink's patch; None if the sink is a prefix token."""
    sink: str
    """ "[CLS]", "register 2" or "patch at row 3, column 5"."""
    prefix: list[tuple[str, str, str]]
    """(name, attention to the sink, colour) of each prefix token as a query."""
    low: float
    median: float
    high: float

    @property
    def spread(self) -> str:
        """What the patches give the sink, in words; nothing that reads like rounding."""
        if not isfinite(self.low):
            return "what the patches give it is not known"
        if self.low >= NEARLY_ALL:
            return f"all patches give it at least {NEARLY_ALL:g} of their attention"
        return f"patches give it {fixed(self.low)} to {fixed(self.high)}, median {fixed(self.median)}"

    @property
    def alt(self) -> str:
        """What the picture shows, in words with its numbers."""
        return f"{self.photograph.image}: the sink is {self.sink}; {self.spread}."


@dataclass(frozen=True, kw_only=True)
class HeadExamples:
    """The photographs of one head, and on how many of all images it is sunk."""

    layer: int
    head: int
    label: str
    events: int
    images: int
    examples: list[Example]

    @property
    def name(self) -> str:
        """The stem of the head's files."""
        return f"overlay-{self.label}-layer{self.layer}-head{self.head}"


def read_overlays(folder: Path) -> tuple[pd.DataFrame, dict[str, Any]] | None:
    """The attention columns and {"pictures", "grid", "prefix_tokens"} of a run folder, or None if it has none."""
    columns, pictures = folder / "overlays/columns.parquet", folder / "overlays/pictures.json"
    if not columns.is_file() or not pictures.is_file():
        return None
    with reading(pictures):
        listed = json.loads(pictures.read_text(encoding="utf-8"))
        if outside := [path for path in listed["pictures"].values() if not re.fullmatch(r"overlays/[\w.-]+", path)]:
            raise ValueError(f"{outside[0]!r} is no picture of the run's")
    with reading(columns):
        table = read_sealed(columns).to_pandas().astype({"attention": "float64"})
    return (table, listed) if len(table) else None


def examples_by_head(
    folder: Path, columns: pd.DataFrame, listed: dict[str, Any], heads: pd.DataFrame, config: dict[str, Any]
) -> tuple[list[HeadExamples], list[Photograph]]:
    """The strongest heads of each class with their photographs, and the photographs used; heads is `head_table`."""
    photographs: dict[str, Photograph] = {}
    for place, (image, path) in enumerate(listed["pictures"].items()):
        if (folder / path).is_file():
            photographs[image] = _photograph(f"photograph-{place}", image, (folder / path).read_bytes())
    columns = columns[columns["image"].isin(photographs)].merge(
        heads[["layer", "head", "events", "images", "event_inflow"]], "left", ["layer", "head"]
    )
    columns = columns.sort_values(["events", "event_inflow", "layer", "head", "query"],
                                  ascending=[False, False, True, True, True], kind="stable")  # fmt: skip
    order = {"nop": 0, "broadcast": 1}
    found: list[HeadExamples] = []
    for _, rows in columns.groupby(["class", "layer", "head"], sort=False):
        first = rows.iloc[0]
        if sum(each.label == first["class"] for each in found) == HEADS_SHOWN:
            continue
        shown = list(dict.fromkeys(rows["image"]))
        examples = [_example(photographs[image], rows[rows["image"] == image], listed, config)
                    for image in sorted(shown, key=list(photographs).index)[:IMAGES_SHOWN]]  # fmt: skip
        numbers = {name: int(first[name]) for name in ("layer", "head", "events", "images")}
        found.append(HeadExamples(**numbers, label=str(first["class"]), examples=examples))
    found.sort(key=lambda each: order.get(each.label, 2))
    used = {example.photograph.key for each in found for example in each.examples}
    return found, [photograph for photograph in photographs.values() if photograph.key in used]


def _example(photograph: Photograph, rows: pd.DataFrame, listed: dict[str, Any], config: dict[str, Any]) -> Example:
    grid_rows, grid_columns = (int(each) for each in listed["grid"][photograph.image])
    prefix, sink = int(listed["prefix_tokens"]), int(rows["sink_index"].iloc[0])
    names = prefix_names(config)
    if len(names) != prefix:
        names = [f"prefix token {place}" for place in range(prefix)]
    attention = rows.set_index("query")["attention"]
    patches = [float(attention.get(prefix + place, float("nan"))) for place in range(grid_rows * grid_columns)]
    known = sorted(each for each in patches if isfinite(each))
    width, height = _extent(photograph, grid_rows, grid_columns, config)
    box, words = None, names[sink] if sink < prefix else ""
    if sink >= prefix:
        row, column = divmod(sink - prefix, grid_columns)
        cell = width / grid_columns, height / grid_rows
        box, words = (column * cell[0], row * cell[1], *cell), f"patch at row {row}, column {column}"
    return Example(
        photograph=photograph,
        heat_uri=_heat(patches, grid_rows, grid_columns),
        extent=(width, height),
        box=box,
        sink=words,
        prefix=[(names[query], fixed(float(attention[query])), _swatch(float(attention[query])))
                for query in range(prefix) if query in attention.index],
        low=known[0] if known else float("nan"),
        median=known[len(known) // 2] if known else float("nan"),
        high=known[-1] if known else float("nan"),
    )  # fmt: skip


def _swatch(attention: float) -> str:
    """The heat's colour as CSS, as strong as on the picture."""
    red, green, blue = rgb(blend(HEAT_RAMP, attention))
    return f"rgb({red} {green} {blue} / {opacity(attention):.2f})"


def _extent(photograph: Photograph, rows: int, columns: int, config: dict[str, Any]) -> tuple[float, float]:
    """What the grid covers: all of the crop, unless whole patches leave a strip at its right or lower edge."""
    patch = config.get("model", {}).get("patch_size")
    size = config.get("images", {}).get("size")
    if not isinstance(patch, list | tuple) or not isinstance(size, list | tuple) or not size[0] or not size[1]:
        return photograph.width, photograph.height
    covered = columns * patch[1] / size[1], rows * patch[0] / size[0]
    wide, high = (share if 0.5 < share < 1 else 1.0 for share in covered)
    return photograph.width * wide, photograph.height * high


def _photograph(key: str, image: str, jpeg: bytes) -> Photograph:
    from PIL import Image

    opened: Image.Image = Image.open(io.BytesIO(jpeg))
    if len(jpeg) > LARGEST_JPEG or max(opened.size) > LARGEST_SIDE:
        opened = opened.convert("RGB")
        opened.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
        written = io.BytesIO()
        opened.save(written, format="JPEG", quality=82, optimize=True)
        jpeg = written.getvalue()
    uri = "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()
    return Photograph(key=key, image=image, uri=uri, width=opened.width, height=opened.height)


def opacity(attention: float) -> float:
    """How much of the picture the heat covers: nothing where no attention is given, the more the more is."""
    return MOST_OPAQUE * min(max(attention, 0.0), 1.0)


def _heat(patches: list[float], rows: int, columns: int) -> str:
    """A PNG of one pixel a patch as a data URI; a patch without a number is clear."""
    from PIL import Image

    heat = Image.new("RGBA", (columns, rows))
    heat.putdata([(*rgb(blend(HEAT_RAMP, each)), round(255 * opacity(each))) if isfinite(each) else (0, 0, 0, 0)
                  for each in patches])  # fmt: skip
    written = io.BytesIO()
    heat.save(written, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
