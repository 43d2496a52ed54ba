"""FIRE represents the other distance biases: its Theorem 3.1 as parameters that can be run.

Source: "Functional Interpolation for Relative Positions Improves Long Context Transformers" (arXiv 2310.04418),
Theorem 3.1 and Appendix A.2, for b(i, j) = f(ψ(i-j) / ψ(max(L, i))), Eq. 4. All constructions take L = N for distances
d = 0 … N-1: every query i < N then divides by the same ψ(L), so u_d = ψ(d) / ψ(L) depends on the distance alone, and f
has to meet the bias at N points u_0 = 0 < u_1 < … < u_{N-1} only. That parameters exist does not imply that training
finds them.

:func:`fit_fire` uses ReLUs, as FIRE's experiments do; the published listing divides by ψ(L) + 1e-6.

- A line, no hidden layer: ALiBi with ψ(x) = x; Kerple's -p·ln(1 + a·d) with ψ(x) = ln(c·x + 1), c = a. One FIRE has one
  c, so heads with different a take a FIRE each, or share one made as follows.
- A piecewise linear f, one hidden layer, ψ(x) = x: f(u) = y_0 + s_1·relu(u) + Σ_k (s_{k+1} - s_k)·relu(u - u_k),
  s_k the slope from point k-1 to point k. Points at which no head bends need no unit: T5 bends twice at each of its
  buckets, Kerple-power and Sandwich at all N-2 inner points.

:func:`paper_fits` is the paper's own proof, with f(u) = Σ_k w_k·σ(v_k·u + s_k) + c and an activation σ for each bias:

- ALiBi, -k·d: no hidden layer, ψ(x) = x, f(u) = -k·L·u.
- Kerple's -p·ln(1 + a·d): no hidden layer, ψ(x) = ln(a·x + 1), f(u) = -p·ψ(L)·u.
- Kerple's -a·d^p: σ(x) = x^p, ψ(x) = x, f(u) = -a·L^p·u^p.
- Sandwich, r·Σ_k cos(d·ω_k): σ = cos, ψ(x) = x, v_k = L·ω_k, w_k = r.
- T5's table: σ(x) = 1 where x >= 0, otherwise 0, ψ(x) = x; a unit for each bucket after the first, whose w_k is the
  step of the table from the bucket before.

Running that proof shows four points that it does not mention:

- The heads of a FIRE share ψ, so Kerple-log heads with different a take a FIRE each, and Kerple-power heads with
  different p take an activation for each unit.
- None of the activations is the ReLU of FIRE's experiments, and 1 where x >= 0 has no gradient to train with.
- A step at u_k = d_k / L, d_k the first distance of a bucket, holds in Eq. 4 but not in the listing, which adds 1e-6 to
  ψ(max(L, i)): u then stays below u_k at d_k, where the bias is that of the bucket before
  (:attr:`PaperFit.on_edge`). Here steps lie half a token earlier, which holds for both.
- For Sandwich the paper prints ω_k = 10000^(-k/d') from k = 1, where Sandwich's own listing starts with k = 0. The
  frequencies here are those of the encoding; :attr:`PaperFit.as_printed` is the error with the printed ones.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import DistanceBias, Encoding, build, names
from fairseq_rpe.encodings.alibi import Alibi
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.encodings.fire import Fire
from fairseq_rpe.encodings.kerple import KerpleLog, KerplePower
from fairseq_rpe.encodings.sandwich import Sandwich
from fairseq_rpe.encodings.t5 import T5Bias

LONGEST = 4096  # largest number of distances
TOLERANCE = 1e-6  # largest error of a fit, in nats
_MAX_CURVATURE = 1e-9  # nats; a line that is bent by rounding alone stays far below it
_LISTING_EPSILON = 1e-6  # that the published listing adds to the denominator ψ(max(L, i))
_STEP = "1 where x >= 0"
_SIGMAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x": lambda x, p: x,
    "x^p": lambda x, p: x.clamp_min(0).pow(p),
    "cos(x)": lambda x, p: x.cos(),
    _STEP: lambda x, p: (x >= 0).to(x.dtype),
}


@dataclass(frozen=True)
class FireFit:
    """A ``fire`` encoding in float64 that equals some heads of another encoding for all 0 <= j <= i < N.

    Attributes:
        heads: numbers of the heads, from 1.
        spec: spec that builds the encoding, up to its parameters.
        fire: fitted encoding.
        error: largest difference between the two biases over all distances, in nats.
        error_float32: the same with float32 parameters and arithmetic, as in training.
    """

    heads: tuple[int, ...]
    spec: str
    fire: Fire
    error: float
    error_float32: float

    @property
    def c(self) -> float | None:
        """The c of ψ(x) = ln(c·x + 1), or None if ψ(x) = x."""
        return None if self.fire.c is None else self.fire.c.item()

    @property
    def threshold(self) -> float:
        """The threshold L in tokens."""
        return self.fire.logged_scalars()["L"].item()

    @property
    def hidden(self) -> int:
        """Number of ReLUs of the hidden layer, 0 if there is none."""
        return self.fire.config.hidden if self.fire.config.hidden_layers else 0

    def values(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the bias (H', N) float64 over all distances, computed in ``dtype``."""
        if dtype == torch.float64:
            return _values(self.fire, round(self.threshold))
        narrow = build(self.spec, self.fire.heads, self.fire.heads)
        narrow.load_state_dict(self.fire.state_dict())
        return _values(narrow, round(self.threshold))

    def as_dict(self) -> dict[str, Any]:
        """Return the fit for a JSON file, with exact floats; ``state`` is the module's state dict."""
        shape = {"hidden_layers": self.fire.config.hidden_layers, "hidden": self.hidden}
        errors = {"error": self.error, "error_float32": self.error_float32}
        state = {name: value.tolist() for name, value in self.fire.state_dict().items()}
        start = {"heads": list(self.heads), "fire": self.spec, "c": self.c, "L": self.threshold}
        return {**start, **shape, **errors, "state": state}

    def __str__(self) -> str:
        """Describe shape, arrays and error in a few lines."""
        layers = f"one hidden layer of {self.hidden} ReLUs" if self.hidden else "no hidden layer: f is a line"
        psi = "x" if self.c is None else f"ln(c*x + 1), c = {self.c:.6g}"
        lines = [f"{format_heads(self.heads)}: {layers}", f"  psi(x) = {psi}; L = {self.threshold:g}"]
        for name, layer in zip(("hidden", "output") if self.hidden else ("output",), self.fire.mlp, strict=True):
            lines += [f"  {name} {key:6} {summarise_values(getattr(layer, key))}" for key in ("weight", "bias")]
        lines.append(f"  largest error: {self.error:.1e} nats in float64, {self.error_float32:.1e} in float32")
        return "\n".join(lines)


def summarise_values(values: Tensor) -> str:
    """Format the shape and the range of a tensor."""
    if not values.numel():
        return "none"
    shape, low, high = " x ".join(map(str, values.shape)), values.min().item() + 0.0, values.max().item() + 0.0
    return f"({shape}) " + (f"all {low:.6g}" if low == high else f"{low:.6g} to {high:.6g}")


def format_heads(heads: tuple[int, ...]) -> str:
    """Format head numbers, as in ``heads 1-3, 5``."""
    # consecutive numbers have the same difference from their index
    runs = [[h for _, h in run] for _, run in groupby(enumerate(heads), lambda pair: pair[1] - pair[0])]
    ranges = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"head{'s' if len(heads) > 1 else ''} {ranges}"


@torch.no_grad()
def fit_fire(encoding: Encoding, name: str, length: int) -> list[FireFit]:
    """Construct FIREs that equal the bias of an encoding for all 0 <= j <= i < ``length``, to within 1e-6 in float64.

    Args:
        encoding: an encoding with a distance bias, of which the current parameters count.
        name: name of the encoding for messages.
        length: number N of distances, up to 4096.

    Returns:
        The first FIRE has all heads. Kerple-log with heads of different a has further ones, a line for each a.

    Raises:
        UserError: the bias depends on more than the distance, is not finite or is too large for float64, or ``length``
            is out of range.
    """
    profile = validate_profile(encoding, name, length)
    scales = encoding.a(torch.float64).tolist() if isinstance(encoding, KerpleLog) else [None] * encoding.heads
    fits = [_fit(profile, list(range(encoding.heads)), None)] if len(set(scales)) > 1 else []
    fits += [_fit(profile, [h for h, a in enumerate(scales) if a == c], c) for c in dict.fromkeys(scales)]
    for fit in fits:
        if not fit.error <= TOLERANCE:
            raise UserError(
                f"'{name}' reaches {profile.abs().max():.3g} at {length} distances, which float64 does not hold to "
                f"{TOLERANCE:g} (error {fit.error:.1e}): choose a shorter length"
            )
    return fits


def validate_profile(encoding: Encoding, name: str, length: int) -> Tensor:
    """Return the bias (H, N) float64 over the distances 0 … N-1; raise UserError unless a FIRE can represent it."""
    if not isinstance(encoding, DistanceBias):
        choices = ", ".join(n for n in names() if issubclass(registry.get(n), DistanceBias))
        raise UserError(
            f"'{name}' is not a bias of the distance alone, so there is nothing to fit: choose one of {choices}"
        )
    if not 1 <= length <= LONGEST:
        raise UserError(f"a length of {length} is out of range: choose 1 to {LONGEST} distances")
    profile = encoding.bias_profile(length).cpu()
    bad = (~profile.isfinite()).any(0).nonzero().flatten().tolist()
    if bad:
        shorter = f"choose a length of at most {bad[0]}" if bad[0] else "choose another encoding"
        raise UserError(
            f"'{name}' is not finite at distance {bad[0]}, but FIRE, an MLP, is finite everywhere: {shorter}"
        )
    return profile


def _fit(profile: Tensor, heads: list[int], c: float | None) -> FireFit:
    """Fit some heads (indices) of ``profile`` (H, N) in one module: a line if all are lines, or else a hidden layer."""
    y = profile[heads]  # (H', N)
    positions = torch.arange(y.shape[1], dtype=y.dtype)[None]
    # computed by FIRE itself, so that u has the same bits
    _, initial_fire = _module(len(heads), y.shape[1], c, 0)
    u = initial_fire.ratio(positions[:, -1:], positions)[0, 0].flip(0)  # (N,)
    mean_slope = (y[:, -1:] - y[:, :1]) / u[-1] if len(u) > 1 else torch.zeros_like(y)
    bias_at_zero = y[:, 0]  # (H',)
    # layers: weight and bias of each linear layer of the MLP
    if (y[:, :1] + mean_slope * u - y).abs().max() <= _MAX_CURVATURE:
        hidden, layers = 0, [(mean_slope, bias_at_zero)]
    else:
        slopes = y.diff() / u.diff()  # (H', N-1)
        bends = slopes.diff()  # (H', N-2): change of slope at each inner point
        # a ReLU for each inner point at which some head bends, and one for the first slope
        knots = (bends != 0).any(0).nonzero().flatten()
        hidden, rises = 1 + len(knots), torch.cat([slopes[:, :1], bends[:, knots]], 1)
        layers = [(torch.ones(hidden, 1), torch.cat([u[:1], -u[1 + knots]])), (rises, bias_at_zero)]
    spec, fire = _module(len(heads), len(u), c, hidden)
    for layer, (weight, bias) in zip(fire.mlp, layers, strict=True):
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    fit = FireFit(tuple(h + 1 for h in heads), spec, fire, 0.0, 0.0)  # without its errors, only to compute values
    errors = (_error(fit.values(dtype), y) for dtype in (torch.float64, torch.float32))
    return FireFit(fit.heads, spec, fire, *errors)


def _module(heads: int, length: int, c: float | None, hidden: int) -> tuple[str, Fire]:
    """Return the spec of a float64 FIRE with L = ``length``, and that FIRE as initialised."""
    layers = f"hidden_layers=1,hidden={hidden}" if hidden else "hidden_layers=0"
    psi = "log=false" if c is None else f"init_c={c!r}"
    spec = f"fire:{layers},{psi},init_L={length}"
    fire = build(spec, heads, heads).double()
    if c is not None:
        fire.c.fill_(c)  # the spec sets it in float32 only
    return spec, fire


@torch.no_grad()
def _values(fire: Fire, length: int) -> Tensor:
    """Return the bias (H', N) float64 over all distances, in the arithmetic of the module's parameters."""
    positions = torch.arange(length, dtype=fire.mlp[0].weight.dtype)[None]
    return fire.bias(positions[:, -1:], positions)[0, :, 0].flip(-1).double()


def _error(values: Tensor, y: Tensor) -> float:
    """Return the largest difference from y (H', N); inf if there is a NaN."""
    error = (values - y).abs().max().item()
    return math.inf if math.isnan(error) else error


@dataclass(frozen=True)
class PaperFit:
    """f(u) = Σ_k output_weight_hk·σ(weight_k·u + shift_k) + output_bias_h in float64, with H' heads and K units.

    Attributes:
        heads: numbers of the heads, from 1.
        sigma: key of the activation σ; "x" if there is no hidden layer.
        c: c of ψ(x) = ln(c·x + 1), or None if ψ(x) = x.
        length: L and N, in tokens.
        weight: (K,) hidden weights.
        shift: (K,) hidden biases.
        power: (K,) exponents p of σ(x) = x^p.
        output_weight: (H', K).
        output_bias: (H',).
        error: largest difference from the target over all distances, in nats.
        error_float32: the same in float32.
        on_edge: for T5, the error with steps at the edges of the buckets and the listing's 1e-6.
        as_printed: for Sandwich, the error with the printed frequencies.
    """

    heads: tuple[int, ...]
    sigma: str
    c: float | None
    length: int
    weight: Tensor
    shift: Tensor
    power: Tensor
    output_weight: Tensor
    output_bias: Tensor
    error: float = 0.0
    error_float32: float = 0.0
    on_edge: float | None = None
    as_printed: float | None = None

    def values(self, dtype: torch.dtype = torch.float64, more: float = 0.0, shift: Tensor | None = None) -> Tensor:
        """Return the bias (H', N) float64 over all distances.

        Args:
            dtype: dtype of the computation.
            more: is added to the denominator ψ(L).
            shift: (K,) hidden biases in place of those of the fit.
        """
        d, top = torch.arange(self.length, dtype=dtype), torch.tensor(self.length, dtype=dtype)
        if self.c is not None:
            d, top = torch.log1p(self.c * d), torch.log1p(self.c * top)
        u = d / (top + more)  # (N,)
        # (K, N)
        x = self.weight.to(dtype)[:, None] * u + (self.shift if shift is None else shift).to(dtype)[:, None]
        hidden = _SIGMAS[self.sigma](x, self.power.to(dtype)[:, None])
        return (self.output_weight.to(dtype) @ hidden + self.output_bias.to(dtype)[:, None]).double()

    def as_dict(self) -> dict[str, Any]:
        """Return the fit for a JSON file."""
        arrays = ("weight", "shift", "power", "output_weight", "output_bias")
        return {key: getattr(self, key).tolist() if key in arrays else getattr(self, key) for key in vars(self)}

    def __str__(self) -> str:
        """Describe shape, arrays and errors in a few lines."""
        psi = "x" if self.c is None else f"ln(c*x + 1), c = {self.c:.6g}"
        units = len(self.weight)
        layer = "no hidden layer: f is a line" if self.sigma == "x" else f"{units} units of sigma(x) = {self.sigma}"
        lines = [f"{format_heads(self.heads)}: {layer}", f"  psi(x) = {psi}; L = {self.length}"]
        hidden = {"weight": "hidden weight", "shift": "hidden shift", "power": "p"} if self.sigma != "x" else {}
        if self.sigma != "x^p":
            hidden.pop("power", None)
        for key, name in {**hidden, "output_weight": "output weight", "output_bias": "output bias"}.items():
            lines.append(f"  {name:13} {summarise_values(getattr(self, key))}")
        lines.append(f"  largest error: {self.error:.1e} nats in float64, {self.error_float32:.1e} in float32")
        if self.on_edge is not None:
            lines.append(f"  steps on the edges of the buckets, with the listing's 1e-6: {self.on_edge:.1e}")
        if self.as_printed is not None:
            lines.append(f"  with frequencies from k = 1, as printed: {self.as_printed:.1e}")
        return "\n".join(lines)


@torch.no_grad()
def paper_fits(encoding: Encoding, name: str, length: int) -> list[PaperFit]:
    """Construct the paper's FIREs with the bias of an encoding for all 0 <= j <= i < ``length``.

    Args:
        encoding: an encoding with a distance bias, of which the current parameters count.
        name: name of the encoding for messages.
        length: number N of distances, up to 4096.

    Returns:
        The FIREs, several if heads cannot share one; an empty list if the paper has no proof for this encoding.

    Raises:
        UserError: as :func:`fit_fire`, or the construction misses the bias by more than 1e-6 nats.
    """
    target = validate_profile(encoding, name, length)
    construct = next((construct for kind, construct in _CONSTRUCTIONS.items() if isinstance(encoding, kind)), None)
    return [] if construct is None else [_with_errors(fit, target) for fit in construct(encoding, length)]


def _with_errors(fit: PaperFit, target: Tensor) -> PaperFit:
    """Return the fit with its errors from the target (H, N); raise UserError if they exceed 1e-6 nats."""
    bias = target[[head - 1 for head in fit.heads]]  # (H', N)

    def error(values: Tensor) -> float:
        return (values - bias).abs().max().item()

    errors = {"error": error(fit.values()), "error_float32": error(fit.values(torch.float32))}
    if fit.sigma == _STEP:
        edges = fit.shift - 0.5 / fit.length  # steps at the first distance of a bucket, not half a token earlier
        errors["on_edge"] = error(fit.values(more=_LISTING_EPSILON, shift=edges))
    result = PaperFit(**{**vars(fit), **errors})
    if not result.error <= TOLERANCE:
        raise UserError(f"the paper's construction misses the bias by {result.error:.1e} nats: choose a shorter length")
    return result


def _paper_fit(
    heads: tuple[int, ...], sigma: str, length: int, weights: Tensor, outputs: Tensor, **more: Any
) -> PaperFit:
    """Return a fit of hidden weights (K,), output weights (H', K) and, where they are not 0, the other fields."""
    zeros = torch.zeros(len(weights), dtype=torch.float64)
    others = {"c": None, "shift": zeros, "power": zeros, "output_bias": zeros.new_zeros(len(heads)), **more}
    return PaperFit(heads=heads, sigma=sigma, length=length, weight=weights, output_weight=outputs, **others)


def _alibi(encoding: Alibi, length: int) -> list[PaperFit]:
    (slopes,) = encoding.head_parameters(torch.zeros((), dtype=torch.float64))
    return [_paper_fit(_all(encoding), "x", length, _ones(1), -length * slopes[:, None])]


def _kerple_log(encoding: KerpleLog, length: int) -> list[PaperFit]:
    p, a = encoding.p(torch.float64), encoding.a(torch.float64)
    return [
        _paper_fit((h + 1,), "x", length, _ones(1), -p[h : h + 1, None] * torch.log1p(a[h] * length), c=a[h].item())
        for h in range(encoding.heads)
    ]


def _kerple_power(encoding: KerplePower, length: int) -> list[PaperFit]:
    p, a = encoding.p(torch.float64), encoding.a(torch.float64)
    return [_paper_fit(_all(encoding), "x^p", length, _ones(encoding.heads), torch.diag(-a * length**p), power=p)]


def _sandwich(encoding: Sandwich, length: int) -> list[PaperFit]:
    (scale,) = encoding.head_parameters(torch.zeros((), dtype=torch.float64))
    first = 0 if encoding.config.variant == "paper" else 1
    shift = 0.0 if encoding.config.variant == "paper" else encoding.terms + 1e-4

    def from_index(start: int) -> PaperFit:
        k = torch.arange(start, start + encoding.terms, dtype=torch.float64)
        weights = scale[:, None].expand(-1, encoding.terms)
        omega = 10000.0 ** (-k / encoding.terms)
        return _paper_fit(_all(encoding), "cos(x)", length, length * omega, weights, output_bias=-shift * scale)

    as_printed = (from_index(1).values() - from_index(first).values()).abs().max().item() if first == 0 else None
    return [PaperFit(**{**vars(from_index(first)), "as_printed": as_printed})]


def _t5(encoding: T5Bias, length: int) -> list[PaperFit]:
    d = torch.arange(length, dtype=torch.float64)
    buckets = encoding.buckets(d)
    starts = (buckets.diff() > 0).nonzero().flatten() + 1
    values = encoding.table.double()[buckets].T
    rises = values[:, starts] - values[:, starts - 1]
    edges = (starts - 0.5) / length  # steps half a token before each bucket
    return [_paper_fit(_all(encoding), _STEP, length, _ones(len(edges)), rises, shift=-edges, output_bias=values[:, 0])]


def _all(encoding: Encoding) -> tuple[int, ...]:
    return tuple(range(1, encoding.heads + 1))


def _ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.float64)


_CONSTRUCTIONS: dict[type[Encoding], Callable[[Any, int], list[PaperFit]]] = {
    Alibi: _alibi,
    KerpleLog: _kerple_log,
    KerplePower: _kerple_power,
    Sandwich: _sandwich,
    T5Bias: _t5,
}
