"""``eval``: what fairseq-eval-lm gives at several lengths, every token of the set accounted for."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq_rpe.cli import checkpoints, corpus, subjects
from fairseq_rpe.cli.fairseq_setup import as_fairseq_command, log_to
from fairseq_rpe.cli.options import add_rpe_module, int_list, load_rpe_module, package_folder, positive_int
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import append_json_line, file_digest, read_json_lines
from fairseq_rpe.data.units import read_units

logger = logging.getLogger(__name__)
# Bounds the activations of one batch and, with fairseq, its logits; a longer block is a batch of its own.
_BATCH_TOKENS = 2048
FAST, FAIRSEQ = "fast", "fairseq"
# From the tokens of a block and of a batch to the number of targets scored and what the row says of them.
Engine = Callable[[int, int], tuple[int, dict[str, Any]]]


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
    parser.add_argument(
        "--compute-dtype", choices=("fp32", "bf16"), help="of matrix products (default: the checkpoint's)"
    )
    parser.add_argument("--attention-backend", metavar="NAME", help="default: the checkpoint's")
    parser.add_argument(
        "--attention-prune",
        type=float,
        metavar="EPS",
        help="leave out far keys that provably hold less than EPS of a query's attention (default: exact)",
    )
    parser.add_argument("--batch-size", type=positive_int, metavar="N", help="blocks a batch (default: no limit)")
    parser.add_argument(
        "--engine",
        choices=(FAST, FAIRSEQ),
        default=FAST,
        help="fast: the model loaded once, no logits in memory; fairseq: fairseq-eval-lm itself, for any model; "
        "the same numbers (default: %(default)s)",
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="file for fairseq's messages")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="default: auto")
    add_rpe_module(parser)
    parser.set_defaults(run=run)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two results the same measurement: not the engine."""
    parts = ("checkpoint", "data", "subset", "length", "rpe", "positions", "compute_dtype", "attention_prune")
    return tuple(row.get(k) for k in parts)


def run(args: argparse.Namespace) -> int:
    if not args.checkpoint.is_file():
        raise UserError(f"checkpoint {args.checkpoint} does not exist")
    corpus.check_folder(args.data, args.subset)
    tokens = min(corpus.check_block(args.data, args.subset, length) for length in args.lengths)
    short = [n for n in args.lengths if args.max_tokens and args.max_tokens < n]
    if short:
        raise UserError(f"--max-tokens {args.max_tokens} is less than length {short[0]}: raise it")
    units = read_units(args.data, args.subset)
    if units is not None and units.tokens != tokens:
        raise UserError(
            f"{args.data}/corpus.json counts {units.tokens} tokens in {args.subset} where the data have {tokens}: "
            "prepare the corpus again"
        )
    same = {"checkpoint": file_digest(args.checkpoint), "data": corpus.digest(args.data), "subset": args.subset}
    same |= {"rpe": args.rpe, "positions": args.positions}
    if args.compute_dtype:
        same["compute_dtype"] = args.compute_dtype
    if args.attention_prune is not None:
        same["attention_prune"] = args.attention_prune
    known = {key(row): row for row in (read_json_lines(args.out) if args.out else [])}
    encoding, engine = None, None
    for length in args.lengths:
        row = known.get(key({**same, "length": length}))
        if row is None:
            if engine is None:
                log_to(args.log)
                header = checkpoints.load_header(args.checkpoint)
                encoding = checkpoints.encoding_of(header)
                load_rpe_module(args.rpe_module)
                engine = _engine(args, header["cfg"])
            start = time.monotonic()
            found = _measure(args, engine, length, tokens)
            seconds = round(time.monotonic() - start, 3)
            row = {"encoding": encoding, **same, "length": length, "tokens": tokens}
            row |= {"loss_base2": found.pop("loss_base2"), "ppl": found.pop("ppl"), "seconds": seconds}
            if units is not None:
                row |= {"bits_per_byte": units.bits_per_byte(row["loss_base2"])}
                row |= {"word_ppl": units.word_ppl(row["loss_base2"])}
            row |= {"engine": args.engine, "peak_mb": round(peak_mb(args), 1), **found}
            if args.out:
                append_json_line(args.out, row)
        print(json.dumps(row), flush=True)
    return 0


def _engine(args: argparse.Namespace, cfg: dict[str, Any]) -> Engine:
    if args.engine == FAIRSEQ:
        if args.attention_prune is not None:
            raise UserError("--attention-prune goes with --engine fast: fairseq-eval-lm knows no pruning")
        if args.attention_backend is not None:
            raise UserError("--attention-backend goes with --engine fast: fairseq-eval-lm takes the checkpoint's")
        return functools.partial(score, args)
    from fairseq_rpe.cli.fast import Fast

    return Fast(args, cfg)


def _measure(args: argparse.Namespace, engine: Engine, length: int, tokens: int) -> dict[str, Any]:
    """What an engine finds at one length.

    Raises:
        UserError: it failed, or scored other than all ``tokens`` tokens of the subset.
    """
    try:
        scored, found = engine(length, args.max_tokens or max(length, _BATCH_TOKENS))
    except UserError:
        raise
    except Exception as error:
        logger.error(traceback.format_exc())
        where = f"; see {args.log}" if args.log else ""
        raise UserError(f"evaluation at length {length} failed: {type(error).__name__}: {error}{where}") from error
    logger.info("length %d, engine %s: scored tokens: %d of %d", length, args.engine, scored, tokens)
    if scored != tokens:
        raise UserError(
            f"length {length}: {scored} of {tokens} tokens were scored, so the result is not kept: "
            "the model must accept this length, and the data hold no padding"
        )
    return found


def score(args: argparse.Namespace, length: int, batch_tokens: int) -> tuple[int, dict[str, Any]]:
    """The engine ``fairseq``: base-2 loss and perplexity per token by fairseq-eval-lm's own code."""
    flags = [str(args.data), "--path", str(args.checkpoint), "--user-dir", package_folder()]
    flags += ["--task", "language_modeling", "--gen-subset", args.subset, "--sample-break-mode", "none"]
    flags += ["--tokens-per-sample", str(length), "--max-tokens", str(batch_tokens)]
    flags += ["--num-workers", "0", "--no-progress-bar", "--log-format", "none"]
    if args.batch_size:
        flags += ["--batch-size", str(args.batch_size)]
    if args.rpe:
        flags += ["--rpe-eval", args.rpe]
    if args.positions:
        flags += ["--positions-eval", args.positions]
    if args.compute_dtype:
        flags += ["--compute-dtype", args.compute_dtype]
    if args.rpe_module:
        flags += ["--rpe-module", str(args.rpe_module)]
    if args.device == "cpu":
        flags.append("--cpu")
    with as_fairseq_command(flags):
        result = _run_fairseq(flags)
    # Counted by the plugin's guard around fairseq's own evaluation loop.
    return result["scored_tokens"], {"loss_base2": float(result["loss"]), "ppl": float(result["perplexity"])}


def _run_fairseq(flags: list[str]) -> dict[str, Any]:
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq_cli import eval_lm

    import fairseq_rpe.models  # noqa: F401  (registers: this package was imported before fairseq)
    from fairseq_rpe import compat, guards

    # Where the models were imported before this module of fairseq's, nothing has guarded it yet.
    guards.guard_module(eval_lm)
    parser = options.get_eval_lm_parser()
    args = options.parse_args_and_arch(parser, input_args=flags)
    try:
        return eval_lm.main(convert_namespace_to_omegaconf(args))
    finally:
        compat.forget_overrides()


def peak_mb(args: argparse.Namespace) -> float:
    """MiB: the most that this process has had in memory so far; on a GPU, of the GPU's."""
    import torch

    if subjects.device_of(args) == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        # not getrusage: after an exec it starts from what the parent had
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10
    except (OSError, IndexError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most / 2**20 if sys.platform == "darwin" else most / 2**10
