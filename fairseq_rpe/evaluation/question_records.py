"""Measurement records of question answering: requests, keys and results, with scores by evidence distance."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.evaluation.records import EvalOverrides, Result, default_draws
from fairseq_rpe.questions import dataset, metrics, prompt
from fairseq_rpe.questions.metrics import AnsweredQuestion, is_streamable
from fairseq_rpe.questions.prompt import Truncate
from fairseq_rpe.utils import files
from fairseq_rpe.utils.records import Count, Natural, TextTuple, from_attributes

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
        infos = folder.sets
        if len(set(self.sets or ())) < len(self.sets or ()):
            raise UserError(f"--sets {','.join(self.sets or ())} names a set twice: leave one out")
        for name in self.sets or ():
            if name not in infos:
                raise UserError(f"--sets {name}: {self.data} has {', '.join(infos)}{did_you_mean(name, infos)}")
        sets = tuple(self.sets or infos)
        for name in sets:
            info = infos[name]
            if self.split not in info.splits:
                raise UserError(
                    f"--split {self.split}: {name} has no answers in this split: use {', '.join(info.splits)}"
                )
            metrics.check_metrics(*info.metrics, info.published)
        if self.answer_mode == "likelihood" and self.beam > 1:
            raise UserError("--beam needs --answer-mode generation: drop it, because likelihood compares all choices")
        if self.length_penalty is not None and self.beam == 1:
            raise UserError("--length-penalty needs a beam: use --beam K above 1, or drop it")
        if self.length_penalty is not None and not 0 <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise UserError(
                f"--length-penalty {self.length_penalty:g} is out of range: use 0 to {MAX_LENGTH_PENALTY:g}"
            )
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
    order = [(distance, index) for index, distance in enumerate(distances) if distance is not None]
    if len(order) < max(len(items), NUM_BANDS) or not is_streamable(metric):
        return ()
    order.sort()
    sizes = [len(order) * number // NUM_BANDS for number in range(NUM_BANDS + 1)]
    # a band ends after the last question at the same distance as the question where an eighth ends
    edges = sorted({bisect_right(order, order[size - 1][0], key=itemgetter(0)) if size else 0 for size in sizes})
    bands = []
    for start, end in pairwise(edges):
        band = order[start:end]
        score = metrics.score(metric, [items[index] for _, index in band])
        bands.append(DistanceBand(band[0][0], band[-1][0], len(band), score))
    return tuple(bands)
