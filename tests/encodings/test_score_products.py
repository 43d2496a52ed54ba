"""Encodings that replace q·k: equations in numpy, published values, chunks and blocks against the definition.

Derivatives, caches, documents and shared keys are tested here for encodings of test_content_rotation, too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numeric import check_padding, exact, lively, softmax, vectors
from refusal import refused

from fairseq_rpe import RelativeAttention, attend
from fairseq_rpe.analysis.convergence import DEPENDS, verdict
from fairseq_rpe.attention import choose_backend, content_bias
from fairseq_rpe.encodings import build, path_attention, wall
from fairseq_rpe.encodings.path_attention import PathProduct
from fairseq_rpe.encodings.wall import WallProduct

SHAPES = [(1, 1, 4), (5, 2, 4), (9, 3, 6), (16, 4, 2), (23, 2, 8)]  # tokens, heads, head width
PATHS = ["path", "path:gate=forget", "path:gate=forget,scaled_gate=true", "path:rank=0,conv=0"]
WALLS = ["wall", "wall:gate=forget"]
GATES = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5], dtype=torch.float64)  # logits of forget gates


def toy() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The index f = 4·row + column, q, k and v of five tokens of width 4."""
    f = torch.arange(20, dtype=torch.float64).view(1, 1, 5, 4)
    return f, (1 + f).sin(), (1 + f).cos(), ((1 + f) / 2).sin()


def toy_path() -> PathProduct:
    f, q, k, _ = toy()
    w = torch.nn.functional.normalize((2 + f).cos(), dim=-1)
    return PathProduct(q, k, w, 2 * torch.arange(5.0, dtype=torch.float64).sin().sigmoid()[None, None])


def toy_wall() -> WallProduct:
    f, q, k, _ = toy()
    return WallProduct(q, k, torch.nn.functional.logsigmoid(2 + (3 + f).sin()).cumsum(2))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4 queries, chunks of 3 tokens, and 2 tokens whose pairs are summed element by element."""
    monkeypatch.setattr(content_bias, "ELEMENTS", 1)
    monkeypatch.setattr(content_bias, "MIN_ROWS", 4)
    monkeypatch.setattr(path_attention, "CHUNK", 3)
    monkeypatch.setattr(wall, "PAIRS", 2)


@pytest.mark.parametrize("prepared", [False, True])
def test_published_rows(prepared, small_blocks):
    expected = {
        toy_path(): {
            2: [0.2412741035, -0.3961411483, -0.1881179168],
            4: [0.3658748736, -0.3523714944, 0.6026586322, -0.6888949970, 0.1446963930],
        },
        toy_wall(): {4: [-0.2525066813, -0.3256721429, 0.8831616543, -0.8777983607, 0.1446963930]},
    }
    for product, rows in expected.items():
        scores = (product.prepare_blocks() if prepared else product).products()[0, 0] / 2
        for row, values in rows.items():
            assert scores[row, : row + 1].tolist() == pytest.approx(values, abs=5e-11)


@pytest.mark.parametrize(
    ("spec", "row", "output"),
    [
        ("path", None, [0.0633908325, 0.0651327098, 0.0509278281, 0.0242540380]),
        ("path:gate=forget", [-1.8616534967, -2.2666381772, 0.0016536370, -1.1629719812, 0.1446963930], None),
        (
            "path:gate=forget,scaled_gate=true",
            [-0.7478893116, -1.3095048358, 0.3021561346, -0.9259334891, 0.1446963930],
            [0.0203270289, -0.0340560477, -0.0801010161, -0.1065344621],
        ),
    ],
)
def test_published_outputs_of_path(spec, row, output):
    _, q, k, v = toy()
    encoding = build(spec, 1, 4).double()
    bias = encoding.content_bias(q, k, exact(5), torch.cat([q, q[..., :1], GATES.view(1, 1, 5, 1)], -1))
    scores = toy_path().products()[0, 0, 4] / 2 + (0 if bias is None else bias.materialize(exact(5))[0, 0, 4])
    if row is not None:
        assert scores.tolist() == pytest.approx(row, abs=5e-10)
    if output is not None:
        assert (scores.softmax(-1) @ v[0, 0]).tolist() == pytest.approx(output, abs=5e-9)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def path_scores(encoding, q, k, x) -> np.ndarray:
    """Scores (H, n, n) of one text, from products of the matrices H of single tokens."""
    heads, n, width = q.shape
    u = (x if encoding.down is None else x @ encoding.down.weight.numpy().T) @ encoding.up.weight.numpy().T
    if encoding.config.conv:
        taps = encoding.conv.numpy()
        u = np.stack([sum(taps[:, t] * u[i - t] for t in range(taps.shape[1]) if t <= i) for i in range(n)])
        u = u * sigmoid(u)
    beta = 2 * sigmoid(x @ encoding.strength.weight.numpy().T + encoding.strength.bias.numpy())  # (n, H)
    scores = np.zeros((heads, n, n))
    for h in range(heads):
        w = u[:, h * width : (h + 1) * width]
        w = w / np.linalg.norm(w, axis=1, keepdims=True)
        matrices = [np.eye(width) - beta[t, h] * np.outer(w[t], w[t]) for t in range(n)]
        for i in range(n):
            vector = q[h, i]
            for j in range(i, -1, -1):
                scores[h, i, j] = vector @ k[h, j] / width**0.5
                vector = vector @ matrices[j]
    return scores


def wall_scores(encoding, q, k, x) -> np.ndarray:
    """Scores (H, n, n) of one text, pair by pair."""
    heads, n, width = q.shape
    gates = sigmoid(x @ encoding.project.weight.numpy().T + encoding.project.bias.numpy()).reshape(n, heads, width)
    scores = np.zeros((heads, n, n))
    for h in range(heads):
        for i in range(n):
            for j in range(i + 1):
                scores[h, i, j] = (q[h, i] * k[h, j] * gates[j + 1 : i + 1, h].prod(0)).sum() / width**0.5
    return scores


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
@pytest.mark.parametrize("spec", [*PATHS, *WALLS])
def test_equation(spec, shape, small_blocks):
    n, heads, width = shape
    encoding = lively(spec, heads, width)
    q, k, v = vectors(1, heads, n, width)
    (x,) = vectors(1, n, heads * width, count=1, seed=1)
    arrays = q[0].numpy(), k[0].numpy(), x[0].numpy()
    scores = path_scores(encoding, *arrays) if spec in PATHS else wall_scores(encoding, *arrays)
    if encoding.gate is not None:
        log_gates = np.log(sigmoid(encoding.gate(x)[0].numpy().T))  # (H, n)
        scale = width**-0.5 if "scaled" in spec else 1.0
        for i in range(n):
            for j in range(i + 1):
                scores[:, i, j] += scale * log_gates[:, j + 1 : i + 1].sum(1)
    weights = softmax(np.where(np.tril(np.ones((n, n))) > 0, scores, -np.inf))
    for backend in ("reference", "sdpa"):
        got = attend(q, k, v, encoding, features=encoding.token_features(x), backend=backend)[0]
        np.testing.assert_allclose(got.numpy(), weights @ v[0].numpy(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("n", [11, 40])
@pytest.mark.parametrize("spec", ["path:gate=forget", "path:local=3", "wall"])
def test_gradients_of_blocks(spec, n, small_blocks):
    encoding, results = lively(spec, 2, 4), []
    tensors = [x.requires_grad_() for x in (*vectors(2, 2, n, 4), *vectors(2, n, 8, count=1, seed=1))]
    for backend in ("reference", "sdpa"):
        q, k, v, x = tensors
        out = attend(q, k, v, encoding, features=encoding.token_features(x), backend=backend)
        results.append(torch.autograd.grad(out, [*tensors, *encoding.parameters()], torch.ones_like(out).cumsum(2)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("spec", ["path:gate=forget", "wall", "selective_rope:offset=true,gate=true", "grape_m"])
def test_first_and_second_derivatives(spec, small_blocks):
    encoding = lively(spec, 1, 2)
    tensors = [x.requires_grad_() for x in (*vectors(1, 1, 6, 2), *vectors(1, 6, 2, count=1, seed=1))]

    def call(q, k, v, x):
        return attend(q, k, v, encoding, features=encoding.token_features(x), backend="sdpa")

    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


CACHED = ["path:gate=forget", "path:conv=5,rank=0", "path:block=6", "wall:local=3"]
CACHED += [
    "selective_rope:offset=true,gate=true,conv=7",
    "selective_rope:local=5",
    "grape_m:per_head=true",
    "grape_m:block=6",
]


@pytest.mark.parametrize("spec", CACHED)
def test_cache_in_any_steps(spec, small_blocks):
    layer = RelativeAttention(8, 2, lively(spec, 2, 4)).double().eval()
    (x,) = vectors(2, 17, 8, count=1)
    with torch.no_grad():
        expected = layer(x)
        for steps in ([17], [1] * 17, [5, 1, 1, 7, 3]):
            cache = layer.new_cache()
            got = torch.cat([layer(part, cache) for part in x.split(steps, dim=1)], dim=1)
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_last_queries_without_a_cache():
    """Queries whose earlier keys come untransformed, with the features of all tokens."""
    encoding, (q, k, v) = lively("path", 2, 4), vectors(1, 2, 70, 4)
    features = encoding.token_features(vectors(1, 70, 8, count=1, seed=1)[0])
    expected = attend(q, k, v, encoding, features=features)[:, :, 66:]
    torch.testing.assert_close(attend(q[:, :, 66:], k, v, encoding, features=features), expected)


def test_decayed_keys_underflow_to_zero():
    """Gates of exp(-50) over 40 tokens: sums of 2,000 nats, which single exponentials do not hold."""
    q, k, _ = vectors(1, 1, 40, 4, dtype=torch.float32)
    product = WallProduct(q, k, torch.full((1, 1, 40, 4), -50.0, dtype=torch.float64).cumsum(2))
    products = product.prepare_blocks().products()[0, 0].tril()
    torch.testing.assert_close(products, torch.diag((q * k).sum(-1)[0, 0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", ["path", "wall"])
def test_gates_that_do_nothing_give_attention_without_positions(spec):
    encoding, (q, k, v) = build(spec, 2, 8).double(), vectors(1, 2, 12, 4)
    features = torch.full((1, 2, 12, 5 if spec == "path" else 4), -800.0 if spec == "path" else 800.0).double()
    torch.testing.assert_close(attend(q, k, v, encoding, features=features), attend(q, k, v, "nope"))


def test_reflections_alternate_the_sign():
    """With β = 2 and one direction, each token reflects its component of the key."""
    w = torch.tensor([1.0, 0.0]).expand(1, 1, 6, 2)
    product = PathProduct(w, w, w, torch.full((1, 1, 6), 2.0))
    assert product.products()[0, 0, 5].tolist() == [-1.0, 1.0, -1.0, 1.0, -1.0, 1.0]


@pytest.mark.parametrize("spec", ["path:gate=forget", "wall"])
def test_padding(spec):
    check_padding(spec, "1111111111111", "0001111111111")


@pytest.mark.parametrize("spec", ["path", "selective_rope", "grape_m"])
def test_documents_share_a_row(spec):
    encoding = lively(spec, 2, 4)
    (q, k, v), (x,) = vectors(1, 2, 12, 4), vectors(1, 12, 8, count=1, seed=1)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    together = attend(q, k, v, encoding, features=encoding.token_features(x), documents=documents)
    alone = attend(*(t[:, :, 5:] for t in (q, k, v)), encoding, features=encoding.token_features(x[:, 5:]))
    torch.testing.assert_close(together[:, :, 5:], alone)


@pytest.mark.parametrize("spec", ["path", "wall"])
def test_bfloat16_rounds_the_output_alone(spec):
    encoding, (q, k, v) = lively(spec, 2, 8).float(), vectors(1, 2, 90, 8, dtype=torch.bfloat16)
    features = encoding.token_features(vectors(1, 90, 16, count=1, dtype=torch.bfloat16, seed=1)[0])
    expected = attend(*(t.double() for t in (q, k, v)), encoding, features=features.double(), backend="reference")
    got = attend(q, k, v, encoding, features=features)
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("spec", ["path", "selective_rope"])
def test_grouped_keys_equal_repeated_ones(spec):
    encoding, (q, k, v) = lively(spec, 4, 4), vectors(1, 4, 9, 4)
    features = encoding.token_features(vectors(1, 9, 16, count=1, seed=1)[0])
    k, v = k[:, :2], v[:, :2]
    expected = attend(q, *(t.repeat_interleave(2, 1) for t in (k, v)), encoding, features=features)
    torch.testing.assert_close(attend(q, k, v, encoding, features=features), expected)


def test_state_of_chunks_with_earlier_keys():
    product = replace(toy_path(), first=2)
    begun = toy_path().select(slice(0, 2), slice(0, 2)).key_state()
    rest = replace(product, query=product.query[:, :, 2:], key=torch.cat([begun, product.key[:, :, 2:]], 2))
    torch.testing.assert_close(rest.key_state(), toy_path().key_state())


def test_verdicts():
    for name in ("path", "wall"):
        for spec, decision in ((name, "diverges"), (f"{name}:gate=forget", DEPENDS)):
            assert {head.decision for head in verdict(spec)} == {decision}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("path:scaled_gate=true", 2, 8), "has no gate to scale"),
        (lambda: choose_backend("flex", [build("path", 2, 8)]), "replaces the product of q and k"),
        (lambda: choose_backend("triton", [build("wall", 2, 8)]), "replaces the product of q and k"),
        (lambda: build("wall", 2, 8, head_width=8), "leave --head-dim out"),
    ],
)
def test_refusals(call, message):
    with refused(message):
        call()
