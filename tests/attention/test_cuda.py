"""On a GPU: the backends agree, learned tables train, and fairseq-train --fp16 runs."""

import json

import pytest
import torch
from conftest import TRAIN_FLAGS
from in_process import fairseq

from fairseq_rpe.attention import AttentionPlan, auto, reference, sdpa
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build
from fairseq_rpe.modules import cross_entropy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def gradients(attend, spec, n, dtype, dropout, padded):
    torch.manual_seed(0)
    encoding = build(spec, 4, 128).cuda()
    q, k, v = (torch.randn(2, 4, n, 32, device="cuda").to(dtype).requires_grad_() for _ in range(3))
    pos, padding = Positions.arange(n, device="cuda"), None
    if padded:
        padding = torch.zeros(2, n, dtype=torch.bool, device="cuda")
        padding[0, :5] = True
    torch.manual_seed(1)
    out = attend(q, k, v, AttentionPlan(pos, encoding.position_bias(pos), padding), dropout)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out))
    return [out, q.grad, k.grad, v.grad, *(p.grad for p in encoding.parameters())]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("spec", ["nope", "alibi", "type2", "window:window=9", "kerple_log", "t5_bias", "fire"])
def test_sdpa_equals_reference(spec, dtype):
    for n, dropout, padded in ((77, 0.0, False), (523, 0.2, False), (301, 0.0, True), (301, 0.2, True)):
        pairs = zip(*(gradients(f, spec, n, dtype, dropout, padded) for f in (reference, sdpa)), strict=True)
        for a, b in pairs:
            assert torch.isfinite(b).all()
            assert (a - b).abs().max() <= TOLERANCE[dtype] * max(1.0, a.abs().max().item())


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("spec", ["nope", "kerple_log", "fire"])
def test_auto_drops_no_backend_and_equals_the_reference(spec, dtype, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRSEQ_RPE_CACHE", str(tmp_path))
    for padded in (False, True):
        pairs = zip(*(gradients(f, spec, 301, dtype, 0.0, padded) for f in (reference, auto)), strict=True)
        for a, b in pairs:
            assert (a - b).abs().max() <= TOLERANCE[dtype] * max(1.0, a.abs().max().item())
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
    [path] = tmp_path.glob("*.json")
    assert all(len(one["ratios"]) > 1 for one in json.loads(path.read_text())["choices"].values())


def test_chunked_loss():
    x = torch.randn(700, 32, device="cuda", requires_grad=True)
    weight, target = torch.randn(90, 32, device="cuda"), torch.randint(2, 90, (700,), device="cuda")
    ours = cross_entropy.linear_cross_entropy(x, weight, target, 1)
    plain = torch.nn.functional.cross_entropy(x @ weight.T, target, ignore_index=1, reduction="sum")
    grads = [torch.autograd.grad(loss, x)[0] for loss in (ours, plain)]
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_loss_from_tiles(monkeypatch):
    monkeypatch.setattr(cross_entropy, "TILES", {"cuda": (300, 64)})
    x, weight = 3 * torch.randn(700, 32, device="cuda"), torch.randn(90, 32, device="cuda")
    target = torch.randint(90, (700,), device="cuda")
    plain = torch.nn.functional.cross_entropy(x.double() @ weight.double().T, target, reduction="none")
    torch.testing.assert_close(cross_entropy.target_losses(x, weight, target).double(), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flags", [("--fp16",), ("--bf16",), ("--amp",), ("--memory-efficient-fp16",)], ids=str)
def test_fairseq_train(corpus, tmp_path, flags):
    on_gpu = [flag for flag in TRAIN_FLAGS if flag != "--cpu"]
    for spec in ("kerple_log", "fire"):
        fairseq("train", corpus, *on_gpu, *flags, "--rpe", spec, "--max-update", "8", "--save-dir", tmp_path / spec)
        state = torch.load(tmp_path / spec / "checkpoint_last.pt")["model"]
        assert all(torch.isfinite(p).all() for p in state.values())
        assert any(name.startswith("decoder.encodings") for name in state)
