"""KV cache of a decoder: keys, values, token features and state of the keys of each layer."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from fairseq_rpe.attention.forward import BiasCache
from fairseq_rpe.attention.kv_cache import GrowableBuffer, append_tokens
from fairseq_rpe.core.errors import UserError


class LayerCache:
    """Keys, values and token features of the last h tokens of the m tokens that one layer has read.

    A layer with a window of w keys drops older ones from time to time, so that h is at most 2w after a step of one
    token; all other layers hold h = m tokens. The tensors are replaced at each step and never written in place, so that
    a shallow copy may be continued independently.

    Attributes:
        tensors: keys and values (B, G, h, D) and, for an encoding that has them, token features (B, H, h, E).
        buffers: buffers that the tensors are views of; None for a tensor without one.
        key_state: state (B, 1, h, E) of the keys after the last query, see ``Encoding.transform_scores_with_state``;
            None without one.
        dropped: number of the first tokens, m - h, that the layer holds no longer.
        window: w, no later token sees a key that is this number of tokens or more before it; None: all may be seen.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.buffers: list[GrowableBuffer | None] = []
        self.key_state: Tensor | None = None
        self.dropped = 0
        self.window: int | None = None

    def __len__(self) -> int:
        """Return m, the number of tokens that the layer has read."""
        return self.dropped + self.held

    @property
    def held(self) -> int:
        """The number of tokens h whose keys and values the layer holds."""
        return self.tensors[0].shape[2] if self.tensors else 0

    def append(
        self, k: Tensor, v: Tensor, features: Tensor | None, window: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the keys, values and token features of n tokens, and return those of all tokens that are held.

        Args:
            k: (B, G, n, D).
            v: (B, G, n, D).
            features: (B, H, n, E), or None.
            window: no new or later token sees a key that is this number of tokens or more before it; None: it may.

        Raises:
            UserError: the layer has dropped keys that a new token may see.
        """
        if window is None and self.dropped:
            raise UserError(
                f"a layer with a window has dropped its first {self.dropped} keys, and a row that goes on after "
                "padding may read them: begin with an empty cache, and put padding before the rows"
            )
        new = [k, v] if features is None else [k, v, features]
        self.window = window
        if window is not None and self.held >= 2 * window:  # rarely, as the next step copies what remains
            self.drop_hidden_keys()
        if not self.tensors:
            self.tensors, self.buffers = new, [None] * len(new)
        else:
            triples = zip(self.buffers, self.tensors, new, strict=True)
            joined = [append_tokens(buffer, old, x, spare=window) for buffer, old, x in triples]
            self.tensors, self.buffers = [x for x, _ in joined], [buffer for _, buffer in joined]
        return self.tensors[0], self.tensors[1], self.tensors[2] if features is not None else None

    def drop_hidden_keys(self) -> None:
        """Drop the keys that no later token sees: all but the last w - 1."""
        hidden = 0 if self.window is None else self.held - (self.window - 1)
        if hidden > 0:
            self.map(lambda x: x[:, :, hidden:])
            self.dropped += hidden

    def check_truncate(self, tokens: int) -> None:
        """Check that all but the first tokens can be dropped.

        Raises:
            UserError: the layer has dropped keys that the next token would see, or a token that is dropped has changed
                the state of the others.
        """
        if self.key_state is not None and tokens < len(self):
            raise UserError(
                f"the last {len(self) - tokens} tokens have changed the state of earlier keys, so the cache cannot "
                f"return to {tokens} tokens: copy the cache before it is continued"
            )
        if self.dropped and (self.window is None or tokens - self.dropped < self.window - 1):
            raise UserError(
                f"a layer with a window has dropped its first {self.dropped} keys, so the cache cannot return to "
                f"{tokens} tokens: copy the cache before it is continued"
            )

    def truncate(self, tokens: int) -> None:
        """Drop all but the first tokens, after :meth:`check_truncate`."""
        held = tokens - self.dropped
        self.map(lambda x: x[:, :, :held])

    def set_key_state(self, state: Tensor) -> None:
        """Store the state (B, 1, h, E) of the keys after the last query."""
        self.key_state = state

    def copy(self) -> "LayerCache":
        """Return a copy that shares the memory of the tokens so far."""
        other = LayerCache()
        other.tensors, other.buffers = list(self.tensors), list(self.buffers)
        other.dropped, other.window, other.key_state = self.dropped, self.window, self.key_state
        return other

    def select_rows(self, rows: Tensor) -> None:
        """Keep rows (B',) int64 of the batch, in buffers with capacity for more tokens if there are buffers."""
        if not self._fills_buffers():  # as after the prefill, or after the cache was shortened
            self.map(lambda x: x.index_select(0, rows))
        # on a GPU the comparison would wait for the device
        elif rows.device.type != "cpu" or not torch.equal(rows, torch.arange(len(self.tensors[0]))):
            selected = [buffer.select_rows(rows) for buffer in self.buffers if buffer is not None]
            self.tensors, self.buffers = [x for x, _ in selected], [buffer for _, buffer in selected]
            self.key_state = None if self.key_state is None else self.key_state.index_select(0, rows)

    def _fills_buffers(self) -> bool:
        """Return whether each tensor is all that is written of its buffer."""
        pairs = zip(self.buffers, self.tensors, strict=True)
        return all(buffer is not None and buffer.can_append(x, 0) for buffer, x in pairs)

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor (B, G or H, h, …) by the result of a function; the next step copies it to a buffer."""
        self.tensors = [function(x) for x in self.tensors]
        self.key_state = None if self.key_state is None else function(self.key_state)


class DecoderCache:
    """KV cache of all layers of a decoder.

    A layer whose encoding has the option ``local`` or ``block`` drops keys that no later token can see, and holds at
    most twice as many keys as the window or the block has. It holds all keys where a later token may see any of them:
    if cached tokens may get other positions (``is_movable``, or a position transform that depends on the length of the
    text), and if positions are not evenly spaced, so that a window of positions is no window of tokens.

    Args:
        is_movable: whether cached tokens may get other positions later, e.g. when the oldest tokens are dropped. Keys
            are then cached before their rotation. Otherwise they are cached rotated if the encoding allows it
            (``fixed_rotation``), and every token keeps its position.

    Attributes:
        bias_cache: tables from which the biases of the decoded text are computed.
    """

    def __init__(self, is_movable: bool = False) -> None:
        self.is_movable = is_movable
        self.bias_cache: BiasCache = {}
        self._layers: dict[int, LayerCache] = {}

    def __len__(self) -> int:
        """Return the number of cached tokens."""
        return max(map(len, self._layers.values()), default=0)

    def layer(self, index: int) -> LayerCache:
        """Return the cache of a layer, counted from 0."""
        return self._layers.setdefault(index, LayerCache())

    def copy(self) -> Self:
        """Return a copy that shares the memory of the tokens so far; both may be continued independently."""
        other = type(self)(self.is_movable)
        other.bias_cache = self.bias_cache
        other._layers = {index: layer.copy() for index, layer in self._layers.items()}
        return other

    def select_rows(self, rows: Tensor) -> None:
        """Keep rows (B',) int64 of the batch; a row may be left out or repeated."""
        for layer in self._layers.values():
            layer.select_rows(rows)

    def drop_hidden_keys(self) -> None:
        """Drop the keys that windows hide from all later tokens; without this call, a later step drops them."""
        for layer in self._layers.values():
            layer.drop_hidden_keys()

    def permute_tokens(self, order: Tensor) -> None:
        """Reorder the tokens of each row.

        Args:
            order: (B, m) int64 indices of the m cached tokens.

        Raises:
            UserError: a layer with a window has dropped keys.
        """
        self._check_complete()
        self._map(lambda x: x.gather(2, order[:, None, :, None].expand_as(x)))

    def keep_last(self, tokens: int, rows: int | None = None) -> None:
        """Drop all but the last tokens, and all but the first rows if ``rows`` is given.

        Raises:
            UserError: a layer with a window has dropped keys.
        """
        self._check_complete()
        self._map(lambda x: x[:rows, :, -tokens:])

    def truncate(self, tokens: int) -> None:
        """Drop all but the first tokens; the text may then continue in another way.

        Raises:
            UserError: a layer with a window has dropped keys that the next token would see, or has a state of keys.
        """
        layers = self._layers.values()
        for layer in layers:  # before any layer is changed
            layer.check_truncate(tokens)
        for layer in layers:
            layer.truncate(tokens)

    def _check_complete(self) -> None:
        """Raise UserError if a layer does not hold all of its tokens."""
        if any(layer.dropped for layer in self._layers.values()):
            raise UserError("a layer with a window has dropped old keys: move tokens of DecoderCache(is_movable=True)")

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        for layer in self._layers.values():
            layer.map(function)
