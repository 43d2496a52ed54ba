"""What is written with the cache, in batches and beams, against full passes over one row, fairseq and plain search."""

from __future__ import annotations

import itertools
from argparse import Namespace

import pytest
import torch
from conftest import make_model
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.language_modeling import LanguageModelingTask
from refusal import refused
from test_model import FIRST, PAD, logits

from fairseq_rpe.decoder.beam_search import beam_search
from fairseq_rpe.decoder.generation import (
    DecodingState,
    fixed_positions,
    greedy_search,
    greedy_steps,
    pad_prompts,
    score_choices,
)

EOS = 2
SPECS = ["alibi", "rope", "fire", "shaw:max_distance=5", "cope:max_positions=5", "forgetting", "sinusoidal"]
SPECS += ["bipe:segment_delimiters=</s>+w1+w2", "self_extend:group=4,window=8", "selective:base=rope", "stick_breaking"]
PROMPTS = [[7, 8, 9, 10, 11, 12, 13], [20, 21], [5], [30, 31, 32, 2, 33, 34, 35, 36, 37, 38, 39]]
MOST = 9


@torch.no_grad()
def loud(task, spec, **changes):
    """A model that has a clear opinion of what comes next, and of when to end."""
    model = make_model(task, spec, **changes)
    for parameter in model.decoder.encodings.parameters():  # learned ones start small, or at 0
        parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    for part in (model.decoder.embed_tokens, model.decoder.output_projection):
        part.weight.mul_(6)
    # the end is likely sooner or later, and not at once
    model.decoder.output_projection.weight[EOS] += 2 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    return model


@torch.no_grad()
def log_probs(model, row):
    """Of what follows each token of a row, by one full pass; padding is impossible."""
    scores = torch.log_softmax(logits(model, torch.tensor([row]))[0].float(), -1)
    scores[:, PAD] = -torch.inf
    return scores


def one_by_one(model, prompt, most=MOST):
    """The likeliest next tokens by full passes over one row."""
    written: list[int] = []
    while len(written) < most - 1 and (token := int(log_probs(model, prompt + written)[-1].argmax())) != EOS:
        written.append(token)
    return written


def sum_of(model, prompt, written):
    """log p of what was written and its end, by a full pass."""
    row = [*prompt, *written, EOS]
    return float(log_probs(model, row)[len(prompt) - 1 : -1].gather(1, torch.tensor(row[len(prompt) :])[:, None]).sum())


def score_of(model, prompt, written, penalty):
    return sum_of(model, prompt, written) / (len(written) + 1) ** penalty


@pytest.mark.parametrize("spec", SPECS)
def test_prompts_of_all_lengths_together_and_alone(task, spec):
    """The likeliest next tokens, and the likelihoods of choices, are those of full passes over one row."""
    model = loud(task, spec)
    found = greedy_search(model, PROMPTS, MOST)
    assert found == [one_by_one(model, prompt) for prompt in PROMPTS]
    assert found == [greedy_search(model, [prompt], MOST)[0] for prompt in PROMPTS]
    assert all(EOS not in row and PAD not in row and len(row) < MOST for row in found)
    choices = [[[5, 6], [9]], [[], [40, 41, 42, 43, 44]], [[7]], [[8, 8, 8], [4, 5], [50]]]
    for prompt, several, values in zip(PROMPTS, choices, score_choices(model, PROMPTS, choices), strict=True):
        assert values == pytest.approx([sum_of(model, prompt, choice) for choice in several], abs=1e-4)
    nothing = sum_of(model, PROMPTS[0], [])
    assert score_choices(model, PROMPTS[:1], [[[], []]])[0] == pytest.approx([nothing] * 2, abs=1e-5)


def test_rows_end_at_different_places(task):
    """So that the tests here see rows leave the batch one after the other."""
    lengths = {len(row) for spec in SPECS for row in greedy_search(loud(task, spec), PROMPTS, MOST)}
    assert len(lengths) >= MOST - 1


@pytest.mark.parametrize("spec", SPECS)
def test_scores_in_a_batch_are_those_of_full_passes(task, spec):
    """Step by step, while rows leave the batch and come back in another order."""
    model, more = loud(task, spec), torch.randint(FIRST, 60, (4, 6), generator=torch.Generator().manual_seed(2))
    rows = [[*prompt, *more[n].tolist()] for n, prompt in enumerate(PROMPTS)]
    order = [0, 1, 2, 3]
    with torch.no_grad():
        writing = DecodingState(model, pad_prompts(PROMPTS, PAD))
        for step, keep in enumerate(([0, 1, 2, 3], [1, 0, 2, 3], [0, 1, 3], [2, 0], [1], [0, 0])):
            found = writing.prefill_or_step()
            for place, n in enumerate(order):
                wanted = log_probs(model, rows[n][: len(PROMPTS[n]) + step])[-1]
                torch.testing.assert_close(found[place], wanted, rtol=1e-5, atol=1e-5)
            order = [order[place] for place in keep]
            writing.select_rows(torch.tensor(keep))
            writing.append_tokens(more[order, step][:, None])


@pytest.mark.parametrize(
    ("spec", "penalty"), [("rope", 0.0), ("fire", 1.0), (SPECS[-2], 1.0), ("cope:max_positions=5", 0.0)]
)
def test_beams(task, spec, penalty):
    """A beam of 1 is greedy; scores are those of full passes, the best first; a batch is its rows."""
    model = loud(task, spec)
    assert [own[0].tokens for own in beam_search(model, PROMPTS, MOST, 1, penalty)] == greedy_search(
        model, PROMPTS, MOST
    )
    found = beam_search(model, PROMPTS, MOST, 3, penalty)
    alone = [beam_search(model, [prompt], MOST, 3, penalty)[0] for prompt in PROMPTS]
    for prompt, own, single in zip(PROMPTS, found, alone, strict=True):
        assert [one.tokens for one in own] == [one.tokens for one in single] and 1 <= len(own) <= 3
        for one in own:
            assert one.score == pytest.approx(score_of(model, prompt, one.tokens, penalty), abs=1e-4)
        assert [one.score for one in own] == sorted((one.score for one in own), reverse=True)


@pytest.mark.parametrize(("spec", "penalty"), [("rope", 1.0), ("alibi", 2.0)])
def test_a_wide_beam_is_exhaustive_search(spec, penalty):
    """Of a task of two words."""
    dictionary = Dictionary()
    for word in ("yes", "no"):
        dictionary.add_symbol(word)
    model = loud(LanguageModelingTask(Namespace(add_bos_token=False), dictionary), spec)
    words = [n for n in range(len(dictionary)) if n not in (PAD, EOS)]
    texts = [written for n in range(3) for written in itertools.product(words, repeat=n)]
    prompts = [[4, 5, 4], [5]]
    for prompt, own in zip(prompts, beam_search(model, prompts, 3, 300, penalty), strict=True):
        every = {written: score_of(model, prompt, list(written), penalty) for written in texts}
        assert len(own) == len(every) == 1 + 4 + 16
        assert {tuple(one.tokens): one.score for one in own} == pytest.approx(every, abs=1e-4)
        assert tuple(own[0].tokens) == max(every, key=every.__getitem__)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beam_search_of_fairseq(task, penalty):
    """From one token, with which fairseq begins, and from a prefix, whose tokens it counts where it divides."""
    model = loud(task, "rope")

    def theirs(most, start, prefix=None):
        options = {"beam_size": 3, "min_len": 0, "max_len_a": 0, "max_len_b": most - 1, "len_penalty": penalty}
        generator = SequenceGenerator([model], task.target_dictionary, normalize_scores=prefix is None, **options)
        net = {"src_tokens": torch.tensor([[start]]), "src_lengths": torch.tensor([1])}
        return generator.generate([model], {"net_input": net}, prefix_tokens=prefix, bos_token=start)[0]

    lengths = set()
    for start in range(FIRST, FIRST + 6):
        own, found = beam_search(model, [[start]], MOST, 3, penalty)[0], theirs(MOST, start)
        assert [one.tokens for one in own] == [one["tokens"][:-1].tolist() for one in found]
        assert [one.score for one in own] == pytest.approx([float(one["score"]) for one in found], abs=1e-4)
        lengths |= {len(one.tokens) for one in own}
    assert len(lengths) > 3
    if penalty == 0:
        for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[3][4:]):
            before = len(prompt) - 1
            own, found = (
                beam_search(model, [prompt], MOST, 3, 0)[0],
                theirs(before + MOST, prompt[0], torch.tensor([prompt[1:]])),
            )
            assert [one.tokens for one in own] == [one["tokens"][before:-1].tolist() for one in found]
            sums = [float(one["positional_scores"][before:].sum()) for one in found]
            assert [one.score for one in own] == pytest.approx(sums, abs=1e-4)


@pytest.mark.parametrize("spec", ["rope", "cope:max_positions=5"])
def test_half_precision(task, spec):
    """Of matrix products, or of the whole model: answers of rows together are those of rows alone, or close."""
    for model in (loud(task, spec, compute_dtype="bf16"), loud(task, spec).bfloat16()):
        found = score_choices(model, PROMPTS, [[[5, 6], [9]]] * 4)
        for prompt, values in zip(PROMPTS, found, strict=True):
            wanted = [sum_of(model, prompt, choice) for choice in ([5, 6], [9])]
            assert values == pytest.approx(wanted, rel=0.05, abs=0.3)
        assert all(len(row) < MOST for row in greedy_search(model, PROMPTS, MOST))
        assert all(beam_search(model, PROMPTS, MOST, 2))


@torch.no_grad()
def test_past_the_end(task):
    """As algorithmic tasks ask for it: so many tokens, whichever they are."""
    model, rows = loud(task, "kerple_log"), torch.tensor([[9, 10, 11], [40, 41, 42]])
    found = greedy_steps(model, rows, 7)
    for _ in range(7):
        scores = logits(model, rows)[:, -1]
        scores[:, PAD] = -torch.inf
        rows = torch.cat([rows, scores.argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, rows[:, 3:])


@pytest.mark.parametrize(
    ("evaluation", "whole"),
    [("interpolate:train=6", None), ("interpolate:train=6", 24), ("interpolate:ratio=1/2", None)],
)
def test_positions_of_the_whole_text(task, evaluation, whole):
    """Where positions follow the length, a row has from its first token on those of the text when it is finished."""
    model, choices = loud(task, "rope", positions_eval=evaluation), [[[5, 6], [9]]] * 4
    before = model.decoder.position_transforms.evaluation
    written, several = greedy_search(model, PROMPTS, MOST, whole), beam_search(model, PROMPTS, MOST, 2, 0, whole)
    values = score_choices(model, PROMPTS, choices, whole)
    assert model.decoder.position_transforms.evaluation is before
    for n, prompt in enumerate(PROMPTS):
        with fixed_positions(model, [prompt], [whole or len(prompt) + MOST]):
            assert written[n] == one_by_one(model, prompt)
            best = several[n][0]
            assert best.score == pytest.approx(sum_of(model, prompt, best.tokens), abs=1e-4)
        with fixed_positions(model, [prompt], [whole or len(prompt) + 3]):
            assert values[n] == pytest.approx([sum_of(model, prompt, c) for c in choices[n]], abs=1e-4)


def test_random_positions_are_drawn_from_the_prompt(task):
    model = loud(task, "fire", positions_eval="randomized:max_position=99")
    assert greedy_search(model, PROMPTS, MOST) == [greedy_search(model, [prompt], MOST)[0] for prompt in PROMPTS]
    choices = [[[5, 6], [9, 9, 9]]] * 4
    values = score_choices(model, PROMPTS, choices)
    for prompt, own in zip(PROMPTS, values, strict=True):
        assert own == pytest.approx(score_choices(model, [prompt], choices[:1])[0], abs=1e-4)
    model.decoder.position_transforms.sample = 1
    others = score_choices(model, PROMPTS, choices)
    assert all(abs(one[0] - other[0]) > 1e-3 for one, other in zip(values, others, strict=True))
    model.decoder.position_transforms.sample = 0
    best = [own[0].tokens for own in beam_search(model, PROMPTS, MOST, 2)]
    assert best == [beam_search(model, [prompt], MOST, 2)[0][0].tokens for prompt in PROMPTS]
    with refused("to at least 120"):
        greedy_search(model, PROMPTS, MOST, total_length=120)


@pytest.mark.parametrize("spec", ["rope:scaling=dynamic_ntk,original_length=8", "clex:original_length=64"])
def test_what_follows_the_length_is_refused(task, spec):
    model = make_model(task, spec)
    for write, more in ((greedy_search, (MOST,)), (beam_search, (MOST, 2)), (score_choices, ([[[5]]] * 4,))):
        with refused("follows the length of the text, .*: give a fixed factor"):
            write(model, PROMPTS, *more)


def test_what_makes_no_sense(task):
    model = make_model(task, "nope")
    for prompts, most in (([], 3), ([[4], []], 3), ([[4]], 0)):
        with pytest.raises(ValueError, match="at least one prompt, no empty prompt"):
            greedy_search(model, prompts, most)
    assert greedy_search(model, [[4]], 1) == [[]]
    with torch.no_grad():
        model.decoder.output_projection.weight[7] = torch.nan
    with refused("predictions are NaN"):
        greedy_search(model, [[4]], 3)
