"""What callers of attention give, looked at before anything is computed."""

import torch
from torch import Tensor

from ..core import Positions, UserError
from ..encodings import Encoding

WHOLE = 1 << 24  # float32 holds every whole number up to here


def check_shapes(q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> None:
    shown = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if any(x.dim() != 4 for x in (q, k, v)) or not q.numel():
        raise UserError(f"q, k and v are (batch, heads, tokens, head width), none of them 0; these are {shown}")
    batch, heads, n, width = q.shape
    m = k.shape[2]
    if k.shape != v.shape or k.shape != (batch, heads, m, width):
        raise UserError(f"q, k and v differ in more than q's tokens: {shown}; repeat keys that heads share")
    if n > m:
        raise UserError(f"{n} queries and {m} keys: the queries are the last of the tokens, so give all keys")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1 or not q.is_floating_point():
        given = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v)).replace("torch.", "")
        raise UserError(f"q, k and v are {given}: give them one floating-point dtype and one device")
    if padding is not None and (padding.shape != (batch, m) or padding.dtype != torch.bool):
        raise UserError(f"padding is bool of shape {(batch, m)}, not {padding.dtype} of {tuple(padding.shape)}")


def check_fit(encoding: Encoding, q: Tensor) -> None:
    heads, width = q.shape[1], q.shape[3]
    own = encoding.width // encoding.heads
    if encoding.heads != heads or (
        own != width and (encoding.rotates or encoding.of_content or encoding.changes_values)
    ):
        raise UserError(
            f"the encoding is for {encoding.heads} heads of width {own}, q has {heads} of {width}: "
            f"build it with heads={heads}, width={heads * width}"
        )
    first = next(encoding.parameters(), None)
    if first is not None and first.device != q.device:
        raise UserError(f"the encoding is on {first.device} and q on {q.device}: move it with encoding.to(q.device)")


def positions_of(given: Tensor | Positions, encoding: Encoding, q: Tensor, m: int) -> Positions:
    """Positions as given, checked; of a tensor, with what their spacing is."""
    batch, n = q.shape[0], q.shape[2]
    name = type(encoding).__name__
    if encoding.of_content and encoding.positions == "none":
        raise UserError(f"{name} reads no positions: leave them out")
    if isinstance(given, Positions):
        if encoding.positions == "whole" and given.step is None and not bool((given.k == given.k.round()).all()):
            raise UserError(f"{name} accepts whole positions only: round these, or use another encoding")
        if given.tokens is not None and len(given.tokens) not in (1, batch):
            raise UserError(
                f"tokens of {len(given.tokens)} rows, where attention has {batch}: give those of these rows"
            )
        if given.k.shape not in ((1, m), (batch, m)) or given.q.shape != (len(given.k), n):
            raise UserError(
                f"positions of {tuple(given.q.shape)} queries and {tuple(given.k.shape)} keys, where attention has "
                f"{(batch, n)} and {(batch, m)}: give those of these tokens"
            )
        return given
    if given.shape not in ((m,), (1, m), (batch, m)):
        raise UserError(f"positions are of shape {(m,)} or {(batch, m)}, not {tuple(given.shape)}")
    if given.dtype in (torch.bool, torch.float16, torch.bfloat16) or given.is_complex():
        raise UserError(f"positions in {given.dtype} lose digits: use torch.int64 or torch.float32")
    k = given.to(q.device).reshape(-1, m)
    if not bool(torch.isfinite(k).all() & (k >= 0).all() & (k.diff(dim=1) >= 0).all()):
        raise UserError("positions are 0 or more and never fall along a row: sort the tokens by them")
    if not k.is_floating_point():
        if int(k.max()) > WHOLE:
            raise UserError(f"position {int(k.max())} is beyond {WHOLE}, what float32 can count: use torch.float64")
        k = k.float()
    whole = bool((k == k.round()).all())
    if encoding.positions == "whole" and not whole:
        raise UserError(f"{name} accepts whole positions only: round these, or use another encoding")
    even = whole and bool((k.diff(dim=1) == 1).all())
    return Positions(k[:, m - n :], k, 1.0 if whole else None, contiguous=even)


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


def check_notes(encoding: Encoding, notes: Tensor | None, shape: tuple[int, ...]) -> None:
    name = type(encoding).__name__
    if encoding.notes and notes is None:
        raise UserError(f"{name} reads a layer's input: give notes=encoding.note(x), or use RelativeAttention")
    if notes is not None and not encoding.notes:
        raise UserError(f"{name} takes no notes: leave them out")
    if notes is not None and notes.shape[:3] != shape:
        raise UserError(f"notes are of shape {tuple(notes.shape)}, where attention has {(*shape, 'E')}: give them all")
