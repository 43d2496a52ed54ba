"""What an encoding does with the options that every encoding has, such as a window."""

from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fairseq_rpe.core.attention_options import AttentionOptions, attention_options
from fairseq_rpe.core.bias import Bias
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.log_bias import LogBias
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.window_bias import hide_far_keys
from fairseq_rpe.encodings.interface import EncodingInterface
from fairseq_rpe.encodings.query_scale import QueryScale


class OptionalAttention(EncodingInterface):
    """Base class of :class:`~.base.Encoding` with the options of ``core.attention_options``.

    Attributes:
        limits_visibility: whether the encoding itself hides keys by their distance, so that it has no window besides.
        attention_options: options of the spec.
        query_scale: module with the factors of queries (option ``query_scale``), or None.
        null_logit: (H,) learned logits (option ``null_logit=learned``), or None; :meth:`null_logits` covers all cases.
    """

    limits_visibility: ClassVar[bool] = False
    config: Any
    length: int | None
    attention_options: AttentionOptions
    query_scale: QueryScale | None
    null_logit: Tensor | None

    def apply_attention_options(self) -> None:
        """Create what the attention options of the spec need.

        Raises:
            UserError: the encoding cannot have one of the options.
        """
        self.attention_options = options = attention_options(self.config)
        self.register_module("query_scale", None)
        self.register_parameter("null_logit", None)
        if options.is_default:
            return
        self._check_attention_options(options)
        if options.query_scale != "none":
            self.query_scale = QueryScale(options, self.heads, self.length)
        if options.null_logit == "learned":
            self.null_logit = nn.Parameter(torch.zeros(self.heads))

    def _check_attention_options(self, options: AttentionOptions) -> None:
        """Raise UserError if the encoding cannot have these options."""
        name, has_regions = type(self).__name__, self.rotation_regions(Positions.arange(1)) is not None
        if options.hides_keys and (self.limits_visibility or has_regions or self.needs_all_scores):
            reason = "hides keys itself" if self.limits_visibility else "rotates pairs by region"
            if self.needs_all_scores:
                reason = "needs the scores of all keys"
            raise UserError(f"{name} {reason}: leave local and block out")
        if options.query_scale != "none" and self.is_content_dependent:
            raise UserError(
                f"{name} reads queries or scores besides q·k, which query_scale would change too: leave it out"
            )
        if options.null_logit != "none" and self.returns_log_weights:
            raise UserError(f"{name} computes weights without a softmax, which null_logit is a part of: leave it out")
        if (options.softcap or options.null_logit != "none") and has_regions:
            raise UserError(f"{name} merges the attention of several regions: leave softcap and null_logit out")

    def null_logits(self, like: Tensor) -> Tensor | None:
        """Return the null logits (H,) of the option ``null_logit``, zeros on the device of ``like``, or None."""
        if self.attention_options.null_logit == "zero":
            return like.new_zeros(self.heads)
        return self.null_logit

    def share_parameters(self, first: Self) -> None:
        """Replace all parameters and buffers by those of ``first``, except those of attention options."""
        self._parameters.update({name: p for name, p in first._parameters.items() if name != "null_logit"})
        self._modules.update({name: module for name, module in first._modules.items() if name != "query_scale"})
        self._buffers.update(first._buffers)

    def attention_bias(self, pos: Positions) -> Bias | None:
        """Return the bias that attention adds: ``position_bias``, and -inf outside the window of the option ``local``.

        Args:
            pos: positions of the queries and keys, after ``prepare_positions``.
        """
        bias, window = self.position_bias(pos), self.attention_options.local
        return hide_far_keys(bias, pos, self.heads, window) if window else bias

    @property
    def beyond_bias(self) -> str:
        """Option of every encoding, besides the window, that changes attention beyond its bias; "" if none does."""
        options = self.attention_options
        for name in ("block", "query_scale", "softcap", "null_logit"):
            if getattr(options, name) != getattr(AttentionOptions, name):
                return name
        return ""

    def visible_log_bias_formulas(self) -> list[str] | list[LogBias] | None:
        """Return ``log_bias_formulas`` with the number of keys that the options ``local`` and ``block`` leave."""
        formulas, options = self.log_bias_formulas(), self.attention_options
        if formulas is None or not options.hides_keys:
            return formulas
        keys = options.local or options.block
        complete = [f if isinstance(f, LogBias) else LogBias(f) for f in formulas]
        # a note on the parameters that decide convergence holds for a sum over all distances only
        notes = [f.note if f.formula == "0" else "" for f in complete]
        return [replace(f, note=note, keys=min(keys, f.keys or keys)) for f, note in zip(complete, notes, strict=True)]

    def log_bias_formulas(self) -> list[str] | list[LogBias] | None:
        """Return the log-bias as a formula for each head; see :meth:`.base.Encoding.log_bias_formulas`."""
        return None
