"""How the interventions of a run were made, and whether their own checks held, in words: from run.json's "patch"."""

from __future__ import annotations

from typing import Any, TypeGuard

from markupsafe import Markup

from sinklab.reports.effects import CAUSAL_CLASSES, Causal, is_plan
from sinklab.reports.nouns import Words
from sinklab.reports.palette import CLASS_NAME
from sinklab.reports.wording import joined, number, plural


def method_facts(causal: Causal) -> list[tuple[str, Markup]]:
    """(term, sentences) of everything that a reader needs to judge the effects."""
    patch = causal.patch
    facts = [
        ("Heads", Markup("") if is_plan(patch) else _heads_words(patch, causal.words)),
        (causal.words.title, _input_words(patch, causal.words)),
        ("Effect", _effect_words(causal)),
        ("Checks", _check_words(_part(patch, "checks"))),
        ("Intervals", _interval_words(patch, causal.words)),
        ("Time", _time_words(patch, causal.words)),
        ("Notes", Markup("<br>").join(str(note) for note in patch.get("notes") or [])),
    ]
    command = patch.get("command")
    if command:
        words = command if isinstance(command, str) else " ".join(str(each) for each in command)
        facts.append(("Command", Markup("<code>{}</code>").format(words)))
    return [(term, words) for term, words in facts if words]


def failed_checks(causal: Causal) -> list[str]:
    """Every check of the experiment that did not hold, as a sentence; none is expected."""
    checks = _part(causal.patch, "checks")
    failed = []
    if _all_null_held(checks) is False:
        failed.append("An edit that puts back the value already there did not leave the output bit-identical.")
    error, limit = checks.get("identity_error_max"), checks.get("identity_tolerance")
    if _is_number(error) and _is_number(limit) and not error <= limit:
        failed.append(f"A value edit changed a head’s update by other than the attention times the change of the "
                      f"value: relative error {number(error)}, tolerated {number(limit)}.")  # fmt: skip
    return failed


def _heads_words(patch: dict[str, Any], names: Words) -> Markup:
    chosen = [head for head in patch.get("heads") or [] if isinstance(head, dict)]
    counts = {name: sum(head.get("class") == name for head in chosen) for name in CAUSAL_CLASSES}
    named = joined([plural(counts[name], f"{CLASS_NAME[name]} head") for name in CAUSAL_CLASSES])
    settings = _part(_part(patch, "settings"), "options")
    sentences = [f"{named}, edited one at a time (definition “{patch.get('definition', 'causal')}”)"]
    used, usual = patch.get("min_events_used"), patch.get("min_events")
    if settings.get("heads", "auto") in ("auto", None):
        least = f" and at least {plural(used, 'event')}" if _is_number(used) else ""
        most, first = settings.get("per_class"), settings.get("block0")
        up_to = (
            f": at most {most} in layers ≥ 1 and {first} in layer 0" if most is not None and first is not None else ""
        )
        sentences.append(f"chosen in each class were the heads with the most events{least}{up_to}")
    else:
        sentences.append("they were named by hand, not chosen by their events")
    words = ". ".join(_capital(each) for each in sentences) + "."
    if _is_number(used) and _is_number(usual) and used < usual:
        words += f" The usual minimum of {plural(usual, 'event')} was lowered to {used}: too few heads reach it here."
    enough = patch.get("min_events_analysis")
    if _is_number(enough):
        words += (
            f" With fewer than {plural(enough, f'edited {names.noun}')} a head gets no verdict, and enters no class "
            "mean unless all heads have fewer."
        )
    return Markup("{}").format(words)


def _input_words(patch: dict[str, Any], names: Words) -> Markup:
    images = _part(patch, "images")
    words = []
    if _is_number(images.get("edited")):
        rows = f", {plural(images['rows'], 'edit')} in all" if _is_number(images.get("rows")) else ""
        on = f"a head is edited only on {names.nouns} in which it is sunk"
        if is_plan(patch):
            rows, on = "", "the plan’s edits are made together in each, whether or not their heads are sunk in it"
        words.append(f"{names.count(images['edited'])}{rows}; {on}.")
    held = _part(patch, "heldout").get("sentence")
    if held:
        words.append(f"{held}")
    elif _is_number(images.get("heldout")):
        words.append(f"{names.count(images['heldout'])} held out for the means and not edited.")
    chosen = [head for head in patch.get("heads") or [] if isinstance(head, dict)]
    bare = [f"L{head.get('layer')}H{head.get('head')}" for head in chosen if head.get("heldout_images") == 0]
    if bare and "mean" in (patch.get("edits") or ["mean"]):
        words.append(f"No held-out {names.noun} has an event of {joined(bare)}, so there the edit “mean” was left out.")
    return Markup("{}").format(" ".join(words))


def _effect_words(causal: Causal) -> Markup:
    say = causal.words.say
    words = Markup("{}").format(
        say(
            "The relative change of the {moved} {output}: the root mean square, over {over}, of "
            "how far each token moves, over the root mean square of the tokens’ lengths before the edit. 0 means that "
            "nothing changed, 0.01 a hundredth of a token’s length. Prefix tokens are left out"
        )
    )
    words += "." if is_plan(causal.patch) else say(", {left_out}.")
    said = {
        "cls_change": "the same for {first_name}",
        "shared_energy": "“shared” is the part of the change that all {over} have in common",
        "donor_cosine": "“towards donor” is the cosine between the mean change and the way to the donor {noun}’s mean",
    }
    named = [say(each) for name, each in said.items() if name in causal.measures]
    return words + (f" Beside it: {'; '.join(named)}." if named else "")


def _check_words(checks: dict[str, Any]) -> Markup:
    words = []
    if _is_number(checks.get("null_edits")):
        held: dict[bool | None, str] = {True: "all left the output bit-identical", False: "not all bit-identical"}
        words.append(
            f"Null edits (the sink’s own value put back) in {plural(checks['null_edits'], 'layer')}: "
            f"{held.get(_all_null_held(checks), 'result not recorded')}."
        )
    if _is_number(checks.get("identity_error_max")):
        limit = checks.get("identity_tolerance")
        tolerated = f" (tolerated: {number(limit)})" if _is_number(limit) else ""
        words.append(
            "A value edit must change the head’s update by attention × change of value: largest relative error "
            f"{number(checks['identity_error_max'])}{tolerated}."
        )
    if _is_number(checks.get("prefix_error_max")):
        words.append(
            "Only the layers from the edit on were run again; against whole passes, the largest relative difference "
            f"is {number(checks['prefix_error_max'])}."
        )
    if checks.get("kept_queries"):
        words.append(
            f"{plural(int(checks['kept_queries']), 'query', 'queries')} saw no key but the sink and kept the value "
            "under “route”."
        )
    return Markup("{}").format(" ".join(words))


def _interval_words(patch: dict[str, Any], names: Words) -> Markup:
    again = patch.get("bootstrap")
    drawn = f", {again:,} resamples" if _is_number(again) else ""
    if is_plan(patch):
        said = "95 % by bootstrap{drawn}: over {nouns}. One {noun} alone has no interval."
    else:
        said = (
            "95 % by bootstrap{drawn}: over heads for a class, over {nouns} for a head and for a class of one head, "
            "all edits of one {noun} kept together. One {noun} alone has no interval."
        )
    return Markup("{}").format(names.say(said, drawn=drawn))


def _time_words(patch: dict[str, Any], names: Words) -> Markup:
    timings = _part(patch, "timings")
    words = []
    if _is_number(timings.get("seconds")):
        words.append(f"{number(timings['seconds'], 3)} s on {patch.get('device', 'an unrecorded device')}")
    run, whole = timings.get("blocks_run"), timings.get("blocks_whole")
    if _is_number(run) and _is_number(whole) and run > 0:
        saved = f", where whole forward passes would have taken {whole:,} ({number(whole / run)} times as many)"
        words.append(f"{plural(run, 'pass', 'passes')} of {names.a_noun} through a layer{saved if whole > run else ''}")
    return Markup("{}").format("; ".join(words) + "." if words else "")


def _all_null_held(checks: dict[str, Any]) -> bool | None:
    """Whether every null edit was bit-identical; recorded as a truth value or as a count."""
    held, tried = checks.get("null_bit_identical"), checks.get("null_edits")
    if isinstance(held, bool):
        return held
    return held >= tried if _is_number(held) and _is_number(tried) else None


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _part(patch: dict[str, Any], name: str) -> dict[str, Any]:
    found = patch.get(name)
    return found if isinstance(found, dict) else {}
