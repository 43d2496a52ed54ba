"""Greedy decoding and scoring of given choices with the KV cache, for language models with any encoding.

A prefill reads the prompts of a batch, then each step reads only new tokens. Prompts of different lengths are padded;
the result of a row does not depend on the other rows.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.cache import DecoderCache
from fairseq_rpe.positions import Transform, freeze, freeze_rows
from fairseq_rpe.positions.base import FrozenPositions
from fairseq_rpe.positions.position_transforms import PositionTransforms, seeded_generator

OnStep = Callable[[], object]


def check_length_independent(model: Any) -> None:
    """Raise UserError if a model's encoding changes for cached tokens with every new token."""
    if model.decoder.length_dependent:
        raise UserError(
            "this encoding follows the length of the text, which grows during generation: give a fixed factor with "
            "--rpe, or use --positions-eval interpolate, which has one ratio for the whole text"
        )


class DecodingState:
    """Rows of tokens that are being generated, with their KV cache.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode, inside :func:`fixed_positions`.
        rows: (R, P) int64 prompts as :func:`pad_prompts` returns them.
        prefill_tokens: most tokens of all rows together that a pass over prompts of equal lengths reads at once, which
            bounds the memory for long prompts; None: the prompts are read in one pass, as those of different lengths.

    Attributes:
        rows: (R, n) int64. After the prefill: padding, prompt and generated tokens of each row.
    """

    def __init__(self, model: Any, rows: Tensor, prefill_tokens: int | None = None) -> None:
        check_length_independent(model)
        self.model, self.rows, self._cache = model, rows, DecoderCache()
        self._prefill_tokens = prefill_tokens

    def prefill_or_step(self) -> Tensor:
        """Read the tokens that are not in the cache yet.

        Returns:
            (R, V) float32 log-probabilities of the next token; -inf for padding.
        """
        return self._log_probs(self._last_features())

    def prefill_or_step_logits(self) -> tuple[Tensor, Tensor]:
        """Read the tokens that are not in the cache yet.

        Returns:
            (R, V) float32 logits of the next token, -inf for padding; and (R, 1) the log-sum-exp of all logits, padding
            included, which turns them into the log-probabilities of :meth:`prefill_or_step`.

        Raises:
            UserError: the model has an adaptive softmax, which has no logits of the whole vocabulary.
        """
        decoder = self.model.decoder
        if decoder.output_projection is None:
            raise UserError("this model's adaptive softmax has no logits: leave the repetition penalty out")
        logits = decoder.output_layer(self._last_features())[:, 0].float()
        total = logits.logsumexp(-1, keepdim=True)
        return self._exclude_padding(logits), total

    def _last_features(self) -> Tensor:
        """Read the tokens that are not in the cache yet, and return the features (R, 1, C) of the last tokens."""
        if len(self._cache):
            return self._features()[:, -1:]
        size = self.rows.shape[1]
        lengths = self.rows.ne(self.model.decoder.padding_idx).sum(1)  # (R,)
        if bool((lengths == size).all()):
            step = size if self._prefill_tokens is None else max(1, self._prefill_tokens // len(lengths))
            for stop in (*range(step, size, step), size):
                features: Tensor = self.model.decoder.features(self.rows[:, :stop], self._cache)
            features = features[:, -1:]
        else:
            features = self._features()  # (R, P, C)
            features = features[torch.arange(len(lengths), device=lengths.device), lengths - 1][:, None]  # (R, 1, C)
            self._move_padding(lengths)
        self._cache.drop_hidden_keys()  # not earlier: the window of a short prompt lies before its padding
        return features

    def _move_padding(self, lengths: Tensor) -> None:
        """Move padding from after the prompts, where attention may ignore it, to before them, to append tokens."""
        size = self.rows.shape[1]
        order = torch.arange(size, device=lengths.device)
        order = (order + lengths[:, None]) % size  # (R, P)
        self.rows = self.rows.gather(1, order)
        self._cache.permute_tokens(order)

    def next_token_logprobs(self, next_tokens: Tensor) -> Tensor:
        """Read the tokens that are not in the cache and score given successors of the last n of them.

        Args:
            next_tokens: (R, n) int64, the token after each of the last n tokens of ``rows``.

        Returns:
            (R, n) float32 log-probabilities.
        """
        features = self._features()[:, -next_tokens.shape[1] :]  # (R, n, C)
        # one position at a time: (R, n, V) would be large
        steps = (self._log_probs(features[:, i : i + 1]) for i in range(next_tokens.shape[1]))
        return torch.cat([step.gather(1, next_tokens[:, i : i + 1]) for i, step in enumerate(steps)], dim=1)

    def _features(self) -> Tensor:
        """Return the features (R, new tokens, C) of the tokens that are not in the cache yet."""
        features: Tensor = self.model.decoder.features(self.rows, self._cache)
        return features

    def _log_probs(self, features: Tensor) -> Tensor:
        """Return log-probabilities (R, V) of features (R, 1, C)."""
        outputs = self.model.decoder.output_layer(features), None
        return self._exclude_padding(self.model.get_normalized_probs(outputs, log_probs=True)[:, 0].float())

    def _exclude_padding(self, scores: Tensor) -> Tensor:
        """Return scores (R, V) with -inf for padding; raise UserError if they are NaN."""
        if bool(scores.isnan().any()):
            raise UserError("this model's predictions are NaN: use an earlier checkpoint of its training")
        scores[:, self.model.decoder.padding_idx] = -torch.inf
        return scores

    def append_tokens(self, tokens: Tensor) -> None:
        """Append ``tokens`` (R, n) to the rows; the next step reads them."""
        self.rows = torch.cat([self.rows, tokens.to(self.rows)], dim=1)

    def select_rows(self, order: Tensor) -> None:
        """Keep the rows ``order`` (R',) int64; a row may be left out or repeated."""
        if len(order) == len(self.rows) and bool((order == torch.arange(len(order), device=order.device)).all()):
            return  # all rows in their order: copying the cache would only cost time
        self.rows = self.rows[order]
        self._cache.select_rows(order)
        transforms: PositionTransforms = self.model.decoder.position_transforms
        if isinstance(transforms.evaluation, FrozenPositions):  # rows may have different positions
            transforms.evaluation = transforms.evaluation.select_rows(order)


def pad_prompts(prompts: Sequence[Sequence[int]], pad: int) -> Tensor:
    """Return token lists of different lengths as (B, P) int64, padded at the end."""
    rows = torch.full((len(prompts), max(map(len, prompts))), pad)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64)
    return rows


@contextlib.contextmanager
def fixed_positions(model: Any, prompts: Sequence[Sequence[int]], total_lengths: Sequence[int]) -> Iterator[None]:
    """Give every token its position in the complete text while the block generates token by token.

    Transforms that are length invariant need no change. Interpolation without a ratio uses the ratio of the complete
    text, and random positions are sampled per row, seeded by its prompt.

    Args:
        model: whose transform in evaluation is replaced inside the block.
        prompts: token ids of each row.
        total_lengths: tokens of each complete text.

    Raises:
        UserError: the transform has no positions for texts of these lengths.
    """
    transforms: PositionTransforms = model.decoder.position_transforms
    before = transforms.evaluation
    if not transforms.length_invariant(False):
        transforms.evaluation = _freeze_transform(transforms, prompts, total_lengths)
    try:
        yield
    finally:
        transforms.evaluation = before


def _freeze_transform(
    transforms: PositionTransforms, prompts: Sequence[Sequence[int]], total_lengths: Sequence[int]
) -> Transform:
    """Return a transform with the positions of complete texts of these lengths: of all rows alike, or row by row."""
    transform = transforms.evaluation
    if not transform.random and len(set(total_lengths)) == 1:
        return freeze(transform, total_lengths[0])
    seed, sample = transforms.seed, transforms.sample
    generators = [seeded_generator(seed, "answer", sample, list(map(int, prompt))) for prompt in prompts]
    return freeze_rows(transform, total_lengths, generators)


def check_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Raise ValueError if there is nothing to read or nothing to generate."""
    if not prompts or not all(map(len, prompts)) or max_new_tokens < 1:
        raise ValueError("generation needs at least one prompt, no empty prompt and at least one new token")


def final_lengths(prompts: Sequence[Sequence[int]], max_new_tokens: int, total_length: int | None) -> list[int]:
    """Return the tokens of each complete text: ``total_length``, or prompt and ``max_new_tokens`` if it is None."""
    return [len(prompt) + max_new_tokens if total_length is None else total_length for prompt in prompts]


@torch.no_grad()
def greedy_steps(model: Any, prompts: Tensor, steps: int, on_step: OnStep = lambda: None) -> Tensor:
    """Generate the most likely next token ``steps`` times, past the end-of-sentence symbol too.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode, inside :func:`fixed_positions` if its positions need it.
        prompts: (B, P) int64 without padding, P >= 1.
        steps: number of new tokens, at least 1.
        on_step: called after each token.

    Returns:
        (B, steps) int64 new tokens.
    """
    state = DecodingState(model, prompts)
    for _ in range(steps):
        state.append_tokens(state.prefill_or_step().argmax(-1, keepdim=True))
        on_step()
    return state.rows[:, prompts.shape[1] :]


@torch.no_grad()
def greedy_search(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    total_length: int | None = None,
    on_step: OnStep = lambda: None,
) -> list[list[int]]:
    """Generate the most likely tokens up to the end-of-sentence symbol.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        prompts: token ids of each prompt, at least one.
        max_new_tokens: most new tokens including the end-of-sentence symbol; an answer that has not ended after
            ``max_new_tokens`` - 1 tokens is these tokens.
        total_length: tokens of the complete text, for positions that depend on it; None: prompt + ``max_new_tokens``.
        on_step: called after each step.

    Returns:
        The new tokens of each prompt, without the end-of-sentence symbol.

    Raises:
        UserError: the encoding depends on the length of the text, or its positions do not reach ``total_length``.
    """
    check_prompts(prompts, max_new_tokens)
    end, device = model.decoder.dictionary.eos(), next(model.parameters()).device
    answers: list[list[int]] = [[] for _ in prompts]
    with fixed_positions(model, prompts, final_lengths(prompts, max_new_tokens, total_length)):
        state = DecodingState(model, pad_prompts(prompts, model.decoder.padding_idx).to(device))
        active = torch.arange(len(prompts))  # prompt of each row that is not finished
        for _ in range(max_new_tokens - 1):
            best = state.prefill_or_step().argmax(-1)  # (R,)
            tokens = best.tolist()
            on_step()
            for row, token in zip(active.tolist(), tokens, strict=True):
                if token != end:
                    answers[row].append(token)
            unfinished = torch.tensor([token != end for token in tokens])
            if not unfinished.any():
                break
            state.append_tokens(best[:, None])
            if not unfinished.all():  # finished rows are no longer computed
                state.select_rows(unfinished.nonzero().flatten().to(device))
                active = active[unfinished]
    return answers


@torch.no_grad()
def score_choices(
    model: Any,
    prompts: Sequence[Sequence[int]],
    choices: Sequence[Sequence[Sequence[int]]],
    total_length: int | None = None,
    ends: bool = True,
) -> list[list[float]]:
    """Return log p(choice, end of sentence | prompt) in nats for each choice of each prompt, summed over tokens.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        prompts: token ids of each prompt, at least one; each is read once.
        choices: for each prompt the token ids of its choices, without the end-of-sentence symbol.
        total_length: tokens of the complete text, for positions that depend on it; None: those of the prompt, the
            longest choice and the end-of-sentence symbol, if it is scored.
        ends: whether the end-of-sentence symbol after the choice is scored, too.

    Raises:
        UserError: the encoding depends on the length of the text, or its positions do not reach ``total_length``.
    """
    flat = [choice for own_choices in choices for choice in own_choices]
    max_new_tokens = max(map(len, flat)) + ends
    check_prompts(prompts, max_new_tokens)
    dictionary, device = model.decoder.dictionary, next(model.parameters()).device
    pad = dictionary.pad()
    end = [dictionary.eos()] if ends else []
    targets = pad_prompts([[*choice, *end] for choice in flat], pad).to(device)  # (R, n), R choices in all
    with fixed_positions(model, prompts, final_lengths(prompts, max_new_tokens, total_length)):
        state = DecodingState(model, pad_prompts(prompts, pad).to(device))
        first = state.prefill_or_step()  # (B, V)
        counts = torch.tensor([len(own_choices) for own_choices in choices], device=device)
        order = torch.arange(len(prompts), device=device).repeat_interleave(counts)  # (R,) prompt of each choice
        logprobs = first[order].gather(1, targets[:, :1])  # (R, 1)
        if max_new_tokens > 1:
            state.select_rows(order)
            state.append_tokens(targets[:, :-1].masked_fill(targets[:, 1:].eq(pad), pad))  # choices without their ends
            logprobs = torch.cat([logprobs, state.next_token_logprobs(targets[:, 1:])], dim=1)  # (R, n)
    sums = iter(logprobs.masked_fill(targets.eq(pad), 0.0).double().sum(1).tolist())
    return [[next(sums) for _ in own_choices] for own_choices in choices]


@torch.no_grad()
def token_logprobs(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], total_length: int | None = None
) -> list[float]:
    """Return log p(token | prompt, earlier tokens) in nats for each token of a continuation.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        prompt: token ids, at least one.
        tokens: token ids of the continuation, at least one.
        total_length: tokens of the complete text, for positions that depend on it; None: those of prompt and tokens.

    Raises:
        UserError: the encoding depends on the length of the text, or its positions do not reach ``total_length``.
    """
    check_prompts([prompt], len(tokens))
    device = next(model.parameters()).device
    with fixed_positions(model, [prompt], final_lengths([prompt], len(tokens), total_length)):
        state = DecodingState(model, torch.tensor([list(prompt)], device=device))
        targets = torch.tensor([list(tokens)], device=device)  # (1, n)
        logprobs = state.prefill_or_step().gather(1, targets[:, :1])
        if len(tokens) > 1:
            state.append_tokens(targets[:, :-1])
            logprobs = torch.cat([logprobs, state.next_token_logprobs(targets[:, 1:])], dim=1)
    return [float(value) for value in logprobs[0]]
