"""Log-bias of a head as a formula of the distance, for the convergence proofs of the analysis."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class LogBias:
    """The log-bias ln b_n = bias(n) of one head at distance n = 0, 1, … tokens.

    Attributes:
        formula: Expression in n in the syntax of ``fairseq-rpe verdict --formula``; write parameters with
            :func:`exact_fraction`.
        note: Words that end the reason of the verdict, such as the parameters that decide it.
        at_least: Whether the formula is only a lower bound, up to a constant; a bound can prove divergence but not
            convergence.
        keys: Number of keys that a query sees: the formula holds for n < keys, and the bias is -∞ from there on. None:
            it holds for every n.
    """

    formula: str
    note: str = ""
    at_least: bool = False
    keys: int | None = None


def exact_fraction(value: float, decimal: bool = False) -> str:
    """Return the exact fraction that a float represents, or with ``decimal`` that of its shortest decimal notation.

    >>> exact_fraction(0.375), exact_fraction(0.1, decimal=True)
    ('(3/8)', '(1/10)')
    """
    return f"({Fraction(repr(value)) if decimal else Fraction(value)})"
