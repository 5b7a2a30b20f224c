"""The experiment: unedited images give the values, then every edited image gives its effects; both in whole parts.

Images are shared out between ranks one by one, and all rows of one image and layer run together, so neither the number
of ranks nor anything else about how the work is divided can change a number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.data.images import batches
from sinklab.errors import InputError, printable
from sinklab.hooks.manager import HookManager
from sinklab.interventions.choose import Choice, choose_heads
from sinklab.interventions.design import Design, Material, make_design, plan_design
from sinklab.interventions.draw import donors, held_out
from sinklab.interventions.measure import Measure, effect_schema, require_finite
from sinklab.interventions.replay import unedited
from sinklab.interventions.values import ValueReader, Values, collect, value_schema
from sinklab.parts import PartWriter, read_parts, read_rows
from sinklab.sinks.reader import StatisticsReader
from sinklab.sinks.rule import SinkRule
from sinklab.sinks.scan import as_input, head_rows, precision

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from sinklab.data.images import Batch
    from sinklab.data.input_list import InputList, View
    from sinklab.handle import Model
    from sinklab.interventions.options import PatchOptions
    from sinklab.run import Run
    from sinklab.sinks.ranks import Ranks
    from sinklab.sinks.scan import Progress

EFFECT_KEYS = ("image_index", "layer", "head", "class", "joint", "edit")
VALUE_KEYS = ("image_index", "layer", "head", "what", "for_index")


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """A model, a diagnosed run with its images, and what is to be done."""

    model: Model
    run: Run
    images: InputList
    transform: View
    options: PatchOptions
    settings: Mapping[str, Any]
    """Everything that the effects depend on."""
    fingerprint: str
    """Of the settings; parts of other settings are refused."""
    ranks: Ranks
    folder: InputList | None = None
    """Held-out images of their own, in place of a share of the run's."""
    workers: int = 0

    @property
    def definition(self) -> str:
        """Name of the definition whose classes are tested."""
        said = self.run.config["definition"]
        return str(said["name"] if isinstance(said, dict) else said)

    def choice(self) -> Choice:
        """The heads that are edited."""
        o = self.options
        if o.plan is not None:
            return Choice(heads=(), min_events=o.min_events, notes=())
        return choose_heads(
            self.run.sinks,
            self.definition,
            o.classes,
            images=int(self.run.heads["image"].nunique()),
            heads=o.heads,
            per_class=o.per_class,
            block0=o.block0,
            min_events=o.min_events,
        )

    def held_out(self) -> list[str]:
        """Ids of the run's images that are not edited; none where a folder gives the means."""
        o = self.options
        if self.folder is not None or "mean" not in o.edits or o.plan is not None:
            return []
        return held_out(self._ids()[0], o.held_out, o.seed)

    def _donors(self, ids: list[str]) -> dict[str, str]:
        """Image → donor; nobody's where the one image has no other and no edit needs one."""
        o = self.options
        if len(ids) == 1 and (o.plan is not None or not {"donor", "ordinary"} & set(o.edits)):
            return {}
        return donors(ids, o.seed)

    def _ids(self) -> tuple[list[str], dict[str, int]]:
        """Usable images in the order of the list, and their positions in it."""
        table = self.run.read_heads(["image_index", "image"]).drop_duplicates()
        return list(table["image"]), dict(zip(table["image"], table["image_index"], strict=True))

    def design(self, choice: Choice) -> Design:
        """The rows of the experiment. A held-out folder must have been measured before."""
        ids, index = self._ids()
        sinks, away = self.run.sinks, frozenset(self.held_out())
        held = sinks[sinks["image"].isin(away)]
        pairs = set(held[["layer", "head"]].itertuples(index=False, name=None))
        if self.folder is not None:
            kept = self._read("held_out", VALUE_KEYS)
            pairs = set(kept[["layer", "head"]].itertuples(index=False, name=None)) if len(kept) else set()
        tokens = self.model.tokens
        number = tokens.tokens(self.transform.height, self.transform.width)
        material = Material(
            heads=self.run.heads,
            sinks=sinks,
            ids=ids,
            index=index,
            donor=self._donors(ids),
            held_out=away,
            has_mean=frozenset((int(layer), int(head)) for layer, head in pairs),
            tokens=range(tokens.prefix_tokens, number),
            definition=self.definition,
            seed=self.options.seed,
        )
        if self.options.plan is not None:
            for edit in self.options.plan:
                edit.check(self.model.sites)
            return plan_design(material, self.options.plan, tokens)
        return make_design(material, choice, self.options.edits, joint=self.options.joint)

    def rehearse(self, design: Design | None) -> None:
        """One image, unedited and with edits that change nothing: what would end the experiment is known beforehand.

        Raises InputError for an image that cannot be read any longer, for final tokens that are not finite, for labels
        that the classifier does not have, and for a model that cannot be edited faithfully.
        """
        index = int(design.rows["image_index"].iloc[0]) if design is not None else self._ids()[1][self._ids()[0][0]]
        ref = self.images[index]
        pixels = self.transform.of(ref.content(), ref.id)[None]
        with precision(self.run.config["dtype"], self.model.device):
            pixels = as_input(self.model, pixels)
            start = unedited(self.model, pixels, [])
            require_finite(start.tokens, f"The final tokens of {printable(ref.id)} are not finite without any edit")
            self._check_labels(start.tokens)
            if design is not None:
                self._measure(design, Values(None, [])).rehearse(index, pixels)

    def _check_labels(self, tokens: Tensor) -> None:
        labels, classify = self.options.labels, self.model.loaded.classify
        if not labels:
            return
        if classify is None:
            raise InputError("Labels are for a model with a classifier, and this one has none.")
        classes = int(classify(self.model.module, tokens).shape[-1])
        wrong = next(((image, label) for image, label in labels.items() if not 0 <= label < classes), None)
        if wrong is not None:
            raise InputError(f"The label of {printable(wrong[0])} is {wrong[1]}; the classes are 0 to {classes - 1}.")
        if not set(labels) & set(self._ids()[0]):
            raise InputError(f"None of the {len(labels)} labelled images is one of the run's.")

    def sizes(self, design: Design) -> tuple[int, int]:
        """Images of this rank's share that give values, and that are edited."""
        shares = [self._giving(design), set(design.rows["image_index"])]
        first, second = (sum(number % self.ranks.world == self.ranks.rank for number in own) for own in shares)
        return first, second

    def _giving(self, design: Design) -> set[int]:
        return (set(design.rows["donor_index"]) - {-1}) | set(design.wanted["image_index"])

    # The three passes. Each may be called again after a kill, and does what is not done yet.

    def measure_folder(self, choice: Choice) -> None:
        """Held-out images of their own: v at the sink of every chosen head that is an event, by the run's rule."""
        if self.folder is None:
            return
        pairs = sorted({(head.layer, head.head) for head in choice.heads})
        layers = sorted({layer for layer, _ in pairs})
        said = {key: value for key, value in self.run.config["rule"].items() if key != "sentence"}
        rule = SinkRule(**said)
        sites = [site for site in self.model.sites if site.layer in layers]
        reader = StatisticsReader(sites, attention=rule.attention, device=self.model.device)

        def one(batch: Batch) -> pd.DataFrame:
            pixels = as_input(self.model, batch.pixels)
            with HookManager(self.model, reader, layers=layers) as hooks:
                hooks.run(pixels)
            table = head_rows(batch, *reader.take(), self.model.tokens, self.transform)
            table = table[rule.events(table)]
            mine = [pair in pairs for pair in zip(table["layer"], table["head"], strict=True)]
            table = table.loc[mine, ["layer", "head", "sink_index"]].rename(columns={"sink_index": "key"})
            places = list(table.itertuples(index=False, name=None))
            values = ValueReader(places)
            if places:
                with HookManager(self.model, values, layers=sorted(values.places)) as hooks:
                    hooks.run(pixels)
            import pandas as pd

            vectors = pd.Series([values.found[place].numpy() for place in places], index=table.index, dtype=object)
            return table.assign(what="sink", for_index=-1, vector=vectors)

        self._pass("held_out", self.folder, range(len(self.folder)), one, None)

    def collect(self, design: Design, progress: Progress | None = None) -> None:
        """The values that the rows take from other images."""
        wanted, tokens = design.wanted, self.model.tokens
        patches = range(tokens.prefix_tokens, tokens.tokens(self.transform.height, self.transform.width))

        def one(batch: Batch) -> pd.DataFrame:
            own = wanted[wanted["image_index"] == batch.number]
            return collect(self.model, as_input(self.model, batch.pixels), own, patches)

        self._pass("values", self.images, self._giving(design), one, progress)

    def values(self) -> Values:
        """What was collected, by this and every other rank."""
        import pandas as pd

        table = self._read("values", VALUE_KEYS)
        away = {image: index for image, index in self._ids()[1].items() if image in set(self.held_out())}
        if self.folder is None:
            return Values(table, list(away.values()))
        kept = self._read("held_out", VALUE_KEYS)
        if not len(kept):
            return Values(table, [])
        kept["image_index"] += len(self.images)  # apart from the run's own
        return Values(pd.concat([table, kept]), sorted(set(kept["image_index"])))

    def measure(self, design: Design, values: Values, progress: Progress | None = None) -> dict[int, int]:
        """The effects of all edits; returns how many null edits were checked here, by layer."""
        measure = self._measure(design, values)

        def one(batch: Batch) -> pd.DataFrame:
            return measure.image(batch.number, as_input(self.model, batch.pixels))

        self._pass("", self.images, set(design.rows["image_index"]), one, progress)
        return measure.null_edits

    def _measure(self, design: Design, values: Values) -> Measure:
        return Measure(
            model=self.model,
            design=design,
            values=values,
            rows_at_once=self.options.rows,
            metrics=frozenset(self.options.metrics),
            plan=self.options.plan or (),
            labels=self.options.labels,
            height=self.transform.height,
            width=self.transform.width,
        )

    def effects(self) -> pd.DataFrame:
        """The table of all parts, in the order of images, layers, heads, classes and edits."""
        return self._read("", EFFECT_KEYS)

    def _place(self, name: str) -> Path:
        return self.run.path / "effects" / name if name else self.run.path / "effects"

    def _read(self, name: str, keys: Iterable[str]) -> pd.DataFrame:
        return read_rows(read_parts(self._place(name), self.fingerprint), by=tuple(keys))

    def _pass(
        self,
        name: str,
        images: InputList,
        wanted: Collection[int],
        one: Callable[[Batch], pd.DataFrame],
        progress: Progress | None,
    ) -> None:
        """Run `one` on every wanted image of this rank's share that lies in no part yet, and write its rows."""
        folder, schema = self._place(name), effect_schema() if not name else value_schema()
        done = {batch for part in read_parts(folder, self.fingerprint) for batch in part.batches}
        mine = [number for number in range(len(images)) if number % self.ranks.world == self.ranks.rank]
        todo = [number for number in mine if number in wanted and number not in done]
        total = sum(number in wanted for number in mine)
        finished = total - len(todo)
        if progress is not None:
            progress(finished, total)
        if not todo:
            return
        share: dict[str, Any] = {"rank": self.ranks.rank, "world": self.ranks.world, "workers": self.workers}
        leave = set(range(len(images))) - set(todo)
        stream = batches(images, self.transform, batch_size=1, skip_batches=leave, **share)
        with (
            PartWriter(folder, self.fingerprint, self.ranks.rank, schema=schema) as parts,
            precision(self.run.config["dtype"], self.model.device),
        ):
            for batch in stream:
                frame = None
                if batch.ids:
                    frame = one(batch)
                    if name:
                        frame = frame.assign(image=batch.ids[0], image_index=batch.number)
                elif name != "held_out":
                    image, reason = batch.skipped[0]
                    raise InputError(f"{image} could be read when the run was diagnosed, and now cannot: {reason}.")
                parts.add(batch.number, frame, batch.skipped)
                finished += 1
                if progress is not None:
                    progress(finished, total)


def cost(design: Design, depth: int, rows_at_once: int) -> dict[str, int]:
    """How much runs: rows, and rows × blocks, with the prefix reused and for a whole forward an edit."""
    rows = design.rows
    images = int(rows["image_index"].nunique())
    suffix, reused = 0, depth * images
    for start in sorted(rows["start"].unique()):
        counts = rows.loc[rows["start"] == start, "image_index"].value_counts()
        number = int((counts + -(-counts // rows_at_once)).sum())  # and the unedited image in every batch
        suffix += number
        reused += number * (depth - int(start))
    return {
        "rows": len(rows),
        "suffix_rows": suffix,
        "blocks_run": reused,
        "blocks_whole": depth * (len(rows) + images),
    }
