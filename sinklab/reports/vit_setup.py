"""What a vision transformer training was, in words: its budget, what all variants share, and what they differ in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sinklab.reports.wording import joined, plural

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.training.vit_files import Told

NAMED = ("variant", "size")
"""Fields of a config that its name tells."""


def subtitle(config: dict[str, Any], told: Sequence[Told]) -> str:
    """ "6 trainings · 3 seeds · 2 variants"."""
    return " · ".join(
        [
            plural(len(told), "training"),
            plural(len(config["settings"]["seeds"]), "seed"),
            plural(len(config["settings"]["configs"]), "variant"),
        ]
    )


def budget_sentences(config: dict[str, Any], told: Sequence[Told]) -> list[str]:
    """One sentence a budget: steps, images a step, views, epochs, and how many images are seen in all."""
    groups: dict[tuple[int, ...], list[str]] = {}
    steps = {one.config: one.steps for one in told}
    for name, own in config["settings"]["configs"].items():
        images = int(config["pictures"][name])
        groups.setdefault((steps[name], own["batch"], own["views"], own["epochs"], images), []).append(str(name))
    return [
        f"{joined(names) if len(groups) > 1 else 'Every variant'}: {plural(many, 'step')} of {plural(batch, 'image')} "
        f"in {plural(views, 'view')}, {plural(many * batch, 'image')} seen in {plural(epochs, 'epoch')} of "
        f"{images:,} images."
        for (many, batch, views, epochs, images), names in groups.items()
    ]


def facts(config: dict[str, Any], members: pd.DataFrame) -> list[tuple[str, str]]:
    """What fixes the training, in words; of what variants differ in, the table beside it tells."""
    settings = config["settings"]
    configs = list(settings["configs"].values())

    def told(words: str, *names: str) -> str:
        """The words with the numbers that all variants share; "" where they do not."""
        own = {name: configs[0][name] for name in names}
        same = all(each[name] == value for each in configs for name, value in own.items())
        return words.format(**own) if same else ""

    images = sorted({int(each) for each in members["images"].dropna()})
    validated = f"{' or '.join(f'{each:,}' for each in images)} to validate on, " if images else ""
    prints = joined(list(dict.fromkeys(f"{shas[0][:12]}…" for shas in settings["images"].values())))
    lines = [
        ("Network", _sentence(told("{image} px in patches of {patch}", "image", "patch"),
                              told("{depth} blocks of width {dim}, {heads} heads", "depth", "dim", "heads"))),
        ("Seeds", ", ".join(map(str, settings["seeds"]))),
        ("Images", f"{validated}SHA-256 of the training images {prints}"),
        ("Objective", _sentence("LeJEPA", told("SIGReg weighs {sigreg:g}", "sigreg"),
                                told("along {slices} directions a step", "slices"))),
        ("Optimizer", _sentence("AdamW", told("learning rate {lr:g}", "lr"),
                                told("weight decay {weight_decay:g}", "weight_decay"),
                                told("warm-up {warmup_epochs:g} epochs, then a cosine", "warmup_epochs"),
                                told("clip {clip:g}", "clip"), told("{precision}", "precision"))),
        ("Scored", _sentence(told("sinks and shares every {score_every:,} steps", "score_every"),
                             told("on the first validation images, {score_images} at most", "score_images"))),
        ("Machine", plural(int(config.get("world", 1)), "process", "processes")),
        ("Command", " ".join(word for word in config.get("command", []) if word != "--resume") or "from Python"),
    ]  # fmt: skip
    return [(name, words) for name, words in lines if words]


def _sentence(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def difference_rows(configs: dict[str, dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """(field, its value in each config) of the fields in which configs differ, names aside."""
    held = list(configs.values())
    return [
        (name, [_written(own[name]) for own in held])
        for name in held[0]
        if name not in NAMED and any(own[name] != held[0][name] for own in held)
    ]


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
