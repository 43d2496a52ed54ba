"""Encodings with the parameters that they were trained to; the sizes of those are looked at before any is built."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fairseq_rpe.checkpoints.checkpoint import State, same_kind
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.base import Encoding

_MAKERS = {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randn}
_MAKERS |= {torch.zeros}
_SCRATCH = 2**20  # numbers that an encoding may make beside its parameters


def restore(state: State) -> list[Encoding]:
    """The encodings of a checkpoint of this plugin's, one for the model or one per layer.

    Raises UserError: its spec string is wrong, or its weights are not those of that encoding.
    """
    heads, width = (state.size(key) for key in ("decoder_attention_heads", "decoder_embed_dim"))
    make = partial(build, str(state.model["rpe"]), heads, width, state.train_length())
    return [_restored(state, make, values) for values in state.encodings or ({},)]


def _restored(state: State, make: Callable[[], Encoding], values: Mapping[str, Tensor]) -> Encoding:
    wrong: str | None
    with _Limit(sum(t.numel() for t in values.values()) + _SCRATCH) as limit:
        try:
            encoding = make()
        except _TooLarge:
            wrong = f"more than {limit.most} numbers"
        else:
            wrong = same_kind(encoding.state_dict(), values)
    try:
        if wrong is None:
            encoding.load_state_dict(dict(values))
            return encoding.eval()
    except RuntimeError:
        pass
    more = f" ({wrong})" if wrong else ""
    raise UserError(f"{state.path} holds other parameters than '{state.model['rpe']}' has{more}: train it again")


class _TooLarge(Exception):
    """A tensor would be larger than it may be."""


class _Limit(TorchFunctionMode):
    """Inside, no tensor of more than ``most`` numbers is made."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MAKERS:
            shape = {k: v for k, v in kwargs.items() if k not in ("generator", "out", "pin_memory")}
            if func(*args, **{**shape, "device": "meta"}).numel() > self.most:
                raise _TooLarge
        return func(*args, **kwargs)
