"""Checks of what callers give to attention, before anything is computed."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.tensors import FLOATS, check_tensor
from fairseq_rpe.encodings import Encoding

EXACT = {torch.float32: 1 << 24, torch.float64: 1 << 53}  # each holds every whole number up to here
MOST_DISTANCES = 1 << 24  # columns of a table of distances between tokens at positions of any spacing


def check_shapes(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    shown = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if any(x.dim() != 4 for x in (q, k, v)) or not q.numel():
        raise UserError(f"q, k and v are (batch, heads, tokens, head width), none of them 0; these are {shown}")
    batch, heads, n, width = q.shape
    m = k.shape[2]
    if k.shape != v.shape or k.shape != (batch, heads, m, width):
        raise UserError(f"q, k and v differ in more than q's tokens: {shown}; repeat keys that heads share")
    if n > m:
        raise UserError(f"{n} queries and {m} keys: the queries are the last of the tokens, so give all keys")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1 or q.dtype not in FLOATS:
        given = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v)).replace("torch.", "")
        raise UserError(f"q, k and v are {given}: give them one floating-point dtype of 16 bits or more and one device")
    if padding is not None:
        check_tensor("padding", padding)
    if padding is not None and (padding.shape != (batch, m) or padding.dtype != torch.bool):
        raise UserError(f"padding is bool of shape {(batch, m)}, not {padding.dtype} of {tuple(padding.shape)}")


def check_input(x: Tensor, width: int, weight: Any) -> None:
    """Check the input of a layer.

    Args:
        x: (B, n, C).
        width: C.
        weight: of the layer's first projection; anything but a tensor is left to the projection.

    Raises:
        UserError: x is no dense floating-point tensor (B, n, C), or its dtype or device is not the layer's.
    """
    check_tensor("x", x)
    if x.dim() != 3 or x.shape[2] != width or not x.numel():
        raise UserError(f"x is (batch, tokens, {width}), not {tuple(x.shape)}")
    if x.dtype not in FLOATS:
        raise UserError(f"x is {x.dtype}: give it in a floating-point dtype of 16 bits or more")
    if not isinstance(weight, Tensor):
        return
    if weight.device != x.device:
        raise UserError(f"the layer is on {weight.device} and x on {x.device}: move one of them with .to(device)")
    cast = torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype)
    if x.dtype != weight.dtype and weight.dtype in FLOATS and not cast:
        raise UserError(f"the layer is in {weight.dtype} and x in {x.dtype}: convert one of them with .to(dtype)")


def check_fit(encoding: Encoding, q: Tensor) -> None:
    heads, width = q.shape[1], q.shape[3]
    own = encoding.width // encoding.heads
    if encoding.heads != heads or (
        own != width and (encoding.rotates or encoding.is_content_dependent or encoding.changes_values)
    ):
        raise UserError(
            f"the encoding is for {encoding.heads} heads of width {own}, q has {heads} of {width}: "
            f"build it with heads={heads}, width={heads * width}"
        )
    first = next(encoding.parameters(), None)
    if first is not None and first.device != q.device:
        raise UserError(f"the encoding is on {first.device} and q on {q.device}: move it with encoding.to(q.device)")


def positions_of(given: Tensor | Positions, encoding: Encoding, q: Tensor, m: int) -> Positions:
    """Positions of the tokens, checked, in float64 where q is.

    Args:
        given: as in ``attend``. A ``Positions`` states its own spacing, and its values are checked once; the spacing of
            a tensor is computed in each call.
        encoding: that is to receive them.
        q: (B, H, n, D).
        m: number of keys.

    Raises:
        UserError: they are not those of these tokens, or the encoding cannot use them.
    """
    batch, n = q.shape[0], q.shape[2]
    name = type(encoding).__name__
    if encoding.is_content_dependent and encoding.position_type == "none":
        raise UserError(f"{name} reads no positions: leave them out")
    wide = torch.promote_types(q.dtype, torch.float32)
    if isinstance(given, Positions):
        if given.tokens is not None and len(given.tokens) not in (1, batch):
            raise UserError(
                f"tokens of {len(given.tokens)} rows, where attention has {batch}: give those of these rows"
            )
        if given.k.shape not in ((1, m), (batch, m)) or given.q.shape != (len(given.k), n):
            raise UserError(
                f"positions of {tuple(given.q.shape)} queries and {tuple(given.k.shape)} keys, where attention has "
                f"{(batch, n)} and {(batch, m)}: give those of these tokens"
            )
        for x in (given.q, given.k, *(() if given.tokens is None else (given.tokens,))):
            if x.device != q.device:
                raise UserError(f"positions are on {x.device} and q on {q.device}: give them on one device")
        checked = _checked(given, wide)
        if encoding.position_type == "whole" and given.step is None and not bool((given.k == given.k.round()).all()):
            raise UserError(f"{name} accepts whole positions only: round these, or use another encoding")
        return checked
    check_tensor("positions", given)
    if given.shape not in ((m,), (1, m), (batch, m)):
        raise UserError(f"positions are of shape {(m,)} or {(batch, m)}, not {tuple(given.shape)}")
    rounded = given.is_floating_point() and given.dtype not in EXACT
    if rounded or given.dtype == torch.bool or given.is_complex():
        raise UserError(f"positions in {given.dtype} lose digits: use torch.int64 or torch.float32")
    k = given.to(q.device).reshape(-1, m)
    if not bool(torch.isfinite(k).all() & (k >= 0).all() & (k.diff(dim=1) >= 0).all()):
        raise UserError("positions are 0 or more and never fall along a row: sort the tokens by them")
    kind = torch.promote_types(k.dtype, wide) if k.is_floating_point() else wide
    _check_largest(k, k.dtype if k.is_floating_point() else wide)
    k = k.to(kind)
    whole = bool((k == k.round()).all())
    if encoding.position_type == "whole" and not whole:
        raise UserError(f"{name} accepts whole positions only: round these, or use another encoding")
    even = whole and bool((k.diff(dim=1) == 1).all())
    # a table of all distances between tokens that are far apart would not fit into memory
    step = 1.0 if whole and (even or float(k.max() - k.min()) <= MOST_DISTANCES) else None
    return Positions(k[:, m - n :], k, step, contiguous=even)


def check_documents(
    documents: Tensor, q: Tensor, m: int, positions: Tensor | Positions | None, padding: Tensor | None
) -> None:
    """Refuse documents that do not fit the queries, or what contradicts them.

    Args:
        documents: which document each token is of.
        q: (B, H, n, D), the queries.
        m: number of keys.
        positions: as the caller gives them, or None.
        padding: likewise.

    Raises:
        UserError: they are not (B, n) integers, keys are kept from before, or positions or padding are given too.
    """
    check_tensor("documents", documents)
    batch, n = q.shape[0], q.shape[2]
    kind = documents.dtype
    if documents.shape != (batch, n) or kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise UserError(f"documents are integers of shape {(batch, n)}, not {kind} of {tuple(documents.shape)}")
    if n != m:
        raise UserError(f"documents are of whole rows, here are {n} queries and {m} keys: give all queries")
    if positions is not None:
        raise UserError("documents count their own tokens: leave positions out")
    if padding is not None:
        raise UserError("give padding a number of its own among the documents, and leave padding out")


def _checked(given: Positions, wide: torch.dtype) -> Positions:
    """The same positions with their values checked, in float64 where ``wide`` is; kept with what was given."""
    by_dtype: dict[torch.dtype, Positions] | None = given.__dict__.get("_checked")
    if by_dtype is None and (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()):
        by_dtype = {}  # where values cannot be read
    elif by_dtype is None:
        for x in (given.q, given.k):
            if not bool((torch.isfinite(x) & (x >= 0)).all()):
                raise UserError("positions are finite and 0 or more: give others")
            _check_largest(x, x.dtype)
        by_dtype = {}
        object.__setattr__(given, "_checked", by_dtype)
    q, k = (x.to(torch.promote_types(x.dtype, wide)) for x in (given.q, given.k))
    if q is given.q and k is given.k:
        return given
    if wide not in by_dtype:  # one object for all layers, which keep what they compute of it
        by_dtype[wide] = replace(given, q=q, k=k)
    return by_dtype[wide]


def _check_largest(k: Tensor, dtype: torch.dtype) -> None:
    largest = float(k.max())
    if largest > EXACT[dtype]:
        kind = str(dtype).removeprefix("torch.")
        remedy = "use torch.float64" if dtype == torch.float32 else "use smaller ones"
        raise UserError(f"position {largest:.17g} is beyond {EXACT[dtype]}, what {kind} can count: {remedy}")


def check_notes(encoding: Encoding, notes: Tensor | None, q: Tensor, m: int) -> None:
    """Check what an encoding is to read of each of m tokens.

    Raises:
        UserError: notes (B, H, m, E) are missing, not wanted, or not those of these tokens.
    """
    shape = (*q.shape[:2], m)
    name = type(encoding).__name__
    if encoding.has_token_features and notes is None:
        raise UserError(f"{name} reads a layer's input: give notes=encoding.note(x), or use RelativeAttention")
    if notes is not None and not encoding.has_token_features:
        raise UserError(f"{name} takes no notes: leave them out")
    if notes is None:
        return
    check_tensor("notes", notes)
    if notes.dim() != 4 or notes.shape[:3] != shape:
        raise UserError(f"notes are of shape {tuple(notes.shape)}, where attention has {(*shape, 'E')}: give them all")
    if notes.device != q.device or notes.dtype not in FLOATS:
        raise UserError(
            f"notes are {notes.dtype} on {notes.device} and q is on {q.device}: give them in a floating-point dtype of "
            "16 bits or more, on q's device"
        )
