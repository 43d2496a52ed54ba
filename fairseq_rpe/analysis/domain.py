"""Is a formula a real number below +∞ at every n = 0, 1, 2, …? Shown with intervals, or refused."""

import contextlib
import itertools
import math
from typing import Any

import numpy as np
import sympy

from ..core import UserError
from .asymptotics import Scale
from .enclosures import Undefined, enclose, iv
from .expansions import Later, Unknown
from .ranges import ranges
from .summation import ORDERS, STARTS

_ONE_BY_ONE, _DOUBLES = 64, 100  # numbers; exponent of 2 up to which ranges of doubles serve
_OPEN, _TRIES = 1 << 14, 4000  # ranges that may still be open at a time; intervals beyond the doubles


def check(e: sympy.Expr, text: str) -> None:
    """Refuse a formula that is complex, undefined or +∞ at some n, or of which that cannot be ruled out; b_n = 0 at -∞.

    The numbers up to 63 are tried one by one, ranges of larger ones are halved until intervals prove that the
    formula has values there. Far out its expansion is the proof, which exists only where the formula has values.
    """
    for n in range(_ONE_BY_ONE):
        _at(e, n, text)
    _halve(e, [(1 << k, 2 << k) for k in range(_ONE_BY_ONE.bit_length() - 1, _DOUBLES)], text)
    todo, tries = [(_DOUBLES, _proved_from(e))], 0
    while todo:
        a, b = todo.pop()
        tries += 1
        if a < b and not _defined(e, iv.mpf([iv.mpf(2) ** a, iv.mpf(2) ** b])):
            if b - a == 1 or tries > _TRIES:
                raise UserError(f"the formula '{text}' cannot be shown to have a real value at every n from 2^{a} on")
            todo += [((a + b) // 2, b), (a, (a + b) // 2)]


def _proved_from(e: sympy.Expr) -> int:
    """The exponent of 2 from which an expansion holds, or could at best."""
    for start, order in itertools.product(STARTS, ORDERS):
        with contextlib.suppress(Later, Unknown, Undefined):
            Scale(start, order)(e)
            break
    return math.ceil(start / math.log(2))


def _defined(e: sympy.Expr, x: Any) -> bool:
    with contextlib.suppress(Undefined):
        return bool(enclose(e, x).a < iv.inf)
    return False


def _at(e: sympy.Expr, n: int, text: str) -> None:
    try:
        value = enclose(e, n)
    except Undefined:
        raise UserError(f"the formula '{text}' has no real value at n = {n}, or none that can be shown") from None
    if value.b == iv.inf:
        raise UserError(f"the formula '{text}' is infinite at n = {n}: a log-bias must stay below ∞")


def _halve(e: sympy.Expr, todo: list[tuple[int, int]], text: str) -> None:
    while todo:
        low, high = np.array(todo, dtype=np.float64).T
        if len(todo) > _OPEN:
            for n, _ in todo[:: _OPEN >> 8]:
                _at(e, n, text)
            start = todo[0][0]
            raise UserError(f"the formula '{text}' cannot be shown to have a real value at every n from {start} on")
        _, top = ranges(e, _outwards(low, -np.inf), _outwards(high, np.inf))
        bad = [todo[i] for i in np.flatnonzero(~(top < np.inf))]
        for n in (n for a, b in bad if b - a <= 1 for n in (a, b)):
            _at(e, n, text)
        todo = [half for a, b in bad if b - a > 1 for half in ((a, (a + b) // 2), ((a + b) // 2, b))]


def _outwards(near: Any, side: float) -> Any:
    """Beyond 2^53 a whole number may fall between two doubles."""
    return np.where(near < 2.0**53, near, np.nextafter(near, side))
