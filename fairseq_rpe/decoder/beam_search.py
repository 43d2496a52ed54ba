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
    divided by n ** ``length_penalty``: 0 prefers short answers, 1 is the mean per token.

    A step extends each of the ``beam_size`` partial hypotheses of a prompt by each token of the vocabulary. The best
    2·``beam_size`` extensions are candidates. A candidate that ends, and is among the best ``beam_size``, becomes a
    hypothesis. The best ``beam_size`` candidates that do not end are the partial hypotheses of the next step.
    2·``beam_size`` candidates are enough for that: each partial hypothesis has one extension that ends, so at most
    ``beam_size`` of the candidates end.

    A prompt is finished when it has ``beam_size`` hypotheses or ``max_new_tokens`` tokens, the last of which must be
    the end-of-sentence symbol. fairseq does the same but counts the prompt's tokens in n and in the sum.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        prompts: token ids of each prompt, at least one.
        max_new_tokens: most new tokens, including the end-of-sentence symbol.
        beam_size: width of the beam; 1 gives the same answers as :func:`.generation.greedy_search`.
        length_penalty: exponent of the length in the score.
        total_length: tokens of the complete text, prompt and answer. A position transform that depends on the length of
            the text, such as ``interpolate``, takes this length. None: prompt + ``max_new_tokens``.
        on_step: called after each step.

    Raises:
        UserError: the encoding of the model depends on the current length of the text, which grows during generation;
            or a position transform has no positions for ``total_length`` tokens.
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


@dataclass(frozen=True)
class _Candidates:
    """Continuations of partial hypotheses by one token, sorted, the best first.

    Attributes:
        sums: (active, candidates) log-probability of the hypothesis with the token.
        beams: (active, candidates) partial hypothesis that is extended, from 0 to width - 1.
        tokens: (active, candidates) token that extends it.
    """

    sums: Tensor
    beams: Tensor
    tokens: Tensor


class _Search:
    """The search over the prompts that are not finished, with their partial hypotheses.

    Row n · ``width`` + b of the decoding state is partial hypothesis b of prompt ``active[n]``.

    Args:
        state: decoding state with one row per prompt.
        end: id of the end-of-sentence symbol.
        beam_size: width of the beam.
        penalty: exponent of the length in the score.
        hypotheses: one empty list per prompt, to which the search appends finished hypotheses.

    Attributes:
        active: indices of the prompts that are not finished.
        width: partial hypotheses per active prompt: 1 before the first step, then at most ``beam_size``.
        sums: (active, width) log-probability of each partial hypothesis.
    """

    def __init__(
        self, state: DecodingState, end: int, beam_size: int, penalty: float, hypotheses: list[list[Hypothesis]]
    ) -> None:
        self.state, self.end, self.beam_size, self.penalty, self.hypotheses = state, end, beam_size, penalty, hypotheses
        self.active = list(range(len(hypotheses)))
        self.prompt_length = state.rows.shape[1]  # with padding
        self.width = 1
        self.sums = torch.zeros(len(hypotheses), 1, device=state.rows.device)

    def step(self, last: bool) -> None:
        """Extend the partial hypotheses by one token; in the last step only by the end-of-sentence symbol."""
        candidates = self._best_candidates(only_end=last)
        # first: it reads the rows, ``active`` and ``width`` to which the candidates refer, and _continue replaces these
        self._add_finished(candidates)
        unfinished = [n for n, prompt in enumerate(self.active) if len(self.hypotheses[prompt]) < self.beam_size]
        if last or not unfinished:
            self.active = []
            return
        self._continue(candidates, unfinished)

    def _best_candidates(self, only_end: bool) -> _Candidates:
        """Return the 2·``beam_size`` best continuations of the partial hypotheses of each active prompt."""
        scores = self.state.prefill_or_step()  # (active · width, V) log-probabilities of the next token
        if only_end:
            end_scores = torch.full_like(scores, -torch.inf)
            end_scores[:, self.end] = scores[:, self.end]
            scores = end_scores
        vocabulary = scores.shape[1]
        sums = self.sums[:, :, None] + scores.view(len(self.active), self.width, vocabulary)  # (active, width, V)
        sums = sums.flatten(1)  # (active, width · V)
        # A small vocabulary has fewer than 2·beam_size extensions. One less than all of them, as in fairseq, leaves out
        # the padding symbol of the worst hypothesis, whose score is -inf.
        count = min(2 * self.beam_size, sums.shape[1] - 1)
        best, indices = sums.topk(count)  # (active, candidates)
        return _Candidates(best, indices // vocabulary, indices % vocabulary)

    def _add_finished(self, candidates: _Candidates) -> None:
        """Append the candidates that end, and are among the best ``beam_size``, to the hypotheses of their prompts."""
        ends = candidates.tokens.eq(self.end) & candidates.sums.isfinite()
        for n, rank in ends[:, : self.beam_size].nonzero().tolist():
            answers = self.hypotheses[self.active[n]]
            if len(answers) < self.beam_size:
                row = n * self.width + int(candidates.beams[n, rank])
                # the row has the answer without the end-of-sentence symbol, which the score counts
                tokens = self.state.rows[row, self.prompt_length :].tolist()
                score = float(candidates.sums[n, rank]) / (len(tokens) + 1) ** self.penalty
                answers.append(Hypothesis(tokens, score))

    def _continue(self, candidates: _Candidates, unfinished: list[int]) -> None:
        """Make the best ``beam_size`` candidates that do not end the partial hypotheses of the next step.

        Args:
            candidates: candidates of all active prompts.
            unfinished: indices in ``active`` of the prompts that go on; the others are dropped.
        """
        prompts = torch.tensor(unfinished, device=candidates.sums.device)
        sums, beams, tokens = (x[prompts] for x in (candidates.sums, candidates.beams, candidates.tokens))
        count = tokens.shape[1]
        # Candidates are sorted, the best first. Those that end get a rank after all others; sorting ranks then selects
        # candidates that do not end in their order, and fills up with ended ones, which get a sum of -inf.
        ranks = torch.arange(count, device=tokens.device) + tokens.eq(self.end) * count
        selected = ranks.argsort(dim=1)[:, : self.beam_size]  # (unfinished, width)
        has_ended = ranks.gather(1, selected) >= count
        self.sums = sums.gather(1, selected).masked_fill(has_ended, -torch.inf)
        rows = prompts[:, None] * self.width + beams.gather(1, selected)
        self.state.select_rows(rows.flatten())
        self.state.append_tokens(tokens.gather(1, selected).view(-1, 1))
        self.active, self.width = [self.active[n] for n in unfinished], selected.shape[1]
