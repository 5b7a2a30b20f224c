"""Sinks per image over the variants of a training: the paper's Tables 14 and 15, each cell a mean over seeds."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinklab.reports.tables import labelled, report_rules
from sinklab.reports.wording import some
from sinklab.sinks.classify import SinkDefinition, with_own
from sinklab.sinks.counts import counts_per_image
from sinklab.sinks.rule import SinkRule

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.run import Run

KEYS = ["run", "arm", "seed"]
CELLS = ["nop", "broadcast", "intermediate", "all"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One diagnosed run among those that are compared."""

    run: Run
    source: str
    """The folder that was named."""
    arm: str
    """What is averaged over seeds: VARIANT-SIZE of a member, or the model's name."""
    seed: int
    member: str = ""
    """Its name in the training run; "" for a diagnosed run that was named itself."""

    @property
    def name(self) -> str:
        """ "runs/tiny/seed-0/baseline-tiny"."""
        return f"{self.source}/{self.member}" if self.member else self.source

    @property
    def rule(self) -> SinkRule:
        return SinkRule.from_dict(self.run.config["rule"])


def arm_and_seed(name: str) -> tuple[str, int]:
    """ "RUN/seed-2/baseline-tiny" → ("baseline-tiny", 2); another name is an arm of its own, seed 0."""
    seed = re.search(r"(?:^|/)seed-(\d+)(?:/|$)", name)
    return (name.rpartition("/")[2], int(seed[1])) if seed else (name, 0)


def rules_of(runs: Sequence[Compared]) -> list[str]:
    """The rules under which the runs were diagnosed, each once, in words."""
    rules = list(dict.fromkeys(one.rule for one in runs))
    said = [rule.label for rule in rules]
    return said if len(set(said)) == len(said) else [f"{rule.label} at attention {rule.attention:g}" for rule in rules]


def who_by_rule(runs: Sequence[Compared]) -> str:
    """ "relaxed (a, b); mass ≥ 0.25 (c)": the rules, and the runs that were diagnosed under each."""
    groups = _grouped(runs, lambda one: one.rule)
    return "; ".join(f"{rule} ({who})" for rule, (_, who) in zip(rules_of(runs), groups, strict=True))


def differing_images(runs: Sequence[Compared]) -> str:
    """ "a, b on 32 images (val); c on 12 images (demo)" where runs saw different inputs; "" where they did not.

    A controlled task is drawn anew for every seed: of those sequences the number is compared. Of texts the windows are,
    among models that read as many tokens; else the texts.
    """
    tasks = [one for one in runs if one.run.config["model"].get("family") == "toy"]
    own = [one for one in runs if one not in tasks]
    sizes = {str(one.run.config["images"].get("size")) for one in own}

    def shown(one: Compared) -> Hashable:
        about = one.run.config["images"]
        pictures = about.get("noun", "image") == "image"
        return about.get("list_sha256") if pictures or len(sizes) == 1 else tuple(about.get("sources", ()))

    drawn = _grouped(tasks, lambda one: one.run.config["images"].get("count"))
    groups = drawn if len(drawn) > 1 else _grouped(own, shown)
    if len(groups) < 2:
        return ""
    said = []
    for first, who in groups:
        about = first.run.config["images"]
        sources = ", ".join(map(str, about.get("sources", ())))
        said.append(f"{who} on {about.get('count')} {about.get('noun', 'image')}s ({sources})")
    return "; ".join(said)


def _grouped(runs: Sequence[Compared], key: Callable[[Compared], Hashable]) -> list[tuple[Compared, str]]:
    """The first run with each key, and the names of all with it."""
    groups: dict[Hashable, list[Compared]] = {}
    for one in runs:
        groups.setdefault(key(one), []).append(one)
    return [(each[0], some([one.name for one in each])) for each in groups.values()]


def sink_counts(runs: Sequence[Compared]) -> pd.DataFrame:
    """`counts_per_image` of every run under every rule of Table 15, with KEYS and `name` before it, and behind it the
    rule in words and how many of the run's (image, head) pairs in layers from 1 on there are, and are not finite."""
    import pandas as pd

    parts = []
    for one in runs:
        heads, rule = one.run.heads, one.rule
        later = heads[heads["layer"] > 0]
        pairs = {"pairs": len(later), "not_finite": int((~later["finite"].astype(bool)).sum())}
        definitions = with_own(SinkDefinition.from_saved(one.run.config["definition"]))
        for each in report_rules(rule):
            counts = counts_per_image(heads, [each], definitions).assign(label=each.label, **pairs)
            parts.append(labelled(counts, run=one.source, arm=one.arm, seed=one.seed, name=one.name))
    return pd.concat(parts, ignore_index=True)


def not_finite_sentences(counts: pd.DataFrame) -> list[str]:
    """Of each run with heads that are not finite, how many they are: they are in no count."""
    each = counts.drop_duplicates("name")
    return [
        f"{name}: {broken:,} of {pairs:,} (image, head) pairs in layers from 1 on are not finite and count as no sink."
        for name, broken, pairs in zip(each["name"], each["not_finite"], each["pairs"], strict=True)
        if broken
    ]


def table_14(counts: pd.DataFrame, rule: str) -> pd.DataFrame:
    """Sinks per image under one rule, layers ≥ 1: (run,) arm, rule, definition, kind, then what `_over_seeds` adds."""
    own = counts[(counts["blocks"] == "1+") & (counts["rule"] == rule)]
    if rule == "strict":
        own = own[own["epsilon"] == own["epsilon"].max()]
    seen = own[own["class"] == "all"].groupby("kind")["events"].sum()
    own = own[own["kind"].map(lambda kind: kind == "all" or seen[kind] > 0)]
    return _over_seeds(own.assign(rule=own["label"]), ["rule", "definition", "kind"])


def table_15(counts: pd.DataFrame) -> pd.DataFrame:
    """Sinks per image under every rule, layers ≥ 1, any token: (run,) arm, rule, definition, then the same."""
    own = counts[(counts["blocks"] == "1+") & (counts["kind"] == "all")]
    return _over_seeds(own.assign(rule=own["label"]), ["rule", "definition"])


def _over_seeds(counts: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """[(run,) arm, *keys, CELLS, CELLS with _std, not_finite, images, seeds] of the events per image.

    Means over seeds, and standard deviations with n − 1 (NaN for one seed). `not_finite` is the share of (image, head)
    pairs that are not finite, and so in no count; `images` the number of images, the least of the seeds'.
    Seeds of an arm that lie in several folders are one arm's; only where a seed comes twice is `run` a column.
    """
    trained = counts[KEYS].drop_duplicates()
    arm = ["run", "arm"] if trained.duplicated(["arm", "seed"]).any() else ["arm"]
    cells: Any = counts.groupby([*arm, *keys, "class"], sort=False)["per_image"]
    means, spread = (table.unstack("class")[CELLS] for table in (cells.mean(), cells.std()))
    groups = counts.groupby([*arm, *keys], sort=False)
    others = groups.agg(broken=("not_finite", "sum"), pairs=("pairs", "sum"), images=("images", "min"))
    others["not_finite"] = others.pop("broken") / others.pop("pairs")
    others = others[["not_finite", "images"]].join(groups["seed"].nunique().rename("seeds"))
    table = means.reindex(others.index).join(spread.add_suffix("_std")).join(others)  # as they came, not sorted
    table.columns.name = None
    return table.reset_index()
