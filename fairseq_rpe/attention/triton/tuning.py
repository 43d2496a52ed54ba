"""Launches Triton kernels with block sizes from a short list, chosen by measurement on the current machine."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import triton

from fairseq_rpe.attention.triton.kernels import forward, key_gradient, query_gradient
from fairseq_rpe.attention.triton.tiles import BY_KEY, BY_QUERY, INTERPRETED, NONE

Size = tuple[int, int, int, int]  # block of queries, block of keys, warps, stages of the pipeline
FEW_QUERIES: list[Size] = [(16, 64, 4, 2), (16, 16, 4, 1)]  # for at most 16 queries, as in decoding
# Sizes that fit into registers with any bias (benchmarks/kernel_registers.py), by kernel and by the largest row of a
# tile in bytes. The last size of each list also fits into 99 KiB of shared memory.
SIZES: dict[str, dict[int, list[Size]]] = {
    "forward": {
        128: [(128, 64, 8, 3), (64, 64, 4, 3), (64, 32, 4, 3)],
        256: [(128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)],
    },
    "query_gradient": {128: [(128, 32, 8, 3), (64, 32, 4, 3)], 256: [(64, 64, 8, 2), (64, 32, 4, 3)]},
    "key_gradient": {
        128: [(32, 64, 4, 3), (32, 32, 4, 2)],
        256: [(64, 64, 8, 2), (32, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2)],
    },
}
# Larger sizes for rows of 128 bytes. They fit into registers without a bias, or with a bias of positions on devices of
# capability 9.x, whose products read their factors from shared memory.
LARGER: dict[str, list[Size]] = {
    "forward": [(128, 128, 8, 3)],
    "query_gradient": [(128, 64, 8, 3), (64, 64, 4, 3)],
    "key_gradient": [(64, 128, 8, 3), (64, 64, 4, 3)],
}
# Sizes for products of tokens with vectors of distances, whose addresses take registers; those of ``key_gradient`` also
# for numbers of tokens.
PRODUCTS: dict[str, dict[int, list[Size]]] = {
    "forward": {128: SIZES["forward"][128], 256: [(64, 32, 8, 2), (32, 32, 4, 2)]},
    "query_gradient": {row: [(64, 32, 8, 2), (32, 32, 4, 2)] for row in (128, 256)},
    "key_gradient": {128: [(32, 64, 8, 2), (32, 32, 4, 2)], 256: [(32, 64, 8, 2), (32, 32, 8, 2)]},
}
WIDE: list[Size] = [(32, 32, 8, 2), (32, 16, 8, 1)]  # for rows of more than 256 bytes
# float32 products take three times the registers; for rows of 1024 bytes no size fits them without spilling
FLOAT32: dict[int, list[Size]] = {
    256: [(32, 32, 4, 2), (32, 32, 8, 2)],
    512: [(32, 16, 8, 1), (16, 16, 8, 1)],
    1024: [(16, 16, 8, 1)],
}
INTERPRETER_SIZES = {"BLOCK_M": 32, "BLOCK_N": 16}  # small, so that short sequences have several blocks


def sizes(kernel: str, row: int, float32: bool, larger: bool, content: int = 0) -> list[Size]:
    """Return the block sizes to try.

    Args:
        kernel: "forward", "query_gradient" or "key_gradient".
        row: bytes of a row of a tile.
        float32: whether q, k and v are float32.
        larger: whether sizes of ``LARGER`` fit, too, if no term of the bias depends on the tokens.
        content: CONTENT of the kernel.
    """
    if float32:
        return FLOAT32[max(row, 256)]
    if row > 256:
        return WIDE
    if content & (BY_QUERY.value | BY_KEY.value) or (content and kernel == "key_gradient"):
        return PRODUCTS[kernel][max(row, 128)]
    return (LARGER[kernel] if larger and row <= 128 and not content else []) + SIZES[kernel][max(row, 128)]


def _config(queries: int, keys: int, warps: int, stages: int) -> triton.Config:
    """Return triton's form of a ``Size``."""
    return triton.Config({"BLOCK_M": queries, "BLOCK_N": keys}, num_warps=warps, num_stages=stages)


def _with_autotuning(kernel: Any) -> Any:
    """Return a kernel that measures its block sizes once per process, dtype, type of call and class of lengths."""
    if INTERPRETED:
        return kernel
    name = kernel.__name__
    by_row = SIZES[name], PRODUCTS[name], FLOAT32
    listed = dict.fromkeys(chain(*(size for x in by_row for size in x.values()), LARGER[name], WIDE, FEW_QUERIES))
    configs = {size: _config(*size) for size in listed}

    def suitable(_: list[triton.Config], named: dict[str, Any], **more: Any) -> list[triton.Config]:
        """Return the candidates to measure; in deterministic mode the last one, which is then used without measuring.

        The last digits of sums depend on the block sizes, so a choice by time would not be repeatable.
        """
        args = {**named, **more}  # the arguments of the launch, which triton passes in two groups
        q = args["q"]
        larger = args["BIAS"] == NONE.value or (q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9)
        row = args["BLOCK_D"] * q.element_size()
        candidates = sizes(name, row, q.dtype == torch.float32, larger, args["CONTENT"])
        candidates = candidates if args["lengths"] else FEW_QUERIES
        return [configs[x] for x in (candidates[-1:] if torch.are_deterministic_algorithms_enabled() else candidates)]

    keys = ["lengths", "WIDTH", "BIAS", "CONTENT", "PADDED", "CAPPED"]
    return triton.autotune([*configs.values()], key=keys, prune_configs_by={"early_config_prune": suitable})(kernel)


FORWARD, QUERY_GRADIENT, KEY_GRADIENT = map(_with_autotuning, (forward, query_gradient, key_gradient))


def launch(kernel: Any, rows: int, block: str, shared: dict[str, Any], **more: Any) -> None:
    """Run a tuned kernel on a grid of (blocks of rows, heads, batch), with the heads of the queries or of the keys.

    Args:
        kernel: FORWARD, QUERY_GRADIENT or KEY_GRADIENT.
        rows: number of queries or keys, which are divided into blocks.
        block: name of the kernel's parameter for the size of these blocks, BLOCK_M for queries or BLOCK_N for keys.
        shared: arguments by name that several kernels have in common; those that this kernel lacks are ignored.
        more: further arguments of this kernel.
    """
    block_sizes = INTERPRETER_SIZES if INTERPRETED else {}
    # class of lengths: sizes are measured once for each
    seen_keys = shared["m"] if shared["window"] is None else shared["window"]
    lengths = 0 if shared["n"] <= 16 else 1 if seen_keys <= 2048 else 2
    heads = shared["q" if block == "BLOCK_M" else "k"].shape[1]
    blocks = lambda meta: triton.cdiv(rows, meta[block])  # noqa: E731
    run(kernel, blocks, shared, heads, **more, **block_sizes, lengths=lengths)


def run(kernel: Any, blocks: Callable[[dict[str, Any]], int], shared: dict[str, Any], heads: int, **more: Any) -> None:
    """Run a kernel on a grid of (blocks, heads, batch) with those of the shared arguments that it has.

    Args:
        kernel: any Triton kernel, tuned or not.
        blocks: function of the kernel's meta-parameters that returns the number of blocks.
        heads: number of heads of the grid.
        shared: arguments by name that several kernels have in common; those that this kernel lacks are ignored.
        more: further arguments of this kernel.
    """
    q = shared["q"]
    arguments = {name: shared[name] for name in kernel.arg_names if name in shared}
    with torch.cuda.device_of(q):  # Triton launches on the current device, whichever the tensors are on
        kernel[lambda meta: (blocks(meta), heads, q.shape[0])](**arguments, **more)
