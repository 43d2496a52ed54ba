"""Specs looked at before a run starts: a misspelt one is refused now, not after fairseq has started."""

from pathlib import Path

from fairseq_rpe import encodings, positions
from fairseq_rpe.core.errors import UserError


def load_rpe_module(path: Path | None) -> None:
    """Register what a Python file of the user's registers.

    Raises:
        UserError: there is no such file, or it cannot be imported.
    """
    if path is None:
        return
    if not path.is_file():
        raise UserError(f"--rpe-module {path} does not exist")
    encodings.load_module(str(path))


def check_spec(spec: str, length: int) -> str:
    """Refuse a misspelt encoding; returns its normal spelling."""
    encodings.build(spec, heads=4, width=128, length=length)
    return encodings.normalise(spec)


def check_positions(train: str | None, evaluation: str | None, length: int) -> None:
    """Refuse a misspelt position transform."""
    for spec in (train, evaluation):
        if spec is not None:
            positions.build(spec, length)


def has_bias(spec: str) -> bool:
    """Whether an encoding, known to be spelt well, has a bias that --inspect-every can show."""
    return encodings.build(spec, heads=4, width=128, length=64).adds_bias
