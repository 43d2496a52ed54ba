"""Checks of tensors that callers give to public functions."""

from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.arguments import described
from fairseq_rpe.core.bias import Positions
from fairseq_rpe.core.errors import UserError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of 16 bits or more


def check_tensor(name: str, x: Any) -> None:
    """Check that an argument is a tensor whose numbers torch's plain operations can read.

    Args:
        name: of the argument; a plural ends in s.
        x: the argument.

    Raises:
        UserError: it is no tensor, sparse, nested or quantised, or on device "meta".
    """
    if not isinstance(x, Tensor):
        raise UserError(f"{name} must be a torch tensor, not {described(x)}: convert it with torch.as_tensor")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        kind = "nested" if x.is_nested else "quantised" if x.is_quantized else str(x.layout).removeprefix("torch.")
        raise UserError(f"{name} must be a dense tensor, not a {kind} one: convert it, as with to_dense()")
    if x.is_meta:
        verb, it = ("are", "them") if name.endswith("s") else ("is", "it")
        raise UserError(f"{name} {verb} on device 'meta', where tensors have no values: create {it} on another device")


def check_embedded(x: Any, positions: Any, width: int) -> None:
    """Check what an encoding that acts at a model's input is given.

    Args:
        x: the embedded tokens, (B, n, C).
        positions: theirs, with q (B or 1, n).
        width: C.

    Raises:
        UserError: x is no dense floating-point tensor (B, n, C), or positions are no ``Positions`` of these tokens on
            its device.
    """
    check_tensor("x", x)
    if x.dim() != 3 or x.shape[2] != width or x.dtype not in FLOATS:
        raise UserError(
            f"x is (batch, tokens, {width}) in a floating-point dtype of 16 bits or more, not {tuple(x.shape)} in "
            f"{str(x.dtype).removeprefix('torch.')}"
        )
    if not isinstance(positions, Positions):
        example = f"Positions.arange({x.shape[1]})"
        raise UserError(f"positions must be Positions, such as {example}, not {described(positions)}")
    if positions.q.shape not in ((1, x.shape[1]), tuple(x.shape[:2])):
        raise UserError(
            f"positions are of {tuple(positions.q.shape)} tokens, and x is of {tuple(x.shape[:2])}: give those of these"
        )
    if positions.q.device != x.device:
        raise UserError(f"positions are on {positions.q.device} and x on {x.device}: give them on one device")
