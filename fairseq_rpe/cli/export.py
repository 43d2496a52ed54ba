"""``export``: write a checkpoint as a folder that Hugging Face transformers loads."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import add_rpe_module, spec
from fairseq_rpe.utils.records import from_attributes

ARCHITECTURES = ("fairseq_rpe", "gpt_neox", "llama")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``export``."""
    parser.description = (
        "Write a checkpoint as a folder of Hugging Face transformers: configuration, weights, tokenizer and model "
        "card. The folder is complete or not there at all."
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="checkpoint to export")
    parser.add_argument("out", type=Path, metavar="DIR", help="folder to write, missing or empty")
    about = "data folder with the dictionary and the tokenizer (default: the one that the checkpoint names)"
    parser.add_argument("--data", type=Path, metavar="FOLDER", help=about)
    about = (
        "type of the model: fairseq_rpe for any encoding and block; gpt_neox or llama for a model that needs no code "
        "of this package, where they compute the same (default: %(default)s)"
    )
    parser.add_argument("--as", dest="architecture", choices=ARCHITECTURES, default=ARCHITECTURES[0], help=about)
    about = "add a small file from which transformers imports this package, with trust_remote_code=True"
    parser.add_argument("--remote-code", action="store_true", help=about)
    about = "export with this encoding instead of the checkpoint's"
    parser.add_argument("--rpe", type=spec, metavar="SPEC", help=about)
    about = "position transform in evaluation (default: the checkpoint's)"
    parser.add_argument("--positions-eval", type=spec, metavar="SPEC", help=about)
    parser.add_argument("--log", type=Path, metavar="FILE", help="file for fairseq's messages")
    add_rpe_module(parser, load_now=False)


def run(args: argparse.Namespace) -> None:
    """Run ``export``."""
    from fairseq_rpe.core.errors import UserError

    if args.remote_code and args.architecture != ARCHITECTURES[0]:
        raise UserError(f"--remote-code has no effect on --as {args.architecture}, which needs no code: drop it")
    from fairseq_rpe.adapters.export import ExportRequest, export

    summary = export(from_attributes(ExportRequest, args))
    tokenizer = f"tokenizer {summary.tokenizer}" if summary.tokenizer else f"no tokenizer: {summary.no_tokenizer}"
    print(f"{summary.encoding}: {summary.parameters:,} parameters, {tokenizer}")
    print(f"largest difference of logits: {summary.difference:.2g}")
    print(f"wrote {args.out}")
