"""Attention options and shared key heads on every backend: flex and triton against the reference, decoding, autotuning.

``test_attention_options`` compares sdpa with the reference.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Iterator

import calls
import pytest
import torch
from calls import Largest, assert_same, compare, left_padding, outcome
from conftest import DEVICE
from refusal import refused
from specs import representatives
from test_calibration import MACHINE, clock
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe import RelativeAttention, attend, build
from fairseq_rpe.attention import BACKENDS, AttentionPlan, autotune_inputs, reference, scaled_window_attention, sdpa
from fairseq_rpe.attention.autotune import Autotuner, call_signature
from fairseq_rpe.attention.flex import BLOCK, _mask
from fairseq_rpe.attention.forward import build_plan, run_attention
from fairseq_rpe.core import Positions, ToeplitzBias, UserError
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.fire import Fire

H, D = 4, 32
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs the package triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")  # numpy's, at -inf


def release(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.release)


# each option with each kind of bias that the kernels know; n queries, m keys and G key heads
TRITON_CALLS = [
    release("rope:local=6", 33, 33, 4),
    ("kerple_log:local=20", 9, 40, 2),
    release("kerple_log:local=20", 33, 50, 2),
    ("kerple_log:local=6,softcap=2,null_logit=learned,query_scale=head", 33, 33, 2),
    release("alibi:block=6", 33, 33, 4),
    ("alibi:block=17,softcap=3,null_logit=learned", 5, 40, 1),
    ("fire:softcap=2,null_logit=zero", 9, 20, 2),
    ("nope:null_logit=learned", 1, 20, 2),
    ("pope:local=6,softcap=2,query_scale=head", 5, 20, 2),  # queries and keys twice as wide as values
]
FLEX_CALLS = [
    ("alibi:local=150", 391, 391, 4),
    ("rope:block=140,softcap=2", 291, 291, 2),
    ("deberta:softcap=1,null_logit=zero", 13, 13, 2),
    ("pope:local=6,softcap=2,null_logit=learned", 5, 20, 2),  # queries and keys twice as wide as values
    ("kerple_log:local=140,softcap=2,null_logit=learned,query_scale=head", 5, 290, 2),
]


def lively(spec: str, width: int = D) -> Encoding:
    return calls.lively(spec, H, width, length=16)


def draw(n: int, m: int, key_heads: int, width: int = D, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = (H, n), (key_heads, m), (key_heads, m)
    return [torch.randn(2, *size, width, generator=generator).to(DEVICE, dtype).requires_grad_() for size in sizes]


@needs_triton
@pytest.mark.parametrize(("spec", "n", "m", "key_heads"), TRITON_CALLS)
def test_triton_equals_the_reference(spec: str, n: int, m: int, key_heads: int) -> None:
    compare("triton", spec, n=n, m=m, heads=H, key_heads=key_heads, rows=1)


@needs_triton
def test_triton_with_padding() -> None:
    spec = "kerple_log:local=6,softcap=2,null_logit=learned"
    compare("triton", spec, n=19, heads=2, key_heads=1, padding=left_padding(19, 4))


@needs_triton
def test_triton_in_half_precision() -> None:
    call = {"n": 33, "heads": 2, "key_heads": 1, "rows": 1, "dtype": torch.bfloat16}
    spec = "kerple_log:local=9,softcap=2,null_logit=learned"
    a, b = (outcome(name, spec, **call) for name in ("triton", "reference"))
    assert all((a[name].float() - b[name].float()).norm() < 0.01 * b[name].float().norm() for name in b)


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="block sizes are those of the interpreter")
def test_triton_reads_no_key_outside_the_window() -> None:
    """A value that is not a number there would show as 0 · NaN: blocks of 32 queries and of 16 keys, a window of 5."""
    encoding, (q, k, v) = lively("nope:local=5", D), (x.detach()[:1] for x in draw(70, 70, 4))
    k[:, :, :16], v[:, :, :16] = torch.nan, torch.nan
    q.requires_grad_(), k.requires_grad_()
    out = attend(q, k, v, encoding, backend="triton")
    assert torch.isfinite(out[:, :, 32:]).all() and out[:, :, :16].isnan().all()
    q_grad, k_grad = torch.autograd.grad(out[:, :, 32:].sum(), (q, k))
    assert torch.isfinite(q_grad[:, :, 32:]).all()
    assert torch.isfinite(k_grad[:, :, 48:]).all()


@pytest.mark.parametrize(("spec", "n", "m", "key_heads"), FLEX_CALLS)
def test_flex_equals_the_reference(spec: str, n: int, m: int, key_heads: int) -> None:
    torch._dynamo.reset()
    compare("flex", spec, n=n, m=m, heads=H, key_heads=key_heads, width=16, grads=False)


def test_flex_skips_blocks_outside_the_window() -> None:
    n, m = 3 * BLOCK, 5 * BLOCK
    q, k = torch.zeros(2, 1, n, 16), torch.zeros(2, 1, m, 16)
    plan = build_plan(build("nope:local=130", 1, 16), Positions.arange(n, m), None, BACKENDS["flex"])
    mask = _mask(plan, q, k)
    read = [sorted(mask.kv_indices[0, 0, i, : mask.kv_num_blocks[0, 0, i]].tolist()) for i in range(3)]
    full = [sorted(mask.full_kv_indices[0, 0, i, : mask.full_kv_num_blocks[0, 0, i]].tolist()) for i in range(3)]
    assert read == [[2], [3], [4]] and full == [[0, 1], [1, 2], [2, 3]]
    padded = _mask(AttentionPlan(plan.positions, plan.bias, torch.zeros(2, m, dtype=torch.bool), window=130), q, k)
    read = [sorted(padded.kv_indices[0, 0, i, : padded.kv_num_blocks[0, 0, i]].tolist()) for i in range(3)]
    assert read == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


# Decoding


@pytest.mark.parametrize("spec", ["rope:local=20", "alibi:block=16", "kerple_log:local=20", "nope"])
def test_one_query_reads_only_keys_that_it_sees(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    plain = F.scaled_dot_product_attention

    def record(q: Tensor, k: Tensor, *args: Tensor, **options: object) -> Tensor:
        calls.append((q.shape[1], q.shape[2], k.shape[2]))
        return plain(q, k, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    encoding, (q, k, v) = lively(spec), draw(1, 75, 2)
    with torch.no_grad():
        out = attend(q, k, v, encoding, backend="sdpa")
    visible = {"alibi:block=16": 75 % 16, "nope": 75}.get(spec, 20)
    assert calls == [(2, 2, visible)]  # the two query heads of each key head in one call
    repeated = (x.repeat_interleave(2, 1) for x in (k, v))
    torch.testing.assert_close(out, attend(q, *repeated, encoding, backend="reference"))


def _decoded_specs() -> Iterator[str]:
    """Yield the representatives of the encodings with a window and with blocks, if one pass gives equal results."""
    for spec, option in itertools.product(representatives(), ("local=6", "block=6")):
        with contextlib.suppress(UserError):  # an encoding that can have no window
            whole = f"{spec}{',' if ':' in spec else ':'}{option}"
            if not build(whole, 2, 32, length=24).length_dependent:
                yield whole


@pytest.mark.parametrize(
    "spec", [*_decoded_specs(), "clex:local=6", "nope:query_scale=ssmax,null_logit=learned,softcap=2"]
)
@torch.no_grad()
def test_decoding_equals_one_pass(spec: str) -> None:
    """Keys out of sight are left out before they are rotated."""
    torch.manual_seed(0)
    layer = RelativeAttention(width=32, heads=2, encoding=build(spec, 2, 32, length=24)).eval()
    x, cache = torch.randn(2, 15, 32), layer.new_cache()
    pieces = [layer(piece, cache) for piece in x.split([3, 4, *[1] * 8], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), layer(x), atol=1e-5, rtol=1e-4)


def test_cached_table_of_a_window_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding, calls, cache = lively("kerple_log:local=20"), [], {}
    plain = type(encoding).bias
    monkeypatch.setattr(type(encoding), "bias", lambda self, d: calls.append(1) or plain(self, d))
    with torch.no_grad():
        for m in range(30, 90):
            build_plan(encoding, Positions.arange(1, m, device=DEVICE), None, BACKENDS["sdpa"], bias_cache=cache)
    assert len(calls) == 1


# Pruning


@torch.no_grad()
def test_pruning_with_a_window() -> None:
    q, k, v = torch.randn(3, 1, H, 1100, 16)
    positions = Positions.arange(1100)
    for spec in ("alibi:local=300", "nope:local=300"):
        encoding = lively(spec, 16)
        plan = build_plan(encoding, positions, None, BACKENDS["sdpa"], prune=1e-4)
        exact = reference(q, k, v, build_plan(encoding, positions, None, BACKENDS["reference"]))
        assert (run_attention(q, k, v, plan) - exact).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("alibi:softcap=2", "does not cover softcap and null_logit"),
        ("alibi:null_logit=zero", "does not cover softcap and null_logit"),
        ("alibi:block=4", "documents or blocks in one row"),
    ],
)
@pytest.mark.parametrize("backend", ["sdpa", pytest.param("triton", marks=needs_triton)])
@torch.no_grad()
def test_pruning_refuses(spec: str, message: str, backend: str) -> None:
    inputs = draw(20, 20, H)
    plan = build_plan(lively(spec), Positions.arange(20, device=DEVICE), None, BACKENDS[backend], prune=0.1)
    with refused(message):
        run_attention(*inputs, plan)


# Choosing a backend


def _call(spec: str, n: int = 300, key_heads: int = 2) -> tuple[Tensor, Tensor, Tensor, AttentionPlan]:
    encoding = lively(spec, 16)
    return *draw(n, n, key_heads, 16), build_plan(encoding, Positions.arange(n, device=DEVICE), None, BACKENDS["sdpa"])


def test_signatures_name_options() -> None:
    words = [str(call_signature(*_call(f"alibi{options}", key_heads=2))) for options in ("", ":local=70", ":softcap=2")]
    assert "window" not in words[0] and "softcap" not in words[0] and "2 query heads per key head" in words[0]
    assert "a window of up to 128" in words[1] and "softcap" in words[2]
    assert "window" not in str(call_signature(*_call("alibi:local=300")))  # all keys are in it
    assert call_signature(*_call("alibi:local=70")) == call_signature(*_call("alibi:local=100"))


@pytest.mark.parametrize("spec", ["kerple_log:local=290", "kerple_log:softcap=2,null_logit=learned", "alibi:block=70"])
def test_a_backend_that_ignores_an_option_is_dropped(spec: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def ignore(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float = 0.0) -> Tensor:
        bias = plan.bias
        if isinstance(bias, ToeplitzBias):  # without the window
            bias = ToeplitzBias(bias.table.nan_to_num(neginf=-1.0))
        return sdpa(q, k, v, AttentionPlan(plan.positions, bias), dropout)

    monkeypatch.setenv("FAIRSEQ_RPE_CACHE", str(tmp_path))
    tuner = Autotuner(
        {"wrong": ignore, "sdpa": sdpa},
        applies=lambda q: True,
        timer=clock(ignore=0.1),
        machine=lambda device: MACHINE,
        store=lambda: None,
    )
    assert tuner.choose(*_call(spec)) == "sdpa"


def test_copies_of_a_call_have_the_gradient_of_the_null_logit() -> None:
    q, k, v, plan = _call("alibi:null_logit=learned")
    for copied in (autotune_inputs.copy_call(q, k, v, plan, 0.0), autotune_inputs.sample_call(q, k, v, plan, 0.0)):
        assert any(x is copied.plan.null_logit for x in copied.leaves) and copied.plan.null_logit is not plan.null_logit
        _, *grads = copied.run(reference)
        assert [x.shape for x in grads[:4]] == [copied.q.shape, copied.k.shape, copied.v.shape, (H,)] and grads[3].any()


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_dropout_of_shared_key_heads_is_that_of_repeated_ones(backend: str) -> None:
    q, k, v, plan = _call("alibi", n=33)
    outputs = []
    for inputs in ((q, k, v), (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))):
        torch.manual_seed(3)
        outputs.append(BACKENDS[backend](*inputs, plan, 0.5))
    torch.testing.assert_close(*outputs)


# Windows on a CPU


@pytest.mark.skipif(DEVICE == "cuda", reason="on the CPU")
@pytest.mark.parametrize(("n", "window"), [(130, 50), (128, 64), (200, 129), (300, 1)])
@pytest.mark.parametrize("spec", ["alibi", "rope", "kerple_log"])
def test_window_blocks_equal_the_reference(spec: str, n: int, window: int) -> None:
    """In float64, of two rows: outputs, gradients and second derivatives."""
    encoding = lively(f"{spec}:local={window}", 8).double()
    inputs = draw(n, n, H, 8, torch.float64)
    leaves, found = [*inputs, *encoding.parameters()], []
    for backend in ("sdpa", "reference"):
        y = attend(*inputs, encoding, backend=backend)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True, materialize_grads=True)
        found.append([y, *first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)])
    assert_same(*(dict(enumerate(numbers)) for numbers in found), 1e-9)


@pytest.mark.skipif(DEVICE == "cuda", reason="on the CPU")
@pytest.mark.parametrize(("spec", "n"), [("fire:local=40", 300), ("fire:threshold=none,init_c=1,local=129", 257)])
def test_pieces_of_fire_in_a_window_equal_the_reference(spec: str, n: int) -> None:
    """In float64, of two rows: outputs, gradients and, of the shorter text, second derivatives."""
    torch.manual_seed(0)
    encoding, inputs = build(spec, H, H * 8).double(), draw(n, n, H, 8, torch.float64)
    leaves, found = [*inputs, *encoding.parameters()], []
    for backend in ("sdpa", "reference"):
        y = attend(*inputs, encoding, backend=backend)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=n < 300)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves) if n < 300 else ()
        found.append([y, *first, *second])
    assert_same(*(dict(enumerate(numbers)) for numbers in found), 1e-8)


@pytest.mark.skipif(DEVICE == "cuda", reason="on the CPU")
def test_time_of_fire_grows_with_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of the kernel reads more keys than a block's queries and their window, and no pair evaluates f."""
    keys, evaluated = [], []
    plain = scaled_window_attention.flash_attention
    monkeypatch.setattr(
        scaled_window_attention,
        "flash_attention",
        lambda q, k, v, **mask: keys.append(k.shape[2]) or plain(q, k, v, **mask),
    )
    monkeypatch.setattr(Fire, "bias", lambda self, i, j: evaluated.append(1))
    attend(*draw(1000, 1000, H, 8), lively("fire:local=50", 8), backend="sdpa")
    assert max(keys) == scaled_window_attention.ROWS + 49 and not evaluated


@needs_triton
def test_triton_names_the_remedy_for_a_window_of_fire() -> None:
    with refused("no window for a curve of straight pieces, such as fire's: use 'sdpa', or no window"):
        attend(*draw(40, 40, H), lively("fire:local=6"), backend="triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="on the CPU")
def test_gradient_of_a_learned_table_in_half_precision() -> None:
    encoding, found = lively("kerple_log:local=50", 8), []
    for backend, dtype in (("sdpa", torch.bfloat16), ("reference", torch.float32)):
        inputs = [x.detach().to(torch.bfloat16).to(dtype).requires_grad_() for x in draw(300, 300, H, 8)]
        y = attend(*inputs, encoding, backend=backend)
        found.append([y, *torch.autograd.grad(y.square().sum() + y.sum(), [*inputs, *encoding.parameters()])])
    for a, b in zip(*found, strict=True):
        assert (a.float() - b).norm() < 0.02 * b.norm()


def test_memory_of_a_window_grows_linearly() -> None:
    q, k, v = draw(4096, 4096, H, 8)
    encoding = lively("nope:local=100", 8)
    with Largest() as largest:
        attend(q, k, v, encoding, backend="sdpa").sum().backward()
    assert largest.elements <= 16 * q.numel() < 4096**2 / 2
