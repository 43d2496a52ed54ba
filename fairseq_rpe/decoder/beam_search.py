"""Beam search with the KV cache, with the search strategy and scores of fairseq."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.decoder.generation import (
    DecodingState,
    OnStep,
    check_prompts,
    final_lengths,
    fixed_positions,
    pad_prompts,
)


@dataclass(frozen=True)
class Hypothesis:
    """A generated answer.

    Attributes:
        tokens: token ids without the end-of-sentence symbol.
        score: length-normalised log-probability in nats, see :func:`beam_search`.
    """

    tokens: list[int]
    score: float


@torch.no_grad()
def beam_search(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    beam_size: int,
    length_penalty: float = 1.0,
    total_length: int | None = None,
    on_step: OnStep = lambda: None,
) -> list[list[Hypothesis]]:
    """Return up to ``beam_size`` hypotheses for each prompt, the best first.

    The score of an answer y_1 … y_n, where y_n is the end-of-sentence symbol, is Σ_i log p(y_i | prompt, y_<i) in nats
    divided by n ** ``length_penalty``: 0 prefers short answers, 1 is the mean per token. A step extends the
    ``beam_size`` partial hypotheses by their 2·``beam_size`` best continuations, compared by their sums; those among
    the best ``beam_size`` that end are hypotheses. A prompt is finished when it has ``beam_size`` hypotheses or
    ``max_new_tokens`` tokens, the last of which must be the end-of-sentence symbol. fairseq does the same but counts
    the prompt's tokens in n and in the sum.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        prompts: token ids of each prompt, at least one.
        max_new_tokens: most new tokens, including the end-of-sentence symbol.
        beam_size: width of the beam; 1 is :func:`.generation.greedy_search`.
        length_penalty: exponent of the length in the score.
        total_length: tokens of the complete text, for positions that depend on it; None: prompt + ``max_new_tokens``.
        on_step: called after each step.

    Raises:
        UserError: the encoding depends on the length of the text, or its positions do not reach ``total_length``.
    """
    check_prompts(prompts, max_new_tokens)
    device = next(model.parameters()).device
    hypotheses: list[list[Hypothesis]] = [[] for _ in prompts]
    with fixed_positions(model, prompts, final_lengths(prompts, max_new_tokens, total_length)):
        state = DecodingState(model, pad_prompts(prompts, model.decoder.padding_idx).to(device))
        search = _Search(state, model.decoder.dictionary.eos(), beam_size, length_penalty, hypotheses)
        for step in range(max_new_tokens):
            search.step(last=step == max_new_tokens - 1)
            on_step()
            if not search.active:
                break
    return [sorted(answers, key=lambda answer: -answer.score) for answers in hypotheses]


class _Search:
    """Partial hypotheses: ``width`` rows of the state for each prompt in ``active``."""

    def __init__(
        self, state: DecodingState, end: int, beam_size: int, penalty: float, hypotheses: list[list[Hypothesis]]
    ) -> None:
        self.state, self.end, self.beam_size, self.penalty, self.hypotheses = state, end, beam_size, penalty, hypotheses
        self.active = list(range(len(hypotheses)))  # prompts that are not finished
        self.start = state.rows.shape[1]
        self.width = 1
        self.sums = torch.zeros(len(hypotheses), 1, device=state.rows.device)  # log-probabilities (prompts, width)

    def step(self, last: bool) -> None:
        """Extend the partial hypotheses by one token; in the last step only by the end-of-sentence symbol."""
        scores = self.state.prefill_or_step()  # (prompts · width, V)
        vocabulary = scores.shape[1]
        if last:
            ended = torch.full_like(scores, -torch.inf)
            ended[:, self.end] = scores[:, self.end]
            scores = ended
        sums = self.sums[:, :, None] + scores.view(len(self.active), self.width, vocabulary)
        sums = sums.flatten(1)  # (prompts, width · V)
        best, indices = sums.topk(min(2 * self.beam_size, sums.shape[1] - 1))  # (prompts, candidates)
        beams, tokens = indices // vocabulary, indices % vocabulary
        ends = tokens.eq(self.end) & best.isfinite()
        self._add_finished(best, beams, ends)
        going = [n for n, prompt in enumerate(self.active) if len(self.hypotheses[prompt]) < self.beam_size]
        if last or not going:
            self.active = []
            return
        # keep the best candidates that do not end, in their order, for each unfinished prompt
        unfinished = torch.tensor(going, device=best.device)
        ranks = torch.arange(best.shape[1], device=best.device) + tokens.eq(self.end)[unfinished] * best.shape[1]
        kept_ranks = ranks.argsort(dim=1)[:, : self.beam_size]  # (unfinished, width)
        ended = ranks.gather(1, kept_ranks) >= best.shape[1]
        self.sums = best[unfinished].gather(1, kept_ranks).masked_fill(ended, -torch.inf)
        order = beams[unfinished].gather(1, kept_ranks) + unfinished[:, None] * self.width
        self.state.select_rows(order.flatten())
        self.state.append_tokens(tokens[unfinished].gather(1, kept_ranks).view(-1, 1))
        self.active, self.width = [self.active[n] for n in going], kept_ranks.shape[1]

    def _add_finished(self, best: Tensor, beams: Tensor, ends: Tensor) -> None:
        """Store the candidates that end among the best ``beam_size``."""
        for n, rank in ends[:, : self.beam_size].nonzero().tolist():
            answers = self.hypotheses[self.active[n]]
            if len(answers) < self.beam_size:
                tokens = self.state.rows[n * self.width + int(beams[n, rank]), self.start :].tolist()
                answers.append(Hypothesis(tokens, float(best[n, rank]) / (len(tokens) + 1) ** self.penalty))
