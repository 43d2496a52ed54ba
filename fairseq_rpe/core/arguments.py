"""Checks of arguments of public functions; a UserError names the argument, its value and what it must be."""

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any

from fairseq_rpe.core.errors import UserError

LARGEST_COUNT = 1 << 53  # largest integer that float64 counts; torch refuses larger sizes itself
_MAX_CHARACTERS = 40  # of a value in a message


def check_count(
    name: str, value: Any, minimum: int = 1, *, optional: bool = False, maximum: int = LARGEST_COUNT
) -> None:
    """Check that an argument is an integer of Python or of another package.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        minimum: Smallest allowed integer.
        optional: Whether None is allowed.
        maximum: Largest allowed integer.

    Raises:
        UserError: It is not an integer, below ``minimum`` or above ``maximum``.
    """
    if (type(value) is int and minimum <= value <= maximum) or (value is None and optional):
        return
    try:
        valid = not isinstance(value, bool) and operator.index(value) >= minimum
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises any of them
        valid = False
    if valid and operator.index(value) > maximum:
        raise UserError(f"{name} must be at most {maximum}, not {describe_value(operator.index(value))}")
    if not valid:
        raise UserError(
            f"{name} must be an integer of at least {minimum}{' or None' if optional else ''}, "
            f"not {describe_value(value)}"
        )


def check_number(name: str, value: Any, minimum: float = -math.inf, *, above: float | None = None) -> None:
    """Check that an argument is a finite real number.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        minimum: Smallest allowed number.
        above: Exclusive lower bound.

    Raises:
        UserError: It is not a finite number, below ``minimum``, or not above ``above``.
    """
    low = f" above {above:g}" if above is not None else "" if minimum == -math.inf else f" of at least {minimum:g}"
    valid = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or value < minimum or (above is not None and value <= above):
        raise UserError(f"{name} must be a finite number{low}, not {describe_value(value)}")


def check_probability(name: str, value: Any) -> None:
    """Check that an argument is a number from 0 to below 1.

    Args:
        name: Name of the argument.
        value: Value of the argument.

    Raises:
        UserError: It is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise UserError(f"{name} is a probability from 0 to below 1, not {describe_value(value)}")


def check_text(name: str, value: Any, example: str) -> None:
    """Check that an argument is a string.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        example: A valid value, for the message.

    Raises:
        UserError: It is not a string.
    """
    if not isinstance(value, str):
        raise UserError(f"{name} must be a string such as '{example}', not {describe_value(value)}")


def check_texts(name: str, value: Any) -> None:
    """Check that an argument is a sequence of strings or None; a string counts as the sequence of its characters.

    Args:
        name: Name of the argument.
        value: Value of the argument.

    Raises:
        UserError: It is not such a sequence.
    """
    if value is None or isinstance(value, str):
        return
    if not isinstance(value, Sequence):
        raise UserError(f"{name} must be a list of strings or None, not {describe_value(value)}")
    for item in value:
        if not isinstance(item, str):
            raise UserError(f"{name} must be a list of strings: one of them is {describe_value(item)}")


def check_choice(name: str, value: Any, choices: Sequence[str], *, optional: bool = False) -> None:
    """Check that an argument is one of several strings.

    Args:
        name: Name of the argument.
        value: Value of the argument.
        choices: The allowed strings.
        optional: Whether None is allowed.

    Raises:
        UserError: It is not one of ``choices``.
    """
    if not (isinstance(value, str) and value in choices) and not (value is None and optional):
        allowed = ", ".join(map(repr, choices)) + (" or None" if optional else "")
        raise UserError(f"{name} must be one of {allowed}, not {describe_value(value)}")


def describe_value(value: Any) -> str:
    """Describe a value in a message: a number, string or None by itself, anything else by its type."""
    if value is None or isinstance(value, str | bool | int | float):
        text = repr(value)
        return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"of type {type(value).__module__.partition('.')[0]}.{type(value).__name__}".replace("builtins.", "")
