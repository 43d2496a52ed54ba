"""Launching Triton kernels with block sizes that were measured, from a short list, on the machine at hand."""

from collections.abc import Callable
from typing import Any

import torch
import triton

from .kernels import forward, key_gradient, query_gradient
from .tiles import INTERPRETED

# (block of queries, block of keys, warps, stages of the pipeline); the backward kernel of keys takes them transposed,
# without the first, for which it has too few registers
SIZES = [(128, 128, 8, 3), (128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 2), (32, 32, 4, 2)]
FEW_QUERIES = [(16, 64, 4, 2), (16, 16, 4, 1)]
INTERPRETER_SIZES = {"BLOCK_M": 32, "BLOCK_N": 16}  # small: so that short sequences have several blocks
ROW_BYTES = range(2**13, 2**15 + 1)  # of the longer side of a block: as much as chips hold beside the rest


def _suitable(configs: list[triton.Config], named: dict[str, Any], **more: Any) -> list[triton.Config]:
    """The one to five candidates that are worth measuring; in deterministic mode the smallest, unmeasured.

    Sums depend on the sizes of blocks in their last digits, so a choice by the clock would not be repeatable.
    """
    given = {**named, **more}
    if given["lengths"] == 0:
        suitable = [c for c in configs if c.kwargs["BLOCK_M"] == 16]
    else:
        row = given["BLOCK_D"] * given["q"].element_size()
        sides = [(c, min(c.kwargs.values()), max(c.kwargs.values())) for c in configs]
        suitable = [c for c, short, long in sides if long * row in ROW_BYTES and long <= 2 * short]
    return suitable[-1:] if torch.are_deterministic_algorithms_enabled() else suitable


def _tuned(kernel: Any, sizes: list[tuple[int, int, int, int]]) -> Any:
    """The kernel with its block sizes measured once per process, head width, dtype, bias and class of lengths."""
    if INTERPRETED:
        return kernel
    configs = [triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=w, num_stages=s) for m, n, w, s in sizes]
    keys = ["lengths", "WIDTH", "BIAS", "PADDED"]
    return triton.autotune(configs, key=keys, prune_configs_by={"early_config_prune": _suitable})(kernel)


FORWARD = _tuned(forward, SIZES + FEW_QUERIES)
QUERY_GRADIENT = _tuned(query_gradient, SIZES + FEW_QUERIES)
KEY_GRADIENT = _tuned(key_gradient, [(n, m, w, s) for m, n, w, s in SIZES[1:]] + FEW_QUERIES)


def launch(kernel: Any, rows: int, block: str, shared: dict[str, Any], **more: Any) -> None:
    """Run a kernel on a grid of (blocks of ``rows``, heads, batch); ``block`` names the size that cuts the rows."""
    sizes = INTERPRETER_SIZES if INTERPRETED else {}
    lengths = 0 if shared["n"] <= 16 else 1 if shared["m"] <= 2048 else 2
    run(kernel, lambda meta: triton.cdiv(rows, meta[block]), shared, **more, **sizes, lengths=lengths)


def run(kernel: Any, blocks: Callable[[dict[str, Any]], int], shared: dict[str, Any], **more: Any) -> None:
    """Run a kernel on a grid of (blocks, heads, batch) with those of the shared arguments that it takes."""
    q = shared["q"]
    arguments = {name: shared[name] for name in kernel.arg_names if name in shared}
    with torch.cuda.device_of(q):  # Triton launches on the current device, whichever the tensors are on
        kernel[lambda meta: (blocks(meta), q.shape[1], q.shape[0])](**arguments, **more)
