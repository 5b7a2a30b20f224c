"""What the sinks of a network do while it is trained: one batch attached, counted, detached.

`training` knows nothing of sinks: it is given `sink_scores`, and calls it now and then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def sink_scores(network: nn.Module, pixels: Tensor) -> dict[str, float]:
    """Of one batch [B 3 S S] of a network of `models.vit`: sink events an image in all blocks but 0, by class, under
    the relaxed and the strict rule and the causal definition, and each layer's largest mean inflow of a head.

    Keys: relaxed_nop, relaxed_broadcast, relaxed_intermediate, strict_… alike, max_inflow_LAYER.
    """
    from sinklab.data.images import Batch
    from sinklab.data.transform import ImageTransform
    from sinklab.hooks.manager import HookManager
    from sinklab.hooks.site import find_sites
    from sinklab.sinks.classify import SinkDefinition
    from sinklab.sinks.counts import counts_per_image
    from sinklab.sinks.reader import StatisticsReader
    from sinklab.sinks.rule import SinkRule
    from sinklab.sinks.scan import head_rows

    reader = StatisticsReader(find_sites(network), device=pixels.device)
    with HookManager(network, reader) as hooks:
        hooks.run(pixels)
        layers, found, tokens = reader.take()
    names = [str(number) for number in range(len(pixels))]
    batch = Batch(number=0, indices=list(range(len(pixels))), ids=names, pixels=pixels, skipped=[])
    height, width = pixels.shape[-2:]
    shown = ImageTransform(  # only its size is read
        height=height,
        width=width,
        scale=(height, width),
        keep_aspect=True,
        interpolation="bicubic",
        mean=(0,) * 3,
        std=(1,) * 3,
    )
    own: Any = network
    heads = head_rows(batch, layers, found, tokens, own.tokens, shown)
    rules, definition = {"relaxed": SinkRule.relaxed(), "strict": SinkRule.strict()}, SinkDefinition.causal()
    scores: dict[str, float] = {}
    for name, rule in rules.items():
        counted = counts_per_image(heads, [rule], [definition])
        rows = counted[(counted["blocks"] == "1+") & (counted["kind"] == "all") & (counted["class"] != "all")]
        scores |= {
            f"{name}_{label}": float(value) for label, value in zip(rows["class"], rows["per_image"], strict=True)
        }
    inflow = heads.groupby(["layer", "head"])["inflow"].mean().groupby("layer").max()
    return scores | {f"max_inflow_{layer}": float(value) for layer, value in inflow.items()}
