"""What the effects say of a head or a class: does it do what its name claims?

A NOP's sink value is near nothing, so it makes no difference whether it is zeroed, averaged or swapped for another
image's sink value; giving it an ordinary value, or taking the sink away, does. A broadcast's sink value matters, and
all tokens get it alike. That value may be the same for all images: zeroing it or taking the sink away does much,
another image's sink value or the average does little. Or it carries something of its image: then another image's value
moves all tokens alike, towards that image (Table 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sinklab.interventions.samples import Group, Sample

SIGNATURES = {
    "nop": (("zero", "mean", "donor"), ("ordinary", "route")),
    "broadcast": (("mean", "donor"), ("zero", "route")),
}
"""Class → the edits that do little, and those that do much."""
CARRIED = (("shared_energy", 0.9), ("donor_cosine", 0.5))
"""A donor's value is carried to all tokens if its change has at least these, with the whole interval."""
MUCH = 0.5
"""An edit does little against another if it does at most this share of it, with the whole interval."""
CARRYING = "a donor's value moves all tokens alike and towards the donor"
"""How the reason of a verdict begins where a broadcast was found to carry something of its input."""
FEW = 5
"""Below this many images nothing is decided, whatever was asked."""
FEW_HEADS = 3
"""A class of two heads has no interval worth the name; one head alone has that of its images."""


def judge(sample: Sample, group: Group, min_images: int, noun: str = "image") -> tuple[str, str]:
    """("nop" | "broadcast" | "neither" | "undecided", why) from the paired effects on the final patch tokens."""
    least = max(FEW, min_images)
    if sample.heads == 1 and sample.images < least:
        images = f"{sample.images} {noun}{'s' * (sample.images != 1)}"
        return "undecided", f"{images}, fewer than the {least} that a verdict needs"
    if sample.thin:
        return "undecided", f"no head has the {least} {noun}s that a verdict needs"
    if 1 < sample.heads < FEW_HEADS:
        return "undecided", f"{sample.heads} heads, fewer than the {FEW_HEADS} that a class's verdict needs"
    states = {kind: _fits(sample, kind) for kind in SIGNATURES}
    carried = _carries(sample) if states["broadcast"][0] != "fits" else None
    if carried is not None:
        states["broadcast"] = ("fits", carried)
    fitting = [kind for kind, (state, _) in states.items() if state == "fits"]
    if len(fitting) == 1:
        return fitting[0], states[fitting[0]][1]
    if len(fitting) == 2:  # zero does little against everything, and a value that never varies even less
        return "nop", states["nop"][1]
    if all(state == "excluded" for state, _ in states.values()):
        return "neither", "; ".join(f"not a {_name(kind)}: {why}" for kind, (_, why) in states.items())
    open_ = next(kind for kind, (state, _) in states.items() if state == "open")
    return "undecided", states[open_][1]


def _name(kind: str) -> str:
    return "NOP" if kind == "nop" else kind


def _fits(sample: Sample, kind: str) -> tuple[str, str]:
    """("fits" | "excluded" | "open", why) for one class's signature."""
    little = [name for name in SIGNATURES[kind][0] if sample.has(name)]
    much = [name for name in SIGNATURES[kind][1] if sample.has(name)]
    if not little or not much:
        return "open", f"the edits that would show a {_name(kind)} were not made"
    pairs = [(a, b) for a in little for b in much]
    gaps = np.stack([sample.column(a) - MUCH * sample.column(b) for a, b in pairs], axis=1)
    low, high = sample.interval(gaps)
    for (a, b), least in zip(pairs, low, strict=True):
        if least > 0:
            return "excluded", f"{a} does more than half of what {b} does"
    unsure = [pair for pair, most in zip(pairs, high, strict=True) if not most < 0]
    if unsure:
        a, b = unsure[0]
        return "open", f"whether {a} does at most half of what {b} does is not certain"
    return "fits", f"{_listed(little)} {'do' if len(little) > 1 else 'does'} at most half of what {_listed(much)} do"


def _carries(sample: Sample) -> str | None:
    """Why the sink carries something of its image to all tokens; None where that is not certain."""
    if not all(sample.has(name) for name in ("donor", "zero", "zero_ordinary")):
        return None
    measured = np.stack([sample.column("donor", measure) for measure, _ in CARRIED], axis=1)
    control = sample.column("zero_ordinary") - MUCH * sample.column("zero")
    low, high = sample.interval(np.column_stack([measured, control]))
    if not (all(at >= least for at, (_, least) in zip(low[:2], CARRIED, strict=True)) and high[2] < 0):
        return None
    return f"{CARRYING}, and zeroing an ordinary token's value does little"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
