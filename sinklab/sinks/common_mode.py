"""How much of what a layer adds is one and the same vector for all its tokens: attention's update, and the pathway's.

    share = E(ō²) / E(o²),  ō the mean of the update o over an image's tokens                                   (Eq. 5)

`share` is the ratio of means over all images, as the penalty has it; `share_by_image` is the mean of the images' own
ratios, with its standard error. Images whose update is not finite are left out, and `images` counts the others. Updates
are as they are added, LayerScale included; with a gate before W_O attention's is given gated (as it is added) and
ungated. "Attention Sinks", Sec. 5.

Letters: B batch, N tokens, C model dim.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from sinklab.hooks.manager import HookManager
from sinklab.hooks.reader import Reader
from sinklab.models.pathway import EPSILON, GlobalPathway

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from torch import Tensor

    from sinklab.data.input_list import InputList, View
    from sinklab.handle import Model
    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site
    from sinklab.sinks.options import ScanOptions

UPDATES = ("attention", "attention_ungated", "pathway")
COLUMNS = ("layer", "update", "share", "share_by_image", "sem", "rms", "images")


def has_common_mode(model: Model) -> bool:
    """Whether the table is written: for sinklab's own vision transformers, and whatever has a global pathway."""
    from sinklab.models.describe import inner
    from sinklab.models.vit import ViT

    return isinstance(inner(model.module), ViT) or bool(pathways_of(model))


def pathways_of(model: Model) -> dict[int, tuple[Site, GlobalPathway]]:
    """layer → its site and its global pathway, in the layers that have one."""
    return {site.layer: (site, own[0]) for site in model.sites if (own := pathways_in(site))}


def pathways_in(site: Site) -> list[GlobalPathway]:
    """The global pathways of a site's block."""
    return [part for part in site.block_module.modules() if isinstance(part, GlobalPathway)]


class CommonModeReader(Reader):
    """Collects E(ō²) and E(o²) of every image, (layer, update) → [n 2] over the forwards that it has seen."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], list[Tensor]] = {}

    def attention(self, site: Site, call: AttentionCall) -> None:
        if site.parts.gate is not None and call.z is not None:
            heads = call.z.transpose(1, 2).flatten(2).double()
            projection: Any = site.parts.projection
            update = heads @ projection.weight.detach().double().T
            update = update if projection.bias is None else update + projection.bias.detach().double()
            self.keep(site, "attention_ungated", update)

    def projected(self, site: Site, x: Tensor, update: Tensor) -> None:
        self.keep(site, "attention", update.transpose(0, 1) if site.tokens_first else update)

    def keep(self, site: Site, name: str, update: Tensor) -> None:
        """An update [B N C] before attention's LayerScale, or the pathway's with its own."""
        o = update.detach().double()
        if name != "pathway" and site.layer_scale is not None:
            o = o * site.layer_scale.detach().double()
        own = torch.stack([o.mean(1).square().mean(-1), o.square().mean((1, 2))], dim=-1)  # [B 2]
        self.found.setdefault((site.layer, name), []).append(own.cpu())


def common_mode_table(
    model: Model, images: InputList, transform: View, options: ScanOptions, measured: set[int]
) -> pd.DataFrame:
    """tables/common_mode.csv: one row a (layer, update), over the images of these positions in the list."""
    from sinklab.data.images import batches
    from sinklab.sinks.scan import as_input, precision

    reader = CommonModeReader()
    with (
        precision(options.dtype, model.device),
        HookManager(model, reader, layers=options.layers) as hooks,
        ExitStack() as stack,
    ):
        for site, pathway in pathways_of(model).values():
            if options.layers is None or site.layer in options.layers:
                stack.callback(pathway.register_forward_hook(_telling(reader, site)).remove)
        for batch in batches(images, transform, batch_size=options.batch_size):
            kept = [place for place, index in enumerate(batch.indices) if index in measured]
            if kept:
                hooks.run(as_input(model, batch.pixels[kept]))
        if not reader.found:
            hooks.expect_nothing()
    return shares_table({key: torch.cat(values) for key, values in reader.found.items()})


def _telling(reader: CommonModeReader, site: Site) -> Any:
    """A hook that tells of a pathway's update, scaled as its block scales it."""

    def hook(module: Any, args: Any, result: Tensor) -> None:
        scale = getattr(getattr(site.block_module, "ls3", None), "gamma", None)
        reader.keep(site, "pathway", result if scale is None else result * scale)

    return hook


def shares_table(found: Mapping[tuple[int, str], Tensor]) -> pd.DataFrame:
    """From E(ō²) and E(o²) of every image, (layer, update) → [n 2]."""
    import pandas as pd

    rows = []
    for (layer, name), own in sorted(found.items(), key=lambda item: (item[0][0], UPDATES.index(item[0][1]))):
        own = own[own.isfinite().all(-1)]
        if not len(own):
            rows.append(dict(zip(COLUMNS, (layer, name, *[float("nan")] * 4, 0), strict=True)))
            continue
        each = own[:, 0] / (own[:, 1] + EPSILON)
        shared, energy = own.mean(0).tolist()
        sem = float(each.std() / len(each) ** 0.5) if len(each) > 1 else float("nan")
        numbers = (shared / (energy + EPSILON), float(each.mean()), sem, energy**0.5, len(own))
        rows.append(dict(zip(COLUMNS, (layer, name, *numbers), strict=True)))
    return pd.DataFrame(rows, columns=list(COLUMNS))
