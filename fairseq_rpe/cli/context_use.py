"""``context-use``: compare the losses of tokens by how many tokens back their last occurrence lies."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_checkpoints_options, add_figure_width, int_list, positive_int
from fairseq_rpe.utils.files import atomic_write
from fairseq_rpe.utils.records import from_attributes
from fairseq_rpe.utils.table import csv_text

_RESULTS, _CSV, _MARKDOWN = (f"context_use.{end}" for end in ("jsonl", "csv", "md"))
_PNG, _PDF = "context_use.png", "context_use.pdf"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``context-use``."""
    parser.description = (
        "Mean loss of tokens whose last occurrence in the same block is 1, 2 to 3, 4 to 7 … tokens back, and of tokens "
        "that are new in their block, for each checkpoint and length. Results in --out are not measured again."
    )
    add_checkpoints_options(parser)
    about = "tokens per block (default: 1, 2, 4, 8 and 16 × the training length, as far as possible)"
    parser.add_argument("--lengths", type=int_list, metavar="N,N,...", help=about)
    about = "stream: a block may contain several documents; document: only one (default: as in training)"
    parser.add_argument("--blocks", choices=("stream", "document"), help=about)
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="tokens per batch (default: 2048, at least one block)"
    )
    out = Path("runs/context-use")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="folder to write (default: %(default)s)")
    add_figure_width(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``context-use``."""
    from fairseq_rpe.data.folder import check_output
    from fairseq_rpe.evaluation import context_use
    from fairseq_rpe.evaluation.loading import choose_blocks, label_checkpoints
    from fairseq_rpe.figures.context_use import draw_context_use
    from fairseq_rpe.figures.style import figures_at_width, save

    subjects = label_checkpoints(args.checkpoints, args.rpe_module)
    args.blocks = choose_blocks(args.blocks, subjects)
    request = from_attributes(context_use.ContextUseRequest, args)
    check_output(args.out, (_RESULTS, _CSV, _MARKDOWN, _PNG, _PDF))
    results = context_use.measure_context_use(request, subjects, args.out / _RESULTS)
    table = context_use.context_use_table(results)
    text = f"{table.caption}\n\n{table.to_markdown()}"
    print(text)
    atomic_write(args.out / _CSV, csv_text(context_use.COLUMNS, context_use.csv_rows(results)))
    atomic_write(args.out / _MARKDOWN, text)
    with figures_at_width(args.figure_width):
        save(draw_context_use(context_use.figure_panels(results)), args.out / _PNG, args.out / _PDF)
    print(f"results: {args.out / _CSV}")
    print(f"figure:  {args.out / _PNG}")
