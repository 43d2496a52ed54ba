"""What a bias form adds to one score, as torch's FlexAttention wants it: a function of (score, batch, head, i, j)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.core.bias import (
    Bias,
    ContentBias,
    DenseBias,
    KeyTableBias,
    PiecewiseLinear,
    PointwiseBias,
    Positions,
    QueryKeyTableBias,
    QueryTableBias,
    ScaledDistanceBias,
    SumBias,
    ToeplitzBias,
    TokenBias,
)
from fairseq_rpe.core.errors import UserError

Function = Callable[..., Tensor]
CELLS = 1 << 14  # of the table in which a curve's pieces are looked up
COMPARED = 4  # ends in a cell, or a multiple: a network that learns should not compile anew with every kink


def columns(form: ToeplitzBias | QueryTableBias | KeyTableBias, pos: Positions) -> tuple[Tensor, Tensor]:
    """int32 a (B or 1, n) and b (B or 1, m) with a_i - b_j the column of the table, before clamping."""
    first = pos.k[:, :1]  # a common offset need not be a multiple of the step
    a, b = (torch.round((x - first) / form.step).int().contiguous() for x in (pos.q, pos.k))
    return a + form.origin, b


def pieces_between(
    form: ScaledDistanceBias, pos: Positions, padding: Tensor | None = None, last_query: Tensor | None = None
) -> PiecewiseLinear:
    """The pieces of ``form`` from 0 to the largest x of a pair that is seen, at least to 1.

    ``padding`` (B, m) bool, True at keys that nobody sees; ``last_query`` (B, m), the last query that sees each key.
    """
    n, m = pos.q.shape[1], pos.k.shape[1]
    with torch.no_grad():
        reach = torch.arange(m - n, m, device=form.far.device)[None]  # the longest distance that each query sees
        if padding is not None:
            first = padding.long().argmin(dim=1, keepdim=True).masked_fill(padding.all(1, keepdim=True), m)
            reach = reach - first
        if last_query is not None:  # a document begins behind the last query that sees the token before
            index = torch.arange(m, device=reach.device)
            begins = F.pad(last_query[:, :-1] < index[1:], (1, 0), value=True)
            reach = torch.minimum(reach, (index - torch.where(begins, index, 0).cummax(1).values)[:, m - n :])
        x = form.far[reach.clamp_min(0)] * form.near
        top = max(1.0, float(x.masked_fill(reach < 0, 0.0).max()))
    return form.pieces(top)


def score_mod(
    form: Bias | None, pos: Positions, batch: int, padding: Tensor | None = None, last_query: Tensor | None = None
) -> Function | None:
    """What adds the bias ``form`` to a score, for ``batch`` rows; None where there is no bias.

    A function of (score, batch, head, query, key), which are scalars. All that varies is a tensor, and numbers in
    closures would be compiled in. Tensors in closures are copies: torch 2.13 gives captured views no gradient, without
    a word, and compiles other strides anew. Indices stay in bounds for pairs in the future and past a ragged end too:
    kernels call these functions there and mask the result.
    """
    if form is None:
        return None
    if isinstance(form, DenseBias):
        bias = _copy(form.bias) if form.bias.requires_grad else form.bias
        row = torch.full((), len(bias) > 1, dtype=torch.int32, device=bias.device)
        return lambda score, b, h, i, j: score + bias[b * row, h, i, j]
    if isinstance(form, ContentBias):
        return _of_content(form, pos, batch, padding, last_query)
    if isinstance(form, ScaledDistanceBias):
        return _from_pieces(form, pieces_between(form, pos, padding, last_query), pos, batch)
    positions = columns(form, pos) if isinstance(form, ToeplitzBias) else (pos.q, pos.k)
    at_q, at_k = (_copy(x.expand(batch, -1)) for x in positions)
    if isinstance(form, ToeplitzBias):
        table, last = _copy(form.table), at_q.new_full((), form.table.shape[1] - 1)
        return lambda score, b, h, i, j: score + table[h, torch.minimum((at_q[b, i] - at_k[b, j]).clamp_min(0), last)]
    if isinstance(form, PointwiseBias):
        scalar, numbers = form.scalar, [_copy(x) for x in form.numbers]
        return lambda score, b, h, i, j: score + scalar(at_q[b, i], at_k[b, j], *[x[h] for x in numbers])
    fn, aux = form.fn, form.aux
    return lambda score, b, h, i, j: score + fn(at_q[b, i][None, None], at_k[b, j][None, None], *aux)[0, :, 0, 0][h]


def _of_content(
    form: ContentBias, pos: Positions, batch: int, padding: Tensor | None, last_query: Tensor | None
) -> Function | None:
    """A bias that depends on the tokens: with a table it holds a number for each token and column, (B, H, n, R)."""
    if isinstance(form, SumBias):
        made = (score_mod(one, pos, batch, padding, last_query) for one in form.forms)
        adding = [add for add in made if add is not None]

        def all_of_them(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            for add in adding:
                score = add(score, b, h, i, j)
            return score

        return all_of_them
    if isinstance(form, TokenBias):
        middle = form.key.detach().mean(2, keepdim=True)  # rounded to float32, which holds small numbers better
        of_query, of_key = ((x.expand(batch, -1, -1)).float() for x in (form.query + middle, form.key - middle))
        return lambda score, b, h, i, j: score + (of_query[b, h, i] + of_key[b, h, j])
    if isinstance(form, QueryKeyTableBias):
        raise UserError(
            "a bias that multiplies queries, keys and vectors of their distance is no function of one score: use "
            "attention backend 'sdpa'"
        )
    at_q, at_k = (_copy(x.expand(batch, -1)) for x in columns(form, pos))
    own = form.query if isinstance(form, QueryTableBias) else form.key
    table = _copy(torch.matmul(own, form.vectors.to(own.dtype).mT).expand(batch, -1, -1, -1))
    last = at_q.new_full((), form.vectors.shape[1] - 1)
    if isinstance(form, QueryTableBias):
        return lambda score, b, h, i, j: (
            score + table[b, h, i, torch.minimum((at_q[b, i] - at_k[b, j]).clamp_min(0), last)]
        )
    return lambda score, b, h, i, j: score + table[b, h, j, torch.minimum((at_q[b, i] - at_k[b, j]).clamp_min(0), last)]


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _from_pieces(form: ScaledDistanceBias, pieces: PiecewiseLinear, pos: Positions, batch: int) -> Function:
    """The piece of x is the number of ends <= x: those in the cells before x's, looked up, and a few that are compared.

    A binary search would load less often only for clustered ends, and what inductor makes of a chain of look-ups grows
    exponentially with its length.
    """
    ends, middle, value, slope = pieces.ends, _copy(pieces.middle), _copy(pieces.value), _copy(pieces.slope)
    scale = (CELLS - 1) / ends[-1] if len(ends) else ends.new_ones(())
    held = torch.bincount((ends * scale).int().clamp(0, CELLS - 1), minlength=CELLS)
    before = (held.cumsum(0) - held).int()
    compared = max(1, -(-int(held.max()) // COMPARED)) * COMPARED
    ends = F.pad(ends, (0, compared), value=float("nan"))  # never <= x, whatever x
    far, near = _copy(form.far), _copy(form.near.expand(batch, -1))
    shift = torch.full((), pos.k.shape[1] - pos.q.shape[1], device=far.device)

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = far[(i + shift - j).clamp_min(0)] * near[b, i]
        first = before[(x * scale).clamp_max(CELLS - 1).int().clamp_min(0)]
        piece = first
        for place in range(compared):
            piece = piece + (ends[first + place] <= x).int()
        return score + value[h, piece] + slope[h, piece] * (x - middle[piece])

    return add
