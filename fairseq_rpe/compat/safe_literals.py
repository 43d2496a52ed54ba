"""Evaluates strings of a configuration as literals instead of running them."""

import ast
import operator
import sys
from typing import Any

from fairseq_rpe.core.errors import UserError

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def replace_eval() -> None:
    """Replace ``eval`` in every loaded module of fairseq by :func:`evaluate_literal`, so that no text can run code.

    fairseq calls eval() on strings of a checkpoint's configuration (character_filters, cutoffs, betas, …).
    """
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None) if name == "__main__" else None  # python -m fairseq_cli.train
        if module is not None and (spec.name if spec else name).split(".")[0] in ("fairseq", "fairseq_cli"):
            vars(module)["eval"] = evaluate_literal


def evaluate_literal(text: Any, *_: Any) -> Any:
    """Return the value of a Python literal.

    Arithmetic and ``[(512, 3)] * 20`` are allowed, as in fairseq's defaults.

    Raises:
        UserError: the text is anything else.
    """
    if not isinstance(text, str):
        return text
    try:
        return _literal(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise UserError(f"refused to evaluate {shown!r}: only plain Python values are accepted here") from None


def _literal(node: ast.AST) -> Any:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
        return kind(_literal(item) for item in node.elts)
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_literal(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _literal(node.left), _literal(node.right)
        if isinstance(node.op, ast.Mult) and not all(isinstance(x, (int, float)) for x in (left, right)):
            items, count = (left, right) if isinstance(right, int) else (right, left)
            if not isinstance(items, (list, tuple)) or not isinstance(count, int) or len(items) * count > 10_000:
                raise ValueError("not a small repeated list")
        return OPERATORS[type(node.op)](left, right)
    return ast.literal_eval(node)
