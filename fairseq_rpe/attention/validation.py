"""Checks of the arguments of attention, before anything is computed."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.tensors import FLOAT_DTYPES, check_tensor, runs_eagerly
from fairseq_rpe.encodings import Encoding

LARGEST_EXACT = {torch.float32: 1 << 24, torch.float64: 1 << 53}  # the dtype represents all whole numbers up to here
MAX_DISTANCES = 1 << 24  # largest distance, in a table of all distances between tokens at positions with gaps


def check_shapes(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> None:
    """Check shapes, dtypes and devices of q (B, H, n, D), k and v (B, G, m, D) and padding (B, m).

    Raises:
        UserError: they do not fit each other.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    shown = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if any(x.dim() != 4 for x in (q, k, v)) or not q.numel():
        raise UserError(f"q, k and v are (batch, heads, tokens, head width), none of them 0; these are {shown}")
    batch, heads, n, width = q.shape
    m = k.shape[2]
    key_heads = k.shape[1]
    if k.shape != v.shape or k.shape != (batch, key_heads, m, width):
        raise UserError(f"q, k and v differ in more than q's tokens and heads: {shown}")
    if not key_heads or heads % key_heads:
        raise UserError(f"{key_heads} key heads do not divide {heads} query heads: {shown}; repeat keys as needed")
    if n > m:
        raise UserError(f"{n} queries and {m} keys: the queries are the last of the tokens, so give all keys")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1 or q.dtype not in FLOAT_DTYPES:
        layouts = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v)).replace("torch.", "")
        raise UserError(
            f"q, k and v are {layouts}: give them one floating-point dtype of 16 bits or more and one device"
        )
    if padding is not None:
        check_tensor("padding", padding)
    if padding is not None and (padding.shape != (batch, m) or padding.dtype != torch.bool):
        raise UserError(f"padding is bool of shape {(batch, m)}, not {padding.dtype} of {tuple(padding.shape)}")


def check_input(x: Tensor, width: int, weight: Any) -> None:
    """Check the input of a layer.

    Args:
        x: (B, n, C).
        width: C.
        weight: weight of the layer's first projection; if it is no tensor (as in a quantised layer), its dtype and
            device are not checked here.

    Raises:
        UserError: x is no dense floating-point tensor (B, n, C), or its dtype or device is not the layer's.
    """
    check_tensor("x", x)
    if x.dim() != 3 or x.shape[2] != width or not x.numel():
        raise UserError(f"x is (batch, tokens, {width}), not {tuple(x.shape)}")
    if x.dtype not in FLOAT_DTYPES:
        raise UserError(f"x is {x.dtype}: give it in a floating-point dtype of 16 bits or more")
    if not isinstance(weight, Tensor):
        return
    if weight.device != x.device:
        raise UserError(f"the layer is on {weight.device} and x on {x.device}: move one of them with .to(device)")
    cast = torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype)
    if x.dtype != weight.dtype and weight.dtype in FLOAT_DTYPES and not cast:
        raise UserError(f"the layer is in {weight.dtype} and x in {x.dtype}: convert one of them with .to(dtype)")


def check_encoding(encoding: Encoding, q: Tensor) -> None:
    """Check that an encoding has the heads, head width and device of q (B, H, n, D).

    Raises:
        UserError: the encoding is for other sizes or on another device.
    """
    heads, width = q.shape[1], q.shape[3]
    head_width = encoding.width // encoding.heads
    if encoding.heads != heads or (
        head_width != width and (encoding.rotates or encoding.is_content_dependent or encoding.changes_values)
    ):
        raise UserError(
            f"the encoding is for {encoding.heads} heads of width {head_width}, q has {heads} of {width}: "
            f"build it with heads={heads}, width={heads * width}"
        )
    first = next(encoding.parameters(), None)
    if first is not None and first.device != q.device:
        raise UserError(f"the encoding is on {first.device} and q on {q.device}: move it with encoding.to(q.device)")


def validate_positions(positions: Tensor | Positions, encoding: Encoding, q: Tensor, m: int) -> Positions:
    """Return the checked positions of the tokens, in float64 if q is.

    Args:
        positions: (m,) or (B, m) tensor, or a ``Positions``. A ``Positions`` states its spacing, and its values are
            checked once; the spacing of a tensor is computed in each call.
        encoding: encoding that is to use the positions.
        q: (B, H, n, D).
        m: number of keys.

    Raises:
        UserError: the positions do not fit the tokens, or the encoding cannot use them.
    """
    name = type(encoding).__name__
    if encoding.is_content_dependent and encoding.position_type == "none":
        raise UserError(f"{name} reads no positions: leave them out")
    if isinstance(positions, Positions):
        checked = _check_positions(positions, q, m)
    else:
        checked = _positions_from_tensor(positions, q, m)
    has_whole_steps = checked.step is not None and float(checked.step).is_integer()
    if encoding.position_type == "whole" and not has_whole_steps and not _are_whole(checked.k):
        raise UserError(f"{name} accepts whole positions only: round these, or use another encoding")
    return checked


def _are_whole(positions: Tensor) -> bool:
    return bool((positions == positions.round()).all())


def _check_positions(positions: Positions, q: Tensor, m: int) -> Positions:
    """Return a caller's ``Positions`` in float64 if q is; raise UserError unless they fit q and the m keys."""
    batch, n = q.shape[0], q.shape[2]
    if positions.tokens is not None and len(positions.tokens) not in (1, batch):
        raise UserError(
            f"tokens of {len(positions.tokens)} rows, where attention has {batch}: give those of these rows"
        )
    if positions.k.shape not in ((1, m), (batch, m)) or positions.q.shape != (len(positions.k), n):
        raise UserError(
            f"positions of {tuple(positions.q.shape)} queries and {tuple(positions.k.shape)} keys, where attention "
            f"has {(batch, n)} and {(batch, m)}: give those of these tokens"
        )
    for x in (positions.q, positions.k, *(() if positions.tokens is None else (positions.tokens,))):
        if x.device != q.device:
            raise UserError(f"positions are on {x.device} and q on {q.device}: give them on one device")
    return _check_values(positions, torch.promote_types(q.dtype, torch.float32))


def _positions_from_tensor(positions: Tensor, q: Tensor, m: int) -> Positions:
    """Return the ``Positions`` of a caller's tensor (m,) or (B, m), with the spacing that its values have.

    Raises:
        UserError: the tensor does not fit q and the m keys, or its values are no positions.
    """
    check_tensor("positions", positions)
    batch, n = q.shape[0], q.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    if positions.shape not in ((m,), (1, m), (batch, m)):
        raise UserError(f"positions are of shape {(m,)} or {(batch, m)}, not {tuple(positions.shape)}")
    is_rounded = positions.is_floating_point() and positions.dtype not in LARGEST_EXACT
    if is_rounded or positions.dtype == torch.bool or positions.is_complex():
        raise UserError(f"positions in {positions.dtype} lose digits: use torch.int64 or torch.float32")
    k = positions.to(q.device).reshape(-1, m)  # (B or 1, m)
    if not bool(torch.isfinite(k).all() & (k >= 0).all() & (k.diff(dim=1) >= 0).all()):
        raise UserError("positions are 0 or more and never fall along a row: sort the tokens by them")
    _check_largest(k, k.dtype if k.is_floating_point() else wide)
    k = k.to(torch.promote_types(k.dtype, wide) if k.is_floating_point() else wide)
    is_whole = _are_whole(k)
    is_even = is_whole and bool((k.diff(dim=1) == 1).all())
    # a table of all distances between tokens that are far apart would not fit into memory
    step = 1.0 if is_whole and (is_even or float(k.max() - k.min()) <= MAX_DISTANCES) else None
    return Positions(k[:, m - n :], k, step, contiguous=is_even)


def check_documents(
    documents: Tensor, q: Tensor, m: int, positions: Tensor | Positions | None, padding: Tensor | None
) -> None:
    """Check the numbers of documents that share rows.

    Args:
        documents: number of the document of each token.
        q: (B, H, n, D), the queries.
        m: number of keys.
        positions: the caller's positions, or None.
        padding: the caller's padding, or None.

    Raises:
        UserError: they are not (B, n) integers, n differs from m, or there are positions or padding as well.
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


def _check_values(positions: Positions, wide: torch.dtype) -> Positions:
    """Return the positions in ``wide`` or better, and check their values once.

    The first call stores an empty dict as the attribute ``_checked``. Later calls skip the checks, and find in it the
    positions that were converted to each dtype.
    """
    by_dtype: dict[torch.dtype, Positions] | None = positions.__dict__.get("_checked")
    if by_dtype is None and not runs_eagerly():
        by_dtype = {}  # values cannot be read here, so they are not checked
    elif by_dtype is None:
        for x in (positions.q, positions.k):
            if not bool((torch.isfinite(x) & (x >= 0)).all()):
                raise UserError("positions are finite and 0 or more: give others")
            _check_largest(x, x.dtype)
        by_dtype = {}
        object.__setattr__(positions, "_checked", by_dtype)
    q, k = (x.to(torch.promote_types(x.dtype, wide)) for x in (positions.q, positions.k))
    if q is positions.q and k is positions.k:
        return positions
    if wide not in by_dtype:  # one object for all layers, since encodings cache what they compute from it
        by_dtype[wide] = replace(positions, q=q, k=k)
    return by_dtype[wide]


def _check_largest(k: Tensor, dtype: torch.dtype) -> None:
    largest = float(k.max())
    if largest > LARGEST_EXACT[dtype]:
        kind = str(dtype).removeprefix("torch.")
        remedy = "use torch.float64" if dtype == torch.float32 else "use smaller ones"
        raise UserError(f"position {largest:.17g} is beyond {LARGEST_EXACT[dtype]}, what {kind} can count: {remedy}")


def check_token_features(encoding: Encoding, features: Tensor | None, q: Tensor, m: int) -> None:
    """Check the token features of an encoding.

    Args:
        encoding: encoding that is to use the features.
        features: (B, H, m, E), or None.
        q: (B, H, n, D).
        m: number of keys.

    Raises:
        UserError: features are missing, not used by the encoding, or do not fit the tokens.
    """
    shape = (*q.shape[:2], m)
    name = type(encoding).__name__
    if encoding.has_token_features and features is None:
        raise UserError(
            f"{name} reads a layer's input: give features=encoding.token_features(x), or use RelativeAttention"
        )
    if features is not None and not encoding.has_token_features:
        raise UserError(f"{name} takes no features: leave them out")
    if features is None:
        return
    check_tensor("features", features)
    if features.dim() != 4 or features.shape[:3] != shape:
        raise UserError(
            f"features are of shape {tuple(features.shape)}, where attention has {(*shape, 'E')}: give them all"
        )
    if features.device != q.device or features.dtype not in FLOAT_DTYPES:
        raise UserError(
            f"features are {features.dtype} on {features.device} and q is on {q.device}: give them in a "
            "floating-point dtype of 16 bits or more, on q's device"
        )
