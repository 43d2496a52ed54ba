"""``eval``: fairseq-eval-lm's own code at several lengths, every token of the set accounted for."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_rpe.cli import checkpoints, corpus
from fairseq_rpe.cli.files import append_json_line, file_digest, read_json_lines
from fairseq_rpe.cli.options import add_rpe_module, int_list, load_rpe_module, package_folder, positive_int
from fairseq_rpe.core.errors import UserError

# Bounds the logits of one batch (tokens x vocabulary); a longer block is a batch of its own.
_BATCH_TOKENS = 2048


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="evaluate a checkpoint at several lengths",
        description="Prints one JSON line per length; a length already in --out is not redone.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    parser.add_argument("data", type=Path, metavar="DATA", help="binarised data folder")
    parser.add_argument("--lengths", type=int_list, required=True, metavar="N,N,...", help="tokens per block")
    parser.add_argument("--subset", default="test", help="split to score (default: test)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON-lines file to add the results to")
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help=f"a batch (default: {_BATCH_TOKENS})")
    parser.add_argument("--rpe", metavar="SPEC", help="evaluate with this encoding in place of the checkpoint's")
    parser.add_argument("--positions", metavar="SPEC", help="position transform (default: the checkpoint's)")
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help="blocks a batch (default: no limit)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="file for fairseq's messages")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="default: auto")
    add_rpe_module(parser)
    parser.set_defaults(run=run)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two results the same measurement."""
    return tuple(row.get(k) for k in ("checkpoint", "data", "subset", "length", "rpe", "positions"))


def run(args: argparse.Namespace) -> int:
    if not args.checkpoint.is_file():
        raise UserError(f"checkpoint {args.checkpoint} does not exist")
    corpus.check_folder(args.data, args.subset)
    tokens = min(corpus.check_block(args.data, args.subset, length) for length in args.lengths)
    short = [n for n in args.lengths if args.max_tokens and args.max_tokens < n]
    if short:
        raise UserError(f"--max-tokens {args.max_tokens} is less than length {short[0]}: raise it")
    same = {"checkpoint": file_digest(args.checkpoint), "data": corpus.digest(args.data), "subset": args.subset}
    same |= {"rpe": args.rpe, "positions": args.positions}
    known = {key(row): row for row in (read_json_lines(args.out) if args.out else [])}
    encoding = None
    for length in args.lengths:
        row = known.get(key({**same, "length": length}))
        if row is None:
            if encoding is None:
                log_to(args.log)
                encoding = checkpoints.encoding_of(checkpoints.load_header(args.checkpoint))
                load_rpe_module(args.rpe_module)
            start = time.monotonic()
            loss, ppl = score(args, length, tokens)
            seconds = round(time.monotonic() - start, 3)
            row = {"encoding": encoding, **same, "length": length, "tokens": tokens}
            row |= {"loss_base2": loss, "ppl": ppl, "seconds": seconds}
            if args.out:
                append_json_line(args.out, row)
        print(json.dumps(row), flush=True)
    return 0


def score(args: argparse.Namespace, length: int, tokens: int) -> tuple[float, float]:
    """Base-2 loss and perplexity per token over the whole subset, cut into blocks of ``length``.

    Raises:
        UserError: fairseq failed, or scored other than all ``tokens`` tokens of the subset.
    """
    flags = [str(args.data), "--path", str(args.checkpoint), "--user-dir", package_folder()]
    flags += ["--task", "language_modeling", "--gen-subset", args.subset, "--sample-break-mode", "none"]
    flags += ["--tokens-per-sample", str(length), "--max-tokens", str(args.max_tokens or max(length, _BATCH_TOKENS))]
    flags += ["--num-workers", "0", "--no-progress-bar", "--log-format", "none"]
    if args.batch_size:
        flags += ["--batch-size", str(args.batch_size)]
    if args.rpe:
        flags += ["--rpe-eval", args.rpe]
    if args.positions:
        flags += ["--positions-eval", args.positions]
    if args.rpe_module:
        flags += ["--rpe-module", str(args.rpe_module)]
    if args.device == "cpu":
        flags.append("--cpu")
    try:
        with as_fairseq_command(flags):
            result = _run_fairseq(flags)
    except UserError:
        raise
    except Exception as error:
        logging.getLogger(__name__).error(traceback.format_exc())
        where = f"; see {args.log}" if args.log else ""
        raise UserError(f"evaluation at length {length} failed: {type(error).__name__}: {error}{where}") from error
    # Counted by the plugin's guard around fairseq's own evaluation loop.
    scored = result["scored_tokens"]
    if scored != tokens:
        raise UserError(
            f"length {length}: {scored} of {tokens} tokens were scored, so the result is not kept: "
            "the model must accept this length"
        )
    return float(result["loss"]), float(result["perplexity"])


def _run_fairseq(flags: list[str]) -> dict[str, Any]:
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq_cli import eval_lm

    import fairseq_rpe.models  # noqa: F401  (registers: this package was imported before fairseq)

    parser = options.get_eval_lm_parser()
    args = options.parse_args_and_arch(parser, input_args=flags)
    return eval_lm.main(convert_namespace_to_omegaconf(args))


@contextlib.contextmanager
def as_fairseq_command(flags: list[str]) -> Iterator[None]:
    """fairseq reads --user-dir from sys.argv before it parses anything else."""
    before = sys.argv
    sys.argv = ["fairseq-eval-lm", *flags]
    try:
        yield
    finally:
        sys.argv = before


def log_to(path: Path | None) -> None:
    """Send fairseq's messages to a file, or nowhere: stdout is for the results.

    Must come before fairseq_cli is imported, which otherwise logs to stdout.
    """
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path) if path else logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)
