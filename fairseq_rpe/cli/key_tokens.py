"""``key-tokens``: find the tokens of a text that a reference model predicts better from a long context."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_loading_options, float_number, nonnegative_float, positive_int, spec
from fairseq_rpe.utils.records import from_attributes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``key-tokens``."""
    parser.description = (
        "Write the key tokens of a split to a file for eval --key-tokens. A key token is one whose log-probability "
        "rises by more than ALPHA, to more than BETA, if the reference model sees the whole block before it instead of "
        "only the short context. If --out has the key tokens of the same settings, they are not measured again."
    )
    about = "reference checkpoint, trained on longer texts than the models to be evaluated"
    parser.add_argument("checkpoint", type=Path, metavar="REFERENCE_CHECKPOINT", help=about)
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write, which ends in .json")
    about = "K, tokens of the short context: the training length of the models to be evaluated"
    parser.add_argument("--short-context", type=positive_int, required=True, metavar="N", help=about)
    about = "tokens that share the start of their short context (default: K/4, at least 1)"
    parser.add_argument("--stretch", type=positive_int, metavar="N", help=about)
    about = "tokens per block, the limit of the long context (default: 16, 8, 4 or 2 × K, the longest possible)"
    parser.add_argument("--length", type=positive_int, metavar="N", help=about)
    about = "least increase of the log-probability by the long context, in nats (default: %(default)g)"
    parser.add_argument("--alpha", type=nonnegative_float, default=2.0, metavar="X", help=about)
    about = "least log-probability with the long context, in nats (default: %(default)g)"
    parser.add_argument("--beta", type=float_number, default=-2.0, metavar="X", help=about)
    about = "stream: a block may contain several documents; document: only one (default: document, if boundaries exist)"
    parser.add_argument("--blocks", choices=("stream", "document"), help=about)
    parser.add_argument("--split", default="test", help="split to search (default: test)")
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="tokens per batch (default: 2048, at least one block)"
    )
    parser.add_argument("--rpe", type=spec, metavar="SPEC", help="use this encoding instead of the checkpoint's")
    parser.add_argument("--log", type=Path, metavar="FILE", help="file for fairseq's messages")
    add_loading_options(parser)


def run(args: argparse.Namespace) -> None:
    """Run ``key-tokens``."""
    from fairseq_rpe.evaluation.checkpoint_defaults import with_checkpoint_rotation
    from fairseq_rpe.evaluation.key_token_records import MIN_KEY_TOKENS, KeyTokenRequest
    from fairseq_rpe.evaluation.key_tokens import find_key_tokens, resolve_settings

    request = with_checkpoint_rotation(from_attributes(KeyTokenRequest, args))
    key_tokens = find_key_tokens(request, resolve_settings(request), args.out)
    count, k = len(key_tokens.indices), key_tokens.short_context
    note = "" if count >= MIN_KEY_TOKENS else f", too few for a verdict, which needs {MIN_KEY_TOKENS}"
    print(f"key tokens: {count:,} of {key_tokens.tokens:,} ({key_tokens.share:.2%}){note}")
    print(
        f"perplexity of {key_tokens.encoding} on the key tokens: {2**key_tokens.key_loss_base2:.2f} with up to "
        f"{key_tokens.length} tokens, {2**key_tokens.short_loss_base2:.2f} with {k} to {k + key_tokens.stretch - 1}"
    )
    print(f"file: {args.out}")
