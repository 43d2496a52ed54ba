"""Time and memory of attention within a window, and with shared key heads, relative to full attention.

    python benchmarks/window.py                                    # a few minutes on two cores
    python benchmarks/window.py --device cuda --dtype bf16 --backend auto

Full attention and attention within --window keys take turns on the same queries, keys and values: forward and backward
pass of one layer, rotation and bias included. A line shows the median times of --repeats rounds after a warm-up, their
ratio, and the peak memory of a call beyond its inputs. The last lines compare --key-heads shared key heads with the
same keys repeated for each query head, forward and backward, and for one query as in decoding.

The input is one text with 8 heads of width 64. The script writes no files.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import machine
import torch
from torch import Tensor

from fairseq_rpe import attend, build
from fairseq_rpe.encodings import Encoding

HEADS, WIDTH = 8, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIB = 2**20
Call = Callable[[], object]


def draw(heads: int, tokens: int, args: argparse.Namespace) -> Tensor:
    """Return (1, heads, tokens, WIDTH) with gradients."""
    return torch.randn(1, heads, tokens, WIDTH).to(args.device, DTYPES[args.dtype]).requires_grad_()


def make_training_call(encoding: Encoding, inputs: Sequence[Tensor], backend: str, repeats_keys: bool = False) -> Call:
    """Return a forward and backward pass; ``repeats_keys``: the key heads are repeated for each query head first."""
    q, k, v = inputs
    grad, groups = torch.randn_like(q), q.shape[1] // k.shape[1]
    parameters = [p for p in encoding.parameters() if p.requires_grad]

    def call() -> object:
        keys, values = (x.repeat_interleave(groups, dim=1) if repeats_keys else x for x in (k, v))
        out = attend(q, keys, values, encoding, backend=backend)
        return torch.autograd.grad(out, [q, k, v, *parameters], grad)

    return call


def make_decoding_call(encoding: Encoding, inputs: Sequence[Tensor], backend: str, repeats_keys: bool = False) -> Call:
    """Return attention of the last query to all keys."""
    q, k, v = inputs
    groups = q.shape[1] // k.shape[1]

    @torch.no_grad()
    def call() -> object:
        keys, values = (x.repeat_interleave(groups, dim=1) if repeats_keys else x for x in (k, v))
        return attend(q[:, :, -1:], keys, values, encoding, backend=backend)

    return call


def time_call(call: Call, args: argparse.Namespace) -> float:
    """Return the seconds of a call."""
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    start = clock()
    call()
    if args.device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def peak_memory(call: Call, device: str) -> int:
    """Return the bytes that a call needs at its peak beyond what was in memory before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    machine.reset_peak()
    before = machine.status("VmRSS")
    call()
    return 1024 * (machine.status("VmHWM") - before)


def format_comparison(label: str, calls: tuple[Call, Call], args: argparse.Namespace) -> str:
    """Time two calls in rotation, and return the line that is printed."""
    rounds = [[time_call(call, args) for call in calls] for _ in range(args.repeats + 1)]
    first, second = (statistics.median(times) for times in zip(*rounds[1:], strict=True))  # without the warm-up
    memory = " ".join(f"{peak_memory(call, args.device) / MIB:9.0f}" for call in calls)
    return f"{label:44} {1000 * first:10.1f} {1000 * second:10.1f} {second / first:7.3f} {memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384], help="%(default)s")
    parser.add_argument("--window", type=int, default=256, help="%(default)s")
    parser.add_argument("--key-heads", type=int, default=2, help="%(default)s")
    parser.add_argument("--encodings", nargs="+", default=["rope", "alibi"], help="%(default)s")
    parser.add_argument("--backend", default="sdpa", help="%(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="%(default)s")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="%(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="%(default)s")
    about = (
        "wall: elapsed time; cpu: CPU seconds of all threads, which other programs disturb less (default: %(default)s)"
    )
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help=about)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="%(default)s")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    processor = torch.cuda.get_device_name() if args.device == "cuda" else machine.processor()
    print(
        f"{processor}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, "
        f"{args.threads} threads, {args.dtype}, backend {args.backend}, {args.clock} clock, medians of {args.repeats}"
    )
    columns = f"{'ms':>10} {'ms':>10} {'ratio':>7} {'MiB':>9} {'MiB':>9}"
    print(f"{'full attention, and a window of ' + str(args.window):44} {columns}")
    for spec in args.encodings:
        encodings = [build(x, HEADS, HEADS * WIDTH).to(args.device) for x in (spec, f"{spec}:local={args.window}")]
        for n in args.lengths:
            inputs = [draw(HEADS, n, args) for _ in range(3)]
            full, within = (make_training_call(encoding, inputs, args.backend) for encoding in encodings)
            print(format_comparison(f"{spec}, {n} tokens", (full, within), args), flush=True)
            full, within = (make_decoding_call(encoding, inputs, args.backend) for encoding in encodings)
            print(format_comparison(f"{spec}, one query, {n} keys", (full, within), args), flush=True)
    print(f"{'keys repeated, and ' + str(args.key_heads) + ' shared key heads':44} {columns}")
    for spec in args.encodings:
        encoding = build(spec, HEADS, HEADS * WIDTH).to(args.device)
        n = min(args.lengths)
        inputs = [draw(heads, n, args) for heads in (HEADS, args.key_heads, args.key_heads)]
        for label, make_call in (("tokens", make_training_call), ("keys, one query", make_decoding_call)):
            calls = tuple(make_call(encoding, inputs, args.backend, repeats) for repeats in (True, False))
            print(format_comparison(f"{spec}, {n} {label}", calls, args), flush=True)


if __name__ == "__main__":
    main()
