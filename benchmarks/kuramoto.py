"""What a phase-state layer costs: against a transformer layer as wide, and against its own formula written out.

    python benchmarks/kuramoto.py [--widths 128 256] [--tokens 256] [--batch 4] [--rounds 9] [--compile]

One process, one thread's CPU clock, rounds interleaved; a ratio is the median over rounds of ratios within a round. A
layer is attention and SwiGLU, both hidden to 8/3 of the width; "step" is forward and backward. The direct formula forms
all N² k cosines, as the paper writes it; it is compared on one sequence, for its memory's sake. Only the ratios carry over to another
machine. Writes benchmarks/results/kuramoto.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diagnose import conditions
from torch import Tensor, nn

from sinklab.models.kuramoto import Gates, PhaseAttention, PhaseBlock, lift
from sinklab.models.lm_config import KuramotoConfig, TransformerConfig
from sinklab.models.transformer import TransformerBlock

RESULT = Path(__file__).parent / "results" / "kuramoto.json"


class DirectAttention(PhaseAttention):
    """The same layer by sums over all pairs of tokens and all coordinates, [B N N k] each."""

    def forward(self, theta: Tensor, past: Any = None) -> Tensor:
        psi = lift(theta)
        g_query, g_key = self.gates(psi)  # type: ignore[misc]
        phi = theta + self.frequencies * torch.arange(theta.shape[1])[:, None]  # type: ignore[operator]
        kernel = (phi[:, :, None] - phi[:, None]).cos() * g_query[:, :, None] * g_key[:, None]
        scores = self.temperature * self.scale * kernel.sum(-1)
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(future, -torch.inf).softmax(-1)
        a = (pattern[..., None] * (theta[:, None] - theta[:, :, None]).sin()).sum(2)
        increment: Tensor = self.bound(self.velocity(psi) * a)  # type: ignore[misc]
        return increment


def layers(width: int) -> dict[str, nn.Module]:
    """A phase layer, the same one with its attention written out, and a transformer layer as wide."""
    torch.manual_seed(0)
    hidden = 8 * width // 3
    phase = KuramotoConfig(phases=width, hidden=hidden)
    block = PhaseBlock(phase, Gates(width, bias=True))
    direct = deepcopy(block)
    direct.attention = DirectAttention(phase, block.attention.gates)  # type: ignore[arg-type]
    direct.load_state_dict(block.state_dict())
    softmax = TransformerBlock(replace(TransformerConfig(), dim=width, heads=4, hidden=hidden))
    return {"phase": block, "transformer": softmax, "direct": direct}


def forward(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def step(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    layer(x.requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]


def seconds(work: Callable[..., None], layer: Any, x: Tensor, repeats: int) -> float:
    start = time.thread_time()
    for _ in range(repeats):
        work(layer, x)
    return (time.thread_time() - start) / repeats


def compared(one: Any, other: Any, x: Tensor, rounds: int, repeats: int) -> dict[str, float]:
    """How many times as long as `other` takes `one` takes, forward and for a step, with the spread over rounds."""
    found: dict[str, float] = {}
    for name, work in (("forward", forward), ("step", step)):
        times = [(seconds(work, one, x, repeats), seconds(work, other, x, repeats)) for _ in range(rounds + 1)][1:]
        ratios = [a / b for a, b in times]
        found |= {
            name: round(statistics.median(ratios), 3),
            f"{name}_least": round(min(ratios), 3),
            f"{name}_most": round(max(ratios), 3),
            f"{name}_ms": round(1e3 * statistics.median(a for a, _ in times), 2),
        }
    return found


def case(width: int, tokens: int, batch: int, rounds: int, compiled: bool) -> dict[str, Any]:
    """All ratios of one shape, and how far the two forms of attention are apart."""
    made = layers(width)
    x = 0.5 * torch.randn(batch, tokens, width)
    few = x[:1].clone()
    with torch.no_grad():
        apart = float((made["phase"](few) - made["direct"](few)).abs().max())
    wrap: Callable[[Any], Any] = torch.compile if compiled else lambda layer: layer
    row: dict[str, Any] = {"width": width, "tokens": tokens, "batch": batch, "rounds": rounds, "compiled": compiled}
    row["phase_over_transformer"] = compared(wrap(made["phase"]), wrap(made["transformer"]), x, rounds, 5)
    if not compiled:
        row["direct_over_phase"] = compared(made["direct"], made["phase"], few, max(3, rounds // 3), 1)
        row["largest_difference"] = float(f"{apart:.2g}")
    return row


def main() -> None:
    """Measure and write the result; rows of other shapes that are there already stay."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    held = json.loads(RESULT.read_text())["rows"] if RESULT.is_file() else {}
    for width in given.widths:
        key = f"{width} x {given.tokens}, batch {given.batch}{', compiled' if given.compile else ''}"
        held[key] = case(width, given.tokens, given.batch, given.rounds, given.compile)
        print(key, json.dumps(held[key]))
    RESULT.write_text(json.dumps({"conditions": conditions(), "rows": held}, indent=2) + "\n")


if __name__ == "__main__":
    main()
