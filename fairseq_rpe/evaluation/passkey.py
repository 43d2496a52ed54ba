"""Measures how often a model of text finds a pass key, by length of the text and depth of the key."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.text_codec import TextCodec
from fairseq_rpe.decoder.generation import fixed_positions, greedy_steps, score_choices
from fairseq_rpe.evaluation.checkpoint_defaults import position_limits
from fairseq_rpe.evaluation.example_scores import pack_hits, unpack_hits
from fairseq_rpe.evaluation.generation_records import GenerationRequest
from fairseq_rpe.evaluation.passkey_prompts import FILLER, PasskeyExample, PasskeyPrompts, read_sentences
from fairseq_rpe.evaluation.records import BATCH_TOKENS, EvalOverrides, Result, resume_results
from fairseq_rpe.evaluation.text_generation import TextGenerator
from fairseq_rpe.utils.files import sha256_of_files
from fairseq_rpe.utils.progress import Progress
from fairseq_rpe.utils.records import Count, Natural, Share, from_attributes

AnswerMode = Literal["generation", "likelihood"]


@dataclass(frozen=True, kw_only=True)
class PasskeyRequest(EvalOverrides):
    """The options of ``fairseq-rpe passkey``.

    Attributes:
        checkpoint: checkpoint file of a model of text.
        lengths: tokens of prompt and answer together.
        depths: number of depths, evenly spaced from 0 to 1; a single one is 0.5.
        examples: examples of each length and depth.
        answer: generation for greedy search, or likelihood to choose among keys.
        choices: keys among which the model chooses; has no effect on generation.
        filler: text file whose sentences are the filler; None: the sentences of the paper.
        seed: seed of the keys.
    """

    checkpoint: Path
    lengths: Sequence[int]
    depths: int = 11
    examples: int = 20
    answer: AnswerMode = "generation"
    choices: int = 8
    filler: Path | None = None
    seed: int = 1

    def depth_values(self) -> list[float]:
        """Return the depths, ascending."""
        return [0.5] if self.depths == 1 else [round(i / (self.depths - 1), 4) for i in range(self.depths)]


@dataclass(frozen=True, kw_only=True)
class PasskeyKey:
    """Key of one cell of the heat map.

    Attributes:
        checkpoint: digest of the checkpoint.
        rpe: encoding in place of the checkpoint's.
        module: digest of the file of ``--rpe-module``, which may define the encoding.
        positions: position transform in place of the checkpoint's.
        filler: digest of the sentences of the filler.
        answer: generation or likelihood.
        choices: keys among which the model chooses; None for generation.
        seed: seed of the keys.
        examples: number of examples.
        length: tokens of prompt and answer together.
        depth: relative position of the pass key.
    """

    checkpoint: str
    rpe: str | None = None
    module: str | None = None
    positions: str | None = None
    filler: str
    answer: AnswerMode
    choices: Count | None = None
    seed: Count
    examples: Count
    length: Count
    depth: Share


@dataclass(frozen=True, kw_only=True)
class PasskeyResult(PasskeyKey, Result):
    """One cell of the heat map.

    Attributes:
        right: number of examples whose key the model returns.
        accuracy: right / examples.
        hits: one bit for each example, as packed by :func:`~fairseq_rpe.evaluation.example_scores.pack_hits`.
        train_length: training length of the model in tokens, 0 if it is not known.
        seconds: duration of the measurement.
    """

    key_type = PasskeyKey
    right: Natural
    accuracy: Share
    hits: str
    train_length: Natural
    seconds: float | None = None

    def fault(self) -> str | None:
        """Return the contradiction in these values as the end of a sentence, or None if there is none.

        :mod:`fairseq_rpe.utils.records` calls it when it reads a record.
        """
        try:
            right = int(unpack_hits(self.hits, self.examples).sum())
        except ValueError:
            return f"has hits that are not {self.examples} bits"
        return None if right == self.right else f"has hits that do not count {self.right} right examples"


def load_prompts(request: PasskeyRequest) -> tuple[TextGenerator, PasskeyPrompts]:
    """Load the checkpoint's settings and its tokenizer, and check all lengths, without building the model.

    Raises:
        UserError: the checkpoint is no model of text or has no tokenizer, or a length does not fit.
    """
    generator = TextGenerator.load(from_attributes(GenerationRequest, request, data=None, out=None))
    if generator.kind != "text":
        raise UserError(f"{request.checkpoint} is no model of text: use eval-task or eval-questions")
    prompts = make_prompts(generator.codec.encode, request.filler, request.lengths)
    trained = generator.checkpoint
    transform = request.positions_eval or trained.model.get("positions_eval")
    limits = position_limits(
        request.rpe or trained.encoding, str(transform) if transform else None, trained.train_length() or 0
    )
    reason, limit = min(limits.items(), key=lambda item: item[1], default=("", math.inf))
    for length in request.lengths:
        if length > limit:
            raise UserError(f"length {length} does not fit, because {reason}: give shorter --lengths")
    return generator, prompts


def make_prompts(encode: Callable[[str], Sequence[int]], filler: Path | None, lengths: Sequence[int]) -> PasskeyPrompts:
    """Return the prompts for a tokenizer.

    Args:
        encode: returns the token ids of a text.
        filler: text file whose sentences are the filler; None: the sentences of the paper.
        lengths: tokens of prompt and answer together.

    Raises:
        UserError: the filler cannot be read, the tokenizer lacks digits, or a length is too short for the question.
    """
    prompts = PasskeyPrompts(encode, FILLER if filler is None else read_sentences(filler), filler is not None)
    if min(lengths) < prompts.min_length:
        raise UserError(
            f"length {min(lengths)} is too short for the question: give at least {prompts.min_length} to --lengths"
        )
    return prompts


def measure_passkeys(request: PasskeyRequest, out: Path, bar: Progress) -> Iterator[PasskeyResult]:
    """Yield the cells of the heat map, by length and then by depth; each is stored as soon as it is measured.

    Args:
        request: model, lengths and depths.
        out: JSON-lines file of results; cells in it are not measured again.
        bar: shows the number of examples.

    Raises:
        UserError: as :func:`load_prompts`; or the model cannot decode token by token; or ``out`` cannot be written.
    """
    generator, prompts = load_prompts(request)
    shared: dict[str, Any] = {
        "checkpoint": sha256_of_files(request.checkpoint),
        "rpe": request.rpe,
        "module": request.module,
        "positions": request.positions_eval,
        "filler": hashlib.sha256("\n".join(prompts.sentences).encode()).hexdigest(),
        "answer": request.answer,
        "choices": request.choices if request.answer == "likelihood" else None,
        "seed": request.seed,
        "examples": request.examples,
    }
    keys = [PasskeyKey(**shared, length=n, depth=depth) for n in request.lengths for depth in request.depth_values()]

    def make_evaluator(_: object) -> Callable[[PasskeyKey], PasskeyResult]:
        model = generator.load_model()
        return lambda key: _measure(model, generator, prompts, key, bar)

    for result in resume_results(PasskeyResult, out, keys, make_evaluator):
        yield result
        bar.update_to(request.examples * (keys.index(result.key) + 1))


def _measure(
    model: Any, generator: TextGenerator, prompts: PasskeyPrompts, key: PasskeyKey, bar: Progress
) -> PasskeyResult:
    """Return one cell."""
    start = time.monotonic()
    rows = max(1, BATCH_TOKENS // key.length)
    hits: list[bool] = []
    for first in range(0, key.examples, rows):
        numbers = range(first, min(first + rows, key.examples))
        batch = [prompts.example(key.length, key.depth, n, key.choices or 1, key.seed) for n in numbers]
        hits += _chosen(model, batch, key.length) if key.choices else _generated(model, batch, generator.codec)
        bar.update(len(batch))
    right = sum(hits)
    return from_attributes(
        PasskeyResult,
        key,
        encoding=generator.checkpoint.encoding,
        right=right,
        accuracy=right / key.examples,
        hits=pack_hits(np.array(hits)),
        train_length=generator.checkpoint.train_length() or 0,
        seconds=round(time.monotonic() - start, 3),
    )


def _generated(model: Any, batch: Sequence[PasskeyExample], codec: TextCodec) -> list[bool]:
    """Return whether the text that the model generates greedily is the key, but for white space around it."""
    steps = len(batch[0].answers[0])
    ids = [example.prompt for example in batch]
    device = next(model.parameters()).device
    with fixed_positions(model, ids, [len(prompt) + steps for prompt in ids]):
        answers = greedy_steps(model, torch.tensor(ids, device=device), steps).tolist()
    hits = []
    for example, tokens in zip(batch, answers, strict=True):
        decoder = codec.decoder(example.prompt)
        text = b"".join(map(decoder.add, tokens)) + decoder.finish()
        hits.append(text.decode(errors="replace").strip() == example.keys[0])
    return hits


def _chosen(model: Any, batch: Sequence[PasskeyExample], length: int) -> list[bool]:
    """Return whether the right key is more likely than each other one."""
    scores = score_choices(model, [e.prompt for e in batch], [e.answers for e in batch], length, ends=False)
    return [values[0] > max(values[1:]) for values in scores]
