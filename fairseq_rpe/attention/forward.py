"""One attention layer's forward: derive positions, plan the call, rotate queries and keys, run a backend."""

import math
from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.attention.backends import Backend
from fairseq_rpe.attention.key_heads import repeat_key_heads
from fairseq_rpe.attention.plan import AttentionPlan
from fairseq_rpe.attention.scaled_distance_bias import last_row_bias
from fairseq_rpe.core.bias import Bias, PiecewiseLinear, ScaledDistanceBias, ToeplitzBias, add_biases
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.score_product import VectorProduct
from fairseq_rpe.encodings import Encoding

# by id(encoding): the ToeplitzBias or the PiecewiseLinear from which its bias is computed while a text is decoded
BiasCache = MutableMapping[int, Any]


def positions_from_padding(
    padding: Tensor, n: int, masks_end: bool, dtype: torch.dtype = torch.float32
) -> tuple[Positions, Tensor | None]:
    """Return the positions of the last n of m tokens, and the padding that attention must hide.

    Padding at the end of a row needs no mask: causality hides it from every real token. If all padding is there,
    positions count all tokens, unless the encoding depends on the row's length, or queries change the state of keys.
    Otherwise padding is masked, and positions do not count it: a padded row has the positions of the same row without
    padding.

    Args:
        padding: (B, m) bool, True at tokens that are padding.
        n: number of queries.
        masks_end: whether padding at the end is masked too, see :func:`needs_end_mask`.
        dtype: dtype of the positions, float32 or float64.

    Returns:
        Positions, and the padding (B, m) or None if nothing is to be masked.
    """
    m = padding.shape[1]
    plain = Positions.arange(n, m, device=padding.device, dtype=dtype)
    if not padding.any():
        return plain, None
    has_padding_before_a_token = padding[:, :-1] & ~padding[:, 1:]  # (B, m - 1)
    if not (masks_end or has_padding_before_a_token.any()):
        return plain, None
    k = (torch.cumsum(~padding, dim=1) - 1).clamp_min(0).to(dtype)  # (B, m)
    # positions are contiguous if index minus position is one number for all real tokens of a row
    shift = (plain.k - k).masked_fill(padding, torch.nan)
    spread = (shift - shift.nan_to_num(torch.inf).amin(1, keepdim=True)).nan_to_num(0.0)
    return Positions(k[:, m - n :], k, 1.0, contiguous=not bool(spread.any())), padding


def needs_end_mask(encoding: Encoding) -> bool:
    """Return whether padding at the end of a row must be masked, so that it does not change the row's results."""
    return encoding.length_dependent or encoding.has_key_state


def positions_from_documents(documents: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Positions, Tensor]:
    """Return positions and visibility of rows of several documents, each treated as if it were alone.

    Args:
        documents: (B, n) integers: neighbours with the same number belong to one document. Padding has a number that no
            document has.
        dtype: dtype of the positions, float32 or float64.

    Returns:
        Positions that count the tokens of each document from 0, and (B, n) int64: for each token the index of the last
        token of its document, which is the last query that may see it.
    """
    n = documents.shape[1]
    index = torch.arange(n, device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(begins, index, 0).cummax(1).values  # (B, n), first token of each token's document
    # a document ends where the next one begins; column 0 begins a document, so the roll also ends the row's last one
    last = torch.where(begins.roll(-1, 1), index, n).flip(1).cummin(1).values.flip(1)
    k = (index - first).to(dtype)
    return Positions(k, k), last


def check_separable(encoding: Encoding) -> None:
    """Check that an encoding treats a document in a shared row as it treats the document alone.

    Args:
        encoding: encoding of a model whose rows hold several documents.

    Raises:
        UserError: the encoding depends on the length of the row or on its tokens, which may be of another document.
    """
    name = type(encoding).__name__
    why = "reads the length of the row" if encoding.length_dependent else "reads the tokens of the row"
    if encoding.length_dependent or encoding.needs_token_ids:
        raise UserError(f"{name} {why}, which separate documents in one row do not share: use --blocks document")


def build_plan(
    encoding: Encoding,
    positions: Positions,
    padding: Tensor | None,
    backend: Backend,
    prune: float = 0.0,
    *,
    keys_rotated: bool = False,
    drops_keys: bool = False,
    bias_cache: BiasCache | None = None,
    last_query: Tensor | None = None,
) -> AttentionPlan:
    """Build the plan of a layer with this encoding; its bias is float32 or better, even under autocast.

    Args:
        encoding: encoding of the layer.
        positions: positions of the n queries and m keys, in tokens.
        padding: (B, m) bool, True at tokens to hide, or None.
        backend: backend that computes attention.
        prune: largest share of a query's attention that may be skipped; 0: exact.
        keys_rotated: whether keys arrive as :func:`rotate_keys` returns them.
        drops_keys: whether a cache may drop keys that the options ``local`` and ``block`` hide from later tokens.
        bias_cache: cache of the text that is being decoded, which is read and filled; None: no caching.
        last_query: (B, m) int64, as :func:`positions_from_documents` returns it, or None for one document per row.
    """
    options = encoding.attention_options
    with without_autocast(positions.k):
        # of the tokens: the number of keys that a query sees does not depend on what the encoding makes of them
        query_scale = None if encoding.query_scale is None else encoding.query_scale(positions)
        positions = encoding.prepare_positions(positions)
        if bias_cache is None:
            bias = encoding.attention_bias(positions)
        else:
            bias = _cached_bias(encoding, positions, bias_cache)
        relative_values = encoding.relative_values(positions)
        rotate, rotation_regions = encoding.rotation(positions), encoding.rotation_regions(positions)
    if options.block:
        last_query = _hide_other_blocks(positions, options.block, last_query)
    parameters: tuple[Tensor, ...] = ()
    if encoding.transform_scores is not None or encoding.key_state_width > 0:
        parameters = tuple(p for p in encoding.parameters() if p.requires_grad)
    return AttentionPlan(
        positions=positions,
        bias=bias,
        padding=padding,
        transform_scores=encoding.transform_scores,
        transform_scores_with_state=encoding.transform_scores_with_state if encoding.key_state_width else None,
        key_state_width=encoding.key_state_width,
        returns_log_weights=encoding.returns_log_weights,
        score_product=encoding.score_product if encoding.has_score_product else None,
        transforms_keys=encoding.transforms_keys,
        rotate=rotate,
        backend=backend,
        max_queries_per_call=encoding.max_queries_per_call,
        prune=prune,
        keys_rotated=keys_rotated,
        content_bias=encoding.content_bias if encoding.has_content_bias else None,
        token_features=encoding.token_features if encoding.has_token_features else None,
        relative_values=relative_values,
        transform_parameters=parameters,
        value=encoding.value if encoding.changes_values else None,
        rotation_regions=rotation_regions,
        last_query=last_query,
        query_scale=query_scale,
        softcap=options.softcap,
        null_logit=encoding.null_logits(positions.k),
        # a product of queries and keys may depend on all tokens between them and before them
        window=_index_window(positions, options.local) if options.local and not encoding.has_score_product else None,
        # two tokens that are as far apart as a block is long are in different blocks
        cache_window=_index_window(positions, options.local or options.block)
        if drops_keys and options.hides_keys and not encoding.has_score_product
        else None,
    )


def _index_window(positions: Positions, window: int) -> int | None:
    """Return the smallest distance by index at which no key is visible; None if positions do not decide it."""
    if not positions.contiguous or positions.step is None:
        return None
    return math.ceil(window / positions.step)


def _hide_other_blocks(positions: Positions, size: int, last_query: Tensor | None) -> Tensor:
    """Return for each key the index (B or 1, m) of the last query in its block of ``size`` positions.

    Args:
        positions: positions of the tokens.
        size: number of positions of a block.
        last_query: (B, m) index of the last query that may see each key for other reasons, or None.
    """
    _, block_end = positions_from_documents(torch.floor(positions.k / size).long())
    return block_end if last_query is None else torch.minimum(block_end, last_query)


def _cached_bias(encoding: Encoding, positions: Positions, bias_cache: BiasCache) -> Bias | None:
    """Return the bias of an encoding, computed from a cache entry if the encoding's type of bias has one.

    The entry of a bias of the distance is its table, that of a ScaledDistanceBias its pieces. Nothing is cached where
    gradients are recorded or positions are not evenly spaced. A cache belongs to one decoded text: its entries are
    computed with the parameters of that moment, as cached keys are, and the model outlives it, so that
    ``id(encoding)`` stays unique.
    """
    if torch.is_grad_enabled() or not positions.contiguous or positions.step is None:
        return encoding.attention_bias(positions)
    if encoding.is_distance_bias:
        return _cached_distance_bias(encoding, positions, positions.step, bias_cache)
    bias = encoding.attention_bias(positions)
    if isinstance(bias, ScaledDistanceBias) and positions.q.shape[1] == 1 and positions.k.device.type == "cpu":
        return _cached_single_query_bias(encoding, bias, bias_cache)
    return bias


def _cached_single_query_bias(encoding: Encoding, bias: ScaledDistanceBias, bias_cache: BiasCache) -> Bias:
    """Return the bias of one query from cached pieces, which cover the whole range [0, 1] of scaled distances."""
    pieces = bias_cache.get(id(encoding))
    if not isinstance(pieces, PiecewiseLinear) or pieces.value.dtype != bias.distance_values.dtype:
        pieces = bias_cache[id(encoding)] = bias.make_pieces(1.0)
    return last_row_bias(bias, pieces, 1.0)


def _cached_distance_bias(encoding: Encoding, positions: Positions, step: float, bias_cache: BiasCache) -> Bias | None:
    """Return a bias of the distance with a cached table.

    A table that is too short for m keys is replaced by one for 2m, so that it is rarely computed. One that ends with a
    window needs no more columns. A table of another step or dtype, or on another device, stays in the cache, and the
    bias is computed without it.
    """
    cached = bias_cache.get(id(encoding))
    m, like = positions.k.shape[1], positions.k
    needed_columns = m
    if (window := encoding.attention_options.local) > 0:
        needed_columns = min(m, math.ceil(window / step) + 1)  # the last one hides all keys from there on
    if not isinstance(cached, ToeplitzBias) or (cached.step == step and cached.table.shape[1] < needed_columns):
        # positions of 2m tokens, of which the last is the query: all distances that the table may need
        ahead = torch.arange(2 * m, device=like.device, dtype=like.dtype)[None] * step  # (1, 2m)
        bias = encoding.attention_bias(Positions(ahead[:, -1:], ahead, step))
        assert isinstance(bias, ToeplitzBias)
        cached = bias_cache[id(encoding)] = bias
    is_valid = (cached.step, cached.table.dtype, cached.table.device) == (step, like.dtype, like.device)
    return cached if is_valid else encoding.attention_bias(positions)


def rotate_keys(k: Tensor, plan: AttentionPlan) -> Tensor:
    """Return keys (B, G, n, D) of the last n tokens rotated, (B, G, n, E), as a cache may store them."""
    assert plan.rotate is not None
    with without_autocast(k):
        return plan.rotate(k, plan.positions.q, plan.positions, key=True)


def compute_token_features(x: Tensor, plan: AttentionPlan) -> Tensor | None:
    """Return the encoding's token features (B, H, n, E) of a layer's input x (B, n, C); None for most encodings."""
    if plan.token_features is None:
        return None
    with without_autocast(x):
        return plan.token_features(x)


def run_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0, features: Tensor | None = None
) -> Tensor:
    """Rotate and attend; queries are split into chunks where the rotation would exceed the range of its dtype.

    Args:
        q: (B, H, n, D), not rotated.
        k: (B, G, h, D), not rotated, unless ``plan.keys_rotated``: those of the last h tokens of the plan, of which the
            queries see no earlier one. G divides H, and query head h reads key head h // g, g = H / G. Keys are not
            repeated in memory unless the encoding reads queries or keys besides q·k.
        v: (B, G, h, D).
        plan: plan of the layer for m >= h tokens, as :func:`build_plan` returns it.
        dropout: probability of dropping an attention weight.
        features: (B, H, h, E), as :func:`compute_token_features` returns them; None for most encodings.

    Returns:
        (B, H, n, D) in q's dtype.

    Raises:
        UserError: documents share rows that the encoding cannot rotate in one call, or the backend refuses the call.
    """
    if q.shape[2] < plan.positions.k.shape[1] and not plan.replaces_product:  # decoding
        dropped = plan.positions.k.shape[1] - k.shape[2]
        if (first := max(plan.needed_keys.start, dropped)) > 0:  # with a window or blocks
            plan, keys = plan.from_key(first), slice(first - dropped, None)
            k, v, features = k[:, :, keys], v[:, :, keys], None if features is None else features[:, :, keys]
    n, m = q.shape[2], k.shape[2]
    size = n if plan.max_queries_per_call is None else plan.max_queries_per_call(plan.positions, q.dtype)
    with without_autocast(q):
        if n > size and plan.last_query is not None:
            raise UserError(
                f"this encoding rotates at most {size} tokens of separate documents in one call, and a row has {n}: "
                "use shorter rows, or --blocks document"
            )
        if n <= size:
            return _run_chunk(q, k, v, plan, dropout, features)
        chunks = []
        for start in range(0, n, size):
            stop = min(start + size, n)
            keys = slice(m - n + stop)
            chunk_features = None if features is None else features[:, :, keys]
            chunk_plan = plan.slice_queries(start, stop)
            chunks.append(
                _run_chunk(q[:, :, start:stop], k[:, :, keys], v[:, :, keys], chunk_plan, dropout, chunk_features)
            )
        return torch.cat(chunks, dim=2)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast on x's device, only if needed: entering one costs a small operation's time."""
    device_type = x.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _run_chunk(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, features: Tensor | None) -> Tensor:
    """Rotate and attend in one call; the arguments are those of :func:`run_attention`."""
    # with rotation regions the backend rotates q and k, once for each region
    if plan.rotate is not None and plan.rotation_regions is None:
        q = plan.rotate(q, plan.positions.q, plan.positions)
        if not plan.keys_rotated:
            k = plan.rotate(k, plan.positions.k, plan.positions, key=True)
    if plan.query_scale is not None:
        # after the rotation, which need not be linear; in float32 or better, as bfloat16 would round ln i
        q = (q * plan.query_scale).to(q.dtype)
    if plan.value is not None:
        v = plan.value(v, plan.positions)
    backend = plan.backend
    assert backend is not None
    if plan.is_content_dependent or plan.content_bias is not None or plan.rotation_regions is not None:
        # hooks that read queries and keys have as many heads of both
        k, v = (repeat_key_heads(x, q.shape[1]) for x in (k, v))
    q, k, plan = with_score_product(q, k, with_content_bias(q, k, plan, features), features)
    return backend(q, k, v, plan, dropout)


def with_content_bias(q: Tensor, k: Tensor, plan: AttentionPlan, features: Tensor | None) -> AttentionPlan:
    """Return the plan with the bias that these rotated queries and keys determine.

    Args:
        q: (B, H, n, D), rotated.
        k: (B, H, m, D), rotated.
        plan: plan of the layer, possibly with ``content_bias``.
        features: (B, H, m, E) token features, or None.
    """
    if plan.content_bias is None:
        return plan
    wide = torch.promote_types(q.dtype, torch.float32)
    bias = plan.content_bias(q.to(wide), k.to(wide), plan.positions, features)
    return replace(plan, bias=add_biases(plan.bias, bias), content_bias=None)


def with_score_product(
    q: Tensor, k: Tensor, plan: AttentionPlan, features: Tensor | None
) -> tuple[Tensor, Tensor, AttentionPlan]:
    """Return queries, keys and plan with the product that replaces q·k; store the key state.

    The queries and keys of a :class:`VectorProduct` replace ``q`` and ``k``, in their dtype, and the plan then has no
    product. The arguments are those of :func:`with_content_bias`.
    """
    if plan.score_product is None:
        return q, k, plan
    wide = torch.promote_types(q.dtype, torch.float32)
    state = plan.key_state if plan.transforms_keys else None
    product = plan.score_product(q.to(wide), k.to(wide), plan.positions, features, plan.padding, state)
    if isinstance(product, VectorProduct):
        return product.query.to(q.dtype), product.key.to(k.dtype), replace(plan, score_product=None)
    if not plan.transforms_keys:
        return q, k, replace(plan, product=product, score_product=None)
    if plan.store_key_state is not None and (new_state := product.key_state()) is not None:
        plan.store_key_state(new_state)
    return q, k, replace(plan, product=product, score_product=None, key_state=None, store_key_state=None)
