"""Pruning on the Triton backend: the bound of the error, and the same keys kept as on the CPU."""

import math

import pytest
import torch
from conftest import DEVICE
from refusal import refused
from test_pruning import tables
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs the package triton")

from fairseq_rpe.attention import AttentionPlan, prune, reference, sdpa
from fairseq_rpe.attention.triton import autograd, triton, tuning
from fairseq_rpe.core import DenseBias, Positions, ToeplitzBias

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # numpy's, at NaN and inf
D, N = 32, 1100
BLOCK = prune.BLOCK


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch):
    """The interpreter's time goes by the number of blocks."""
    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 128, "BLOCK_N": 128})


def inputs(heads=1, n=N, dtype=torch.float32):
    torch.manual_seed(0)
    return tuple(torch.randn(1, heads, n, D).to(DEVICE, dtype) for _ in range(3))


def even(n):
    return Positions.arange(n, device=DEVICE)


STEEP = ToeplitzBias(-0.5 * torch.arange(float(N), device=DEVICE)[None])


def decided(module, attend, *args, monkeypatch):
    """The first keys kept, (B, H) for each block of queries that was decided about, and the output."""
    found, decide = [], prune.first_kept_key
    monkeypatch.setattr(module, "first_kept_key", lambda *rest: found.append(decide(*rest)) or found[-1])
    return attend(*args), torch.stack(found).cpu()


@pytest.mark.parametrize(
    "names",
    [("waves", "nothing near"), pytest.param(("two windows", "flat"), marks=pytest.mark.release)],
    ids=["one pruned, one not", "two more"],
)
def test_error_is_within_the_bound(names, monkeypatch):
    """A head for each table."""
    d = torch.arange(float(N))
    known = tables(N) | {"nothing near": torch.where(d < 600, -math.inf, -0.02 * d)[None]}
    heads = {name: known[name][0] for name in names}
    form = ToeplitzBias(torch.stack([*heads.values()]).to(DEVICE))
    (q, k, v), eps = inputs(len(heads)), 0.02
    exact = reference(q, k, v, AttentionPlan(even(N), form))
    found, first = decided(autograd, triton, q, k, v, AttentionPlan(even(N), form, prune=eps), monkeypatch=monkeypatch)
    spread = v.amax(2, keepdim=True) - v.amin(2, keepdim=True)
    assert ((found - exact).abs() <= eps * spread + 4e-6).all()
    pruned = {name for name, here in zip(heads, (first > 0).any(0)[0], strict=True) if here}
    assert pruned == heads.keys() - {"nothing near", "flat"}
    cpu = AttentionPlan(Positions.arange(N), ToeplitzBias(form.table.cpu()), prune=eps)
    _, expected = decided(prune, sdpa, q.cpu(), k.cpu(), v.cpu(), cpu, monkeypatch=monkeypatch)
    assert torch.equal(first, expected)


def test_the_keys_left_out_are_not_read():
    """Values that mark blocks of keys weigh nothing exactly where a block is left out, and the weight lost is small."""
    (q, k, _), eps, form = inputs(2), 0.02, ToeplitzBias(-torch.tensor([[0.5], [0.02]], device=DEVICE) * even(N).k)
    marks = F.one_hot(torch.arange(N, device=DEVICE) // BLOCK, D).float().expand(1, 2, N, D).contiguous()
    weights, found = (
        f(q, k, marks, AttentionPlan(even(N), form, prune=p)) for f, p in ((reference, 0.0), (triton, eps))
    )
    lost = weights.masked_fill(found > 0, 0.0).sum(-1)
    assert 0 < lost.max() <= eps
    assert (found[:, 0, 4 * BLOCK :, :3] == 0).all() and (found[:, :, 4 * BLOCK :, 4] > 0).all()


@pytest.mark.parametrize("n", [2, BLOCK, BLOCK + 1, 2 * BLOCK + 1])
def test_lengths_around_the_blocks(n):
    q, k, v = inputs(n=n)
    exact = reference(q, k, v, AttentionPlan(even(n), STEEP))
    torch.testing.assert_close(triton(q, k, v, AttentionPlan(even(n), STEEP, prune=1e-6)), exact, rtol=0, atol=1e-5)


def test_bf16_and_not_a_number():
    q, k, v = inputs(2, n=600, dtype=torch.bfloat16)
    q[0, 0, 5] = math.nan
    form = ToeplitzBias(STEEP.table.expand(2, -1).contiguous())
    exact, found = (triton(q, k, v, AttentionPlan(even(600), form, prune=eps)) for eps in (0.0, 1e-4))
    assert found.dtype == torch.bfloat16 and found[0, 0, 5].isnan().all()
    torch.testing.assert_close(found, exact, rtol=0, atol=0.03, equal_nan=True)


def test_padded_rows_and_single_queries_are_exact():
    q, k, v = inputs(n=520)
    padding = torch.arange(520, device=DEVICE)[None] < 9
    assert torch.equal(*(triton(q, k, v, AttentionPlan(even(520), STEEP, padding, prune=eps)) for eps in (0.0, 0.3)))
    last = Positions.arange(1, 520, device=DEVICE)
    assert torch.equal(*(triton(q[:, :, -1:], k, v, AttentionPlan(last, STEEP, prune=eps)) for eps in (0.0, 0.3)))


def test_refusals():
    q, k, v = inputs(n=8)
    for form, eps, words in (
        (STEEP, 1.0, "0 < EPS < 1, not 1"),
        (None, 0.1, "needs a bias of the distance"),
        (DenseBias(torch.zeros(1, 1, 8, 8)), 0.1, "which this is not: use 'sdpa'"),
    ):
        with refused(words):
            triton(q, k, v, AttentionPlan(even(8), form, prune=eps))
    with refused("pruning is for evaluation"):
        triton(q.requires_grad_(), k, v, AttentionPlan(even(8), STEEP, prune=0.1))
