"""``sliding``: compare perplexity and time of sliding-window and non-overlapping evaluation at several windows."""

import argparse
from operator import attrgetter
from pathlib import Path

from fairseq_rpe.cli.options import (
    add_checkpoints_options,
    add_figure_width,
    add_latex,
    int_list,
    positive_int,
    workers,
)
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.records import from_attributes
from fairseq_rpe.utils.table import csv_text, join_latex

_RESULTS, _CSV, _MARKDOWN, _LATEX = (f"sliding.{end}" for end in ("jsonl", "csv", "md", "tex"))
_PNG, _PDF = "sliding.png", "sliding.pdf"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``sliding``."""
    parser.description = (
        "Score every token at each window size, once without overlap and once with a sliding window, and compare "
        "perplexity and time. Results in --out are not measured again."
    )
    add_checkpoints_options(parser)
    parser.add_argument(
        "--windows",
        type=int_list,
        default="16,32,64,128,256,512",
        metavar="N,N,...",
        help="window sizes in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--stride", type=positive_int, default=1, metavar="N", help="tokens by which the window moves (default: 1)"
    )
    parser.add_argument(
        "--first-tokens", type=positive_int, metavar="N", help="score only the first N tokens (default: all)"
    )
    about = "stream: a window may contain several documents; document: only one (default: as in training)"
    parser.add_argument("--blocks", choices=("stream", "document"), help=about)
    parser.add_argument("--cached", action="store_true", help="also slide with a KV cache, if this is exact")
    parser.add_argument(
        "--workers",
        type=workers,
        default=0,
        metavar="N",
        help="processes that make the windows, without effect on the result (default: 0)",
    )
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="tokens per batch (default: 2048, at least one window)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/sliding"), metavar="DIR", help="folder to write (default: %(default)s)"
    )
    add_figure_width(parser)
    add_latex(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``sliding``."""
    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.evaluation import sliding
    from fairseq_rpe.evaluation.loading import choose_blocks, label_checkpoints
    from fairseq_rpe.figures import timing
    from fairseq_rpe.figures.style import figures_at_width, save

    subjects = label_checkpoints(args.checkpoints, args.rpe_module)
    args.blocks = choose_blocks(args.blocks, subjects)
    request = from_attributes(sliding.SlidingRequest, args)
    request.tokens_to_score()
    check_output(args.out, (_RESULTS, _CSV, _MARKDOWN, _LATEX, _PNG, _PDF))
    rows = sliding.compare_windows(request, subjects, args.out / _RESULTS)
    text = sliding.markdown(rows)
    print(text)
    atomic_write(args.out / _CSV, csv_text(sliding.COLUMNS, map(attrgetter(*sliding.COLUMNS), rows)))
    atomic_write(args.out / _MARKDOWN, text)
    if args.latex:
        atomic_write(args.out / _LATEX, join_latex([sliding.window_table(rows), sliding.total_time_table(rows)]))
    points = [timing.WindowTiming(row.encoding, row.mode, row.window, row.ppl, row.relative or 0.0) for row in rows]
    trained = sorted({subject.train_length for subject in subjects})
    means = sliding.reference_means(rows, subjects)
    with figures_at_width(args.figure_width):
        figure = timing.draw_window_timing(points, args.stride, sliding.PUBLISHED_RELATIVE_TIME, trained, means)
        save(figure, args.out / _PNG, args.out / _PDF)
    print(f"results: {args.out / _CSV}")
    print(f"figure:  {args.out / _PNG}")
