"""Compile the Triton kernels for CUDA devices of compute capability 10·major + minor, without one.

usage: python tests/compile_kernels.py 90     # prints the name of each kernel that compiled
"""

from __future__ import annotations

import re
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from fairseq_rpe.attention import triton_kernels, triton_table

SIZES = {"BLOCK_M": 16, "BLOCK_N": 16, "SIZE": 16}
POINTERS = {"lse": "*fp32", "delta": "*fp32", "table": "*fp32", "sums": "*fp32", "at_q": "*i32", "at_k": "*i32"}


def kind(name: str, dtype: str) -> str:
    """Triton's type of an argument."""
    if name == "padding":
        return "*u8"
    if name in ("scale", "factor"):
        return "fp32"
    if name in ("n", "m", "columns", "lengths") or re.fullmatch(r".*_[bhn]", name):
        return "i32"
    return POINTERS.get(name, f"*{dtype}")


def build(kernel, dtype: str, width: int, constants: dict[str, object], arch: int) -> None:
    constants = {**SIZES, "WIDTH": width, "BLOCK_D": 1 << (width - 1).bit_length(), **constants}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kind(name, dtype) for name in names}
    chosen = {(names.index(name),): value for name, value in constants.items() if name in names}
    compile(
        ASTSource(fn=kernel, signature=signature, constexprs=chosen),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": 4, "num_stages": 2},
    )
    print(kernel.__name__)


if __name__ == "__main__":
    t = triton_kernels
    kernels = (t.forward, t.query_gradient, t.key_gradient, triton_table.diagonal_sums, triton_table.scattered_sums)
    for dtype, width, bias, padded in (("bf16", 40, t.DISTANCE, False), ("fp32", 32, t.POSITIONS, True)):
        for kernel in kernels:
            build(kernel, dtype, width, {"BIAS": bias.value, "PADDED": padded}, int(sys.argv[1]))
