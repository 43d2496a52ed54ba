"""What hooks of an encoding may return: shapes, dtypes and values that attention can use, or the line that is wrong."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from fairseq_rpe.core.bias import (
    Bias,
    DenseBias,
    KeyTableBias,
    PairBias,
    PointwiseBias,
    Positions,
    QueryKeyTableBias,
    QueryTableBias,
    RelativeValues,
    SumBias,
    ToeplitzBias,
    TokenBias,
)
from fairseq_rpe.core.contract import ContractError, call, refuse
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.rotation_regions import RotationRegion
from fairseq_rpe.encodings.base import DistanceBias, Encoding, PairwiseBias

WIDE = (torch.float32, torch.float64)  # dtypes that positions and biases keep
Shape = tuple[int, ...]
_FORMS = ", ".join(one.__name__ for one in get_args(Bias))


class Declined(Exception):
    """The encoding refuses an input by a UserError of its own, which it raises again where it is used so."""


class Hooks:
    """Calls the hooks of one encoding and checks what they return; H heads of width D, n tokens.

    Args:
        encoding: in evaluation mode.
        symbols: size of the dictionary, for encodings that read tokens.
        device: on which its parameters are.
    """

    def __init__(self, encoding: Encoding, symbols: int, device: torch.device) -> None:
        self.encoding, self.cls, self.symbols, self.device = encoding, type(encoding), symbols, device
        self.heads, self.width = encoding.heads, encoding.width
        self.head = self.width // self.heads
        taken = {self.heads, self.head, self.width}
        # no axis may be mistaken for another
        self.tokens = next(n for n in (11, 13, 17, 19) if n not in taken)
        self.distances = 64 if self.heads != 64 else 66

    def call(self, method: str, *args: Any, function: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        """What ``method``, or ``function`` in its place, returns.

        Raises:
            Declined: by a UserError of the encoding's own.
            ContractError: it fails in another way.
        """
        try:
            return call(self.cls, method, function or getattr(self.encoding, method), *args, **kwargs)
        except ContractError:
            raise
        except UserError as error:
            raise Declined from error

    def has(self, method: str) -> bool:
        """Whether the encoding has this hook of its own, by its class or set in ``setup``."""
        return method in vars(self.encoding) or self.overrides(Encoding, method)

    def overrides(self, family: type, method: str) -> bool:
        return getattr(self.cls, method) is not getattr(family, method)

    def author(self, method: str) -> str:
        """The method that a family's ``position_bias`` takes its values from."""
        if (
            method == "position_bias"
            and isinstance(self.encoding, DistanceBias)
            and self.cls.position_bias is DistanceBias.position_bias
        ):
            return "bias" if self.overrides(DistanceBias, "bias") else "head_bias"
        return "bias" if method == "position_bias" and self.cls.position_bias is PairwiseBias.position_bias else method

    def refuse(self, method: str, text: str) -> None:
        refuse(self.cls, method, text)

    def returned(self, method: str, value: Any, expected: str) -> None:
        """Refuse a value of another shape or type."""
        refuse(self.cls, method, f"returned {_shape_or_type(value)}, expected {expected}")

    def tensor(
        self, method: str, x: Any, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], finite: bool = True
    ) -> None:
        """Refuse what is no tensor of one of ``shapes`` and ``dtypes`` on this device, or not finite."""
        if not isinstance(x, Tensor) or tuple(x.shape) not in shapes:
            self.returned(method, x, " or ".join(map(str, dict.fromkeys(shapes))))
        if x.dtype not in dtypes:
            self.refuse(method, f"returned {x.dtype}, expected {' or '.join(map(str, dict.fromkeys(dtypes)))}")
        if x.device.type != self.device.type:
            self.refuse(method, f"returned a tensor on {x.device}, expected one on {self.device}")
        if finite and not bool(torch.isfinite(x).all()):
            self.refuse(method, f"returned {first_nonfinite(x)}, expected finite values")

    def log_bias(self, encoding: DistanceBias, d: Tensor) -> None:
        """Check ``bias``, or ``head_bias`` with ``head_parameters``, of the distances d (R,)."""
        shape = self.heads, len(d)
        if self.overrides(DistanceBias, "bias"):
            name, output = "bias", self.call("bias", d)
        else:
            name, numbers = "head_bias", self.call("head_parameters", d)
            if not isinstance(numbers, tuple):
                self.returned("head_parameters", numbers, "a tuple of tensors")
            for one in numbers:
                self.tensor("head_parameters", one, [(self.heads,)], (d.dtype,))
            output = self.call("head_bias", d, *(x[:, None] for x in numbers))
            if isinstance(output, Tensor) and output.shape in ((len(d),), (1, len(d)), (self.heads, 1)):
                output = output.expand(shape)
        self.tensor(name, output, [shape], (d.dtype,), finite=False)
        bad = output.isnan() | (output == torch.inf) | (output.isneginf() & (d == 0))
        if bool(bad.any()):
            head, column = bad.nonzero()[0].tolist()
            value = f"{output[head, column].item()} at d = {int(d[column]):,}"
            self.refuse(name, f"returned {value}, expected a finite log-bias")

    def prepared_positions(self, pos: Positions) -> Positions:
        output = self.call("prepare_positions", pos)
        if not isinstance(output, Positions):
            self.returned("prepare_positions", output, "Positions")
        for name in ("q", "k"):
            own, like = getattr(output, name), getattr(pos, name)
            if own.shape[1:] != like.shape[1:]:
                self.returned("prepare_positions", own, f"positions {name} of shape {tuple(like.shape)}")
        return output

    def rotation_positions(self, pos: Positions) -> tuple[list[Tensor], list[Tensor]]:
        """Positions at which queries and at which keys are rotated: their own, or those of each region."""
        regions = self.call("rotation_regions", pos)
        if regions is None:
            return [pos.q], [pos.k]
        if not isinstance(regions, tuple) or not all(isinstance(one, RotationRegion) for one in regions):
            self.returned("rotation_regions", regions, "a tuple of Region or None")
        i, j = pos.q[:, :, None], pos.k[:, None]
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        for one in regions:
            for at, like in ((one.q, pos.q), (one.k, pos.k)):
                self.tensor("rotation_regions", at, [(b, n) for b in (1, len(like)) for n in (1, like.shape[1])], WIDE)
            count = count + self.call("rotation_regions", i, j, function=one.covers).long()
        if bool(((count > 1) & (i >= j)).any()):
            self.refuse("rotation_regions", "returned regions that share pairs, expected each pair in at most one")
        return [one.q for one in regions], [one.k for one in regions]

    def position_bias(self, method: str, form: Any, pos: Positions, rows: int = 0) -> None:
        """Check the type and the tensors of a bias; ``rows`` of queries and keys, or 0 where positions alone decide."""
        n, m, heads = pos.q.shape[1], pos.k.shape[1], self.heads
        batch = [rows] if rows else [1, len(pos.k)]

        def fits(name: str, x: Any, *shapes: tuple[int | None, ...]) -> None:
            got = tuple(x.shape) if isinstance(x, Tensor) else ()
            if not any(len(got) == len(s) and all(b in (None, a) for a, b in zip(got, s, strict=True)) for s in shapes):
                words = dict.fromkeys(str(s).replace("None", "any") for s in shapes)
                kind = f"{type(form).__name__}.{name}"
                self.refuse(method, f"returned {kind} {_shape_or_type(x)}, expected {' or '.join(words)}")

        if isinstance(form, SumBias):
            for one in form.forms:
                self.position_bias(method, one, pos, rows)
        elif isinstance(form, ToeplitzBias):
            fits("table", form.table, (heads, None))
        elif isinstance(form, DenseBias):
            fits("bias", form.bias, *((b, heads, n, m) for b in batch))
        elif isinstance(form, PointwiseBias):
            for one in form.numbers:
                fits("head_parameters", one, (heads,))
        elif isinstance(form, TokenBias):
            fits("query", form.query, *((b, heads, n) for b in batch))
            fits("key", form.key, *((b, heads, m) for b in batch))
        elif isinstance(form, QueryTableBias | KeyTableBias | QueryKeyTableBias):
            if not isinstance(form, KeyTableBias):
                fits("query", form.query, *((b, heads, n, None) for b in batch))
            if not isinstance(form, QueryTableBias):
                fits("key", form.key, *((b, heads, m, None) for b in batch))
            width = form.key.shape[3] if isinstance(form, KeyTableBias) else form.query.shape[3]
            # one factor of each distance, in place of one for each element, is enough for a product of all three
            widths = (width, 1) if isinstance(form, QueryKeyTableBias) else (width,)
            fits("vectors", form.vectors, *((h, None, w) for h in (1, heads) for w in widths))
        elif not isinstance(form, PairBias):
            self.returned(method, form, f"a form ({_FORMS}) or None")

    def bias(self, method: str, output: Any, pos: Positions, dtypes: Sequence[torch.dtype], rows: int = 0) -> None:
        """Refuse a bias that is not (B or 1, H, n, m), or no number, or that hides a token from itself."""
        n, m = pos.q.shape[1], pos.k.shape[1]
        self.tensor(method, output, [(b, self.heads, n, m) for b in (1, max(rows, len(pos.k)))], dtypes, finite=False)
        hidden = future(n, m, self.device)
        bad = output.isnan() | (output == torch.inf)
        if bool((bad & ~hidden).any()):
            self.refuse(method, f"returned {first_nonfinite(output[bad & ~hidden])}, expected a finite log-bias")
        if bool(bad.any()):
            value = first_nonfinite(output[bad])
            self.refuse(method, f"returned {value} for keys after the query, expected finite values")
        if bool(output.diagonal(m - n, -2, -1).isneginf().any()):
            self.refuse(method, "returned -inf for a token and itself, expected a finite log-bias")

    def remapped_weights(self, q: Tensor, k: Tensor, pos: Positions) -> Tensor:
        """(B, H, n, m) weights of the scores that ``transform_scores`` makes."""
        n, m = q.shape[2], k.shape[2]
        hidden = future(n, m, q.device)
        scores = (torch.matmul(q, k.mT) * q.shape[3] ** -0.5).masked_fill(hidden, float("-inf"))
        output = self.call("transform_scores", scores, q, pos)
        self.tensor("transform_scores", output, [tuple(scores.shape)], (scores.dtype,), finite=False)
        bad = (output.isnan() | (output == torch.inf)) & ~hidden
        if bool(bad.any()):
            value = first_nonfinite(output[bad])
            self.refuse("transform_scores", f"returned {value} where a key is seen; scores of hidden keys come as -inf")
        if bool(output.diagonal(m - n, -2, -1).isneginf().any()):
            self.refuse("transform_scores", "returned -inf for a token and itself, expected a finite score")
        return output.masked_fill(hidden, float("-inf")).softmax(-1)

    def relative_values(self, pos: Positions) -> RelativeValues | None:
        output = self.call("relative_values", pos)
        if output is None:
            return None
        if not isinstance(output, RelativeValues):
            self.returned("relative_values", output, "a Reading or None")
        columns = output.vectors.shape[1] if output.vectors.dim() == 3 else 1
        self.tensor("relative_values", output.vectors, [(h, columns, self.head) for h in (1, self.heads)], WIDE)
        return output

    def token_features(self, x: Tensor) -> Tensor | None:
        """(B, H, n, E) of ``token_features`` for a layer's input x (B, n, C)."""
        output = self.call("token_features", x)
        if output is None:
            return None
        shape = x.shape[0], self.heads, x.shape[1]
        if not isinstance(output, Tensor) or output.dim() != 4 or output.shape[:3] != shape:
            self.returned("token_features", output, f"({', '.join(map(str, shape))}, E)")
        self.tensor("token_features", output, [tuple(output.shape)], (x.dtype, *WIDE))
        return output


def future(n: int, m: int, device: torch.device) -> Tensor:
    """(n, m) bool: the key is after the query, the queries being the last n of m tokens."""
    return torch.ones(n, m, dtype=torch.bool, device=device).triu(m - n + 1)


def first_nonfinite(x: Tensor) -> float:
    """The first value that is not finite."""
    return float(x[~torch.isfinite(x)][0].item())


def _shape_or_type(x: Any) -> object:
    return tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
