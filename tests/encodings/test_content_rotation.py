"""Rotations by angles of the tokens: equations in numpy, published values, RoPE as a special case."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numeric import check_padding, exact, lively, softmax, turned, vectors
from refusal import refused

from fairseq_rpe import attend
from fairseq_rpe.attention import choose_backend
from fairseq_rpe.encodings import build

SHAPES = [(1, 1, 4), (5, 2, 4), (9, 3, 6), (16, 4, 2), (23, 2, 8)]  # tokens, heads, head width
SELECTIVE = ["selective_rope", "selective_rope:rank=0,conv=1,base=20", "selective_rope:offset=true,gate=true,conv=7"]
GRAPE = ["grape_m", "grape_m:per_head=true,base=50"]


def test_published_rows():
    f = torch.arange(20, dtype=torch.float64).view(1, 1, 5, 4)
    t = torch.arange(5, dtype=torch.float64)
    selective, grape = build("selective_rope:conv=1", 1, 4).double(), build("grape_m", 1, 4).double()
    torch.nn.init.ones_(selective.conv)
    phi = torch.stack([0.5 + 0.5 * t.sin(), 1 + 0.3 * t.cos()], dim=-1)[None, None]
    gates = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5], dtype=torch.float64).view(1, 1, 5, 1)
    for encoding, features, row in (
        (selective, phi, [0.3768999751, -0.8047295638, 1.0800618905, -0.9416007365, 0.1446963930]),
        (grape, gates, [0.4051856644, -0.8192960274, 0.9881548506, -0.7615418445, 0.1446963930]),
    ):
        product = encoding.score_product((1 + f).sin(), (1 + f).cos(), exact(5), features, None, None)
        assert (product.products()[0, 0, 4] / 2).tolist() == pytest.approx(row, abs=5e-11)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def weights_of(layer: torch.nn.Linear) -> tuple[np.ndarray, np.ndarray]:
    return layer.weight.numpy().T, layer.bias.numpy()


def selective_angles(encoding, x: np.ndarray, heads: int, pairs: int) -> np.ndarray:
    """Angles (H, n, P) of a text x (n, C), token by token."""
    cfg, n = encoding.config, len(x)
    parts = x.reshape(n, heads, -1)
    parts = parts / np.linalg.norm(parts, axis=2, keepdims=True)
    flat = parts.reshape(n, -1)
    if cfg.rank:
        u = (flat @ encoding.down.weight.numpy().T @ encoding.up.weight.numpy().T).reshape(n, heads, pairs)
    else:
        matrix = encoding.head_weight.numpy()
        matrix = matrix / np.linalg.norm(matrix, axis=1, keepdims=True) * encoding.head_factor.numpy()[:, None, None]
        u = np.stack([parts[:, h] @ matrix[h] for h in range(heads)], axis=1)
    taps, total, angles = encoding.conv.numpy().reshape(heads, pairs, -1), np.zeros((heads, pairs)), []
    for t in range(n):
        phi = sum(taps[..., lag] * u[t - lag] for lag in range(cfg.conv) if lag <= t)
        if encoding.offset is not None:
            phi = phi + np.exp(encoding.offset.numpy())
        if encoding.gate is not None:
            weight, bias = weights_of(encoding.gate)
            phi = phi * sigmoid(flat[t] @ weight + bias)[:, None]
        total = total + phi
        angles.append(total * cfg.base ** (-np.arange(pairs) / pairs))
    return np.stack(angles, axis=1)


def grape_angles(encoding, x: np.ndarray, heads: int, pairs: int) -> np.ndarray:
    """Angles (H, n, P) of a text x (n, C), token by token."""
    weight, bias = weights_of(encoding.project)
    total, angles = np.zeros(heads), []
    for row in x:
        angles.append(total[:, None] * encoding.config.base ** (-np.arange(pairs) / pairs))
        total = total + sigmoid((row @ weight + bias) / 16)
    return np.stack(angles, axis=1) * np.exp(encoding.log_frequency_factor.numpy())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", [*SELECTIVE, *GRAPE])
@torch.no_grad()
def test_equation(spec, shape):
    n, heads, width = shape
    encoding = lively(spec, heads, width)
    q, k, v = vectors(1, heads, n, width)
    (x,) = vectors(1, n, heads * width, count=1, seed=1)
    compute = selective_angles if spec in SELECTIVE else grape_angles
    angles = compute(encoding, x[0].numpy(), heads, width // 2)
    queries, keys = (np.stack([turned(y[0, h].numpy(), angles[h]) for h in range(heads)]) for y in (q, k))
    scores = queries @ keys.transpose(0, 2, 1) * width**-0.5
    weights = softmax(np.where(np.tril(np.ones((n, n))) > 0, scores, -np.inf))
    for backend in ("reference", "sdpa"):
        got = attend(q, k, v, encoding, features=encoding.token_features(x), backend=backend)[0]
        np.testing.assert_allclose(got.numpy(), weights @ v[0].numpy(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("spec", "rope"), [("selective_rope:offset=true", "rope:base=500000"), ("grape_m:base=300", "rope:base=300")]
)
def test_equal_angles_are_rope(spec, rope):
    encoding, (q, k, v) = build(spec, 2, 8).double(), vectors(1, 2, 12, 4)
    features = torch.full((1, 2, 12, 2 if spec.startswith("s") else 1), 0.0 if spec.startswith("s") else 800.0)
    torch.testing.assert_close(attend(q, k, v, encoding, features=features.double()), attend(q, k, v, rope))


def test_long_texts_keep_their_angles():
    """Angles at token 100,000, of which float32 would lose 0.004 rad."""
    encoding = lively("selective_rope:base=1.5,offset=true", 1, 4).float()
    (x,) = vectors(1, 100_000, 4, count=1)
    features = encoding.token_features(x.float())
    q, k, _ = vectors(1, 1, 100_000, 4, dtype=torch.float32)
    pos = exact(100_000)
    far = encoding.score_product(q, k, pos, features, None, None)
    last = slice(-50, None)  # the convolution of the first three of these tokens misses those before
    near = encoding.score_product(q[:, :, last], k[:, :, last], exact(50), features[:, :, last], None, None)
    expected, found = ((x.query[:, :, -40:] @ x.key[:, :, -40:].mT) for x in (near, far))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("spec", [SELECTIVE[2], GRAPE[1]])
def test_every_parameter_has_a_gradient(spec):
    encoding, (q, k, v) = lively(spec, 1, 4), vectors(1, 1, 6, 4)
    features = encoding.token_features(vectors(1, 6, 4, count=1, seed=1)[0])
    gradients = torch.autograd.grad(attend(q, k, v, encoding, features=features).square().sum(), encoding.parameters())
    assert all(gradient.abs().max() > 1e-6 for gradient in gradients)


@pytest.mark.parametrize("spec", ["selective_rope:offset=true", "grape_m"])
def test_padding(spec):
    check_padding(spec, "1111111111111", "0001111111111", "1101111011101")


@pytest.mark.parametrize("spec", ["selective_rope", "grape_m"])
def test_bfloat16_rounds_vectors_and_output(spec):
    encoding, (q, k, v) = lively(spec, 2, 8).float(), vectors(1, 2, 90, 8, dtype=torch.bfloat16)
    features = encoding.token_features(vectors(1, 90, 16, count=1, dtype=torch.bfloat16, seed=1)[0])
    expected = attend(*(t.double() for t in (q, k, v)), encoding, features=features.double(), backend="reference")
    torch.testing.assert_close(attend(q, k, v, encoding, features=features).double(), expected, rtol=2**-6, atol=2**-6)


def test_all_backends_serve_a_product_of_vectors():
    for name in ("reference", "sdpa", "flex", "triton"):
        choose_backend(name, [build("selective_rope", 2, 8), build("grape_m", 2, 8)])


@pytest.mark.parametrize("name", ["selective_rope", "grape_m"])
def test_odd_heads_are_refused(name):
    with refused("must have an even number of elements, not 3"):
        build(name, 2, 6)
