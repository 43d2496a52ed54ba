"""The KV cache of layers with a window or blocks: what it drops, and that decoding still equals the full pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import make_model
from refusal import refused

from fairseq_rpe.decoder.beam_search import beam_search
from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.decoder.generation import DecodingState, greedy_search, pad_prompts

LAYERS, WINDOW, TOKENS = 3, 5, 3 * 6 + 8
# spec -> most keys that a layer needs, by layer; None: all
STACKS = {
    "rope:local=5": (5, 5, 5),
    "2*alibi:local=5|nope": (5, 5, None),
    "rope:block=6|kerple_log:local=5|fire:local=4": (6, 5, 4),
    "forgetting:local=5|rope:local=1|nope:block=1": (5, 1, 1),
}


def draw(rows: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 60, (rows, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode(model, x, cache, chunks):
    """Return the logits of the tokens that come in chunks."""
    steps = []
    for stop in itertools.accumulate(chunks, initial=len(cache)):
        if stop > len(cache):
            steps.append(model(x[:, :stop], incremental_state=cache)[0])
    return torch.cat(steps, 1)


@pytest.mark.parametrize("spec", STACKS)
def test_decoding_with_few_keys_equals_one_pass(task, spec):
    model, x, cache = make_model(task, spec, decoder_layers=LAYERS), draw(2, TOKENS), DecoderCache()
    x[1, :3] = task.source_dictionary.pad()
    logits = decode(model, x, cache, (7, *[1] * (TOKENS - 7)))
    with torch.no_grad():
        torch.testing.assert_close(logits[:, 3:], model(x)[0][:, 3:], rtol=1e-5, atol=1e-5)
    for index, window in enumerate(STACKS[spec]):
        layer = cache.layer(index)
        assert len(layer) == TOKENS
        assert layer.held == TOKENS if window is None else layer.held <= 2 * window
        memory = max(buffer.memory.shape[2] for buffer in layer.buffers)
        assert window is None or memory <= 3 * window


@pytest.mark.parametrize("evaluation", ["interpolate:ratio=1/2", "interpolate:train=6"])
def test_keys_are_dropped_only_where_every_token_stays_at_its_position(task, evaluation):
    model, x = make_model(task, "alibi:local=5", decoder_layers=1, positions_eval=evaluation), draw(2, TOKENS)
    cache = DecoderCache()
    decode(model, x[:, :-1], cache, [1] * (TOKENS - 1))
    with torch.no_grad():
        last = model(x, incremental_state=cache)[0]
        torch.testing.assert_close(last, model(x)[0][:, -1:], rtol=1e-5, atol=1e-5)
    held = cache.layer(0).held
    assert held <= 20 if evaluation == "interpolate:ratio=1/2" else held == TOKENS


def test_a_movable_cache_holds_all_keys(task):
    model, cache = make_model(task, "alibi:local=2", decoder_layers=1), DecoderCache(is_movable=True)
    decode(model, draw(1, 9), cache, [1] * 9)
    assert cache.layer(0).held == 9


@pytest.mark.parametrize("spec", ["2*rope:local=4|nope", "kerple_log:block=5|alibi:local=3"])
def test_ragged_prompts_and_beams(task, spec):
    """Prompts of different lengths give what each gives alone, and a beam of one gives what greedy search gives."""
    model = make_model(task, spec, decoder_layers=LAYERS)
    prompts = [draw(1, n, seed=n)[0].tolist() for n in (17, 3, 9)]
    together = greedy_search(model, prompts, 12)
    assert together == [greedy_search(model, [prompt], 12)[0] for prompt in prompts]
    with torch.no_grad():
        best = beam_search(model, prompts, 12, beam_size=3)
        for prompt, hypotheses in zip(prompts, best, strict=True):
            for hypothesis in hypotheses:
                text = torch.tensor([[*prompt, *hypothesis.tokens]])
                log_probs = model.get_normalized_probs(model(text), log_probs=True)[0]
                targets = [*hypothesis.tokens, task.source_dictionary.eos()]
                total = sum(float(log_probs[len(prompt) - 1 + i, token]) for i, token in enumerate(targets))
                assert hypothesis.score == pytest.approx(total / len(targets), abs=1e-4)


def test_the_prefill_drops_hidden_keys_after_padding_has_moved(task):
    model = make_model(task, "alibi:local=4", decoder_layers=1)
    prompts = [draw(1, n, seed=n)[0].tolist() for n in (15, 6)]
    with torch.no_grad():
        state = DecodingState(model, pad_prompts(prompts, task.source_dictionary.pad()))
        scores = state.prefill_or_step()
        assert state._cache.layer(0).held == 3
        for row, prompt in enumerate(prompts):
            alone = DecodingState(model, torch.tensor([prompt])).prefill_or_step()
            torch.testing.assert_close(scores[row : row + 1], alone, rtol=1e-5, atol=1e-5)


def test_a_copy_goes_on_by_itself_and_dropped_keys_do_not_come_back(task):
    model, x, cache = make_model(task, "rope:local=4", decoder_layers=2), draw(2, 24), DecoderCache()
    other = torch.cat([x[:, :13], draw(2, 11, seed=1)], 1)
    decode(model, x, cache, (12, 1))
    twin = cache.copy()
    with torch.no_grad():
        for text, state in ((x, cache), (other, twin)):
            logits = decode(model, text, state, [1] * 11)
            torch.testing.assert_close(logits, model(text)[0][:, 13:], rtol=1e-5, atol=1e-5)
    cache.truncate(23)  # the last token alone: its window is still held
    with torch.no_grad():
        torch.testing.assert_close(decode(model, x, cache, [1]), model(x)[0][:, -1:], rtol=1e-5, atol=1e-5)
    with refused("cannot return to 5 tokens"):
        cache.truncate(5)
    with refused("has dropped old keys"):
        cache.keep_last(3)


@pytest.mark.parametrize("chunks", [[6], [1] * 6])
def test_a_row_that_goes_on_after_padding_is_refused_if_keys_were_dropped(task, chunks):
    model, x, cache = make_model(task, "rope:local=4", decoder_layers=2), draw(2, 26), DecoderCache()
    x[1, 10:20] = task.source_dictionary.pad()
    decode(model, x, cache, (8, *[1] * 12))
    with refused("a row that goes on after padding may read them"):
        decode(model, x, cache, chunks)


def test_a_refused_truncation_changes_no_layer(task):
    model, x, cache = make_model(task, "alibi:local=9|alibi:local=3", decoder_layers=2), draw(2, 17), DecoderCache()
    decode(model, x, cache, (12, *[1] * 4))
    with refused("cannot return to 11 tokens"):
        cache.truncate(11)
    assert len(cache.layer(0)) == len(cache.layer(1)) == 16
    with torch.no_grad():
        torch.testing.assert_close(decode(model, x, cache, [1]), model(x)[0][:, -1:], rtol=1e-5, atol=1e-5)
