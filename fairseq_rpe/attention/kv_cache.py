"""KV cache: keys and values of a text that grows token by token, in memory with capacity for the next tokens."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError

SPARE = 256  # free tokens of a new buffer; a step reads all keys anyway, so a copy every 256 steps costs little


class GrowableBuffer:
    """Memory (B, H, capacity, D) whose first ``used`` tokens are written; at most a third of it, or ``SPARE``, is free.

    Written memory is never written again, and tokens are appended only to a tensor that ends where the written memory
    ends. So a cache may be copied and continued in two ways: the second continuation finds the memory after its tokens
    written, and gets a new buffer.

    Args:
        memory: (B, H, capacity, D).
        used: number of tokens that are written.
    """

    def __init__(self, memory: Tensor, used: int) -> None:
        self.memory, self.used = memory, used
        self._written: Tensor | None = None  # the tensor of all written tokens that was returned last

    @classmethod
    def with_prefix(cls, old: Tensor, more: int, spare: int | None = None) -> "GrowableBuffer":
        """Return a buffer with a copy of a tensor and capacity for more tokens after it.

        Args:
            old: (B, H, m, D).
            more: number of tokens that are appended next.
            spare: number of free tokens after them; None: half of m, at least ``SPARE``.
        """
        batch, heads, used, width = old.shape
        free = max(SPARE, used // 2) if spare is None else spare
        buffer = cls(old.new_empty(batch, heads, used + more + free, width), used)
        buffer.memory[:, :, :used] = old
        return buffer

    def can_append(self, old: Tensor, more: int) -> bool:
        """Return whether ``old`` is exactly the written memory, and ``more`` tokens fit after it."""
        memory, used = self.memory, self.used
        is_written = old is self._written or (
            old.data_ptr() == memory.data_ptr()
            and old.shape == (*memory.shape[:2], used, memory.shape[3])
            and old.stride() == memory.stride()
        )
        has_capacity = used + more <= memory.shape[2]
        return is_written and has_capacity and (torch.is_inference_mode_enabled() or not memory.is_inference())

    def append(self, new: Tensor) -> Tensor:
        """Append new (B, H, n, D) and return all tokens (B, H, used, D)."""
        start, more = self.used, new.shape[2]
        self.used = start + more
        self.memory.narrow(2, start, more).copy_(new)
        self._written = written = self.memory.narrow(2, 0, self.used)
        return written

    def select_rows(self, rows: Tensor) -> tuple[Tensor, "GrowableBuffer"]:
        """Return the tokens of rows (B',) int64 of the batch, and the new buffer of equal capacity that has them."""
        other = GrowableBuffer(self.memory.new_empty(len(rows), *self.memory.shape[1:]), self.used)
        selected = other.memory[:, :, : self.used]
        return torch.index_select(self.memory[:, :, : self.used], 0, rows, out=selected), other


def append_tokens(
    buffer: GrowableBuffer | None, old: Tensor, new: Tensor, spare: int | None = None
) -> tuple[Tensor, GrowableBuffer | None]:
    """Concatenate tokens in a buffer.

    Where gradients may be needed, which writing into memory of an earlier step would spoil, or where dtypes or devices
    differ, the result is torch's own concatenation without a buffer.

    Args:
        buffer: buffer that ``old`` may be a view of, or None.
        old: (B, H, m, D).
        new: (B, H, n, D).
        spare: free tokens of a new buffer; None: a number that grows with m.

    Returns:
        (B, H, m + n, D), and the buffer that it is a view of, or None.
    """
    if torch.is_grad_enabled() or old.dtype != new.dtype or old.device != new.device:
        return torch.cat([old, new], dim=2), None
    if buffer is None or not buffer.can_append(old, new.shape[2]):
        buffer = GrowableBuffer.with_prefix(old, new.shape[2], spare)
    return buffer.append(new), buffer


@dataclass
class KVCache:
    """Keys, not rotated, values and token features of the m tokens that a ``RelativeAttention`` has seen.

    It holds all keys also if the encoding has a window: each call states the positions of all tokens anew, so that a
    later call may move a key that is hidden now into the window.

    Attributes:
        k: (B, H, m, D), or None in a new cache.
        v: (B, H, m, D), or None.
        features: (B, H, m, E) for an encoding that has token features, or None.
        key_state: (B, 1, m, E) for an encoding whose queries change numbers of each key, or None.
        buffers: buffers that k, v and features are views of. Where one is None, as after an assignment to k, the next
            step copies the tensor.
        layer: id of the process, number and encoding of the layer that filled the cache; None in a new cache.
    """

    k: Tensor | None = None
    v: Tensor | None = None
    features: Tensor | None = None
    key_state: Tensor | None = None
    buffers: tuple[GrowableBuffer | None, ...] = field(default=(None, None, None), repr=False)
    layer: tuple[str, int, str] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return 0 if self.k is None else self.k.shape[2]

    def check_layer(self, layer: tuple[str, int, str]) -> None:
        """Check that a layer may continue this cache.

        If the process differs, as for a cache that was saved, only the encodings are compared.

        Args:
            layer: process, number and encoding of the layer.

        Raises:
            UserError: another layer filled the cache.
        """
        if not len(self) or self.layer is None:
            return
        (cached_process, _, cached_encoding), (process, _, encoding) = self.layer, layer
        is_same = self.layer == layer if cached_process == process else cached_encoding == encoding
        if not is_same:
            raise UserError(
                f"the cache is of another layer, with {cached_encoding}, and this layer has {encoding}: each layer "
                "needs a cache of its own, of new_cache()"
            )

    def append(self, layer: tuple[str, int, str], *new: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the keys, values and features of the cache followed by those of new tokens.

        Args:
            layer: process, number and encoding of the layer.
            new: keys, values and features (B, H, n, …) of the new tokens; features may be None.

        Raises:
            UserError: the cache is of another batch or another layer, or of another dtype or device.
        """
        old = self.k, self.v, self.features
        if old[0] is None or new[0] is None:
            return new
        if len(old[0]) != len(new[0]):
            raise UserError(
                f"the cache holds {len(old[0])} rows and {len(new[0])} came: use a new cache for a new batch"
            )
        for name, x, y in zip(("keys", "values", "features"), old, new, strict=True):
            old_layout, new_layout = _describe_layout(x), _describe_layout(y)
            if old_layout != new_layout:
                raise UserError(
                    f"the cache holds {name} ({old_layout}), and this layer adds {name} ({new_layout}): each layer "
                    "needs a cache of its own, in one dtype and on one device"
                )
        self.check_layer(layer)
        triples = zip(self.buffers, old, new, strict=True)
        joined = [(y, None) if x is None or y is None else append_tokens(buffer, x, y) for buffer, x, y in triples]
        self.buffers = tuple(buffer for _, buffer in joined)
        return tuple(x for x, _ in joined)


def _describe_layout(x: Tensor | None) -> str:
    return "none" if x is None else f"{x.shape[1]} heads of width {x.shape[3]}, {x.dtype} on {x.device}"
