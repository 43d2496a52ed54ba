"""Formulas of the distance n, read without ``eval``."""

import ast
import re
import warnings

import sympy

from ..core import UserError
from ..core.spec import nearest

N = sympy.Symbol("n", nonnegative=True)  # the distance in every expression of this package
_FUNCTIONS = {
    "log": sympy.log,
    "ln": sympy.log,
    "exp": sympy.exp,
    "sqrt": lambda x, evaluate: sympy.Pow(x, sympy.Rational(1, 2), evaluate=evaluate),
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tanh": sympy.tanh,
    "atan": sympy.atan,
    "abs": sympy.Abs,
    "min": sympy.Min,
    "max": sympy.Max,
}
_NAMES = {"n": N, "pi": sympy.pi, "e": sympy.E}
_LONGEST, _DEEPEST, _EXPONENT = 1000, 60, 300  # characters and levels of a formula; decimal exponent of a number in it


def parse(text: str, longest: int | None = _LONGEST) -> sympy.Expr:
    """A formula in n as an expression in which nothing was cancelled, so that n/n stays undefined at n = 0.

    Numbers, ``n``, ``pi``, ``e``, ``+ - * / **``, parentheses and log = ln, exp, sqrt, sin, cos, tanh, atan, abs, min,
    max. Decimals are exact: 0.1 is 1/10.

    >>> parse("-0.5*n")
    -n/2

    Raises:
        UserError: anything else, in one line.
    """
    if not text.strip():
        raise UserError("the formula is empty: give an expression in n, for example -2*log(n+1)")
    if longest is not None and len(text) > longest:
        raise UserError(f"the formula has {len(text)} characters: at most {longest} are read")
    shown = " ".join(text.split())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # 2(n): refused below in words of ours
            tree = ast.parse(shown, mode="eval")
        found = _Reader(shown).read(tree.body)
        if _depth(found) > _DEEPEST:
            raise RecursionError
        return found
    except UserError:
        raise
    except (MemoryError, RecursionError):
        raise UserError(f"the formula '{shown[:60]}…' is nested too deeply: write it with fewer levels") from None
    except (SyntaxError, ValueError):
        raise UserError(f"the formula '{shown}' does not parse: write products as 2*n and powers as n**2") from None


def _depth(e: sympy.Expr) -> int:
    return 1 + max(map(_depth, e.args), default=0)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, node: ast.expr) -> sympy.Expr:
        if isinstance(node, ast.Constant):
            return self._number(node)
        if isinstance(node, ast.Name):
            if node.id not in _NAMES:
                raise self._unknown(node.id)
            return _NAMES[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            inner = self.read(node.operand)
            return inner if isinstance(node.op, ast.UAdd) else self._negative(inner)
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise self._refused(node)

    @staticmethod
    def _negative(inner: sympy.Expr) -> sympy.Expr:
        return -inner if inner.is_Rational else sympy.Mul(-1, inner, evaluate=False)

    def _number(self, node: ast.Constant) -> sympy.Expr:
        if isinstance(node.value, bool) or not isinstance(node.value, int | float):
            raise self._refused(node)
        if isinstance(node.value, int):
            return sympy.Integer(node.value)
        digits = (ast.get_source_segment(self.text, node) or "").replace("_", "").lower()
        exponent = re.search(r"e[+-]?(\d+)$", digits)
        if exponent and (len(exponent[1]) > 4 or int(exponent[1]) > _EXPONENT):
            raise UserError(f"the number {digits} in the formula is out of range: use exponents up to {_EXPONENT}")
        return sympy.Rational(digits)

    def _binary(self, node: ast.BinOp) -> sympy.Expr:
        if not isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.Pow):
            raise self._refused(node)
        left, right = self.read(node.left), self.read(node.right)
        if isinstance(node.op, ast.Add | ast.Sub):
            terms = left.args if left.is_Add else (left,)  # a long sum is one level
            return sympy.Add(*terms, right if isinstance(node.op, ast.Add) else self._negative(right), evaluate=False)
        if isinstance(node.op, ast.Pow):
            return sympy.Pow(left, right, evaluate=False)
        if isinstance(node.op, ast.Mult):
            return sympy.Mul(left, right, evaluate=False)
        if left.is_Rational and right.is_Rational and right != 0:
            return left / right
        return sympy.Mul(left, sympy.Pow(right, -1, evaluate=False), evaluate=False)

    def _call(self, node: ast.Call) -> sympy.Expr:
        if not isinstance(node.func, ast.Name) or node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            raise self._refused(node)
        name = node.func.id
        if name not in _FUNCTIONS:
            raise self._unknown(name)
        several = name in ("min", "max")
        if len(node.args) < 1 + several or (len(node.args) > 1 and not several):
            raise UserError(f"{name} in the formula takes {'two arguments or more' if several else 'one argument'}")
        return _FUNCTIONS[name](*(self.read(a) for a in node.args), evaluate=False)

    def _unknown(self, name: str) -> UserError:
        known = [*_NAMES, *_FUNCTIONS]
        meant = nearest(name, known) if len(name) > 1 else " (the distance is called n)"
        return UserError(f"unknown name '{name}' in the formula{meant}; known: {', '.join(known)}")

    def _refused(self, node: ast.expr) -> UserError:
        part = ast.get_source_segment(self.text, node) or self.text
        power = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor)
        hint = "write ** for powers" if power else f"use numbers, n, + - * / ** and {', '.join(_FUNCTIONS)}"
        return UserError(f"'{part}' cannot stand in a formula: {hint}")
