"""Pairs that are turned by regions: the fast path against the reference, what it looks at, and who else meets them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import assert_same, padded
from conftest import VOCABULARY, make_model
from specs import REGION_ROPES
from test_sdpa import compare, outcome

from fairseq_rpe import attend, build
from fairseq_rpe.analysis.speed import BenchSetting, measure
from fairseq_rpe.attention import BACKENDS, AttentionPlan, reference, region_attention, sdpa
from fairseq_rpe.attention import plan as attention_plan
from fairseq_rpe.attention.autotune import Autotuner
from fairseq_rpe.attention.forward import build_plan, run_attention
from fairseq_rpe.attention.plan import QUERY_BLOCK
from fairseq_rpe.core import Positions, RotationRegion, UserError
from fairseq_rpe.evaluation.sliding_window_loss import Windows, cache_mismatch_reason, score_windows

H, D = 2, 16
SPECS = [
    "self_extend:group=4,window=32",
    "leaky_rerope:window=100,logn=true,original_length=64",
    "lm_infinite:sinks=5,window=70,max_distance=50",
    "streaming_llm:sinks=3,recent=90",
    "dual_chunk:chunk=48,max_position=60",
    "string:shift=90,window=20,temperature=code",
]
LONG = 2 * QUERY_BLOCK + 77  # tokens: three blocks


def tokens(rows: int, n: int) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (rows, n), generator=torch.Generator().manual_seed(0))


def logits(model, x) -> torch.Tensor:
    return model(x)[0]


def qkv(n: int) -> list[torch.Tensor]:
    torch.manual_seed(n)
    return [torch.randn(1, H, n, D) for _ in range(3)]


def compare_both(spec: str, tolerance: float = 2e-5, **call) -> None:
    """With gradients and, where nothing needs one, in the other way without."""
    found = compare(spec, tolerance, **call, width=D)
    if "dropout" not in call:
        again = outcome("sdpa", spec, **call, width=D, grads=False)
        assert_same({"out": found["out"]}, again, tolerance)


def placed(at: torch.Tensor) -> dict:
    return {"n": len(at), "pos": Positions(at[None], at[None], contiguous=False)}


@pytest.mark.parametrize("spec", SPECS)
def test_blocks_give_what_the_matrix_gives(spec):
    """Over several blocks; padding in one of two rows."""
    compare_both(spec, n=LONG)
    compare_both(spec, **padded(LONG, pads=61))


@pytest.mark.parametrize("spec", SPECS[:3])
def test_dropout_positions_that_skip_and_bf16(spec):
    compare_both(spec, n=LONG, dropout=0.3)
    compare_both(spec, **placed(torch.arange(150.0).mul(3).div(2).floor()))
    compare_both(spec, 3e-2, n=90, dtype=torch.bfloat16)


@pytest.mark.parametrize("spec", ["rerope:window=4", "streaming_llm:sinks=2,recent=5"])
def test_positions_that_fall_are_served_too(spec):
    compare_both(spec, **placed(torch.arange(40.0).roll(7)))


@pytest.mark.parametrize("least", [0, 3])
def test_a_query_that_no_region_lets_see_a_key_gives_nothing(least):
    """Only pairs of d >= 3, or none at all, for which no key is looked at."""
    pos = Positions.arange(9)
    only = RotationRegion(
        pos.q, pos.k, lambda i, j: i - j >= 3, lambda first, last: (first * 0, last - (3 if least else 99))
    )
    q, k, v = (x.requires_grad_() for x in qkv(9))
    shown = only if least else replace(only, covers=lambda i, j: i - j > 99)
    plan = AttentionPlan(pos, rotate=build("rope", H, H * D).rotate, rotation_regions=(shown,))
    for grads in (True, False):
        with torch.set_grad_enabled(grads):
            found = sdpa(q, k, v, plan)
        torch.testing.assert_close(found, reference(q, k, v, plan), rtol=1e-5, atol=1e-6)
        assert not found[:, :, : least or 9].any()


def spied(monkeypatch) -> list[int]:
    """Pairs of each call of torch's kernel."""
    seen, plain = [], region_attention.flash_attention

    def flash(q, k, *args, **named):
        seen.append(q.shape[2] * k.shape[2])
        return plain(q, k, *args, **named)

    monkeypatch.setattr(region_attention, "flash_attention", flash)
    return seen


@pytest.mark.parametrize("spec", ["lm_infinite:sinks=10,window=64", "streaming_llm:sinks=4,recent=60"])
def test_windows_look_at_their_window_and_first_tokens_alone(spec, monkeypatch):
    seen, n = spied(monkeypatch), 16 * QUERY_BLOCK
    encoding = build(spec, 1, 8)
    q, k, v = torch.randn(3, 1, 1, n, 8)
    whole = attend(q, k, v, encoding)
    assert sum(seen) <= n * (QUERY_BLOCK + 64 + 1 + 10) < n * n / 8
    seen.clear()
    turned: list[int] = []
    rotate = encoding.rotate

    def watched(x, *args, **named):
        turned.append(x.shape[2])
        return rotate(x, *args, **named)

    monkeypatch.setattr(encoding, "rotate", watched)
    torch.testing.assert_close(attend(q[:, :, -1:], k, v, encoding), whole[:, :, -1:], rtol=1e-5, atol=1e-5)
    assert sum(seen) <= 64 + 1 + 10
    assert sum(turned) <= 64 + 1 + 10 + 2  # a token decoded turns no more keys than it sees


def test_no_pair_is_worked_on_twice_but_at_the_edges(monkeypatch):
    seen, n = spied(monkeypatch), 8 * QUERY_BLOCK
    q, k, v = torch.randn(3, 1, 1, n, 8)
    attend(q, k, v, build("self_extend:group=8,window=256", 1, 8))
    assert sum(seen) <= n * (n + QUERY_BLOCK) / 2 + n * 2 * QUERY_BLOCK


def test_layers_share_what_follows_from_positions(monkeypatch, task):
    calls, plain = [], attention_plan.find_key_ranges
    monkeypatch.setattr("fairseq_rpe.attention.plan.find_key_ranges", lambda *a: calls.append(1) or plain(*a))
    model = make_model(task, "self_extend:group=2,window=4")
    logits(model, tokens(1, 20))
    assert len(model.decoder.layers) > 1 and len(calls) == 1


def test_other_backends_masks_and_pruning_refuse_in_one_line(task):
    encoding = build("rerope:window=4", H, H * D)
    q, k, v = qkv(9)
    for name in ("flex", "triton"):
        with pytest.raises(UserError, match=f"^backend '{name}' rotates all pairs alike"):
            attend(q, k, v, encoding, backend=name)
    for ask in (encoding.mask, encoding.score_mod):
        with pytest.raises(UserError, match="ReRope rotates pairs at different positions"):
            ask(5)
    plan = build_plan(encoding, Positions.arange(9), None, BACKENDS["sdpa"], 0.1)
    with pytest.raises(UserError, match="pruning needs a bias"):
        run_attention(q, k, v, plan)
    with pytest.raises(UserError, match="adds no bias of the distance alone"):
        make_model(task, "rerope:window=4").decoder.prune_attention(0.1)
    with pytest.raises(UserError, match="has no bias"):
        measure(BenchSetting("cpu", ["rerope:window=4"], lengths=[8]), "forward", 8)


def test_auto_measures_nothing_where_one_backend_serves():
    q, k, v = qkv(9)
    plan = build_plan(build("rerope:window=4", H, H * D), Positions.arange(9), None, BACKENDS["sdpa"])
    never = Autotuner(BACKENDS, applies=lambda q: pytest.fail("nothing to choose"))
    assert never.choose(q, k, v, plan) is None


@pytest.mark.parametrize("spec", ["rerope:window=4", "lm_infinite:sinks=2,window=4"])
def test_sliding_windows_keep_no_states_of_deeper_layers(task, spec):
    deep, flat = make_model(task, spec), make_model(task, spec, decoder_layers=1)
    reason = cache_mismatch_reason(deep, 12, 2)
    assert reason and "use recomputation" in reason and "\n" not in reason
    assert cache_mismatch_reason(flat, 12, 2) is None
    parts = Windows(tokens(1, 40)[0], 12, 2)
    kept, anew = (score_windows(flat, parts, cached=cached)[0] for cached in (True, False))
    assert kept == pytest.approx(anew, rel=1e-5)


def test_all_of_them_are_here():
    assert {spec.partition(":")[0] for spec in SPECS} | {"rerope"} == set(REGION_ROPES)
