"""What one attention call needs besides q, k and v; tensors are computed once for all layers that share it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.core.bias import Bias, ContentBias, DenseBias, PointwiseBias, RelativeValues, ToeplitzBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.rotation_regions import RotationRegion
from fairseq_rpe.core.score_product import ScoreProduct

QUERY_BLOCK = 256  # queries of a block of key ranges, a multiple of dropout.ROWS


@dataclass(frozen=True)
class AttentionPlan:
    """The description of one layer's attention call; fields that are hooks have the names of ``Encoding``'s.

    Attributes:
        positions: positions of the n queries and m keys, in tokens.
        bias: additive bias, or None.
        padding: (B, m) bool, True at keys that nobody may see; None if causality already hides them.
        transform_scores: function of (scores, queries, positions), or None.
        rotate: function of (x, positions of x, positions, key=bool) for queries and keys, or None.
        backend: function that computes attention.
        max_queries_per_call: function of (positions, dtype), how many queries ``rotate`` accepts in one call; None: any
            number.
        prune: largest part of a query's attention that may be left out, see ``attention/prune.py``; 0: exact.
        keys_rotated: whether keys, but not queries, have been rotated already.
        content_bias: function of (q, k, positions, features) that returns a bias that depends on them, or None.
        token_features: function of a layer's input that returns ``features`` of ``content_bias``, or None.
        relative_values: relative value vectors, or None.
        transform_parameters: parameters that the transform of scores uses.
        value: function of (values, positions), or None; a cache stores values before it.
        rotation_regions: regions whose pairs are rotated differently, or None; the backend then rotates q and k.
        last_query: (B or 1, m) int64, the index of the last query that may see each key, if documents or blocks share a
            row; None: the row's last query. Indices count the row's tokens, and queries are the last n of them.
        query_scale: (B or 1, H or 1, n or 1, 1) factors of the queries, or None; ``run_attention`` applies them.
        softcap: c of c·tanh(s/c), which replaces the content logits s; 0: none.
        null_logit: (H,) logits of a key without a value that every query sees, or None.
        window: no query sees a key that is this number of tokens or more before it, by index; None: unknown. The bias
            hides such keys, so a backend may leave them out, or ignore this.
        cache_window: neither these nor later queries see a key that is this number of tokens or more before them, by
            index, so that a cache may drop it; None: they may, or it is not known.
        transform_scores_with_state: function of (scores, queries, positions, state) that returns scores and state, or
            None.
        key_state: (B, 1, h, E) state of the first h keys after the queries before these; later keys have zeros; None
            if no key has a state yet. With ``transforms_keys``, the transformed keys (B, H, h, D).
        key_state_width: E.
        store_key_state: function that receives the state (B, 1, m, E) of all keys after the last query, or None.
        returns_log_weights: whether the transformed scores are logarithms of attention weights.
        score_product: function of (q, k, positions, features, padding, key_state) that returns ``product``, or None.
        product: product of queries and keys that replaces q·k, or None.
        transforms_keys: whether ``product`` has a key state.
    """

    positions: Positions
    bias: Bias | None = None
    padding: Tensor | None = None
    transform_scores: Callable[[Tensor, Tensor, Positions], Tensor] | None = None
    rotate: Callable[..., Tensor] | None = None
    backend: Callable[..., Tensor] | None = None
    max_queries_per_call: Callable[[Positions, torch.dtype], int] | None = None
    prune: float = 0.0
    keys_rotated: bool = False
    content_bias: Callable[..., Bias | None] | None = None
    token_features: Callable[[Tensor], Tensor | None] | None = None
    relative_values: RelativeValues | None = None
    transform_parameters: tuple[Tensor, ...] = ()
    value: Callable[[Tensor, Positions], Tensor] | None = None
    rotation_regions: tuple[RotationRegion, ...] | None = None
    last_query: Tensor | None = None
    query_scale: Tensor | None = None
    softcap: float = 0.0
    null_logit: Tensor | None = None
    window: int | None = None
    cache_window: int | None = None
    transform_scores_with_state: Callable[[Tensor, Tensor, Positions, Tensor], tuple[Tensor, Tensor]] | None = None
    key_state: Tensor | None = None
    key_state_width: int = 0
    store_key_state: Callable[[Tensor], None] | None = None
    returns_log_weights: bool = False
    score_product: Callable[..., ScoreProduct] | None = None
    product: ScoreProduct | None = None
    transforms_keys: bool = False

    @property
    def replaces_product(self) -> bool:
        """Whether another product of queries and keys replaces q·k."""
        return self.score_product is not None or self.product is not None

    @property
    def has_key_state(self) -> bool:
        """Whether later tokens change what a cache holds of a key."""
        return self.transform_scores_with_state is not None or self.transforms_keys

    @property
    def is_content_dependent(self) -> bool:
        """Whether anything but q·k and the values depends on what the tokens are."""
        has_hook = self.transforms_scores or self.content_bias is not None or self.replaces_product
        return has_hook or self.relative_values is not None or isinstance(self.bias, ContentBias)

    @property
    def transforms_scores(self) -> bool:
        """Whether a hook replaces the scores of a query, which may mix keys and heads."""
        return self.transform_scores is not None or self.transform_scores_with_state is not None

    @property
    def bias_may_need_grad(self) -> bool:
        """Whether the bias may need a gradient; True for a function of positions, whose tensors are unknown."""
        bias = self.bias
        if isinstance(bias, PointwiseBias):
            return any(x.requires_grad for x in bias.parameters)
        if isinstance(bias, ToeplitzBias):
            return bias.table.requires_grad
        if isinstance(bias, DenseBias):
            return bias.bias.requires_grad
        return bias is not None

    @property
    def requires_sdpa(self) -> bool:
        """Whether ``sdpa`` is the only backend on a GPU that serves this plan."""
        has_hook = self.transforms_scores or self.content_bias is not None or self.replaces_product
        if has_hook or self.relative_values is not None or self.rotation_regions is not None:
            return True
        # a sum with a dense term is large, and copies for measurements would be, too
        return isinstance(self.bias, ContentBias) and self.bias.tree_flatten() is None

    @property
    def changes_softmax(self) -> bool:
        """Whether attention is more than the softmax of q·k plus a bias: it has a softcap or a null logit."""
        return self.softcap > 0 or self.null_logit is not None

    @cached_property
    def fully_padded_rows(self) -> Tensor | None:
        """(B, 1, 1, 1) bool, True at rows that are padding alone; None without padding."""
        return None if self.padding is None else self.padding.all(1)[:, None, None, None]

    @cached_property
    def last_query_bias(self) -> Tensor | None:
        """(B or 1, H or 1, 1, m), added to the scores of the last token; None if nothing is added.

        It is the bias, with -inf at padding except in rows that are padding alone.
        """
        pos, bias = self.positions, self.bias
        m = pos.k.shape[1]
        row: Tensor | None = None
        if isinstance(bias, ToeplitzBias) and is_evenly_spaced(bias, pos):
            row = bias.columns(m).flip(1)[None, :, None]  # (1, H, 1, m)
        elif bias is not None:
            row = bias.materialize(pos, slice(-1, None)).contiguous()  # (B or 1, H, 1, m)
        if self.padding is None or self.fully_padded_rows is None:
            return row
        hidden = self.padding[:, None, None] & ~self.fully_padded_rows  # (B, 1, 1, m)
        row = pos.k.new_zeros(1, 1, 1, m) if row is None else row
        return row.masked_fill(hidden, float("-inf"))

    @cached_property
    def dense_bias(self) -> Tensor:
        """(1, H, n, n) bias of the distance, -inf in the future, without its gradient; for short texts."""
        assert isinstance(self.bias, ToeplitzBias)
        n = self.positions.q.shape[1]
        return dense_from_table(self.bias.columns(n).detach())[None]

    @cached_property
    def key_ranges(self) -> list["KeyRange"]:
        """The keys that blocks of queries see in each rotation region."""
        assert self.rotation_regions is not None
        return find_key_ranges(self.rotation_regions, self.positions)

    @cached_property
    def visible_until(self) -> Tensor | None:
        """(B or 1, m) int32 last query that sees each key, -1 at padding; None if the row's last query sees all."""
        if self.last_query is None and self.padding is None:
            return None
        if self.last_query is not None:
            last = self.last_query.int()
        else:
            assert self.padding is not None
            last = torch.full_like(self.padding, self.padding.shape[1], dtype=torch.int32)
        return last if self.padding is None else last.masked_fill(self.padding, -1)

    @cached_property
    def document_slices(self) -> list[list[slice]]:
        """The tokens of each document, row by row, of a plan with ``last_query``. Waits for the device."""
        assert self.last_query is not None
        last_tokens = (sorted(set(row)) for row in self.last_query.tolist())
        return [[slice(a + 1, b + 1) for a, b in pairwise([-1, *ends])] for ends in last_tokens]

    def visibility(self, n: int, m: int, device: torch.device) -> Tensor:
        """Return (B or 1, 1, n, m) bool: key j is at or before query i (by index), in its document and not padding."""
        query = torch.arange(m - n, m, device=device)[:, None]  # (n, 1)
        seen = (torch.arange(m, device=device)[None, :] <= query)[None, None]  # (1, 1, n, m)
        if self.last_query is not None:
            seen = seen & (query <= self.last_query[:, None, None, :])
        return seen if self.padding is None else seen & ~self.padding[:, None, None, :]

    def slice_queries(self, start: int, stop: int) -> Self:
        """Return the plan of queries ``start`` … ``stop`` - 1 and of the keys up to the last of them."""
        num_keys = self.positions.k.shape[1] - self.positions.q.shape[1] + stop
        return self.select(slice(start, stop), slice(0, num_keys))

    def visible_keys(self, start: int, stop: int) -> slice:
        """Return the keys, by index, that queries ``start`` … ``stop`` - 1 may see: the past, within the window."""
        before = self.positions.k.shape[1] - self.positions.q.shape[1]  # keys before the first query
        first = 0 if self.window is None else max(0, before + start - self.window + 1)
        return slice(first, before + stop)

    @cached_property
    def needed_keys(self) -> slice:
        """The keys that any query may see, by index."""
        n, m = self.positions.q.shape[1], self.positions.k.shape[1]
        first = self.visible_keys(0, n).start
        if n < m and self.last_query is not None and self.last_query.device.type == "cpu":  # waits for no other
            is_seen = (self.last_query >= m - n).any(0)  # (m,)
            first = max(first, int(is_seen.int().argmax()))
        return slice(first, m)

    def from_key(self, first: int) -> Self:
        """Return the plan of the same queries and of the keys from ``first`` on, which layers with this plan share."""
        plans: dict[int, Self] = self.__dict__.setdefault("_plans_by_first_key", {})
        if first not in plans:
            plan = self.select(slice(None), slice(first, self.positions.k.shape[1]))
            last_token = plan.positions.k.shape[1] - 1
            # the comparison would make a GPU wait
            if (
                plan.last_query is not None
                and plan.last_query.device.type == "cpu"
                and bool((plan.last_query >= last_token).all())
            ):
                plan = replace(plan, last_query=None)  # every query sees all keys before it
            plans[first] = plan
        return plans[first]

    def split_by_key_head(self, groups: int) -> list[Self]:
        """Return the plans of the query heads 0, g, 2g, …, of 1, g + 1, …, up to g - 1, with g = ``groups``.

        Query head h reads key head h // g, so each plan has one query head for each key head.
        """
        plans: dict[int, list[Self]] = self.__dict__.setdefault("_plans_by_groups", {})
        if groups not in plans:
            plans[groups] = [self._select_heads(slice(first, None, groups)) for first in range(groups)]
        return plans[groups]

    def _select_heads(self, heads: slice) -> Self:
        """Return the plan of some query heads, of a plan without hooks that read scores or queries."""
        bias = None if self.bias is None else self.bias.select_heads(heads)
        null_logit = None if self.null_logit is None else self.null_logit[heads]
        return replace(self, bias=bias, null_logit=null_logit)

    def select(self, queries: slice, keys: slice) -> Self:
        """Return the plan of some queries and keys.

        Args:
            queries: the queries, by index.
            keys: the keys, by index, with start and stop; the last of them is the last query.
        """
        pos = self.positions
        bias = None if self.bias is None else self.bias.select(queries, keys)
        padding = None if self.padding is None else self.padding[:, keys]
        # indices of queries count from the first key
        last_query = None if self.last_query is None else self.last_query[:, keys] - keys.start
        tokens = None if pos.tokens is None else pos.tokens[:, keys]
        regions = self.rotation_regions and tuple(x.select(queries, keys) for x in self.rotation_regions)
        scale = self.query_scale
        if scale is not None and scale.shape[2] > 1:
            scale = scale[:, :, queries]
        return replace(
            self,
            positions=replace(pos, q=pos.q[:, queries], k=pos.k[:, keys], tokens=tokens),
            bias=bias,
            product=None if self.product is None else self.product.select(queries, keys),
            padding=padding,
            rotation_regions=regions,
            last_query=last_query,
            query_scale=scale,
        )


def dense_from_table(table: Tensor) -> Tensor:
    """Return the Toeplitz matrix (H, n, n) of a table (H, n) of the distances 0 … n-1; -inf in the future."""
    heads, n = table.shape
    # (H, 2n): the table reversed, then the future; a view with both strides 1 is the matrix with reversed rows
    vector = F.pad(table.flip(1), (0, n), value=float("-inf"))
    return vector.as_strided((heads, n, n), (2 * n, 1, 1)).flip(1)


def is_evenly_spaced(bias: ToeplitzBias, pos: Positions) -> bool:
    """Return whether indices alone decide a pair's column of the table, as in ``ToeplitzBias.columns``."""
    return pos.contiguous and pos.step == bias.step


@dataclass(frozen=True)
class KeyRange:
    """The keys of one rotation region that queries can see.

    Attributes:
        region: the region, with the positions of the keys in ``keys`` alone.
        keys: keys that any query sees in it.
        blocks: keys that the queries of each block see in it, within ``keys``; none: start = stop.
    """

    region: RotationRegion
    keys: slice
    blocks: list[slice]


def find_key_ranges(regions: Sequence[RotationRegion], pos: Positions, rows: int = QUERY_BLOCK) -> list[KeyRange]:
    """Find the keys that blocks of ``rows`` queries see in each region. Waits for the device once for each region.

    If positions decrease somewhere along a row, a range contains all keys of the past.

    Args:
        regions: rotation regions.
        pos: positions of the n queries and m keys.
        rows: queries of a block.

    Returns:
        The ranges of regions that some query is in.
    """
    n, m = pos.q.shape[1], pos.k.shape[1]
    stops = [min(start + rows, n) for start in range(0, n, rows)]
    first, last = _block_bounds(pos.q, rows)
    k = pos.k.contiguous()
    is_unsorted = (k.diff(dim=1) < 0).any()  # for a binary search, which needs sorted positions
    ranges = []
    for region in regions:
        # (B or 1, blocks): bounds of the positions of keys that a block sees
        least, most = (x.to(k.dtype).expand(len(k), -1).contiguous() for x in region.key_range(first, last))
        # first key and end of the keys that each block sees, over all rows of the batch
        low = torch.searchsorted(k, least).amin(0).masked_fill(is_unsorted, 0)
        high = torch.searchsorted(k, most, right=True).amax(0).masked_fill(is_unsorted, m)
        pairs = zip(*torch.stack([low, high]).tolist(), stops, strict=True)
        blocks = [slice(a, max(a, min(b, m - n + stop))) for a, b, stop in pairs]
        inside = [keys for keys in blocks if keys.start < keys.stop]
        if inside:
            keys = slice(min(x.start for x in inside), max(x.stop for x in inside))
            ranges.append(KeyRange(region.select(slice(None), keys), keys, blocks))
    return ranges


def _block_bounds(positions: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the least and the largest of (B or 1, n) positions in each block of columns, (blocks,) each."""
    missing = -positions.shape[1] % rows
    blocks = torch.cat([positions, positions[:, -1:].expand(-1, missing)], dim=1).unflatten(1, (-1, rows))
    return blocks.amin((0, 2)), blocks.amax((0, 2))
