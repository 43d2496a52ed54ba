"""Every backend against the reference: outputs and all gradients, odd lengths, padding, dropout, fp32 and bf16."""

import importlib
import math
import sys

import pytest
import torch
from conftest import run
from specs import ALL_SPECS, LONGER
from torch.nn import functional as F

from fairseq_rpe.attention import BACKENDS, Plan, auto, choose, reference, sdpa
from fairseq_rpe.attention.dropout import ROWS, keep_block
from fairseq_rpe.core import Dense, Positions, Toeplitz, UserError
from fairseq_rpe.encodings import build

H, D, B = 4, 16, 2
NO_BIAS = ("sinusoidal", "learned", "rope", "xpos", "longrope", "clex", "floater", "complex", *LONGER)
BIASES = [s for s in ALL_SPECS if not s.startswith(NO_BIAS)]


def positions_with_padding(n: int):
    """Row 0 begins with three pads, row 1 ends with two."""
    padding = torch.zeros(B, n, dtype=torch.bool)
    padding[0, :3], padding[1, n - 2 :] = True, True
    at = ((~padding).cumsum(1) - 1).clamp_min(0).float()
    return Positions(at, at), padding


def outputs_and_gradients(attend, spec, n, dtype=torch.float32, dropout=0.0, padded=False, positions=None):
    torch.manual_seed(0)
    encoding = build(spec, H, H * D, 600)
    q, k, v = (torch.randn(B, H, n, D).to(dtype).requires_grad_() for _ in range(3))
    pos, padding = positions_with_padding(n) if padded else (positions or Positions.arange(n), None)
    torch.manual_seed(1)
    out = attend(q, k, v, Plan(pos, encoding.form(pos), padding), dropout)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype))
    learned = {name: p.grad for name, p in encoding.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad, **learned}


def assert_same(a, b, tolerance):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.isfinite(a[name]).all() and torch.isfinite(b[name]).all(), name
        scale = max(1.0, a[name].abs().max().item())
        assert (a[name] - b[name]).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spec", BIASES)
def test_sdpa_equals_reference(spec, padded, dropout):
    for n in (7, 129, 301):
        a, b = (outputs_and_gradients(f, spec, n, dropout=dropout, padded=padded) for f in (reference, sdpa))
        assert_same(a, b, 2e-5)


@pytest.mark.parametrize("spec", ["alibi", "kerple_log", "fire"])
def test_sdpa_equals_reference_over_many_blocks(spec, monkeypatch):
    """523 rows span three blocks of the Toeplitz path and, with small blocks, five of the general one."""
    monkeypatch.setattr(importlib.import_module("fairseq_rpe.attention.sdpa"), "PAIR_ELEMENTS", 1)
    for padded in (False, True):
        a, b = (outputs_and_gradients(f, spec, 523, dropout=0.1, padded=padded) for f in (reference, sdpa))
        # the gradient of FIRE's last layer sums over all pairs terms that cancel: float32 leaves errors of up to 2.4e-5
        assert_same(a, b, 5e-5)


@pytest.mark.parametrize("spec", BIASES)
def test_bf16(spec):
    """bf16 inputs, float32 arithmetic inside: within 2 % of the largest value, gradients included."""
    for padded in (False, True):
        a, b = (outputs_and_gradients(f, spec, 131, torch.bfloat16, padded=padded) for f in (reference, sdpa))
        assert a["out"].dtype == b["out"].dtype == torch.bfloat16
        assert_same(a, b, 0.02)


@pytest.mark.parametrize("spec", ["kerple_log", "kerple_power", "t5_bias:init_std=1"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_bf16_gradients_of_a_table(spec, dropout):
    """Sums of n² terms, which would show a rounded output: root mean square error within 2e-4 of the largest value."""
    a, b = (outputs_and_gradients(f, spec, 131, torch.bfloat16, dropout=dropout) for f in (reference, sdpa))
    for name in a.keys() - {"out", "dq", "dk", "dv"}:
        assert (a[name] - b[name]).square().mean().sqrt() <= 2e-4 * a[name].abs().max(), name


@pytest.mark.parametrize("spec", ["alibi", "kerple_log", "t5_bias", "fire"])
@pytest.mark.parametrize("step", [1.0, None])
def test_irregular_positions(spec, step):
    at = torch.cumsum(torch.randint(1, 4, (B, 45), generator=torch.Generator().manual_seed(3)), 1).float()
    pos = Positions(at, at, step, contiguous=False)
    a, b = (outputs_and_gradients(f, spec, 45, positions=pos) for f in (reference, sdpa))
    assert_same(a, b, 2e-5)


def test_dense_form_and_float64():
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, 33, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(B, H, 33, 33, dtype=torch.float64, requires_grad=True)
    grads = []
    for attend in (reference, sdpa):
        attend(q, k, v, Plan(Positions.arange(33), Dense(bias))).square().sum().backward()
        grads.append([x.grad.clone() for x in (q, k, v, bias)])
        for x in (q, k, v, bias):
            x.grad = None
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_table_shorter_than_the_sequence_repeats_its_end():
    torch.manual_seed(0)
    table = torch.randn(H, 5, requires_grad=True)
    q, k, v = (torch.randn(B, H, 20, D) for _ in range(3))
    plan = Plan(Positions.arange(20), Toeplitz(table))
    a, b = (attend(q, k, v, plan) for attend in (reference, sdpa))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    ga, gb = (torch.autograd.grad(x.square().sum(), table)[0] for x in (a, b))
    torch.testing.assert_close(ga, gb, rtol=1e-4, atol=1e-4)


def test_a_table_of_another_step_than_the_tokens():
    """Tokens half a position apart and a table of whole ones: two distances share a column."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, 21, D) for _ in range(3))
    at = torch.arange(21)[None] / 2
    plan = Plan(Positions(at, at, 0.5), Toeplitz(torch.randn(H, 12)))
    torch.testing.assert_close(reference(q, k, v, plan), sdpa(q, k, v, plan), rtol=1e-5, atol=1e-5)


def test_reference_is_the_formula():
    """Against scaled_dot_product_attention with a bias written out by hand."""
    torch.manual_seed(0)
    n = 19
    q, k, v = (torch.randn(B, H, n, D) for _ in range(3))
    slopes = torch.tensor([2.0 ** (-2 * h) for h in range(1, 5)])
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    bias = (-slopes[:, None, None] * (i - j)).masked_fill(j > i, -math.inf)
    pos = Positions.arange(n)
    got = reference(q, k, v, Plan(pos, build("alibi", H, H * D).form(pos)))
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]), rtol=1e-5, atol=1e-5)


def test_every_output_element_is_written(monkeypatch):
    """Output buffers start as NaN: what a backend forgets to write shows."""
    empty_like, new_empty = torch.empty_like, torch.Tensor.new_empty
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(math.nan))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(math.nan))
    for spec in ("alibi", "kerple_log", "fire"):
        for n in (257, 300):
            assert all(torch.isfinite(x).all() for x in outputs_and_gradients(sdpa, spec, n).values())


def test_rows_that_see_nothing_give_zero():
    pos, padding = positions_with_padding(9)
    q, k, v = (torch.randn(B, H, 9, D) for _ in range(3))
    for attend in (reference, sdpa):
        out = attend(q, k, v, Plan(pos, build("alibi", H, H * D).form(pos), padding))
        assert not out[0, :, :3].any()
        assert out[0, :, 3:].abs().amin() > 0


def test_toeplitz_memory_grows_linearly():
    """Nothing of size n² (or n² / 8) is ever allocated, forward or backward, for a learned table."""
    largest = {}

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(x, torch.Tensor):
                    largest["n"] = max(largest.get("n", 0), x.untyped_storage().nbytes())
            return result

    n = 4096
    with Largest():
        encoding = build("kerple_log", 1, 8)
        q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3))
        pos = Positions.arange(n)
        sdpa(q, k, v, Plan(pos, encoding.form(pos))).sum().backward()
    assert 0 < largest["n"] < 4 * n * n / 8


def test_dropout_mask_is_reproducible_and_unbiased():
    shape = (2, 3, 400, 400)
    whole = keep_block(5, 0, 400, shape, 0.25, torch.device("cpu"))
    part = keep_block(5, ROWS, 300, shape, 0.25, torch.device("cpu"))
    assert torch.equal(part, whole[:, :, ROWS:300, :300])
    low = torch.ones(400, 400).tril().bool()
    kept = whole[:, :, low]
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert kept.mean().item() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(whole, keep_block(6, 0, 400, shape, 0.25, torch.device("cpu")))


def test_choose():
    assert choose("auto") is auto
    assert choose("sdpa").attend is sdpa and choose("reference").attend is reference
    assert [name for name, backend in BACKENDS.items() if backend.prunes] == ["sdpa", "triton"]
    with pytest.raises(UserError, match="unknown attention backend 'sdap'.*did you mean 'sdpa'"):
        choose("sdap")


def test_the_package_triton_is_optional():
    code = (
        "import sys\nsys.modules['triton'] = None\nimport torch, fairseq_rpe.attention as a\n"
        "from fairseq_rpe.core import Positions\nx = torch.zeros(1, 1, 2, 4)\n"
        "print(a.choose('auto')(x, x, x, a.Plan(Positions.arange(2))).shape, *a.BACKENDS)"
    )
    assert run(sys.executable, "-c", code).stdout == "torch.Size([1, 1, 2, 4]) reference sdpa flex triton\n"


def test_changed_scores():
    q, k, v = (torch.randn(1, 1, 6, 4) for _ in range(3))
    plan = Plan(Positions.arange(6), remap=lambda scores, q, pos: torch.zeros_like(scores))
    mean = v.cumsum(2) / torch.arange(1, 7)[:, None]
    for attend in (reference, sdpa):
        torch.testing.assert_close(attend(q, k, v, plan), mean)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("spec", ["alibi", "kerple_log"])
def test_far_keys_apart(spec, dtype, tolerance, monkeypatch):
    """1101 tokens in parts of 512 rows: the keys before a part are one call, those in it a few; the last not full."""
    from fairseq_rpe.attention import blocks

    calls, plain = [], blocks.flash

    def flash(q, k, *args, **named):
        calls.append((q.shape[2], k.shape[2]))
        return plain(q, k, *args, **named)

    monkeypatch.setattr(blocks, "flash", flash)
    monkeypatch.setattr(blocks, "FAR_ROWS", 512)
    a, b = (outputs_and_gradients(f, spec, 1101, dtype) for f in (reference, sdpa))
    near = [(256, 256), (256, 512)]
    assert sorted(set(calls)) == sorted({*near, (512, 512), (77, 77), (77, 1024)})
    assert_same(a, b, tolerance)


def test_far_keys_that_a_table_hides(monkeypatch):
    """No query sees further than 100 tokens, nor distances 3 and 5: queries that see nothing of the far keys."""
    monkeypatch.setattr("fairseq_rpe.attention.blocks.FAR_ROWS", 512)
    torch.manual_seed(0)
    n = 1101
    table = torch.randn(H, n)
    table[:, 100:] = table[:, [3, 5]] = -math.inf
    q, k, v = (torch.randn(B, H, n, D, requires_grad=True) for _ in range(3))
    plan = Plan(Positions.arange(n), Toeplitz(table))
    a, b = (attend(q, k, v, plan) for attend in (reference, sdpa))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    found = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (a, b)]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
