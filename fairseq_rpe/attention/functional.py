"""Attention with any encoding for plain torch programs: a function, and a module with a KV cache."""

import itertools
import uuid
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from fairseq_rpe.attention.backends import choose_backend
from fairseq_rpe.attention.forward import (
    build_plan,
    check_separable,
    needs_end_mask,
    positions_from_documents,
    positions_from_padding,
    run_attention,
    without_autocast,
)
from fairseq_rpe.attention.kv_cache import KVCache
from fairseq_rpe.attention.validation import (
    check_documents,
    check_encoding,
    check_input,
    check_shapes,
    check_token_features,
    validate_positions,
)
from fairseq_rpe.core.arguments import check_count, check_probability, describe_value
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.spec import canonical
from fairseq_rpe.encodings import Encoding, build
from fairseq_rpe.encodings.contract import check_contract

_PROCESS = uuid.uuid4().hex  # layers are numbered per process, so a cache that was saved names its process
_layer_numbers = itertools.count()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding | str,
    *,
    positions: Tensor | Positions | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    features: Tensor | None = None,
    causal: bool = True,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute causal attention with an encoding: ``softmax(q·kᵀ / sqrt(D) + bias) v``, or with q and k rotated first.

    B is the batch, H the heads, D a head's width; n queries are the last of m >= n tokens, so that n < m continues a
    text with cached keys. Query i sees key j where j is at or before i, by index. A log-bias is in nats and is
    added, so a penalty is negative: ALiBi's is -slope·(i - j). Scores and softmax are float32 or better.

    Args:
        q: (B, H, n, D), neither scaled nor rotated.
        k: (B, G, m, D), in q's dtype and on q's device. G divides H: with fewer key heads than query heads, query head
            h reads key head h // (H / G).
        v: (B, G, m, D), likewise.
        encoding: what ``fairseq_rpe.build(spec, heads=H, width=H·D)`` returns, or the spec itself, such as
            ``"alibi"``, if it has no learned parameters. An absolute encoding does nothing in attention:
            ``encoding.embed`` adds its vectors at a model's input.
        positions: (m,) or (B, m) of the tokens, at least 0 and never falling, or a ``Positions``; None: 0 … m-1,
            counted without padding. The spacing of a tensor is computed in each call; a ``Positions`` states it, and
            may carry token ids, for encodings that need them. Positions are float64 if q is.
        padding: (B, m) bool, True at tokens that no query may see. The outputs of these tokens are meaningless.
        documents: (B, n) integers, with n = m: neighbours with the same number belong to one document. A token sees the
            tokens of its document only, and its position counts these alone. Padding has a number of no document.
        features: (B, H, m, E), what ``encoding.token_features`` returns for the layer's inputs, for an encoding with
            ``has_token_features``.
        causal: must be True; it documents the call.
        dropout: probability of dropping an attention weight, whether training or not.
        backend: ``auto`` or one of ``fairseq_rpe.attention.BACKENDS``.

    Returns:
        (B, H, n, D) in q's dtype, twice differentiable in q, k, v and the encoding's parameters. Second derivatives
        are those of the dense formula, in O(n²) memory; where a kernel has none, they raise an error.

    Raises:
        UserError: shapes, types or positions do not fit, a spec needs parameters, attention cannot use a custom
            encoding, or the backend does not support the call. Nothing is approximated instead.

    >>> import torch
    >>> from fairseq_rpe import attend
    >>> q, k, v = torch.randn(3, 2, 4, 7, 16)
    >>> y = attend(q, k, v, "alibi")
    >>> y.shape
    torch.Size([2, 4, 7, 16])
    >>> torch.allclose(attend(q[:, :, 5:], k, v, "alibi"), y[:, :, 5:], atol=1e-6)
    True
    """
    if causal is not True:
        raise UserError("attend is causal, as are the encodings: a query sees earlier tokens only; leave causal=True")
    return _attend(q, k, v, encoding, positions, padding, documents, features, dropout, backend)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding | str,
    positions: Tensor | Positions | None,
    padding: Tensor | None,
    documents: Tensor | None,
    features: Tensor | None,
    dropout: float,
    backend: str,
    key_state: Tensor | None = None,
    store_key_state: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Compute the result of :func:`attend`, which has these arguments, for queries after a state of the keys.

    ``key_state`` and ``store_key_state`` are those of :class:`~.plan.AttentionPlan`.
    """
    check_shapes(q, k, v, padding)
    check_probability("dropout", dropout)
    _check_encoding_type(encoding)
    heads, width = q.shape[1], q.shape[3]
    module = _build_stateless(encoding, heads, heads * width) if isinstance(encoding, str) else encoding
    check_contract(module)
    check_encoding(module, q)
    chosen = choose_backend(backend, [module])
    n, m = q.shape[2], k.shape[2]
    check_token_features(module, features, q, m)
    padding = None if padding is None else padding.to(q.device)
    wide = torch.promote_types(q.dtype, torch.float32)  # float16 and bfloat16 cannot represent large positions
    last_query = None
    if documents is not None:
        check_documents(documents, q, m, positions, padding)
        check_separable(module)
        pos, last_query = positions_from_documents(documents.to(q.device), wide)
    elif positions is not None:
        pos = validate_positions(positions, module, q, m)
    elif padding is not None:
        pos, padding = positions_from_padding(padding, n, needs_end_mask(module), wide)
    else:
        pos = Positions.arange(n, m, device=q.device, dtype=wide)
    plan = build_plan(module, pos, padding, chosen, last_query=last_query)
    if module.has_key_state:
        plan = replace(plan, key_state=key_state, store_key_state=store_key_state)
    return run_attention(q, k, v, plan, dropout, features)


def _build_stateless(spec: str, heads: int, width: int) -> Encoding:
    """Build an encoding that has no parameters and acts in attention."""
    encoding = build(spec, heads, width)
    _refuse_absolute(spec, encoding, "attend with that encoding or 'nope'")
    if next(encoding.parameters(), None) is not None:
        raise UserError(
            f"'{spec}' is learned, and a string would throw its parameters away: keep build('{spec}', heads={heads}, "
            f"width={width}) in your model and pass it"
        )
    return encoding


def _check_encoding_type(encoding: object) -> None:
    """Raise UserError unless this is an encoding or a spec."""
    if not isinstance(encoding, Encoding | str):
        raise UserError(
            f"encoding is a spec such as 'alibi' or what build(...) returns, not {describe_value(encoding)}"
        )


def _refuse_absolute(spec: str, encoding: Encoding, remedy: str) -> None:
    """Raise UserError if the encoding of a spec acts at a model's input; ``remedy`` ends the message."""
    if encoding.embeds:
        raise UserError(
            f"'{spec}' acts at a model's input, not in attention: add it there with build(...).embed, and {remedy}"
        )


class RelativeAttention(nn.Module):
    """Causal multi-head self-attention with an encoding: projections, ``attend``, and a KV cache for decoding.

    ``out_proj(attend(q_proj(x), k_proj(x), v_proj(x), encoding))``, heads split and joined in between. C is the model
    width, H the heads, D = C/H.

    Args:
        width: C.
        heads: H, which divides C.
        encoding: a spec, such as ``"alibi"`` or ``"kerple_log"``: this layer then has its own encoding with its own
            learned parameters; or an encoding, which several layers may share.
        length: training length in tokens, for a spec that depends on it.
        dropout: probability of dropping an attention weight in training.
        bias: whether the four projections have a bias.
        backend: ``auto`` or one of ``fairseq_rpe.attention.BACKENDS``.

    Raises:
        UserError: an argument is of another type or out of range, heads do not divide the width, the spec is wrong or
            that of an absolute encoding, which acts at a model's input, or the backend does not support it.

    >>> import torch
    >>> from fairseq_rpe import RelativeAttention
    >>> _ = torch.manual_seed(0)
    >>> layer = RelativeAttention(width=64, heads=4, encoding="kerple_log")
    >>> x = torch.randn(2, 7, 64)
    >>> y = layer(x)
    >>> cache = layer.new_cache()
    >>> one_by_one = [layer(token, cache) for token in x.split(1, dim=1)]
    >>> torch.allclose(torch.cat(one_by_one, dim=1), y, atol=1e-6)
    True
    """

    def __init__(
        self,
        width: int,
        heads: int,
        encoding: Encoding | str,
        *,
        length: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_count("width", width)
        check_count("heads", heads)
        check_count("length", length, optional=True)
        check_probability("dropout", dropout)
        if not isinstance(bias, bool):
            raise UserError(f"bias is True or False, not {describe_value(bias)}")
        _check_encoding_type(encoding)
        if width % heads:
            raise UserError(f"{heads} heads do not divide a model width of {width}: choose another number of heads")
        if isinstance(encoding, str):
            spec, encoding = encoding, build(encoding, heads, width, length)
            _refuse_absolute(spec, encoding, "use that encoding or 'nope' here")
        elif encoding.heads != heads or encoding.width != width:
            raise UserError(
                f"the encoding is for {encoding.heads} heads and width {encoding.width}, this layer has {heads} and "
                f"{width}: build it with heads={heads}, width={width}"
            )
        check_contract(encoding)
        choose_backend(backend, [encoding])
        self.width, self.heads, self.dropout, self.backend = width, heads, dropout, backend
        self.encoding = encoding
        self._number = _PROCESS, next(_layer_numbers)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width, bias) for _ in range(4))

    def new_cache(self) -> KVCache:
        """Return an empty cache for one batch of rows; each layer needs its own."""
        return KVCache()

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None = None,
        *,
        positions: Tensor | Positions | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Attend among new tokens, and to those in a cache; the new tokens are then added to the cache.

        With the cache the result equals that of one pass over all tokens so far. If an encoding depends on the length
        of the row (dynamic NTK, ``factor=auto``), a later token changes what a full pass returns for earlier ones;
        outputs that have been decoded do not change.

        Args:
            x: (B, n, C), embeddings of the n new tokens.
            cache: cache with the m - n tokens before them, from ``new_cache``, which is changed; None: m = n.
            positions: (m,) or (B, m) positions of all m tokens, or a ``Positions``, as in ``attend``.
            padding: (B, m) bool, True at those of all m tokens that no query may see.
            documents: (B, n) integers, as in ``attend``; not together with a cache.

        Returns:
            (B, n, C).

        Raises:
            UserError: x is not (B, n, C) in the layer's dtype and on its device, the cache is of another batch or
                layer, documents come with a cache, or ``attend`` refuses the call.
        """
        check_input(x, self.width, getattr(self.q_proj, "weight", None))
        if cache is not None and not isinstance(cache, KVCache):
            raise UserError(f"cache is what new_cache() returns, or None, not {describe_value(cache)}")
        if documents is not None and cache is not None:
            raise UserError("a text that continues a cache is one document: leave documents or the cache out")
        q, k, v = (
            project(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        with without_autocast(x):
            features = self.encoding.token_features(x)
        if cache is not None:
            layer = (*self._number, canonical(type(self.encoding).__name__, self.encoding.config))
            k, v, features = cache.append(layer, k, v, features)
        states: list[Tensor | None] = [None if cache is None else cache.key_state]
        out = _attend(
            q,
            k,
            v,
            self.encoding,
            positions,
            padding,
            documents,
            features,
            self.dropout if self.training else 0.0,
            self.backend,
            states[0],
            None if cache is None else states.append,
        )
        if cache is not None:  # only after attend, so that a refused call leaves the cache unchanged
            cache.layer = layer
            cache.k, cache.v, cache.features, cache.key_state = k, v, features, states[-1]
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        """Return the settings for ``repr``."""
        return f"width={self.width}, heads={self.heads}, dropout={self.dropout}, backend={self.backend}"
