"""PoPE: published rows, the equation in numpy, gradients, padding, caches, half precision, backends.

``test_option_backends`` compares flex and triton with the reference.
"""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import torch
from numeric import check_padding, exact, lively, softmax, vectors
from refusal import refused

from fairseq_rpe import attend
from fairseq_rpe.analysis.convergence import DIVERGES, verdict
from fairseq_rpe.attention import BACKENDS, autotune, autotune_inputs
from fairseq_rpe.attention.forward import build_plan, run_attention
from fairseq_rpe.attention.reference import attention_weights
from fairseq_rpe.core import Positions, UserError
from fairseq_rpe.core.bias import RelativeValues
from fairseq_rpe.core.rotation_regions import RotationRegion
from fairseq_rpe.decoder.cache import LayerCache
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.base import Encoding
from fairseq_rpe.encodings.contract import check
from fairseq_rpe.encodings.model_rotation import complete_spec_for_checkpoint

H, D = 4, 8
HAS_TRITON = importlib.util.find_spec("triton") is not None
# options with calls of each path of sdpa: n queries, m keys and G key heads
CALLS = {
    "fused": ("pope", 150, 150, 4),
    "key heads": ("pope", 150, 150, 2),
    "window": ("pope:local=20", 90, 90, 2),
    "softcap": ("pope:softcap=2", 90, 90, 4),
    "last queries": ("pope", 5, 40, 2),
    "one query": ("pope", 1, 40, 2),
    "block and null logit": ("pope:block=30,null_logit=learned", 90, 90, 1),
    "query scale": ("pope:query_scale=ssmax", 40, 40, 2),
}


@torch.no_grad()
def scores_of(encoding, q, k, pos):
    q, k = encoding.rotate(q, pos.q, pos), encoding.rotate(k, pos.k, pos, key=True)
    return q @ k.mT / math.sqrt(q.shape[-1])


def logits(q: np.ndarray, k: np.ndarray, phase: np.ndarray, at: np.ndarray, base: float = 10000.0) -> np.ndarray:
    """The score of each pair, (n, m), of one head: q (n, D), k (m, D), phase (D,), positions (m,)."""
    width = q.shape[1]
    theta = base ** (-np.arange(width) / width)
    magnitudes = [np.log1p(np.exp(x)) for x in (q, k)]
    angles = (at[-len(q) :, None] - at)[:, :, None] * theta - phase  # (n, m, D)
    return np.einsum("ic,jc,ijc->ij", *magnitudes, np.cos(angles)) / math.sqrt(width)


@pytest.mark.parametrize(
    ("phase", "row"),
    [
        ([0.0, 0.0, 0.0, 0.0], [0.3679453699, 0.9302483652, 1.0644346986, 0.6069211654, 1.3764488970]),
        ([-0.5, -1.0, -2.0, -3.0], [-0.3318909699, -0.6421706947, -0.8789633599, -0.1827322807, -0.5846937336]),
    ],
)
def test_published_row(phase, row):
    """Scores of the fifth of five tokens whose q and k are sin(1 + f) and cos(1 + f) at index f = 4·row + column."""
    f = torch.arange(1, 21, dtype=torch.float64).view(1, 1, 5, 4)
    encoding = build("pope", 1, 4).double()
    assert not encoding.phase.any()
    encoding.phase.data.copy_(torch.tensor([phase]))
    assert scores_of(encoding, f.sin(), f.cos(), exact(5))[0, 0, 4].tolist() == pytest.approx(row, abs=6e-11)


@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "n", "m", "base"),
    [(1, 1, 4, 5, 5, 10000), (2, 2, 1, 7, 7, 100), (4, 2, 6, 3, 11, 10000), (6, 1, 5, 9, 9, 50), (2, 2, 16, 1, 20, 7)],
)
def test_attention_is_the_equation(heads, key_heads, width, n, m, base):
    encoding = lively(f"pope:base={base},init=uniform", heads, width)
    (q,), (k, v) = vectors(2, heads, n, width, count=1), vectors(2, key_heads, m, width, count=2, seed=1)
    at = torch.arange(m).double() * 1.5 + 3
    got = attend(q, k, v, encoding, positions=at).detach().numpy()
    future = np.triu(np.ones((n, m), dtype=bool), m - n + 1)
    for row, head in np.ndindex(2, heads):
        key_head = head // (heads // key_heads)
        phase = encoding.phase[head].detach().numpy()
        scores = logits(q[row, head].numpy(), k[row, key_head].numpy(), phase, at.numpy(), base)
        expected = softmax(np.where(future, -np.inf, scores)) @ v[row, key_head].numpy()
        assert np.allclose(got[row, head], expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_options_act_on_the_scores():
    """Softcap, factor of queries and null logit: the factor is one of scores, not of what softplus reads."""
    encoding = build("pope:softcap=2,query_scale=constant,query_scale_value=3,null_logit=zero", 1, 4).double()
    q, k, v = vectors(1, 1, 6, 4)
    scores = 3 * logits(*(x[0, 0].numpy() for x in (q, k)), np.zeros(4), np.arange(6.0))
    scores = np.where(np.triu(np.ones((6, 6)), 1) > 0, -np.inf, 2 * np.tanh(scores / 2))
    expected = softmax(np.concatenate([scores, np.zeros((6, 1))], 1))[:, :-1] @ v[0, 0].numpy()
    for backend in ("reference", "sdpa"):
        assert np.allclose(attend(q, k, v, encoding, backend=backend)[0, 0], expected, rtol=0, atol=1e-12)


def run(backend: str, spec: str, n: int, m: int, key_heads: int, *, dtype=torch.float64, width=D, **call):
    """Return the output and the gradients of q, k, v and the parameters."""
    encoding = lively(spec, H, width).to(dtype)
    (q,), (k, v) = vectors(2, H, n, width, count=1), vectors(2, key_heads, m, width, count=2, seed=1)
    (grad,) = vectors(2, H, n, width, count=1, seed=2)
    inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    torch.manual_seed(3)
    out = attend(*inputs, encoding, backend=backend, **call)
    return [out, *torch.autograd.grad(out, [*inputs, *encoding.parameters()], grad.to(dtype))]


@pytest.mark.parametrize("name", CALLS)
def test_sdpa_equals_the_reference(name):
    for a, b in zip(run("reference", *CALLS[name]), run("sdpa", *CALLS[name]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_sdpa_with_dropout_documents_and_padding():
    n = 150
    numbers = torch.tensor([[0] * 60 + [1] * 90, [0] * 149 + [1]])
    padding = torch.arange(n) < torch.tensor([[3], [0]])
    for call in ({"dropout": 0.3}, {"documents": numbers}, {"padding": padding}):
        for a, b in zip(*(run(x, "pope", n, n, 2, **call) for x in ("reference", "sdpa")), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.skipif(not HAS_TRITON, reason="needs the package triton")
def test_triton_refuses_heads_whose_rotation_is_too_narrow():
    with refused("backend 'triton' takes head widths from 32 to 256 in steps of 8, not 16: use 'sdpa'"):
        run("triton", "pope", 5, 5, 4, dtype=torch.float32)


@torch.no_grad()
def test_pruning():
    """Within the window of a table; without one it is refused, as for all rotations."""
    q, k, v = vectors(1, 2, 1100, 4)
    outputs = []
    for prune in (0.0, 1e-6):
        encoding = lively("pope:local=600", 2, 4)
        outputs.append(run_attention(q, k, v, build_plan(encoding, exact(1100), None, BACKENDS["sdpa"], prune)))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=2e-6 * float(v.abs().max()))
    with refused("pruning needs a bias of the distance"):
        run_attention(q, k, v, build_plan(lively("pope", 2, 4), exact(1100), None, BACKENDS["sdpa"], 1e-6))


def test_the_backend_is_chosen_for_the_widths_of_keys_and_values():
    """Candidates are verified on a sample with narrow values; a rotation of equal widths has another signature."""
    q, k, v = (x.float().requires_grad_() for x in vectors(2, H, 20, D))
    made = []
    tuner = autotune.Autotuner(
        {"sdpa": BACKENDS["sdpa"], "wrong": lambda q, k, v, *_: made.append(v.shape) or v + 0 * q[..., :D]},
        applies=lambda q: True,
        machine=lambda device: {},
    )
    plan = build_plan(build("pope", H, H * D), Positions.arange(20), None, tuner)
    wide_q, wide_k = (plan.rotate(x, plan.positions.q, plan.positions, key=key) for x, key in ((q, False), (k, True)))
    assert tuner.choose(wide_q, wide_k, v, plan) == "sdpa" and made == [(autotune_inputs.ROWS, H, 19, D)]
    signature = autotune.call_signature(wide_q, wide_k, v, plan)
    assert (signature.head_width, signature.value_width) == (2 * D, D) and f"values of width {D}" in str(signature)
    assert autotune.call_signature(q, k, v, plan).value_width == 0


def test_gradients():
    """By finite differences, also of the phases; and second derivatives."""
    encoding = lively("pope", 2, 4)
    q, k, v = (x.requires_grad_() for x in vectors(1, 2, 7, 4))
    call = lambda *inputs: attend(*inputs[:3], encoding)  # noqa: E731  (the phases are inputs of gradcheck alone)
    assert torch.autograd.gradcheck(call, (q, k, v, encoding.phase), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (q, k, v, encoding.phase), fast_mode=True)
    one_query = lambda q, k, v, _: attend(q[:, :, -1:], k, v, encoding)  # noqa: E731
    assert torch.autograd.gradgradcheck(one_query, (q, k, v, encoding.phase), fast_mode=True)


def test_a_phase_above_zero_keeps_its_gradient():
    """Unlike in the public code, which clamps phases to [-2π, 0]; both compute the same function of the angle."""
    encoding, (q, k) = lively("pope", 2, 4), vectors(1, 2, 7, 4, count=2)
    scores, gradients = [], []
    for turns in (0, 1):
        encoding.phase.data.copy_(torch.full((2, 4), 0.5 - turns * 2 * math.pi, dtype=torch.float64))
        pos = exact(7)
        rotated = encoding.rotate(q, pos.q, pos), encoding.rotate(k, pos.k, pos, key=True)
        scores.append((rotated[0] @ rotated[1].mT).detach())
        gradients.append(torch.autograd.grad((rotated[0] @ rotated[1].mT)[..., -1, :].sum(), encoding.phase)[0])
    for a, b in (scores, gradients):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert gradients[0].abs().min() > 1e-3


@torch.no_grad()
def test_initial_phases_and_their_log():
    torch.manual_seed(0)
    encoding = build("pope:init=uniform", 8, 512)
    assert -2 * math.pi <= encoding.phase.min() < -6 and -0.3 < encoding.phase.max() <= 0
    encoding.phase.copy_(torch.tensor([0.0, -math.pi, -2 * math.pi + 0.5, 0.5] * 16).expand(8, 64))
    torch.testing.assert_close(encoding.logged_scalars(), {"phase_distance": torch.full((8,), (math.pi + 1) / 4)})
    assert not build("pope", 8, 512).logged_scalars()["phase_distance"].any()
    assert encoding.bfloat16().phase.dtype == torch.float32


def test_rows_with_padding_are_rows_without():
    check_padding("pope:init=uniform", "0011100111011", "1001100011111")


@torch.no_grad()
def test_a_cache_holds_rotated_keys_and_values_of_other_widths():
    """Step by step in half precision: keys are rounded once, as in a full pass."""
    encoding = lively("pope", 2, 4).float()
    q, k, v = (x.bfloat16() for x in vectors(2, 2, 9, 4))
    whole = run_attention(q, k, v, build_plan(encoding, Positions.arange(9), None, BACKENDS["sdpa"]))
    cache, pieces = LayerCache(), []
    for token in range(9):
        step = slice(token, token + 1)
        plan = build_plan(encoding, Positions.arange(1, token + 1), None, BACKENDS["sdpa"], keys_rotated=True)
        rotated = plan.rotate(k[:, :, step], plan.positions.q, plan.positions, key=True)
        keys, values, _ = cache.append(rotated, v[:, :, step], None)
        assert (keys.shape[3], values.shape[3], keys.dtype) == (8, 4, torch.bfloat16)
        pieces.append(run_attention(q[:, :, step], keys, values, plan))
    torch.testing.assert_close(torch.cat(pieces, 2), whole, rtol=2**-7, atol=2**-8)


@torch.no_grad()
def test_bfloat16_rounds_neither_angles_nor_phases():
    encoding = lively("pope", H, D)
    q, k, v = (x.bfloat16() for x in vectors(2, H, 40, D))
    at = torch.arange(40.0) + 3001  # bfloat16 has no such numbers
    expected = attend(q.double(), k.double(), v.double(), encoding, positions=at.double())
    for backend in ("reference", "sdpa"):
        got = attend(q, k, v, encoding.float(), positions=at, backend=backend)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2**-6 * float(v.abs().max()))


def test_another_rotation_does_not_replace_it():
    with refused(r"is scaled \(pope\)"):
        complete_spec_for_checkpoint("rope", "pope")
    assert complete_spec_for_checkpoint("pope:init=uniform", "pope:base=500") == "pope:init=uniform,base=500"


def test_verdict():
    for head in verdict("pope"):
        assert head.decision == DIVERGES and "bounded magnitudes" in head.reason


class Widened(Encoding):
    """A user's encoding whose rotated queries and keys have a zero behind each element."""

    rotated_width_factor = 2

    def rotate(self, x, at, pos, key=False):
        return torch.cat([x, torch.zeros_like(x)], -1)


class WidenedValues(Widened):
    def relative_values(self, pos):
        return RelativeValues(torch.zeros(1, 3, self.width // self.heads))


class WidenedRegions(Widened):
    def rotation_regions(self, pos):
        return (RotationRegion(pos.q, pos.k, lambda i, j: i >= j, lambda first, last: (0 * first, last)),)


class Undeclared(Widened):
    rotated_width_factor = 1


def test_the_contract_of_wider_queries_and_keys():
    check(Widened(Encoding.Config(), 2, 8))
    for cls in (WidenedValues, WidenedRegions):
        with refused("cannot be combined with a rotated_width_factor other than 1: leave one of them out"):
            check(cls(Encoding.Config(), 2, 8))
    with pytest.raises(UserError, match=r"rotate returned \(2, 2, 11, 8\), expected \(2, 2, 11, 4\)"):
        check(Undeclared(Encoding.Config(), 2, 8))


def test_values_of_any_smaller_width():
    q, k, v = (x[..., :width] for x, width in zip(vectors(1, 2, 6, 8), (8, 8, 3), strict=True))
    plan = build_plan(build("nope", 2, 16), exact(6), None, BACKENDS["reference"])
    expected = attention_weights(q, k, plan) @ v
    for backend in ("reference", "sdpa"):
        torch.testing.assert_close(BACKENDS[backend](q, k, v, plan), expected, rtol=0, atol=1e-12)
