"""Means, intervals and verdicts, against numbers worked by hand and truths of the bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from sinklab.interventions.design import EDITS
from sinklab.interventions.effect import ANSWERS, EFFECTS
from sinklab.interventions.summary import summarise_effects

LIKE = {
    "nop": {"zero": 0.02, "mean": 0.02, "donor": 0.02, "ordinary": 0.3, "route": 0.4, "zero_ordinary": 0.001},
    "broadcast": {"zero": 0.4, "mean": 0.05, "donor": 0.06, "ordinary": 0.5, "route": 0.45, "zero_ordinary": 0.001},
    "neither": {"zero": 0.3, "mean": 0.3, "donor": 0.3, "ordinary": 0.3, "route": 0.3, "zero_ordinary": 0.001},
}


def rows(kind: str, layer: int, head: int, images: int, like: str, noise: float = 0.05, seed: int = 0) -> pd.DataFrame:
    """Effects of one head that behaves like a class, image by image, all edits of an image moving together."""
    drawn = np.random.default_rng([seed, layer, head])
    found = []
    for image in range(images):
        size = 1 + noise * drawn.standard_normal()
        for edit in EDITS:
            change = LIKE[like][edit] * size * (1 + noise * drawn.standard_normal())
            found.append(
                {"image": f"{image}.png", "image_index": image, "layer": layer, "head": head, "edit": edit, "joint": 0}
                | {"class": kind, **dict.fromkeys((*EFFECTS, *ANSWERS), math.nan), "patch_change": change}
            )
    return pd.DataFrame(found)


def verdict_of(table: pd.DataFrame, **options: int) -> dict[tuple[str, str, int, int], str]:
    _, verdicts = summarise_effects(table, **options)
    keys = zip(verdicts["level"], verdicts["blocks"], verdicts["layer"], verdicts["head"], strict=True)
    return dict(zip(keys, verdicts["verdict"], strict=True))


def pick(table: pd.DataFrame, **want: object) -> pd.Series:
    for column, value in ({"measure": "patch_change"} | want).items():
        table = table[table[column] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_a_heads_mean_and_sem_are_over_its_images() -> None:
    """Changes 1, 2, 3, 6: mean 3, SEM √(14/3)/2 = 1.0801; paired with 0.5 each: contrast mean 2.5, the same SEM."""
    table = rows("nop", 3, 1, 4, "nop")
    table.loc[table["edit"] == "zero", "patch_change"] = 0.5
    table.loc[table["edit"] == "ordinary", "patch_change"] = [1.0, 2.0, 3.0, 6.0]
    effects, _ = summarise_effects(table)
    own = pick(effects, level="head", name="ordinary")
    assert (own["mean"], own["images"], own["heads"]) == (3.0, 4, 1)
    assert own["sem"] == pytest.approx(math.sqrt(14 / 3) / 2)
    gap = pick(effects, level="head", name="ordinary - zero")
    assert gap["mean"] == 2.5 and gap["sem"] == pytest.approx(own["sem"])
    assert (gap["low"], gap["high"]) == pytest.approx((own["low"] - 0.5, own["high"] - 0.5))
    assert 1 <= own["low"] < 3 < own["high"] <= 6


def test_a_class_is_the_unweighted_mean_of_its_heads() -> None:
    """A head of 30 images and a head of 20 count alike; one of 3 images does not count."""
    tables = [rows("nop", 1, 0, 30, "nop"), rows("nop", 2, 0, 20, "neither"), rows("nop", 2, 1, 3, "broadcast")]
    effects, _ = summarise_effects(pd.concat(tables), min_images=20)
    own = pick(effects, level="class", blocks="1+", name="zero")
    means = [table.loc[table["edit"] == "zero", "patch_change"].mean() for table in tables[:2]]
    assert own["mean"] == pytest.approx(np.mean(means)) and own["heads"] == 2
    assert (own["pairs"], own["images"]) == (50, 30)  # the 20 images of the second head are among the first's 30


def test_the_interval_covers_the_truth_about_nineteen_times_in_twenty() -> None:
    covered = 0
    for seed in range(200):
        table = rows("nop", 1, 0, 40, "nop", noise=0.3, seed=seed)
        own = pick(summarise_effects(table, draws=400)[0], level="head", name="route")
        covered += own["low"] <= 0.4 <= own["high"]
    assert 0.88 <= covered / 200 <= 0.99


def test_pairs_stay_together() -> None:
    """Images differ tenfold, edits of one image hardly: the contrast is sure though each mean is not."""
    table = rows("broadcast", 1, 0, 30, "broadcast", noise=0.0)
    scale = np.exp(np.random.default_rng(0).standard_normal(30))
    table["patch_change"] *= scale[table["image_index"]]
    effects, _ = summarise_effects(table)
    zero, donor = (pick(effects, level="head", name=name) for name in ("zero", "donor"))
    gap = pick(effects, level="head", name="zero - donor")
    assert gap["mean"] == pytest.approx(zero["mean"] - donor["mean"])
    assert gap["high"] - gap["low"] == pytest.approx((0.34 / 0.4) * (zero["high"] - zero["low"]), rel=1e-9)


def test_verdicts_follow_the_signatures() -> None:
    table = pd.concat(
        [
            rows("nop", 1, 0, 30, "nop"),
            rows("nop", 1, 1, 30, "nop"),
            rows("nop", 1, 2, 30, "nop"),
            rows("broadcast", 2, 0, 30, "broadcast"),
            rows("broadcast", 2, 1, 30, "nop"),
            rows("broadcast", 2, 2, 30, "neither"),
            rows("broadcast", 2, 3, 4, "broadcast"),
        ]
    )
    found = verdict_of(table)
    assert [found["head", "1+", 1, head] for head in range(3)] == ["nop"] * 3
    assert [found["head", "1+", 2, head] for head in range(4)] == ["broadcast", "nop", "neither", "undecided"]
    _, verdicts = summarise_effects(table)
    agree = verdicts[verdicts["level"] == "head"].set_index(["layer", "head"])["agrees"]
    assert agree[2, 0] and not agree[2, 1] and not agree[2, 2] and pd.isna(agree[2, 3])
    classes = verdicts[(verdicts["level"] == "class") & (verdicts["blocks"] == "all")].set_index("class")["verdict"]
    assert classes["nop"] == "nop" and classes["broadcast"] == "undecided"


def test_thin_or_noisy_evidence_is_undecided_and_says_why() -> None:
    thin = summarise_effects(rows("nop", 1, 0, 4, "nop"), min_images=1)[1]
    assert set(thin["verdict"]) == {"undecided"} and thin["reason"].str.contains("fewer than the 5").all()
    noisy = rows("nop", 1, 0, 20, "nop", noise=0.0)
    noisy.loc[noisy["edit"] == "ordinary", "patch_change"] = [0.01, 0.05] * 10  # 0.03 against 0.02: half or not?
    noisy.loc[noisy["edit"].isin(["zero", "mean", "donor"]), "patch_change"] = 0.0155
    assert set(summarise_effects(noisy)[1]["verdict"]) == {"undecided"}
    two = pd.concat([rows("nop", 1, head, 30, "nop") for head in range(2)])
    assert verdict_of(two)["class", "all", -1, -1] == "undecided"


def test_edits_that_were_not_made_decide_nothing() -> None:
    table = rows("broadcast", 1, 0, 30, "broadcast")
    assert verdict_of(table[table["edit"] != "mean"])["head", "1+", 1, 0] == "broadcast"
    assert verdict_of(table[table["edit"].isin(["zero", "route"])])["head", "1+", 1, 0] == "undecided"


def test_the_seed_alone_decides_the_draws() -> None:
    table = pd.concat([rows("nop", 1, 0, 25, "nop"), rows("broadcast", 0, 2, 25, "broadcast")])
    shuffled = table.sample(frac=1.0, random_state=3)
    first, again, other = (summarise_effects(t, seed=s)[0] for t, s in ((table, 0), (shuffled, 0), (table, 1)))
    pd.testing.assert_frame_equal(first, again)
    assert not first["low"].equals(other["low"])


def test_a_value_that_never_varies_and_does_little_is_a_nop() -> None:
    """Mean and donor are exactly 0 beside a small zero, so both signatures hold: what zero does decides."""
    table = rows("nop", 0, 0, 30, "nop")
    table.loc[table["edit"].isin(["mean", "donor"]), "patch_change"] = 0.0
    assert verdict_of(table)["head", "0", 0, 0] == "nop"


@pytest.mark.parametrize(
    ("shared", "toward", "verdict"), [(0.99, 0.95, "broadcast"), (0.5, 0.95, "neither"), (0.99, 0.1, "neither")]
)
def test_a_value_that_carries_its_image_to_all_tokens_is_a_broadcast(
    shared: float, toward: float, verdict: str
) -> None:
    """Table 3: a donor's value changes as much as zero does, but all tokens alike and towards the donor."""
    table = rows("broadcast", 1, 0, 30, "neither")
    table.loc[table["edit"] == "donor", ["shared_energy", "donor_cosine"]] = [shared, toward]
    assert verdict_of(table)["head", "1+", 1, 0] == verdict
