"""Parser of formulas in the distance n, without ``eval``."""

import ast
import re
import warnings
from collections.abc import Mapping
from typing import Any

import sympy

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import did_you_mean

N = sympy.Symbol("n", nonnegative=True)  # the distance in every expression of this package


def _sqrt(x: sympy.Expr, evaluate: bool) -> sympy.Expr:
    """Return the square root, as written with ``evaluate`` False."""
    return sympy.Pow(x, sympy.Rational(1, 2), evaluate=evaluate)


# name in a formula -> function that takes the expressions of the arguments and ``evaluate``
_FUNCTIONS = {
    "log": sympy.log,
    "exp": sympy.exp,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tanh": sympy.tanh,
    "atan": sympy.atan,
    "ln": sympy.log,
    "sqrt": _sqrt,
    "abs": sympy.Abs,
    "min": sympy.Min,
    "max": sympy.Max,
}
_NAMES = {"n": N, "pi": sympy.pi, "e": sympy.E}
_MAX_LENGTH = 1000  # characters
_MAX_DEPTH = 60  # levels of an expression
_MAX_EXPONENT = 300  # decimal exponent of a number


def parse(text: str, longest: int | None = _MAX_LENGTH) -> sympy.Expr:
    """Parse a formula in n without simplifying it, so that n/n stays undefined at n = 0.

    A formula may have numbers, ``n``, ``pi``, ``e``, ``+ - * / **``, parentheses and the functions log = ln, exp, sqrt,
    sin, cos, tanh, atan, abs, min and max. Decimals are exact: 0.1 is 1/10.

    Only signs and quotients of numbers are computed, so -1/2 is one number. Everything else stays as it is written.

    Args:
        text: formula such as ``-log(1 + n)/2``.
        longest: largest number of characters; None for no limit.

    Returns:
        An expression in :data:`N`.

    Raises:
        UserError: the formula is not of this form.

    >>> parse("-0.5*n")
    -n/2
    """
    if not text.strip():
        raise UserError("the formula is empty: give an expression in n, for example -2*log(n+1)")
    if longest is not None and len(text) > longest:
        raise UserError(f"the formula has {len(text)} characters: at most {longest} are read")
    shown = " ".join(text.split())
    try:
        expression = _read(_parse_syntax(shown), shown)
        is_too_deep = _depth(expression) > _MAX_DEPTH
    except UserError:  # a ValueError, but with a message of its own
        raise
    except (MemoryError, RecursionError):  # of Python's parser, or of the functions below at as many levels
        is_too_deep = True
    except (SyntaxError, ValueError):
        raise UserError(f"the formula '{shown}' does not parse: write products as 2*n and powers as n**2") from None
    if is_too_deep:
        raise UserError(f"the formula '{shown[:60]}…' is nested too deeply: write it with fewer levels")
    return expression


def _parse_syntax(text: str) -> ast.expr:
    """Return Python's syntax tree of an expression."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # for 2(n), which `_read` refuses
        return ast.parse(text, mode="eval").body


def _depth(e: sympy.Expr) -> int:
    """Return the number of levels of an expression: 1 for a number or a name, 1 more than the deepest argument else."""
    return 1 + max(map(_depth, e.args), default=0)


def _read(node: ast.expr, text: str) -> sympy.Expr:
    """Return the expression of a node of the syntax tree of ``text``."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return sympy.Integer(value)
        case ast.Constant(value=float()):
            digits = (ast.get_source_segment(text, node) or "").replace("_", "").lower()
            exponent = re.search(r"e[+-]?(\d+)$", digits)
            # at most four digits are converted: int refuses thousands of digits with a ValueError
            if exponent and (len(exponent[1]) > 4 or int(exponent[1]) > _MAX_EXPONENT):
                raise UserError(
                    f"the number {digits} in the formula is out of range: use exponents up to {_MAX_EXPONENT}"
                )
            return sympy.Rational(digits)
        case ast.Name(name):
            return _look_up(name, _NAMES)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _read(operand, text)
        case ast.UnaryOp(ast.USub(), operand):
            return _negative(_read(operand, text))
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Pow() as op, right):
            return _binary(_read(left, text), op, _read(right, text))
        case ast.Call(ast.Name(name), arguments, []) if not any(isinstance(a, ast.Starred) for a in arguments):
            function, several = _look_up(name, _FUNCTIONS), name in ("min", "max")
            if len(arguments) < 1 + several or (len(arguments) > 1 and not several):
                raise UserError(f"{name} in the formula takes {'two arguments or more' if several else 'one argument'}")
            return function(*(_read(a, text) for a in arguments), evaluate=False)
    segment = ast.get_source_segment(text, node) or text
    power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor)
    hint = "write ** for powers" if power else f"use numbers, n, + - * / ** and {', '.join(_FUNCTIONS)}"
    raise UserError(f"'{segment}' cannot stand in a formula: {hint}")


def _look_up(name: str, table: Mapping[str, Any]) -> Any:
    """Return the constant or function of a name; raise UserError for an unknown one."""
    if name not in table:
        choices = [*_NAMES, *_FUNCTIONS]
        meant = did_you_mean(name, choices) if len(name) > 1 else " (the distance is called n)"
        raise UserError(f"unknown name '{name}' in the formula{meant}; known: {', '.join(choices)}")
    return table[name]


def _negative(e: sympy.Expr) -> sympy.Expr:
    """Return -e: a number for a rational number, otherwise the product (-1)·e as it is."""
    return -e if e.is_Rational else sympy.Mul(-1, e, evaluate=False)


def _binary(left: sympy.Expr, op: ast.operator, right: sympy.Expr) -> sympy.Expr:
    """Return the expression of an operator of two arguments.

    - A quotient of rational numbers is computed, so that 1/2 is a number; other quotients are left·right**-1.
    - A difference is the sum with the negative of the right argument.
    - A sum of many terms has one level, so it may be long. A product has one level per factor, so it has at most
      ``_MAX_DEPTH`` factors.
    """
    if isinstance(op, ast.Add | ast.Sub):
        terms = left.args if left.is_Add else (left,)
        return sympy.Add(*terms, right if isinstance(op, ast.Add) else _negative(right), evaluate=False)
    if isinstance(op, ast.Div):
        if left.is_Rational and right.is_Rational and right != 0:
            return left / right
        right = sympy.Pow(right, -1, evaluate=False)
    return (sympy.Pow if isinstance(op, ast.Pow) else sympy.Mul)(left, right, evaluate=False)
