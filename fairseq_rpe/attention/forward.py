"""What a layer with an encoding does with queries, keys and values: count positions, plan, rotate, attend."""

from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.attention.backends import Backend
from fairseq_rpe.attention.plan import Plan
from fairseq_rpe.attention.scaled_distance_bias import last_row
from fairseq_rpe.core.bias import Bias, PiecewiseLinear, Positions, ScaledDistanceBias, ToeplitzBias, added
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding

Tables = MutableMapping[int, Any]  # what the encodings of a text that is being decoded keep, by id


def counted(
    padding: Tensor, n: int, length_dependent: bool, dtype: torch.dtype = torch.float32
) -> tuple[Positions, Tensor | None]:
    """Positions of the last n of m tokens, and the padding that attention must hide.

    Padding at the end of a row needs no mask: causality hides it from every real token. Padding elsewhere, or where
    the encoding reads the row's length, is masked and not counted: a padded row has the positions of the same row
    without padding.

    Args:
        padding: (B, m) bool, True at tokens that are padding.
        reads_length: the encoding changes with the length of the row.
        dtype: of the positions, float32 or float64.
    """
    m = padding.shape[1]
    plain = Positions.arange(n, m, device=padding.device, dtype=dtype)
    if not padding.any() or not (length_dependent or (padding[:, :-1] & ~padding[:, 1:]).any()):
        return plain, None
    k = (torch.cumsum(~padding, dim=1) - 1).clamp_min(0).to(dtype)
    shift = (plain.k - k).masked_fill(padding, torch.nan)
    spread = (shift - shift.nan_to_num(torch.inf).amin(1, keepdim=True)).nan_to_num(0.0)
    return Positions(k[:, m - n :], k, 1.0, contiguous=not bool(spread.any())), padding


def separated(documents: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Positions, Tensor]:
    """Positions and visibility of rows in which several documents follow one another, each as if it were alone.

    Args:
        documents: (B, n) integers: neighbours with one number are of one document. Padding has a number of its own.
        dtype: of the positions, float32 or float64.

    Returns:
        Positions that count each document's tokens from 0, and (B, n) int64 index of the last token of each token's
        document: the last query that may see it.
    """
    n = documents.shape[1]
    index = torch.arange(n, device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(begins, index, 0).cummax(1).values
    last = torch.where(begins.roll(-1, 1), index, n).flip(1).cummin(1).values.flip(1)
    k = (index - first).to(dtype)
    return Positions(k, k), last


def check_separable(encoding: Encoding) -> None:
    """Refuse an encoding that does not treat a document in a shared row as it would the document alone.

    Args:
        encoding: of a model.

    Raises:
        UserError: it reads the length of the row, or the tokens before, which may be of another document.
    """
    name = type(encoding).__name__
    why = "reads the length of the row" if encoding.length_dependent else "reads the tokens of the row"
    if encoding.length_dependent or encoding.needs_token_ids:
        raise UserError(f"{name} {why}, which separate documents in one row do not share: use --blocks document")


def plan_of(
    encoding: Encoding,
    positions: Positions,
    padding: Tensor | None,
    backend: Backend,
    prune: float = 0.0,
    *,
    turned: bool = False,
    tables: Tables | None = None,
    last_query: Tensor | None = None,
) -> Plan:
    """The plan of a layer that has this encoding; its bias is made in float32 or better, whatever autocast says.

    ``turned``: the keys come as :func:`turned` gives them; ``tables``: of the text that is being decoded;
    ``last_query``: of :func:`separated`, where documents share a row.
    """
    with exactly(positions.k):
        positions = encoding.prepare_positions(positions)
        form = encoding.position_bias(positions) if tables is None else _grown(encoding, positions, tables)
        reading = encoding.relative_values(positions)
        rotate, regions = encoding.rotation(positions), encoding.rotation_regions(positions)
    return Plan(
        positions,
        form,
        padding,
        encoding.transform_scores,
        rotate,
        backend,
        encoding.max_queries_per_call,
        prune,
        turned,
        encoding.content_bias if encoding.has_content_bias else None,
        encoding.token_features if encoding.has_token_features else None,
        reading,
        () if encoding.transform_scores is None else tuple(p for p in encoding.parameters() if p.requires_grad),
        encoding.value if encoding.changes_values else None,
        regions,
        last_query,
    )


def _grown(encoding: Encoding, positions: Positions, tables: Tables) -> Bias | None:
    """The form of this encoding. What it is made of is kept: a table of the distance, for twice the tokens, or pieces.

    They are those of the weights as they are when they are made, as cached keys are. Nothing is kept where gradients
    flow.
    """
    if torch.is_grad_enabled() or not positions.contiguous or positions.step is None:
        return encoding.position_bias(positions)
    known = tables.get(id(encoding))
    if not encoding.is_distance_bias:
        form = encoding.position_bias(positions)
        if not isinstance(form, ScaledDistanceBias) or positions.q.shape[1] > 1 or positions.k.device.type != "cpu":
            return form
        if not isinstance(known, PiecewiseLinear) or known.value.dtype != form.far.dtype:
            known = tables[id(encoding)] = form.pieces(1.0)
        return last_row(form, known, 1.0)
    m, step, like = positions.k.shape[1], positions.step, positions.k
    if not isinstance(known, ToeplitzBias) or (known.step == step and known.table.shape[1] < m):
        ahead = torch.arange(2 * m, device=like.device, dtype=like.dtype)[None] * step
        made = encoding.position_bias(Positions(ahead[:, -1:], ahead, step))
        assert isinstance(made, ToeplitzBias)
        known = tables[id(encoding)] = made
    same = (known.step, known.table.dtype, known.table.device) == (step, like.dtype, like.device)
    return known if same else encoding.position_bias(positions)


def turned(k: Tensor, plan: Plan) -> Tensor:
    """The keys (B, H, n, D) of the last n tokens as a cache may keep them: turned for their own positions."""
    assert plan.rotate is not None
    with exactly(k):
        return plan.rotate(k, plan.positions.q, plan.positions, key=True)


def noted(x: Tensor, plan: Plan) -> Tensor | None:
    """What the encoding has to know of each token of a layer's input x (B, n, C): (B, H, n, E); mostly None."""
    if plan.note is None:
        return None
    with exactly(x):
        return plan.note(x)


def carry_out(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float = 0.0, notes: Tensor | None = None) -> Tensor:
    """Rotate and attend, in as many parts as the rotation needs to stay within the range of its dtype.

    q: (B, H, n, D), k, v: (B, H, m, D), not rotated yet, but for keys that the plan calls turned; notes: (B, H, m, E)
    of an encoding that takes some; gives (B, H, n, D).
    """
    n, m = q.shape[2], k.shape[2]
    size = n if plan.max_queries_per_call is None else plan.max_queries_per_call(plan.positions, q.dtype)
    with exactly(q):
        if n > size and plan.last_query is not None:
            raise UserError(
                f"this encoding turns at most {size} tokens of separate documents in one call, and a row has {n}: use "
                "shorter rows, or --blocks document"
            )
        if n <= size:
            return _part(q, k, v, plan, dropout, notes)
        parts = []
        for start in range(0, n, size):
            stop = min(start + size, n)
            keys = slice(m - n + stop)
            seen = k[:, :, keys], v[:, :, keys]
            known = None if notes is None else notes[:, :, keys]
            parts.append(_part(q[:, :, start:stop], *seen, plan.part(start, stop), dropout, known))
        return torch.cat(parts, dim=2)


def exactly(x: Tensor) -> AbstractContextManager[Any]:
    """No autocast of what is done with x; entering and leaving that costs as much as a small operation."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _part(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float, notes: Tensor | None) -> Tensor:
    if plan.rotate is not None and plan.regions is None:
        q = plan.rotate(q, plan.positions.q, plan.positions)
        if not plan.turned:
            k = plan.rotate(k, plan.positions.k, plan.positions, key=True)
    if plan.value is not None:
        v = plan.value(v, plan.positions)
    assert plan.backend is not None
    return plan.backend(q, k, v, scored(q, k, plan, notes), dropout)


def scored(q: Tensor, k: Tensor, plan: Plan, notes: Tensor | None) -> Plan:
    """The plan with the bias that these queries and keys, turned already, decide."""
    if plan.scores is None:
        return plan
    wide = torch.promote_types(q.dtype, torch.float32)
    found = plan.scores(q.to(wide), k.to(wide), plan.positions, notes)
    return replace(plan, form=added(plan.form, found), scores=None)
