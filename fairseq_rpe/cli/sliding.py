"""``sliding``: perplexity and time of sliding-window against non-overlapping evaluation, window by window."""

import argparse
from operator import attrgetter
from pathlib import Path

from fairseq_rpe.cli.options import add_checkpoints, add_latex, add_width, int_list, positive_int, workers
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.records import filled
from fairseq_rpe.utils.table import csv_text, latex_text

_RESULTS, _CSV, _MARKDOWN, _LATEX = (f"sliding.{end}" for end in ("jsonl", "csv", "md", "tex"))
_PNG, _PDF = "sliding.png", "sliding.pdf"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Scores every token at each window without overlap and with a sliding window, and compares perplexity and "
        "time; a result that is already in --out is not redone."
    )
    add_checkpoints(parser)
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
        "--first-tokens", type=positive_int, metavar="N", help="score this many tokens only, both ways (default: all)"
    )
    about = "windows across documents, or in each document alone (default: as in the checkpoints' training)"
    parser.add_argument("--blocks", choices=("stream", "document"), help=about)
    parser.add_argument(
        "--cached", action="store_true", help="also slide with cached keys and values; refused where that is not exact"
    )
    parser.add_argument(
        "--workers",
        type=workers,
        default=0,
        metavar="N",
        help="processes that cut the windows; same result (default: 0)",
    )
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="tokens per batch (2048, at least one window)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/sliding"), metavar="DIR", help="default: %(default)s")
    add_width(parser)
    add_latex(parser)


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.evaluation import sliding
    from fairseq_rpe.evaluation.loading import find_subjects
    from fairseq_rpe.figures import timing
    from fairseq_rpe.figures.style import drawn_at, save

    subjects = find_subjects(args.checkpoints, args.rpe_module)
    request = sliding.with_blocks(filled(sliding.SlidingRequest, args), subjects)
    request.check()
    check_output(args.out, (_RESULTS, _CSV, _MARKDOWN, _LATEX, _PNG, _PDF))
    rows = sliding.compare(request, subjects, args.out / _RESULTS)
    text = sliding.markdown(rows)
    print(text)
    atomic_write(args.out / _CSV, csv_text(sliding.COLUMNS, map(attrgetter(*sliding.COLUMNS), rows)))
    atomic_write(args.out / _MARKDOWN, text)
    if args.latex:
        atomic_write(args.out / _LATEX, latex_text([sliding.by_window(rows), sliding.together(rows)]))
    points = [timing.Timed(one.encoding, one.mode, one.window, one.ppl, one.relative or 0.0) for one in rows]
    trained = sorted({subject.train_length for subject in subjects})
    means = sliding.reference_means(rows, subjects)
    with drawn_at(args.figure_width):
        figure = timing.of_windows(points, args.stride, sliding.PUBLISHED, trained, means)
        save(figure, args.out / _PNG, args.out / _PDF)
    print(f"results: {args.out / _CSV}")
    print(f"figure:  {args.out / _PNG}")
