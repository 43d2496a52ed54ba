"""Calls of attention on any backend: outputs, all gradients, and the comparison of two of them.

Files of single backends compare theirs with the reference by these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import DEVICE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fairseq_rpe.attention import BACKENDS, AttentionPlan
from fairseq_rpe.attention.forward import build_plan, compute_token_features, positions_from_documents, run_attention
from fairseq_rpe.core import Bias, Positions, ToeplitzBias
from fairseq_rpe.encodings import Encoding, build

B, H, D = 2, 2, 32
Result = dict[str, Tensor]
Made = Callable[[str], tuple[Tensor, Bias]]  # of a device: a tensor that is learned, and a form that is made of it
INPUTS = ("out", "q", "k", "v")


@torch.no_grad()
def lively(spec: str, heads: int = H, width: int = D, length: int = 320, device: str = DEVICE) -> Encoding:
    """An encoding whose learned parameters all matter."""
    torch.manual_seed(0)
    encoding = build(spec, heads, heads * width, length).to(device)
    size = 0.02 if spec.startswith(("clex", "floater")) else 0.2  # differential equations overflow soon
    for parameter in encoding.parameters():
        parameter += size * torch.randn_like(parameter)
    return encoding


def outcome(
    backend: str,
    spec: str | Made,
    n: int,
    m: int | None = None,
    *,
    rows: int = B,
    heads: int = H,
    key_heads: int | None = None,
    width: int = D,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    pos: Positions | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    grads: bool = True,
    device: str = DEVICE,
) -> Result:
    """The output, and the gradients of q, k, v and of what is learned, by name."""
    m, last_query = m or n, None
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q, k, v = (
        drawn(rows, number, length, width).requires_grad_(grads)
        for number, length in ((heads, n), (key_heads or heads, m), (key_heads or heads, m))
    )
    x, cotangent = drawn(rows, m, heads * width), drawn(rows, heads, n, width)
    pos = Positions.arange(n, m) if pos is None else pos
    pos = replace(pos, q=pos.q.to(device), k=pos.k.to(device))
    padding = None if padding is None else padding.to(device)
    if documents is not None:
        pos, last_query = positions_from_documents(documents.to(device))
    with torch.set_grad_enabled(grads):
        if callable(spec):
            learned, form = spec(device)
            leaves = {"table": learned}
            plan = AttentionPlan(pos, form, padding, backend=BACKENDS[backend], last_query=last_query)
        else:
            encoding = lively(spec, heads, width, device=device)
            leaves = {name: p for name, p in encoding.named_parameters() if p.requires_grad}
            plan = build_plan(encoding, pos, padding, BACKENDS[backend], last_query=last_query)
        torch.manual_seed(2)
        out = run_attention(q, k, v, plan, dropout, compute_token_features(x, plan))
        if padding is not None:  # what a hidden token attends to means nothing
            out = out.masked_fill(padding[:, None, m - n :, None], 0.0)
    found = {"out": out.detach()}
    if grads:
        leaves = {"q": q, "k": k, "v": v, **leaves}
        given = torch.autograd.grad(out, list(leaves.values()), cotangent, allow_unused=True)
        found |= {name: grad for name, grad in zip(leaves, given, strict=True) if grad is not None}
    return found


def assert_same(expected: Result, found: Result, tolerance: float = 2e-5) -> None:
    """All numbers within ``tolerance`` of the largest of their kind, or of 1."""
    assert expected.keys() == found.keys()
    for name, a in expected.items():
        b = found[name]
        assert a.dtype == b.dtype and torch.isfinite(b).all(), name
        assert (a - b).abs().max() <= tolerance * max(1.0, a.abs().max().item()), name


def assert_rounded(expected: Result, found: Result, spread: float = 1e-3, learned: float = 1e-4) -> None:
    """In half precision: root mean square errors, no error above two units in the last place of the largest.

    Gradients of parameters are float32 sums of n² terms, which would show a rounded output: ``learned``.
    """
    assert expected.keys() == found.keys()
    for name, a in expected.items():
        b, rounded = found[name], name in INPUTS
        assert a.dtype == b.dtype, name
        error, scale = a.double() - b.double(), a.double().abs().max()
        assert error.square().mean().sqrt() <= (spread if rounded else learned) * scale, name
        assert not rounded or error.abs().max() <= 2 * torch.finfo(a.dtype).eps * max(1.0, scale), name


def compare(backend: str, spec: str | Made, tolerance: float = 2e-5, **call: Any) -> Result:
    """Assert that a backend gives what the reference gives; returns what it gives."""
    found = outcome(backend, spec, **call)
    assert_same(outcome("reference", spec, **call), found, tolerance)
    return found


# Arguments of ``outcome``, which moves them to its device


def left_padding(m: int, pads: int = 3, rows: int = B) -> Tensor:
    """The first row begins with pads."""
    padding = torch.zeros(rows, m, dtype=torch.bool)
    padding[0, :pads] = True
    return padding


def padded(n: int, m: int | None = None, pads: int = 3) -> dict[str, Any]:
    """Two rows, the first with pads before it, which are not counted."""
    padding = left_padding(m or n, pads)
    k = ((~padding).cumsum(1) - 1).clamp_min(0).float()
    return {"n": n, "m": m, "pos": Positions(k[:, -n:], k), "padding": padding}


def in_documents(n: int) -> dict[str, Any]:
    """Two rows of several documents, the shortest one token."""
    lengths = [[1, n // 3, 2, n - n // 3 - 3], [n - n // 5, n // 5]]
    return {"n": n, "documents": numbered(lengths)}


def numbered(lengths: list[list[int]]) -> Tensor:
    rows = [[number for number, length in enumerate(row) for _ in range(length)] for row in lengths]
    return torch.tensor(rows)


def skipping(n: int, m: int | None = None, step: float | None = 1.0, start: float = 0.0) -> dict[str, Any]:
    """Positions of each row with gaps; ``step`` None: as if their spacing were unknown."""
    generator = torch.Generator().manual_seed(3)
    at = torch.randint(1, 4, (B, m or n), generator=generator).cumsum(1).float() + start
    return {"n": n, "m": m, "pos": Positions(at[:, -n:], at, step, contiguous=False)}


def warped(n: int, m: int | None = None) -> Positions:
    """Spacing of any kind, of two rows."""
    at = torch.arange(float(m or n), device=DEVICE) ** torch.tensor([[0.9], [0.7]], device=DEVICE)
    return Positions(at[:, -n:], at, None, False)


def table(columns: int, origin: int = 0, step: float = 1.0) -> Made:
    """A learned table of any length and origin."""

    def make(device: str) -> tuple[Tensor, Bias]:
        torch.manual_seed(7)
        learned = torch.randn(H, columns).to(device).requires_grad_()
        return learned, ToeplitzBias(learned, origin=origin, step=step)

    return make


# What calls allocate


class Largest(TorchDispatchMode):
    """Records the largest number of bytes, and of elements, of a tensor that any operation returns."""

    bytes = elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@contextmanager
def buffers_of_nan() -> Iterator[None]:
    """New buffers start as NaN: what a backend forgets to write shows."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty_like"), (torch, "empty"), (Tensor, "new_empty")):
            plain = getattr(owner, name)

            def filled(*args: Any, plain: Any = plain, **kwargs: Any) -> Tensor:
                made = plain(*args, **kwargs)
                return made.fill_(torch.nan) if made.is_floating_point() else made

            patch.setattr(owner, name, filled)
        yield
