"""The Triton backend against the reference, on a GPU or in Triton's interpreter: outputs and all gradients."""

import math
import os
import sys
from pathlib import Path

import pytest
import torch
from conftest import DEVICE, make_model, run
from specs import ALL_SPECS

pytest.importorskip("triton", reason="needs the package triton")

from fairseq_rpe.attention import Plan, reference
from fairseq_rpe.attention.triton import refusal, triton
from fairseq_rpe.core import Dense, Pair, Positions, Toeplitz, UserError
from fairseq_rpe.encodings import build

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # numpy's, at NaN and inf
H, D = 2, 32
TABLES = [s for s in ALL_SPECS if isinstance(build(s, H, H * D, 64).form(Positions.arange(3)), Toeplitz)]


def outputs_and_gradients(attend, spec, n, m=None, *, batch=1, width=D, dtype=torch.float32, pos=None, padding=None):
    """out, dq, dk, dv and the gradients of the encoding's parameters; ``spec`` may be a function that gives a form."""
    torch.manual_seed(0)
    m = m or n
    encoding = None if callable(spec) else build(spec, H, H * width, 64).to(DEVICE)
    q, k, v = (torch.randn(batch, H, length, width).to(DEVICE, dtype).requires_grad_() for length in (n, m, m))
    pos = pos or Positions.arange(n, m, device=DEVICE)
    learned = {} if encoding is None else dict(encoding.named_parameters())
    if encoding is None:
        learned["table"], form = spec()
    else:
        form = encoding.form(pos)
    out = attend(q, k, v, Plan(pos, form, padding))
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    if padding is not None:  # what a hidden token attends to means nothing
        cotangent = cotangent.masked_fill(padding[:, None, m - n :, None], 0.0)
        out = out.masked_fill(padding[:, None, m - n :, None], 0.0)
    out.backward(cotangent)
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return found | {name: p.grad for name, p in learned.items() if p.grad is not None}


def both(*args, **kwargs):
    return (outputs_and_gradients(f, *args, **kwargs) for f in (reference, triton))


def assert_same(a, b, tolerance):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.isfinite(b[name]).all(), name
        scale = max(1.0, a[name].abs().max().item())
        assert (a[name] - b[name]).abs().max().item() <= tolerance * scale, name


def left_padding(batch, m, pads):
    padding = torch.zeros(batch, m, dtype=torch.bool, device=DEVICE)
    padding[0, :pads] = True
    return padding


def a_table(columns, origin=0, step=1.0):
    def make():
        torch.manual_seed(7)
        table = torch.randn(H, columns).to(DEVICE).requires_grad_()
        return table, Toeplitz(table, origin, step)

    return make


def test_every_learned_encoding_is_here():
    learned = {s.split(":")[0] for s in TABLES if list(build(s, H, H * D, 64).parameters())}
    assert {"kerple_log", "kerple_power", "t5_bias"} <= learned


@pytest.mark.parametrize("spec", ["nope", *TABLES])
def test_equals_reference(spec):
    assert_same(*both(spec, 37), 2e-5)


@pytest.mark.parametrize("n", [1, 2, 16, 33, 70])
def test_lengths(n):
    assert_same(*both("kerple_log", n), 2e-5)


@pytest.mark.parametrize("width", [40, 80, 128, 256])
def test_head_widths(width):
    assert_same(*both("kerple_log", 19, width=width), 2e-5)


@pytest.mark.parametrize("spec", ["nope", "kerple_log"])
def test_padding(spec):
    """Row 0 begins with pads, row 1 has none, row 2 is nothing but pads: it gives 0 and gets gradients of 0."""
    padding = left_padding(3, 35, 5)
    padding[2] = True
    a, b = both(spec, 35, batch=3, padding=padding)
    assert_same(a, b, 2e-5)
    assert not any(b[name][2].any() for name in ("out", "dq", "dk", "dv"))


LEARNED = ["kerple_log", "kerple_power", "kerple_power:p=0.5,a=0.1", "t5_bias:init_std=1"]


@pytest.mark.parametrize("spec", ["nope", "window:window=5", *LEARNED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(spec, dtype):
    """Root mean square error within 1e-3 of the largest value, and no error above two units in its last place.

    Gradients of parameters are float32 sums of n² terms: 1e-4.
    """
    a, b = both(spec, 37, dtype=dtype)
    for name in a:
        assert a[name].dtype == b[name].dtype
        error, scale = (a[name].double() - b[name].double()), a[name].double().abs().max()
        rounded = name in ("out", "dq", "dk", "dv")
        assert error.square().mean().sqrt() <= (1e-3 if rounded else 1e-4) * scale, name
        assert not rounded or error.abs().max() <= 2 * torch.finfo(dtype).eps * scale, name


@pytest.mark.parametrize(("n", "m"), [(1, 50), (5, 41), (33, 70)])
def test_last_queries(n, m):
    """Incremental decoding: n queries against a cache of m keys, without and with padding."""
    assert_same(*both("kerple_log", n, m), 2e-5)
    assert_same(*both("alibi", n, m, batch=2, padding=left_padding(2, m, 3)), 2e-5)


@pytest.mark.parametrize("columns", [5, 20, 50])
@pytest.mark.parametrize("origin", [0, 3])
def test_tables_of_any_length_and_origin(columns, origin):
    assert_same(*both(a_table(columns, origin), 20), 2e-5)


def test_irregular_positions():
    """Positions of each sequence, with gaps and a common fraction, and a table with two columns per token."""
    at = torch.cumsum(torch.randint(1, 4, (2, 33), generator=torch.Generator().manual_seed(3)), 1).to(DEVICE) + 0.25
    assert_same(*both("kerple_log", 33, batch=2, pos=Positions(at, at, 1.0, False)), 2e-5)
    last = Positions(at[:, 30:], at, 1.0, False)
    assert_same(*both(a_table(40, 2), 3, 33, batch=2, pos=last, padding=left_padding(2, 33, 2)), 2e-5)
    assert_same(*both(a_table(50, 0, 0.5), 33), 2e-5)


def test_memory_layouts():
    """Heads behind tokens, as projections leave them; keys that are part of a cache; values of another layout."""
    torch.manual_seed(0)
    n, m, width = 20, 26, 32
    pos = Positions.arange(n, m, device=DEVICE)
    plan = Plan(pos, build("alibi", H, H * width).to(DEVICE).form(pos))
    q = torch.randn(n, 2, H, width, device=DEVICE).permute(1, 2, 0, 3)
    k = torch.randn(2, H, 40, width, device=DEVICE)[:, :, :m]
    v = torch.randn(2, H, width, m, device=DEVICE).transpose(2, 3)
    results = []
    for attend in (reference, triton):
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs, plan)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_deterministic_mode():
    a = outputs_and_gradients(triton, "kerple_log", 33, batch=2)
    torch.use_deterministic_algorithms(True)
    try:
        b = outputs_and_gradients(triton, "kerple_log", 33, batch=2)
        assert all(torch.equal(a[name], b[name]) for name in a)
        at = torch.arange(0, 14, 2, device=DEVICE)[None].float()
        irregular = Positions(at, at, 1.0, False)
        outputs_and_gradients(triton, "alibi", 7, pos=irregular)
        with pytest.raises(UserError, match="no deterministic gradient of a learned table.*'sdpa'"):
            outputs_and_gradients(triton, "kerple_log", 7, pos=irregular)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["q", "k", "table"])
def test_bad_numbers_propagate(bad, what):
    """What is not finite shows in the same rows as in the reference, -inf in a table hides as there."""
    torch.manual_seed(0)
    n = 35
    q, k, v = (torch.randn(1, H, n, D, device=DEVICE) for _ in range(3))
    table = torch.randn(H, n, device=DEVICE)
    {"q": q[0, 1, 20], "k": k[0, 1, 20], "table": table[1, 20:21]}[what][0] = bad
    a, b = (f(q, k, v, Plan(Positions.arange(n, device=DEVICE), Toeplitz(table))) for f in (reference, triton))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, equal_nan=True)
    assert torch.isfinite(b[0, 0]).all() and torch.isfinite(b[0, 1, :20]).all()
    if not (bad == -math.inf and what == "table"):
        assert not torch.isfinite(b[0, 1]).all()


def test_a_bad_value_reaches_every_row_that_sees_it():
    v = torch.randn(1, H, 35, D, device=DEVICE)
    v[0, 1, 20, 3] = math.nan
    out = triton(v.nan_to_num(), v.nan_to_num(), v, Plan(Positions.arange(35, device=DEVICE)))
    assert out[0, 1, 20:, 3].isnan().all() and not out[0, 0].isnan().any()


@pytest.mark.skipif(DEVICE == "cuda", reason="block sizes are the GPU's")
def test_blocks_above_the_diagonal_are_skipped():
    """A bad value there would come through as 0 · NaN: queries 0 to 31 are a block that reads no key after them."""
    q, k, v = (torch.randn(1, H, 35, D) for _ in range(3))
    k[:, :, 32:], v[:, :, 32:] = math.nan, math.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = triton(*inputs, Plan(Positions.arange(35)))
    assert torch.isfinite(out[:, :, :32]).all() and out[:, :, 32:].isnan().all()
    for gradient in torch.autograd.grad(out[:, :, :32].sum(), inputs[:1]):
        assert torch.isfinite(gradient[:, :, :32]).all()


def test_rows_without_weight_are_zero():
    """Every visible key at -inf: 0 and no gradient, as in the reference."""
    table = torch.zeros(H, 20, device=DEVICE)
    table[:, :4] = -math.inf
    q, k, v = (torch.randn(1, H, 20, D, device=DEVICE).requires_grad_() for _ in range(3))
    results = []
    for attend in (reference, triton):
        out = attend(q, k, v, Plan(Positions.arange(20, device=DEVICE), Toeplitz(table)))
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    assert not results[1][0][:, :, :4].any() and results[1][0][:, :, 4:].abs().amin() > 0


@pytest.mark.parametrize("spec", ["kerple_log", "fire:init_L=20"])
def test_every_element_is_written(spec, monkeypatch):
    """Buffers start as NaN: what a kernel forgets to write shows."""
    for owner, name in ((torch, "empty_like"), (torch, "empty"), (torch.Tensor, "new_empty")):
        plain = getattr(owner, name)

        def filled(*args, plain=plain, **kwargs):
            made = plain(*args, **kwargs)
            return made.fill_(math.nan) if made.is_floating_point() else made

        monkeypatch.setattr(owner, name, filled)
    found = outputs_and_gradients(triton, spec, 3, 41, batch=2, padding=left_padding(2, 41, 3))
    assert all(torch.isfinite(x).all() for x in found.values())


@pytest.mark.parametrize("spec", ["kerple_log", "fire"])
def test_memory_grows_linearly(spec):
    """No buffer comes near n² numbers, forward or backward, for a learned bias."""
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes())
            return result

    def step():
        pos = Positions.arange(n, device=DEVICE)
        q, k, v = (torch.randn(1, 1, n, D, device=DEVICE, requires_grad=True) for _ in range(3))
        triton(q, k, v, Plan(pos, build(spec, 1, D).to(DEVICE).form(pos))).sum().backward()

    n = 200
    if DEVICE == "cuda":
        step()  # block sizes are measured at the first call, with memory of its own
    with Largest():
        step()
    assert 4 * n * D <= largest < 4 * n * n / 4


def test_rows_beyond_two_to_the_31(monkeypatch):
    """Tiles begin at 64-bit addresses: 270 rows that lie 2^23 numbers apart. Untouched memory costs nothing."""
    from fairseq_rpe.attention.triton import autograd, tuning
    from fairseq_rpe.attention.triton.tiles import MOST_APART

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
    shared = autograd.arguments(q, q, q, None)
    tuning.launch(tuning.FORWARD, n, "BLOCK_M", shared, out=spread, low=None, lse=lse)
    out.copy_(spread)
    torch.testing.assert_close(out, reference(q, q, q, Plan(Positions.arange(n, device=DEVICE))), rtol=1e-2, atol=1e-2)


def test_rows_too_far_apart_are_copied(monkeypatch):
    from fairseq_rpe.attention.triton import autograd

    q, k, v = (torch.randn(20, 2, H, D, device=DEVICE).permute(1, 2, 0, 3) for _ in range(3))
    plan = Plan(Positions.arange(20, device=DEVICE))
    assert autograd._arranged(q, k, v)[0] is q
    expected = triton(q, k, v, plan)
    monkeypatch.setattr(autograd, "MOST_APART", 2 * H * D - 1)
    assert all(x.is_contiguous() for x in autograd._arranged(q, k, v))
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
        out = attend(q1, k1, v1, Plan(Positions.arange(33, device=DEVICE)))
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
        (tensors(), {"remap": lambda scores, q, pos: scores}, 0.0, "never holds: use 'sdpa'"),
        (tensors(), {"form": Pair(lambda i, j: i)}, 0.0, "straight pieces, which this is not: use 'sdpa'"),
        (tensors(), {"form": Dense(torch.zeros(1, H, 4, 4))}, 0.0, "straight pieces, which this is not: use 'sdpa'"),
        (tensors(), {}, 0.1, "no attention dropout, and 0.1 was asked for: set it to 0 or use 'sdpa'"),
    ],
)
def test_refusals(qkv, plan, dropout, message):
    with pytest.raises(UserError, match=message):
        triton(*qkv, Plan(Positions.arange(4), **plan), dropout)


def test_refused_without_gpu_or_package(monkeypatch):
    q = torch.zeros(1, H, 4, D)
    plan = Plan(Positions.arange(4))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "needs a GPU: use 'sdpa'" in refusal(q, q, q, plan)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs the package triton" in refusal(q, q, q, plan)


def test_what_it_takes_on_a_gpu(monkeypatch):
    """Decisions need no GPU, only tensors that say they are on one."""
    from torch._subclasses import FakeTensorMode

    monkeypatch.setattr("fairseq_rpe.attention.triton._supported", lambda device: True)
    with FakeTensorMode():
        q, odd, last = (torch.zeros(1, H, n, width, device="cuda") for n, width in ((4, D), (4, 20), (1, D)))
        plain, table = Plan(Positions.arange(4)), Toeplitz(torch.zeros(H, 4, device="cuda"))
        biased = Plan(Positions.arange(4), table)
        for plan in (plain, biased):
            assert refusal(q, q, q, plan) is None and refusal(last, q, q, plan) is None
        assert "dropout" in refusal(q, q, q, biased, 0.1)
        assert "not 20" in refusal(odd, odd, odd, biased)
        assert "straight pieces, which this is not" in refusal(q, q, q, Plan(Positions.arange(4), Pair(lambda i, j: i)))
        monkeypatch.setattr("fairseq_rpe.attention.triton._supported", lambda device: False)
        assert "compute capability 8.0" in refusal(q, q, q, biased)


@pytest.mark.parametrize("spec", ["kerple_log", "fire:init_L=9"])
def test_whole_model(task, spec):
    """Logits and every gradient of a model equal those with sdpa."""
    results = []
    for backend in ("sdpa", "triton"):
        sizes = {"decoder_embed_dim": 64, "decoder_attention_heads": 2, "decoder_layers": 2}
        model = make_model(task, spec, attention_backend=backend, **sizes).to(DEVICE)
        tokens = torch.randint(4, 60, (2, 21), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        tokens[0, :3] = 1  # padding
        out = model(tokens)[0]
        seen = tokens.ne(1)
        out[seen].square().mean().backward()
        results.append({"out": out.detach()[seen], **{name: p.grad for name, p in model.named_parameters()}})
    for name, a in results[0].items():
        torch.testing.assert_close(a, results[1][name], rtol=1e-3, atol=2e-6 if name != "out" else 2e-5, msg=name)


HERE = Path(__file__).resolve().parent
KERNELS = {"forward", "query_gradient", "key_gradient", "diagonal_sums", "walked_sums"}


def without_interpreter(script, argument, cache):
    """What a script prints, run without a GPU and without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    return run(sys.executable, script, argument, env=environment).stdout


def test_kernels_compile_and_fit_their_registers(tmp_path):
    """Compiled for a GPU that need not be there: the interpreter accepts more than the compiler does."""
    import triton

    if not (Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump").is_file():
        pytest.skip("needs the cuobjdump that comes with the package triton")
    _, *lines = without_interpreter(HERE.parents[1] / "benchmarks/kernel_registers.py", "--few", tmp_path).splitlines()
    assert {line.split()[0] for line in lines} == KERNELS
    assert {line.split()[1] for line in lines} == {"none", "table", "positions", "line", "curve"}
    for line in lines:
        registers, spilled, shared = map(int, line.split(": ")[1:])
        assert 0 < registers <= 255 and shared <= 99 * 1024, line
        assert spilled <= (100 if "fp32" in line else 0), line


def test_block_sizes_are_measured_once_per_class(tmp_path):
    """Not again for another length of the class; in deterministic mode there is no choice but the smallest."""
    lines = without_interpreter(HERE / "tune_kernels.py", "", tmp_path).splitlines()
    measured = [int(line.split()[0]) for line in lines]
    assert 0 < measured[0] <= 15 and measured[0] == measured[1] == measured[2] < measured[3] < measured[4] <= 40
    lines = without_interpreter(HERE / "tune_kernels.py", "deterministic", tmp_path).splitlines()
    measured, *grids = lines[0].split()
    assert grids == ["10x3x2", "10x3x2", "10x3x2", "11x3x2"]  # blocks and tiles of 32
    assert measured in ("0", "3")  # some versions measure the only candidate, too
