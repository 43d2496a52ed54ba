"""What attention has to know beside q, k and v, and which of a table's columns belong to which tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.attention.key_ranges import Nearby, nearby
from fairseq_rpe.core.bias import Bias, ContentBias, Positions, RelativeValues, ToeplitzBias, block, part
from fairseq_rpe.core.rotation_regions import RotationRegion


@dataclass(frozen=True)
class Plan:
    """One layer's attention, as opaque cargo from the decoder to the attention module.

    Attributes:
        positions: of the n queries and m keys.
        form: additive bias or None.
        padding: (B, m) bool, True at keys that nobody may see; None where causality already hides them.
        remap: function of (scores, queries, positions), or None: see ``Encoding.remap``.
        rotate: function of (x, at, positions, key=bool) for queries and keys, or None.
        backend: the function that computes attention.
        query_limit: function of (positions, dtype): how many queries ``rotate`` serves in one call; None: any number.
        prune: the part of a query's attention that may be left out, see ``attention/prune.py``; 0: exact.
        turned: keys have been through ``rotate`` already, queries have not.
        scores: function of (q, k, positions, notes) that gives the bias that depends on them, or None.
        note: what ``scores`` has to know of each token, of a layer's input, or None: see ``Encoding.note``.
        reading: what queries read beside the values, or None.
        learned: parameters that ``transform_scores`` uses.
        value: function of (values, positions), or None; a cache holds values as they are before it.
        regions: where pairs are turned otherwise than others, or None; the backend then turns queries and keys.
        last_query: (B, m) int64, the index of the last query that may see each key, where documents share a row; None:
            the row's last. Indices count the row's tokens, and queries are the last n of them.
    """

    positions: Positions
    form: Bias | None = None
    padding: Tensor | None = None
    transform_scores: Callable[[Tensor, Tensor, Positions], Tensor] | None = None
    rotate: Callable[..., Tensor] | None = None
    backend: Callable[..., Tensor] | None = None
    max_queries_per_call: Callable[[Positions, torch.dtype], int] | None = None
    prune: float = 0.0
    turned: bool = False
    scores: Callable[..., Bias | None] | None = None
    note: Callable[[Tensor], Tensor | None] | None = None
    reading: RelativeValues | None = None
    learned: tuple[Tensor, ...] = ()
    value: Callable[[Tensor, Positions], Tensor] | None = None
    regions: tuple[RotationRegion, ...] | None = None
    last_query: Tensor | None = None

    @property
    def is_content_dependent(self) -> bool:
        """Whether anything but q·k and the values depends on what the tokens are."""
        others = (self.transform_scores, self.scores, self.reading)
        return any(x is not None for x in others) or isinstance(self.form, ContentBias)

    @property
    def only_sdpa(self) -> bool:
        """Whether, on a GPU, nothing else may serve this."""
        return self.is_content_dependent or self.regions is not None

    @cached_property
    def empty(self) -> Tensor | None:
        """(B, 1, 1, 1) bool, True at rows that are padding alone; None: there is no padding."""
        return None if self.padding is None else self.padding.all(1)[:, None, None, None]

    @cached_property
    def row(self) -> Tensor | None:
        """What is added to the scores of the last token against all, (B or 1, H or 1, 1, m); None: nothing.

        The bias, and -inf at padding but in rows that are nothing else. Made once for all layers that share the plan.
        """
        pos, form = self.positions, self.form
        m = pos.k.shape[1]
        if isinstance(form, ToeplitzBias) and evenly_spaced(form, pos):
            bias = by_distance(form, m).flip(1)[None, :, None]
        elif form is not None:
            bias = block(form, pos, slice(-1, None)).contiguous()
        if self.padding is None or self.empty is None:
            return None if form is None else bias
        hidden = self.padding[:, None, None] & ~self.empty
        bias = pos.k.new_zeros(1, 1, 1, m) if form is None else bias
        return bias.masked_fill(hidden, float("-inf"))

    @cached_property
    def matrix(self) -> Tensor:
        """(1, H, n, n): a bias of the distance alone, -inf in the future, without its gradient; for short texts.

        Made once for all layers that share the plan.
        """
        assert isinstance(self.form, ToeplitzBias)
        n = self.positions.q.shape[1]
        return matrix(by_distance(self.form, n).detach())[None]

    @cached_property
    def nearby(self) -> list[Nearby]:
        """The keys that blocks of queries can see in each region. Made once for all layers that share the plan."""
        assert self.regions is not None
        return nearby(self.regions, self.positions)

    @cached_property
    def seen_until(self) -> Tensor | None:
        """(B, m) int32 index of the last query that sees each key, -1 at padding; None: every key's is the row's last.

        Made once for all layers that share the plan.
        """
        if self.last_query is None and self.padding is None:
            return None
        if self.last_query is not None:
            last = self.last_query.int()
        else:
            assert self.padding is not None
            last = torch.full_like(self.padding, self.padding.shape[1], dtype=torch.int32)
        return last if self.padding is None else last.masked_fill(self.padding, -1)

    @cached_property
    def documents(self) -> list[list[slice]]:
        """The tokens of each document, row by row, of a plan with ``last_query``. Waits for the device.

        Made once for all layers that share the plan.
        """
        assert self.last_query is not None
        rows = (sorted(set(row)) for row in self.last_query.tolist())
        return [[slice(a + 1, b + 1) for a, b in pairwise([-1, *ends])] for ends in rows]

    def visible(self, n: int, m: int, device: torch.device) -> Tensor:
        """(B or 1, 1, n, m) bool: key j is at or before query i (by index), of its document and not padding."""
        query = torch.arange(m - n, m, device=device)[:, None]
        seen = (torch.arange(m, device=device)[None, :] <= query)[None, None]
        if self.last_query is not None:
            seen = seen & (query <= self.last_query[:, None, None, :])
        return seen if self.padding is None else seen & ~self.padding[:, None, None, :]

    def part(self, start: int, stop: int) -> Self:
        """The plan of queries ``start`` … ``stop`` - 1 and of the keys up to the last of them."""
        pos = self.positions
        seen = pos.k.shape[1] - pos.q.shape[1] + stop
        form = part(self.form, slice(start, stop), seen)
        padding = None if self.padding is None else self.padding[:, :seen]
        last_query = None if self.last_query is None else self.last_query[:, :seen]
        tokens = None if pos.tokens is None else pos.tokens[:, :seen]
        regions = self.regions and tuple(x.part(slice(start, stop), slice(seen)) for x in self.regions)
        pos = replace(pos, q=pos.q[:, start:stop], k=pos.k[:, :seen], tokens=tokens)
        return replace(self, positions=pos, form=form, padding=padding, regions=regions, last_query=last_query)


def matrix(table: Tensor) -> Tensor:
    """(H, n) of the distances 0 … n-1 -> (H, n, n), -inf in the future."""
    heads, n = table.shape
    vector = F.pad(table.flip(1), (0, n), value=float("-inf"))
    return vector.as_strided((heads, n, n), (2 * n, 1, 1)).flip(1)


def by_distance(form: ToeplitzBias, n: int) -> Tensor:
    """(H, n) table of distances 0 … n-1 steps; beyond the table's end its last column."""
    table = form.table[:, form.origin : form.origin + n]
    missing = n - table.shape[1]
    return torch.cat([table, form.table[:, -1:].expand(-1, missing)], dim=1) if missing else table


def evenly_spaced(form: ToeplitzBias, pos: Positions) -> bool:
    """Whether the column of a query and a key follows from their indices alone, as :func:`by_distance` has it."""
    return pos.contiguous and pos.step == form.step
