"""The pass over an attention call on a CUDA device: two Triton kernels, deterministic, and no N×N map in memory.

The first goes over the keys for a block of queries and keeps each row's log-sum-exp and entropy; the second goes over
the queries for a block of keys and adds up the columns of the pattern. Accumulators are fp32; fp32 inputs are
multiplied in IEEE fp32, never in TF32. Calls with a mask are left to the tiles of torch.

Letters: B batch, H query heads, Q queries, N keys, D head dim.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from sinklab.sinks.tiles import LOG2_E, Rows

if TYPE_CHECKING:
    from sinklab.hooks.seam import AttentionCall

LARGEST_DIM = 256
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_usable = True  # until a kernel does not compile for this device


def rows_on_device(call: AttentionCall) -> Rows | None:
    """Row and column sums of an unmasked call on a CUDA device; None where the kernels do not apply."""
    global _usable
    plain = call.mask is None and not call.is_causal and call.q.dtype in DTYPES and call.q.shape[-1] <= LARGEST_DIM
    if not (_usable and plain and call.q.is_cuda and find_spec("triton")):
        return None
    try:
        return launch(call)
    except Exception as error:  # whatever Triton finds wrong with this device: the slower way gives the same numbers
        _usable = False
        message = f"The Triton kernels do not run on this device ({error}); using torch's, which are slower."
        warnings.warn(message, stacklevel=2)
        return None


def launch(call: AttentionCall) -> Rows:
    """Run both kernels, on whatever device Triton runs on (with TRITON_INTERPRET=1, the CPU)."""
    from sinklab.sinks.kernels import columns_kernel, rows_kernel

    q, k = call.q, call.k
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    lse, entropy = torch.empty(2, batch, heads, queries, dtype=torch.float32, device=q.device)
    inflow = torch.empty(batch, heads, keys, dtype=torch.float32, device=q.device)
    padded = max(16, 1 << (dim - 1).bit_length())
    block = 64 if padded * q.element_size() <= 512 else 32  # both tiles in shared memory, twice
    shape = (heads, heads // k.shape[1], queries, keys, dim, *q.stride(), *k.stride())
    scale = call.scale * LOG2_E
    blocks = {"BLOCK_Q": block, "BLOCK_K": block, "DIM": padded}
    rows_kernel[(-(-queries // block), batch * heads)](q, k, lse, entropy, scale, *shape, **blocks)
    columns_kernel[(-(-keys // block), batch * heads)](q, k, lse, inflow, scale, *shape, **blocks)
    return Rows(inflow, lse, entropy.sum(-1, dtype=torch.float64))
