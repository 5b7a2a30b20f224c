"""For the strongest heads of each class: how much each query attends to the sink, and the photographs, if there are.

A report never runs a model, so the few attention columns that it shows are taken here, after the scan.
Letters: N tokens, D head dim.
"""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

import torch

from sinklab.data.decode import decoded
from sinklab.data.images import ImageTransform, UnreadableImage
from sinklab.hooks.manager import HookManager, Reader
from sinklab.sinks.scan import as_input, precision

if TYPE_CHECKING:
    import pandas as pd
    from PIL.Image import Image
    from torch import Tensor

    from sinklab.data.input_list import InputList, View
    from sinklab.handle import Model
    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site
    from sinklab.run import Run
    from sinklab.sinks.options import ScanOptions

HEADS = 3  # of each class
IMAGES = 4  # of each head
ROWS = 256  # queries at a time


class _ColumnReader(Reader):
    """A_is for every query, for chosen (layer, head) → s."""

    def __init__(self) -> None:
        self.wanted: dict[int, dict[int, int]] = {}
        self.columns: dict[tuple[int, int], Tensor] = {}

    def attention(self, site: Site, call: AttentionCall) -> None:
        for head, sink in self.wanted.get(site.layer, {}).items():
            kv = call.kv_head[head]
            mask = call.mask
            if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
                mask = mask[:, head : head + 1]
            one = replace(
                call, q=call.q[:, head : head + 1], k=call.k[:, kv : kv + 1], v=call.v[:, kv : kv + 1], mask=mask
            )
            blocks = (slice(start, start + ROWS) for start in range(0, call.q.shape[2], ROWS))
            column = torch.cat([one.pattern(rows)[0, 0, :, sink] for rows in blocks])
            self.columns[site.layer, head] = column.float().cpu()


def choose(sinks: pd.DataFrame, summary: dict[str, Any], definition: str) -> pd.DataFrame:
    """The events to show: for the strongest heads of NOP and broadcast, the images with the largest inflow.

    Columns image, image_index, layer, head, class, sink_index. Ties go to the earlier image.
    """
    import pandas as pd

    column = f"class_{definition}"
    strongest = summary["by_definition"][definition]["strongest_heads"]
    chosen = []
    for label in ("nop", "broadcast"):
        for head in strongest[label][:HEADS]:
            own = sinks[(sinks["layer"] == head["layer"]) & (sinks["head"] == head["head"]) & (sinks[column] == label)]
            own = own.sort_values(["inflow", "image_index"], ascending=[False, True]).head(IMAGES)
            chosen.append(own.assign(**{"class": label}))
    columns = ["image", "image_index", "layer", "head", "class", "sink_index"]
    return pd.concat(chosen, ignore_index=True)[columns] if chosen else pd.DataFrame(columns=columns)


def write_overlays(
    model: Model, images: InputList, transform: View, run: Run, options: ScanOptions, chosen: pd.DataFrame
) -> list[str]:
    """`overlays/columns.parquet`, one row per (image, layer, head, query), and the crops that the model saw.

    Sequences have no pictures. Inputs that have gone since they were measured are left out; returned are sentences
    that say so.
    """
    import pandas as pd

    reader, rows = _ColumnReader(), []
    pictures: dict[str, str] = {}
    grids: dict[str, list[int]] = {}
    gone: list[str] = []
    refs = {ref.id: ref for ref in images}
    names = [str(name) for name in chosen.columns]
    with precision(options.dtype, model.device):
        for index, same_image in chosen.groupby("image_index", sort=True):
            events: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in same_image.to_numpy()]
            image = str(events[0]["image"])
            try:
                picture, pixels = _seen(refs[image], transform)
            except UnreadableImage as error:
                among = "photographs" if isinstance(transform, ImageTransform) else f"{images.noun}s shown"
                gone.append(f"{error} It was measured, but is not among the {among}.")
                continue
            reader.columns, reader.wanted = {}, {}
            for event in events:
                reader.wanted.setdefault(event["layer"], {})[event["head"]] = event["sink_index"]
            with HookManager(model, reader, layers=sorted(reader.wanted)) as hooks:
                hooks.run(as_input(model, pixels))
            for event in events:
                column = reader.columns[event["layer"], event["head"]]
                kept = {name: event[name] for name in ("image", "layer", "head", "class", "sink_index")}
                rows.append(pd.DataFrame({**kept, "query": range(len(column)), "attention": column.numpy()}))
            if picture is None:
                continue
            pictures[image] = f"overlays/picture-{index}.jpg"
            grids[image] = list(model.tokens.grid(transform.height, transform.width))
            encoded = BytesIO()
            picture.save(encoded, "JPEG", quality=88)
            run.write_bytes(pictures[image], encoded.getvalue())
    columns = ["image", "layer", "head", "class", "sink_index", "query", "attention"]
    run.write_table("overlays/columns.parquet", pd.concat(rows) if rows else pd.DataFrame(columns=columns))
    run.write_json(
        "overlays/pictures.json",
        {"pictures": pictures, "grid": grids, "prefix_tokens": model.tokens.prefix_tokens},
    )
    for path in (run.path / "overlays").glob("picture-*.jpg"):  # of an earlier rule or definition
        if f"overlays/{path.name}" not in pictures.values():
            path.unlink()
    return gone


def _seen(ref: Any, transform: View) -> tuple[Image | None, Tensor]:
    """The picture that the model saw, None of a sequence, and the tensor with a batch of one."""
    if not isinstance(transform, ImageTransform):
        return None, transform.of(ref.content(), ref.id)[None]
    opened = decoded(ref.content(), ref.id)
    return transform.crop(opened, ref.id), transform(opened, ref.id)[None]
