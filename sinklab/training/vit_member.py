"""One training of a vision transformer: its network, optimizer, steps, and what happens at the end of an epoch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.atomic import atomically
from sinklab.data.validated import where_found
from sinklab.models.describe import IMAGENET
from sinklab.models.vit import ViT, ViTShape
from sinklab.models.vit_file import described
from sinklab.run import fingerprint
from sinklab.training.checkpoint import save_checkpoint, save_model
from sinklab.training.distributed import Ranks
from sinklab.training.joined import WrappedRanks, shard_over_ranks
from sinklab.training.lejepa import LeJEPA, Weights, directions, first_not_finite
from sinklab.training.loop import CHECKPOINT, Diverged, Recipe, require_finite
from sinklab.training.views import view_seed
from sinklab.training.vit_config import ViTConfig
from sinklab.training.vit_evaluate import Score, evaluate, layer_scores
from sinklab.training.vit_feed import Feed, Pictures, Shown, readable, shown_fixed
from sinklab.training.vit_kept import BEST, VALIDATION, is_best, state_name, validation_lines


def shape_from_config(config: ViTConfig) -> ViTShape:
    """The network of a config."""
    return ViTShape(
        image=config.image,
        patch=config.patch,
        dim=config.dim,
        depth=config.depth,
        heads=config.heads,
        registers=config.registers,
        gate=config.gate,
        pathway=config.pathway,
        layer_scale=config.layer_scale or None,
        pathway_scale=config.pathway_scale or None,
        drop_path=config.drop_path,
        init_std=config.init_std,
        kernel=config.kernel,
        spectral=config.spectral,
    )


def build_model(config: ViTConfig, seed: int, classes: int) -> LeJEPA:
    """With its first weights; variants of one seed share those that they have in common. Leaves torch's own state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(view_seed("first weights", seed))
        vit = ViT(shape_from_config(config))
        torch.default_generator.manual_seed(view_seed("first weights of the projector", seed))
        model = LeJEPA(
            vit,
            weights=Weights(
                sigreg=config.sigreg,
                penalty=config.penalty,
                ratio=config.penalty_ratio,
                update=config.penalty_update,
                first_block=config.penalty_first,
            ),
            classes=classes,
            hidden=config.projector_hidden,
            output=config.projector_dim,
            slices=config.slices,
            low_precision=config.precision == "bf16",
        )
    vit.checkpointing = config.checkpointing
    return model.train()


def build_optimizer(model: LeJEPA, config: ViTConfig) -> torch.optim.AdamW:
    """AdamW: the probe has a rate and decay of its own, and what is spared from decay, if anything is, another."""
    groups: dict[str, list[nn.Parameter]] = {"decayed": [], "spared": [], "probe": []}
    for name, parameter in model.named_parameters():
        spared = parameter.ndim < 2 or name.endswith(("cls_token", "pos_embed", "register_tokens"))
        kind = "probe" if name.startswith("probe.") else "spared" if spared and not config.decay_all else "decayed"
        groups[kind].append(parameter)
    settings = {
        "decayed": {"lr": config.lr, "weight_decay": config.weight_decay},
        "spared": {"lr": config.lr, "weight_decay": 0.0},
        "probe": {"lr": config.probe_lr, "weight_decay": config.probe_weight_decay},
    }
    return torch.optim.AdamW([{"params": held, **settings[kind]} for kind, held in groups.items() if held])


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """One training of a run, and all that it needs."""

    config: ViTConfig
    seed: int
    images: Pictures
    validation: Pictures
    folder: Path
    device: str = "cpu"
    ranks: Ranks = field(default_factory=Ranks)
    workers: int = 0
    compile: bool = False
    shard: bool = False
    """Share weights, gradients and optimizer state out over the ranks (FSDP2) instead of copying them (DDP)."""
    score: Score | None = None

    @property
    def name(self) -> str:
        """Its folder in the run."""
        return f"seed-{self.seed}/{self.config.name}"

    @property
    def steps_per_epoch(self) -> int:
        return len(self.images) // self.config.batch

    def settings(self) -> dict[str, Any]:
        """What a model's .json holds."""
        return {
            **described(shape_from_config(self.config)),
            "kind": "vit",
            "arm": self.config.variant,
            "seed": self.seed,
            "config": asdict(self.config),
            "preprocessing": {"mean": list(IMAGENET[0]), "std": list(IMAGENET[1]), "interpolation": "bicubic"},
            "classes": list(self.images.classes),
        }

    def about(self) -> dict[str, Any]:
        """`settings`, and which pictures it is diagnosed on where none are named: those of the validation."""
        learned_from = self.validation is self.images
        return {
            **self.settings(),
            "pictures": where_found(self.validation, count=self.config.validation_images, learned_from=learned_from),
        }


def build_feed(member: Member) -> Feed:
    """What it is shown. Raises InputError where the images are fewer than a batch, or cannot be shared out."""
    return Feed(
        member.images,
        member.config,
        member.seed,
        batches=member.config.epochs * member.steps_per_epoch * member.config.accumulate,
        ranks=member.ranks,
        workers=member.workers,
        device=member.device,
    )


def build_recipe(member: Member) -> tuple[Recipe, LeJEPA, Feed]:
    """How one member of a run is trained, the model inside whatever wraps it, and what it is shown."""
    config, ranks = member.config, member.ranks
    steps, feed = config.epochs * member.steps_per_epoch, build_feed(member)
    model = build_model(config, member.seed, len(member.images.classes)).to(member.device)
    if member.compile:
        model.vit.compile()
    called: nn.Module = model
    if ranks.world > 1 and member.shard:
        ranks = WrappedRanks(rank=ranks.rank, world=ranks.world, device=ranks.device)
        shard_over_ranks(model, [*model.vit.blocks, model.vit, model.projector, *filter(None, [model.probe])])
    elif ranks.world > 1:
        on = [torch.device(member.device)] if member.device.startswith("cuda") else None
        called = nn.parallel.DistributedDataParallel(model, device_ids=on)
        ranks = WrappedRanks(rank=ranks.rank, world=ranks.world, device=ranks.device, wrapped=called)
    seen = min(config.score_images, len(member.validation))
    pixels = torch.stack([shown_fixed(readable(member.validation, at)[1], config.image) for at in range(seen)])
    recipe = Recipe(
        model=model,
        optimizer=build_optimizer(model, config),
        steps=steps,
        batch=feed,
        loss=lambda shown: _terms(called, shown, member),
        rate=lambda step: config.rate(step, member.steps_per_epoch),
        score=lambda done: layer_scores(model, pixels.to(member.device), member.score),
        score_every=config.score_every,
        record_every=config.record_every,
        checkpoint_every=config.checkpoint_every,
        clip=config.clip or None,
        fingerprint=fingerprint({**member.settings(), "images": member.images.sha256}),
        accumulate=config.accumulate,
        ranks=ranks,
        after=lambda done: _after_step(member, recipe, model, done),
        memory=feed,
    )
    return recipe, model, feed


def _terms(called: nn.Module, shown: Shown, member: Member) -> dict[str, Tensor]:
    """The loss of one batch, with what it consists of as means over ranks. Raises Diverged for one that is NaN."""
    config = member.config
    dropped = view_seed("drop path", member.seed, shown.number, member.ranks.rank)
    torch.default_generator.manual_seed(dropped)  # so that the draw follows from the step, resumed or not
    if shown.pictures.is_cuda:
        torch.cuda.default_generators[shown.pictures.get_device()].manual_seed(dropped)
    drawing = torch.Generator().manual_seed(view_seed("directions", member.seed, shown.number))
    along = directions(config.projector_dim, config.slices, drawing, shown.pictures.device)
    terms: dict[str, Tensor] = called(shown.pictures, shown.labels, along)
    means = member.ranks.averaged({name: value.detach() for name, value in terms.items()})
    values = dict(zip(means, torch.stack([value.float() for value in means.values()]).tolist(), strict=True))
    wrong = first_not_finite(values)
    if wrong is not None:
        step, kept = shown.number // config.accumulate, (member.folder / CHECKPOINT).is_file()
        raise Diverged(
            f"The training of {member.name} has diverged: after {step} {'step' if step == 1 else 'steps'} its {wrong} "
            f"is {values[wrong]}. "
            f"{'The last checkpoint is from before' if kept else 'No checkpoint had been written yet'}; a smaller "
            "learning rate (--set lr=…) may do."
        )
    return {**means, "total": terms["total"]}


def _after_step(member: Member, recipe: Recipe, model: LeJEPA, done: int) -> None:
    """At the end of an epoch: validate, and keep weights and state if they are the best, or due."""
    epoch, rest = divmod(done, member.steps_per_epoch)
    if rest:
        return
    config, writes = member.config, member.ranks.first
    require_finite(model, member.ranks, done)
    found = evaluated(member, model)
    path, better = member.folder / VALIDATION, False
    if writes:
        kept = validation_lines(path, before=epoch)
        with atomically(path) as stream:
            stream.write("".join(json.dumps(line) + "\n" for line in [*kept, {"epoch": epoch, **found}]).encode())
        better = is_best(member, epoch, found["probe_accuracy"], kept)
    better = member.ranks.any(better)  # all ranks have to take part in gathering a sharded model
    told = {**member.about(), "epoch": epoch, "step": done, "validation": found}
    names = [BEST] if better else []
    names += [f"epoch-{epoch:04d}"] if config.save_every and epoch % config.save_every == 0 else []
    for name in names:
        path = member.folder / f"{name}.safetensors"
        save_model(path, model.vit, told, writes=writes, beside={"probe": model.probe})
        save_checkpoint(member.folder / state_name(name), recipe, done)


def evaluated(member: Member, model: LeJEPA) -> dict[str, Any]:
    """`vit_evaluate.evaluate` on the member's validation images. Raises Diverged where that comes to no numbers."""
    found = evaluate(
        model,
        member.validation,
        size=member.config.image,
        limit=member.config.validation_images,
        device=member.device,
        ranks=member.ranks,
    )
    if not all(map(math.isfinite, [*found["common_mode"], found["probe_loss"] or 0.0])):
        raise Diverged(
            f"What {member.name} computes of its validation images is no longer a number: the training has diverged. "
            "Its weights are not kept; a smaller learning rate (--set lr=…) may do."
        )
    return found
