"""``eval``: the perplexity of a checkpoint at several lengths; every token of the split is scored once."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_rpe.cli.options import add_checkpoint_options, add_no_cache, int_list, positive_int
from fairseq_rpe.cli.printing import Column, ResultPrinter, add_json, decimals, seconds
from fairseq_rpe.utils.records import from_attributes

if TYPE_CHECKING:
    from fairseq_rpe.evaluation.records import TextResult


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``eval``."""
    parser.description = (
        "Print the perplexity at each length and its ratio to the perplexity at the training length. Lengths whose "
        "results are in --out are not measured again."
    )
    add_checkpoint_options(parser)
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    about = "tokens per block (default: 1, 2, 4, 8 and 16 × the training length, as far as possible)"
    parser.add_argument("--lengths", type=int_list, metavar="N,N,...", help=about)
    add_json(parser)
    about = "stream: a block may contain several documents; document: only one (default: as in training)"
    parser.add_argument("--blocks", choices=("stream", "document"), help=about)
    about = "within blocks of a stream, attend only to tokens of the same document (default: as in training)"
    parser.add_argument("--separate-documents", action=argparse.BooleanOptionalAction, help=about)
    parser.add_argument("--split", default="test", help="split to score (default: test)")
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="tokens per batch (default: 2048, at least one block)"
    )
    parser.add_argument(
        "--compute-dtype", choices=("fp32", "bf16"), help="dtype of matrix products (default: the checkpoint's)"
    )
    parser.add_argument("--attention-backend", metavar="NAME", help="attention backend (default: the checkpoint's)")
    add_no_cache(parser)
    parser.add_argument(
        "--attention-prune",
        type=float,
        metavar="EPS",
        help="skip far keys that provably hold less than EPS of a query's attention (default: skip none)",
    )
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help="blocks per batch (default: no limit)")
    about = "average the losses over K random samples of the positions of each block (default: 1)"
    parser.add_argument("--position-samples", type=positive_int, metavar="K", help=about)
    parser.add_argument(
        "--engine",
        choices=("fast", "fairseq"),
        default="fast",
        help="fast: load the model once and never store all logits; fairseq: run fairseq-eval-lm, which supports any "
        "model; both give the same results up to rounding (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    """Run ``eval``."""
    from fairseq_rpe.evaluation.records import TextKey, TextRequest, TextResult, resume_results

    if args.lengths is None:
        from fairseq_rpe.evaluation.checkpoint_defaults import default_lengths

        args.lengths = default_lengths(
            args.checkpoint, args.data, args.split, args.rpe, args.positions_eval, args.blocks
        )
    request = from_attributes(TextRequest, args)
    if request.rpe is not None:
        from fairseq_rpe.evaluation.checkpoint_defaults import with_checkpoint_rotation

        request = with_checkpoint_rotation(request)

    def begin(_: Sequence[TextKey]) -> Callable[[TextKey], TextResult]:
        from fairseq_rpe.evaluation.perplexity import make_evaluator

        return make_evaluator(request)

    rows = _Rows(request.lengths, args.json)
    try:
        for result in resume_results(TextResult, args.out, request.keys(), begin):
            rows.add(result)
    finally:
        rows.flush()


class _Rows:
    """Prints results in order, none before the one at the training length, if that is measured: it decides ratios."""

    def __init__(self, lengths: Sequence[int], as_json: bool) -> None:
        self._lengths, self._as_json = lengths, as_json
        self._ppl: dict[int, float] = {}  # by length
        self._waiting: list[TextResult] = []
        self._printer: ResultPrinter | None = None

    def add(self, result: "TextResult") -> None:
        self._ppl[result.length] = result.ppl
        self._waiting.append(result)
        if self._as_json or result.train_length not in self._lengths or result.train_length in self._ppl:
            self.flush()

    def flush(self) -> None:
        """Print what waits."""
        for result in self._waiting:
            if self._printer is None:
                self._printer = ResultPrinter(self._columns(result), self._as_json)
            self._printer.add(result)
        self._waiting = []

    def _columns(self, first: "TextResult") -> list[Column]:
        trained = first.train_length
        ratio = Column(f"ratio to {trained}", 12, self._ratio) if trained in self._lengths else None
        columns = [Column("length", 8, lambda r: str(r.length)), Column("perplexity", 12, lambda r: decimals(r.ppl))]
        columns += [ratio] if ratio else []
        columns += [Column("tokens", 12, lambda r: f"{r.tokens:,}"), Column("seconds", 9, seconds)]
        if first.context not in (None, "across documents"):
            columns.append(Column("context", 16, lambda r: r.context or "", left=True))
        return columns

    def _ratio(self, result: "TextResult") -> str:
        at = None if result.train_length is None else self._ppl.get(result.train_length)
        return "" if at is None else decimals(result.ppl / at, 3)
