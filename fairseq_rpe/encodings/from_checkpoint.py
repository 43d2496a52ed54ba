"""Restores trained encodings from a checkpoint, without allocating more memory than its weights justify."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fairseq_rpe.checkpoints.checkpoint import Checkpoint, dtype_mismatch
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.base import Encoding

# functions that allocate tensors; _SizeLimit checks their sizes
_FACTORIES = {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randn}
_FACTORIES |= {torch.zeros}
_SCRATCH = 2**20  # elements that an encoding may allocate besides its parameters


def restore_encodings(state: Checkpoint) -> list[Encoding]:
    """Restore the encodings of a checkpoint of this plugin.

    Args:
        state: settings and weights of a checkpoint that this plugin saved.

    Returns:
        One encoding for the model or one per layer, in evaluation mode.

    Raises:
        UserError: the spec is not valid, or the weights do not belong to that encoding.
    """
    heads, width = (state.integer_setting(key) for key in ("decoder_attention_heads", "decoder_embed_dim"))
    build_encoding = partial(build, str(state.model["rpe"]), heads, width, state.train_length())
    return [_restore(state, build_encoding, values) for values in state.encoding_weights or ({},)]


def _restore(state: Checkpoint, build_encoding: Callable[[], Encoding], values: Mapping[str, Tensor]) -> Encoding:
    """Build one encoding and load its weights ``values``.

    A damaged or hostile checkpoint may name options that need more memory than its weights have, so building stops at
    the first tensor that is much larger than all weights.
    """
    mismatch: str | None
    with _SizeLimit(sum(t.numel() for t in values.values()) + _SCRATCH) as limit:
        try:
            encoding = build_encoding()
        except _TooLarge:
            mismatch = f"more than {limit.max_elements} elements"
        else:
            mismatch = dtype_mismatch(encoding.state_dict(), values)
    try:
        if mismatch is None:
            encoding.load_state_dict(dict(values))
            return encoding.eval()
    except RuntimeError:  # names or shapes differ
        pass
    details = f" ({mismatch})" if mismatch else ""
    raise UserError(f"{state.path} has other parameters than '{state.model['rpe']}'{details}: train it again")


class _TooLarge(Exception):
    """A tensor would exceed the size limit."""


class _SizeLimit(TorchFunctionMode):
    """Context in which creating a tensor of more than ``max_elements`` elements raises ``_TooLarge``."""

    def __init__(self, max_elements: int) -> None:
        super().__init__()
        self.max_elements = max_elements

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            # on device "meta" the call allocates nothing, and these three arguments do not belong to that device
            shape = {k: v for k, v in kwargs.items() if k not in ("generator", "out", "pin_memory")}
            if func(*args, **{**shape, "device": "meta"}).numel() > self.max_elements:
                raise _TooLarge
        return func(*args, **kwargs)
