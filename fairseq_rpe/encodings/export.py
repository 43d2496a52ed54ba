"""An encoding's bias for attention that is not ours: as a dense mask, or as a function for torch's FlexAttention."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fairseq_rpe.core.arguments import check_count, described
from fairseq_rpe.core.bias import Bias, Positions, block
from fairseq_rpe.core.errors import UserError, enough_memory
from fairseq_rpe.core.rotation_regions import RotationRegion
from fairseq_rpe.core.score_mod import score_mod
from fairseq_rpe.core.tensors import FLOATS


class Maskable(nn.Module):
    """What every encoding has for other attention; its bias is what ``position_bias`` says."""

    heads: int

    @property
    def rotates(self) -> bool:
        raise NotImplementedError

    @property
    def is_pure_rotation(self) -> bool:
        """Whether turning queries and keys is all that it does."""
        raise NotImplementedError

    @property
    def is_content_dependent(self) -> bool:
        raise NotImplementedError

    def position_bias(self, pos: Positions) -> Bias | None:
        raise NotImplementedError

    def rotation_regions(self, pos: Positions) -> tuple[RotationRegion, ...] | None:
        raise NotImplementedError

    def mask(self, n: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
        """The bias of n tokens as a mask for any attention that adds one to its scores; O(n²) memory.

        ``mask[h, i, j]`` is the log-bias of query i and key j in nats, to be added to q·k / sqrt(D), and -inf where
        j > i. What adds no bias (none, absolute encodings) gives zeros there. It is worked out in float32 or better and
        carries gradients to the parameters; half precision only rounds the result.

        Args:
            n: tokens, at positions 0 … n-1.
            device: of the result; None: that of the parameters, or the CPU.

        Returns:
            (H, n, n) in ``dtype``.

        Raises:
            UserError: n is below 1, ``dtype`` no floating-point type of 16 bits or more, there is no such device, or
                this encoding does more than add a bias.

        >>> from fairseq_rpe import build
        >>> build("alibi", heads=2, width=8).mask(3)[0]
        tensor([[-0.0000,    -inf,    -inf],
                [-0.0625, -0.0000,    -inf],
                [-0.1250, -0.0625, -0.0000]])
        """
        if dtype not in FLOATS:  # a mask needs -inf, which float8 lacks
            kind = dtype if isinstance(dtype, torch.dtype) else described(dtype)
            raise UserError(
                f"a mask of log-biases needs a floating-point dtype of 16 bits or more, not {kind}: use torch.float32"
            )
        with enough_memory(f"a mask of {n} tokens"):
            form, pos = self._additive(n, torch.promote_types(dtype, torch.float32), device)
            bias = pos.k.new_zeros(self.heads, n, n) if form is None else block(form, pos)[0]
            future = torch.ones(n, n, dtype=torch.bool, device=bias.device).triu(1)
            return bias.masked_fill(future, float("-inf")).to(device=device, dtype=dtype)

    def score_mod(self, n: int, *, device: torch.device | str | None = None) -> Callable[..., Tensor]:
        """The same as a ``score_mod`` of torch's FlexAttention, a function of (score, batch, head, query, key).

        It adds the log-bias and makes scores of the future -inf, so that it is right without a ``block_mask``; one that
        is causal makes FlexAttention faster. A FIRE network of ReLUs enters by its straight pieces.

        Args:
            n: tokens that it serves, as many queries as keys, at positions 0 … n-1; fewer will do, more index past the
                end of its tables.
            device: of queries and keys, for encodings without parameters; others: where their parameters are.

        Raises:
            UserError: n is below 1, there is no such device, or this encoding does more than add a bias.

        >>> import torch
        >>> from torch.nn.attention.flex_attention import flex_attention
        >>> from fairseq_rpe import attend, build
        >>> alibi = build("alibi", heads=2, width=8)
        >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
        >>> y = flex_attention(q, k, v, score_mod=alibi.score_mod(5))
        >>> torch.allclose(y, attend(q, k, v, alibi), atol=1e-6)
        True
        """
        with enough_memory(f"a score_mod of {n} tokens"):
            form, pos = self._additive(n, torch.float32, device)
            add = score_mod(form, pos, 1)

        def modified(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(j <= i, score if add is None else add(score, b * 0, h, i, j), float("-inf"))

        return modified

    def _additive(self, n: int, dtype: torch.dtype, device: torch.device | str | None) -> tuple[Bias | None, Positions]:
        """The bias of n tokens where it is all that this encoding does in attention."""
        name = type(self).__name__
        if self.rotation_regions(Positions.arange(1)) is not None:
            raise UserError(
                f"{name} turns some pairs otherwise than others, which no mask does: call fairseq_rpe.attend"
            )
        if self.is_content_dependent:
            raise UserError(f"{name} depends on what the tokens are, which no mask knows: call fairseq_rpe.attend")
        if self.rotates:
            alone = ", or turn them with encoding.rotate and use causal attention" if self.is_pure_rotation else ""
            raise UserError(f"{name} turns queries and keys, which is not a bias: call fairseq_rpe.attend{alone}")
        check_count("n, the number of tokens of a mask,", n)
        _check_device(device)
        first = next(self.parameters(), None)
        if first is not None and first.is_meta:
            raise UserError(f"{name} is on device 'meta', where parameters have no values: load or initialise it first")
        pos = Positions.arange(n, dtype=dtype, device=device if first is None else first.device)
        with torch.autocast(pos.k.device.type, enabled=False):
            return self.position_bias(pos), pos


def _check_device(device: torch.device | str | None) -> None:
    """Raises UserError: it is no device of this machine that holds numbers."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
        usable = torch.device(device).type != "meta"
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError):
        usable = False
    if not usable:
        kind = device if isinstance(device, str | torch.device) else described(device)
        raise UserError(f"device {str(kind)!r} is not available here: name one that is, such as 'cpu', or leave it out")
