"""Pruned attention against the exact result: the error stays within the proved bound, and hard inputs prune nothing."""

import math

import pytest
import torch
from conftest import make_model
from refusal import refused
from torch.nn import functional as F

from fairseq_rpe.attention import AttentionPlan, prune, reference, sdpa
from fairseq_rpe.core import DenseBias, Positions, ToeplitzBias
from fairseq_rpe.encodings import build

B, H, D, N = 2, 4, 16, 1300
ROUNDING = 2e-6


def inputs(size: float = 1.0, n: int = N, rows: int = B):
    torch.manual_seed(0)
    return size * torch.randn(rows, H, n, D), size * torch.randn(rows, H, n, D), torch.randn(rows, H, n, D)


def tables(n: int) -> dict[str, torch.Tensor]:
    """(H, n) by name: decaying, learned, and of shapes that no encoding here has."""
    torch.manual_seed(5)
    d = torch.arange(n, dtype=torch.float32)
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.004])[:, None]
    return {
        "alibi": -slopes * d,
        "type2": build("type2", H, H * D).position_bias(Positions.arange(n)).table,
        "kerple_log": build("kerple_log", H, H * D).position_bias(Positions.arange(n)).table.detach(),
        "window": torch.where(d < 300, 0.0, -math.inf).expand(H, n).contiguous(),
        "waves": -slopes * d + 8 * torch.cos(d / 60),
        "rising again": torch.where(d > 800, -20.0, -0.2 * d).expand(H, n).contiguous(),
        "highest at the end": torch.where(d > n - 100, 30.0, -slopes * d),
        "two windows": torch.where((d < 50) | ((d > 700) & (d < 760)), 0.0, -math.inf).expand(H, n).contiguous(),
        "random": 5 * torch.randn(H, n),
        "flat": torch.zeros(H, n),
    }


TABLES = tables(N)
ALIBI = TABLES["alibi"]


def plan(table, eps: float = 0.0, padding=None) -> AttentionPlan:
    """Of a table of the distance, for as many tokens as it has columns."""
    return AttentionPlan(Positions.arange(table.shape[1]), ToeplitzBias(table), padding, prune=eps)


def assert_within_the_bound(q, k, v, table, eps, rounding, exact=None):
    exact = reference(q, k, v, plan(table)) if exact is None else exact
    found = sdpa(q, k, v, plan(table, eps))
    assert ((found - exact).abs() <= eps * (v.amax(2, keepdim=True) - v.amin(2, keepdim=True)) + rounding).all()


def pairs_kept(q, k, table, eps):
    """Pairs of queries and keys that are computed, as a part of those without pruning."""
    spans: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        partial = prune._partial_attention
        patch.setattr(
            prune, "_partial_attention", lambda q, k, *rest: spans.append(k.shape[:3].numel()) or partial(q, k, *rest)
        )
        prune.pruned_attention(q, k, torch.ones_like(q), table, eps)
    n = q.shape[2]
    return sum(spans) / (B * H * sum(min(start + prune.BLOCK, n) for start in range(0, n, prune.BLOCK)))


@pytest.mark.parametrize("size", [0.3, 3.0])
@pytest.mark.parametrize("name", TABLES)
def test_error_is_within_the_bound(name, size):
    q, k, v = inputs(size, rows=1)
    exact = reference(q, k, v, plan(TABLES[name]))
    for eps in (1e-6, 0.05):
        assert_within_the_bound(q, k, v, TABLES[name], eps, ROUNDING * (1 + size**2), exact)


@pytest.mark.parametrize("name", TABLES)
def test_the_weight_left_out_is_below_eps(name):
    """Exactly: a value that marks the keys left out, one block at a time, never weighs more than eps in any query."""
    table, eps = TABLES[name], 0.02
    q, k, _ = inputs(0.5, rows=1)
    weights = (q @ k.mT) * D**-0.5 + table[:, (torch.arange(N)[:, None] - torch.arange(N)).clamp_min(0)]
    weights = weights.masked_fill(torch.ones(N, N).triu(1).bool(), -math.inf).softmax(-1)
    blocks = math.ceil(N / prune.BLOCK)
    marks = F.one_hot(torch.arange(N) // prune.BLOCK, 16).float().expand(1, H, N, 16)
    kept = prune.pruned_attention(q, k, marks.contiguous(), table, eps)[..., :blocks] > 0
    lost = (weights @ marks)[..., :blocks].masked_fill(kept, 0.0).sum(-1)
    assert lost.max() <= eps


def test_far_keys_are_left_out_but_where_they_matter():
    for name, most in (("alibi", 0.85), ("window", 0.8), ("waves", 0.9)):
        assert pairs_kept(*inputs()[:2], TABLES[name], 1e-6) < most
    for name in ("flat", "random"):
        assert pairs_kept(*inputs()[:2], TABLES[name], 1e-3) == 1.0


def test_huge_norms_prune_nothing():
    """One far key that outweighs everything near, whatever the bias says; and norms that overflow every bound."""
    q, k, v = inputs(0.1)
    k[:, :, 3] = q[:, :, -1] = 400.0
    v[:, :, 3] = 100.0
    exact = reference(q, k, v, plan(ALIBI))
    assert (exact[:, :, -1] == 100.0).all()
    assert_within_the_bound(q, k, v, ALIBI, 1e-3, 0.0, exact)
    for size in (1e3, 1e10, 1e18):
        assert pairs_kept(*inputs(size)[:2], ALIBI, 0.5) == 1.0


def test_a_query_that_sees_no_key_gives_0():
    """-inf at every distance that a query has: near and far parts are both empty, and 0 is what the reference says."""
    q, k, v = inputs()
    table = ALIBI.clone()
    table[0, : N - 5] = -math.inf
    exact, found = reference(q, k, v, plan(table)), sdpa(q, k, v, plan(table, 1e-3))
    assert (exact[:, 0, : N - 5] == 0).all()
    torch.testing.assert_close(found, exact, rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", ["alibi", "flat", "waves"])
def test_a_constant_in_the_bias_changes_nothing(name):
    """Sums with 2 ** 27 are rounded to multiples of 8 in float32, near and far could not be weighed by them."""
    table, (q, k, v) = (TABLES[name] * 64).round() * 16, inputs(3.0)
    assert_within_the_bound(q, k, v, table + 2.0**27, 1e-3, ROUNDING * 10, reference(q, k, v, plan(table)))


def test_not_a_number_propagates():
    q, k, v = inputs()
    q[0, 0, 5], k[1, 2, 700] = math.nan, math.inf
    with torch.no_grad():
        exact, found = (sdpa(q, k, v, plan(ALIBI, eps)) for eps in (0.0, 1e-3))
    assert torch.equal(exact.isnan(), found.isnan()) and exact.isnan().any()


@pytest.mark.parametrize("n", [2, 255, 256, 257, 513, 769])
def test_lengths_around_the_blocks(n):
    q, k, v = inputs(n=n)
    exact, found = reference(q, k, v, plan(ALIBI[:, :n])), sdpa(q, k, v, plan(ALIBI[:, :n], 1e-6))
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-5)


def test_bf16():
    q, k, v = (x.bfloat16() for x in inputs(n=600))
    exact, found = reference(q, k, v, plan(ALIBI[:, :600])), sdpa(q, k, v, plan(ALIBI[:, :600], 1e-4))
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() < 0.03


def test_padded_rows_and_single_queries_are_exact():
    q, k, v = inputs(n=600)
    padding = torch.zeros(B, 600, dtype=torch.bool)
    padding[0, :9] = True
    assert torch.equal(*(sdpa(q, k, v, plan(ALIBI[:, :600], eps, padding)) for eps in (0.0, 0.3)))
    last, form = Positions.arange(1, 600), ToeplitzBias(ALIBI[:, :600])
    assert torch.equal(*(sdpa(q[:, :, -1:], k, v, AttentionPlan(last, form, prune=eps)) for eps in (0.0, 0.3)))


def test_refusals():
    (q, k, v), pos = inputs(n=8), Positions.arange(8)
    for form, eps, words in (
        (ToeplitzBias(ALIBI), 1.0, "0 < EPS < 1, not 1"),
        (ToeplitzBias(ALIBI), -0.1, "0 < EPS < 1, not -0.1"),
        (None, 0.1, "needs a bias of the distance"),
        (DenseBias(torch.zeros(1, H, 8, 8)), 0.1, "needs a bias of the distance"),
    ):
        with refused(words):
            sdpa(q, k, v, AttentionPlan(pos, form, prune=eps))
    with refused("pruning is for evaluation"):
        sdpa(q.requires_grad_(), k, v, plan(ALIBI[:, :8], 0.1))
    with refused("exact and does not prune"):
        reference(q, k, v, plan(ALIBI[:, :8], 0.1))


def test_a_model_prunes_in_evaluation_only(task):
    model = make_model(task, "alibi", attention_backend="sdpa", decoder_embed_dim=64, decoder_layers=1)
    tokens = torch.randint(4, 60, (1, 900), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(tokens)[0]
        model.decoder.prune_attention(1e-4)
        found = model(tokens)[0]
    assert not torch.equal(exact, found)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-3)
    with refused("pruning is for evaluation"):
        model.train()(tokens)


def test_models_that_cannot_be_pruned(task):
    for spec in ("nope", "fire", "cope", "rerope:window=4"):
        with refused("no bias of the distance alone"):
            make_model(task, spec).decoder.prune_attention(1e-4)
    with refused("prunes on the backends sdpa and triton"):
        make_model(task, "alibi", attention_backend="reference").decoder.prune_attention(1e-4)
    with refused("0 < EPS < 1"):
        make_model(task, "alibi").decoder.prune_attention(2.0)
