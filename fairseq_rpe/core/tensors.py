"""Checks of tensor arguments of public functions."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.core.arguments import describe_value
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # floating-point types of at least 16 bits


def wide_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return what a linear layer returns for x, in x's dtype or in float32 if that is wider.

    Encodings keep their parameters in float32, and x may be in half or in double precision.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def runs_eagerly() -> bool:
    """Return whether operations run one by one: no compiler or functorch transform traces them.

    Functions with a backward pass written by hand, or that read values of tensors, are called only then.
    """
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def check_tensor(name: str, x: Any) -> None:
    """Check that an argument is a dense tensor with values.

    Args:
        name: Name of the argument; a plural ends in s.
        x: Value of the argument.

    Raises:
        UserError: It is not a tensor, is sparse, nested or quantised, or is on device "meta".
    """
    if not isinstance(x, Tensor):
        raise UserError(f"{name} must be a torch tensor, not {describe_value(x)}: convert it with torch.as_tensor")
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        kind = "nested" if x.is_nested else "quantised" if x.is_quantized else str(x.layout).removeprefix("torch.")
        raise UserError(f"{name} must be a dense tensor, not a {kind} one: convert it, as with to_dense()")
    if x.is_meta:
        verb, it = ("are", "them") if name.endswith("s") else ("is", "it")
        raise UserError(f"{name} {verb} on device 'meta', where tensors have no values: create {it} on another device")


def check_embedding_input(x: Any, positions: Any, width: int) -> None:
    """Check the arguments of an encoding that acts at a model's input.

    Args:
        x: The embedded tokens, (B, n, C).
        positions: Their :class:`Positions`, with q (B or 1, n).
        width: Width C of the embeddings.

    Raises:
        UserError: x is not a dense floating-point tensor (B, n, C), or positions are not the positions of these tokens
            on the same device.
    """
    check_tensor("x", x)
    if x.dim() != 3 or x.shape[2] != width or x.dtype not in FLOAT_DTYPES:
        raise UserError(
            f"x is (batch, tokens, {width}) in a floating-point dtype of 16 bits or more, not {tuple(x.shape)} in "
            f"{str(x.dtype).removeprefix('torch.')}"
        )
    if not isinstance(positions, Positions):
        example = f"Positions.arange({x.shape[1]})"
        raise UserError(f"positions must be Positions, such as {example}, not {describe_value(positions)}")
    if positions.q.shape not in ((1, x.shape[1]), tuple(x.shape[:2])):
        raise UserError(
            f"positions are of {tuple(positions.q.shape)} tokens, and x is of {tuple(x.shape[:2])}: give the positions "
            "of x"
        )
    if positions.q.device != x.device:
        raise UserError(f"positions are on {positions.q.device} and x on {x.device}: give them on one device")
