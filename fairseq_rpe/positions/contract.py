"""Checks a user's position transform before it is used: what ``transform`` returns for a few rows, or what is wrong with it.

Transforms of this package are not checked at run time; a test runs the same checks on all of them.
"""

import weakref
from contextlib import suppress

import torch
from torch import Tensor

from fairseq_rpe.core.contract import ContractError, call, check_names, is_shipped, refuse, untouched_random_state
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.positions.base import Transform, TransformedPositions

TOKENS = 11
_OTHERS = ("setup", "Config", "formula", "paper", "random", "fractional", "length_invariant", "evaluation", "longest")
_checked: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


def check_contract(transform: Transform) -> None:
    """Check what ``transform`` of a user's transform returns, once for each class and its options in a process.

    The check covers names near to ``transform``; the shape, dtype and values of positions; that ``step``, ``contiguous``,
    ``fractional``, ``length_invariant`` and ``random`` are true of them; and that a generator alone decides random ones. Random
    states stay as they are.

    Args:
        transform: any transform; those of this package are not checked.

    Raises:
        ContractError: names class and method, what was returned, what was expected, and the author's file and line.
    """
    cls = type(transform)
    if is_shipped(cls):
        return
    key, done = f"{transform.config!r} {transform.train_length}", _checked.setdefault(cls, set())
    if key not in done:
        check(transform)
        done.add(key)


def check(transform: Transform) -> None:
    """:func:`check_contract`, also of transforms of this package and of those that have been checked before."""
    cls = type(transform)
    if not is_shipped(cls):
        check_names(cls, Transform, ("transform",), _OTHERS)
    with untouched_random_state(torch.device("cpu")), torch.no_grad(), torch.device("cpu"):
        for dtype in (torch.float32, torch.float64):
            with suppress(_Declined):
                _check_moved(transform, dtype)


class _Declined(Exception):
    """The transform refuses these rows by a UserError of its own."""


def _move(transform: Transform, index: Tensor, lengths: Tensor, seed: int = 1) -> TransformedPositions:
    cls = type(transform)
    generator = torch.Generator().manual_seed(seed) if transform.random else None
    before = index.clone()
    try:
        moved = call(cls, "transform", transform, index, lengths, generator)
    except ContractError:
        raise
    except UserError as error:
        raise _Declined from error
    if not torch.equal(index, before):
        refuse(cls, "transform", "changes the index in place, which others read: return a new tensor")
    if not isinstance(moved, TransformedPositions):
        refuse(cls, "transform", f"returned {type(moved).__name__}, expected TransformedPositions")
    rows, m = len(lengths), index.shape[1]
    if not isinstance(moved.k, Tensor) or tuple(moved.k.shape) not in ((1, m), (rows, m)):
        got = tuple(moved.k.shape) if isinstance(moved.k, Tensor) else type(moved.k).__name__
        refuse(cls, "transform", f"returned positions {got}, expected {(rows, m)} or {(1, m)}")
    if moved.k.dtype != index.dtype:
        refuse(cls, "transform", f"returned {moved.k.dtype}, expected {index.dtype}, as of the index")
    return moved


def _check_moved(transform: Transform, dtype: torch.dtype) -> None:
    cls, n = type(transform), TOKENS
    if transform.longest is not None:
        n = max(1, min(n, transform.longest))
    lengths = torch.tensor([n, max(1, n - 3)])
    for index in (torch.arange(n, dtype=dtype)[None], torch.arange(n, dtype=dtype).repeat(2, 1)):
        moved = _move(transform, index, lengths)
        real = moved.k.expand(2, -1)[torch.arange(n) < lengths[:, None]]
        if not bool(torch.isfinite(real).all()):
            refuse(cls, "transform", "returned positions that are not finite")
        if not transform.fractional and bool((real != real.round()).any()):
            refuse(cls, "transform", "returned fractions of a position: set fractional = True")
        _check_spacing(cls, moved, lengths)
        if not torch.equal(_move(transform, index, lengths).k, moved.k):
            how = "draw from the generator that it is given" if transform.random else "set random = True"
            refuse(cls, "transform", f"returned other positions when called again: {how}, and keep no state")
    if transform.length_invariant and n > 1:
        short = _move(transform, torch.arange(n // 2, dtype=dtype)[None], torch.tensor([n // 2]))
        whole = _move(transform, torch.arange(n, dtype=dtype)[None], torch.tensor([n]))
        if not torch.equal(short.k[0], whole.k[0, : n // 2]):
            refuse(cls, "transform", "moved tokens when their row got longer: set length_invariant = False")


def _check_spacing(cls: type, moved: TransformedPositions, lengths: Tensor) -> None:
    """Refuse positions of which ``step`` or ``contiguous`` is not true."""
    if moved.step is None:
        if moved.contiguous:
            refuse(
                cls, "transform", "returned contiguous=True without a step, expected the distance of neighbours as step"
            )
        return
    if not isinstance(moved.step, int | float) or not 0 < moved.step < float("inf"):
        refuse(cls, "transform", f"returned step={moved.step!r}, expected a number above 0 or None")
    for row, length in zip(moved.k.expand(len(lengths), -1), lengths.tolist(), strict=True):
        steps = row[:length].diff() / moved.step
        if bool(((steps - steps.round()).abs() > 1e-3).any()):
            text = f"returned step={moved.step:g}, but positions differ by other than multiples of it: use step=None"
            refuse(cls, "transform", text)
        if moved.contiguous and bool(((steps - 1).abs() > 1e-3).any()):
            text = f"returned contiguous=True, but neighbours are not step={moved.step:g} apart: use contiguous=False"
            refuse(cls, "transform", text)
