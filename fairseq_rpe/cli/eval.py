"""``eval``: what fairseq-eval-lm gives at several lengths, every token of the set accounted for."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fairseq_rpe.cli.options import add_checkpoint, add_no_cache, int_list, positive_int
from fairseq_rpe.core.records import filled


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = "Prints one JSON line per length; a length already in --out is not redone."
    add_checkpoint(parser)
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    parser.add_argument("--lengths", type=int_list, required=True, metavar="N,N,...", help="tokens per block")
    parser.add_argument("--subset", default="test", help="split to score (default: test)")
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="tokens per batch (2048, at least one block)"
    )
    parser.add_argument(
        "--compute-dtype", choices=("fp32", "bf16"), help="dtype of matrix products (default: the checkpoint's)"
    )
    parser.add_argument("--attention-backend", metavar="NAME", help="default: the checkpoint's")
    add_no_cache(parser)
    parser.add_argument(
        "--attention-prune",
        type=float,
        metavar="EPS",
        help="leave out far keys that provably hold less than EPS of a query's attention (default: exact)",
    )
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help="blocks per batch (default: no limit)")
    about = "average the losses over K independent draws of random positions for each block (1)"
    parser.add_argument("--draws", type=positive_int, metavar="K", help=about)
    parser.add_argument(
        "--engine",
        choices=("fast", "fairseq"),
        default="fast",
        help="fast: the model loaded once, no logits in memory; fairseq: fairseq-eval-lm itself, for any model; "
        "the same numbers (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    from fairseq_rpe.evaluation.results import TextKey, TextRequest, TextResult, resumed

    request = filled(TextRequest, args)
    if request.rpe is not None:
        from fairseq_rpe.evaluation.replaced_encoding import with_checkpoint_rotation

        request = with_checkpoint_rotation(request)

    def begin(_: Sequence[TextKey]) -> Callable[[TextKey], TextResult]:
        from fairseq_rpe.evaluation.perplexity import measuring

        return measuring(request)

    for result in resumed(TextResult, args.out, request.keys(), begin):
        print(json.dumps(result.record()), flush=True)
