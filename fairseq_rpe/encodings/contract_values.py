"""Calls the hooks of a user's encoding and checks shapes, dtypes and values of what they return.

Each method of :class:`HookProbe` checks the value of one hook, and raises a ContractError that names the encoding's
class, the hook and what it should return.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from fairseq_rpe.core.bias import (
    Bias,
    DenseBias,
    KeyTableBias,
    PairBias,
    PairGateBias,
    PointwiseBias,
    QueryKeyTableBias,
    QueryTableBias,
    RelativeValues,
    SumBias,
    ToeplitzBias,
    TokenBias,
)
from fairseq_rpe.core.contract import ContractError, call_user_method, raise_contract_error
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.positions import Positions
from fairseq_rpe.core.rotation_regions import RotationRegion
from fairseq_rpe.core.score_product import ScoreProduct, VectorProduct
from fairseq_rpe.encodings.base import DistanceBias, Encoding, PairwiseBias

HOOKS = (
    "embed",
    "rotate",
    "value",
    "position_bias",
    "content_bias",
    "score_product",
    "transform_scores",
    "transform_scores_with_state",
    "relative_values",
    "prepare_positions",
    "rotation",
    "token_features",
    "rotation_regions",
)
OTHER_NAMES = (
    "setup",
    "log_bias_formulas",
    "logged_scalars",
    "bias_profile",
    "Config",
    "formula",
    "paper",
    "family",
    "figure_options",
    "dape_base",
    "position_limit",
    "sharing_modes",
    "tie",
    "position_type",
    "max_queries_per_call",
    "length_dependent",
    "needs_token_ids",
    "fixed_rotation",
    "bounded_reason",
    "dependence",
    "key_state_width",
    "transforms_keys",
    "returns_log_weights",
    "rotated_width_factor",
)
WIDE = (torch.float32, torch.float64)  # dtypes that positions and biases keep
Shape = tuple[int, ...]
_ROUNDING = 1e-5  # by which a sum of float32 weights may exceed 1
_BIAS_TYPES = ", ".join(bias_type.__name__ for bias_type in get_args(Bias))


class Declined(Exception):
    """The encoding refuses an input by a UserError. Users will see that error, so this is not a violation."""


class HookProbe:
    """Calls the hooks of one encoding with H heads of width D and n tokens, and checks what they return.

    Args:
        encoding: the encoding, in evaluation mode.
        symbols: number of symbols of the dictionary, for encodings that need token ids.
        device: device of the encoding's parameters.

    Attributes:
        heads: H.
        width: model width C = H·D.
        head: width D of a head.
        tokens: number n of tokens of a sample.
        distances: number R of distances at which a log-bias is checked.
    """

    def __init__(self, encoding: Encoding, symbols: int, device: torch.device) -> None:
        self.encoding, self.cls, self.symbols, self.device = encoding, type(encoding), symbols, device
        self.heads, self.width = encoding.heads, encoding.width
        self.head = self.width // self.heads
        taken = {self.heads, self.head, self.width}
        # axes have different sizes, so that a hook that confuses two of them returns a wrong shape; three sizes are
        # taken, so one of four primes is free
        self.tokens = next(n for n in (11, 13, 17, 19) if n not in taken)
        self.distances = 64 if self.heads != 64 else 66

    def call(self, method: str, *args: Any, function: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """Call a hook of the encoding.

        Args:
            method: name of the hook, also for the error.
            args: positional arguments of the hook.
            function: function to call instead, such as one that the hook returned.
            kwargs: keyword arguments of the hook.

        Returns:
            What the hook returns, unchecked.

        Raises:
            Declined: the encoding raises a UserError.
            ContractError: the encoding raises another error.
        """
        try:
            return call_user_method(self.cls, method, function or getattr(self.encoding, method), *args, **kwargs)
        except ContractError:
            raise
        except UserError as error:
            raise Declined from error

    def has(self, method: str) -> bool:
        """Return whether the encoding defines this hook, in its class or in ``setup``."""
        return method in vars(self.encoding) or self.overrides(Encoding, method)

    def overrides(self, family: type, method: str) -> bool:
        """Return whether the encoding's class overrides ``method`` of ``family``."""
        return getattr(self.cls, method) is not getattr(family, method)

    def user_method(self, method: str) -> str:
        """Return the method that the user wrote and that determines the result of ``method``, for error messages.

        It differs for ``position_bias`` of the families DistanceBias and PairwiseBias, which calls ``bias``.
        """
        if method != "position_bias":
            return method
        if isinstance(self.encoding, DistanceBias) and self.cls.position_bias is DistanceBias.position_bias:
            return "bias" if self.overrides(DistanceBias, "bias") else "head_bias"
        return "bias" if self.cls.position_bias is PairwiseBias.position_bias else method

    def refuse(self, method: str, text: str) -> NoReturn:
        """Raise a ContractError about ``method``."""
        raise_contract_error(self.cls, method, text)

    def refuse_value(self, method: str, value: Any, expected: str) -> NoReturn:
        """Refuse a returned value of a wrong shape or type."""
        raise_contract_error(self.cls, method, f"returned {_shape_or_type(value)}, expected {expected}")

    def check_tensor(
        self, method: str, x: Any, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], finite: bool = True
    ) -> None:
        """Refuse a value that is not a tensor as expected.

        Args:
            method: name of the hook that returned the value.
            x: the value.
            shapes: shapes that are allowed.
            dtypes: dtypes that are allowed.
            finite: whether every entry must be finite.

        Raises:
            ContractError: ``x`` is no tensor or on another device, or its shape, its dtype or an entry is not allowed.
        """
        if not isinstance(x, Tensor) or tuple(x.shape) not in shapes:
            self.refuse_value(method, x, " or ".join(map(str, dict.fromkeys(shapes))))
        if x.dtype not in dtypes:
            self.refuse(method, f"returned {x.dtype}, expected {' or '.join(map(str, dict.fromkeys(dtypes)))}")
        if x.device.type != self.device.type:
            self.refuse(method, f"returned a tensor on {x.device}, expected one on {self.device}")
        if finite and not bool(torch.isfinite(x).all()):
            self.refuse(method, f"returned {first_nonfinite(x)}, expected finite values")

    def check_log_bias(self, encoding: DistanceBias, d: Tensor) -> None:
        """Check ``bias``, or ``head_bias`` and ``head_parameters`` in its place, at the distances d (R,)."""
        if self.overrides(DistanceBias, "bias"):
            name, output = "bias", self.call("bias", d)
        else:
            name, output = "head_bias", self._call_head_bias(d)
        self.check_tensor(name, output, [(self.heads, len(d))], (d.dtype,), finite=False)
        # -inf hides a distance, but a token must see itself
        bad = output.isnan() | (output == torch.inf) | (output.isneginf() & (d == 0))
        if bool(bad.any()):
            head, column = bad.nonzero()[0].tolist()
            value = f"{output[head, column].item()} at d = {int(d[column]):,}"
            self.refuse(name, f"returned {value}, expected a finite log-bias")

    def _call_head_bias(self, d: Tensor) -> Any:
        """Return ``head_bias`` of all heads (H, R), after a check of ``head_parameters``."""
        parameters = self.call("head_parameters", d)
        if not isinstance(parameters, tuple):
            self.refuse_value("head_parameters", parameters, "a tuple of tensors")
        for parameter in parameters:
            self.check_tensor("head_parameters", parameter, [(self.heads,)], (d.dtype,))
        output = self.call("head_bias", d, *(x[:, None] for x in parameters))
        if isinstance(output, Tensor) and output.shape in ((len(d),), (1, len(d)), (self.heads, 1)):
            return output.expand(self.heads, len(d))
        return output

    def checked_positions(self, pos: Positions) -> Positions:
        """Return the result of ``prepare_positions``, checked."""
        output = self.call("prepare_positions", pos)
        if not isinstance(output, Positions):
            self.refuse_value("prepare_positions", output, "Positions")
        for name in ("q", "k"):
            value, like = getattr(output, name), getattr(pos, name)
            if value.shape[1:] != like.shape[1:]:
                self.refuse_value("prepare_positions", value, f"positions {name} of shape {tuple(like.shape)}")
        return output

    def checked_rotation(
        self, rotate: Callable[..., Tensor], x: Tensor, at: Tensor, pos: Positions, key: bool
    ) -> Tensor:
        """Return the result (B, H, n, E) of ``rotate`` for queries or keys x (B, H, n, D), checked."""
        output = self.call("rotate", x, at, pos, function=rotate, key=key)
        width = self.encoding.rotated_width_factor * x.shape[3]
        self.check_tensor("rotate", output, [(*x.shape[:3], width)], (x.dtype,))
        return output

    def _check_equal_widths(self, method: str) -> None:
        """Refuse a hook whose vectors are as wide as a head if ``rotate`` makes queries and keys wider."""
        if self.encoding.rotated_width_factor != 1:
            self.refuse(method, "cannot be combined with a rotated_width_factor other than 1: leave one of them out")

    def checked_rotation_positions(self, pos: Positions) -> tuple[list[Tensor], list[Tensor]]:
        """Check ``rotation_regions``, and return the positions for which queries and keys are rotated.

        Args:
            pos: positions of the queries and keys.

        Returns:
            Positions of queries and positions of keys: a list with one tensor for each region, or with only the true
            positions for an encoding without regions.
        """
        regions = self.call("rotation_regions", pos)
        if regions is None:
            return [pos.q], [pos.k]
        self._check_equal_widths("rotation_regions")
        if not isinstance(regions, tuple) or not all(isinstance(region, RotationRegion) for region in regions):
            self.refuse_value("rotation_regions", regions, "a tuple of RotationRegion or None")
        i, j = pos.q[:, :, None], pos.k[:, None]  # (B or 1, n, 1), (B or 1, 1, m)
        # number of regions that each pair is in: (), then (B or 1, n, m)
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        for region in regions:
            for at, like in ((region.q, pos.q), (region.k, pos.k)):
                self.check_tensor(
                    "rotation_regions", at, [(b, n) for b in (1, len(like)) for n in (1, like.shape[1])], WIDE
                )
            count = count + self.call("rotation_regions", i, j, function=region.covers).long()
        if bool(((count > 1) & (i >= j)).any()):
            self.refuse("rotation_regions", "returned regions that share pairs, expected each pair in at most one")
        return [region.q for region in regions], [region.k for region in regions]

    def check_bias_type(self, method: str, bias: Any, pos: Positions, rows: int = 0) -> None:
        """Check the type of a bias and the shapes of its tensors.

        Args:
            method: name of the hook that returned the bias.
            bias: what the hook returned, not None.
            pos: positions of the n queries and m keys.
            rows: batch size B of the queries and keys that the bias depends on; 0 for a bias of positions alone.

        Raises:
            ContractError: ``bias`` is of no type of bias, or one of its tensors has a wrong shape.
        """
        n, m, heads = pos.q.shape[1], pos.k.shape[1], self.heads
        batches = [rows] if rows else [1, len(pos.k)]
        if isinstance(bias, SumBias):
            for term in bias.terms:
                self.check_bias_type(method, term, pos, rows)
        elif isinstance(bias, ToeplitzBias):
            self._check_field(method, bias, "table", [(heads, None)])
        elif isinstance(bias, DenseBias):
            self._check_field(method, bias, "bias", [(b, heads, n, m) for b in batches])
        elif isinstance(bias, PointwiseBias):
            for parameter in bias.parameters:
                self._check_field(method, bias, "parameters", [(heads,)], parameter)
        elif isinstance(bias, TokenBias):
            self._check_field(method, bias, "query", [(b, heads, n) for b in batches])
            self._check_field(method, bias, "key", [(b, heads, m) for b in batches])
        elif isinstance(bias, PairGateBias):
            self._check_field(method, bias, "query", [(b, heads, n, None) for b in batches])
            self._check_field(method, bias, "key", [(b, heads, m, bias.query.shape[3]) for b in batches])
            self._check_field(method, bias, "repeated", [(b, heads, m) for b in batches])
        elif isinstance(bias, QueryTableBias | KeyTableBias | QueryKeyTableBias):
            if not isinstance(bias, KeyTableBias):
                self._check_field(method, bias, "query", [(b, heads, n, None) for b in batches])
            if not isinstance(bias, QueryTableBias):
                self._check_field(method, bias, "key", [(b, heads, m, None) for b in batches])
            width = bias.key.shape[3] if isinstance(bias, KeyTableBias) else bias.query.shape[3]
            # a product of query, key and vector also allows one factor per distance in place of D
            widths = (width, 1) if isinstance(bias, QueryKeyTableBias) else (width,)
            self._check_field(method, bias, "vectors", [(h, None, w) for h in (1, heads) for w in widths])
        elif not isinstance(bias, PairBias):
            self.refuse_value(method, bias, f"a bias ({_BIAS_TYPES}) or None")

    def _check_field(
        self, method: str, bias: Any, field: str, shapes: Sequence[tuple[int | None, ...]], value: Any = None
    ) -> None:
        """Refuse a bias whose tensor in ``field`` has another shape than one of ``shapes``, where None is any size.

        ``value`` is one of the tensors of a field that holds several.
        """
        tensor = getattr(bias, field) if value is None else value
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
        if not any(_matches(shape, allowed) for allowed in shapes):
            words = dict.fromkeys(str(allowed).replace("None", "any") for allowed in shapes)
            name = f"{type(bias).__name__}.{field}"
            self.refuse(method, f"returned {name} {_shape_or_type(tensor)}, expected {' or '.join(words)}")

    def check_dense_bias(
        self, method: str, output: Any, pos: Positions, dtypes: Sequence[torch.dtype], rows: int = 0
    ) -> None:
        """Refuse a dense bias of a wrong shape or dtype, with NaN or inf, or with -inf for a token and itself.

        Args:
            method: name of the hook that returned the bias.
            output: the dense bias, expected as (B or 1, H, n, m).
            pos: positions of the n queries and m keys.
            dtypes: dtypes that are allowed.
            rows: batch size B of the queries and keys that the bias depends on; 0 for a bias of positions alone.

        Raises:
            ContractError: the bias is refused.
        """
        n, m = pos.q.shape[1], pos.k.shape[1]
        self.check_tensor(
            method, output, [(b, self.heads, n, m) for b in (1, max(rows, len(pos.k)))], dtypes, finite=False
        )
        hidden = future(n, m, self.device)
        bad = output.isnan() | (output == torch.inf)
        if bool((bad & ~hidden).any()):
            self.refuse(method, f"returned {first_nonfinite(output[bad & ~hidden])}, expected a finite log-bias")
        if bool(bad.any()):
            value = first_nonfinite(output[bad])
            self.refuse(method, f"returned {value} for keys after the query, expected finite values")
        if bool(output.diagonal(m - n, -2, -1).isneginf().any()):
            self.refuse(method, "returned -inf for a token and itself, expected a finite log-bias")

    def checked_attention_weights(self, q: Tensor, k: Tensor, pos: Positions) -> Tensor:
        """Check ``transform_scores`` and return the attention weights (B, H, n, m) of the scores that it returns.

        Args:
            q: (B, H, n, D).
            k: (B, H, m, D).
            pos: positions of the n queries and m keys.
        """
        scores = _content_scores(q, k)
        return self._weights("transform_scores", self.call("transform_scores", scores, q, pos), scores)

    def checked_products(
        self, q: Tensor, k: Tensor, pos: Positions, features: Tensor | None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Check ``score_product``; return its products (B, H, n, m) with 0 for later keys, and the transformed keys.

        Args:
            q: (B, H, n, D).
            k: (B, H, m, D).
            pos: positions of the n queries and m keys.
            features: (B, H, m, E) token features, or None.
            state: (B, H, m - n, D) keys that earlier tokens have transformed, or None.
        """
        method, hidden = "score_product", future(q.shape[2], k.shape[2], q.device)
        product = self.call(method, q, k, pos, features, None, state)
        if not isinstance(product, ScoreProduct):
            self.refuse_value(method, product, "a ScoreProduct")
        is_declared = self.encoding.has_vector_product and not self.encoding.transforms_keys
        if isinstance(product, VectorProduct) != is_declared:
            self.refuse(
                method,
                "returns a VectorProduct exactly if has_vector_product is True and transforms_keys is False: "
                f"got a {type(product).__name__}",
            )
        results = []
        for form in (product, self.call(method, function=product.prepare_blocks)):
            output = self.call(method, function=form.products)
            self.check_tensor(method, output, [(*q.shape[:3], k.shape[2])], WIDE)
            results.append(output.masked_fill(hidden, 0.0))
        if not torch.allclose(results[0], results[1], rtol=1e-3, atol=1e-3):
            self.refuse(method, "gives other products after prepare_blocks: let both forms compute the same")
        state = self.call(method, function=product.key_state) if self.encoding.transforms_keys else None
        if self.encoding.transforms_keys:
            self.check_tensor(method, state, [tuple(k.shape)], WIDE)
        return results[0], state

    def checked_stateful_weights(
        self, q: Tensor, k: Tensor, pos: Positions, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Check ``transform_scores_with_state``, and return attention weights (B, H, n, m) and state (B, 1, m, E).

        Args:
            q: (B, H, n, D).
            k: (B, H, m, D).
            pos: positions of the n queries and m keys.
            state: (B, 1, m - n, E) after the first m - n queries; None if there are none.
        """
        method, scores = "transform_scores_with_state", _content_scores(q, k)
        if self.encoding.key_state_width < 1:
            self.refuse(method, "is never called while key_state_width is 0: set the number of numbers of each key")
        zeros = scores.new_zeros(len(k), 1, k.shape[2], self.encoding.key_state_width)
        state = zeros if state is None else torch.cat([state, zeros[:, :, state.shape[2] :]], dim=2)
        output = self.call(method, scores, q, pos, state)
        if not isinstance(output, tuple) or len(output) != 2:
            self.refuse_value(method, output, "scores and state")
        self.check_tensor(method, output[1], [tuple(zeros.shape)], (scores.dtype,))
        return self._weights(method, output[0], scores), output[1]

    def _weights(self, method: str, output: Any, scores: Tensor) -> Tensor:
        """Check what a hook returned for scores (B, H, n, m), and return the attention weights, of the same shape."""
        n, m = scores.shape[2:]
        hidden = future(n, m, scores.device)
        self.check_tensor(method, output, [tuple(scores.shape)], (scores.dtype,), finite=False)
        bad = (output.isnan() | (output == torch.inf)) & ~hidden
        if bool(bad.any()):
            value = first_nonfinite(output[bad])
            self.refuse(method, f"returned {value} for a visible key; scores of hidden keys are -inf")
        output = output.masked_fill(hidden, float("-inf"))
        if not self.encoding.returns_log_weights:
            if bool(output.diagonal(m - n, -2, -1).isneginf().any()):
                self.refuse(method, "returned -inf for a token and itself, expected a finite score")
            return output.softmax(-1)
        sums = output.exp().sum(-1)
        if bool((sums > 1 + _ROUNDING).any()):
            self.refuse(method, f"returned weights with a sum of {float(sums.max()):g}, expected at most 1")
        return output.exp()

    def checked_relative_values(self, pos: Positions) -> RelativeValues | None:
        """Return the result of ``relative_values``, checked."""
        output = self.call("relative_values", pos)
        if output is None:
            return None
        if not isinstance(output, RelativeValues):
            self.refuse_value("relative_values", output, "RelativeValues or None")
        self._check_equal_widths("relative_values")
        columns = output.vectors.shape[1] if output.vectors.dim() == 3 else 1
        self.check_tensor("relative_values", output.vectors, [(h, columns, self.head) for h in (1, self.heads)], WIDE)
        return output

    def checked_token_features(self, x: Tensor) -> Tensor | None:
        """Return the result (B, H, n, E) of ``token_features`` for a layer's input x (B, n, C), checked."""
        output = self.call("token_features", x)
        if output is None:
            return None
        shape = x.shape[0], self.heads, x.shape[1]
        if not isinstance(output, Tensor) or output.dim() != 4 or output.shape[:3] != shape:
            self.refuse_value("token_features", output, f"({', '.join(map(str, shape))}, E)")
        self.check_tensor("token_features", output, [tuple(output.shape)], (x.dtype, *WIDE))
        return output


def _content_scores(q: Tensor, k: Tensor) -> Tensor:
    """Return q·kᵀ / sqrt(D) (B, H, n, m) of q (B, H, n, D) and k (B, H, m, D), -inf for keys after the query."""
    hidden = future(q.shape[2], k.shape[2], q.device)
    return (torch.matmul(q, k.mT) * q.shape[3] ** -0.5).masked_fill(hidden, float("-inf"))


def future(n: int, m: int, device: torch.device) -> Tensor:
    """Return (n, m) bool, True where the key is after the query; the queries are the last n of the m tokens."""
    return torch.ones(n, m, dtype=torch.bool, device=device).triu(m - n + 1)


def first_nonfinite(x: Tensor) -> float:
    """Return the first entry of x that is not finite; there must be one."""
    return float(x[~torch.isfinite(x)][0].item())


def _matches(shape: Shape, pattern: tuple[int | None, ...]) -> bool:
    """Whether a shape has the sizes of ``pattern``, where None is any size."""
    if len(shape) != len(pattern):
        return False
    return all(size in (None, actual) for actual, size in zip(shape, pattern, strict=True))


def _shape_or_type(x: Any) -> object:
    return tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
