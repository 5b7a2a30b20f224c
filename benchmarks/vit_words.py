"""What docs/vision-training.md says of the study and of memory: from results/vit_study.json and vit_memory.json."""

from __future__ import annotations

from typing import Any


def study_text(result: dict[str, Any]) -> str:
    """The study's table, the claims, and what the numbers rest on."""
    about, variants = result["conditions"], result["over_seeds"]
    config, seeds = about["config"], len(about["seeds"])
    rules = list(next(iter(result["rows"]))["sinks_per_image"])
    lines = [
        "| variant | seeds | probe accuracy | common mode, blocks ≥ 1 | largest mean inflow of a head | largest inflow "
        + "| "
        + " | ".join(f"{rule}: NOP / broadcast / all" for rule in rules)
        + " |",
        "|---|---|---|---|---|---|" + "---|" * len(rules),
    ]
    for name, numbers in variants.items():
        cells = [
            f"`{name}`",
            str(len(numbers["probe_accuracy"]["seeds"])),
            _spread(numbers["probe_accuracy"], 3),
            _spread(numbers["common_mode"], 3),
            _spread(numbers["largest_mean_inflow"], 3),
            f"{max(numbers['largest_inflow']['seeds']):.2f}",
            *(_counts(numbers, rule) for rule in rules),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    sets = "".join(f" --set {change}" for change in about["changes"])
    steps = f"{about['steps']} steps of {config['batch']} images in {config['views']} views"
    done = (
        "" if result["complete"] else f" It is not finished: {len(result['rows'])} of {5 * seeds} trainings are in it."
    )
    lines += [
        "",
        f"Means over seeds, in brackets the least and the most (`--epochs {config['epochs']}"
        f"{sets}`). Each training is {steps}, drawn pictures of "
        f"{config['image']} pixels, {about['images_seen']:,} of them seen, and is diagnosed on "
        f"{about['diagnosed_images']} held-out ones. Counts are per image in blocks from 1 on, definition `counts`; "
        "the largest inflow is over all images and seeds. Where 65 tokens attend to all alike, each has an inflow of "
        f"{1 / 65:.3f}.{done}",
        "",
        *([_tried(result["tried"]), ""] if "tried" in result else []),
        *(f"- {sentence}" for sentence in claims(result)),
        "",
        verdict(result),
    ]
    return "\n".join(lines)


def _tried(trials: list[dict[str, Any]]) -> str:
    """How the learning rate was chosen."""
    told = [
        f"at {trial['lr']:g}, after {trial['steps_done']:,} of {trial['epochs'] * 64:,} steps, "
        f"{trial['relaxed_events_an_image']:.2f} relaxed events an image, a common-mode share of "
        f"{sum(trial['common_mode'][1:]) / (len(trial['common_mode']) - 1):.3f} and a probe accuracy of "
        f"{trial['probe_accuracy']:.3f}"
        for trial in trials
    ]
    return (
        "The learning rate was chosen with the baseline's first seed alone, between one at which no head sank and one "
        f"at which all tokens became alike: {'; '.join(told)}."
    )


def _spread(number: dict[str, Any], places: int) -> str:
    mean, seeds = number["mean"], number["seeds"]
    return f"{mean:.{places}f} ({min(seeds):.{places}f} to {max(seeds):.{places}f})"


def _counts(numbers: dict[str, Any], rule: str) -> str:
    means = [numbers[f"{rule} | counts | {name}"]["mean"] for name in ("nop", "broadcast", "all")]
    return " / ".join(f"{mean:.2f}" for mean in means)


def claims(result: dict[str, Any]) -> list[str]:
    """Each claim of order with the seeds that show it, and the mean difference."""
    told = []
    for claim in result["compared"]:
        gaps = claim["differences"]
        if not gaps:
            continue
        mean = sum(gaps) / len(gaps)
        told.append(
            f"{claim['claim'][0].upper()}{claim['claim'][1:]}: on {claim['seeds_that_show_it']} of {len(gaps)} seeds "
            f"(mean difference {mean:+.3f})."
        )
    return told


FEW = 0.05
"""Events an image below which no order of variants is read from the counts."""


def verdict(result: dict[str, Any]) -> str:
    """What follows, in sentences: how many sinks there are under each rule, and which orders all seeds have."""
    told = []
    rules = list(next(iter(result["rows"]))["sinks_per_image"])
    for rule in rules:
        told.append(_events(result, rule))
    for rule in rules:
        means = [numbers[f"{rule} | counts | all"]["mean"] for numbers in result["over_seeds"].values()]
        compared = [claim for claim in result["compared"] if f"({rule})" in claim["claim"]]
        if max(means) < FEW:
            told.append(
                f"Under the {rule} rule that is too few to say anything about the paper's order, for or against."
            )
        elif compared:
            told.append(_orders(rule, compared))
    return " ".join(told)


def _events(result: dict[str, Any], rule: str) -> str:
    images = result["conditions"]["diagnosed_images"]
    found = {name: numbers[f"{rule} | counts | all"]["seeds"] for name, numbers in result["over_seeds"].items()}
    events = {name: round(sum(seeds) * images) for name, seeds in found.items()}
    nop = sum(sum(one[f"{rule} | counts | nop"]["seeds"]) for one in result["over_seeds"].values())
    looked, total = sum(map(len, found.values())) * images, sum(events.values())
    where = ", ".join(f"{count:,} in `{name}`" for name, count in events.items() if count)
    said = f"{total:,} event{'' if total == 1 else 's'}, {round(nop * images):,} of them NOP,"
    return f"Under the {rule} rule: {said} in {looked:,} images{f' ({where})' if where else ''}."


def _orders(rule: str, compared: list[dict[str, Any]]) -> str:
    """Which of the paper's orders every seed has, which none has, which differ, and which cannot be asked."""
    every, none, mixed, empty = "it holds on every seed", "it holds on no seed", "it differs from seed to seed", ""
    groups: dict[str, list[str]] = {every: [], none: [], mixed: [], empty: []}
    for claim in compared:
        gaps, shown = claim["differences"], claim["seeds_that_show_it"]
        asked = any(abs(gap) >= FEW for gap in gaps)
        group = empty if not asked else every if shown == len(gaps) else mixed if shown else none
        groups[group].append(claim["claim"].replace(f" ({rule})", ""))
    said = [f"{group} that {', and that '.join(claims)}" for group, claims in groups.items() if group and claims]
    said += [f"whether {claim} cannot be asked, for both have hardly one" for claim in groups[empty]]
    return f"Under the {rule} rule {'; '.join(said)}."


def dry_run_text(result: dict[str, Any]) -> str:
    """What the dry run of ViT-L came to."""
    lines = ["| config | total loss | penalty | parameters | seconds a step |", "|---|---|---|---|---|"]
    for run in result["runs"]:
        terms, penalty = run["terms"], run["terms"].get("penalty")
        lines.append(
            f"| `{run['name']}` | {terms['total']:.3f} | {'–' if penalty is None else f'{penalty:.4f}'} | "
            f"{sum(run['parameters'].values()) / 1e6:.1f} M | {run['seconds_per_step']:.0f} |"
        )
    return "\n".join([*lines, "", f"`{result['command']}`; {result['note']}."])


def memory_text(result: dict[str, Any]) -> str:
    """GiB a GPU, by variant, with and without checkpointing of blocks."""
    images = result["images_per_gpu"]
    lines = [
        "| config | parameters, with projector and probe | weights, gradients, moments | kept for backward, an image | "
        f"a GPU with {images} images | the same, checkpointed |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in result["variants"].items():
        held = one["state_gib"] + one["copies_gib"]
        whole, spared = (held + images * one[key] for key in ("image_gib", "image_checkpointed_gib"))
        lines.append(
            f"| `{name}` | {one['parameters'] / 1e6:.1f} M | {one['state_gib']:.1f} GiB | {one['image_gib']:.2f} GiB | "
            f"{whole:.0f} GiB | {spared:.0f} GiB |"
        )
    lines += [
        "",
        f"{result['precision']}; an image is shown in four views; without torch.compile, which keeps less. The "
        "bfloat16 copies of the weights are in the last two columns; DDP's buckets (4 bytes a parameter), the "
        "allocator's slack and kernels' own room are not. `--set accumulate=4` keeps a quarter of the images at a "
        "time, and `--fsdp` shares the third column out over the GPUs.",
    ]
    return "\n".join(lines)
