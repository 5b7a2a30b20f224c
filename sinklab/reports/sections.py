"""What the page's template is handed: run.json's facts and the tables' rows, in plain dictionaries and words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinklab.reports.nouns import Words
from sinklab.reports.palette import CLASSES, KIND_NAME
from sinklab.reports.wording import fixed, joined, plural, ranges

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.sinks.classify import SinkDefinition

QUIET_ROWS = 6
"""A layer with more heads without events than this names them in one row instead of one row each."""


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """One dictionary a row."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def strongest_first(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Records, the heads with the most events first."""
    return records(rows.sort_values(["events", "layer", "head"], ascending=[False, True, True]))


def layer_sections(table: pd.DataFrame, definition: SinkDefinition) -> list[dict[str, Any]]:
    """One entry a layer: its heads, those with a row of their own, how many sink and as what, whether it is open.

    Open are layers with a head that sinks in half of its inputs or more or, if no head does, all with an event.
    table: `head_table`.
    """
    sections = []
    enough = ((table["events"] > 0) & (2 * table["events"] >= table["images"])).any()
    for _, rows in table.groupby("layer"):
        sunk = rows[rows["events"] > 0]
        steady = sunk[2 * sunk["events"] >= sunk["images"]]
        quiet = rows[(rows["events"] == 0) & (rows["not_finite"] == 0)]
        if len(quiet) <= QUIET_ROWS:
            quiet = rows.head(0)
        classes = sunk[f"class_{definition.name}"].value_counts()
        section = {
            "layer": int(rows["layer"].iloc[0]),
            "heads": records(rows),
            "rows": records(rows.drop(quiet.index)),
            "quiet": _quiet_words(quiet),
            "sinking": len(sunk),
            "classes": [(name, int(classes[name])) for name in CLASSES if name in classes],
            "open": len(steady if enough else sunk) > 0,
        }
        sections.append(section)
    return sections


def _quiet_words(quiet: pd.DataFrame) -> str:
    if not len(quiet):
        return ""
    low, high = fixed(float(quiet["mean_inflow"].min())), fixed(float(quiet["mean_inflow"].max()))
    return f"Heads {ranges(quiet['head'])}: no event; mean inflow {low} to {high}"


def library_versions(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Every library once, sinklab first."""
    named = {**(_part(config, "model").get("versions") or {}), **(config.get("versions") or {})}
    named = {"sinklab": config.get("sinklab", named.get("sinklab", "not recorded"))} | named
    return [(str(name), str(version)) for name, version in named.items()]


def skipped_inputs(config: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, reason) of every input that could not be used."""
    listed = _part(config, "images").get("skipped") or []
    return [(str(each["image"]), str(each["reason"])) if isinstance(each, dict) else (str(each[0]), str(each[1]))
            for each in listed]  # fmt: skip


def size_words(config: dict[str, Any], words: Words) -> str:
    """ "224 × 224 px" for a size of one or two numbers, a word as it is, "" if none was recorded; "32 tokens"."""
    size = _part(config, "images").get("size")
    if not words.pictures:
        if not isinstance(size, list | tuple) or len(size) != 2 or not all(isinstance(each, int) for each in size):
            return ""
        return plural(size[0] * size[1] + len(prefix_names(config)), "token")
    if isinstance(size, int):
        size = (size, size)
    said = " × ".join(str(each) for each in size) if isinstance(size, list | tuple) else str(size or "")
    return f"{said} px" if said else ""


def size_facts(config: dict[str, Any], words: Words) -> str:
    """The size with how an input was shown to the model; "" if it was not recorded."""
    size, shown = size_words(config, words), str(_part(config, "images").get("transform") or "")
    if not words.pictures:
        return shown or size
    return size and f"{size} (height × width){f'; {shown}' if shown else ''}"


def counted_inputs(config: dict[str, Any], measured: int, words: Words) -> str:
    """ "12 images", or "10 of 12 listed images" where not all of the list were measured."""
    count = _part(config, "images").get("count")
    if not isinstance(count, int) or count == measured:
        return words.count(measured)
    return f"{measured:,} of {count:,} listed {words.nouns}"


def token_facts(config: dict[str, Any], words: Words) -> list[str]:
    """What the model's tokens are, and its activation, as far as run.json says it."""
    model = _part(config, "model")
    said = [f"prefix tokens: {joined(prefix_names(config)) or 'none'}"] if "prefix" in model else []
    patch = model.get("patch_size")
    if patch and words.pictures:
        said.append(f"patches of {patch if isinstance(patch, int) else ' × '.join(str(each) for each in patch)} px")
    activation = model.get("activation")
    if activation and (words.pictures or activation != "unknown"):
        said.append(str(activation))
    return said


def update_words(config: dict[str, Any]) -> str:
    """Where a head's update is taken, in words that fit the model: LayerScale is spoken of where there is one."""
    model = _part(config, "model")
    words = str(model.get("update") or "as added, LayerScale included")
    if words == "as added, LayerScale included" and not model.get("layer_scale"):
        return "as it is added to the residual stream"
    return words


def grid_tables(grid: pd.DataFrame) -> list[dict[str, Any]]:
    """The sensitivity of one definition, a table a class: its rows are the ratio's limits, its columns the rank's.

    grid: `sensitivity_grid`. A table has `class`, `ranks` ([None] where the rank has no say) and `rows` of `threshold`
    and `cells`, records of the grid in the order of the ranks.
    """
    made = []
    for name in ("nop", "broadcast"):
        cells = records(grid[grid["class"] == name])
        ranks = list(dict.fromkeys(None if cell["stable_rank_threshold"] != cell["stable_rank_threshold"]
                                   else cell["stable_rank_threshold"] for cell in cells))  # fmt: skip
        rows = [{"threshold": threshold, "cells": [cell for cell in cells if cell["threshold"] == threshold]}
                for threshold in dict.fromkeys(cell["threshold"] for cell in cells)]  # fmt: skip
        made.append({"class": name, "ranks": ranks, "rows": rows})
    return made


def prefix_names(config: dict[str, Any]) -> list[str]:
    """ "[CLS]", "register 1", "register 2", …: the model's prefix tokens in their order."""
    names: list[str] = []
    registers = 0
    for kind in _part(config, "model").get("prefix") or []:
        registers += kind == "register"
        names.append(f"register {registers}" if kind == "register" else KIND_NAME.get(kind, str(kind)))
    return names


def notes(config: dict[str, Any]) -> list[str]:
    """What the loader, the list of inputs and the run thought worth noting, each once."""
    everything = [*(_part(config, "model").get("notes") or []), *(_part(config, "images").get("notes") or []),
                  *(config.get("notes") or [])]  # fmt: skip
    return list(dict.fromkeys(str(note) for note in everything))


def _part(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}
