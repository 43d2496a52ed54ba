"""What a model writes after prompts: the likeliest tokens, or how likely given choices are. With the cache.

These, and beams, read the prompts once, in one pass over the batch, and then only what is new. Prompts of different
lengths are padded; a row's numbers are those of the same row alone.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.positions import Transform, freeze, freeze_rows
from fairseq_rpe.positions.base import Fixed
from fairseq_rpe.positions.position_transforms import Moves, generator_of

Tick = Callable[[], object]


def check_fixed(model: Any) -> None:
    """Refuse an encoding for which what has been read would change with every token that is written."""
    if model.decoder.length_dependent:
        raise UserError(
            "this encoding follows the length of the text, which grows while an answer is written: give a fixed "
            "factor with --rpe, or use --positions interpolate, which has one ratio for the whole text"
        )


class Writing:
    """Rows of text that are being written, with the cache of what has been read.

    ``rows`` (R, m) int64: prompts as :func:`padded` gives them; once they are read, padding, prompt and what has been
    written. ``model``: a ``transformer_rpe_lm`` in evaluation mode whose positions stay where they are while rows grow
    (see :func:`settled`).
    """

    def __init__(self, model: Any, rows: Tensor) -> None:
        check_fixed(model)
        self.model, self.rows, self._state = model, rows, dict[str, Any]()

    def read(self) -> Tensor:
        """Read what has not been read yet: log-probabilities (R, V) of the next token, float32; never padding."""
        features = self._features()
        if features.shape[1] == self.rows.shape[1]:  # nothing was read before
            lengths = self.rows.ne(self.model.decoder.padding_idx).sum(1)
            features = features[torch.arange(len(lengths), device=lengths.device), lengths - 1][:, None]
            self._move_padding(lengths)
        return self._scores(features[:, -1:])

    def _move_padding(self, lengths: Tensor) -> None:
        """From the end of prompts, where attention need not know of it, to before them, so that more can follow."""
        size = self.rows.shape[1]
        if bool((lengths == size).all()):
            return
        order = torch.arange(size, device=lengths.device)
        order = (order + lengths[:, None]) % size
        self.rows = self.rows.gather(1, order)
        for layer in self.model.decoder.layers:
            held = layer.self_attn._get_input_buffer(self._state)
            moved = {name: x.gather(2, order[:, None, :, None].expand_as(x)) for name, x in held.items()}
            layer.self_attn._set_input_buffer(self._state, moved)

    def chances(self, next_ones: Tensor) -> Tensor:
        """The same of the tokens next_ones (R, n) int64 that follow the last n tokens of what is read: (R, n)."""
        features = self._features()[:, -next_ones.shape[1] :]
        # one after the other: scores of a whole vocabulary are large
        each = (self._scores(features[:, n : n + 1]) for n in range(next_ones.shape[1]))
        return torch.cat([one.gather(1, next_ones[:, n : n + 1]) for n, one in enumerate(each)], dim=1)

    def _features(self) -> Tensor:
        return self.model.decoder(self.rows, incremental_state=self._state, features_only=True)[0]

    def _scores(self, features: Tensor) -> Tensor:
        """Log-probabilities (R, V) from features (R, 1, C)."""
        outputs = self.model.decoder.output_layer(features), None
        scores = self.model.get_normalized_probs(outputs, log_probs=True)[:, 0].float()
        if bool(scores.isnan().any()):
            raise UserError("this model's predictions are not numbers (NaN): use an earlier checkpoint of its training")
        scores[:, self.model.decoder.padding_idx] = -torch.inf
        return scores

    def add(self, tokens: Tensor) -> None:
        """Write ``tokens`` (R, n) behind the rows."""
        self.rows = torch.cat([self.rows, tokens.to(self.rows)], dim=1)

    def keep(self, order: Tensor) -> None:
        """Go on with the rows ``order`` (R',) int64, in which a row may be missing or be there several times."""
        if len(order) == len(self.rows) and bool((order == torch.arange(len(order), device=order.device)).all()):
            return
        self.rows = self.rows[order]
        self.model.decoder.reorder_incremental_state_scripting(self._state, order)
        moves: Moves = self.model.decoder.moves
        if isinstance(moves.evaluation, Fixed):
            moves.evaluation = moves.evaluation.of_rows(order)


def padded(prompts: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Rows of different lengths as (B, P) int64, padded at their end."""
    rows = torch.full((len(prompts), max(map(len, prompts))), pad)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64)
    return rows


@contextlib.contextmanager
def settled(model: Any, prompts: Sequence[Sequence[int]], whole: Sequence[int]) -> Iterator[None]:
    """Inside, every row has the positions of its finished text of ``whole`` tokens from its first token on.

    Nothing changes where tokens stay where they are anyway. Interpolation without a ratio takes that of the whole, and
    random positions are drawn for each row, from its prompt. Raises UserError: a transform has no such positions.
    """
    moves: Moves = model.decoder.moves
    before = moves.evaluation
    if not moves.length_invariant(False):
        moves.evaluation = _frozen(moves, before, prompts, whole)
    try:
        yield
    finally:
        moves.evaluation = before


def _frozen(moves: Moves, transform: Transform, prompts: Sequence[Sequence[int]], whole: Sequence[int]) -> Transform:
    if not transform.random and len(set(whole)) == 1:
        return freeze(transform, whole[0])
    own = [generator_of(moves.seed, "answer", moves.draw, list(map(int, prompt))) for prompt in prompts]
    return freeze_rows(transform, whole, own)


def check_prompts(prompts: Sequence[Sequence[int]], most: int) -> None:
    """Raises ValueError: there is nothing to read, or nothing to write."""
    if not prompts or not all(map(len, prompts)) or most < 1:
        raise ValueError("there is something to read in every prompt, and at least one token to write")


def finished(prompts: Sequence[Sequence[int]], most: int, whole: int | None) -> list[int]:
    """Tokens of each finished text: ``whole``, or those of the prompt and ``most`` more."""
    return [len(prompt) + most if whole is None else whole for prompt in prompts]


@torch.no_grad()
def continued(model: Any, prompts: Tensor, steps: int, tick: Tick = lambda: None) -> Tensor:
    """The likeliest next token, ``steps`` >= 1 times, past the end of the sentence as well: (B, steps) int64.

    ``prompts``: (B, P) int64 without padding, P >= 1; ``tick`` is called after each token. Positions are settled by
    the caller.
    """
    writing = Writing(model, prompts)
    for _ in range(steps):
        writing.add(writing.read().argmax(-1, keepdim=True))
        tick()
    return writing.rows[:, prompts.shape[1] :]


@torch.no_grad()
def greedy(
    model: Any, prompts: Sequence[Sequence[int]], most: int, whole: int | None = None, tick: Tick = lambda: None
) -> list[list[int]]:
    """For each prompt the likeliest next tokens up to the end of the sentence, which is not among them.

    An answer has at most ``most`` tokens with its end: where the first ``most`` - 1 have not ended it, they are all.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        prompts: token ids of each, at least one.
        whole: tokens of the finished text where positions depend on it; None: of the prompt and ``most`` more.
        tick: called after each step.

    Raises UserError: an encoding that follows the length of the text; positions that the text does not fit.
    """
    check_prompts(prompts, most)
    end, device = model.decoder.dictionary.eos(), next(model.parameters()).device
    found: list[list[int]] = [[] for _ in prompts]
    with settled(model, prompts, finished(prompts, most, whole)):
        writing = Writing(model, padded(prompts, model.decoder.padding_idx).to(device))
        active = torch.arange(len(prompts))  # of the rows that are left, in their order
        for _ in range(most - 1):
            best = writing.read().argmax(-1)
            tokens = best.tolist()
            tick()
            for row, token in zip(active.tolist(), tokens, strict=True):
                if token != end:
                    found[row].append(token)
            going = torch.tensor([token != end for token in tokens])
            if not going.any():
                break
            writing.add(best[:, None])
            if not going.all():  # rows that are done are no longer read
                writing.keep(going.nonzero().flatten().to(device))
                active = active[going]
    return found


@torch.no_grad()
def likelihoods(
    model: Any, prompts: Sequence[Sequence[int]], choices: Sequence[Sequence[Sequence[int]]], whole: int | None = None
) -> list[list[float]]:
    """log p(choice and the end of the sentence | prompt) in nats, for each choice of each prompt: sums over tokens.

    The prompts are read once; their choices are then read beside each other. ``choices``: of each prompt its own,
    without the end. Other arguments and errors are those of :func:`greedy`; ``whole`` None: of the prompt, the longest
    of all choices and the end.
    """
    flat = [choice for own in choices for choice in own]
    most = 1 + max(map(len, flat))
    check_prompts(prompts, most)
    dictionary, device = model.decoder.dictionary, next(model.parameters()).device
    pad = dictionary.pad()
    wanted = padded([[*choice, dictionary.eos()] for choice in flat], pad).to(device)
    with settled(model, prompts, finished(prompts, most, whole)):
        writing = Writing(model, padded(prompts, pad).to(device))
        first = writing.read()
        counts = torch.tensor([len(own) for own in choices], device=device)
        order = torch.arange(len(prompts), device=device).repeat_interleave(counts)
        each = first[order].gather(1, wanted[:, :1])
        if most > 1:
            writing.keep(order)
            writing.add(wanted[:, :-1].masked_fill(wanted[:, 1:].eq(pad), pad))  # without the end of each
            each = torch.cat([each, writing.chances(wanted[:, 1:])], dim=1)
    sums = iter(each.masked_fill(wanted.eq(pad), 0.0).double().sum(1).tolist())
    return [[next(sums) for _ in own] for own in choices]
