"""Checks a user's position transform before it is used, by calling it for a few rows.

Transforms of this package are not checked at run time; a test runs the same checks on all of them.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from fairseq_rpe.core.contract import (
    ContractError,
    call_user_method,
    check_hook_names,
    is_shipped,
    preserve_random_state,
    raise_contract_error,
)
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.positions.base import Transform, TransformedPositions

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from fairseq_rpe.core import lazy_torch as torch

TOKENS = 11  # of the longest row of a sample
_OTHER_NAMES = (
    "setup",
    "Config",
    "formula",
    "paper",
    "random",
    "fractional",
    "length_invariant",
    "evaluation",
    "max_length",
    "position_limit",
    "spec_for_length",
)
# by class: the options and training lengths for which it has passed the check
_checked: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()


def check_contract(transform: Transform) -> None:
    """Check what a user's transform returns, once per process for each class and its options.

    The check covers misspelt names of ``transform``; shape, dtype and values of positions; whether ``step``,
    ``contiguous``, ``fractional``, ``length_invariant`` and ``random`` describe the positions correctly; and whether
    random positions depend on the generator only. Random states are not changed.

    Args:
        transform: any transform; those of this package are skipped.

    Raises:
        ContractError: names class and method, the returned and the expected value, and the author's file and line.
    """
    cls = type(transform)
    if is_shipped(cls):
        return
    key, done = f"{transform.config!r} {transform.train_length}", _checked.setdefault(cls, set())
    if key not in done:
        check(transform)
        done.add(key)


def check(transform: Transform) -> None:
    """Run :func:`check_contract` also for transforms of this package and for those already checked.

    Args:
        transform: any transform.

    Raises:
        ContractError: names class and method, the returned and the expected value, and the author's file and line.
    """
    cls = type(transform)
    if not is_shipped(cls):
        check_hook_names(cls, Transform, ("transform",), _OTHER_NAMES)
    with preserve_random_state(torch.device("cpu")), torch.no_grad(), torch.device("cpu"):
        for dtype in (torch.float32, torch.float64):
            with suppress(_Declined):
                _check_positions(transform, dtype)


class _Declined(Exception):
    """The transform refuses these rows by a UserError, which is no fault of it: users will see that error."""


def _call(transform: Transform, index: Tensor, lengths: Tensor, seed: int = 1) -> TransformedPositions:
    """Call the transform, and check type, shape and dtype of its result.

    Raises:
        _Declined: the transform raises a UserError.
        ContractError: the transform raises another error, changes the index, or returns something else.
    """
    cls = type(transform)
    generator = torch.Generator().manual_seed(seed) if transform.random else None
    before = index.clone()
    try:
        positions = call_user_method(cls, "transform", transform, index, lengths, generator)
    except ContractError:
        raise
    except UserError as error:
        raise _Declined from error
    if not torch.equal(index, before):
        raise_contract_error(cls, "transform", "changes the index in place, which is shared: return a new tensor")
    if not isinstance(positions, TransformedPositions):
        raise_contract_error(cls, "transform", f"returned {type(positions).__name__}, expected TransformedPositions")
    rows, m = len(lengths), index.shape[1]
    if not isinstance(positions.k, torch.Tensor) or tuple(positions.k.shape) not in ((1, m), (rows, m)):
        shape = tuple(positions.k.shape) if isinstance(positions.k, torch.Tensor) else type(positions.k).__name__
        raise_contract_error(cls, "transform", f"returned positions {shape}, expected {(rows, m)} or {(1, m)}")
    if positions.k.dtype != index.dtype:
        raise_contract_error(cls, "transform", f"returned {positions.k.dtype}, expected {index.dtype}, as of the index")
    return positions


def _check_positions(transform: Transform, dtype: torch.dtype) -> None:
    """Check the positions of two rows of different lengths, whose index is shared or given for each row."""
    cls, n = type(transform), TOKENS
    if transform.max_length is not None:
        n = max(1, min(n, transform.max_length))
    lengths = torch.tensor([n, max(1, n - 3)])
    for index in (torch.arange(n, dtype=dtype)[None], torch.arange(n, dtype=dtype).repeat(2, 1)):
        positions = _call(transform, index, lengths)
        real = positions.k.expand(2, -1)[torch.arange(n) < lengths[:, None]]
        if not bool(torch.isfinite(real).all()):
            raise_contract_error(cls, "transform", "returned positions that are not finite")
        if not transform.fractional and bool((real != real.round()).any()):
            raise_contract_error(cls, "transform", "returned fractions of a position: set fractional = True")
        _check_spacing(cls, positions, lengths)
        if not torch.equal(_call(transform, index, lengths).k, positions.k):
            how = "draw from the generator argument" if transform.random else "set random = True"
            raise_contract_error(
                cls, "transform", f"returned other positions when called again: {how}, and keep no state"
            )
    if transform.length_invariant and n > 1:
        _check_length_invariance(transform, n, dtype)


def _check_length_invariance(transform: Transform, n: int, dtype: torch.dtype) -> None:
    """Refuse a transform that moves the tokens of n // 2 when their row grows to n tokens."""
    short = _call(transform, torch.arange(n // 2, dtype=dtype)[None], torch.tensor([n // 2]))
    full = _call(transform, torch.arange(n, dtype=dtype)[None], torch.tensor([n]))
    if not torch.equal(short.k[0], full.k[0, : n // 2]):
        raise_contract_error(
            type(transform),
            "transform",
            "returned other positions when the row got longer: set length_invariant = False",
        )


def _check_spacing(cls: type, positions: TransformedPositions, lengths: Tensor) -> None:
    """Refuse positions that ``step`` or ``contiguous`` do not describe."""
    if positions.step is None:
        if positions.contiguous:
            raise_contract_error(
                cls, "transform", "returned contiguous=True without a step, expected the distance of neighbours as step"
            )
        return
    if not isinstance(positions.step, int | float) or not 0 < positions.step < float("inf"):
        raise_contract_error(cls, "transform", f"returned step={positions.step!r}, expected a number above 0 or None")
    for row, length in zip(positions.k.expand(len(lengths), -1), lengths.tolist(), strict=True):
        steps = row[:length].diff() / positions.step
        if bool(((steps - steps.round()).abs() > 1e-3).any()):
            text = (
                f"returned step={positions.step:g}, but positions differ by other than multiples of it: use step=None"
            )
            raise_contract_error(cls, "transform", text)
        if positions.contiguous and bool(((steps - 1).abs() > 1e-3).any()):
            text = (
                f"returned contiguous=True, but neighbours are not step={positions.step:g} apart: use contiguous=False"
            )
            raise_contract_error(cls, "transform", text)
