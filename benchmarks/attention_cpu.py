"""Time of attention on a CPU relative to torch's causal attention without a bias: short texts, tables, FIRE.

    python benchmarks/attention_cpu.py                   # about two minutes on two cores
    python benchmarks/attention_cpu.py --threads 1 --only short

Each encoding is timed in rotation with attention without a bias on the same queries, keys and values. A line shows the
ratio of the medians of --repeats rounds after a warm-up. The ratio of the shortest times follows in brackets; a busy
machine changes that ratio less. A round has as many calls as take a few hundredths of a second. Parts:

- short times a fixed bias at 64 and 128 tokens, in six layers that share the bias.
- learned times tables with their gradient, forward and backward.
- fire times two layers of 32, forward, and forward with backward.
- decode times one step of decode.py's attention part at 4,096 cached keys in six layers. Each layer has a separate
  encoding if that is the encoding's default.

Heads are 64 wide, in float32. The script writes no files.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import decode
import machine
import torch
from torch.nn import functional as F

from fairseq_rpe.attention import AttentionPlan, sdpa
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build

WIDTH, KEYS, LAYERS = 64, 4096, 6
SECONDS = 0.03  # of a round, at least
Call = Callable[[], object]


class Case(NamedTuple):
    """An encoding and the shape of its inputs."""

    spec: str
    batch: int
    heads: int
    tokens: int
    backward: bool

    def __str__(self) -> str:
        shape = f"{self.batch} × {self.heads} × {self.tokens}"
        return f"{self.spec}, {shape}, forward{' + backward' * self.backward}"


SHORT = [Case("alibi", b, 8, n, backward) for b, n in ((32, 64), (8, 128), (16, 128)) for backward in (False, True)]
SHAPES = [(1, 12, 1536), (1, 8, 4096), (8, 8, 256), (32, 8, 64)]
LEARNED = [Case(spec, *shape, True) for shape in SHAPES for spec in ("kerple_log", "t5_bias")]
FIRE = [Case("fire", 1, 8, n, backward) for n in (1536, 4096) for backward in (False, True)]
DECODED_SPECS = ["alibi", "fire", "xpos"]
PARTS = {"short": SHORT, "learned": LEARNED, "fire": FIRE, "decode": DECODED_SPECS}


def make_attention_calls(case: Case, layers: int = 1) -> tuple[Call, Call]:
    """Return attention without a bias and with the encoding's bias, in layers that share the bias."""
    spec, batch, heads, n, backward = case
    q, k, v = (torch.randn(batch, heads, n, WIDTH, requires_grad=backward) for _ in range(3))
    grad, positions = torch.randn_like(q), Positions.arange(n)
    encoding = build(spec, heads, heads * WIDTH, length=n)
    parameters = [p for p in encoding.parameters() if p.requires_grad]

    def run(attend: Callable[[], list[torch.Tensor]], inputs: list[torch.Tensor]) -> None:
        with torch.set_grad_enabled(backward):
            outs = attend()
            if backward:
                torch.autograd.grad(outs, inputs, [grad] * layers, allow_unused=True)

    def plain() -> list[torch.Tensor]:
        return [F.scaled_dot_product_attention(q, k, v, is_causal=True) for _ in range(layers)]

    def biased() -> list[torch.Tensor]:
        plan = AttentionPlan(positions, encoding.position_bias(positions))
        return [sdpa(q, k, v, plan) for _ in range(layers)]

    return partial(run, plain, [q, k, v]), partial(run, biased, [q, k, v, *parameters])


def make_decoding_calls(spec: str) -> tuple[Call, Call]:
    """Return a decoding step without a bias and with the encoding."""
    return decode.CachedAttention(KEYS, LAYERS).plain_step, decode.CachedAttention(KEYS, LAYERS).make_step(spec)


def time_calls(call: Call, count: int) -> float:
    """Return the mean seconds of ``count`` calls."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def format_comparison(label: str, plain: Call, encoded: Call, repeats: int) -> str:
    """Time a call without and with an encoding in rotation, and return the line that is printed."""
    for call in (plain, encoded):
        call()
    count = max(1, int(SECONDS / time_calls(plain, 1)))
    rounds = [(time_calls(plain, count), time_calls(encoded, count)) for _ in range(repeats + 1)]
    plain_times, encoded_times = zip(*rounds[1:], strict=True)  # the first round is a warm-up
    median = statistics.median(plain_times)
    ratio, least_ratio = statistics.median(encoded_times) / median, min(encoded_times) / min(plain_times)
    return f"{label:48} {1000 * median:9.2f} ms {ratio:6.2f} ({least_ratio:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=7, help="%(default)s")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="%(default)s")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(
        f"{machine.processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
        f"{args.threads} threads, medians of {args.repeats}"
    )
    print(f"{'encoding, batch × heads × tokens':48} {'no bias':>12} {'ratio':>6} (of least times)")
    for part in args.only:
        for case in PARTS[part]:
            if part == "decode":
                with torch.no_grad():
                    calls = make_decoding_calls(case)
                    print(format_comparison(f"{case}, a step at {KEYS} keys", *calls, args.repeats), flush=True)
            else:
                calls = make_attention_calls(case, LAYERS if part == "short" else 1)
                print(format_comparison(str(case), *calls, args.repeats), flush=True)


if __name__ == "__main__":
    main()
