"""Compile the Triton kernels for CUDA devices of compute capability 10·major + minor, without one.

usage: python tests/attention/compile_kernels.py 90     # prints the name of each kernel that compiled
"""

import re
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from fairseq_rpe.attention.triton import bias_gradient, kernels, tiles

SIZES = {"BLOCK_M": 16, "BLOCK_N": 16, "SIZE": 16}
FLOATS = ("lse", "delta", "table", "sums", "of_pieces", "of_near")


def kind(name: str, dtype: str, curve: bool) -> str:
    """Triton's type of an argument."""
    if name == "padding":
        return "*u8"
    if name in ("scale", "factor"):
        return "fp32"
    if name in ("n", "m", "columns", "lengths") or re.fullmatch(r".*_[bhn]", name):
        return "i32"
    if name == "first":
        return "*i32"
    if name in ("at_q", "at_k"):
        return "*fp32" if curve else "*i32"
    return "*fp32" if name in FLOATS else f"*{dtype}"


def build(kernel, dtype: str, width: int, constants: dict[str, object], arch: int, pruned: bool = False) -> None:
    constants = {**SIZES, "first": None, "WIDTH": width, "BLOCK_D": 1 << (width - 1).bit_length(), **constants}
    if pruned:
        del constants["first"]
    names, curve = kernel.arg_names, constants["BIAS"] >= tiles.CURVE.value
    signature = {name: "constexpr" if name in constants else kind(name, dtype, curve) for name in names}
    chosen = {(names.index(name),): value for name, value in constants.items() if name in names}
    compile(
        ASTSource(fn=kernel, signature=signature, constexprs=chosen),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": 4, "num_stages": 2},
    )
    print(kernel.__name__)


if __name__ == "__main__":
    arch, forward = int(sys.argv[1]), kernels.forward
    main = (forward, kernels.query_gradient, kernels.key_gradient)
    by_distance, walked = bias_gradient.diagonal_sums, bias_gradient.walked_sums
    for dtype, width, bias, padded, group in (
        ("bf16", 40, tiles.DISTANCE.value, False, (*main, by_distance)),
        ("fp32", 32, tiles.POSITIONS.value, True, (*main, walked)),
        ("bf16", 64, tiles.CURVE.value + 5, True, (*main, by_distance, walked)),
        ("fp32", 40, tiles.CURVE.value, False, (*main, by_distance, walked)),
    ):
        for kernel in group:
            build(kernel, dtype, width, {"BIAS": bias, "PADDED": padded}, arch)
    build(forward, "bf16", 64, {"BIAS": tiles.DISTANCE.value, "PADDED": False}, arch, pruned=True)
