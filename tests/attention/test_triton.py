"""The Triton backend against the reference, on a GPU or in Triton's interpreter: outputs and all gradients."""

import importlib
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from calls import (
    INPUTS,
    D,
    H,
    Largest,
    assert_rounded,
    assert_same,
    buffers_of_nan,
    compare,
    in_documents,
    left_padding,
    outcome,
    padded,
    skipping,
    table,
)
from conftest import DEVICE, make_model, run

pytest.importorskip("triton", reason="needs the package triton")

from fairseq_rpe.attention import AttentionPlan, reference
from fairseq_rpe.attention.triton import autograd, refusal_reason, triton, tuning
from fairseq_rpe.attention.triton.tiles import MOST_APART
from fairseq_rpe.core import DenseBias, PairBias, Positions, ToeplitzBias, UserError
from fairseq_rpe.encodings import build

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # numpy's, at NaN and inf
ROOT = Path(__file__).resolve().parents[2]


def case(name, spec, call, *marks):
    return pytest.param(spec, call, id=name, marks=marks)


def release(name, spec, call):
    return case(name, spec, call, pytest.mark.release)


# a call for each kind of bias, of visibility and of positions that the kernels are compiled for; before a release also
# other sizes of these
CALLS = [
    case("nope-even", "nope", {"n": 37, "rows": 1}),
    case("kerple_log-33", "kerple_log", {"n": 33, "rows": 1}),
    case("width 40", "kerple_log", {"n": 17, "rows": 1, "width": 40}),
    case("documents", "kerple_log", in_documents(37) | {"heads": 1}),
    case("1 of 50", "kerple_log", {"n": 1, "m": 50, "rows": 1}),
    case("5 of 41 with padding", "alibi", padded(5, 41)),
    case("table 20 from 3", table(20, 3), {"n": 20, "rows": 1}),
    case("two columns per token", table(50, 0, 0.5), {"n": 17}),
    case("gaps with padding", table(40, 2), skipping(3, 33) | {"padding": left_padding(33, 2)}),
    release("window-even", "window:window=5", {"n": 37, "rows": 1}),
    *(release(f"kerple_log-{n}", "kerple_log", {"n": n, "rows": 1}) for n in (1, 16)),
    release("width 256", "kerple_log", {"n": 17, "rows": 1, "width": 256}),
    release("33 of 70", "kerple_log", {"n": 33, "m": 70, "rows": 1}),
    *(
        release(f"table {columns} from {n}", table(columns, n), {"n": 20, "rows": 1})
        for columns, n in ((5, 0), (50, 3))
    ),
    release("gaps", "kerple_log", skipping(33, start=0.25) | {"heads": 1}),
]


@pytest.mark.parametrize(("spec", "call"), CALLS)
def test_equals_the_reference(spec, call):
    compare("triton", spec, **call)


def test_padding():
    """Row 0 begins with pads, row 1 has none, row 2 is nothing but pads: it gives 0 and gets gradients of 0."""
    padding = left_padding(33, 5, rows=3)
    padding[2] = True
    found = compare("triton", "kerple_log", n=33, rows=3, heads=1, padding=padding)
    assert not any(found[name][2].any() for name in INPUTS)


@pytest.mark.parametrize(
    ("spec", "dtype"), [("kerple_log", torch.float16), ("window:window=5", torch.bfloat16), ("t5_bias", torch.bfloat16)]
)
def test_half_precision(spec, dtype):
    call = {"n": 37, "rows": 1, "dtype": dtype}
    assert_rounded(outcome("reference", spec, **call), outcome("triton", spec, **call))


def test_documents_in_half_precision():
    call = in_documents(19) | {"dtype": torch.bfloat16}
    assert_same(outcome("reference", "kerple_log", **call), outcome("triton", "kerple_log", **call), 3e-2)


def qkv(n, m=None, rows=1):
    torch.manual_seed(0)
    return [torch.randn(rows, H, length, D, device=DEVICE).requires_grad_() for length in (n, m or n, m or n)]


def assert_same_on(inputs, plan):
    """Outputs and gradients of given tensors; returns the output."""
    results = []
    for attend in (reference, triton):
        own = [x.detach().requires_grad_() for x in inputs]
        out = attend(*own, plan)
        results.append([out, *torch.autograd.grad(out.square().sum(), own)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    return results[1][0]


def test_memory_layouts():
    """Heads behind tokens, as projections leave them; keys that are part of a cache; values of another layout."""
    torch.manual_seed(0)
    n, m = 20, 26
    pos = Positions.arange(n, m, device=DEVICE)
    q = torch.randn(n, 2, H, D, device=DEVICE).permute(1, 2, 0, 3)
    k = torch.randn(2, H, 40, D, device=DEVICE)[:, :, :m]
    v = torch.randn(2, H, D, m, device=DEVICE).transpose(2, 3)
    assert_same_on((q, k, v), AttentionPlan(pos, build("alibi", H, H * D).to(DEVICE).position_bias(pos)))


def test_deterministic_mode():
    a = outcome("triton", "kerple_log", 17, rows=1)
    torch.use_deterministic_algorithms(True)
    try:
        b = outcome("triton", "kerple_log", 17, rows=1)
        assert all(torch.equal(a[name], b[name]) for name in a)
        outcome("triton", "alibi", **skipping(7))
        with pytest.raises(UserError, match="no deterministic gradient of a learned table.*'sdpa'"):
            outcome("triton", "kerple_log", **skipping(7))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["q", "k", "table"])
def test_bad_numbers_propagate(bad, what):
    """What is not finite shows in the same rows as in the reference, -inf in a table hides as there."""
    q, k, v = (x.detach() for x in qkv(35))
    bias = torch.randn(H, 35, device=DEVICE)
    {"q": q[0, 1, 20], "k": k[0, 1, 20], "table": bias[1, 20:21]}[what][0] = bad
    a, b = (
        f(q, k, v, AttentionPlan(Positions.arange(35, device=DEVICE), ToeplitzBias(bias))) for f in (reference, triton)
    )
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, equal_nan=True)
    assert torch.isfinite(b[0, 0]).all() and torch.isfinite(b[0, 1, :20]).all()
    if not (bad == -math.inf and what == "table"):
        assert not torch.isfinite(b[0, 1]).all()


def test_a_bad_value_reaches_every_row_that_sees_it():
    v = torch.randn(1, H, 35, D, device=DEVICE)
    v[0, 1, 20, 3] = math.nan
    out = triton(v.nan_to_num(), v.nan_to_num(), v, AttentionPlan(Positions.arange(35, device=DEVICE)))
    assert out[0, 1, 20:, 3].isnan().all() and not out[0, 0].isnan().any()


@pytest.mark.skipif(DEVICE == "cuda", reason="block sizes are the GPU's")
def test_blocks_above_the_diagonal_are_skipped():
    """A bad value there would come through as 0 · NaN: queries 0 to 31 are a block that reads no key after them."""
    q, k, v = (x.detach() for x in qkv(35))
    k[:, :, 32:], v[:, :, 32:] = math.nan, math.nan
    out = triton(q.requires_grad_(), k, v, AttentionPlan(Positions.arange(35)))
    assert torch.isfinite(out[:, :, :32]).all() and out[:, :, 32:].isnan().all()
    assert torch.isfinite(torch.autograd.grad(out[:, :, :32].sum(), q)[0][:, :, :32]).all()


def test_rows_without_weight_are_zero():
    """Every visible key at -inf: 0 and no gradient, as in the reference."""
    bias = torch.zeros(H, 20, device=DEVICE)
    bias[:, :4] = -math.inf
    out = assert_same_on(qkv(20), AttentionPlan(Positions.arange(20, device=DEVICE), ToeplitzBias(bias)))
    assert not out[:, :, :4].any() and out[:, :, 4:].abs().amin() > 0


@pytest.mark.parametrize("spec", ["kerple_log", "fire:init_L=20"])
def test_every_element_is_written(spec):
    with buffers_of_nan():
        found = outcome("triton", spec, **padded(3, 33), heads=1)
    assert all(torch.isfinite(x).all() for x in found.values())


@pytest.mark.parametrize("spec", ["kerple_log", "fire"])
def test_memory_grows_linearly(spec, monkeypatch):
    """No buffer comes near n² numbers, forward or backward, for a learned bias."""
    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 64, "BLOCK_N": 64})
    n = 200
    if DEVICE == "cuda":  # block sizes are measured at the first call, with memory of its own
        outcome("triton", spec, n, rows=1, heads=1)
    with Largest() as largest:
        outcome("triton", spec, n, rows=1, heads=1)
    assert 4 * n * D <= largest.bytes < 4 * n * n / 4


def test_rows_beyond_two_to_the_31(monkeypatch):
    """Tiles begin at 64-bit addresses: 270 rows that lie 2^23 numbers apart. Untouched memory costs nothing."""
    monkeypatch.setattr(tuning, "INTERPRETER_SIZES", {"BLOCK_M": 128, "BLOCK_N": 128})
    n = 270
    try:
        memory = torch.empty(n * MOST_APART, dtype=torch.float16, device=DEVICE)
    except RuntimeError:
        pytest.skip("needs 4.5 GB of address space")
    q = memory.as_strided((1, 1, n, D), (n * MOST_APART, n * MOST_APART, MOST_APART, 1))
    q.copy_(torch.randn(1, 1, n, D))
    out, lse = torch.empty(1, 1, n, D, dtype=q.dtype, device=DEVICE), torch.empty(1, 1, n, device=DEVICE)
    spread = memory.as_strided((1, 1, n, D), q.stride(), 2 * D)
    shared = autograd.arguments(q, q, q, None, autograd.Options())
    tuning.launch(tuning.FORWARD, n, "BLOCK_M", shared, out=spread, low=None, lse=lse)
    out.copy_(spread)
    torch.testing.assert_close(
        out, reference(q, q, q, AttentionPlan(Positions.arange(n, device=DEVICE))), rtol=1e-2, atol=1e-2
    )


def test_rows_too_far_apart_are_copied(monkeypatch):
    q, k, v = (torch.randn(20, 2, H, D, device=DEVICE).permute(1, 2, 0, 3) for _ in range(3))
    plan = AttentionPlan(Positions.arange(20, device=DEVICE))
    assert autograd._arrange_memory(q, k, v)[0] is q
    expected = triton(q, k, v, plan)
    monkeypatch.setattr(autograd, "MOST_APART", 2 * H * D - 1)
    assert all(x.is_contiguous() for x in autograd._arrange_memory(q, k, v))
    assert torch.equal(triton(q, k, v, plan), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_with_one_heavy_key(dtype):
    """Nearly all weight on one key: dQ is a small difference, of which the rounding of the output must be no part."""
    torch.manual_seed(0)
    k, v, cotangent = (torch.randn(1, H, 33, D) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    q, k, v, cotangent = (x.to(DEVICE, dtype) for x in (80 * k, k, v, cotangent))
    found = []
    for attend, wide in ((reference, torch.float64), (triton, dtype)):
        q1, k1, v1 = (x.detach().to(wide).requires_grad_() for x in (q, k, v))
        out = attend(q1, k1, v1, AttentionPlan(Positions.arange(33, device=DEVICE)))
        found.append(torch.autograd.grad(out, q1, cotangent.to(wide))[0].double())
    exact, ours = found
    assert (exact - ours).abs().max() <= 2 * torch.finfo(dtype).eps * exact.abs().max()


def tensors(width=D, dtype=torch.float32):
    return tuple(torch.zeros(1, H, 4, width, dtype=dtype, device=DEVICE) for _ in range(3))


@pytest.mark.parametrize(
    ("qkv", "plan", "dropout", "message"),
    [
        (tensors(20), {}, 0.0, "head widths from 32 to 256 in steps of 8, not 20: use 'sdpa'"),
        (tensors(264), {}, 0.0, "not 264"),
        (tensors(dtype=torch.float64), {}, 0.0, "not float64, float64, float64: use 'sdpa'"),
        ((*tensors()[:2], tensors(dtype=torch.float16)[2]), {}, 0.0, "not float32, float32, float16"),
        (tensors(), {"transform_scores": lambda scores, q, pos: scores}, 0.0, "never holds: use 'sdpa'"),
        (tensors(), {"bias": PairBias(lambda i, j: i)}, 0.0, "straight pieces, which this is not: use 'sdpa'"),
        (
            tensors(),
            {"bias": DenseBias(torch.zeros(1, H, 4, 4))},
            0.0,
            "straight pieces, which this is not: use 'sdpa'",
        ),
        (tensors(), {}, 0.1, "no attention dropout, and 0.1 .*: set it to 0 or use 'sdpa'"),
    ],
)
def test_refusals(qkv, plan, dropout, message):
    with pytest.raises(UserError, match=message):
        triton(*qkv, AttentionPlan(Positions.arange(4), **plan), dropout)


def test_refused_without_gpu_or_package(monkeypatch):
    q, plan = torch.zeros(1, H, 4, D), AttentionPlan(Positions.arange(4))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "needs a GPU: use 'sdpa'" in refusal_reason(q, q, q, plan)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs the package triton" in refusal_reason(q, q, q, plan)


def test_what_it_takes_on_a_gpu(monkeypatch):
    """Decisions need no GPU, only tensors that say they are on one."""
    from torch._subclasses import FakeTensorMode

    monkeypatch.setattr("fairseq_rpe.attention.triton._is_supported", lambda device: True)
    with FakeTensorMode():
        q, odd, last = (torch.zeros(1, H, n, width, device="cuda") for n, width in ((4, D), (4, 20), (1, D)))
        biased = AttentionPlan(Positions.arange(4), ToeplitzBias(torch.zeros(H, 4, device="cuda")))
        for plan in (AttentionPlan(Positions.arange(4)), biased):
            assert refusal_reason(q, q, q, plan) is None and refusal_reason(last, q, q, plan) is None
        assert "not 20" in refusal_reason(odd, odd, odd, biased)
        monkeypatch.setattr("fairseq_rpe.attention.triton._is_supported", lambda device: False)
        assert "compute capability 8.0" in refusal_reason(q, q, q, biased)


@pytest.mark.parametrize("spec", ["kerple_log", pytest.param("fire:init_L=9", marks=pytest.mark.release)])
def test_whole_model(task, spec):
    """Logits and every gradient of a model equal those with sdpa."""
    results = []
    for backend in ("sdpa", "triton"):
        sizes = {"decoder_embed_dim": 64, "decoder_attention_heads": 2, "decoder_layers": 1}
        model = make_model(task, spec, attention_backend=backend, **sizes).to(DEVICE)
        tokens = torch.randint(4, 60, (2, 19), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        tokens[0, :3] = 1  # padding
        out = model(tokens)[0]
        seen = tokens.ne(1)
        out[seen].square().mean().backward()
        results.append({"out": out.detach()[seen], **{name: p.grad for name, p in model.named_parameters()}})
    for name, a in results[0].items():
        torch.testing.assert_close(a, results[1][name], rtol=1e-3, atol=2e-6 if name != "out" else 2e-5, msg=name)


# Compiled for a GPU that need not be there: the interpreter accepts more than the compiler does

KERNELS = {"forward", "query_gradient", "key_gradient", "diagonal_sums", "walked_sums", "content_sums"}
ONE_KERNEL_AND_BLOCK_SIZES = """
import runpy, sys
sys.path.insert(0, "benchmarks")
from kernel_registers import few_cases, measure
[case] = [case for case in few_cases() if case.kernel == "diagonal_sums"]
print(*measure(case, 80))
runpy.run_path("tests/attention/tune_kernels.py", run_name="__main__")
"""


def without_interpreter(cache, *arguments):
    """The lines that Python prints, run without a GPU and without the interpreter."""
    package = importlib.import_module("triton")
    if not (Path(package.__file__).parent / "backends/nvidia/bin/cuobjdump").is_file():
        pytest.skip("needs the cuobjdump that comes with the package triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    return run(sys.executable, *arguments, env=environment, cwd=ROOT).stdout.splitlines()


def test_a_kernel_fits_its_registers_and_block_sizes_are_measured_once_per_class(tmp_path):
    """Not again for another length of the class; in deterministic mode there is no choice but the smallest."""
    fit, *lines = without_interpreter(tmp_path, "-c", ONE_KERNEL_AND_BLOCK_SIZES)
    registers, spilled, shared = map(int, fit.split())
    assert 0 < registers <= 255 and spilled == 0 and shared <= 99 * 1024
    *measured, deterministic = (int(line.split()[0]) for line in lines)
    assert 0 < measured[0] <= 15 and measured[0] == measured[1] == measured[2] < measured[3] < measured[4] <= 40
    assert lines[-1].split()[1:] == ["10x3x2", "10x3x2", "10x3x2", "11x3x2"]  # blocks and tiles of 32
    assert deterministic in (0, 3)  # some versions measure the only candidate, too


@pytest.mark.release
def test_kernels_compile_and_fit_their_registers(tmp_path):
    _, *lines = without_interpreter(tmp_path, "benchmarks/kernel_registers.py", "--few")
    assert {line.split()[0] for line in lines} == KERNELS
    content = {"tokens", "tokens+by_query", "by_query+by_key"}
    assert {line.split()[1] for line in lines} == {"none", "table", "positions", "line", "curve", *content}
    for line in lines:
        registers, spilled, shared = map(int, line.split(": ")[1:])
        assert 0 < registers <= 255 and shared <= 99 * 1024, line
        assert spilled <= (100 if "fp32" in line else 0), line
