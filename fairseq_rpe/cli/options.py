"""Argument types and options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

import fairseq_rpe
from fairseq_rpe.core.errors import UserError


def positive_int(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return value


def positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to below 1")
    return value


def int_list(text: str) -> list[int]:
    """Comma or blank separated whole numbers, each once, e.g. ``64,128,256``."""
    values = [positive_int(item) for item in text.replace(",", " ").split()]
    if not values:
        raise argparse.ArgumentTypeError("is empty: give at least one whole number")
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"'{text}' names a number twice")
    return values


def add_rpe_module(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rpe-module", type=Path, metavar="FILE", help="Python file that registers encodings of your own"
    )


def load_rpe_module(path: Path | None) -> None:
    if path is None:
        return
    if not path.is_file():
        raise UserError(f"--rpe-module {path} does not exist")
    from fairseq_rpe import encodings

    encodings.load_module(str(path))


def package_folder() -> str:
    """What fairseq's --user-dir wants."""
    return str(Path(fairseq_rpe.__file__).parent)


def check_spec(spec: str, rpe_module: Path | None, length: int) -> str:
    """Refuse a misspelt encoding now, not after fairseq has started; returns its normal spelling."""
    load_rpe_module(rpe_module)
    from fairseq_rpe import encodings

    encodings.build(spec, heads=4, width=128, length=length)
    return encodings.normalise(spec)


def check_positions(train: str | None, evaluation: str | None, length: int) -> None:
    """Refuse a misspelt position transform now, not after fairseq has started."""
    from fairseq_rpe import positions

    for spec in (train, evaluation):
        if spec is not None:
            positions.build(spec, length)
