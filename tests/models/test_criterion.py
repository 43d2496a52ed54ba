"""lm_cross_entropy against fairseq's own criterions."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import make_model, model_args
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.logging import metrics
from fairseq.models.transformer_lm import TransformerLanguageModel
from refusal import refused
from test_model import PAD
from torch.nn import functional as F

from fairseq_rpe.criterions.lm_cross_entropy import LMCrossEntropy, scalars_for_logging
from fairseq_rpe.modules import cross_entropy
from fairseq_rpe.modules.cross_entropy import CHUNK, linear_cross_entropy


def sample(rows=3, n=150):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(4, 60, (rows, n), generator=generator)
    target = torch.randint(4, 60, (rows, n), generator=generator)
    x[0, -40:] = target[0, -40:] = PAD
    net = {"src_tokens": x, "src_lengths": x.ne(PAD).sum(1)}
    return {"net_input": net, "target": target, "ntokens": int(target.ne(PAD).sum())}


@pytest.mark.parametrize("sentence_avg", [False, True])
def test_equals_cross_entropy(task, sentence_avg):
    grads = []
    for kind in (CrossEntropyCriterion, LMCrossEntropy):
        model = make_model(task, "kerple_log").train()
        loss, size, log = kind(task, sentence_avg)(model, sample())
        loss.backward()
        grads.append((loss.item(), size, log["ntokens"], {k: p.grad for k, p in model.named_parameters()}))
    assert grads[0][0] == pytest.approx(grads[1][0], rel=1e-6)
    assert grads[0][1:3] == grads[1][1:3]
    for name, g in grads[0][3].items():
        torch.testing.assert_close(grads[1][3][name], g, rtol=1e-4, atol=1e-5)


def test_per_token_losses(task):
    model, kinds = make_model(task, "alibi"), (CrossEntropyCriterion, LMCrossEntropy)
    one, other = (kind(task, False)(model, sample(), reduce=False)[0] for kind in kinds)
    torch.testing.assert_close(other, one.view(-1), rtol=1e-5, atol=1e-5)
    torch.manual_seed(0)
    stock = TransformerLanguageModel.build_model(model_args("alibi"), task).eval()
    for each in (model, stock):
        with torch.no_grad():
            one, other = (kind(task, False)(each, sample())[0].item() for kind in kinds)
        assert one == pytest.approx(other, rel=1e-6)


def test_adaptive_softmax_falls_back_and_says_so(task, caplog):
    options = dict(adaptive_softmax_cutoff="20,40", decoder_output_dim=32)
    model = make_model(task, "alibi", **options)
    with caplog.at_level("INFO"):
        criterion = LMCrossEntropy(task, False)
        loss, size, _ = criterion(model, sample())
        criterion(model, sample())
    expected, expected_size, _ = AdaptiveLoss(task, False)(model, sample())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and size == expected_size
    assert sum("adaptive_loss" in r.message for r in caplog.records) == 1
    with refused("legacy_ddp"):
        LMCrossEntropy(task, False, "pytorch_ddp", 2)(model, sample())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_equal_the_plain_loss(dtype, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 1)
    torch.manual_seed(0)
    n = 2 * CHUNK + 7
    x, weight = torch.randn(n, 16).to(dtype).requires_grad_(), torch.randn(90, 16).to(dtype).requires_grad_()
    target = torch.randint(2, 90, (n,))
    target[::5] = PAD
    plain = F.cross_entropy(F.linear(x, weight).float(), target, ignore_index=PAD, reduction="sum")
    plain.backward()
    expected = [x.grad.clone(), weight.grad.clone()]
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for reduce in (True, False):
        x.grad = weight.grad = None
        value = linear_cross_entropy(x, weight, target, PAD, reduce).sum()
        (2 * value).backward()
        assert value.item() == pytest.approx(plain.item(), rel=1e-3 if dtype == torch.bfloat16 else 1e-6)
        for got, want in zip((x.grad, weight.grad), expected, strict=True):
            assert (got / 2 - want).abs().max() <= tolerance * want.abs().max()
    with torch.no_grad():
        losses = linear_cross_entropy(x, weight, target, PAD, reduce=False)
    assert losses.sum().item() == pytest.approx(plain.item(), rel=1e-3 if dtype == torch.bfloat16 else 1e-6)
    assert not losses[::5].any()


def test_all_targets_padding_is_zero():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.full((4,), PAD), PAD)
    loss.backward()
    assert loss.item() == 0 and not x.grad.any()


def test_watched_parameters(task):
    model = make_model(task, "kerple_log", rpe_share="layer")
    values = scalars_for_logging(model)
    p = torch.stack([e.p() for e in model.decoder.encodings])
    assert values["rpe_p_l1"].item() == pytest.approx(p[1].mean().item())
    assert values["rpe_p_h3"].item() == pytest.approx(p[:, 2].mean().item())
    assert {"rpe_a_l0", "rpe_a_h4", "rpe_count"} <= values.keys()
    assert scalars_for_logging(make_model(task, "alibi")) == {}
    assert {"rpe_c_l0", "rpe_L_l1"} <= scalars_for_logging(make_model(task, "fire")).keys()


def test_metrics():
    logs = [
        {"loss": torch.tensor(10.0), "ntokens": 4, "sample_size": 4, "rpe_p_l0": torch.tensor(3.0), "rpe_count": 2},
        {"loss": torch.tensor(6.0), "ntokens": 4, "sample_size": 4, "rpe_p_l0": torch.tensor(1.5), "rpe_count": 1},
    ]
    with metrics.aggregate() as seen:
        LMCrossEntropy.reduce_metrics(logs)
    values = seen.get_smoothed_values()
    assert values["loss"] == pytest.approx(2 / math.log(2), abs=1e-3)
    assert values["ppl"] == pytest.approx(math.exp(2), abs=0.02)
    assert values["rpe_p_l0"] == pytest.approx(1.5)
