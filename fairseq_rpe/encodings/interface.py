"""The doors by which an encoding enters a model, each the identity by default.

``embed`` is added at the input, ``rotate`` applied to queries and keys and ``value`` to values; ``position_bias`` is a bias that
positions decide and ``content_bias`` one that queries, keys and notes decide; ``transform_scores`` changes all scores of a
query; ``relative_values`` is what a query reads beside the values. Before all of attention ``prepare_positions`` may count positions anew.
"""

from collections.abc import Callable
from typing import Self

from torch import Tensor

from fairseq_rpe.core.bias import Bias, Positions, RelativeValues
from fairseq_rpe.core.rotation_regions import RotationRegion
from fairseq_rpe.encodings.export import Maskable


class EncodingInterface(Maskable):
    """What attention asks an encoding for.

    ``transform_scores``: scores (B, H, n, m), -inf where a query does not see a key, queries (B, H, n, D) and positions,
    all of some of the queries, -> other scores. It is called for blocks of queries, and again in the backward pass.
    """

    transform_scores: Callable[[Tensor, Tensor, Positions], Tensor] | None = None

    def embed(self, x: Tensor, pos: Positions) -> Tensor:
        """x (B, n, C) at the input -> same shape."""
        return x

    def rotate(self, x: Tensor, at: Tensor, pos: Positions, key: bool = False) -> Tensor:
        """Queries, or with ``key`` keys, x (B, H, n, D) at positions ``at`` (B or 1, n) -> same shape."""
        return x

    def value(self, v: Tensor, pos: Positions) -> Tensor:
        """Values v (B, H, m, D) of the m tokens -> same shape."""
        return v

    def prepare_positions(self, pos: Positions) -> Positions:
        """Positions as attention is to see them, here as they are: what all doors but ``embed`` are given.

        It is called once for all layers that share the encoding.
        """
        return pos

    def position_bias(self, pos: Positions) -> Bias | None:
        """The additive bias, or None where there is none."""
        return None

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...] | None:
        """Where ``rotate`` turns queries and keys for some pairs otherwise than for others; None: for all alike."""
        return None

    def token_features(self, x: Tensor) -> Tensor | None:
        """A layer's input x (B, n, C) -> (B, H, n, E): what ``content_bias`` has to know of each token beside its key."""
        return None

    def content_bias(self, q: Tensor, k: Tensor, pos: Positions, notes: Tensor | None) -> Bias | None:
        """The bias that these queries (B, H, n, D) and keys (B, H, m, D) decide, in float32 or better, turned already.

        It is added to q·k / sqrt(D), as any bias. ``has_token_features``: (B, H, m, E) of ``token_features``, of all m tokens.
        """
        return None

    def relative_values(self, pos: Positions) -> RelativeValues | None:
        """What a query reads beside the values, or None where there is nothing."""
        return None

    def tie(self, first: Self) -> None:
        """Share with the encoding of the first layer what the paper shares, where each layer has an encoding."""

    @property
    def has_content_bias(self) -> bool:
        """Whether it adds a bias that depends on what the tokens are."""
        return type(self).content_bias is not EncodingInterface.content_bias

    @property
    def has_token_features(self) -> bool:
        """Whether it reads a layer's input, by ``token_features``."""
        return type(self).token_features is not EncodingInterface.token_features

    @property
    def needs_all_scores(self) -> bool:
        """Whether it needs all scores or weights of a query at once."""
        return self.transform_scores is not None or self.relative_values(Positions.arange(1)) is not None

    @property
    def is_content_dependent(self) -> bool:
        """Whether attention depends on what the tokens are by more than q·k and the values."""
        return self.has_content_bias or self.needs_all_scores

    @property
    def embeds(self) -> bool:
        """Whether it acts at the input of a model, by ``embed``."""
        return type(self).embed is not EncodingInterface.embed

    @property
    def rotates(self) -> bool:
        return type(self).rotate is not EncodingInterface.rotate

    def rotation(self, pos: Positions) -> Callable[..., Tensor] | None:
        """What all layers of one forward pass at ``pos`` turn queries and keys with; None where nothing turns."""
        return self.rotate if self.rotates else None

    @property
    def changes_values(self) -> bool:
        return type(self).value is not EncodingInterface.value
