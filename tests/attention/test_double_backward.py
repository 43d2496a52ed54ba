"""Second derivatives: those of the reference, whatever computes attention, or an error."""

from __future__ import annotations

import sys

import pytest
import torch
from specs import representatives
from torch.utils.checkpoint import checkpoint

from fairseq_rpe import attend, build
from fairseq_rpe.attention import content_bias
from fairseq_rpe.core import UserError
from fairseq_rpe.modules import cross_entropy
from fairseq_rpe.modules.cross_entropy import CHUNK, linear_cross_entropy

H, D = 2, 32
KINDS = [
    "nope",
    "window:window=5",
    "kerple_log",
    "fire",
    "shaw:max_distance=5,values=true",
    "dape",
    "rerope:window=8",
    "clex",
]


def second(
    spec,
    n,
    backend="auto",
    *,
    m=None,
    constant=True,
    dtype=torch.float64,
    width=8,
    key_heads=H,
    around=attend,
    **options,
):
    """Derivatives of a penalty on the first gradients; ``constant``: of an incoming gradient that needs none."""
    torch.manual_seed(0)
    encoding = build(spec, H, H * width, 64).to(dtype)
    with torch.no_grad():
        for p in encoding.parameters():
            p.add_(0.05 * torch.randn_like(p))
    sizes = (H, n), (key_heads, m or n), (key_heads, m or n)
    q, k, v = (torch.randn(2, *size, width).to(dtype).requires_grad_() for size in sizes)
    notes = encoding.token_features(torch.randn(2, n, H * width).to(dtype)) if encoding.has_token_features else None
    out = around(q, k, v, encoding, backend=backend, features=notes, **options)
    grad = torch.randn(out.shape).to(dtype).requires_grad_(not constant)
    inputs = [q, k, v, *encoding.parameters()]
    first = torch.autograd.grad(out, inputs, grad, create_graph=True, allow_unused=True)
    penalty = sum(x.square().sum() for x in first if x is not None)
    return torch.autograd.grad(penalty, inputs if constant else [*inputs, grad], allow_unused=True)


def assert_same(expected, got, tolerance=1e-9):
    for a, b in zip(expected, got, strict=True):
        if a is None or b is None:
            assert a is b or not (b if a is None else a).any()
        else:
            assert (a - b).abs().max() <= tolerance * max(1.0, a.abs().max().item())


@pytest.mark.parametrize("spec", [*representatives(), "transformer_xl", "deberta:max_distance=9,p2c=paper"])
def test_of_short_texts(spec):
    assert_same(second(spec, 21, "reference"), second(spec, 21))


@pytest.mark.parametrize(("n", "constant"), [(1, True), (130, True), (130, False)])
@pytest.mark.parametrize("spec", KINDS)
def test_of_longer_texts(spec, n, constant, monkeypatch):
    """In blocks: of a bias of the distance, of a curve, of scores that depend on the tokens, of regions."""
    monkeypatch.setattr(content_bias, "ELEMENTS", 1 << 12)
    assert_same(second(spec, n, "reference", constant=constant), second(spec, n, constant=constant), 1e-8)


@pytest.mark.parametrize(("spec", "n"), [("kerple_log", 40), ("kerple_log", 140), ("fire", 270), ("dape", 140)])
def test_with_dropout(spec, n):
    def seeded(*args, **options):
        torch.manual_seed(5)
        return attend(*args, **options)

    expected = second(spec, n, "reference", dropout=0.2, around=seeded)
    assert_same(expected, second(spec, n, dropout=0.2, around=seeded), 1e-8)


@pytest.mark.parametrize("n", [1, 140])
@pytest.mark.parametrize("spec", ["nope", "alibi", "kerple_log", "shaw:max_distance=5"])
def test_of_the_last_queries_with_padding_in_blocks(spec, n, monkeypatch):
    monkeypatch.setattr(sys.modules["fairseq_rpe.attention.sdpa"], "PAIR_ELEMENTS", 1)
    padding = torch.zeros(2, 150, dtype=torch.bool)
    padding[1, :9] = True
    for hidden in (None, padding):
        assert_same(*(second(spec, n, name, m=150, padding=hidden) for name in ("reference", "sdpa")))


@pytest.mark.parametrize("spec", ["rope", "kerple_log", "dape"])
def test_of_one_tensor_as_queries_keys_and_values(spec):
    """Each input's gradient is counted once."""
    encoding, x = build(spec, H, H * 8).double(), torch.randn(1, H, 150, 8, dtype=torch.float64, requires_grad=True)

    def of(backend):
        (first,) = torch.autograd.grad(attend(x, x, x, encoding, backend=backend).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    assert_same(of("reference"), of("sdpa"))


@pytest.mark.parametrize("spec", ["rope", "kerple_log", "dape"])
def test_under_activation_checkpointing(spec):
    def recomputed(*args, **options):
        return checkpoint(attend, *args, use_reentrant=False, **options)

    assert_same(second(spec, 150, "reference"), second(spec, 150, around=recomputed))


@pytest.mark.parametrize(
    ("spec", "n", "key_heads"),
    [
        ("kerple_log:local=5", 9, 1),
        ("alibi:softcap=2,null_logit=learned", 9, 1),
        ("forgetting", 17, 1),
        ("deberta:max_distance=3", 9, 1),
        pytest.param("fire", 17, 2, marks=pytest.mark.release),
    ],
)
def test_of_the_triton_kernels(spec, n, key_heads):
    pytest.importorskip("triton", reason="needs the package triton")
    options = {"n": n, "m": 17, "dtype": torch.float32, "width": D, "key_heads": key_heads}
    assert_same(*(second(spec, backend=name, **options) for name in ("reference", "triton")), 2e-4)


@pytest.mark.parametrize("n", [16, 200])
def test_third_derivatives_are_refused(n):
    q = torch.randn(1, H, n, 8, requires_grad=True)
    out = attend(q, q, q, "alibi")
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(UserError, match="third derivatives.*backend='reference'"):
        torch.autograd.grad(first.square().sum(), q, create_graph=True)


def test_the_adjoint_equation_has_none():
    with pytest.raises(UserError, match="no second derivatives: leave out adjoint=true"):
        second("floater:steps=1,adjoint=true", 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_the_loss(dtype, monkeypatch):
    """Of torch's own sum in float32 and of this package's."""
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 1)
    torch.manual_seed(0)
    x, weight = (torch.randn(size, 8).to(dtype).requires_grad_() for size in (CHUNK + 7, 30))
    target = torch.randint(0, 30, (len(x),))

    def of(loss):
        first = torch.autograd.grad(loss, (x, weight), create_graph=True)
        return torch.autograd.grad(sum(a.float().square().sum() for a in first), (x, weight))

    logits = torch.nn.functional.linear(x, weight).float()
    plain = torch.nn.functional.cross_entropy(logits, target, reduction="sum", ignore_index=1)
    assert_same(of(plain), of(linear_cross_entropy(x, weight, target, 1)), 1e-5 if dtype == torch.float32 else 0.05)
