"""Decoding with the cache against the full forward pass: any chunks, beams, padding, copies, and what is kept."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from conftest import make_model
from specs import representatives
from test_model import PAD, logits, tokens

from fairseq_rpe.attention import AttentionPlan, kv_cache, reference, sdpa
from fairseq_rpe.attention.backends import BACKENDS
from fairseq_rpe.attention.forward import build_plan
from fairseq_rpe.attention.kv_cache import GrowableBuffer, append_tokens
from fairseq_rpe.core import Positions
from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.encodings import build
from fairseq_rpe.encodings.rope import Rope

CHUNKS = (7, 1, 1, 3, 1, 5, 1, 1, 2, 1)  # a prompt in one call, single tokens, several at once
TURNED = ["rope", "rope:scaling=linear,factor=4", "rope:scaling=yarn,factor=4,original_length=8,resonance=true"]
TURNED += ["longrope:factors=2,start_tokens=3,factor=2,original_length=8,short=scaled"]
TURNED += ["rope:base=500000,logn=clipped,original_length=4"]
# what a longer text turns further
READ = [f"rope:scaling={s},factor=auto" for s in ("linear", "ntk", "ntk_by_parts", "yarn", "truncated")]
READ = [f"{spec},original_length=8" for spec in (*READ, "rope:scaling=dynamic_ntk", "longrope:factors=2")]
READ += ["clex:original_length=5", "xpos"]


@torch.no_grad()
def fed(model, x, state, chunks=CHUNKS, start=0):
    """Logits of the tokens from ``start`` on, which come in chunks."""
    found = []
    for chunk in chunks:
        start += chunk
        found.append(logits(model, x[:, :start], incremental_state=state))
        assert found[-1].shape[1] == chunk
    return torch.cat(found, 1)


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    monkeypatch.setattr(kv_cache, "SPARE", 3)


@pytest.mark.parametrize(
    "spec",
    representatives(
        "rotates",
        "prepare_positions",
        "adds_bias",
        "content_bias",
        "transform_scores",
        "has_key_state",
        "returns_log_weights",
        "changes_values",
    ),
)
def test_chunks_in_bfloat16(task, spec):
    model, x = make_model(task, spec, compute_dtype="bf16"), tokens(3, 23)
    with torch.no_grad():
        wanted = logits(model, x)
    torch.testing.assert_close(fed(model, x, {}), wanted, rtol=0, atol=2e-2 * float(wanted.abs().max()))


FIXED = ("offset:tokens=3", "interpolate:ratio=1/3")
MOVED = [(spec, "identity") for spec in TURNED + READ]
MOVED += itertools.product(("rope", TURNED[-1], READ[3], *READ[-2:], "fire"), (*FIXED, "interpolate:train=6"))
MOVED += itertools.product(["sinusoidal"], FIXED)  # what the input of a text that grows should be, no cache follows


@pytest.mark.parametrize(("spec", "evaluation"), MOVED)
def test_one_layer_follows_what_follows(task, spec, evaluation):
    """Every step of one layer is a pass over the text so far, whatever its positions and rotation do as it grows."""
    model, state = make_model(task, spec, decoder_layers=1, positions_eval=evaluation), {}
    if spec.startswith("clex"):
        torch.nn.init.normal_(model.decoder.encodings[0].down.weight, 0, 0.02)
    x = tokens(3, 15)
    x[1, :4], x[-1, :-2] = PAD, PAD
    for n in (5, 6, 7, 10, 11, 15):
        with torch.no_grad():
            step, full = logits(model, x[:, :n], incremental_state=state), logits(model, x[:, :n])
        real = x[:, n - 1 : n].ne(PAD)
        torch.testing.assert_close(step[:, -1:][real], full[:, -1:][real], rtol=1e-5, atol=1e-5)


class OfTheQueries(Rope):
    """What a user may derive: an angle that reads more than the key's own position."""

    def angles(self, at, pos):
        return super().angles(at - pos.q.amax(1, keepdim=True), pos)


def movable():
    return DecoderCache(is_movable=True)


def cached_keys(state):
    cache = state if isinstance(state, DecoderCache) else state["fairseq_rpe_cache"]
    return cache.layer(0).tensors[0]


def raw_keys(model, x):
    found: list = []
    hook = model.decoder.layers[0].self_attn.k_proj.register_forward_hook(lambda module, given, out: found.append(out))
    with torch.no_grad():
        logits(model, x)
    hook.remove()
    return found[0].unflatten(2, (4, -1)).permute(1, 2, 0, 3)


@pytest.mark.parametrize(
    ("spec", "evaluation", "kind", "turned"),
    [
        *((spec, "identity", dict, True) for spec in TURNED),
        *((spec, "identity", dict, False) for spec in READ),
        ("rope", "interpolate:ratio=1/2", dict, True),
        ("rope", "interpolate:train=6", dict, False),
        ("rope", "identity", movable, False),
        ("alibi", "identity", dict, False),
    ],
)
def test_keys_are_kept_turned_only_where_nothing_can_turn_them_further(task, spec, evaluation, kind, turned):
    model = make_model(task, spec, positions_eval=evaluation)
    x, state = tokens(2, 13), kind()
    fed(model, x, state, (6, 1, 1, 5))
    assert torch.allclose(cached_keys(state), raw_keys(model, x), atol=1e-6) != turned


def test_a_rotation_of_ones_own_is_turned_on_read(task):
    model, x = make_model(task, "rope"), tokens(2, 23)
    own = model.decoder.encodings[0] = OfTheQueries(Rope.Config(), 4, 32)
    assert not own.fixed_rotation
    with torch.no_grad():
        torch.testing.assert_close(fed(model, x, {}), logits(model, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["rope", "fire", "kerple_log"])
@pytest.mark.parametrize("copied", [dict, copy.deepcopy])
def test_a_copied_state_is_continued_in_two_ways(task, spec, copied):
    model = make_model(task, spec)
    one, other, state = tokens(2, 23), tokens(2, 23, seed=1), {}
    other[:, :9] = one[:, :9]
    fed(model, one, state, (7, 1, 1))
    ways = [(one, state, []), (other, copied(state), [])]
    for n in range(9, 23):
        for x, cache, steps in ways:
            steps.append(fed(model, x, cache, (1,), n))
    with torch.no_grad():
        for x, _, steps in ways:
            torch.testing.assert_close(torch.cat(steps, 1), logits(model, x)[:, 9:], rtol=1e-5, atol=1e-5)


def test_a_shorter_cache_goes_on_from_where_it_was_cut(task):
    """As when guessed tokens are taken back: what had been behind the cut is not seen, and not overwritten either."""
    model = make_model(task, "rope")
    x, other, state = tokens(2, 23), tokens(2, 23, seed=1), {}
    other[:, :10] = x[:, :10]
    fed(model, x, state, (10, 1, 1, 1))
    before = cached_keys(state)
    kept = before.clone()
    state["fairseq_rpe_cache"].truncate(10)
    with torch.no_grad():
        wanted = logits(model, other)[:, 10:]
    twin, order = copy.deepcopy(state), torch.tensor([1, 0])
    model.decoder.reorder_incremental_state_scripting(twin, order)
    torch.testing.assert_close(fed(model, other, state, (1, 1, 11), 10), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(before, kept)
    torch.testing.assert_close(fed(model, other[order], twin, (13,), 10), wanted[order], rtol=1e-5, atol=1e-5)


def test_gradients_reach_what_is_behind(task):
    model, x, state, grads = make_model(task, "kerple_log"), tokens(2, 9), {}, []
    for whole in (True, False):
        model.zero_grad()
        ends, more = ((9,), {}) if whole else ((4, 5, 6, 9), {"incremental_state": state})
        torch.cat([logits(model, x[:, :n], **more) for n in ends], 1).square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-7)


def test_the_table_of_a_text_is_made_a_few_times(task, monkeypatch):
    model = make_model(task, "kerple_log")
    encoding, made = model.decoder.encodings[0], []
    bias = type(encoding).bias
    monkeypatch.setattr(type(encoding), "bias", lambda self, d: made.append(len(d)) or bias(self, d))
    fed(model, tokens(1, 60), {}, (1,) * 60)
    assert made == [2, 6, 14, 30, 62]
    with torch.no_grad():  # a text of its own has a table of its own: weights may have changed in between
        encoding.raw_p.data += 1.0
        x = tokens(1, 23)
        torch.testing.assert_close(fed(model, x, {}), logits(model, x), rtol=1e-5, atol=1e-5)


def test_room_is_written_behind_and_never_over():
    old, new = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 1, 4)
    with torch.no_grad():
        joined, first = append_tokens(None, old, new)
        assert torch.equal(joined, torch.cat([old, new], 2))
        longer, same = append_tokens(first, joined, new)
        assert same is first and longer.data_ptr() == joined.data_ptr()
        other, second = append_tokens(first, joined, new + 1)
        assert second is not first and torch.equal(other[:, :, -1:], new + 1)
        assert torch.equal(longer, torch.cat([old, new, new], 2))
        _, third = append_tokens(first, longer.clone(), new)
        assert third is not first
        picked, fourth = first.select_rows(torch.tensor([1, 1, 0]))
        assert torch.equal(picked, longer[[1, 1, 0]]) and fourth.can_append(picked, 1)
        assert append_tokens(first, longer, new.double())[0].dtype == torch.float64
    assert append_tokens(first, longer, new)[1] is None
    with torch.inference_mode():
        joined, begun = append_tokens(None, old, new)
        assert begun.can_append(joined, 1)
    with torch.no_grad():
        assert not begun.can_append(joined, 1)
        assert append_tokens(begun, joined, new)[0].shape[2] == 7
    assert GrowableBuffer.with_prefix(old[:, :, :0], 1).used == 0


def positions_of(kind: str, m: int) -> Positions:
    k = torch.arange(m).float()[None]
    k = {"plain": k, "half": k / 2, "spread": 2 * k, "warped": k**0.9}[kind]
    step = {"half": 0.5, "warped": None}.get(kind, 1.0)
    return Positions(k[:, -1:], k, step, contiguous=kind in ("plain", "half"))


@pytest.mark.parametrize("spec", ["kerple_log", "kerple_log:local=4"])
@torch.no_grad()
def test_cached_table_has_every_distance(spec):
    """A table of 2m columns is too short for 2m + 1 keys, and one of w columns for the first key outside a window w."""
    encoding, cache = build(spec, 4, 32, 64), {}
    for m in range(2, 7):
        caches = (cache, None)
        plans = (build_plan(encoding, Positions.arange(1, m), None, BACKENDS["sdpa"], bias_cache=x) for x in caches)
        cached, computed = (plan.last_query_bias for plan in plans)
        torch.testing.assert_close(cached, computed)


@pytest.mark.parametrize("spec", ["nope", "window:window=5", "kerple_log", "fire"])
@pytest.mark.parametrize("kind", ["plain", "half", "spread", "warped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_query_is_a_row(spec, kind, dtype):
    m = 37
    torch.manual_seed(0)
    encoding, pos = build(spec, 4, 32, 64), positions_of(kind, m)
    q, k, v = (torch.randn(3, 4, n, 8).to(dtype) for n in (1, m, m))
    padding = torch.arange(m) < torch.tensor([[0], [9], [m]])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for hidden in (None, padding):
        plan = AttentionPlan(pos, encoding.position_bias(pos), hidden)
        torch.testing.assert_close(sdpa(q, k, v, plan), reference(q, k, v, plan), rtol=tolerance, atol=tolerance)
