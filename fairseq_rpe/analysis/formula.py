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
_FUNCTIONS = {name: getattr(sympy, name) for name in ("log", "exp", "sin", "cos", "tanh", "atan")} | {
    "ln": sympy.log,
    "sqrt": lambda x, evaluate: sympy.Pow(x, sympy.Rational(1, 2), evaluate=evaluate),
    **{name.lower(): getattr(sympy, name) for name in ("Abs", "Min", "Max")},
}
_NAMES = {"n": N, "pi": sympy.pi, "e": sympy.E}
_MAX_LENGTH, _MAX_DEPTH, _MAX_EXPONENT = 1000, 60, 300  # characters; nesting; decimal exponent of a number


def parse(text: str, longest: int | None = _MAX_LENGTH) -> sympy.Expr:
    """Parse a formula in n without simplifying it, so that n/n stays undefined at n = 0.

    A formula may have numbers, ``n``, ``pi``, ``e``, ``+ - * / **``, parentheses and the functions log = ln, exp, sqrt,
    sin, cos, tanh, atan, abs, min and max. Decimals are exact: 0.1 is 1/10.

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # for 2(n), which is refused below
            tree = ast.parse(shown, mode="eval")
        expression = _read(tree.body, shown)
        if _depth(expression) > _MAX_DEPTH:
            raise RecursionError
        return expression
    except UserError:
        raise
    except (MemoryError, RecursionError):
        raise UserError(f"the formula '{shown[:60]}…' is nested too deeply: write it with fewer levels") from None
    except (SyntaxError, ValueError):
        raise UserError(f"the formula '{shown}' does not parse: write products as 2*n and powers as n**2") from None


def _depth(e: sympy.Expr) -> int:
    return 1 + max(map(_depth, e.args), default=0)


def _read(node: ast.expr, text: str) -> sympy.Expr:
    """Return the expression of a node of the syntax tree of ``text``."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return sympy.Integer(value)
        case ast.Constant(value=float()):
            digits = (ast.get_source_segment(text, node) or "").replace("_", "").lower()
            exponent = re.search(r"e[+-]?(\d+)$", digits)
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
    return -e if e.is_Rational else sympy.Mul(-1, e, evaluate=False)


def _binary(left: sympy.Expr, op: ast.operator, right: sympy.Expr) -> sympy.Expr:
    if isinstance(op, ast.Add | ast.Sub):
        terms = left.args if left.is_Add else (left,)  # so that a long sum has a depth of 1
        return sympy.Add(*terms, right if isinstance(op, ast.Add) else _negative(right), evaluate=False)
    if isinstance(op, ast.Div):
        if left.is_Rational and right.is_Rational and right != 0:
            return left / right
        right = sympy.Pow(right, -1, evaluate=False)
    return (sympy.Pow if isinstance(op, ast.Pow) else sympy.Mul)(left, right, evaluate=False)
