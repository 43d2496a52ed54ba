"""Exact answers to an algorithmic task by number of items, by greedy decoding with the cache."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_rpe import algorithms, positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import configure, parse
from fairseq_rpe.evaluation.loading import load
from fairseq_rpe.evaluation.losses import Cache
from fairseq_rpe.evaluation.measurements import AnswerRequest
from fairseq_rpe.evaluation.results import AnswerKey, AnswerResult
from fairseq_rpe.positions import registry
from fairseq_rpe.runs.checkpoints import Checkpoint
from fairseq_rpe.runs.plan import IDENTITY, defaults_for


def algorithm_of(checkpoint: Checkpoint) -> algorithms.Algorithm:
    """The task that a checkpoint was trained on.

    Raises:
        UserError: it was trained on text.
    """
    spec = checkpoint.task.get("algorithm")
    if not spec:
        raise UserError(f"{checkpoint.path} was not trained on an algorithmic task: fairseq-rpe eval is for text")
    return algorithms.build(str(spec))


def interpolated(spec: str, trained: int, length: int) -> str:
    """``spec`` with interpolation's automatic ratio made explicit: trained / length, 1 where the length was trained.

    >>> interpolated("interpolate", 20, 80)
    'interpolate:ratio=0.25'
    """
    name, given = parse(spec)
    config = configure(registry.get(name).Config, name, given)
    if name != "interpolate" or config.ratio != "auto" or config.train is not None:
        return spec
    return f"interpolate:ratio={trained / length!r}" if length > trained else IDENTITY


def answering(
    request: AnswerRequest, checkpoint: Checkpoint, wanted: Sequence[AnswerKey]
) -> Callable[[AnswerKey], AnswerResult]:
    """Make ready what is to answer, and look at all that is ``wanted`` before the first measurement.

    Raises:
        UserError: the checkpoint cannot be used, or some number of items has no example or no positions.
    """
    threads = defaults_for(checkpoint.arch, algorithm=True).threads
    if threads and "OMP_NUM_THREADS" not in os.environ:
        # single tokens of a small model: more threads only wait for each other
        torch.set_num_threads(threads)
    answers = Answers(request, checkpoint)
    for key in wanted:
        answers.check(key.length)

    def measure(key: AnswerKey) -> AnswerResult:
        start = time.monotonic()
        right, examples = answers.score(key.length)
        return AnswerResult(
            **vars(key),
            encoding=checkpoint.encoding,
            examples=examples,
            right=right,
            accuracy=right / examples,
            transform=answers.positions(key.length),
            seconds=round(time.monotonic() - start, 3),
        )

    return measure


class Answers:
    """A loaded model with the examples of a split."""

    def __init__(self, request: AnswerRequest, checkpoint: Checkpoint) -> None:
        self.request, self.algorithm = request, algorithm_of(checkpoint)
        self.model, self.task = load(request.checkpoint, request.use, log=request.log)
        moves = self.model.decoder.moves
        if self.model.decoder.reads_length:
            raise UserError(
                "this encoding follows the length of the text, which grows while an answer is written: give a fixed "
                "factor with --rpe, or use --positions interpolate, which has one ratio for each number of items"
            )
        self.spec = str(request.use.positions or checkpoint.model.get("positions_eval") or moves.train.evaluation)
        self.task.load_dataset(request.split)
        self.data = self.task.dataset(request.split)

    def check(self, length: int) -> None:
        """Refuse a number of items without examples, and positions that it would not accept."""
        if not (self.data.items == length).any():
            raise UserError(f"the {self.request.split} split has no example of {length} items: leave it out")
        self._place(length)

    def positions(self, length: int) -> str:
        """The position transform for examples of ``length`` items."""
        if self.request.unit == "items":
            return interpolated(self.spec, self.algorithm.longest("train"), length)
        return interpolated(self.spec, self.task.train_tokens, self.algorithm.tokens(length))

    def score(self, length: int) -> tuple[int, int]:
        """How many of how many examples of ``length`` items are answered exactly."""
        self._place(length)
        rows = (self.data.items == length).nonzero()[0].tolist()
        device = next(self.model.parameters()).device
        right = 0
        for start in range(0, len(rows), self.request.batch_size):
            prompts, answers = self.data.prompts(rows[start : start + self.request.batch_size])
            written = greedy(self.model, prompts.to(device), answers.shape[1])
            right += int(torch.eq(written.cpu(), answers).all(1).sum())
        return right, len(rows)

    def _place(self, length: int) -> None:
        """Settle the positions of a whole row before its first token is read."""
        seed = hashlib.blake2b(f"{self.spec}|{length}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
        transform = positions.build(self.positions(length), self.task.train_tokens)
        frozen = positions.freeze(transform, self.algorithm.tokens(length), generator)
        self.model.decoder.moves.evaluation = frozen


@torch.no_grad()
def greedy(model: Any, prompts: Tensor, steps: int) -> Tensor:
    """The likeliest next token, ``steps`` times.

    Rows go on after the end of the sentence: whoever compares them with answers of ``steps`` tokens needs no more.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode.
        prompts: (B, P) int64 without padding, P >= 1.
        steps: tokens to add, >= 1.

    Returns:
        (B, steps) int64.
    """
    decoder = model.decoder
    state: Cache = {}
    rows = prompts
    for _ in range(steps):
        features = decoder(rows, incremental_state=state, features_only=True)[0]
        scores = decoder.output_layer(features[:, -1])
        scores[:, decoder.padding_idx] = -torch.inf
        rows = torch.cat([rows, scores.argmax(-1, keepdim=True)], dim=1)
    return rows[:, prompts.shape[1] :]
