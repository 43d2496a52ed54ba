"""Question answering: answer prepared questions by generation or likelihood, at several context lengths, and score."""

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_rpe.checkpoints.checkpoint import check_vocabulary
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import read_dictionary
from fairseq_rpe.decoder.beam_search import beam_search
from fairseq_rpe.decoder.generation import check_length_independent, fixed_positions, greedy_search, score_choices
from fairseq_rpe.evaluation.example_scores import pack_scores
from fairseq_rpe.evaluation.loading import check_language_model, load_model
from fairseq_rpe.evaluation.question_records import (
    QuestionKey,
    QuestionRequest,
    QuestionResult,
    predictions_path,
    prompt_budget,
    score_by_distance,
    unique_name,
)
from fairseq_rpe.evaluation.records import read_results, resume_results
from fairseq_rpe.evaluation.task_model import explicit_ratio
from fairseq_rpe.questions import dataset, metrics
from fairseq_rpe.questions.dataset import QuestionRow, QuestionRows, SetInfo
from fairseq_rpe.questions.metrics import AnsweredQuestion
from fairseq_rpe.questions.prompt import build_prompt, check_token_budget
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.utils import files, json_files, output_checks, records
from fairseq_rpe.utils.progress import Progress

# Limits of a batch; a single question may exceed them.
_MAX_PAIRS = 1 << 23  # query-key pairs of the prompts, for the memory of attention
_MAX_TOKENS = 1 << 15  # tokens of all rows, for the memory of the KV cache
_MAX_ROWS = 256  # rows of the model: one for each choice or hypothesis of a question


@dataclass(frozen=True)
class _PlannedQuestion:
    """A question and the length of its prompt.

    Attributes:
        row: the question.
        prompt_tokens: tokens of the prompt, after truncation.
        lost_tokens: tokens that truncation removes.
    """

    row: QuestionRow
    prompt_tokens: int
    lost_tokens: int


@dataclass(frozen=True)
class _Batch:
    """Questions that are answered together, the one with the longest prompt first."""

    questions: list[_PlannedQuestion]

    @property
    def ids(self) -> list[str]:
        """Ids of the questions."""
        return [question.row.id for question in self.questions]


@dataclass(frozen=True)
class _BatchAnswers:
    """One line of the file of an unfinished measurement.

    Attributes:
        answers: answer by question id, for the questions of one batch.
        seconds: duration of answering the batch.
    """

    answers: Mapping[str, str]
    seconds: float


def answer_questions(request: QuestionRequest, bar: Progress) -> Iterator[QuestionResult]:
    """Yield the results of a request, in order, and measure only those that ``out`` does not have yet.

    Answers of an unfinished result are stored next to ``out`` and reused by a rerun.

    Args:
        request: checkpoint, questions, context lengths and way of answering.
        bar: progress bar; counts questions.

    Yields:
        A result, as soon as it is stored.

    Raises:
        UserError: :meth:`QuestionRequest.keys` or :func:`make_evaluator` refuses the request.
    """
    keys = request.keys()
    _check_predictions(request, keys)
    previous: QuestionKey | None = None
    # resume_results raises after it has yielded a result that it could not store. So the stored answers of a
    # measurement are removed only when the loop goes on: its result is then certainly in `out`.
    for result in resume_results(QuestionResult, request.out, keys, partial(make_evaluator, request, bar)):
        _remove_partial(request, previous)
        previous = result.key
        yield result
    _remove_partial(request, previous)


def _check_predictions(request: QuestionRequest, keys: Sequence[QuestionKey]) -> None:
    """Check that --predictions can be written and has the answers of each result that --out has already."""
    if request.predictions is not None:
        names = [_predictions_path(request, key).name for key in keys]
        output_checks.check_output_folder(request.predictions, names, "--predictions")
        finished = {result.key for result in (read_results(QuestionResult, request.out) if request.out else [])}
        for key in keys:
            if key in finished and not _predictions_path(request, key).is_file():
                raise UserError(
                    f"--out {request.out} has the result of {key.set} at {key.length} tokens, but --predictions "
                    "does not have its answers: use another --out, or leave --predictions out"
                )


def make_evaluator(
    request: QuestionRequest, bar: Progress, keys: Sequence[QuestionKey]
) -> Callable[[QuestionKey], QuestionResult]:
    """Check all questions, load the model and return the function that measures one key.

    Args:
        request: checkpoint, questions, context lengths and way of answering.
        bar: progress bar; counts questions.
        keys: the keys that will be evaluated.

    Returns:
        Function from a key to its result.

    Raises:
        UserError: a question without its document is longer than the context, choices are missing, or the checkpoint
            cannot be used: it is damaged, has another dictionary, or its encoding depends on the text length.
    """
    checkpoint = checkpoints.load(request.checkpoint)
    check_language_model(checkpoint)
    folder = dataset.load_dataset(request.data)
    check_vocabulary(checkpoint, read_dictionary(request.data / "dict.txt"), request.data)
    rows = folder.split(request.split)
    rows_by_set: dict[str, list[QuestionRow]] = {key.set: [] for key in keys}
    for row in rows:
        if row.set in rows_by_set:
            rows_by_set[row.set].append(row)
    batches = {key: _plan_batches(key, rows, folder.sets[key.set], rows_by_set[key.set]) for key in keys}
    model, _ = load_model(request.checkpoint, request, request.data, request.log)
    check_length_independent(model)
    for key in keys:
        # A prompt of one token: entering the context raises UserError if a length has no positions.
        with fixed_positions(model, [[0]], [key.length]):
            pass
    bar.start_timing(sum(len(batch.questions) for batches_of_key in batches.values() for batch in batches_of_key))
    return _Evaluator(
        request=request,
        checkpoint=checkpoint,
        model=model,
        sets=folder.sets,
        rows=rows,
        rows_by_set=rows_by_set,
        batches=batches,
        bar=bar,
    )


@dataclass(frozen=True)
class _Evaluator:
    """Answers the questions of a key and scores the answers.

    Attributes:
        request: checkpoint, questions, context lengths and way of answering.
        checkpoint: the checkpoint, without its model.
        model: the loaded model.
        sets: sets of questions by name.
        rows: questions of the split.
        rows_by_set: the questions of each set, in the order of the split.
        batches: batches of each key.
        bar: progress bar; counts questions.
    """

    request: QuestionRequest
    checkpoint: RpeCheckpoint
    model: Any
    sets: Mapping[str, SetInfo]
    rows: QuestionRows
    rows_by_set: Mapping[str, list[QuestionRow]]
    batches: Mapping[QuestionKey, list[_Batch]]
    bar: Progress

    def __call__(self, key: QuestionKey) -> QuestionResult:
        """Measure one key."""
        info, rows = self.sets[key.set], self.rows_by_set[key.set]
        questions = [question for batch in self.batches[key] for question in batch.questions]
        answers, seconds = self._answer_all(key)
        predictions = {row.id: answers[row.id] for row in rows}
        count = info.splits[key.split].questions
        if not len(predictions) == len(questions) == count:
            raise UserError(
                f"{key.set}: {len(predictions)} of {count} questions were answered: the result is not stored, "
                "prepare the questions again"
            )
        if self.request.predictions is not None:
            json_files.write_json(_predictions_path(self.request, key), predictions)
        items = [self.rows.with_prediction(row, predictions[row.id]) for row in rows]
        values, undefined = _compute_metrics(info, items)
        question_scores = metrics.question_scores(info.published, items)
        return QuestionResult(
            **vars(key),
            encoding=self.checkpoint.encoding,
            suite=info.suite,
            questions=count,
            metrics=values,
            published=info.published,
            score=values[info.published],
            truncated_documents=sum(question.lost_tokens > 0 for question in questions),
            lost_tokens=sum(question.lost_tokens for question in questions),
            empty=sum(not text.strip() for text in predictions.values()),
            undefined=undefined,
            transform=self._position_transform(key),
            distances=score_by_distance(info.published, items, [row.distance for row in rows]),
            seconds=round(seconds, 3),
            question_scores=None if question_scores is None else pack_scores(question_scores),
        )

    def _answer_all(self, key: QuestionKey) -> tuple[dict[str, str], float]:
        """Return the answers by question id, and the seconds of answering; stored answers are reused."""
        path = _partial_path(self.request, key)
        stored = _read_partial(path)
        answers: dict[str, str] = {}
        for batch_answers in stored:
            answers.update(batch_answers.answers)
        for batch in self.batches[key]:
            if not all(id in answers for id in batch.ids):
                start = time.monotonic()
                texts = _answer_batch(self.model, key, self.rows, self.sets[key.set], batch, self.bar.refresh)
                by_id = dict(zip(batch.ids, texts, strict=True))
                stored.append(_BatchAnswers(by_id, round(time.monotonic() - start, 3)))
                answers.update(by_id)
                _append_partial(path, stored[-1])
            self.bar.update(len(batch.ids))
        return answers, sum(batch_answers.seconds for batch_answers in stored)

    def _position_transform(self, key: QuestionKey) -> str:
        """Return the spec of the position transform that is used at the length of a key."""
        default = self.model.decoder.position_transforms.train.evaluation
        spec = str(self.request.positions_eval or self.checkpoint.model.get("positions_eval") or default)
        return explicit_ratio(spec, self.checkpoint.train_length() or key.length, key.length)


def _plan_batches(
    key: QuestionKey, rows: QuestionRows, info: SetInfo, questions: Sequence[QuestionRow]
) -> list[_Batch]:
    """Batch a set's questions, the longest first, so that a batch that exceeds the memory fails at once."""
    planned = []
    for row in questions:
        if key.answer_mode == "likelihood" and not row.choices:
            raise UserError(f"question '{row.id}' of {key.set} has no choices to compare: use --answer-mode generation")
        fixed, document = rows.lengths(row)  # tokens of prompt and cue, and of the document
        available = check_token_budget(fixed, prompt_budget(key, rows, info, row), row.id)
        lost = max(0, document - available)
        planned.append(_PlannedQuestion(row, fixed + document - lost, lost))
    planned.sort(key=lambda question: -question.prompt_tokens)  # stable: equal lengths keep the order of the split
    return _fill_batches(key, info, planned)


def _fill_batches(key: QuestionKey, info: SetInfo, questions: Sequence[_PlannedQuestion]) -> list[_Batch]:
    """Return batches within the limits; ``questions`` are sorted by the length of the prompt, longest first."""
    batches: list[_Batch] = []
    model_rows = 0  # of the last batch: one for each choice or hypothesis
    for question in questions:
        added_rows = len(question.row.choices) if key.answer_mode == "likelihood" else key.beam
        if batches and _fits(batches[-1], model_rows + added_rows, info.answer_tokens):
            batches[-1].questions.append(question)
            model_rows += added_rows
        else:
            batches.append(_Batch([question]))
            model_rows = added_rows
    return batches


def _fits(batch: _Batch, model_rows: int, answer_tokens: int) -> bool:
    """Return whether a batch with one more question, and so many rows of the model, is within the limits."""
    longest = batch.questions[0].prompt_tokens
    num_prompts = len(batch.questions) + 1
    return (
        model_rows <= _MAX_ROWS
        and model_rows * (longest + answer_tokens) <= _MAX_TOKENS
        and num_prompts * longest**2 <= _MAX_PAIRS
    )


def _answer_batch(
    model: Any, key: QuestionKey, rows: QuestionRows, info: SetInfo, batch: _Batch, on_step: Callable[[], object]
) -> list[str]:
    """Return the model's answers to a batch of questions; calls ``on_step`` after each decoding step."""
    questions = [question.row for question in batch.questions]
    prompts = []
    for row in questions:
        prompt, _ = build_prompt(*rows.parts(row), prompt_budget(key, rows, info, row), key.truncate, row.id)
        prompts.append(prompt.tolist())
    if key.answer_mode == "likelihood":
        choices = [[rows.tokens(choice).tolist() for choice in row.choices] for row in questions]
        scores = score_choices(model, prompts, choices, key.length)
        best = [values.index(max(values)) for values in scores]
        return [rows.text(row.choices[index]).strip() for row, index in zip(questions, best, strict=True)]
    if key.beam == 1:
        generations = greedy_search(model, prompts, info.answer_tokens, key.length, on_step)
    else:
        penalty = 1.0 if key.length_penalty is None else key.length_penalty
        beams = beam_search(model, prompts, info.answer_tokens, key.beam, penalty, key.length, on_step)
        generations = [hypotheses[0].tokens if hypotheses else [] for hypotheses in beams]
    return [rows.decode(tokens).strip() for tokens in generations]


def _compute_metrics(info: SetInfo, items: Sequence[AnsweredQuestion]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the values of all metrics of a set, and the names of undefined metrics."""
    values, undefined = dict[str, float](), list[str]()
    for metric in dict.fromkeys((*info.metrics, info.published)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", metrics.Undefined)
            values[metric] = metrics.score(metric, items)
        undefined += [metric] * any(issubclass(warning.category, metrics.Undefined) for warning in caught)
    return values, tuple(undefined)


def _predictions_path(request: QuestionRequest, key: QuestionKey) -> Path:
    assert request.predictions is not None
    return predictions_path(request.predictions, key)


def _partial_path(request: QuestionRequest, key: QuestionKey) -> Path | None:
    """Return the file for the answers of an unfinished measurement; None without ``out``."""
    if request.out is None:
        return None
    return request.out.with_name(f"{request.out.name}.{unique_name(key)}.partial")


def _read_partial(path: Path | None) -> list[_BatchAnswers]:
    """Read stored answers, and remove a last line that an interrupted run left incomplete."""
    if path is None or not path.exists():
        return []
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    return records.read_records(_BatchAnswers, path, "the answers")


def _append_partial(path: Path | None, batch: _BatchAnswers) -> None:
    """Append the answers of a batch, and write them to disk before the next batch begins."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.add_path_to_errors(path), open(path, "ab") as file:
        file.write(json.dumps(records.to_dict(batch)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _remove_partial(request: QuestionRequest, key: QuestionKey | None) -> None:
    """Remove the stored answers of a finished measurement, if there are any."""
    path = None if key is None else _partial_path(request, key)
    if path is not None:
        path.unlink(missing_ok=True)
