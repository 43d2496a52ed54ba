"""What an encoding tells the analysis: the log-bias of a head as a formula of the distance."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class LogBias:
    """ln b_n = bias(n) of one head at distance n = 0, 1, … tokens: what the analysis of Σ exp(bias) is told.

    Args:
        formula: an expression in n as ``fairseq-rpe verdict --formula`` reads it; :func:`exact` writes parameters.
        note: ends the reason of the verdict, e.g. which parameters decide it.
        at_least: the formula is only a lower bound, up to a constant; then only divergence can follow.
        keys: the formula holds for n < keys, and the bias is -∞ from there on.
    """

    formula: str
    note: str = ""
    at_least: bool = False
    keys: int | None = None


def exact(value: float, decimal: bool = False) -> str:
    """A float as the exact fraction that it is, or with ``decimal`` as the decimal that it is written as.

    >>> exact(0.375), exact(0.1, decimal=True)
    ('(3/8)', '(1/10)')
    """
    return f"({Fraction(repr(value)) if decimal else Fraction(value)})"
