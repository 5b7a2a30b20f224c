"""Values that edits take from other images: read once from unedited forwards, kept in the run folder.

Letters: G images of a group, H heads, N tokens, D head dim, C model dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError
from sinklab.hooks.manager import HookManager, Reader
from sinklab.interventions.effect import exact

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow
    from torch import Tensor

    from sinklab.handle import Model
    from sinklab.hooks.seam import AttentionCall
    from sinklab.hooks.site import Site

CANCELLED = 1e-12
ON_CIRCLE = 2e-2
"""bfloat16 has eight bits."""
PATCHES = "patches"
"""The row of an image's mean final patch token; its layer and head are −1."""


def value_schema() -> pyarrow.Schema:
    """Columns of `effects/values/part-*.parquet`: a vector [D] or, for "patches", [C], in float64."""
    import pyarrow as pa

    columns = {"image": pa.string(), "image_index": pa.int64(), "layer": pa.int16(), "head": pa.int16()}
    columns |= {"what": pa.string(), "for_index": pa.int64(), "key": pa.int32(), "vector": pa.list_(pa.float64())}
    return pa.schema(list(columns.items()))


def circular_mean(values: Sequence[np.ndarray]) -> np.ndarray:
    """The mean phases of unit numbers, each [D] with all cosines first, as unit numbers.

    Where the numbers of a phase cancel it has no mean: 0 is taken.
    """
    import numpy as np

    cos, sin = np.split(np.mean(values, axis=0), 2)
    angle = np.where(np.hypot(cos, sin) > CANCELLED, np.arctan2(sin, cos), 0.0)
    mean = np.concatenate([np.cos(angle), np.sin(angle)])
    require_on_circle(mean, "the mean")
    return mean


def require_on_circle(value: np.ndarray, of: str) -> None:
    """Raise InputError unless every phase of a value [D] is of modulus 1, to the rounding of half precision."""
    import numpy as np

    off = float(np.abs(np.hypot(*np.split(value, 2)) - 1).max())
    if not off <= ON_CIRCLE:
        raise InputError(f"A value that should be phases is off the circle by {off:.1e}: that of {of}.")


class ValueReader(Reader):
    """v at some keys of some heads: {(image's place in the group, layer, head, key): [D] float64 on the CPU}."""

    def __init__(self, places: Sequence[tuple[int, int, int, int]]) -> None:
        self.places: dict[int, list[tuple[int, int, int]]] = {}
        for image, layer, head, key in places:
            self.places.setdefault(layer, []).append((image, head, key))
        self.found: dict[tuple[int, int, int, int], Tensor] = {}

    def attention(self, site: Site, call: AttentionCall) -> None:
        """Keep the values of this layer's places."""
        own = self.places.get(site.layer, [])
        if own:
            images, keys = [image for image, _, _ in own], [key for _, _, key in own]
            kv = [call.kv_head[head] for _, head, _ in own]
            values = call.v[images, kv, keys].detach().cpu().double()
            for (image, head, key), value in zip(own, values, strict=True):
                self.found[image, site.layer, head, key] = value


def collect(
    model: Model, pixels: Tensor, images: Mapping[int, str], wanted: pd.DataFrame, tokens: Sequence[int]
) -> pd.DataFrame:
    """The rows of a group, pixels [G 3 H W]: its wanted values, and each image's mean final token over `tokens`.

    `images` are the group's, index → id, in the order of the pixels; `wanted` has rows of some of them.
    """
    import pandas as pd

    place = {index: number for number, index in enumerate(images)}
    columns = ["image_index", "layer", "head", "key"]
    places = [(place[index], *rest) for index, *rest in wanted[columns].itertuples(index=False, name=None)]
    reader = ValueReader(places)
    layers = sorted(reader.places)
    if layers:
        with HookManager(model, reader, layers=layers) as hooks:
            final = hooks.run(pixels)
    else:
        final = model(pixels)
    vectors = [reader.found[one].numpy() for one in places]
    found = wanted.assign(vector=pd.Series(vectors, index=wanted.index, dtype=object))
    means = list(exact(final[:, list(tokens)]).mean(1).cpu().numpy())
    whole = {"image_index": list(images), "layer": -1, "head": -1, "what": PATCHES, "for_index": -1, "key": -1}
    table = pd.concat([found, pd.DataFrame(whole | {"vector": means})], ignore_index=True)
    return table.assign(image=table["image_index"].map(dict(images)))


class Values:
    """What was collected, by name; the means are taken here, in float64."""

    def __init__(self, table: pd.DataFrame | None, held_out: Sequence[int], *, phases: bool = False) -> None:
        """`table` has the columns of `value_schema`; `held_out` are the image_index of those that give the means.

        `phases`: values are cosines and sines, and means are circular. InputError for values that are off the circle.
        """
        import numpy as np

        self._vectors: dict[tuple[Any, ...], np.ndarray] = {}
        sums: dict[tuple[int, int], list[np.ndarray]] = {}
        self.means: dict[tuple[int, int], np.ndarray] = {}
        """(layer, head) → μ [D] over the held-out events."""
        self.counts: dict[tuple[int, int], int] = {}
        if table is None or not len(table):  # nothing was collected, or nothing was to be
            return
        means_from = set(held_out)
        ordered = table.sort_values(["image_index", "layer", "head", "what", "for_index"], kind="stable")
        columns = ["image_index", "layer", "head", "what", "for_index", "vector"]
        for index, layer, head, what, other, vector in ordered[columns].itertuples(index=False):
            kept = np.asarray(vector, dtype="float64")
            self._vectors[what, index, layer, head, other] = kept
            if what == "sink" and index in means_from:
                sums.setdefault((layer, head), []).append(kept)
        if phases:
            for (what, index, layer, head, _), kept in self._vectors.items():
                if what != PATCHES:
                    require_on_circle(kept, f"input {index} in head {layer}:{head}")
        mean = circular_mean if phases else (lambda own: np.mean(own, axis=0))
        self.means = {pair: mean(own) for pair, own in sums.items()}
        self.counts = {pair: len(own) for pair, own in sums.items()}

    def sink(self, index: int, layer: int, head: int) -> np.ndarray | None:
        """v at the image's own sink, if it was collected."""
        return self._vectors.get(("sink", index, layer, head, -1))

    def patches(self, index: int) -> np.ndarray | None:
        """The image's mean final patch token."""
        return self._vectors.get((PATCHES, index, -1, -1, -1))

    def of(self, source: str, layer: int, head: int, index: int) -> np.ndarray:
        """The value that a member of the design takes; InputError if it is not there."""
        name = ("ordinary", layer, head, index) if source == "ordinary" else (source, index, layer, head)
        found: np.ndarray | None
        if source == "mean":
            found = self.means.get((layer, head))
        elif source == "ordinary":
            found = self._ordinary().get((index, layer, head))
        else:
            found = self.sink(index, layer, head)
        if found is None:
            raise InputError(f"The value {name} was not collected: remove effects/ and patch again.")
        return found

    def _ordinary(self) -> dict[tuple[int, int, int], np.ndarray]:
        if not hasattr(self, "_by_recipient"):
            self._by_recipient = {
                (other, layer, head): vector
                for (what, _, layer, head, other), vector in self._vectors.items()
                if what == "ordinary"
            }
        return self._by_recipient
