"""The Triton kernels in Triton's interpreter, against the pattern in float64: the same code that a GPU runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json, math, sys
import torch
from sinklab.hooks.seam import AttentionCall
from sinklab.sinks.cuda import launch

def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

batch, heads, kv_heads, queries, keys, dim, sharp, dtype = json.loads(sys.argv[1])
q, k = draw(batch, heads, queries, dim, seed=0) * sharp, draw(batch, kv_heads, keys, dim, seed=1)
if sharp > 5:
    k[:, :, 3] = 0.3 * q[:, :kv_heads].mean(2)  # rows close to one-hot
q, k = q.to(getattr(torch, dtype)), k.to(getattr(torch, dtype))
call = AttentionCall(q=q, k=k, v=k, mask=None, is_causal=False, scale=1 / math.sqrt(dim), grouped=kv_heads < heads)
rows = launch(call)
logits = q.double() @ k.double()[:, call.kv_head].transpose(-1, -2) * call.scale
pattern = logits.softmax(-1)
truth = {
    "inflow": pattern.sum(-2),
    "lse": logits.logsumexp(-1) / math.log(2),
    "entropy": -torch.special.xlogy(pattern, pattern).sum((-1, -2)) / math.log(2),
}
found = {"inflow": rows.inflow, "lse": rows.lse, "entropy": rows.entropy}
again = launch(call)
print(json.dumps({
    "off": {n: float(((found[n].double() - t).abs() / t.abs().clamp_min(1e-3)).max()) for n, t in truth.items()},
    "repeats": torch.equal(again.inflow, rows.inflow) and torch.equal(again.entropy, rows.entropy),
}))
"""


@pytest.mark.parametrize(
    "case",
    [
        (1, 2, 2, 65, 65, 16, 1.0, "float32"),
        (2, 4, 2, 33, 50, 24, 2.0, "float32"),
        (1, 2, 2, 40, 40, 64, 30.0, "float32"),
        (1, 2, 1, 17, 17, 8, 1.0, "float16"),
    ],
)
def test_the_kernels_give_the_sums_of_the_pattern(case: tuple[object, ...]) -> None:
    """Odd sizes, grouped-query heads, nearly one-hot rows, half precision (the interpreter has no bfloat16); the same
    bits a second time.
    """
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(case)], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert max(found["off"].values()) < 2e-5, found
    assert found["repeats"]
