"""Hooks by which an encoding enters a model, and export of its bias to other attention implementations."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from fairseq_rpe.core.arguments import check_count, describe_value
from fairseq_rpe.core.bias import Bias, RelativeValues
from fairseq_rpe.core.errors import UserError, explain_memory_errors
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.rotation_regions import RotationRegion
from fairseq_rpe.core.score_mod import score_mod
from fairseq_rpe.core.score_product import ScoreProduct
from fairseq_rpe.core.tensors import FLOAT_DTYPES


class EncodingInterface(nn.Module):
    """Hooks that attention calls, each of which does nothing by default.

    ``embed`` acts once, at the input of the model. In every layer ``rotate`` is applied to queries and keys, and
    ``value`` to values. ``position_bias`` depends on positions; ``content_bias`` depends on queries, keys and
    ``token_features``. ``score_product`` replaces q·k. ``transform_scores`` changes all scores of a query, and
    ``transform_scores_with_state`` also updates numbers of each key. ``relative_values`` are added to the values of the
    keys, by their distances from the query. ``prepare_positions`` is called before all of these except ``embed``.

    Attributes:
        heads: number of attention heads H.
        transform_scores: method that returns new scores (B, H, n, m), or None. Its arguments are the scores, -inf
            where a query does not see a key, the queries (B, H, n, D), and the positions of these queries. It is called
            for blocks of queries, and again in the backward pass.
        key_state_width: E, numbers that each key has in the state of ``transform_scores_with_state``; 0: no state.
        transforms_keys: whether each token transforms all keys before it, see ``score_product``: a KV cache then stores
            the transformed keys.
        returns_log_weights: whether the transformed scores are logarithms of attention weights, whose sum is at most 1:
            attention then exponentiates them without a softmax.
        has_vector_product: whether ``score_product`` returns a ``VectorProduct``, which every backend computes.
        reads_normalised: whether ``content_bias`` is defined for queries and keys after QK-norm, too.
        rotated_width_factor: width of rotated queries and keys as a multiple of that of a head, D.
    """

    heads: int
    rotated_width_factor: int = 1
    key_state_width: int = 0
    transforms_keys: bool = False
    has_vector_product: bool = False
    returns_log_weights: bool = False
    reads_normalised: bool = False
    transform_scores: Callable[[Tensor, Tensor, Positions], Tensor] | None = None

    def embed(self, x: Tensor, pos: Positions) -> Tensor:
        """Add positions to the embedded tokens x (B, n, C) at the input of the model; same shape."""
        return x

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Rotate queries or keys.

        They may become wider than the values, E = ``rotated_width_factor``·D. Every attention backend then divides q·k
        by sqrt(E); for another scale, multiply the rotated queries by a factor. The options ``query_scale`` apply to
        rotated queries. Rotation regions and ``relative_values`` need E = D.

        Args:
            x: (B, H, n, D) queries, or keys.
            at: (B or 1, n) their positions.
            pos: positions of all tokens.
            key: whether ``x`` are keys.

        Returns:
            (B, H, n, E).
        """
        return x

    def value(self, v: Tensor, pos: Positions) -> Tensor:
        """Change values v (B, H, m, D) of all m tokens; same shape."""
        return v

    def prepare_positions(self, pos: Positions) -> Positions:
        """Return the positions that all hooks except ``embed`` receive.

        It is called once per forward pass for all layers that share the encoding.
        """
        return pos

    def position_bias(self, pos: Positions) -> Bias | None:
        """Return the additive bias of all pairs of these positions, or None."""
        return None

    def attention_bias(self, pos: Positions) -> Bias | None:
        """Return the bias that attention adds: ``position_bias`` and what the options of every encoding add to it."""
        return self.position_bias(pos)

    @property
    def beyond_bias(self) -> str:
        """Option of every encoding, besides the window, that changes attention beyond its bias; "" if none does."""
        return ""

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...] | None:
        """Return regions of pairs with their rotary positions, or None if all pairs are rotated at true positions."""
        return None

    def token_features(self, x: Tensor) -> Tensor | None:
        """Return features (B, H, n, E) of tokens for ``content_bias``, from a layer's input x (B, n, C), or None."""
        return None

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None) -> Bias | None:
        """Return the bias that depends on queries and keys, or None.

        Args:
            q: (B, H, n, D) queries after ``rotate``, in float32 or float64.
            k: (B, H, m, D) keys after ``rotate``, in float32 or float64.
            pos: positions of these tokens.
            features: (B, H, m, E) of ``token_features`` for all m tokens, or None.

        Returns:
            A bias that is added to q·k / sqrt(D).
        """
        return None

    def score_product(
        self,
        q: Tensor,
        k: Tensor,
        pos: Positions,
        features: Tensor | None,
        padding: Tensor | None,
        key_state: Tensor | None,
    ) -> ScoreProduct:
        """Return the product of queries and keys that replaces q·k.

        Args:
            q: (B, H, n, D) queries after ``rotate``, in float32 or float64.
            k: (B, H, m, D) keys after ``rotate``, in float32 or float64.
            pos: positions of these tokens.
            features: (B, H, m, E) of ``token_features`` for all m tokens, or None.
            padding: (B, m) bool, True at tokens that no query sees, or None; tokens of padding before a text have the
                position of its first token in any case.
            key_state: (B, H, m - n, D) keys that the m - n tokens before the queries have transformed, with
                ``transforms_keys`` and a KV cache; None otherwise.
        """
        raise NotImplementedError

    def transform_scores_with_state(
        self, scores: Tensor, q: Tensor, pos: Positions, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return new scores and the state of the keys after these queries, if ``key_state_width`` is not 0.

        The state holds what earlier queries leave for later ones, as numbers of each key. It is called for blocks of
        queries in their order, with the state after the queries before them, and again in the backward pass. A KV cache
        stores the state after its last query. The result must not depend on the division into blocks.

        Args:
            scores: (B, H, n, m), -inf where a query does not see a key; where it does not see its own key, the last n
                of the m, the query is padding and may not change the state.
            q: (B, H, n, D) queries.
            pos: positions of these queries and keys.
            state: (B, 1, m, E), 0 for keys that no query has read.

        Returns:
            (B, H, n, m) and (B, 1, m, E).
        """
        raise NotImplementedError

    def relative_values(self, pos: Positions) -> RelativeValues | None:
        """Return a vector for each distance, which is added to the values of keys at that distance, or None."""
        return None

    def tie(self, first: Self) -> None:
        """Share parameters with the encoding ``first`` of layer 1, if each layer has its own encoding."""

    @property
    def has_content_bias(self) -> bool:
        """Whether the encoding adds a bias that depends on the tokens."""
        return type(self).content_bias is not EncodingInterface.content_bias

    @property
    def has_token_features(self) -> bool:
        """Whether the encoding reads a layer's input, by ``token_features``."""
        return type(self).token_features is not EncodingInterface.token_features

    @property
    def needs_all_scores(self) -> bool:
        """Whether the encoding needs all scores or attention weights of a query at once."""
        transforms = self.transform_scores is not None or self.key_state_width > 0
        return transforms or self.relative_values(Positions.arange(1)) is not None

    @property
    def has_key_state(self) -> bool:
        """Whether later tokens change what the cache holds of a key: numbers of each key, or the key itself."""
        return self.key_state_width > 0 or self.transforms_keys

    @property
    def has_score_product(self) -> bool:
        """Whether the encoding replaces q·k, by ``score_product``."""
        return type(self).score_product is not EncodingInterface.score_product

    @property
    def is_content_dependent(self) -> bool:
        """Whether attention depends on the tokens through more than q·k and the values."""
        return self.has_content_bias or self.has_score_product or self.needs_all_scores

    @property
    def embeds(self) -> bool:
        """Whether the encoding acts at the input of a model, by ``embed``."""
        return type(self).embed is not EncodingInterface.embed

    @property
    def rotates(self) -> bool:
        """Whether the encoding changes queries and keys, by ``rotate``."""
        return type(self).rotate is not EncodingInterface.rotate

    @property
    def is_pure_rotation(self) -> bool:
        """Whether rotating queries and keys is all that the encoding does."""
        raise NotImplementedError

    def rotation(self, pos: Positions) -> Callable[..., Tensor] | None:
        """Return the function with the signature of ``rotate`` that all layers of one forward pass call, or None."""
        return self.rotate if self.rotates else None

    @property
    def changes_values(self) -> bool:
        """Whether the encoding changes values, by ``value``."""
        return type(self).value is not EncodingInterface.value

    def mask(self, n: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
        """Return the bias of n tokens as a dense mask for any attention that adds one to its scores.

        ``mask[h, i, j]`` is the log-bias of query i and key j in nats, to be added to q·k / sqrt(D), and -inf where
        j > i. Encodings without a bias (none, absolute encodings) give zeros where j <= i. The mask is computed in
        float32 or float64 and is differentiable; half precision only rounds the result. Memory is O(n²).

        Args:
            n: number of tokens, at positions 0 … n-1.
            dtype: dtype of the result, at least 16 bits wide.
            device: device of the result; None for that of the parameters, or the CPU.

        Returns:
            (H, n, n) in ``dtype``.

        Raises:
            UserError: ``n`` is below 1, ``dtype`` is not a floating-point type of 16 bits or more, the device is not
                available, or this encoding does more than add a bias.

        >>> from fairseq_rpe import build
        >>> build("alibi", heads=2, width=8).mask(3)[0]
        tensor([[-0.0000,    -inf,    -inf],
                [-0.0625, -0.0000,    -inf],
                [-0.1250, -0.0625, -0.0000]])
        """
        if dtype not in FLOAT_DTYPES:  # a mask needs -inf, which float8 lacks
            kind = dtype if isinstance(dtype, torch.dtype) else describe_value(dtype)
            raise UserError(
                f"a mask of log-biases needs a floating-point dtype of 16 bits or more, not {kind}: use torch.float32"
            )
        with explain_memory_errors(f"a mask of {n} tokens"):
            position_bias, pos = self._additive_bias(n, torch.promote_types(dtype, torch.float32), device)
            if position_bias is None:
                bias = pos.k.new_zeros(self.heads, n, n)
            else:
                bias = position_bias.materialize(pos)[0]  # (H, n, n)
            future = torch.ones(n, n, dtype=torch.bool, device=bias.device).triu(1)
            return bias.masked_fill(future, float("-inf")).to(device=device, dtype=dtype)

    def score_mod(self, n: int, *, device: torch.device | str | None = None) -> Callable[..., Tensor]:
        """Return the bias of n tokens as a ``score_mod`` of torch's FlexAttention.

        It adds the log-bias and sets scores of future keys to -inf, so it is correct without a ``block_mask``; a causal
        one makes FlexAttention faster. A FIRE network of ReLUs is evaluated by its linear pieces.

        Args:
            n: largest number of tokens, at positions 0 … n-1; a longer input indexes past the end of the tables.
            device: device of queries and keys, for encodings without parameters; others use that of their parameters.

        Returns:
            A function of (score, batch, head, query, key).

        Raises:
            UserError: ``n`` is below 1, the device is not available, or this encoding does more than add a bias.

        >>> import torch
        >>> from torch.nn.attention.flex_attention import flex_attention
        >>> from fairseq_rpe import attend, build
        >>> alibi = build("alibi", heads=2, width=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
        >>> y = flex_attention(q, k, v, score_mod=alibi.score_mod(5))
        >>> torch.allclose(y, attend(q, k, v, alibi), atol=1e-6)
        True
        """
        with explain_memory_errors(f"a score_mod of {n} tokens"):
            bias, pos = self._additive_bias(n, torch.float32, device)
            add = score_mod(bias, pos, 1)

        def causal_score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(j <= i, score if add is None else add(score, b * 0, h, i, j), float("-inf"))

        return causal_score_mod

    def _additive_bias(
        self, n: int, dtype: torch.dtype, device: torch.device | str | None
    ) -> tuple[Bias | None, Positions]:
        """Return the bias of n tokens; refuse encodings that do more in attention than add it."""
        name = type(self).__name__
        if self.rotation_regions(Positions.arange(1)) is not None:
            raise UserError(
                f"{name} rotates pairs at different positions, which a mask cannot express: call fairseq_rpe.attend"
            )
        if self.beyond_bias:
            raise UserError(
                f"{name} has the option {self.beyond_bias}, which a mask cannot express: call fairseq_rpe.attend"
            )
        if self.is_content_dependent:
            raise UserError(f"{name} depends on the tokens, which a mask cannot express: call fairseq_rpe.attend")
        if self.rotates:
            remedy = ", or rotate them with encoding.rotate and use causal attention" if self.is_pure_rotation else ""
            raise UserError(f"{name} rotates queries and keys, which is not a bias: call fairseq_rpe.attend{remedy}")
        check_count("n, the number of tokens of a mask,", n)
        _check_device(device)
        first = next(self.parameters(), None)
        if first is not None and first.is_meta:
            raise UserError(f"{name} is on device 'meta', where parameters have no values: load or initialise it first")
        pos = Positions.arange(n, dtype=dtype, device=device if first is None else first.device)
        with torch.autocast(pos.k.device.type, enabled=False):
            return self.attention_bias(pos), pos


def _check_device(device: torch.device | str | None) -> None:
    """Refuse what is not a device of this machine that holds values."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
        usable = torch.device(device).type != "meta"
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError):
        usable = False
    if not usable:
        kind = device if isinstance(device, str | torch.device) else describe_value(device)
        raise UserError(f"device {str(kind)!r} is not available: use an available one, such as 'cpu', or leave it out")
