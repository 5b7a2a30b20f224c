"""Where values are phases: what attention does to them by layer and head, window by window, and `tables/phase.csv`.

A pass of its own after the head table's, in whole parts (`heads/phase/`) that are shared out between ranks and taken up
again like those: no number depends on batch size, ranks, or where a kill fell.

Letters: B batch, L layers, H heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sinklab.hooks.manager import HookManager, Reader
from sinklab.parts import PartWriter, read_parts, read_rows
from sinklab.sinks.phase_measures import MEASURES
from sinklab.sinks.synchrony import PhaseCall, synchrony

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    from torch import Tensor

    from sinklab.data.images import Batch
    from sinklab.data.input_list import InputList, View
    from sinklab.handle import Model
    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site
    from sinklab.run import Run
    from sinklab.sinks.options import ScanOptions
    from sinklab.sinks.ranks import Ranks

PARTS = "heads/phase"
"""The folder of the parts in a run."""


def phase_schema() -> pyarrow.Schema:
    """Columns of `heads/phase/part-*.parquet`: one row per (image, layer, head)."""
    import pyarrow as pa

    columns = {"image": pa.string(), "image_index": pa.int64(), "layer": pa.int16(), "head": pa.int16()}
    return pa.schema(list((columns | dict.fromkeys(MEASURES, pa.float64())).items()))


class SynchronyReader(Reader):
    """`synchrony` of every phase layer of a forward pass; the tensors of one layer at a time are held."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, Tensor]] = {}
        """Layer → name → [B H] on the CPU."""
        self._seen: dict[str, Any] = {}

    def resid_pre(self, site: Site, x: Tensor) -> None:
        """θ, and v(θ)."""
        phase = site.parts.phase
        assert phase is not None, "this reader is for layers of phases"
        self._seen = {"before": x.detach(), "velocity": phase.velocity(x.detach()), "phase": phase}

    def attention(self, site: Site, call: AttentionCall) -> None:
        """The call."""
        self._seen["call"] = call

    def resid_mid(self, site: Site, x: Tensor) -> None:
        """θ with attention's increment."""
        self._seen["between"] = x.detach()

    def resid_post(self, site: Site, x: Tensor) -> None:
        """θ after the block: the layer is finished."""
        seen, self._seen = self._seen | {"after": x.detach()}, {}
        if x.device.type == "mps":  # which has no float64
            seen = {name: value if name == "phase" else value.to("cpu") for name, value in seen.items()}
        with torch.no_grad(), torch._C.DisableTorchFunction(), torch.autocast(x.device.type, enabled=False):
            self.found[site.layer] = {name: value.cpu() for name, value in synchrony(PhaseCall(**seen)).items()}


def gather_phase(
    model: Model, images: InputList, transform: View, run: Run, options: ScanOptions, ranks: Ranks
) -> None:
    """Write this rank's parts; nothing where no layer that was asked for has phases. Raises as `scan` does."""
    from sinklab.data.images import batch_numbers, batches
    from sinklab.sinks.scan import as_input, precision

    layers = [
        site.layer
        for site in model.sites
        if site.parts.phase is not None and (options.layers is None or site.layer in options.layers)
    ]
    if not layers:
        return
    fingerprint = run.config["fingerprint"]
    done = {batch for part in read_parts(run.path / PARTS, fingerprint) for batch in part.batches}
    share: dict[str, Any] = {"batch_size": options.batch_size, "rank": ranks.rank, "world": ranks.world}
    if not batch_numbers(len(images), skip_batches=done, **share):
        return
    stream = batches(images, transform, workers=0, skip_batches=done, strict=options.strict_images, **share)
    with (
        PartWriter(run.path / PARTS, fingerprint, ranks.rank, schema=phase_schema()) as parts,
        precision(options.dtype, model.device),
    ):
        for batch in stream:
            frame = None
            if batch.ids:
                reader = SynchronyReader()
                with HookManager(model, reader, layers=layers) as hooks:
                    hooks.run(as_input(model, batch.pixels))
                frame = _rows(batch, reader.found)
            parts.add(batch.number, frame, batch.skipped)


def _rows(batch: Batch, found: dict[int, dict[str, Tensor]]) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for place, (image, index) in enumerate(zip(batch.ids, batch.indices, strict=True)):
        for layer, measured in sorted(found.items()):
            numbers = {name: values[place].tolist() for name, values in measured.items()}
            for head in range(len(numbers["order"])):
                about = {"image": image, "image_index": index, "layer": layer, "head": head}
                rows.append(about | {name: values[head] for name, values in numbers.items()})
    return pd.DataFrame(rows)


def phase_table(run: Run) -> pd.DataFrame | None:
    """tables/phase.csv: per layer and head the number of finite windows, and of every measure its mean over them and
    the standard error `NAME_sem` (of several windows); None for a run whose model has no phases."""
    import numpy as np
    import pandas as pd

    rows = read_rows(read_parts(run.path / PARTS, run.config["fingerprint"]))
    if not len(rows):
        return None
    table = []
    for (layer, head), own in rows.groupby(["layer", "head"]):
        finite = own[own["order"].notna()]
        line: dict[str, Any] = {"layer": layer, "head": head, "windows": len(finite)}
        for name in MEASURES:
            line[name] = finite[name].mean()
            line[f"{name}_sem"] = finite[name].std(ddof=1) / np.sqrt(len(finite)) if len(finite) > 1 else np.nan
        table.append(line)
    return pd.DataFrame(table)
