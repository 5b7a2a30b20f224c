"""What the interventions say about each class of head, in sentences: the verdict tables in words, never more.

A class or head whose evidence is too thin is called undecided, with the reason that the table gives.
"""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from sinklab.reports.effects import CAUSAL_CLASSES, Causal, class_cells, head_rows, shown_blocks
from sinklab.reports.nouns import Words
from sinklab.reports.palette import CLASS_NAME
from sinklab.reports.sections import records
from sinklab.reports.signature import carries, donor_words, expected, means_words
from sinklab.reports.verdict import LIKENED
from sinklab.reports.wording import head_name, joined, plural, some
from sinklab.sinks.classify import SinkDefinition
from sinklab.sinks.rule import SinkRule

MANY = 12
"""Of more heads than this a sentence names the first ones and points to the table."""
BEHAVES = {"nop": "like a NOP", "broadcast": "like a broadcast", "neither": "like neither"}
WHERE = {"1+": "layers ≥ 1", "0": "layer 0", "all": "all layers"}


def judged_otherwise(config: dict[str, Any]) -> bool:
    """Whether the interventions were made under another rule or definition than the one that the run has now."""
    patch = config.get("patch")
    settings = patch.get("settings") if isinstance(patch, dict) else None
    if not isinstance(settings, dict) or "rule" not in settings or "definition" not in settings:
        return False
    rules = [SinkRule.from_dict(each["rule"]) for each in (settings, config)]
    definitions = [SinkDefinition.from_saved(each["definition"]) for each in (settings, config)]
    return rules[0] != rules[1] or definitions[0] != definitions[1]


def absent(config: dict[str, Any], events: int) -> Markup:
    """The one sentence of a run without causal tables."""
    patch = config.get("patch")
    command = Markup("<code>sinklab patch RUN</code>")
    if judged_otherwise(config):
        return Markup(
            "The interventions in this folder belong to another rule or definition and are not shown: their heads were "
            "chosen and named by it. {} edits the heads of the present one."
        ).format(Markup("<code>sinklab patch RUN --overwrite</code>"))
    if isinstance(patch, dict):
        return Markup(
            "Interventions were begun but have left no table of effects (status “{}”); {} goes on with them."
        ).format(patch.get("status", "not recorded"), Markup("<code>sinklab patch RUN --resume</code>"))
    if not events:
        return Markup("Nothing was intervened on: no head sinks, so {} would find no head to edit.").format(command)
    return Markup(
        "Nothing was intervened on, so the classes rest on observation alone; {}, with this folder for RUN, edits the "
        "sinks and adds what follows, the paper’s Fig. 6."
    ).format(command)


def class_findings(causal: Causal) -> list[dict[str, Any]]:
    """One entry per class, for the section's paragraphs.

    Keys: `name`, `lead` (the class-level verdict), `numbers`, `other` (layer 0 where it is not the one that leads),
    `tally`, `against` (heads that do not agree, with what they are like) and `undecided` (reason → heads).
    """
    rows = head_rows(causal)
    return [_class_finding(causal, name, [row for row in rows if row["class"] == name]) for name in CAUSAL_CLASSES]


def _class_finding(causal: Causal, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    verdicts = _class_verdicts(causal, name)
    blocks = shown_blocks(causal, name)
    leading = blocks if blocks in verdicts else next(iter(verdicts), "")
    others = [_sentence(_verdict_words(name, verdict, rows, causal.words)) for each, verdict in verdicts.items()
              if each in ("1+", "0") and leading in ("1+", "0") and each != leading]  # fmt: skip
    against = [(head_name(row["layer"], row["head"]), BEHAVES.get(row["verdict"], row["verdict"]), row["reason"])
               for row in rows if row["agrees"] == "False"]  # fmt: skip
    undecided: dict[str, list[str]] = {}
    for row in rows:
        if row["agrees"] not in ("True", "False"):
            undecided.setdefault(row["reason"] or "no reason was saved", []).append(
                head_name(row["layer"], row["head"])
            )
    return {
        "name": name,
        "lead": _lead(causal, name, verdicts.get(leading), rows),
        "numbers": _numbers(causal, name, blocks, rows),
        "other": others,
        "tally": _tally(name, rows),
        "against": against[:MANY],
        "against_more": max(len(against) - MANY, 0),
        "undecided": [(reason, some(heads, MANY)) for reason, heads in undecided.items()],
    }


def _class_verdicts(causal: Causal, name: str) -> dict[str, dict[str, Any]]:
    rows = causal.verdicts[(causal.verdicts["level"] == "class") & (causal.verdicts["class"] == name)]
    found = {str(row["blocks"]): row for row in records(rows)}
    return {blocks: found[blocks] for blocks in WHERE if blocks in found}


def _lead(causal: Causal, name: str, verdict: dict[str, Any] | None, rows: list[dict[str, Any]]) -> Markup:
    label = Markup('<strong class="{}-text">{}</strong>')
    titled = {"nop": "NOP", "broadcast": "Broadcast"}[name]
    if not rows:
        wanted = name in (causal.patch.get("classes") or CAUSAL_CLASSES)
        why = "no head had enough events of this class" if wanted else "this class was not asked for"
        why = verdict["reason"] if verdict and verdict["reason"] else why
        return Markup("{} No {} head was edited: {}. The interventions say nothing about this class.").format(
            label.format(name, f"{titled}: no evidence."), CLASS_NAME[name], why
        )
    if verdict is None:
        return Markup("{} No verdict on the class was saved.").format(label.format(name, f"{titled}: undecided."))
    stated = {"True": "the interventions agree", "False": "the interventions do not agree"}
    return Markup("{} {}").format(
        label.format(name, f"{titled}: {stated.get(verdict['agrees'], 'undecided')}."),
        _sentence(_verdict_words(name, verdict, rows, causal.words)),
    )


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."


def _verdict_words(name: str, verdict: dict[str, Any], rows: list[dict[str, Any]], words: Words) -> str:
    """ "in layers ≥ 1 the heads observed as NOPs behave as such when edited (3 heads, 24 images: …)"."""
    where = WHERE.get(str(verdict["blocks"]), "these layers")
    evidence = f"{plural(int(verdict['heads']), 'head')}, {words.count(int(verdict['images']))}"
    evidence += f": {verdict['reason']}" if verdict["reason"] else ""
    one = len(_of_blocks(rows, str(verdict["blocks"]))) == 1
    heads = f"the {'head' if one else 'heads'} observed as {LIKENED[name][0 if one else 1]}"
    behave = "behaves" if one else "behave"
    if verdict["agrees"] == "True":
        return f"in {where} {heads} {behave} as such when edited ({evidence})"
    if verdict["agrees"] == "False":
        like = {"nop": "like NOPs", "broadcast": "like broadcasts"}.get(verdict["verdict"], "like neither class")
        like = BEHAVES[verdict["verdict"]] if one and verdict["verdict"] in CAUSAL_CLASSES else like
        return f"in {where} {heads} {behave} {like} when edited ({evidence})"
    return f"in {where} it is not settled whether {heads} {behave} as such ({evidence})"


def _numbers(causal: Causal, name: str, blocks: str, rows: list[dict[str, Any]]) -> str:
    """The class means behind the verdict, grouped as the signature groups them."""
    cells = class_cells(causal, name, blocks)
    carried = name == "broadcast" and carries(causal)
    parts = means_words(causal, name, blocks, carried)
    if not parts:
        return ""
    missing = [edit for edits in expected(name, carried) for edit in edits if edit not in cells]
    without = f"; {joined(missing)} could not be measured" if missing else ""
    one = max(cell.heads for cell in cells.values()) == 1
    over = f"the {causal.words.nouns} of the one head in {WHERE[blocks]}" if one else f"the heads in {WHERE[blocks]}"
    over += " that has enough of them" if one and len(_of_blocks(rows, blocks)) > 1 else ""
    content = f"{donor_words(causal, blocks)}; " if carried else ""
    return f"On average over {over}, {content}{', while '.join(parts)}{without}."


def _tally(name: str, rows: list[dict[str, Any]]) -> str:
    """ "Of 5 edited NOP heads, 3 agree, 1 does not and 1 is undecided."; what nothing counts to is left out."""
    if not rows:
        return ""
    agree, against, undecided = _counts(rows)
    one = "agrees" if agree else "does not agree" if against else "is undecided"
    if len(rows) == 1:
        return f"The one edited {CLASS_NAME[name]} head {one}."
    edited = f"{len(rows)} edited {CLASS_NAME[name]} heads"
    if len(rows) in (agree, against, undecided):
        return f"Of {edited}, {'all agree' if agree else 'none agrees' if against else 'all are undecided'}."
    parts = [f"{agree or 'none'} {'agrees' if agree < 2 else 'agree'}"]
    parts += [f"{against} {'does' if against == 1 else 'do'} not"] if against else []
    parts += [f"{undecided} {'is' if undecided == 1 else 'are'} undecided"] if undecided else []
    return f"Of {edited}, {joined(parts)}."


def _counts(rows: list[dict[str, Any]]) -> tuple[int, int, int]:
    """How many heads agree, do not agree, are undecided."""
    agree = sum(row["agrees"] == "True" for row in rows)
    against = sum(row["agrees"] == "False" for row in rows)
    return agree, against, len(rows) - agree - against


def verdict_sentence(causal: Causal) -> Markup:
    """The causal part in one sentence, for the verdict at the top of the page."""
    finished = causal.patch.get("status", "complete") == "complete"
    begun = Markup('<a href="#causal">Edited</a> one head at a time') + ("" if finished else " (not finished yet)")
    return Markup("{}, {}.").format(begun, Markup("; ").join(_clauses(causal)))


def class_lines(causal: Causal) -> list[str]:
    """The causal verdict in plain words, a line a class."""
    lines = [str(clause.striptags()) for clause in _clauses(causal)]
    return [_sentence(line) for line in lines]


def _clauses(causal: Causal) -> list[Markup]:
    rows = head_rows(causal)
    parts = []
    for name in CAUSAL_CLASSES:
        mine = [row for row in rows if row["class"] == name]
        verdicts = _class_verdicts(causal, name)
        verdict = verdicts.get(shown_blocks(causal, name)) or next(iter(verdicts.values()), None)
        parts.append(_clause(name, mine, verdict))
    return parts


def _of_blocks(rows: list[dict[str, Any]], blocks: str) -> list[dict[str, Any]]:
    """The heads that a verdict on these blocks speaks of."""
    return [row for row in rows if blocks not in ("1+", "0") or (row["layer"] == 0) == (blocks == "0")]


def _clause(name: str, rows: list[dict[str, Any]], verdict: dict[str, Any] | None) -> Markup:
    if not rows:
        return Markup("no {} was there to test").format(f"{CLASS_NAME[name]} head")
    agrees, blocks = (verdict["agrees"], str(verdict["blocks"])) if verdict else ("", "all")
    meant = _of_blocks(rows, blocks)
    one = len(meant) == 1
    heads = f"{CLASS_NAME[name]} {'head' if one else 'heads'}"
    if blocks == "0" or len(meant) < len(rows):  # layers ≥ 1 need no word where no head of layer 0 was edited
        heads += f" of {WHERE[blocks]}"
    behave = "behaves" if one else "behave"
    if agrees == "True":
        said = f"the {heads} {behave} as {LIKENED[name][0 if one else 1]}"
    elif verdict and agrees == "False":
        said = f"the {heads} {behave} {BEHAVES.get(verdict['verdict'], 'like neither')}, against what was observed"
    else:
        said = f"the class of the {heads} stays undecided"
    agree, against, undecided = _counts(meant)
    tally = f"{agree} of {len(meant)} agree" + (
        f", {against} {'does' if against == 1 else 'do'} not" if against else ""
    )
    tally += f", {undecided} undecided" if undecided else ""
    tally = "one head" if one else tally
    if agrees not in ("True", "False") and verdict and verdict["reason"]:
        tally += f"; {verdict['reason']}"
    return Markup('<strong class="{}-text">{}</strong> ({})').format(name, said, tally)
