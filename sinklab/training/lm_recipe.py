"""How a language model is trained: its first weights, optimizer, losses, and what is kept on the way."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.data.text import Text, Windows
from sinklab.data.toy import generator_for
from sinklab.models.lm_file import FORMAT, build_lm
from sinklab.run import fingerprint
from sinklab.training.checkpoint import load_checkpoint, save_model
from sinklab.training.distributed import Ranks
from sinklab.training.finished import read_metrics, said_of_weights, steps_done, whole_weights
from sinklab.training.lm_config import LMConfig, LMMember
from sinklab.training.lm_measure import quick_bits
from sinklab.training.loop import CHECKPOINT, METRICS, Recipe


def build_model(config: LMConfig, symbols: int, seed: int) -> Any:
    """A model with its first weights; leaves torch's own random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator_for("initialisation", seed).initial_seed())
        return build_lm(config.model, symbols)


def build_optimizer(model: torch.nn.Module, config: LMConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    named = dict(model.named_parameters())
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    matrices = [
        weight
        for weight in named.values()
        if weight.ndim == 2 and (config.decay_embedding or id(weight) not in embeddings)
    ]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in named.values() if id(weight) not in chosen]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused or None)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The best weights so far."""

    weights: Path
    about: Path
    """Their .json."""
    said: dict[str, Any]
    """What is in it: the settings, "step" and "validation"."""


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """Looks at the validation split now and then, and keeps the best weights in `folder`."""

    model: Any
    windows: Windows
    folder: Path
    about: dict[str, Any]
    batch: int
    ranks: Ranks

    def __call__(self, done: int) -> dict[str, float]:
        bits = quick_bits(self.model, self.windows, batch=self.batch, ranks=self.ranks)
        if self.ranks.first and bits < self.best() and math.isfinite(bits):
            self._save(done, bits)
        return {"validation": bits}

    def _save(self, done: int, bits: float) -> None:
        save_model(self.folder / "best.safetensors", self.model, {**self.about, "step": done, "validation": bits})

    def best(self) -> float:
        """The validation split's bits a byte with the weights that are kept."""
        kept = self.kept()
        return math.inf if kept is None else float(kept.said["validation"])

    def kept(self) -> Kept | None:
        """The best weights; None where none are whole. They are called model.* once they are evaluated.

        A kill may come when the weights have their last name and their .json has not.
        """
        shapes = {name: tuple(value.shape) for name, value in self.model.state_dict().items()}
        for weights, about in (("best", "best"), ("model", "model"), ("model", "best")):
            said = said_of_weights(self.folder / f"{about}.json", self.about)
            numbers = said is not None and type(said.get("step")) is int and type(said.get("validation")) is float
            path = self.folder / f"{weights}.safetensors"
            if said is not None and numbers and whole_weights(path, shapes):
                return Kept(weights=path, about=self.folder / f"{about}.json", said=said)
        return None

    def forget(self) -> None:
        """Remove what an earlier training left, its checkpoint too."""
        for name in ("best", "model"):
            for ending in (".safetensors", ".json"):
                self.folder.joinpath(name).with_suffix(ending).unlink(missing_ok=True)
        self.folder.joinpath(CHECKPOINT).unlink(missing_ok=True)

    def mend(self, recipe: Recipe, name: str) -> None:
        """Before a checkpoint is gone on from: see to it that the best weights until then are there.

        Lost ones are the checkpoint's, or come from training anew, which a warning says.
        """
        done = steps_done(self.folder / CHECKPOINT)
        seen = [line for line in read_metrics(self.folder / METRICS) if line["step"] <= done]
        looks = [(line["validation"], line["step"]) for line in seen if type(line.get("validation")) is float]
        looks = [look for look in looks if math.isfinite(look[0])]
        if not looks or self.best() <= min(looks)[0]:
            return
        bits, step = min(looks)
        if step == done:
            load_checkpoint(self.folder / CHECKPOINT, recipe)
            self._save(done, bits)
            return
        warnings.warn(
            f"The best weights of {name}, those after {step} steps, are lost: it is trained again from its beginning.",
            stacklevel=2,
        )
        self.forget()


def build_recipe(
    member: LMMember,
    text: Text,
    folder: Path,
    device: str = "cpu",
    *,
    compile: bool = False,
    ranks: Ranks | None = None,
) -> Recipe:
    """How one member of a run is trained; what scores best is kept in `folder`."""
    config, ranks = member.config, ranks or Ranks()
    text.require(config.context)
    model = build_model(config, len(text.symbols), member.seed).to(device)
    windows = Windows(text=text, length=config.context + 1, limit=config.validation_windows)
    about = saved_settings(member, text)
    return Recipe(
        model=model,
        optimizer=build_optimizer(model, config),
        steps=config.steps,
        batch=lambda step: text.batch(member.seed, step, config.batch, config.context, ranks.share).to(device),
        loss=lambda tokens: losses(model, tokens, config, ranks),
        rate=config.rate,
        score=Keeper(
            model=model, windows=windows, folder=folder, about=about, batch=config.evaluation_batch, ranks=ranks
        ),
        score_every=config.validate_every,
        record_every=config.record_every,
        checkpoint_every=config.checkpoint_every,
        clip=config.clip,
        fingerprint=fingerprint(about),
        compile=compile,
        ranks=ranks,
    )


def losses(model: Any, tokens: Tensor, config: LMConfig, ranks: Ranks) -> dict[str, Tensor]:
    """Mean nats a byte of tokens [B N + 1] ("total") and the same as bits a byte."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=config.bf16):
        logits = model(tokens[:, :-1]).float()  # [B N V]
    nats = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    if ranks.world > 1:  # shares of a batch need not be equal: the mean over processes is that of all rows
        nats = nats * (len(tokens) * ranks.world / config.batch)
    return {"total": nats, "bpc": nats.detach() / math.log(2)}


def saved_settings(member: LMMember, text: Text) -> dict[str, Any]:
    """What a weights file's .json says."""
    of_text = text.settings()
    return {"format": FORMAT, **member.settings(), "symbols": of_text.pop("symbols"), "text": of_text}
