"""FIRE's own proof of its Theorem 3.1, carried out: f may take whatever activation the target wants.

Source: "Functional Interpolation for Relative Positions Improves Long Context Transformers" (arXiv 2310.04418),
Appendix A.2, for b(i, j) = f(ψ(i-j) / ψ(max(L, i))), Eq. 4. With L = N every query i < N divides by ψ(L), so f sees
u = ψ(d) / ψ(L) of a distance d = 0 … N-1 alone, and f(u) = Σ_k w_k·σ(v_k·u + s_k) + c meets the target exactly:

- ALiBi, -k·d: no hidden layer, ψ(x) = x, f(u) = -k·L·u.
- Kerple's -p·ln(1 + a·d): no hidden layer, ψ(x) = ln(a·x + 1), f(u) = -p·ψ(L)·u.
- Kerple's -a·d^p: σ(x) = x^p, ψ(x) = x, f(u) = -a·L^p·u^p.
- Sandwich, r·Σ_k cos(d·ω_k): σ = cos, ψ(x) = x, v_k = L·ω_k, w_k = r.
- T5's table: σ(x) = 1 where x >= 0, otherwise 0, ψ(x) = x; a unit for each bucket after the first, w_k its value less
  that of the bucket before.

Where that needs a word of care, seen by measuring it:

- The heads of a FIRE share ψ, so Kerple-log heads with an a of their own take a FIRE each; and Kerple-power heads with
  a p of their own take an activation for each unit.
- None of the activations is the ReLU of FIRE's experiments, and 1 where x >= 0 has no gradient to train by. The
  constructions of :mod:`fairseq_rpe.analysis.fire_fit` use ReLUs only.
- A step right at u_k = d_k / L, d_k the first distance of a bucket, holds in Eq. 4 but not in the published listing,
  which adds 1e-6 to ψ(max(L, i)): u then stays below u_k at d_k, and the bias there is the bucket's before
  (:attr:`PaperFit.on_edge`). Here steps lie half a token earlier, which holds for both.
- For Sandwich the paper prints ω_k = 10000^(-k/d') from k = 1, where Sandwich's own listing starts with k = 0. The
  frequencies here are those of the encoding; :attr:`PaperFit.as_printed` is the error with the printed ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.analysis.fire_fit import checked_profile, ranges, summary
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.alibi import Alibi
from fairseq_rpe.encodings.kerple import KerpleLog, KerplePower
from fairseq_rpe.encodings.sandwich import Sandwich
from fairseq_rpe.encodings.t5 import T5Bias

_LISTING = 1e-6  # what the published listing adds to the denominator
_SIGMAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x": lambda x, p: x,
    "x^p": lambda x, p: x.clamp_min(0).pow(p),
    "cos(x)": lambda x, p: x.cos(),
    "1 where x >= 0": lambda x, p: (x >= 0).to(x.dtype),
}


@dataclass(frozen=True)
class PaperFit:
    """f(u) = Σ_k output_weight_hk·σ(weight_k·u + shift_k) + output_bias_h for ``heads`` (from 1), in float64.

    ``sigma``: a key of the activations above, x where there is no hidden layer; ``power``: p of x^p, for each unit;
    ``c``: of ψ(x) = ln(c·x + 1), None where ψ(x) = x; ``length``: L and N, in tokens. ``error`` is the largest
    difference from the target over all distances, in nats, ``error_float32`` that in float32. ``on_edge``: the error
    with T5's steps on the buckets' edges and the listing's 1e-6; ``as_printed``: with the printed frequencies.
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
        """(H', N) float64: the bias over all distances, computed in ``dtype``; ``more`` is added to ψ(L)."""
        d, top = torch.arange(self.length, dtype=dtype), torch.tensor(self.length, dtype=dtype)
        if self.c is not None:
            d, top = torch.log1p(self.c * d), torch.log1p(self.c * top)
        u = d / (top + more)
        x = self.weight.to(dtype)[:, None] * u + (self.shift if shift is None else shift).to(dtype)[:, None]
        hidden = _SIGMAS[self.sigma](x, self.power.to(dtype)[:, None])
        return (self.output_weight.to(dtype) @ hidden + self.output_bias.to(dtype)[:, None]).double()

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        arrays = ("weight", "shift", "power", "output_weight", "output_bias")
        return {key: getattr(self, key).tolist() if key in arrays else getattr(self, key) for key in vars(self)}

    def __str__(self) -> str:
        """A few lines: its shape, what its arrays hold, its errors."""
        psi = "x" if self.c is None else f"ln(c*x + 1), c = {self.c:.6g}"
        units = len(self.weight)
        layer = "no hidden layer: f is a line" if self.sigma == "x" else f"{units} units of sigma(x) = {self.sigma}"
        lines = [f"{ranges(self.heads)}: {layer}", f"  psi(x) = {psi}; L = {self.length}"]
        shown = {"weight": "hidden weight", "shift": "hidden shift", "power": "p"} if self.sigma != "x" else {}
        if self.sigma != "x^p":
            shown.pop("power", None)
        for key, name in {**shown, "output_weight": "output weight", "output_bias": "output bias"}.items():
            lines.append(f"  {name:13} {summary(getattr(self, key))}")
        lines.append(f"  largest error: {self.error:.1e} nats in float64, {self.error_float32:.1e} in float32")
        if self.on_edge is not None:
            lines.append(f"  steps on the edges of the buckets, with the listing's 1e-6: {self.on_edge:.1e}")
        if self.as_printed is not None:
            lines.append(f"  with frequencies from k = 1, as printed: {self.as_printed:.1e}")
        return "\n".join(lines)


@torch.no_grad()
def paper_fits(encoding: Encoding, name: str, length: int) -> list[PaperFit]:
    """The paper's FIREs with the bias of ``encoding`` for all 0 <= j <= i < ``length``; none where it has no proof.

    Several where heads cannot share one. Refuses what :func:`fairseq_rpe.analysis.fire_fit.fit_fire` refuses.
    """
    target = checked_profile(encoding, name, length)
    make = next((make for kind, make in _MAKERS.items() if isinstance(encoding, kind)), None)
    return [] if make is None else [_measured(fit, target) for fit in make(encoding, length)]


def _measured(fit: PaperFit, target: Tensor) -> PaperFit:
    own = target[[head - 1 for head in fit.heads]]

    def error(values: Tensor) -> float:
        return (values - own).abs().max().item()

    found = {"error": error(fit.values()), "error_float32": error(fit.values(torch.float32))}
    if fit.sigma.startswith("1 "):
        edges = fit.shift - 0.5 / fit.length
        found["on_edge"] = error(fit.values(more=_LISTING, shift=edges))
    made = PaperFit(**{**vars(fit), **found})
    if not made.error <= 1e-6:
        raise UserError(f"the paper's construction misses the bias by {made.error:.1e} nats: choose a shorter length")
    return made


def _fit(heads: tuple[int, ...], sigma: str, length: int, weights: Tensor, outputs: Tensor, **more: Any) -> PaperFit:
    """``weights`` (K,), ``outputs`` (H', K) and, where they are not 0, the rest."""
    none = torch.zeros(len(weights), dtype=torch.float64)
    rest = {"c": None, "shift": none, "power": none, "output_bias": none.new_zeros(len(heads)), **more}
    return PaperFit(heads=heads, sigma=sigma, length=length, weight=weights, output_weight=outputs, **rest)


def _alibi(encoding: Alibi, length: int) -> list[PaperFit]:
    (slopes,) = encoding.head_parameters(torch.zeros((), dtype=torch.float64))
    return [_fit(_all(encoding), "x", length, _ones(1), -length * slopes[:, None])]


def _kerple_log(encoding: KerpleLog, length: int) -> list[PaperFit]:
    p, a = encoding.p(torch.float64), encoding.a(torch.float64)
    return [
        _fit((h + 1,), "x", length, _ones(1), -p[h : h + 1, None] * torch.log1p(a[h] * length), c=a[h].item())
        for h in range(encoding.heads)
    ]


def _kerple_power(encoding: KerplePower, length: int) -> list[PaperFit]:
    p, a = encoding.p(torch.float64), encoding.a(torch.float64)
    return [_fit(_all(encoding), "x^p", length, _ones(encoding.heads), torch.diag(-a * length**p), power=p)]


def _sandwich(encoding: Sandwich, length: int) -> list[PaperFit]:
    (scale,) = encoding.head_parameters(torch.zeros((), dtype=torch.float64))
    first = 0 if encoding.config.form == "paper" else 1
    shift = 0.0 if encoding.config.form == "paper" else encoding.terms + 1e-4

    def of(start: int) -> PaperFit:
        k = torch.arange(start, start + encoding.terms, dtype=torch.float64)
        weights = scale[:, None].expand(-1, encoding.terms)
        omega = 10000.0 ** (-k / encoding.terms)
        return _fit(_all(encoding), "cos(x)", length, length * omega, weights, output_bias=-shift * scale)

    wrong = (of(1).values() - of(first).values()).abs().max().item() if first == 0 else None
    return [PaperFit(**{**vars(of(first)), "as_printed": wrong})]


def _t5(encoding: T5Bias, length: int) -> list[PaperFit]:
    d = torch.arange(length, dtype=torch.float64)
    buckets = encoding.rows(d)
    starts = (buckets.diff() > 0).nonzero().flatten() + 1
    values = encoding.table.double()[buckets].T
    rises = values[:, starts] - values[:, starts - 1]
    at = (starts - 0.5) / length
    return [_fit(_all(encoding), "1 where x >= 0", length, _ones(len(at)), rises, shift=-at, output_bias=values[:, 0])]


def _all(encoding: Encoding) -> tuple[int, ...]:
    return tuple(range(1, encoding.heads + 1))


def _ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.float64)


_MAKERS: dict[type[Encoding], Callable[[Any, int], list[PaperFit]]] = {
    Alibi: _alibi,
    KerpleLog: _kerple_log,
    KerplePower: _kerple_power,
    Sandwich: _sandwich,
    T5Bias: _t5,
}
