"""``sliding``: perplexity and time of sliding-window against non-overlapping evaluation, window by window."""

from __future__ import annotations

import argparse
import csv
import io
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli import corpus
from fairseq_rpe.cli.options import int_list, load_rpe_module, positive_int
from fairseq_rpe.cli.report import align
from fairseq_rpe.cli.subjects import Subject, add_subjects, device_of, find_subjects, load, read_stream
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import (
    append_json_line,
    atomic_write,
    check_folder,
    file_digest,
    make_folder,
    read_json_lines,
    replace_with,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fairseq_rpe.analysis.sliding import Score, Windows

PUBLISHED = 44.35  # sliding / non-overlapping, mean over the windows of Table 1; ALiBi without sliding is 1.00 there
WINDOWS = "16,32,64,128,256,512"
PLAIN, SLIDING, CACHED = "non-overlapping", "sliding", "cached"
RESULTS = "sliding.jsonl"
FILES = (RESULTS, "sliding.csv", "sliding.md", "sliding.png", "sliding.pdf")
COLUMNS = ("encoding", "mode", "window", "stride", "tokens", "ppl", "loss_base2", "seconds", "relative")
_KEY = (
    *("checkpoint", "data", "subset", "positions", "tokens", "mode", "window", "stride"),
    *("max_tokens", "workers", "device"),
)
_BATCH_TOKENS = 2048
# Short measurements are repeated and their median counts: they are what all others are divided by.
_LONG_ENOUGH, _REPEATS = 2.0, 5
_NOTE = f"""\
Time is relative to the non-overlapping evaluation of the same model at the same window, in the second table to that of
the first model over all windows. Published ("Exploring Transformer Extrapolation", Table 1, mean over windows of 16 to
512): sliding {PUBLISHED}, non-overlapping 1.00, ALiBi without sliding 1.00. Its stride, model and hardware are not
stated: compare the order of magnitude only.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sliding",
        help="compare sliding-window with non-overlapping evaluation",
        description="Scores every token at each window without overlap and with a sliding window, and compares "
        "perplexity and time; a result that is already in --out is not redone.",
        allow_abbrev=False,
    )
    add_subjects(parser)
    parser.add_argument(
        "--windows", type=int_list, default=WINDOWS, metavar="N,N,...", help="tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--stride", type=positive_int, default=1, metavar="N", help="tokens by which the window moves (default: 1)"
    )
    parser.add_argument(
        "--first-tokens", type=positive_int, metavar="N", help="score this many tokens only, both ways (default: all)"
    )
    parser.add_argument(
        "--cached", action="store_true", help="also slide with cached keys and values; refused where that is not exact"
    )
    parser.add_argument(
        "--workers",
        type=_count,
        default=0,
        metavar="N",
        help="processes that cut the windows; same result (default: 0)",
    )
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help=f"a batch (default: {_BATCH_TOKENS}, at least one window)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/sliding"), metavar="DIR", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    subjects = find_subjects(args.checkpoints)
    corpus.check_folder(args.data, args.subset)
    total = _check(args)
    check_folder(args.out, FILES)
    make_folder(args.out)
    load_rpe_module(args.rpe_module)
    rows = []
    for subject in subjects:
        rows += _measure(args, subject, total)
    for row in rows:
        row["relative"] = row["seconds"] / _find(rows, row["label"], PLAIN, row["window"])["seconds"]
    text = markdown(rows) + "\n" + _summary(rows) + _NOTE
    atomic_write(args.out / "sliding.csv", _csv(rows))
    atomic_write(args.out / "sliding.md", text)
    _draw(rows, [subject.label for subject in subjects], args)
    print(text)
    print(f"results: {args.out / 'sliding.csv'}")
    print(f"figure:  {args.out / 'sliding.png'}")
    return 0


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 0")
    return int(text)


def _check(args: argparse.Namespace) -> int:
    """Refuse windows that the text, the stride or the batch does not allow; returns the tokens to score."""
    total = corpus.count_tokens(args.data, args.subset)
    if args.first_tokens and args.first_tokens > total:
        raise UserError(f"--first-tokens {args.first_tokens}: {args.data}/{args.subset} has {total}, leave it out")
    total = args.first_tokens or total
    for window in args.windows:
        if window < args.stride:
            raise UserError(f"--stride {args.stride} is more than window {window}: tokens in between would be left out")
        if window > total:
            raise UserError(
                f"window {window} is more than the {total} tokens to score: take a smaller one or more text"
            )
        if args.max_tokens and args.max_tokens < window:
            raise UserError(f"--max-tokens {args.max_tokens} is less than window {window}: raise it")
    return total


def _measure(args: argparse.Namespace, subject: Subject, total: int) -> list[dict[str, Any]]:
    """The rows of one checkpoint, those already in the results file as they are."""
    same = {"checkpoint": file_digest(subject.path), "data": corpus.digest(args.data), "subset": args.subset}
    same |= {"positions": args.positions, "tokens": total, "workers": args.workers}
    same |= {"max_tokens": args.max_tokens or _BATCH_TOKENS, "device": device_of(args)}
    path = args.out / RESULTS
    known = {_key(row): row for row in read_json_lines(path)}
    cells = [(mode, w) for w in args.windows for mode in (PLAIN, SLIDING, *([CACHED] if args.cached else []))]
    wanted = [{**same, "mode": m, "window": w, "stride": w if m == PLAIN else args.stride} for m, w in cells]
    missing = [cell for cell in wanted if _key(cell) not in known]
    if missing:
        model, task = load(args, subject.path)
        _check_model(model, missing, subject)
        stream = read_stream(args, task.source_dictionary, total)
        for cell in missing:
            row = {"encoding": subject.label, **cell, **_score(model, stream, cell, subject)}
            append_json_line(path, row)
            known[_key(row)] = row
    return [{**known[_key(cell)], "label": subject.label} for cell in wanted]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two results the same measurement."""
    return tuple(row.get(k) for k in _KEY)


def _check_model(model: Any, cells: list[dict[str, Any]], subject: Subject) -> None:
    from fairseq_rpe.analysis.sliding import why_not_cached

    transform = model.decoder.moves.active(False)
    if transform is not None and transform.random:
        raise UserError(
            f"{subject.label}: random positions are drawn anew for every batch, so windows cannot be compared: name "
            "another --positions"
        )
    for cell in cells:
        reason = why_not_cached(model, cell["window"], cell["stride"]) if cell["mode"] == CACHED else None
        if reason:
            raise UserError(f"--cached: {subject.label}: {reason}")


def _score(model: Any, stream: Tensor, cell: dict[str, Any], subject: Subject) -> dict[str, Any]:
    """Perplexity and median time of one measurement.

    Raises:
        UserError: not every token was scored exactly once.
    """
    from tqdm import tqdm

    from fairseq_rpe.analysis.sliding import Windows

    window, mode, total = cell["window"], cell["mode"], len(stream) - 1
    windows = Windows(stream, window, cell["stride"], cell["max_tokens"] // window)
    seconds: list[float] = []
    while sum(seconds) < _LONG_ENOUGH and len(seconds) < _REPEATS:
        title = f"{subject.label}, {mode}, window {window}"
        with tqdm(total=total, desc=title, unit=" tokens", disable=None, leave=False) as bar:
            score = _once(model, windows, mode, cell["workers"], bar.update)
        if score.tokens != total:
            raise UserError(f"window {window}: {score.tokens} of {total} tokens were scored: the result is not kept")
        seconds.append(score.seconds)
    nats = score.nats / total
    return {"loss_base2": nats / math.log(2), "ppl": math.exp(nats), "seconds": statistics.median(seconds)}


def _once(model: Any, windows: Windows, mode: str, workers: int, tick: Callable[[int], Any]) -> Score:
    from torch.utils.data import DataLoader

    from fairseq_rpe.analysis.sliding import cached, recomputed

    if mode == CACHED:
        return cached(model, windows, tick)
    return recomputed(model, DataLoader(windows, batch_size=None, num_workers=workers), tick)


def _find(rows: list[dict[str, Any]], label: str, mode: str, window: int) -> dict[str, Any]:
    return next(r for r in rows if (r["label"], r["mode"], r["window"]) == (label, mode, window))


def markdown(rows: list[dict[str, Any]]) -> str:
    """Window × mode: perplexity per token, and time as a multiple of the non-overlapping evaluation's."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    head = ["encoding", "window", *(f"{m} ppl" for m in modes), "seconds", *(f"{m} time" for m in modes[1:])]
    lines = [head, ["---"] * len(head)]
    for label, window in dict.fromkeys((row["label"], row["window"]) for row in rows):
        cells = [_find(rows, label, mode, window) for mode in modes]
        times = [f"{cells[0]['seconds']:.2f}", *(f"{cell['relative']:.2f}" for cell in cells[1:])]
        lines.append([label, str(window), *(f"{cell['ppl']:.2f}" for cell in cells), *times])
    return align(lines)


def _summary(rows: list[dict[str, Any]]) -> str:
    """Time over all windows together, as Table 1 sums it up; everything relative to the first model's."""
    total: dict[tuple[str, str], float] = {}
    for row in rows:
        name = (row["label"], row["mode"])
        total[name] = total.get(name, 0.0) + row["seconds"]
    first = next(iter(total.values()))
    lines = [["all windows together", "time"], ["---", "---"]]
    lines += [[f"{label}, {mode}", f"{seconds / first:.2f}"] for (label, mode), seconds in total.items()]
    return align(lines) + "\n"


def _csv(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "encoding": row["label"]} for row in rows)
    return out.getvalue()


def _draw(rows: list[dict[str, Any]], labels: list[str], args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullFormatter, NullLocator, StrMethodFormatter

    from fairseq_rpe.figures.style import looks

    shown = looks(labels)
    dashes = {PLAIN: "-", SLIDING: "--", CACHED: ":"}
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure = Figure(figsize=(9.2, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, column in ((left, "ppl"), (right, "relative")):
        for label in labels:
            colour, marker, _ = shown[label]
            for mode in modes if column == "ppl" else modes[1:]:
                points = sorted((r["window"], r[column]) for r in rows if (r["label"], r["mode"]) == (label, mode))
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, linestyle=dashes[mode])
        axes.set_xscale("log", base=2)
        axes.set_xticks(args.windows, [str(w) for w in args.windows])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("window (tokens)")
        axes.grid(alpha=0.25)
    left.set_ylabel("perplexity per token")
    right.set_yscale("log")
    right.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    right.yaxis.set_minor_formatter(NullFormatter())
    right.axhline(1, color="0.5", linewidth=1)
    right.axhline(PUBLISHED, color="0.5", linewidth=1, linestyle=(0, (1, 2)))
    right.annotate(
        f"published mean: {PUBLISHED}", (0.02, PUBLISHED), xycoords=("axes fraction", "data"), fontsize="small",
        color="0.35", xytext=(0, 3), textcoords="offset points",
    )  # fmt: skip
    right.set_ylim(top=1.6 * max(right.get_ylim()[1], PUBLISHED))
    right.set_ylabel("time / non-overlapping time")
    handles = [Line2D([], [], color=shown[s].colour, marker=shown[s].marker, markersize=4, label=s) for s in labels]
    names = {SLIDING: f"sliding, stride {args.stride}", CACHED: f"cached, stride {args.stride}"}
    handles += [Line2D([], [], color="0.3", linestyle=dashes[m], label=names.get(m, m)) for m in modes]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    for name in ("sliding.png", "sliding.pdf"):
        replace_with(args.out / name, lambda target: figure.savefig(target, dpi=160))
