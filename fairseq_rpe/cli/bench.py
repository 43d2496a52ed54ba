"""``bench``: how fast attention is with each encoding and backend on this machine, against attention without a bias."""

from __future__ import annotations

import argparse
import csv
import io
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli.options import add_rpe_module, int_list, load_rpe_module, positive_int
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import atomic_write, replace_with

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = "no bias"
COLUMNS = ("encoding", "backend", "pass", "length", "milliseconds", "ratio")
_ENCODINGS = "nope alibi kerple_log fire"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_DASHES = ("-", "--", ":", "-.")
_SLOW = 20.0  # a first call of so many seconds is the only one of its kind
_DENSE_COPIES = 6  # scores, bias, mask and weights of the reference, and what its backward keeps


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time attention with each encoding and backend on this machine",
        description="At every length all encodings and backends take turns; ratios are to torch's own causal attention "
        "without a bias in the same turns. What a backend refuses is left out and named.",
        allow_abbrev=False,
    )
    parser.add_argument("--encodings", default=_ENCODINGS, metavar='"SPEC ..."', help=f'default: "{_ENCODINGS}"')
    parser.add_argument("--backends", default="all", metavar='"NAME ..."', help="default: all")
    parser.add_argument("--lengths", type=int_list, default=[512, 1024, 2048], metavar="N,N,...", help="tokens")
    parser.add_argument("--batch", type=positive_int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--heads", type=positive_int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--width", type=positive_int, default=64, metavar="N", help="of a head (default: 64)")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="fp32", help="default: fp32")
    parser.add_argument("--passes", choices=("forward", "training", "both"), default="both", help="default: both")
    parser.add_argument("--repeats", type=positive_int, default=5, metavar="N", help="the median counts (default: 5)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for bench.csv, bench.md and bench.png")
    add_rpe_module(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch
    from tqdm import tqdm

    from fairseq_rpe.attention import BACKENDS

    load_rpe_module(args.rpe_module)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here: drop the flag")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out} is a file: name a folder")
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    names = list(BACKENDS) if args.backends == "all" else args.backends.split()
    for name in names:
        if name not in BACKENDS:
            raise UserError(f"--backends: unknown '{name}'; known: {', '.join(BACKENDS)}")
    specs = args.encodings.split()
    if not specs or not names:
        raise UserError("--encodings and --backends name at least one each")
    passes = ("forward", "training") if args.passes == "both" else (args.passes,)
    rows: list[dict[str, Any]] = []
    told: set[str] = set()
    work = [(length, kind) for length in args.lengths for kind in passes]
    for length, kind in tqdm(work, disable=None, unit="length"):
        ways, refused = _ways(args, specs, names, length, device, kind == "training")
        for line in dict.fromkeys(refused):
            if line not in told:
                print(line, file=sys.stderr)
        told.update(refused)
        seconds = in_turns(ways, args.repeats, device)
        for (encoding, backend), took in seconds.items():
            ratio = took / seconds[LIMIT, "sdpa"]
            values = (encoding, backend, kind, length, round(1000 * took, 3), round(ratio, 3))
            rows.append(dict(zip(COLUMNS, values, strict=True)))
    about = describe(args, device)
    text = f"{about}\n\n{markdown(rows)}"
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        out = io.StringIO()
        out.write(f"# {about}\n")
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        atomic_write(args.out / "bench.csv", out.getvalue())
        atomic_write(args.out / "bench.md", text)
        draw(rows, about, args.out / "bench.png")
        print(f"figure: {args.out / 'bench.png'}")
    return 0


def describe(args: argparse.Namespace, device: str) -> str:
    """Machine and setting in one line."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    cores = f", {os.cpu_count()} cores, {torch.get_num_threads()} threads" if device == "cpu" else ""
    shape = f"batch {args.batch}, {args.heads} heads of {args.width}, {args.dtype}"
    busy = f", load {os.getloadavg()[0]:.1f}" if device == "cpu" else ""
    return f"{name}{cores}, torch {torch.__version__}, {shape}, medians of {args.repeats}{busy}"


Way = Callable[[], Any]


def _ways(
    args: argparse.Namespace, specs: list[str], names: list[str], n: int, device: str, training: bool
) -> tuple[dict[tuple[str, str], Way], list[str]]:
    """One function per encoding and backend, and lines on what is left out."""
    import torch
    from torch.nn import functional as F

    from fairseq_rpe import encodings
    from fairseq_rpe.attention import BACKENDS, Plan
    from fairseq_rpe.core import Positions

    torch.manual_seed(0)
    dtype = getattr(torch, _DTYPES[args.dtype])
    shape = (args.batch, args.heads, n, args.width)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=training) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)
    positions = Positions.arange(n, device=device)

    def step(attend: Callable[[], Tensor], parameters: list[Tensor]) -> Way:
        def way() -> None:
            with torch.set_grad_enabled(training):
                out = attend()
                if training:
                    torch.autograd.grad(out, [q, k, v, *parameters], grad, allow_unused=True)

        return way

    free = (
        torch.cuda.mem_get_info()[0] if device == "cuda" else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    )
    found: dict[tuple[str, str], Way] = {
        (LIMIT, "sdpa"): step(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [])
    }
    found[LIMIT, "sdpa"]()
    refused = []
    for spec in specs:
        encoding = encodings.build(spec, args.heads, args.heads * args.width, length=n).to(device)
        if not encoding.adds_bias and spec.partition(":")[0] != "nope":
            raise UserError(f"--encodings: '{spec}' has no bias, so attention with it is that without: leave it out")
        parameters = [p for p in encoding.parameters() if p.requires_grad]

        def attend(encoding: Any = encoding, backend: Callable[..., Tensor] | None = None) -> Tensor:
            return backend(q, k, v, Plan(positions, encoding.form(positions), remap=encoding.remap))

        for name in names:
            if name == "reference" and (needed := _DENSE_COPIES * 4 * args.batch * args.heads * n * n) > free:
                refused.append(f"left out, reference at {n} tokens: needs about {needed / 2**30:.0f} GiB of memory")
                continue
            way = step(lambda attend=attend, name=name: attend(backend=BACKENDS[name]), parameters)
            try:
                way()
            except (UserError, NotImplementedError) as error:
                refused.append(f"left out, {name}{' in training' * training}: {error}")
            except (RuntimeError, MemoryError) as error:
                if "memory" not in str(error).lower():
                    raise
                refused.append(f"left out, {name} at {n} tokens: not enough memory for {spec}")
            else:
                found[spec, name] = way
    return found, refused


def in_turns(ways: dict[Any, Way], repeats: int, device: str) -> dict[Any, float]:
    """Median seconds of each, all of them once in every turn."""
    import torch

    def timed(way: Way) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        way()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    times: dict[Any, list[float]] = {key: [] for key in ways}
    for _ in range(repeats):
        for key, way in ways.items():
            if not times[key] or times[key][0] < _SLOW:
                times[key].append(timed(way))
    return {key: statistics.median(found) for key, found in times.items()}


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table per pass: milliseconds without a bias, then ratios to it."""
    from fairseq_rpe.cli.report import align

    parts = []
    for kind in dict.fromkeys(row["pass"] for row in rows):
        own = [row for row in rows if row["pass"] == kind]
        lengths = list(dict.fromkeys(row["length"] for row in own))
        lines = [[kind, *map(str, lengths)], ["---", *["---:"] * len(lengths)]]
        for key in dict.fromkeys((row["encoding"], row["backend"]) for row in own):
            cells = {row["length"]: row for row in own if (row["encoding"], row["backend"]) == key}
            limit = key[0] == LIMIT
            shown = [_cell(cells.get(n), limit) for n in lengths]
            lines.append([f"{key[0]}, milliseconds" if limit else f"{key[0]}, {key[1]}", *shown])
        parts.append(align(lines))
    return "\n".join(parts)


def _cell(row: dict[str, Any] | None, limit: bool) -> str:
    if row is None:
        return ""
    return f"{row['milliseconds']:.2f}" if limit else f"{row['ratio']:.2f}"


def draw(rows: list[dict[str, Any]], about: str, path: Path) -> None:
    """Ratios over length, one panel per pass, both axes logarithmic."""
    from matplotlib.figure import Figure

    from fairseq_rpe.figures.style import looks

    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure = Figure(figsize=(4.6 * len(passes) + 2.2, 4.2), layout="constrained")
    styles = looks(list(dict.fromkeys(row["encoding"] for row in rows if row["encoding"] != LIMIT)))
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    for axes, kind in zip(figure.subplots(1, len(passes), squeeze=False)[0], passes, strict=True):
        axes.axhline(1.0, color="0.6", linewidth=1)
        for key in dict.fromkeys((row["encoding"], row["backend"]) for row in rows if row["encoding"] != LIMIT):
            line = [(r["length"], r["ratio"]) for r in rows if (r["encoding"], r["backend"], r["pass"]) == (*key, kind)]
            if line:
                colour, marker, _ = styles[key[0]]
                look = {"color": colour, "marker": marker, "linestyle": _DASHES[backends.index(key[1]) % len(_DASHES)]}
                axes.plot(*zip(*line, strict=True), label=f"{key[0]}, {key[1]}", markersize=4, **look)
        axes.set(xscale="log", yscale="log", xlabel="tokens", title=kind)
        axes.set_ylabel("time over attention without a bias")
        axes.set_xticks(lengths := sorted({row["length"] for row in rows}), list(map(str, lengths)))
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines() if line.get_marker() != "None"}
    figure.legend(lines.values(), lines, loc="outside right upper", frameon=False, handlelength=4)
    figure.suptitle(about, fontsize=7)
    replace_with(path, lambda target: figure.savefig(target, dpi=150))
