"""The experiment: unedited images give the values, then every edited image gives its effects; both in whole parts.

Images (or fixed groups of short sequences) are shared out between ranks one by one, and all rows of one group and layer
run together, so neither the number of ranks nor anything else about how the work is divided can change a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, printable
from sinklab.hooks.manager import HookManager
from sinklab.interventions.choose import Choice, choose_heads
from sinklab.interventions.design import Design, Material, make_design, plan_design
from sinklab.interventions.draw import donors, held_out
from sinklab.interventions.measure import Measure, require_finite
from sinklab.interventions.passes import Passes
from sinklab.interventions.replay import unedited
from sinklab.interventions.task import TaskEffects, task_of
from sinklab.interventions.values import ValueReader, Values, collect, value_schema
from sinklab.settings import asked_dtype
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
            noun=self.images.noun,
        )

    def held_out(self) -> list[str]:
        """Ids of the run's images that are not edited; none where a folder gives the means."""
        o = self.options
        if self.folder is not None or "mean" not in o.edits or o.plan is not None:
            return []
        return held_out(self._ids()[0], o.held_out, o.seed, self.images.noun)

    def _donors(self, ids: list[str]) -> dict[str, str]:
        """Image → donor; nobody's where the one image has no other and no edit needs one."""
        o = self.options
        if len(ids) == 1 and (o.plan is not None or not {"donor", "ordinary"} & set(o.edits)):
            return {}
        return donors(ids, o.seed, self.images.noun)

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
            kept = self.passes.read("held_out", VALUE_KEYS)
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
            tokens=tokens.ordinary_among(number),
            definition=self.definition,
            seed=self.options.seed,
            noun=self.images.noun,
            ordinary=tokens.ordinary,
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
        with precision(asked_dtype(self.run.config), self.model.device):
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
        if classify is None or self.model.loaded.sequences is not None:
            raise InputError("Labels are for a model with a classifier, and this one has none.")
        classes = int(classify(self.model.module, tokens).shape[-1])
        wrong = next(((image, label) for image, label in labels.items() if not 0 <= label < classes), None)
        if wrong is not None:
            raise InputError(f"The label of {printable(wrong[0])} is {wrong[1]}; the classes are 0 to {classes - 1}.")
        if not set(labels) & set(self._ids()[0]):
            raise InputError(f"None of the {len(labels)} labelled {self.images.noun}s is one of the run's.")

    def sizes(self, design: Design) -> tuple[int, int]:
        """Images of this rank's share that give values, and that are edited."""
        shares = [self._giving(design), set(design.rows["image_index"])]
        first, second = (sum(self.passes.is_mine(number) for number in own) for own in shares)
        return first, second

    @cached_property
    def passes(self) -> Passes:
        """How the inputs are gone through."""
        return Passes(
            model=self.model,
            run=self.run,
            view=self.transform,
            fingerprint=self.fingerprint,
            ranks=self.ranks,
            workers=self.workers,
        )

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
            values = ValueReader([(0, *place) for place in places])
            if places:
                with HookManager(self.model, values, layers=sorted(values.places)) as hooks:
                    hooks.run(pixels)
            import pandas as pd

            vectors = pd.Series([values.found[0, *place].numpy() for place in places], index=table.index, dtype=object)
            where = table.assign(image=batch.ids[0], image_index=batch.number)
            return where.assign(what="sink", for_index=-1, vector=vectors)

        self.passes.over("held_out", self.folder, range(len(self.folder)), one, schema=value_schema(), alone=True)

    def collect(self, design: Design, progress: Progress | None = None) -> None:
        """The values that the rows take from other images."""
        wanted, tokens = design.wanted, self.model.tokens
        patches = tokens.ordinary_among(tokens.tokens(self.transform.height, self.transform.width))
        places, giving = wanted.groupby("image_index").indices, self._giving(design)

        def one(batch: Batch) -> pd.DataFrame:
            indices, pixels = self.passes.among(batch, giving)
            own = wanted.iloc[[place for index in indices for place in places.get(index, ())]]
            images = {index: batch.ids[batch.indices.index(index)] for index in indices}
            return collect(self.model, pixels, images, own, patches)

        self.passes.over("values", self.images, giving, one, progress, schema=value_schema())

    def values(self) -> Values:
        """What was collected, by this and every other rank."""
        import pandas as pd

        table = self.passes.read("values", VALUE_KEYS)
        phases = all(site.parts.phase is not None for site in self.model.sites)
        held = set(self.held_out())
        away = {image: index for image, index in self._ids()[1].items() if image in held}
        if self.folder is None:
            return Values(table, list(away.values()), phases=phases)
        kept = self.passes.read("held_out", VALUE_KEYS)
        if not len(kept):
            return Values(table, [], phases=phases)
        kept["image_index"] += len(self.images)  # apart from the run's own
        return Values(pd.concat([table, kept]), sorted(set(kept["image_index"])), phases=phases)

    def measure(self, design: Design, values: Values, progress: Progress | None = None) -> dict[int, int]:
        """The effects of all edits; returns how many null edits were checked here, by layer."""
        measure = self._measure(design, values)
        edited = set(design.rows["image_index"])

        def one(batch: Batch) -> pd.DataFrame:
            return measure.group(*self.passes.among(batch, edited))

        self.passes.over("", self.images, edited, one, progress, schema=measure.schema)
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
            task=self._task(),
        )

    def _task(self) -> TaskEffects | None:
        task = task_of(self.model)
        if task is None:
            return None

        def read(index: int) -> Tensor:
            ref = self.images[index]
            return self.transform.of(ref.content(), ref.id)

        return TaskEffects(task=task, read=read)

    def effects(self) -> pd.DataFrame:
        """The table of all parts, in the order of images, layers, heads, classes and edits."""
        return self.passes.read("", EFFECT_KEYS)


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
