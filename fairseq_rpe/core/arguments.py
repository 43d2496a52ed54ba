"""Checks of the arguments of public functions: one UserError that names the argument, its value and what it must be."""

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

from fairseq_rpe.core.errors import UserError

LARGEST_COUNT = 1 << 53  # what a float64 counts: torch refuses larger sizes with an error of its own
_LONGEST = 40  # characters of a value that a message shows


def check_count(
    name: str, value: Any, minimum: int = 1, *, optional: bool = False, maximum: int = LARGEST_COUNT
) -> None:
    """Check that an argument is an integer, of Python's or of another package.

    Args:
        name: of the argument.
        value: the argument.
        minimum: smallest integer allowed.
        optional: whether None is allowed.
        maximum: largest integer allowed.

    Raises:
        UserError: it is not an integer, below ``minimum`` or above ``maximum``.
    """
    if (type(value) is int and minimum <= value <= maximum) or (value is None and optional):
        return
    try:
        valid = not isinstance(value, bool) and operator.index(value) >= minimum
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises any of them
        valid = False
    if valid and operator.index(value) > maximum:
        raise UserError(f"{name} must be at most {maximum}, not {described(operator.index(value))}")
    if not valid:
        raise UserError(
            f"{name} must be an integer of at least {minimum}{' or None' if optional else ''}, not {described(value)}"
        )


def check_number(name: str, value: Any, minimum: float = -math.inf, *, above: float | None = None) -> None:
    """Check that an argument is a finite real number.

    Raises:
        UserError: it is not one, below ``minimum``, or not above ``above``.
    """
    low = f" above {above:g}" if above is not None else "" if minimum == -math.inf else f" of at least {minimum:g}"
    valid = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or value < minimum or (above is not None and value <= above):
        raise UserError(f"{name} must be a finite number{low}, not {described(value)}")


def check_probability(name: str, value: Any) -> None:
    """Check that an argument is a number from 0 to below 1.

    Raises:
        UserError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise UserError(f"{name} is a probability from 0 to below 1, not {described(value)}")


def check_text(name: str, value: Any, example: str) -> None:
    """Check that an argument is a string.

    Raises:
        UserError: it is not; the message gives ``example``.
    """
    if not isinstance(value, str):
        raise UserError(f"{name} must be a string such as '{example}', not {described(value)}")


def check_texts(name: str, value: Any) -> None:
    """Check that an argument is a sequence of strings (a string is one of its characters), or None.

    Raises:
        UserError: it is not.
    """
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, Sequence):
        raise UserError(f"{name} must be a list of strings or None, not {described(value)}")
    for item in value:
        if not isinstance(item, str):
            raise UserError(f"{name} must be a list of strings: one of them is {described(item)}")


def check_choice(name: str, value: Any, choices: Sequence[str], *, optional: bool = False) -> None:
    """Check that an argument is one of several strings.

    Raises:
        UserError: it is none of ``choices``, nor None where that is allowed.
    """
    if not (isinstance(value, str) and value in choices) and not (value is None and optional):
        known = ", ".join(map(repr, choices)) + (" or None" if optional else "")
        raise UserError(f"{name} must be one of {known}, not {described(value)}")


def described(value: Any) -> str:
    """A value as a message shows it: a number, string or None itself, the type of anything else."""
    if value is None or isinstance(value, str | bool | int | float):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"of type {type(value).__module__.partition('.')[0]}.{type(value).__name__}".replace("builtins.", "")
