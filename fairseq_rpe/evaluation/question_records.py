"""Measurement records of question answering: requests, keys and results, with scores by evidence distance."""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.evaluation.example_scores import unpack_scores
from fairseq_rpe.evaluation.records import EvalOverrides, Result, default_draws
from fairseq_rpe.questions import dataset, metrics, prompt
from fairseq_rpe.questions.dataset import QuestionRow, QuestionRows, SetInfo
from fairseq_rpe.questions.metrics import AnsweredQuestion, is_streamable
from fairseq_rpe.questions.prompt import Truncate
from fairseq_rpe.utils import files
from fairseq_rpe.utils.records import Count, Natural, TextTuple, from_attributes, to_dict

# The score of a hypothesis is divided by (answer tokens) ** penalty, which must stay finite.
MAX_LENGTH_PENALTY = 10.0
AnswerMode = Literal["generation", "likelihood"]
NUM_BANDS = 8  # distance bands, of about as many questions each


@dataclass(frozen=True, kw_only=True)
class QuestionKey:
    """Key of one score on a set of questions.

    Attributes:
        checkpoint: digest of the checkpoint.
        data: digest of the dataset.
        set: name of the set of questions.
        split: name of the scored split.
        answer_mode: generation, or likelihood for the likeliest of the choices.
        beam: beam width; 1 is greedy search.
        length_penalty: exponent of the length normalisation; None without a beam.
        truncate: side at which a document that is too long is truncated.
        rpe: encoding in place of the checkpoint's.
        module: digest of the file of ``--rpe-module``, which may define the encoding.
        positions: position transform in place of the checkpoint's.
        compute_dtype: dtype in place of the checkpoint's.
        draws: samples of random positions for each question.
        length: context length in tokens, of prompt and answer together. Interpolation with an automatic ratio has one
            ratio for each context length: training length / ``length``.
    """

    checkpoint: str
    data: str
    set: str
    split: str
    answer_mode: AnswerMode = "generation"
    beam: Count = 1
    length_penalty: float | None = None
    truncate: Truncate = "end"
    rpe: str | None = None
    module: str | None = None
    positions: str | None = None
    compute_dtype: str | None = None
    draws: Count | None = None
    length: Count


@dataclass(frozen=True, kw_only=True)
class QuestionRequest(EvalOverrides):
    """Scores of a checkpoint on question sets, by context length: the options of ``fairseq-rpe eval-questions``.

    Attributes:
        checkpoint: checkpoint file.
        data: folder of a prepared question dataset.
        lengths: context lengths in tokens.
        sets: names of sets; None: all of the dataset.
        split: name of the split to score.
        answer_mode: generation or likelihood.
        beam: beam width.
        length_penalty: exponent of the length normalisation; None: 1 with a beam.
        truncate: side at which a document that is too long is truncated.
        out: JSON-lines file of the results; answers of an unfinished measurement are stored next to it.
        predictions: folder for the answers themselves.
        log: log file, named in error messages.
    """

    checkpoint: Path
    data: Path
    lengths: Sequence[int]
    sets: Sequence[str] | None = None
    split: str = "valid"
    answer_mode: AnswerMode = "generation"
    beam: int = 1
    length_penalty: float | None = None
    truncate: Truncate = "end"
    out: Path | None = None
    predictions: Path | None = None
    log: Path | None = None

    def keys(self) -> list[QuestionKey]:
        """Return one key for each set and context length.

        Raises:
            UserError: the checkpoint cannot be used, or :meth:`keys_for_digest` refuses the request.
        """
        checkpoint_file.check_file(self.checkpoint)
        return self.keys_for_digest(files.sha256_of_files(self.checkpoint))

    def keys_for_digest(self, checkpoint: str) -> list[QuestionKey]:
        """Return one key for each set and context length, for a checkpoint with this digest.

        Raises:
            UserError: the data, a set or a length cannot be used, a question does not fit or has no choices to
                compare, or answers cannot be scored.
        """
        folder = dataset.load_dataset(self.data)
        sets = self._check_sets(folder)
        self._check_answer_mode()
        prompt.check_lengths(folder, self.split, self.lengths, sets, compare_choices=self.answer_mode == "likelihood")
        shared: dict[str, Any] = {
            "checkpoint": checkpoint,
            "data": dataset.dataset_digest(self.data),
            "positions": self.positions_eval,
            "length_penalty": 1.0 if self.beam > 1 and self.length_penalty is None else self.length_penalty,
            "draws": default_draws(self.positions_eval),
        }
        return [
            from_attributes(QuestionKey, self, **shared, set=name, length=length)
            for name in sets
            for length in self.lengths
        ]

    def _check_sets(self, folder: dataset.QuestionDataset) -> tuple[str, ...]:
        """Return the names of the sets, after checking that each can be answered and scored."""
        infos, requested = folder.sets, tuple(self.sets or ())
        if len(set(requested)) < len(requested):
            raise UserError(f"--sets {','.join(requested)} names a set twice: leave one out")
        for name in requested:
            if name not in infos:
                raise UserError(f"--sets {name}: {self.data} has {', '.join(infos)}{did_you_mean(name, infos)}")
        sets = requested or tuple(infos)
        for name in sets:
            info = infos[name]
            if self.split not in info.splits:
                raise UserError(
                    f"--split {self.split}: {name} has no answers in this split: use {', '.join(info.splits)}"
                )
            metrics.check_metrics(*info.metrics, info.published)
        return sets

    def _check_answer_mode(self) -> None:
        if self.answer_mode == "likelihood" and self.beam > 1:
            raise UserError("--beam needs --answer-mode generation: drop it, because likelihood compares all choices")
        if self.length_penalty is not None and self.beam == 1:
            raise UserError("--length-penalty needs a beam: use --beam K above 1, or drop it")
        if self.length_penalty is not None and not 0 <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise UserError(
                f"--length-penalty {self.length_penalty:g} is out of range: use 0 to {MAX_LENGTH_PENALTY:g}"
            )


@dataclass(frozen=True)
class DistanceBand:
    """Score of the questions whose answer is ``least`` to ``most`` words before the end of its document.

    Attributes:
        least: smallest distance in words.
        most: largest distance in words.
        questions: number of questions.
        score: score in percent.
    """

    least: Natural
    most: Natural
    questions: Count
    score: float


@dataclass(frozen=True, kw_only=True)
class QuestionResult(QuestionKey, Result):
    """Scores of the answers to all questions of a set.

    Attributes:
        suite: benchmark that the set belongs to.
        questions: number of questions.
        metrics: value of each metric in percent.
        published: the metric that publications report.
        score: value of that metric in percent.
        truncated_documents: number of questions whose document was truncated.
        lost_tokens: number of tokens that truncation removed.
        empty: number of answers that are only white space.
        undefined: metrics that are undefined for these answers and recorded as 0.
        transform: spec of the position transform that was used.
        distances: score by distance between the answer and the end of the document, if the dataset records it.
        seconds: duration of answering, without loading.
        question_scores: score of each question in the order of the split, as packed by
            :func:`~fairseq_rpe.evaluation.example_scores.pack_scores`; None if the published metric is not a mean
            over questions. :meth:`scores_by_question` unpacks it.
    """

    key_type = QuestionKey
    suite: str
    questions: Count
    metrics: Mapping[str, float] = field(hash=False)
    published: str
    score: float
    truncated_documents: Natural
    lost_tokens: Natural
    empty: Natural
    undefined: TextTuple = ()
    transform: str
    distances: tuple[DistanceBand, ...] = ()
    seconds: float | None = None
    question_scores: str | None = None

    def scores_by_question(self) -> np.ndarray | None:
        """Return (questions,) float64 in percent: the published metric of each question; None if not recorded."""
        return None if self.question_scores is None else unpack_scores(self.question_scores, self.questions)

    def fault(self) -> str | None:
        """Return the contradiction in these values as the end of a sentence, or None if there is none.

        :mod:`fairseq_rpe.utils.records` calls it when it reads a record.
        """
        try:
            self.scores_by_question()
        except ValueError:
            return f"has question_scores that are not {self.questions} scores"
        return None


def prompt_budget(key: QuestionKey, rows: QuestionRows, info: SetInfo, row: QuestionRow) -> int:
    """Return the tokens of the context that a prompt may have; the answer or the longest choice takes the others.

    Args:
        key: length and way of answering.
        rows: questions of the split.
        info: the set of the question.
        row: the question.
    """
    answer_tokens = info.answer_tokens
    if key.answer_mode == "likelihood":
        # 1 + for the end of the answer, which is scored with each choice
        answer_tokens = max(answer_tokens, 1 + max(int(rows.sizes[choice]) for choice in row.choices))
    return key.length - answer_tokens


def unique_name(key: QuestionKey) -> str:
    """Return a file name, without its suffix, that belongs to one key only."""
    digest = hashlib.sha256(json.dumps(to_dict(key), sort_keys=True).encode()).hexdigest()[:12]
    readable = re.sub(r"[^\w.-]", "_", key.set)
    return f"{readable}-{key.length}-{digest}"


def predictions_path(folder: Path, key: QuestionKey) -> Path:
    """Return the file in the folder of ``--predictions`` that has the answers of a key by question id."""
    return folder / f"{unique_name(key)}.json"


def score_by_distance(
    metric: str, items: Sequence[AnsweredQuestion], distances: Sequence[int | None]
) -> tuple[DistanceBand, ...]:
    """Score questions in ``NUM_BANDS`` bands of about equal size, nearest answers first.

    Questions at equal distances are in one band.

    Args:
        metric: name of a metric.
        items: answers with their references.
        distances: words between each answer and the end of its document; None: unknown.

    Returns:
        The bands; empty if a distance is unknown, there are too few questions or the metric is not a mean over them.
    """
    # by distance; equal distances in the order of the questions
    answered = sorted(
        ((distance, item) for distance, item in zip(distances, items, strict=True) if distance is not None),
        key=itemgetter(0),
    )
    if len(answered) < max(len(items), NUM_BANDS) or not is_streamable(metric):
        return ()
    sorted_distances = [distance for distance, _ in answered]
    edges = {0}
    for band in range(1, NUM_BANDS + 1):
        # a band ends after the last question at the same distance as the question where an eighth ends
        last_of_eighth = len(answered) * band // NUM_BANDS - 1
        edges.add(bisect_right(sorted_distances, sorted_distances[last_of_eighth]))
    bands = []
    for start, end in pairwise(sorted(edges)):
        score = metrics.score(metric, [item for _, item in answered[start:end]])
        bands.append(DistanceBand(sorted_distances[start], sorted_distances[end - 1], end - start, score))
    return tuple(bands)
