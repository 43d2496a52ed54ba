"""Beam search with the cache: the likeliest answers to prompts, as fairseq searches for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.decoder.generation import Tick, Writing, check_prompts, finished, padded, settled


@dataclass(frozen=True)
class Written:
    """An answer: its ``tokens`` without the end of the sentence, and its ``score``, see :func:`beam`."""

    tokens: list[int]
    score: float


@torch.no_grad()
def beam(
    model: Any,
    prompts: Sequence[Sequence[int]],
    most: int,
    size: int,
    length_penalty: float = 1.0,
    whole: int | None = None,
    tick: Tick = lambda: None,
) -> list[list[Written]]:
    """For each prompt up to ``size`` answers, the best first: fairseq's beam search.

    The score of an answer y_1 … y_n, of which y_n is the end of the sentence, is Σ_i log p(y_i | prompt, y_<i) in nats,
    divided by n ** ``length_penalty``: 0 prefers short answers, 1 the mean of a token. A step looks at the 2·size best
    ways to go on from ``size`` beginnings, whose sums are compared; of the best ``size`` of them those that end are
    answers. A prompt is done when it has ``size`` answers, or at ``most`` tokens, of which the last one has to be the
    end. fairseq does the same, and counts the prompt's tokens in n and in the sum.

    Arguments and errors are those of :func:`.generation.greedy`, to which ``size`` 1 is equal.
    """
    check_prompts(prompts, most)
    device = next(model.parameters()).device
    found: list[list[Written]] = [[] for _ in prompts]
    with settled(model, prompts, finished(prompts, most, whole)):
        writing = Writing(model, padded(prompts, model.decoder.padding_idx).to(device))
        search = _Search(writing, model.decoder.dictionary.eos(), size, length_penalty, found)
        for step in range(most):
            search.step(last=step == most - 1)
            tick()
            if not search.left:
                break
    return [sorted(answers, key=lambda answer: -answer.score) for answers in found]


class _Search:
    """Beginnings of answers, ``width`` rows of the text for each of the prompts that are ``left``."""

    def __init__(self, writing: Writing, end: int, size: int, penalty: float, found: list[list[Written]]) -> None:
        self.writing, self.end, self.size, self.penalty, self.found = writing, end, size, penalty, found
        self.left = list(range(len(found)))
        self.start = writing.rows.shape[1]
        self.width = 1
        self.sums = torch.zeros(len(found), 1, device=writing.rows.device)  # of log-probabilities (prompts, width)

    def step(self, last: bool) -> None:
        scores = self.writing.read()
        types = scores.shape[1]
        if last:
            ended = torch.full_like(scores, -torch.inf)
            ended[:, self.end] = scores[:, self.end]
            scores = ended
        sums = (self.sums[:, :, None] + scores.view(len(self.left), self.width, types)).flatten(1)
        best, places = sums.topk(min(2 * self.size, sums.shape[1] - 1))
        beams, tokens = places // types, places % types
        ends = tokens.eq(self.end) & best.isfinite()
        self._take(best, beams, ends)
        going = [n for n, prompt in enumerate(self.left) if len(self.found[prompt]) < self.size]
        if last or not going:
            self.left = []
            return
        # the best that go on, of each prompt that is not done, in their order
        at = torch.tensor(going, device=best.device)
        ranks = torch.arange(best.shape[1], device=best.device) + tokens.eq(self.end)[at] * best.shape[1]
        chosen = ranks.argsort(dim=1)[:, : self.size]
        ended = ranks.gather(1, chosen) >= best.shape[1]
        self.sums = best[at].gather(1, chosen).masked_fill(ended, -torch.inf)
        order = beams[at].gather(1, chosen) + at[:, None] * self.width
        self.writing.keep(order.flatten())
        self.writing.add(tokens[at].gather(1, chosen).view(-1, 1))
        self.left, self.width = [self.left[n] for n in going], chosen.shape[1]

    def _take(self, best: Tensor, beams: Tensor, ends: Tensor) -> None:
        """Keep the answers that end among the best ``size`` candidates."""
        for n, rank in ends[:, : self.size].nonzero().tolist():
            answers = self.found[self.left[n]]
            if len(answers) < self.size:
                tokens = self.writing.rows[n * self.width + int(beams[n, rank]), self.start :].tolist()
                answers.append(Written(tokens, float(best[n, rank]) / (len(tokens) + 1) ** self.penalty))
