"""Pruning on the Triton backend: the bound of the error, and the same keys kept as on the CPU."""

import math

import pytest
import torch
from conftest import DEVICE, make_model
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs the package triton")

from fairseq_rpe.attention import Plan, prune, reference, sdpa
from fairseq_rpe.attention.triton import autograd, triton, tuning
from fairseq_rpe.core import Dense, Positions, Toeplitz, UserError

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # numpy's, at NaN and inf
H, D, N = 2, 32, 1100


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch):
    """The interpreter's time goes by the number of blocks."""
    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 128, "BLOCK_N": 128})


def inputs(size=1.0, n=N, dtype=torch.float32):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, H, n, D) for _ in range(3))
    return tuple(x.to(DEVICE, dtype) for x in (size * q, size * k, v))


def table(name):
    d = torch.arange(N, dtype=torch.float32, device=DEVICE)
    slopes = torch.tensor([0.5, 0.02], device=DEVICE)[:, None]
    return {
        "alibi": -slopes * d,
        "waves": -slopes * d + 8 * torch.cos(d / 60),
        "highest at the end": torch.where(d > N - 100, 30.0, -slopes * d),
        "two windows": torch.where((d < 50) | ((d > 700) & (d < 760)), 0.0, -math.inf).expand(H, N).contiguous(),
        "nothing near": torch.where(d < 600, -math.inf, -slopes * d),
        "flat": torch.zeros(H, N, device=DEVICE),
    }[name]


def decided(module, attend, *args, monkeypatch):
    """The first keys kept, (B, H) for each block of queries that was decided about, and the output."""
    found, decide = [], prune.left_out
    monkeypatch.setattr(module, "left_out", lambda *rest: found.append(decide(*rest)) or found[-1])
    return attend(*args), torch.stack(found).cpu()


@pytest.mark.parametrize("name", ["alibi", "waves", "highest at the end", "two windows", "nothing near", "flat"])
def test_error_is_within_the_bound(name, monkeypatch):
    q, k, v = inputs()
    form, pos, eps = Toeplitz(table(name)), Positions.arange(N, device=DEVICE), 0.02
    exact = reference(q, k, v, Plan(pos, form))
    plan = Plan(pos, form, prune=eps)
    found, first = decided(autograd, triton, q, k, v, plan, monkeypatch=monkeypatch)
    spread = v.amax(2, keepdim=True) - v.amin(2, keepdim=True)
    assert ((found - exact).abs() <= eps * spread + 4e-6).all()
    assert bool((first > 0).any()) == (name not in ("nothing near", "flat"))
    cpu = Plan(Positions.arange(N), Toeplitz(form.table.cpu()), prune=eps)
    _, expected = decided(prune, sdpa, q.cpu(), k.cpu(), v.cpu(), cpu, monkeypatch=monkeypatch)
    assert torch.equal(first, expected)


def test_the_keys_left_out_are_not_read():
    """Values that mark blocks of keys weigh nothing exactly where a block is left out, and the weight lost is small."""
    q, k, _ = inputs()
    eps, pos = 0.02, Positions.arange(N, device=DEVICE)
    marks = F.one_hot(torch.arange(N, device=DEVICE) // prune.BLOCK, D).float().expand(1, H, N, D).contiguous()
    form = Toeplitz(table("alibi"))
    weights, found = (f(q, k, marks, Plan(pos, form, prune=p)) for f, p in ((reference, 0.0), (triton, eps)))
    lost = weights.masked_fill(found > 0, 0.0).sum(-1)
    assert 0 < lost.max() <= eps
    assert (found[:, 0, 4 * prune.BLOCK :, :3] == 0).all() and (found[:, :, 4 * prune.BLOCK :, 4] > 0).all()


@pytest.mark.parametrize("n", [2, 256, 257, 513])
def test_lengths_around_the_blocks(n):
    q, k, v = inputs(n=n)
    form, pos = Toeplitz(table("alibi")), Positions.arange(n, device=DEVICE)
    exact = reference(q, k, v, Plan(pos, form))
    torch.testing.assert_close(triton(q, k, v, Plan(pos, form, prune=1e-6)), exact, rtol=0, atol=1e-5)


def test_bf16_and_not_a_number():
    q, k, v = inputs(n=600, dtype=torch.bfloat16)
    q[0, 0, 5] = math.nan
    form, pos = Toeplitz(table("alibi")), Positions.arange(600, device=DEVICE)
    exact, found = (triton(q, k, v, Plan(pos, form, prune=eps)) for eps in (0.0, 1e-4))
    assert found.dtype == torch.bfloat16 and found[0, 0, 5].isnan().all()
    torch.testing.assert_close(found, exact, rtol=0, atol=0.03, equal_nan=True)


def test_padded_rows_and_single_queries_are_exact():
    q, k, v = inputs(n=520)
    form, pos = Toeplitz(table("alibi")), Positions.arange(520, device=DEVICE)
    padding = torch.zeros(1, 520, dtype=torch.bool, device=DEVICE)
    padding[0, :9] = True
    assert torch.equal(*(triton(q, k, v, Plan(pos, form, padding, prune=eps)) for eps in (0.0, 0.3)))
    last = Positions.arange(1, 520, device=DEVICE)
    assert torch.equal(*(triton(q[:, :, -1:], k, v, Plan(last, form, prune=eps)) for eps in (0.0, 0.3)))


def test_refusals():
    q, k, v = inputs(n=8)
    pos, form = Positions.arange(8, device=DEVICE), Toeplitz(table("alibi"))
    for plan, message in (
        (Plan(pos, form, prune=1.0), "0 < EPS < 1, not 1"),
        (Plan(pos, None, prune=0.1), "needs a bias of the distance"),
        (Plan(pos, Dense(torch.zeros(1, H, 8, 8)), prune=0.1), "which this is not: use 'sdpa'"),
    ):
        with pytest.raises(UserError, match=message):
            triton(q, k, v, plan)
    with pytest.raises(UserError, match="pruning is for evaluation"):
        triton(q.requires_grad_(), k, v, Plan(pos, form, prune=0.1))


def test_a_model_prunes_in_evaluation_only(task):
    sizes = {"decoder_embed_dim": 64, "decoder_attention_heads": 2, "decoder_layers": 1}
    model = make_model(task, "alibi", attention_backend="triton", **sizes).to(DEVICE)
    tokens = torch.randint(4, 60, (1, 900), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.no_grad():
        exact = model(tokens)[0]
        model.decoder.prune_attention(1e-4)
        found = model(tokens)[0]
    assert not torch.equal(exact, found)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-3)
    with pytest.raises(UserError, match="pruning is for evaluation"):
        model.train()(tokens)
