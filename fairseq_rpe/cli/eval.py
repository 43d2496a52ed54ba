"""``eval``: the perplexity of a checkpoint at several lengths; every token of the split is scored once."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_rpe.cli.options import add_checkpoint_options, add_no_cache, int_list, positive_int
from fairseq_rpe.cli.printing import Column, ResultPrinter, add_json, decimals, seconds
from fairseq_rpe.core.errors import UserError
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
    about = "measure LongPPL: the losses of key tokens, from a file of key-tokens or chosen by a reference checkpoint"
    parser.add_argument("--key-tokens", type=Path, metavar="FROM", help=about)
    about = "with --key-tokens: also measure the losses with other text in place of the tokens before the short context"
    parser.add_argument("--shuffle-far", action="store_true", help=about)
    about = "with --key-tokens: evaluate a checkpoint on key tokens that it chose itself, which is circular"
    parser.add_argument("--allow-self-evaluation", action="store_true", help=about)
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

    if args.key_tokens is not None:
        return _run_key_tokens(args)
    for flag in ("shuffle_far", "allow_self_evaluation"):
        if getattr(args, flag):
            raise UserError(f"--{flag.replace('_', '-')} needs --key-tokens: add it or drop the flag")
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


def _run_key_tokens(args: argparse.Namespace) -> None:
    """Run ``eval --key-tokens``."""
    from fairseq_rpe.evaluation.checkpoint_defaults import default_lengths, with_checkpoint_rotation
    from fairseq_rpe.evaluation.key_token_records import KeyTokenEvalRequest, KeyTokenResult
    from fairseq_rpe.evaluation.key_tokens import load_or_find_key_tokens, make_evaluator
    from fairseq_rpe.evaluation.records import resume_results

    request = with_checkpoint_rotation(from_attributes(KeyTokenEvalRequest, args, lengths=args.lengths or ()))
    key_tokens = load_or_find_key_tokens(request, args.key_tokens, args.out)
    lengths = args.lengths or default_lengths(
        request.checkpoint, request.data, request.split, request.rpe, request.positions_eval, key_tokens.blocks
    )
    request = replace(request, lengths=lengths, blocks=key_tokens.blocks)
    keys = request.key_token_keys(key_tokens)
    printer = ResultPrinter(_key_token_columns(key_tokens.short_context, request.shuffle_far), args.json)
    for result in resume_results(KeyTokenResult, args.out, keys, lambda _: make_evaluator(request, key_tokens)):
        printer.add(result)


def _key_token_columns(short_context: int, shuffle_far: bool) -> list[Column]:
    """Return the columns of results on key tokens."""
    columns = [
        Column("length", 8, lambda r: str(r.length)),
        Column("LongPPL", 12, lambda r: decimals(r.long_ppl)),
        Column(f"with {short_context}", 12, lambda r: decimals(2.0**r.short_loss_base2)),
    ]
    if shuffle_far:
        columns.append(Column("far replaced", 12, lambda r: decimals(2.0**r.shuffled_loss_base2)))
    columns += [
        Column("perplexity", 12, lambda r: decimals(r.ppl)),
        Column("key tokens", 12, lambda r: f"{r.key_count:,}"),
        Column("share", 8, lambda r: f"{r.key_share:.2%}"),
        Column("seconds", 9, seconds),
        Column("", 0, lambda r: "" if r.has_enough_tokens else "too few for a verdict", left=True),
    ]
    return columns


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
