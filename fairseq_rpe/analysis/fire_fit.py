"""FIRE holds the other biases of the distance: its Theorem 3.1 as parameters that can be run.

Source: "Functional Interpolation for Relative Positions Improves Long Context Transformers" (arXiv 2310.04418), Eq. 4:
b(i, j) = f(ψ(i-j) / ψ(max(L, i))). The constructions are our own; the paper's are in ``fire_paper.py``. All take L = N
for distances d = 0 … N-1: every query i < N then divides by the same ψ(L), u_d = ψ(d) / (ψ(L) + 1e-6) depends on the
distance alone, and f has to meet the bias at the N points u_0 = 0 < u_1 < … < u_{N-1} only.

- A line, no hidden layer: ALiBi with ψ(x) = x; Kerple's -p·ln(1 + a·d) with ψ(x) = ln(c·x + 1), c = a. One FIRE has one
  c, so heads with an a of their own take a FIRE each, or share one made as follows.
- Straight pieces from point to point, one hidden layer of ReLUs, ψ(x) = x:
  f(u) = y_0 + s_1·relu(u) + Σ_k (s_{k+1} - s_k)·relu(u - u_k), s_k the slope from point k-1 to point k. Points at which
  no head bends need no unit: T5 bends twice at each of its buckets, Kerple-power and Sandwich at all of the N-2 inner
  points.

That parameters exist does not say that training finds them.
"""

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import DistanceBias, Encoding, build, names
from fairseq_rpe.encodings.base import registry
from fairseq_rpe.encodings.fire import Fire
from fairseq_rpe.encodings.kerple import KerpleLog

LONGEST = 4096
TOLERANCE = 1e-6  # nats
_STRAIGHT = 1e-9  # nats; what rounding alone bends a line by is far less


@dataclass(frozen=True)
class FireFit:
    """A ``fire`` encoding in float64 that equals ``heads`` of another encoding, from 1, for all 0 <= j <= i < N.

    ``spec`` builds it, up to its parameters. ``error`` is the largest difference between the two biases over all
    distances, in nats, ``error_float32`` that with float32 parameters and arithmetic, as a model in training has them.
    """

    heads: tuple[int, ...]
    spec: str
    fire: Fire
    error: float
    error_float32: float

    @property
    def c(self) -> float | None:
        """c of ψ(x) = ln(c·x + 1); None where ψ(x) = x."""
        return None if self.fire.c is None else self.fire.c.item()

    @property
    def threshold(self) -> float:
        """L in tokens."""
        return self.fire.logged_scalars()["L"].item()

    @property
    def hidden(self) -> int:
        """ReLUs of the hidden layer, 0 where there is none."""
        return self.fire.config.hidden if self.fire.config.hidden_layers else 0

    def values(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """(H', N) float64: its bias over all distances, computed in ``dtype``."""
        if dtype == torch.float64:
            return _values(self.fire, round(self.threshold))
        narrow = build(self.spec, self.fire.heads, self.fire.heads)
        narrow.load_state_dict(self.fire.state_dict())
        return _values(narrow, round(self.threshold))

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it, floats to the last bit; ``state`` is the module's state dict."""
        shape = {"hidden_layers": self.fire.config.hidden_layers, "hidden": self.hidden}
        errors = {"error": self.error, "error_float32": self.error_float32}
        state = {name: value.tolist() for name, value in self.fire.state_dict().items()}
        start = {"heads": list(self.heads), "fire": self.spec, "c": self.c, "L": self.threshold}
        return {**start, **shape, **errors, "state": state}

    def __str__(self) -> str:
        """A few lines: its shape, what its arrays hold, its error."""
        layers = f"one hidden layer of {self.hidden} ReLUs" if self.hidden else "no hidden layer: f is a line"
        psi = "x" if self.c is None else f"ln(c*x + 1), c = {self.c:.6g}"
        lines = [f"{ranges(self.heads)}: {layers}", f"  psi(x) = {psi}; L = {self.threshold:g}"]
        for name, layer in zip(("hidden", "output") if self.hidden else ("output",), self.fire.mlp, strict=True):
            lines += [f"  {name} {part:6} {summary(getattr(layer, part))}" for part in ("weight", "bias")]
        lines.append(f"  largest error: {self.error:.1e} nats in float64, {self.error_float32:.1e} in float32")
        return "\n".join(lines)


def summary(values: Tensor) -> str:
    """Shape and range of some parameters, for a person."""
    if not values.numel():
        return "none"
    shape, low, high = " x ".join(map(str, values.shape)), values.min().item() + 0.0, values.max().item() + 0.0
    return f"({shape}) " + (f"all {low:.6g}" if low == high else f"{low:.6g} to {high:.6g}")


def ranges(heads: tuple[int, ...]) -> str:
    """``heads 1-3, 5``, for a person."""
    runs = [[h for _, h in run] for _, run in groupby(enumerate(heads), lambda pair: pair[1] - pair[0])]
    ranges = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"head{'s' if len(heads) > 1 else ''} {ranges}"


@torch.no_grad()
def fit_fire(encoding: Encoding, name: str, length: int) -> list[FireFit]:
    """FIREs with the bias of ``encoding`` for all 0 <= j <= i < ``length``, to within 1e-6 in float64.

    The first holds all heads, with the parameters that the encoding has now. Kerple-log with heads of different a
    follows again, as a line for each a. ``name`` is what messages call it. Refuses what is no bias of the distance
    alone, not finite or too large for float64, and a length out of range.
    """
    profile = checked_profile(encoding, name, length)
    scales = encoding.a(torch.float64).tolist() if isinstance(encoding, KerpleLog) else [None] * encoding.heads
    found = [_fit(profile, list(range(encoding.heads)), None)] if len(set(scales)) > 1 else []
    found += [_fit(profile, [h for h, a in enumerate(scales) if a == c], c) for c in dict.fromkeys(scales)]
    for fit in found:
        if not fit.error <= TOLERANCE:
            raise UserError(
                f"'{name}' reaches {profile.abs().max():.3g} at {length} distances, which float64 does not hold to "
                f"{TOLERANCE:g} (error {fit.error:.1e}): choose a shorter length"
            )
    return found


def checked_profile(encoding: Encoding, name: str, length: int) -> Tensor:
    """(H, N) float64 bias, where a FIRE can hold it."""
    if not isinstance(encoding, DistanceBias):
        known = ", ".join(n for n in names() if issubclass(registry.get(n), DistanceBias))
        raise UserError(
            f"'{name}' is not a bias of the distance alone, so there is nothing to fit: choose one of {known}"
        )
    if not 1 <= length <= LONGEST:
        raise UserError(f"a length of {length} is out of range: choose 1 to {LONGEST} distances")
    profile = encoding.bias_profile(length).cpu()
    bad = (~profile.isfinite()).any(0).nonzero().flatten().tolist()
    if bad:
        shorter = f"choose a length of at most {bad[0]}" if bad[0] else "choose another encoding"
        raise UserError(f"'{name}' is not finite at distance {bad[0]}, and FIRE, an MLP, is everywhere: {shorter}")
    return profile


def _fit(profile: Tensor, heads: list[int], c: float | None) -> FireFit:
    """The heads (indices) of ``profile`` (H, N) in one module: a line where all are one, otherwise one hidden layer."""
    y = profile[heads]
    at = torch.arange(y.shape[1], dtype=y.dtype)[None]
    u = _module(len(heads), y.shape[1], c, 0)[1].ratio(at[:, -1:], at)[0, 0].flip(0)  # bit by bit as it computes them
    mean = (y[:, -1:] - y[:, :1]) / u[-1] if len(u) > 1 else torch.zeros_like(y)
    if (y[:, :1] + mean * u - y).abs().max() <= _STRAIGHT:
        hidden, layers = 0, [(mean, y[:, 0])]
    else:
        slopes = y.diff() / u.diff()  # (H', N-1)
        bends = slopes.diff()
        knots = (bends != 0).any(0).nonzero().flatten()
        hidden, rises = 1 + len(knots), torch.cat([slopes[:, :1], bends[:, knots]], 1)
        layers = [(torch.ones(hidden, 1), torch.cat([u[:1], -u[1 + knots]])), (rises, y[:, 0])]
    spec, fire = _module(len(heads), len(u), c, hidden)
    for layer, (weight, bias) in zip(fire.mlp, layers, strict=True):
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    fit = FireFit(tuple(h + 1 for h in heads), spec, fire, 0.0, 0.0)
    errors = (_error(fit.values(dtype), y) for dtype in (torch.float64, torch.float32))
    return FireFit(fit.heads, spec, fire, *errors)


def _module(heads: int, length: int, c: float | None, hidden: int) -> tuple[str, Fire]:
    """A float64 FIRE with L = ``length``, f still as initialised; and its spec."""
    layers = f"hidden_layers=1,hidden={hidden}" if hidden else "hidden_layers=0"
    psi = "log=false" if c is None else f"init_c={c!r}"
    spec = f"fire:{layers},{psi},init_L={length}"
    fire = build(spec, heads, heads).double()
    if c is not None:
        fire.c.fill_(c)  # the spec gave it in float32
    return spec, fire


@torch.no_grad()
def _values(fire: Fire, length: int) -> Tensor:
    """(H', N) float64 bias over distances in the arithmetic of the module's parameters."""
    at = torch.arange(length, dtype=fire.mlp[0].weight.dtype)[None]
    return fire.bias(at[:, -1:], at)[0, :, 0].flip(-1).double()


def _error(values: Tensor, y: Tensor) -> float:
    """Largest difference from y (H', N)."""
    error = (values - y).abs().max().item()
    return math.inf if math.isnan(error) else error
