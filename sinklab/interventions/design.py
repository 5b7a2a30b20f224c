"""What an experiment will do, decided before the model runs: rows of edits, and the values that they need.

Two tables. `rows` has one line per (image, layer, head, class, edit), the keys of the effects table. `members` says
what each row does to which head: a single head's row has one member, a joint row several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, NotFoundError
from sinklab.interventions.choose import Choice
from sinklab.interventions.draw import other_token
from sinklab.interventions.edit import Edit

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.models.tokens import TokenMap

EDITS = ("zero", "mean", "donor", "ordinary", "route", "zero_ordinary")
"""In the order of tables and figures; zero_ordinary is the control."""
PHASE_EDITS = ("zero", "null", "mean", "donor", "ordinary", "route", "zero_ordinary")
"""Where values are phases. null: every query reads its own phases in place of the sink's, which is exactly nothing."""
MEMBER_COLUMNS = ["row", "layer", "head", "sink", "key", "source", "from_index"]
"""source: "zero", "null", "route", "sink" (v at the donor's sink), "ordinary" (v at a drawn patch of the donor),
"mean", or "plan" (from_index is then the edit's place in the plan)."""
WANTED_COLUMNS = ["image_index", "layer", "head", "what", "for_index", "key"]
"""what: "sink" (for_index −1) or "ordinary" (drawn for the image for_index)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Design:
    """The tables of an experiment."""

    rows: pd.DataFrame
    members: pd.DataFrame
    wanted: pd.DataFrame
    """Values to be collected from unedited images, `WANTED_COLUMNS`."""
    notes: tuple[str, ...]

    def layers(self) -> list[int]:
        """Layers that are edited."""
        return sorted(int(layer) for layer in self.members["layer"].unique())


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """What the design is made from."""

    heads: pd.DataFrame
    """The head table, finite rows or not."""
    sinks: pd.DataFrame
    """Its events, with classes."""
    ids: Sequence[str]
    """Usable images, by image_index order; `index` gives the position in the run's list."""
    index: Mapping[str, int]
    donor: Mapping[str, str]
    held_out: frozenset[str]
    """Ids that are not edited; their events give the means, unless `mean_from` does."""
    has_mean: frozenset[tuple[int, int]]
    """(layer, head) pairs with a held-out event."""
    tokens: Sequence[int]
    """Indices of patch tokens, from which ordinary ones are drawn."""
    definition: str
    seed: int
    noun: str = "image"
    ordinary: str = "patch"
    """What inputs and ordinary tokens are called in notes."""


def make_design(material: Material, choice: Choice, edits: Sequence[str], *, joint: bool) -> Design:
    """The rows of all chosen heads and edits; what cannot be done is left out and counted in the notes."""
    import pandas as pd

    sink_at = {
        (index, layer, head): sink
        for index, layer, head, sink in material.heads.loc[
            material.heads["finite"].astype(bool), ["image_index", "layer", "head", "sink_index"]
        ].itertuples(index=False)
    }
    events = _events(material, choice)
    rows: list[dict[str, Any]] = []
    members: list[tuple[Any, ...]] = []
    dropped: dict[str, int] = {}
    records: list[dict[str, Any]] = events.to_dict("records")  # type: ignore[assignment]
    for event in records:
        for edit in edits:
            member = _member(material, sink_at, event, edit)
            if isinstance(member, str):
                dropped[member] = dropped.get(member, 0) + 1
                continue
            members.append((len(rows), *member))
            rows.append(event | {"edit": edit, "joint": 0, "edited_index": member[3]})
    if joint:
        _add_joint(rows, members, choice)
    notes = tuple(
        f"{count} edit{'s were' if count > 1 else ' was'} left out: {reason}." for reason, count in dropped.items()
    )
    table = pd.DataFrame(members, columns=MEMBER_COLUMNS)
    found = pd.DataFrame(rows)
    if len(found):
        found["start"] = table.groupby("row")["layer"].min().reindex(range(len(found))).to_numpy()
    return Design(rows=found, members=table, wanted=_wanted(material, table, sink_at), notes=notes)


def plan_design(material: Material, plan: Sequence[Edit], token_map: TokenMap) -> Design:
    """One row an image, in which all edits of the plan are made together."""
    import pandas as pd

    columns = ["image_index", "layer", "head", "sink_index"]
    table = {(i, layer, h): s for i, layer, h, s in material.heads[columns].itertuples(index=False)}
    number = len(material.tokens) + token_map.prefix_tokens + len(token_map.suffix)
    rows: list[dict[str, Any]] = []
    members: list[tuple[Any, ...]] = []
    for image in material.ids:
        index, donor = material.index[image], material.donor.get(image, "")
        for place, edit in enumerate(plan):
            for key in _keys(edit, table, index, token_map, number):
                members.append((len(rows), edit.layer, edit.head, -1, key, "plan", place))
        rows.append(
            {"image": image, "image_index": index, "layer": -1, "head": -1, "class": "plan", "edit": "plan"}
            | {"joint": 0, "sink_index": -1, "sink_kind": "", "edited_index": -1, "donor": donor}
            | {"donor_index": material.index.get(donor, -1), "start": min(edit.layer for edit in plan)}
        )
    nothing = pd.DataFrame([], columns=WANTED_COLUMNS)
    frame = pd.DataFrame(members, columns=MEMBER_COLUMNS)
    return Design(rows=pd.DataFrame(rows), members=frame, wanted=nothing, notes=())


def _keys(
    edit: Edit, sinks: Mapping[tuple[int, int, int], int], image: int, token_map: TokenMap, tokens: int
) -> list[int]:
    """The keys of one image where an edit of a plan acts."""
    if isinstance(edit.at, int):
        if not -tokens <= edit.at < tokens:
            raise InputError(f"There are {tokens} tokens; {edit} names one that does not exist.")
        return [edit.at % tokens]
    if edit.at == "sink":
        sink = sinks.get((image, edit.layer, edit.head), -1)
        if sink < 0:
            raise NotFoundError(f"The run did not measure head {edit.layer}:{edit.head}, so its sink is not known.")
        return [int(sink)]
    found = [index for index in range(tokens) if token_map.kind(index, tokens) == edit.at]
    if not found:
        raise NotFoundError(f"This model has no {edit.at} token.")
    return found


def _events(material: Material, choice: Choice) -> pd.DataFrame:
    """The events to be edited, one line each, in the order of the effects table."""
    column = f"class_{material.definition}"
    chosen = {(h.kind, h.layer, h.head) for h in choice.heads}
    sinks = material.sinks
    mask = [
        (kind, layer, head) in chosen and image not in material.held_out
        for image, kind, layer, head in sinks[["image", column, "layer", "head"]].itertuples(index=False)
    ]
    kept = sinks.loc[mask, ["image", "image_index", "layer", "head", column, "sink_index", "sink_kind"]]
    kept = kept.rename(columns={column: "class"}).sort_values(["image_index", "layer", "head"], kind="stable")
    donor = [material.donor.get(image, "") for image in kept["image"]]
    return kept.assign(donor=donor, donor_index=[material.index.get(image, -1) for image in donor])


def _member(
    material: Material, sink_at: Mapping[tuple[int, int, int], int], event: Mapping[str, Any], edit: str
) -> tuple[int, int, int, int, str, int] | str:
    """(layer, head, sink, key, source, from_index) of one edit, or the reason why it cannot be done."""
    layer, head, sink, own = event["layer"], event["head"], event["sink_index"], event["image_index"]
    names = (event["image"], int(layer), int(head))
    if edit in ("zero", "null", "route"):
        return layer, head, sink, sink, edit, -1
    if edit == "zero_ordinary":
        key = other_token(material.tokens, sink, material.seed, "control", *names)
        return (
            (layer, head, sink, key, "zero", -1)
            if key is not None
            else f"the {material.noun} has no {material.ordinary} but the sink"
        )
    if edit == "mean":
        if (layer, head) not in material.has_mean:
            return f"no held-out {material.noun} is an event of head {layer}:{head}, so it has no mean value"
        return layer, head, sink, sink, "mean", -1
    donor = material.index[event["donor"]]
    if (donor, layer, head) not in sink_at:
        return "the donor's head is not finite"
    if edit == "donor":
        return layer, head, sink, sink, "sink", donor
    if other_token(material.tokens, sink_at[donor, layer, head], 0) is None:
        return f"the donor has no {material.ordinary} but its sink"
    return layer, head, sink, sink, "ordinary", own


def _add_joint(rows: list[dict[str, Any]], members: list[tuple[Any, ...]], choice: Choice) -> None:
    """Rows in which the first k heads of a class are edited together, where they sink in the image.

    k counts heads in the order of `choice`. A row is added for the k-th head that sinks in the image, and one for all.
    """
    by_row = dict(zip((row for row, *_ in members), members, strict=True))
    groups: dict[tuple[int, str, str], dict[tuple[int, int], int]] = {}
    for number, row in enumerate(rows):
        group = groups.setdefault((row["image_index"], row["class"], row["edit"]), {})
        group[row["layer"], row["head"]] = number
    order = {
        kind: [(h.layer, h.head) for h in choice.heads if h.kind == kind] for kind in {h.kind for h in choice.heads}
    }
    for (_, kind, edit), own in groups.items():
        together: list[int] = []
        for k, pair in enumerate(order[kind], start=1):
            if pair in own:
                together.append(own[pair])
            if together and (pair in own or k == len(order[kind])):
                first = rows[together[0]]
                members += [(len(rows), *by_row[number][1:]) for number in together]
                rows.append(
                    {key: first[key] for key in ("image", "image_index", "donor", "donor_index", "class")}
                    | {"edit": edit, "joint": k, "layer": -1, "head": -1}
                    | {"sink_index": -1, "sink_kind": "", "edited_index": -1}
                )


def _wanted(material: Material, members: pd.DataFrame, sink_at: Mapping[tuple[int, int, int], int]) -> pd.DataFrame:
    """The values that the members take from other images, each once, and the held-out ones of the means."""
    import pandas as pd

    donor_of = {material.index[image]: material.index[donor] for image, donor in material.donor.items()}
    image_of = {index: image for image, index in material.index.items()}
    found: set[tuple[int, int, int, str, int, int]] = set()
    for layer, head, source, index in members[["layer", "head", "source", "from_index"]].itertuples(index=False):
        if source == "sink":
            found.add((index, layer, head, "sink", -1, sink_at[index, layer, head]))
        elif source == "ordinary":
            donor = donor_of[index]
            names = ("ordinary", image_of[index], int(layer), int(head))
            key = other_token(material.tokens, sink_at[donor, layer, head], material.seed, *names)
            assert key is not None
            found.add((donor, layer, head, "ordinary", index, key))
    pairs = set(members.loc[members["source"] == "mean", ["layer", "head"]].itertuples(index=False, name=None))
    held = material.sinks[material.sinks["image"].isin(list(material.held_out))]
    for index, layer, head, sink in held[["image_index", "layer", "head", "sink_index"]].itertuples(index=False):
        if (layer, head) in pairs:
            found.add((index, layer, head, "sink", -1, sink))
    return pd.DataFrame(sorted(found), columns=WANTED_COLUMNS)
