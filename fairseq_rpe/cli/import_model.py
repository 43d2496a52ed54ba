"""``import``: make a checkpoint from a transformers model on disk."""

import argparse
from pathlib import Path

from fairseq_rpe.cli.options import spec


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``import``."""
    parser.description = (
        "Convert a model of Hugging Face transformers into a checkpoint that computes the same function, with the "
        "encoding of its config. Every command accepts the checkpoint. prepare --tokenizer MODEL makes the text for it."
    )
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder with config.json, tokenizer.json and safetensors"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="run folder to create")
    about = "encoding in place of that of the config, such as rope:scaling=none (default: the config's)"
    parser.add_argument("--rpe", type=spec, metavar="SPEC", help=about)
    parser.set_defaults(log=None)


def run(args: argparse.Namespace) -> None:
    """Run ``import``."""
    from fairseq_rpe.adapters.import_model import import_model

    import_model(args.model, args.out, args.rpe)
