"""Option values that are a number or a word: ``1/6``, ``choice(0.4;0.5)``."""

import math
import re
from fractions import Fraction

from ..core import UserError


def number(text: str, key: str, name: str, also: str = "") -> float:
    """``0.25`` or ``1/4`` as a float; ``also`` tells what other words the option takes."""
    try:
        top, slash, bottom = text.partition("/")
        value = float(top) / float(bottom) if slash else float(top)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"option '{key}' of '{name}' wants a number such as 0.25 or 1/6{also}, not '{text}'")
    return value


def numbers(text: str, key: str, name: str) -> tuple[float, ...]:
    """One number, or those of ``choice(a;b;c)``."""
    several = re.fullmatch(r"choice\((.*)\)", text.strip(), re.DOTALL)
    items = several[1].split(";") if several else [text]
    return tuple(number(item.strip(), key, name, " or choice(0.4;0.5)") for item in items)


def spell(values: tuple[float, ...]) -> str:
    """The one spelling of these numbers in a spec: decimal where that is short and exact, else a fraction.

    >>> spell((1 / 6,)), spell((0.4, 0.5))
    ('1/6', 'choice(0.4;0.5)')
    """
    texts = [_spell(value) for value in values]
    return texts[0] if len(texts) == 1 else f"choice({';'.join(texts)})"


def _spell(value: float) -> str:
    if float(f"{value:g}") == value:
        return f"{value:g}"
    fraction = Fraction(value).limit_denominator(10_000)
    return str(fraction) if float(fraction) == value else repr(value)
