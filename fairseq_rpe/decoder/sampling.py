"""Generation by sampling: temperature, top-k, top-p, min-p and repetition penalty, reproducible in any batch.

A token is drawn by the inverse of the cumulative distribution in float64 on the CPU, from one uniform number of the
row's own generator. So the text of a row depends neither on the other rows of a batch nor on the machine, up to the
rounding of the model's own scores.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.decoder.generation import DecodingState, check_prompts, fixed_positions, pad_prompts

# Largest probabilities that are sorted at first: nearly always they hold the share top_p of the distribution.
_SORTED_FIRST = 512


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen. The filters act in the order of the attributes, each on renormalised probabilities.

    Attributes:
        repetition_penalty: θ > 0 of Keskar et al. 2019 (arXiv 1909.05858). The logit s of each token that the row has,
            prompt included, becomes s / θ if s > 0, else s · θ, as in transformers; the paper divides both. 1: off.
        temperature: divides the logits; 0 chooses the most likely token.
        top_k: number of most likely tokens that remain, those of smaller ids where probabilities are equal; None: all.
        top_p: the most likely tokens remain up to the one with which their sum reaches ``top_p`` (nucleus sampling,
            Holtzman et al. 2019, arXiv 1904.09751); 1: all.
        min_p: tokens remain that have at least the share ``min_p`` of the largest probability (Nguyen et al. 2024,
            arXiv 2407.01082); 0: all.
    """

    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True)
class SampledRow:
    """A row to generate.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most new tokens, an end symbol included.
        config: how tokens are chosen.
        generator: source of the uniform numbers, on the CPU; not read at temperature 0.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    config: SamplingConfig
    generator: torch.Generator


# Called with the index of a row, its next token and the log-probability of that token in nats, or None; returns whether
# the row is finished.
OnToken = Callable[[int, int, float | None], bool]


def penalise_repetition(logits: Tensor, rows: Tensor, penalty: float) -> Tensor:
    """Return logits (R, V) after the repetition penalty for the tokens of rows (R, n)."""
    scores = logits.gather(1, rows)  # (R, n)
    return logits.scatter(1, rows, torch.where(scores < 0, scores * penalty, scores / penalty))


def token_distribution(scores: Tensor, config: SamplingConfig) -> Tensor:
    """Return the distribution from which the next token is drawn.

    Args:
        scores: (R, V) logits or log-probabilities, after the repetition penalty.
        config: filters; the temperature is above 0.

    Returns:
        (R, V) float64 probabilities.
    """
    probabilities = torch.softmax(scores.double() / config.temperature, dim=-1)  # (R, V)
    if config.top_k is not None and config.top_k < scores.shape[1]:
        limits = probabilities.topk(config.top_k).values[:, -1:]
        probabilities = _keep_largest(probabilities, limits, torch.full_like(limits, config.top_k, dtype=torch.int64))
    if config.top_p < 1:
        probabilities = _keep_nucleus(probabilities, config.top_p)
    if config.min_p > 0:
        least = config.min_p * probabilities.amax(1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return probabilities / probabilities.sum(1, keepdim=True)


def _keep_largest(probabilities: Tensor, limits: Tensor, counts: Tensor) -> Tensor:
    """Return probabilities (R, V) with 0 for all but the largest.

    Args:
        probabilities: (R, V).
        limits: (R, 1) smallest probability that remains.
        counts: (R, 1) number of tokens that remain, of those at the limit the ones with the smallest ids.
    """
    is_larger, at_limit = probabilities > limits, probabilities == limits
    remaining = counts - is_larger.sum(1, keepdim=True)
    if bool((at_limit.sum(1, keepdim=True) > remaining).any()):
        at_limit = at_limit & (at_limit.cumsum(1) <= remaining)
    return probabilities.where(is_larger | at_limit, 0.0)


def _keep_nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Return probabilities (R, V) with 0 for all but the most likely tokens up to the one that reaches ``top_p``."""
    probabilities = probabilities / probabilities.sum(1, keepdim=True)
    vocabulary = probabilities.shape[1]
    ordered = probabilities.topk(min(_SORTED_FIRST, vocabulary)).values  # (R, ≤ V), the largest first
    sums = ordered.cumsum(1)
    if ordered.shape[1] < vocabulary and bool((sums[:, -1] < top_p).any()):
        ordered = probabilities.sort(1, descending=True).values
        sums = ordered.cumsum(1)
    counts = 1 + (sums < top_p).sum(1, keepdim=True)  # the token that reaches top_p remains
    counts = counts.clamp_max(ordered.shape[1])
    return _keep_largest(probabilities, ordered.gather(1, counts - 1), counts)


def draw_tokens(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the tokens (R,) at which the cumulative probability exceeds the uniform numbers.

    Args:
        probabilities: (R, V) float64.
        uniforms: (R,) float64 in [0, 1).
    """
    sums = probabilities.cumsum(1)  # (R, V)
    tokens = torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None], right=True)[:, 0]
    # rounding may put the number at the very end: then the last token that has a probability is drawn
    indices = torch.arange(probabilities.shape[1])
    last = torch.where(probabilities > 0, indices, 0).amax(1)
    return torch.minimum(tokens, last)


def choose_tokens(scores: Tensor, tokens: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Choose the next token of each row.

    Args:
        scores: (R, V) log-probabilities, or logits if a row has a repetition penalty.
        tokens: (R, n) tokens of the rows so far.
        rows: configuration and generator of each row; each row that samples draws one number.

    Returns:
        (R,) int64 tokens on the device of ``scores``.
    """
    configs = list(dict.fromkeys(row.config for row in rows))
    if len(configs) == 1:  # nearly always
        return _choose_alike(scores, tokens, configs[0], [row.generator for row in rows])
    chosen = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
    for config in configs:
        numbers = [n for n, row in enumerate(rows) if row.config == config]
        indices = torch.tensor(numbers, device=scores.device)
        generators = [rows[n].generator for n in numbers]
        chosen[indices] = _choose_alike(scores[indices], tokens[indices], config, generators)
    return chosen


def _choose_alike(
    scores: Tensor, tokens: Tensor, config: SamplingConfig, generators: Sequence[torch.Generator]
) -> Tensor:
    """Choose the next token (R,) of rows with one configuration; the arguments are those of :func:`choose_tokens`."""
    if config.repetition_penalty != 1:
        scores = penalise_repetition(scores, tokens, config.repetition_penalty)
    if config.temperature == 0:
        return scores.argmax(-1)
    uniforms = torch.cat([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    return draw_tokens(token_distribution(scores.cpu(), config), uniforms).to(scores.device)


@torch.inference_mode()
def sample_rows(
    model: Any,
    rows: Sequence[SampledRow],
    on_token: OnToken,
    end: int | None = None,
    needs_logprobs: bool = False,
    prefill_tokens: int | None = None,
) -> None:
    """Generate tokens for several rows with the KV cache; rows that are finished are no longer computed.

    Equal prompts are read once.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        rows: the rows.
        on_token: called for each new token of each row, the end symbol included.
        end: id of the symbol that finishes a row; None: rows end by their number of tokens or by ``on_token``.
        needs_logprobs: whether ``on_token`` gets log-probabilities: those of the model, before any filter.
        prefill_tokens: most tokens of all rows that a pass over the prompts reads at once; None: all.

    Raises:
        UserError: the encoding depends on the length of the text, or its positions do not reach the length of a row.
    """
    check_prompts([row.prompt for row in rows], min((row.max_new_tokens for row in rows), default=0))
    has_penalty = any(row.config.repetition_penalty != 1 for row in rows)
    texts = [(tuple(row.prompt), len(row.prompt) + row.max_new_tokens) for row in rows]
    distinct = list(dict.fromkeys(texts))
    prompts, device = [prompt for prompt, _ in distinct], next(model.parameters()).device
    with fixed_positions(model, prompts, [length for _, length in distinct]):
        state = DecodingState(model, pad_prompts(prompts, model.decoder.padding_idx).to(device), prefill_tokens)

        def read() -> tuple[Tensor, Tensor]:
            """Return scores (R, V) of the next token, and (R, 1): log-probabilities are their difference."""
            if has_penalty:
                return state.prefill_or_step_logits()
            scores = state.prefill_or_step()
            return scores, scores.new_zeros(len(scores), 1)

        scores, totals = read()  # (distinct prompts, V), (distinct prompts, 1)
        if len(distinct) < len(rows):
            order = torch.tensor([distinct.index(text) for text in texts], device=device)
            state.select_rows(order)
            scores, totals = scores[order], totals[order]
        active, lengths = list(range(len(rows))), [0] * len(rows)
        while True:
            chosen = choose_tokens(scores, state.rows, [rows[n] for n in active])
            logprobs: list[float | None] = [None] * len(active)
            if needs_logprobs:
                logprobs = (scores.gather(1, chosen[:, None]) - totals)[:, 0].tolist()
            unfinished = []
            for index, (n, token) in enumerate(zip(active, chosen.tolist(), strict=True)):
                lengths[n] += 1
                is_stopped = on_token(n, token, logprobs[index])
                if not is_stopped and token != end and lengths[n] < rows[n].max_new_tokens:
                    unfinished.append(index)
            if not unfinished:
                return
            state.append_tokens(chosen[:, None])
            if len(unfinished) < len(active):
                state.select_rows(torch.tensor(unfinished, device=device))
                active = [active[index] for index in unfinished]
            scores, totals = read()
