"""GRAPE-A, forget gates of pairs and FoPE: published rows, FoPE's equation, gradients, padding, the cache, backends.

The equations of the first two, pair by pair, are in ``test_content_bias.py``.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numeric import check_padding, exact, lively, vectors
from refusal import refused

from fairseq_rpe import attend
from fairseq_rpe.analysis.convergence import DEPENDS, DIVERGES, verdict
from fairseq_rpe.attention import content_bias
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.alibi import alibi_slopes
from fairseq_rpe.encodings.model import build_for_model, load_weights

GATES = ["grape_a", "grape_a:gate=query", "grape_a:gate=both"]
EACH = [*GATES, "pairwise_forgetting", "fope:original_length=30", "fope:original_length=30,padding=code"]
# scores of the fifth of five tokens whose q and k are sin(1 + f) and cos(1 + f) at index f = 4·row + column
TOY = {
    GATES[0]: [-1.7002945680, -1.4605656539, 0.2706089968, -1.2577662257, 0.1446963930],
    GATES[1]: [-2.2288394643, -1.8214279492, 0.2621639552, -1.4198323305, 0.1446963930],
    GATES[2]: [-3.4531127987, -2.7751793270, -0.6058001186, -1.6959707834, 0.1446963930],
    "fope:base=4,original_length=13": [0.3840262653, -0.4261916222, 0.3353617586, -0.2663625498, 0.1428388996],
    "fope:original_length=7,gain=0,padding=code": [
        -0.3954716681, -0.8289904225, 1.2782741168, -0.9933555815, 0.0830299697,
    ],
    "fope:original_length=7,gain=0": [-0.2533617319, -0.4020358201, 0.5780118761, -0.5048662908, 0.1446963930],
}  # fmt: skip


def toy() -> list[torch.Tensor]:
    f = torch.arange(1, 21, dtype=torch.float64).view(1, 1, 5, 4)
    return [f.sin(), f.cos()]


@torch.no_grad()
def scores_of(encoding, q, k, pos):
    q, k = encoding.rotate(q, pos.q, pos), encoding.rotate(k, pos.k, pos, key=True)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    bias = encoding.content_bias(q, k, pos, None)
    return scores if bias is None else scores + bias.materialize(pos)


@torch.no_grad()
def published(spec):
    """With the gates, the slope 1/2 and the matrices of the published rows."""
    encoding = build(spec, 1, 4).double()
    if "grape_a" in spec:
        encoding.raw_slope.fill_(0.5 / alibi_slopes(1)[0])  # softplus(128) = 128
        for vector in (encoding.u, encoding.v):
            if vector is not None:
                vector.copy_(torch.tensor([1, -1, 0.5, 2]))
    elif "gain" not in spec:  # both pairs have a position, unlike in the encoding
        encoding.sine_matrix = torch.tensor([[[1, 0.1], [0.2, 1]]], dtype=torch.float64)
        encoding.cosine_matrix = torch.tensor([[[1, -0.1], [0.3, 1]]], dtype=torch.float64)
    return encoding


@pytest.mark.parametrize("spec", TOY)
def test_published_row(spec):
    encoding = published(spec)
    assert scores_of(encoding, *toy(), exact(5))[0, 0, 4].tolist() == pytest.approx(TOY[spec], abs=6e-11)
    if "grape_a" in spec:  # also from every pair by itself, as at positions of no even spacing
        uneven = Positions(exact(5).q, exact(5).k, None, contiguous=False)
        assert scores_of(encoding, *toy(), uneven)[0, 0, 4].tolist() == pytest.approx(TOY[spec], abs=6e-11)


@pytest.mark.parametrize("padding", ["identity", "code"])
@pytest.mark.parametrize(("heads", "width", "length", "frequencies"), [(1, 4, 8, 1), (2, 8, 64, 2), (3, 16, 700, 5)])
def test_fope_is_the_equation(heads, width, length, frequencies, padding):
    torch.manual_seed(0)
    encoding = build(f"fope:padding={padding}", heads, heads * width, length).double()
    sines, cosines = encoding.sine_matrix.numpy(), encoding.cosine_matrix.numpy()
    pairs = min(frequencies, width // 4)
    thetas = [t for s in range(width // 2) if (t := 10000 ** (-2 * s / width)) >= 2 * math.pi / length]
    assert sines.shape == cosines.shape == (heads, frequencies, pairs) and len(thetas) == frequencies
    (x,) = vectors(2, heads, 11, width, count=1)
    got = encoding.rotate(x, exact(11).q, exact(11)).numpy()
    for h, p, s in np.ndindex(heads, 11, width // 2):
        first, second = x[:, h, p, s].numpy(), x[:, h, p, s + width // 2].numpy()
        cos, sin = 1.0, float(padding == "code")
        if s < pairs:
            cos = sum(math.cos(p * t) * cosines[h, f, s] for f, t in enumerate(thetas))
            sin = sum(math.sin(p * t) * sines[h, f, s] for f, t in enumerate(thetas))
        assert np.allclose(got[:, h, p, s], first * cos - second * sin, rtol=0, atol=1e-12)
        assert np.allclose(got[:, h, p, s + width // 2], second * cos + first * sin, rtol=0, atol=1e-12)


def test_matrices_of_fope():
    """Identity, or every second row of it, plus noise of torch's Xavier rule for three sizes."""
    assert build("fope:gain=0", 2, 16, 700).sine_matrix.tolist() == [[[1, 0], [0, 0], [0, 1]]] * 2
    torch.manual_seed(0)
    wide = build("fope:gain=0.6", 4, 1024, 4096)
    for matrix in (wide.sine_matrix, wide.cosine_matrix):
        noise = matrix - build("fope:gain=0", 4, 1024, 4096).sine_matrix
        assert float(noise.std()) == pytest.approx(0.6 * math.sqrt(2 / ((91 + 4) * 64)), rel=0.02)
    assert not torch.equal(wide.sine_matrix, wide.cosine_matrix)


def test_layers_of_fope_have_matrices_of_their_own_that_checkpoints_store():
    trained, made = (build_for_model("fope", 4, 32, 2, 64) for _ in range(2))
    assert len(trained) == 2 and not torch.equal(trained[0].sine_matrix, trained[1].sine_matrix)
    assert load_weights(made, [x.state_dict() for x in trained]) is None
    assert all(torch.equal(a.cosine_matrix, b.cosine_matrix) for a, b in zip(made, trained, strict=True))
    assert not list(made.parameters())


@pytest.mark.parametrize("spec", EACH)
def test_gradients(spec, monkeypatch):
    """By finite differences, of blocks of 3 queries; also of the parameters and of a layer's input."""
    monkeypatch.setattr(content_bias, "ELEMENTS", 1)
    monkeypatch.setattr(content_bias, "MIN_ROWS", 3)
    encoding, inputs = lively(spec, 2, 4), vectors(1, 2, 8, 4)
    (x,) = vectors(1, 8, 8, count=1, seed=1)
    inputs = [t.requires_grad_() for t in (*inputs, x)][: 4 if encoding.has_token_features else 3]

    def run(q, k, v, *others):
        features = encoding.token_features(others[0]) if encoding.has_token_features else None
        return attend(q, k, v, encoding, backend="sdpa", features=features)

    assert torch.autograd.gradcheck(run, (*inputs, *encoding.parameters()), fast_mode=True)


@pytest.mark.parametrize("spec", EACH)
def test_rows_with_padding_are_rows_without(spec):
    check_padding(spec, "0011100111011", "1001100011111")


@pytest.mark.parametrize("spec", EACH)
def test_bfloat16(spec):
    encoding, (x,) = lively(spec, 2, 8), vectors(2, 40, 16, count=1)
    q, k, v = (t.bfloat16() for t in vectors(2, 2, 40, 8))
    wide = attend(q.double(), k.double(), v.double(), encoding, features=encoding.token_features(x))
    got = attend(q, k, v, encoding.bfloat16().float(), features=encoding.token_features(x.float()))
    assert got.dtype == torch.bfloat16
    # rotated queries and keys are rounded
    limit = 2**-6 if encoding.rotates else 2**-8
    torch.testing.assert_close(got.double(), wide, rtol=0, atol=limit * float(v.abs().max()))


def test_triton_refuses_gates():
    pytest.importorskip("triton", reason="needs the package triton")
    q, k, v = vectors(1, 2, 6, 4)
    for spec in EACH[:4]:
        encoding = build(spec, 2, 8)
        with refused("one of each, and this bias has other terms: use 'sdpa'"):
            attend(q, k, v, encoding, backend="triton", features=encoding.token_features(torch.zeros(1, 6, 8)))


@torch.no_grad()
def test_an_offset_of_positions_changes_fope_and_not_grape_a():
    q, k, v = vectors(1, 2, 9, 8)
    for spec, is_relative in (("grape_a", True), ("rope", True), (EACH[-2], False)):
        encoding = lively(spec, 2, 8)
        near, far = (attend(q, k, v, encoding, positions=torch.arange(9.0).double() + start) for start in (0, 50))
        assert torch.allclose(near, far, rtol=0, atol=1e-9) == is_relative


@torch.no_grad()
def test_gates_near_zero_are_alibi_with_slopes_of_ln_2():
    encoding, (q, k) = build("grape_a", 4, 32).double(), vectors(1, 4, 40, 8, count=2)
    encoding.u.zero_()
    bias = encoding.content_bias(q, k, exact(40), None).materialize(exact(40))
    expected = math.log(2) * build("alibi", 4, 32).bias_profile(40)
    torch.testing.assert_close(bias[0, :, -1].flip(-1), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("spec", "decision", "text"),
    [
        ("grape_a", DEPENDS, "converges for queries and keys of bounded norm, at no rate that holds for all"),
        ("pairwise_forgetting", DEPENDS, "1/(1 - f) where no gate of a text is above f < 1"),
        (EACH[-1], DIVERGES, "mixtures of sines are bounded"),
    ],
)
def test_verdicts(spec, decision, text):
    for head in verdict(spec):
        assert head.decision == decision and text in head.reason


def test_fope_needs_as_many_key_heads():
    q, k, v = (x[:, :heads] for x, heads in zip(vectors(1, 4, 6, 4), (4, 2, 2), strict=True))
    with refused("'fope' has a rotation for each of 4 heads, and there are 2 key heads: use as many key heads"):
        attend(q, k, v, build(EACH[-1], 4, 16))
