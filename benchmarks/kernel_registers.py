"""Registers and spilled bytes of the Triton kernels at their candidate block sizes, measured without a GPU.

    python benchmarks/kernel_registers.py                     # a Markdown table; several minutes of compiling
    python benchmarks/kernel_registers.py --arch 90 --width 64 --dtype fp32 --bias table
    python benchmarks/kernel_registers.py --few               # what the tests compile: every kernel once

The script compiles for CUDA devices of compute capability 10·major + minor, as a launch on aligned memory does. It
reads registers and spilled bytes with the cuobjdump that comes with Triton. A register that does not fit is spilled
into memory. A few spilled bytes outside of a loop cost nothing; hundreds inside a loop are slow. Triton drops a
candidate that needs more shared memory than a device has (99 KiB on 8.6 and 8.9, 163 on 8.0, 227 on 9.0).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter compiles nothing
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as in launches; it also avoids a warning

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from fairseq_rpe.attention.triton import bias_gradient, content_gradient, kernels, tiles, tuning

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
STEPS = 4  # steps of the binary search among 9 to 16 pieces, as FIRE's ReLUs give
BIASES = {
    "none": tiles.NONE.value,
    "table": tiles.DISTANCE.value,
    "positions": tiles.POSITIONS.value,
    "line": tiles.CURVE.value,
    "curve": tiles.CURVE.value + STEPS,
}
# biases that depend on the tokens: gates of forgetting, products of queries (shaw), these and a term of keys
# (transformer_xl), products of queries and of keys (deberta)
CONTENTS = {
    "tokens": tiles.TOKENS.value,
    "by_query": tiles.BY_QUERY.value,
    "tokens+by_query": tiles.TOKENS.value + tiles.BY_QUERY.value,
    "by_query+by_key": tiles.BY_QUERY.value + tiles.BY_KEY.value,
}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# a window, a softcap, a null logit, and four query heads per key head
OPTIONS = ("window", "softcap", "null", "groups")
FLOATS = ("lse", "delta", "table", "null", "sums", "near_grad", "query_sums", "key_sums")
FLOATS += ("query_terms", "key_terms", "query_table", "key_table")


@dataclass(frozen=True)
class Case:
    """A kernel at a size (block of queries, block of keys, warps, stages of the pipeline)."""

    kernel: str
    size: tuple[int, int, int, int]
    bias: str = "none"
    width: int = 64
    dtype: str = "bf16"
    padded: bool = False
    pruned: bool = False
    options: tuple[str, ...] = ()  # of OPTIONS

    @property
    def position_bias(self) -> int:
        return BIASES.get(self.bias, tiles.NONE.value)

    @property
    def content(self) -> int:
        return CONTENTS.get(self.bias, 0)

    @property
    def block_d(self) -> int:
        return 1 << (self.width - 1).bit_length()

    def __str__(self) -> str:
        m, n, warps, stages = self.size
        with_options = "".join(f", {option}" for option in self.options)
        sizes = f"{m}×{n}, {warps} warps, {stages} stages"
        return f"{self.kernel} {self.bias} D={self.width} {self.dtype} {sizes}{with_options}"


def argument_type(name: str, case: Case) -> str:
    """Return the Triton type of an argument."""
    if name in ("scale", "cap", "factor"):
        return "fp32"
    if name in tiles.LENGTHS or re.fullmatch(r".*_[bhn]", name):
        return "i32"
    if name in ("first", "until"):
        return "*i32"
    if name in ("at_q", "at_k"):
        return "*fp32" if case.position_bias >= tiles.CURVE.value else "*i32"
    return "*fp32" if name in FLOATS else f"*{case.dtype}"


def measure(case: Case, arch: int) -> tuple[int, int, int]:
    """Return registers per thread, spilled bytes and bytes of shared memory."""
    [kernel] = [getattr(x, case.kernel) for x in (kernels, bias_gradient, content_gradient) if hasattr(x, case.kernel)][
        :1
    ]
    m, n, warps, stages = case.size
    constants: dict[str, Any] = {"BLOCK_M": m, "BLOCK_N": n, "SIZE": m, "WIDTH": case.width, "BLOCK_D": case.block_d}
    constants |= {"BIAS": case.position_bias, "CONTENT": case.content, "PADDED": case.padded}
    constants |= {"CAPPED": "softcap" in case.options, "GROUP": 4 if "groups" in case.options else 1}
    constants |= {} if case.pruned else {"first": None}
    constants |= {} if "window" in case.options else {"window": None}
    constants |= {} if "null" in case.options else {"null": None}
    constants |= {"low": None} if case.dtype == "fp32" else {}
    constants |= {} if constants["BIAS"] >= tiles.CURVE.value else {"near_grad": None}
    constants |= {} if case.content & tiles.BY_QUERY.value else {"query_sums": None}
    sums_of_keys = tiles.BY_KEY.value if case.kernel == "content_sums" else tiles.TOKENS.value | tiles.BY_KEY.value
    constants |= {} if case.content & sums_of_keys else {"key_sums": None}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else argument_type(name, case) for name in names}
    constants_by_index = {(names.index(name),): value for name, value in constants.items() if name in names}
    aligned = [x for x in names if signature[x].startswith("*") or (signature[x] == "i32" and x not in tiles.LENGTHS)]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=constants_by_index,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": stages})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cuobjdump printed no number of registers: {text}")
    return int(match[1]), int(match[2]), compiled.metadata.shared


def candidates(
    kernel: str, width: int, dtype: str, bias: str = "none", larger: bool = False
) -> list[tuple[int, int, int, int]]:
    """Return the candidate sizes of a launch; ``larger``: whether the device or bias allows larger ones."""
    row = (1 << (width - 1).bit_length()) * BYTES[dtype]
    if kernel in tuning.SIZES:
        return tuning.sizes(kernel, row, dtype == "fp32", larger, CONTENTS.get(bias, 0))
    size, warps, stages = bias_gradient.squares(kernel, row, dtype == "fp32")
    return [(size, size, warps, stages)]


def applies(kernel: str, bias: str) -> bool:
    """Return whether a kernel supports a type of bias."""
    unsupported = {"diagonal_sums": ("none", "positions", *CONTENTS), "walked_sums": ("none", "table", *CONTENTS)}
    unsupported["content_sums"] = (*BIASES, "tokens")
    return bias not in unsupported.get(kernel, ())


def few_cases() -> Iterator[Case]:
    """Yield the smallest candidate of every kernel, bias type and precision, with and without padding."""
    for kernel, bias, width, dtype, padded, pruned in (
        ("forward", "table", 128, "bf16", False, False),
        ("query_gradient", "table", 128, "bf16", False, False),
        ("key_gradient", "curve", 128, "bf16", True, False),
        ("diagonal_sums", "curve", 64, "bf16", False, False),
        ("walked_sums", "curve", 64, "bf16", True, False),
        ("forward", "table", 40, "bf16", False, True),
        ("forward", "line", 32, "fp32", True, False),
        ("key_gradient", "none", 32, "fp32", False, False),
        ("walked_sums", "line", 32, "fp32", False, False),
        ("query_gradient", "positions", 32, "fp32", True, False),
        ("walked_sums", "positions", 32, "fp32", True, False),
        ("forward", "tokens", 64, "bf16", False, False),
        ("query_gradient", "tokens+by_query", 64, "bf16", False, False),
        ("key_gradient", "tokens+by_query", 64, "bf16", True, False),
        ("content_sums", "by_query+by_key", 64, "bf16", False, False),
        ("key_gradient", "tokens", 32, "fp32", False, False),
    ):
        yield Case(kernel, candidates(kernel, width, dtype, bias)[-1], bias, width, dtype, padded, pruned)
    for kernel in ("forward", "query_gradient", "key_gradient"):
        yield Case(kernel, candidates(kernel, 64, "bf16", "table")[-1], "table", options=OPTIONS)


def table(widths: list[int], dtype: str, biases: list[str], archs: list[int], options: tuple[str, ...]) -> None:
    """Print a Markdown table of registers (spilled bytes) by kernel, size, bias and device."""
    columns = [(bias, arch) for bias in biases for arch in archs]
    head = ["D", "kernel", "queries×keys", "warps", "stages", "KiB", *(f"{x}, {arch / 10}" for x, arch in columns)]
    print("|", " | ".join(head), "|")
    print("|", " | ".join(["--:", ":--", *["--:"] * (len(head) - 2)]), "|")
    for width, kernel in product(widths, (*tuning.SIZES, "diagonal_sums", "walked_sums", "content_sums")):
        listed = dict.fromkeys(x for bias in biases for x in candidates(kernel, width, dtype, bias, larger=True))
        for size in listed:
            cells, most = [], 0
            for bias, arch in columns:
                taken = candidates(kernel, width, dtype, bias, larger=bias == "none" or arch // 10 == 9)
                if size not in taken or not applies(kernel, bias):
                    cells.append("")
                    continue
                registers, spilled, shared = measure(Case(kernel, size, bias, width, dtype, options=options), arch)
                most = max(most, shared)
                cells.append(f"{registers} ({spilled})" if spilled else f"{registers}")
            if not any(cells):
                continue
            m, n, warps, stages = map(str, size)
            first = [str(width), f"`{kernel}`", f"{m}×{n}", warps, stages, str(-(-most // 1024))]
            print("|", " | ".join([*first, *cells]), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="10·major + minor (default: 80 90)")
    parser.add_argument("--width", type=int, nargs="+", default=[64, 128], help="widths of a head (default: 64 128)")
    parser.add_argument("--dtype", choices=list(BYTES), default="bf16")
    parser.add_argument("--bias", choices=[*BIASES, *CONTENTS], nargs="+", default=["none", "table", "curve"])
    parser.add_argument("--options", choices=OPTIONS, nargs="*", default=[], help="attention options (default: none)")
    parser.add_argument("--few", action="store_true", help="one line per case: registers, spilled and shared bytes")
    args = parser.parse_args()
    print(f"Triton {triton.__version__}, {args.dtype}: registers (spilled bytes), by compute capability", flush=True)
    if args.few:
        for case in few_cases():
            print(case, *measure(case, args.arch[-1]), sep=": ", flush=True)
        return
    print()
    table(args.width, args.dtype, args.bias, args.arch, tuple(args.options))


if __name__ == "__main__":
    main()
