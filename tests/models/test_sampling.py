"""Sampling: the distribution of the next token, draws from it, and rows that do not depend on their batch."""

from __future__ import annotations

import pytest
import torch
from conftest import make_model
from test_generation import EOS, MOST, PROMPTS, SPECS, log_probs, loud
from test_model import PAD, logits

from fairseq_rpe.decoder.generation import DecodingState, greedy_search, greedy_steps, token_logprobs
from fairseq_rpe.decoder.sampling import (
    SampledRow,
    SamplingConfig,
    choose_tokens,
    penalise_repetition,
    sample_rows,
    token_distribution,
)
from fairseq_rpe.positions.position_transforms import seeded_generator


def row(prompt, config, sample=0, most=MOST):
    return SampledRow(prompt, most, config, seeded_generator("test", prompt, sample))


def sampled(model, rows, end=EOS, **options):
    """The tokens of each row, and the sum of their log-probabilities."""
    tokens, sums = [[] for _ in rows], [0.0] * len(rows)

    def add(n, token, logprob):
        tokens[n].append(token)
        sums[n] += logprob or 0.0
        return False

    sample_rows(model, rows, add, end, **options)
    return tokens, sums


@pytest.mark.parametrize(
    "config", [SamplingConfig(temperature=0.0), SamplingConfig(temperature=1e-5), SamplingConfig(top_k=1)], ids=str
)
def test_the_most_likely_tokens_are_those_of_greedy_search(task, config):
    model = loud(task, "rope")
    tokens, _ = sampled(model, [row(prompt, config) for prompt in PROMPTS])
    expected = greedy_search(model, PROMPTS, MOST)
    # greedy_search leaves out the last token where it may only be the end
    assert [[token for token in own if token != EOS][: MOST - 1] for own in tokens] == expected
    endless, _ = sampled(model, [row(PROMPTS[0], config)], end=None)
    assert endless == greedy_steps(model, torch.tensor(PROMPTS[:1]), MOST).tolist()


def test_frequencies_of_draws():
    """Pearson's statistic of 2,000 draws, each from the generator of its own row."""
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], dtype=torch.float64)
    rows = [row([5], SamplingConfig(temperature=0.5), n) for n in range(2000)]
    scores = (0.5 * probabilities.log()).expand(len(rows), -1)  # the temperature squares them back
    counts = choose_tokens(scores, torch.zeros(len(rows), 1, dtype=torch.int64), rows).bincount(minlength=6)
    expected = len(rows) * probabilities
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5  # 99.9 % of a chi-square with 5 degrees


@pytest.mark.parametrize(
    ("config", "remaining"),
    [
        ({"top_p": 0.6}, [0, 1]),  # 0.4 is below 0.6, so the token that reaches it remains
        ({"top_p": 0.39}, [0]),
        ({"top_p": 1e-9}, [0]),
        ({"top_k": 4}, [0, 1, 2, 4]),  # of tokens 2 and 3, which are alike, the first
        ({"top_k": 2, "top_p": 0.6}, [0]),  # 0.4 of 0.65 is more than 0.6
        ({"top_p": 0.6, "min_p": 0.9}, [0]),
        ({"min_p": 0.24}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.26}, [0, 1, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_filters(config, remaining):
    probabilities = torch.tensor([[0.4, 0.25, 0.1, 0.1, 0.15]])
    kept = token_distribution(probabilities.log(), SamplingConfig(**config))
    assert kept[0].nonzero().flatten().tolist() == remaining
    share = probabilities[:, remaining].double() / probabilities[:, remaining].sum()
    torch.testing.assert_close(kept[:, remaining], share, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0])
def test_top_p_of_a_large_vocabulary(scale):
    """Against a sort of the whole vocabulary; a flat distribution needs more tokens than are sorted at first."""
    scores = scale * torch.randn(3, 2000, generator=torch.Generator().manual_seed(0))
    kept = token_distribution(scores, SamplingConfig(top_p=0.9))
    for own, probabilities in zip(kept, scores.double().softmax(-1), strict=True):
        values, ids = probabilities.sort(descending=True, stable=True)
        count = int((values.cumsum(0) < 0.9).sum()) + 1
        assert own.nonzero().flatten().tolist() == sorted(ids[:count].tolist())


def test_repetition_penalty(task):
    """Of logits: it divides positive ones and multiplies negative ones, once for each token of the row."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
    penalised = penalise_repetition(logits, torch.tensor([[0, 1, 0]]), 2.0)
    assert penalised.tolist() == [[1.0, -2.0, 0.5, 3.0]]
    model = loud(task, "alibi")
    tokens, _ = sampled(model, [row(PROMPTS[0], SamplingConfig(temperature=0.0, repetition_penalty=1e9))], end=None)
    assert len({*PROMPTS[0], *tokens[0]}) == len(PROMPTS[0]) + MOST


def test_a_row_does_not_depend_on_its_batch(task):
    """Prompts of all lengths, several samples of each, and different configurations in one batch."""
    model = loud(task, "fire")
    configs = [SamplingConfig(), SamplingConfig(temperature=1.5, top_p=0.9), SamplingConfig(temperature=0.0)]
    cases = [(prompt, config, sample) for prompt in PROMPTS for config in configs for sample in range(2)]
    alone = [sampled(model, [row(*case)])[0][0] for case in cases]
    together, sums = sampled(model, [row(*case) for case in cases], needs_logprobs=True)
    assert together == alone
    assert alone[0] != alone[1] and alone[4] == alone[5]  # samples differ, except where nothing is drawn
    for (prompt, *_), tokens, total in list(zip(cases, together, sums, strict=True))[::5]:
        assert sum(token_logprobs(model, prompt, tokens)) == pytest.approx(total, abs=1e-4)
        scores = log_probs(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        assert float(scores.gather(1, torch.tensor(tokens)[:, None]).sum()) == pytest.approx(total, abs=1e-4)
    other = row(PROMPTS[0], SamplingConfig(temperature=0.0, repetition_penalty=1.2))  # chosen from logits
    assert sampled(model, [row(*cases[4]), other], needs_logprobs=True)[1][0] == pytest.approx(sums[4], abs=1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_a_model_can_be_trained_after_it_has_generated(task, spec):
    """Tensors that encodings keep from generation, which runs in inference mode, do not reach the backward pass."""
    gradients = []
    for generates in (False, True):
        model = make_model(task, spec)
        if generates:
            sampled(model, [row(PROMPTS[0], SamplingConfig(), most=3)])
        model.train()
        logits(model, torch.tensor([PROMPTS[0]])).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert gradients[0] and all(map(torch.equal, *gradients))


@pytest.mark.parametrize("spec", [*SPECS, "rope:local=4", "alibi"])
def test_prompts_that_are_read_in_parts(task, spec):
    model = make_model(task, spec)
    rows = torch.tensor([PROMPTS[0], PROMPTS[3][:7]])
    with torch.no_grad():
        whole, parts = (DecodingState(model, rows, tokens) for tokens in (None, 6))  # 6: three tokens of two rows
        for token in (9, 10):
            torch.testing.assert_close(parts.prefill_or_step(), whole.prefill_or_step(), rtol=1e-5, atol=1e-5)
            for state in (whole, parts):
                state.append_tokens(torch.tensor([[token], [token]]))
        logits, _ = DecodingState(model, rows).prefill_or_step_logits()
    assert bool((logits[:, PAD] == -torch.inf).all())
