"""Encodings that replace the scores of a query: equations typed pair by pair in numpy, golden rows, the cache."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch
from numeric import check_padding, exact, lively, softmax, vectors
from refusal import refused

from fairseq_rpe import RelativeAttention, attend
from fairseq_rpe.analysis.convergence import DEPENDS, verdict
from fairseq_rpe.attention import content_bias
from fairseq_rpe.decoder.cache import LayerCache
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.alibi import alibi_slopes

SHAPES = [(1, 1, 4), (5, 2, 4), (9, 3, 6), (16, 4, 2), (23, 2, 8)]  # tokens, heads, head width
STICKS = [f"stick_breaking:attend_self={x},remainder={y}" for x in ("false", "true") for y in ("drop", "value")]
EACH = ["stick_breaking", STICKS[-1], "selective", "selective:base=alibi", "dape:base=alibi,kernel=3"]

# the last output of five tokens with q = sin(1 + f), k = cos(1 + f) and v = sin((1 + f)/2) at index f = 4·row + column
TOY = {
    STICKS[0]: [-0.4200207715, -0.3043931594, -0.1142394858, 0.1038839982],
    STICKS[1]: [-0.3657838573, -0.2764001780, -0.1193440952, 0.0669315843],
    STICKS[2]: [0.2332348491, 0.0797366975, -0.0932837787, -0.2434651324],
    STICKS[3]: [0.2583947508, 0.0927223304, -0.0956517502, -0.2606069465],
    "selective": [-0.2866200962, -0.3085495123, -0.2549352468, -0.1389039416],
}


def toy() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    f = torch.arange(1, 21, dtype=torch.float64).view(1, 1, 5, 4)
    return f.sin(), f.cos(), (f / 2).sin()


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4 queries."""
    monkeypatch.setattr(content_bias, "ELEMENTS", 1)
    monkeypatch.setattr(content_bias, "MIN_ROWS", 4)


@pytest.mark.parametrize("spec", TOY)
def test_published_row(spec):
    q, k, v = toy()
    for backend in ("reference", "sdpa"):
        last = attend(q, k, v, build(spec, 1, 4), backend=backend)[0, 0, -1]
        assert last.tolist() == pytest.approx(TOY[spec], abs=5e-11)


def test_published_score_of_a_cached_step():
    """Of the third token for itself; the authors' full pass gives -0.1697137250 where a later token follows."""
    encoding, (q, k, _) = build("dape:base=nope,kernel=3,width=1", 1, 4).double(), toy()
    with torch.no_grad():
        for layer, first in ((encoding.mix, 0.1), (encoding.out, 0.4)):
            layer.weight.copy_(first + torch.arange(3).view(1, 1, 1, 3) / 10)
        encoding.mix.bias.fill_(0.05), encoding.out.bias.zero_()
        scores = (q @ k.mT / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        for m in (3, 5):
            row = encoding.transform_scores(scores[:, :, :m, :m], q[:, :, :m], exact(m))[0, 0, 2]
            assert float(row[2]) == pytest.approx(-0.1884266500, abs=1e-10)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def stick_breaking(s, p, heads, spec):
    """Weights (H, n, n) from scores s (H, n, n), each key's product taken anew."""
    weights = np.zeros_like(s)
    for h, i in np.ndindex(s.shape[:2]):
        keys = range(i + 1) if "attend_self=true" in spec else range(i)
        for j in keys:
            weights[h, i, j] = sigmoid(s[h, i, j]) * np.prod([1 - sigmoid(s[h, i, t]) for t in keys if t > j])
        if "value" in spec:
            weights[h, i, i] += 1 - weights[h, i].sum()
    return weights


def alibi(s, heads):
    i = np.arange(s.shape[1])
    return s - np.array(alibi_slopes(heads))[:, None, None] * (i[:, None] - i)


def selective(s, p, heads, spec):
    s, weights = alibi(s, heads) if "alibi" in spec else s, np.zeros_like(s)
    for h, i in np.ndindex(s.shape[:2]):
        masks = [sum(max(0, s[0, t, j]) for t in range(j + 1, i)) if j > 0 else 0 for j in range(i + 1)]
        weights[h, i, : i + 1] = softmax(s[h, i, : i + 1] - np.array(masks))
    return weights


def dape(s, p, heads, spec):
    n, inputs = s.shape[1], np.concatenate([s, alibi(s, heads) - s])  # (2H, n, n)
    weights, w, b = np.zeros_like(s), p["mix.weight"][:, :, 0], p["mix.bias"]
    for i in range(n):
        hidden = np.zeros((len(b), i + 3))  # column j + 1: units of key j; 0 for those before the first and after i
        for j in range(i + 1):
            parts = [w[:, :, t] @ inputs[:, i, j + t - 1] for t in range(3) if 0 <= j + t - 1 <= i]
            hidden[:, j + 1] = b + sum(parts)
        hidden[:, 1 : i + 2] = np.where(hidden > 0, hidden, 0.01 * hidden)[:, 1 : i + 2]
        changes = [sum(p["out.weight"][:, :, 0, t] @ hidden[:, j + t] for t in range(3)) for j in range(i + 1)]
        total = alibi(s, heads)[:, i, : i + 1] + np.array(changes).T + p["out.bias"][:, None]
        weights[:, i, : i + 1] = softmax(total)
    return weights


@pytest.mark.parametrize("spec", [*STICKS, *EACH[2:]])
def test_outputs_are_those_of_the_equations(spec, small_blocks):
    equation = globals()[spec.partition(":")[0]]
    for n, heads, width in SHAPES:
        encoding, (q, k, v) = lively(spec, heads, width), vectors(1, heads, n, width)
        p = {name: value.detach().numpy() for name, value in encoding.named_parameters()}
        expected = equation((q @ k.mT)[0].numpy() / math.sqrt(width), p, heads, spec) @ v[0].numpy()
        for backend in ("reference", "sdpa"):
            with torch.no_grad():
                got = attend(q, k, v, encoding, backend=backend)[0].numpy()
            assert np.allclose(got, expected, rtol=1e-9, atol=1e-9), (backend, n)


@pytest.mark.parametrize("spec", EACH)
def test_gradients(spec, monkeypatch):
    """Of blocks of 3 queries, by finite differences; also of parameters and through the state of keys."""
    monkeypatch.setattr(content_bias, "ELEMENTS", 1)
    monkeypatch.setattr(content_bias, "MIN_ROWS", 3)
    encoding, inputs = lively(spec, 2, 4), [x.requires_grad_() for x in vectors(1, 2, 8, 4)]
    learned = list(encoding.parameters())

    def run(q, k, v, *parameters):
        return attend(q, k, v, encoding, backend="sdpa")

    assert torch.autograd.gradcheck(run, (*inputs, *learned), fast_mode=True)


def test_the_state_passes_between_blocks_with_a_null_logit(monkeypatch):
    """The backend computes 150 queries in two blocks, and torch computes the blocks again in the backward pass."""
    monkeypatch.setattr(importlib.import_module("fairseq_rpe.attention.sdpa"), "PAIR_ELEMENTS", 1)
    encoding, inputs = build("selective:null_logit=learned", 2, 8).double(), vectors(1, 2, 150, 4)
    leaves = [*(x.requires_grad_() for x in inputs), *encoding.parameters()]
    grads = []
    for backend in ("reference", "sdpa"):
        out = attend(*inputs, encoding, backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("first_row", ["0011100111011", "1111111111111"])
@pytest.mark.parametrize("spec", EACH)
def test_rows_with_padding_are_rows_without(spec, first_row):
    check_padding(spec, first_row, "1111000011111")


@pytest.mark.parametrize("spec", EACH)
def test_bfloat16(spec):
    q, k, v = (x.bfloat16() for x in vectors(2, 2, 40, 8))
    encoding = lively(spec, 2, 8)
    exact_output = attend(q.double(), k.double(), v.double(), encoding)
    got = attend(q, k, v, encoding.float())
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact_output, rtol=0, atol=2**-8 * float(v.abs().max()))  # of rounding v


@pytest.mark.parametrize("n", [8, 150])
def test_stick_breaking_with_its_remainder_is_twice_differentiable(n):
    encoding = build("stick_breaking:remainder=value,attend_self=true", 2, 16)
    q, k, v = torch.randn(3, 1, 2, n, 8, generator=torch.Generator().manual_seed(0))
    q.requires_grad_()
    [gradient] = torch.autograd.grad(attend(q, k, v, encoding).sum(), q, create_graph=True)
    [second] = torch.autograd.grad(gradient.square().sum(), q)
    assert second.isfinite().all() and second.abs().max() > 0


@torch.no_grad()
def test_weights_of_stick_breaking_with_many_keys():
    """Far weights are 0, not NaN; of 1,000 keys, the nearest add up as in float64."""
    q, k, v = (3 * x for x in vectors(1, 1, 1000, 4))
    got, wide = (attend(x[0], x[1], x[2], "stick_breaking") for x in ((q.float(), k.float(), v.float()), (q, k, v)))
    torch.testing.assert_close(got, wide.float(), rtol=0, atol=2e-5)
    assert torch.equal(got[:, :, 0], torch.zeros(1, 1, 4))  # the first token sees nothing


def test_the_gradient_passes_through_a_cached_state():
    """A loss on later tokens of a text that continues a cache has the gradient of one pass."""
    layer, (x,) = RelativeAttention(16, 2, "selective").double(), vectors(1, 9, 16, count=1)
    grads = []
    for chunks in ([9], [5, 3, 1]):
        cache, inputs = layer.new_cache(), x.clone().requires_grad_()
        out = torch.cat([layer(part, cache) for part in inputs.split(chunks, 1)], 1)
        grads += torch.autograd.grad(out[:, -1].square().sum(), inputs)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("spec", "text"), [("stick_breaking", "(1 - σ(c))^d"), ("selective", "no bound"), (EACH[-1], "no bound")]
)
def test_verdicts(spec, text):
    for head in verdict(spec):
        assert head.decision == DEPENDS and text in head.reason


def test_refusals():
    q, k, v = vectors(1, 2, 6, 4)
    encoding = build("selective", 2, 8)
    with refused("keeps a state of the 4 earlier keys, which this call does not give: attend with all queries"):
        attend(q[:, :, 4:], k, v, encoding)
    for backend in ("flex", "triton"):
        for spec in EACH:
            with refused(f"needs all scores of a query, which backend '{backend}' never holds"):
                attend(q, k, v, build(spec, 2, 8), backend=backend)
    cache = LayerCache()
    cache.append(k, v, None)
    cache.set_key_state(torch.zeros(1, 1, 6, 1))
    with refused("the last 2 tokens have changed the state of earlier keys, so the cache cannot return to 4 tokens"):
        cache.check_truncate(4)
    with refused("StickBreaking computes weights without a softmax, which null_logit is a part of: leave it out"):
        build("stick_breaking:null_logit=zero", 2, 8)
    with refused("'dape': kernel=2 is even, so its neighbourhood has no middle"):
        build("dape:kernel=2", 2, 8)
    with refused("'selective:base=alibi' does not read rope_base"):
        build("selective:base=alibi,rope_base=500", 2, 8)
