"""Chapter with single examples: what was asked, the right answer, the predicted answer, and where the needle was."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_rpe.algorithms import Algorithm, Example, build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation.predictions import END, Predictions, read_predictions
from fairseq_rpe.evaluation.question_records import QuestionResult, predictions_path, prompt_budget
from fairseq_rpe.evaluation.records import ExactMatchResult
from fairseq_rpe.figures.needle_attention import NeedleMap, draw_needle_attention
from fairseq_rpe.questions import dataset
from fairseq_rpe.questions.dataset import QuestionRow, QuestionRows, SetInfo
from fairseq_rpe.questions.metrics import normalize_whitespace
from fairseq_rpe.questions.prompt import build_prompt
from fairseq_rpe.reports.page import Block, ExampleRow, Examples, Piece, Text, svg_picture
from fairseq_rpe.reports.question_scores import Scores
from fairseq_rpe.reports.sweep_results import Accuracies, SweepResult
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord
from fairseq_rpe.utils.json_files import read_json
from fairseq_rpe.utils.records import from_attributes

MAX_SHOWN = 10  # wrong examples, and right ones, of a method in a range of lengths
_MAX_ROWS = 1200  # of all examples on a page, about half a megabyte
_MAX_MAPS = 8  # models in a figure of the attention to the needle
_EDGE_WORDS, _CONTEXT_WORDS = 12, 8  # words of a shortened text at its ends, and around its needle
_SHORTEST_GAP = 4  # a gap of fewer words is shown
_RIGHT_SCORE = 50.0  # percent from which the answer to a question is listed as right


def shorten(words: Sequence[str], spans: Sequence[tuple[int, int]] = (), mark: str = "needle") -> list[Piece]:
    """Shorten a text to its ends and the surroundings of its marked words.

    Args:
        words: words of the text.
        spans: index of the first word of each run of marked words, and the index after its last; ascending.
        mark: ``needle`` or ``wrong``.

    Returns:
        The pieces of the text; each gap names the number of words that are left out.
    """
    if not words:
        return []
    shown, marked = np.zeros(len(words), bool), np.zeros(len(words), bool)
    shown[:_EDGE_WORDS] = shown[-_EDGE_WORDS:] = True
    for start, end in spans:
        marked[start:end] = True
        shown[max(0, start - _CONTEXT_WORDS) : end + _CONTEXT_WORDS] = True
    kinds = np.where(marked, 2, np.where(shown, 1, 0))
    borders = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(words)]
    pieces: list[Piece] = []
    for start, end in pairwise(borders):
        text = " ".join(words[start:end])
        if kinds[start] == 2:
            pieces.append(Piece(text, "wrong" if mark == "wrong" else "needle"))
        elif kinds[start] == 1 or end - start < _SHORTEST_GAP:
            pieces.append(Piece(text))
        else:
            pieces.append(Piece(f"[… {end - start:,} left out …]", "omitted"))
    return pieces


def spread(groups: Sequence[Sequence[Any]], count: int) -> list[Any]:
    """Choose up to ``count`` members from groups, evenly spread over the groups.

    Args:
        groups: the groups, in the order over which the choice is spread.
        count: largest number of members.

    Returns:
        Members in the order of the groups: of more than ``count`` groups the first member of evenly spaced groups,
        otherwise the first members of each group, as many of each as there are.

    >>> spread([[1, 2], [3], [], [4, 5, 6]], 5)
    [1, 2, 3, 4, 5]
    """
    groups = [group for group in groups if group]
    if len(groups) > count:
        return [groups[k][0] for k in np.linspace(0, len(groups) - 1, count).round().astype(int)]
    rounds = max(map(len, groups), default=0)
    order = [
        (turn_index, k) for turn_index in range(rounds) for k, group in enumerate(groups) if turn_index < len(group)
    ]
    return [groups[k][i] for k, i in sorted((k, i) for i, k in order[:count])]


@dataclass(frozen=True)
class _MethodResults:
    """The measurements of one method on one task whose predictions are stored, of the first such seed.

    Attributes:
        task: the task.
        method: name of the method.
        seed: seed of the run.
        results: measurements with their predictions.
    """

    task: str
    method: str
    seed: int
    results: Sequence[tuple[ExactMatchResult, Predictions]]


def task_blocks(folder: SweepFolder, record: SweepRecord, accuracies: Accuracies) -> list[Block]:
    """Return the examples of a sweep over generated tasks, and the attention to the needle; empty without predictions.

    Args:
        folder: folder of the sweep.
        record: its record.
        accuracies: results.
    """
    methods = [
        results
        for task in accuracies.tasks
        for method in accuracies.methods(task)
        if (results := _stored_results(folder, record, accuracies.results_for(task, method))) is not None
    ]
    if not methods:
        return []
    limit = _shown_limit(2 * len(methods))
    blocks: list[Block] = [Text(_about(limit, "examples, spread over depths and lengths"))]
    examples = _TaskExamples(record.settings.split or "test")
    for results in methods:
        trained = accuracies.train_items[results.task]
        for name, is_inside in (("lengths of training", True), ("beyond training", False)):
            inside = [pair for pair in results.results if (pair[0].length <= trained) == is_inside]
            if inside:
                blocks.append(_task_table(f"{results.task}, {results.method}, {name}", inside, examples, limit))
    return [*blocks, *_needle_pictures(methods)]


def _about(limit: int, what: str) -> str:
    return (
        f"For each method and range of lengths, up to {limit} wrong and {limit} right {what}, of the first seed. The "
        "prompts mark the words that state the answer, and the predictions mark the first wrong word. […] counts the "
        "words that are left out here; the models read them."
    )


def _shown_limit(tables: int) -> int:
    """Return how many wrong and how many right examples a table shows, so that a page does not become too large."""
    return max(1, min(MAX_SHOWN, _MAX_ROWS // (2 * tables)))


def _stored_results(
    folder: SweepFolder, record: SweepRecord, rows: Sequence[SweepResult[ExactMatchResult]]
) -> _MethodResults | None:
    """Return the results of the first seed that has predictions, with them; None if no seed has any."""
    for seed in dict.fromkeys(row.seed for row in rows):
        first = rows[0]
        run = folder.run_folder(record.method(first.method), seed, first.result.algorithm)
        predictions = read_predictions(run.predictions)
        pairs = [
            (row.result, predictions[row.result.key])
            for row in rows
            if row.seed == seed and row.result.key in predictions and row.result.hits is not None
        ]
        if pairs:
            return _MethodResults(first.result.algorithm, first.method, seed, pairs)
    return None


class _TaskExamples:
    """Generates the examples of tasks again, each once.

    Args:
        split: split of the examples.
    """

    def __init__(self, split: str) -> None:
        self._split = split
        self._by_length: dict[str, dict[int, list[Example]]] = {}
        self._at_depth: dict[tuple[str, int, float], list[Example]] = {}

    def get(self, result: ExactMatchResult, count: int) -> list[Example]:
        """Return at least the first ``count`` examples of a measurement, as far as there are so many."""
        task = build(result.algorithm)
        if result.depth is None:
            if result.algorithm not in self._by_length:
                by_length: dict[int, list[Example]] = {}
                for example in task.examples(self._split):
                    by_length.setdefault(example.length, []).append(example)
                self._by_length[result.algorithm] = by_length
            return self._by_length[result.algorithm].get(result.length, [])
        key = (result.algorithm, result.length, result.depth)
        if len(self._at_depth.get(key, ())) < count:
            generated = task.examples_at_depth(self._split, result.length, result.depth)
            self._at_depth[key] = list(islice(generated, count))
        return self._at_depth[key]


def _task_table(
    title: str, results: Sequence[tuple[ExactMatchResult, Predictions]], examples: _TaskExamples, limit: int
) -> Examples:
    """Return the table of wrong and right examples of a method, each with the number of all such examples."""
    ordered = sorted(results, key=lambda pair: (pair[0].depth or 0, pair[0].length))
    task = build(ordered[0][0].algorithm)
    rows, counts = list[ExampleRow](), dict[bool, int]()
    for is_right in (False, True):
        groups = []
        for result, predictions in ordered:
            hits = result.is_right()
            assert hits is not None
            numbers = np.flatnonzero(hits == is_right)
            counts[is_right] = counts.get(is_right, 0) + len(numbers)
            groups.append([(result, predictions, int(number)) for number in numbers[:limit]])
        for result, predictions, number in spread(groups, limit):
            labels = result.examples // len(predictions.answers)  # 1 unless there are labels inside the prompt
            index, label = divmod(number, labels)
            example = examples.get(result, index + 1)[index]
            rows.append(_task_row(task, example, label, predictions.answers[index], is_right))
    what = "labels" if task.has_labels else "examples"
    unit = task.length_unit
    third = "distance" if task.has_labels else "depth"
    header = [unit, third] if task.has_labels or ordered[-1][0].depth is not None else [unit]
    summary = f"{title}: {counts[False]:,} wrong and {counts[True]:,} right {what}"
    return Examples(summary, header, rows)


def _task_row(task: Algorithm, example: Example, label: int, prediction: str, is_right: bool) -> ExampleRow:
    """Return one example, or one label of an example with labels; ``prediction`` is as in :class:`Predictions`."""
    facts, words = [str(example.length)], prediction.split(" ")
    if task.has_labels:
        index, gap = example.label_indices[label], example.gaps[label]
        facts.append(f"{gap}")
        source = index - gap
        prompt = shorten(example.prompt[: index + 1], [(source, source + 1)])
        right, words = example.answer[label : label + 1], words[label : label + 1]
    else:
        if example.depth is not None:
            facts.append(f"{example.depth:g}")
        prompt, right = shorten(example.prompt, example.needles), example.answer
        words = words[:-1] if words[-1] == END else [*words, "…"]  # an answer that the model did not end
    wrong = next((i for i, word in enumerate(words) if i >= len(right) or word != right[i]), len(words))
    spans = [(wrong, wrong + 1)] if wrong < len(words) else []
    if not is_right and not spans:
        words, spans = [*words, "(ends here)"], [(len(words), len(words) + 1)]
    return ExampleRow(is_right, facts, prompt, shorten(right), shorten(words, spans, "wrong"))


def _needle_pictures(methods: Sequence[_MethodResults]) -> Iterator[Block]:
    """Yield a figure of the attention to the needle for each task with needles, at the longest length."""
    for task in dict.fromkeys(results.task for results in methods):
        maps = []
        for results in methods:
            stored = [(result, p.needle) for result, p in results.results if p.needle is not None]
            if results.task == task and stored:
                result, needle = max(stored, key=lambda pair: pair[0].length)
                title = f"{results.method}, {result.length} tokens"
                maps.append((result, from_attributes(NeedleMap, needle, title=title)))
        if maps:
            yield _needle_picture(task, maps[:_MAX_MAPS], len(maps) - _MAX_MAPS)


def _needle_picture(task: str, maps: Sequence[tuple[ExactMatchResult, NeedleMap]], left_out: int) -> Block:
    figure = draw_needle_attention([needle_map for _, needle_map in maps])
    heads = [
        f"{m.title}: layer {m.layer}, head {m.head + 1}, {100 * m.mass[m.layer][m.head]:.1f} % "
        f"(even attention: {100 * m.even_mass:.1f} %)"
        for _, m in maps
    ]
    depth = maps[0][0].depth or 0
    caption = (
        f"{task}: attention from the words of the answer to the needle at depth {depth:g}, in the first test example. "
        "Left: its share in each head. Right: the attention of the framed head to each token; the needle is shaded."
    )
    caption += f" {left_out} further methods are left out." if left_out > 0 else ""
    return svg_picture(figure, f"Largest attention to the needle of {task}. {'; '.join(heads)}.", caption)


def question_blocks(folder: SweepFolder, record: SweepRecord, scores: Scores) -> list[Block]:
    """Return answered questions of a sweep over questions; empty if the answers are not stored.

    Args:
        folder: folder of the sweep.
        record: its record.
        scores: results.
    """
    stored = _stored_answers(folder, record, scores)
    if not stored:
        return []
    ranges = {(row.folder, row.result.set, row.method, row.result.length > scores.fine_tuning_length) for row in stored}
    limit = _shown_limit(len(ranges))
    blocks: list[Block] = [Text(_about(limit, "answers, spread over the distance of the answer from the end"))]
    for label in dict.fromkeys(row.folder or "" for row in stored):
        try:
            questions = _Questions.load(Path(record.questions[label].data), record.questions[label].digest, record)
        except (UserError, OSError) as error:
            blocks.append(Text(f"{label}: the questions cannot be shown. {error}"))
            continue
        own_rows = [row for row in stored if row.folder == label]
        for set_name, method in dict.fromkeys((row.result.set, row.method) for row in own_rows):
            for name, is_beyond in (("lengths of training", False), ("beyond training", True)):
                results = [
                    row
                    for row in own_rows
                    if (row.result.set, row.method) == (set_name, method)
                    and (row.result.length > scores.fine_tuning_length) == is_beyond
                ]
                if results:
                    title = f"{set_name}, {method}, {name}"
                    blocks.append(_question_table(title, results, stored, questions, limit))
    return blocks


def _stored_answers(
    folder: SweepFolder, record: SweepRecord, scores: Scores
) -> Mapping[SweepResult[QuestionResult], Path]:
    """Return the file of the answers of each result of the first seed, as far as there are such files."""
    stored = {}
    for row in scores.results:
        if row.seed == record.seeds[0]:
            run = folder.run_folder(record.method(row.method), row.seed, row.folder)
            path = predictions_path(run.answers / row.method, row.result.key)
            if path.is_file():
                stored[row] = path
    return stored


@dataclass(frozen=True)
class _Questions:
    """The questions of a prepared folder.

    Attributes:
        rows: questions of the split.
        sets: sets of the folder by name.
    """

    rows: QuestionRows
    sets: Mapping[str, SetInfo]

    @classmethod
    def load(cls, path: Path, digest: str | None, record: SweepRecord) -> "_Questions":
        """Load the questions; raise UserError if they are not those that the sweep evaluated."""
        questions = dataset.load_dataset(path)
        if digest is not None and dataset.dataset_digest(path) != digest:
            raise UserError(f"{path} was changed after the sweep.")
        return cls(questions.split(record.settings.split or "valid"), questions.sets)


def _question_table(
    title: str,
    results: Sequence[SweepResult[QuestionResult]],
    paths: Mapping[SweepResult[QuestionResult], Path],
    questions: _Questions,
    limit: int,
) -> Examples:
    """Return the table of wrong and right answers of a method to the questions of a set."""
    rows = [row for row in questions.rows if row.set == results[0].result.set]
    candidates: dict[bool, list[tuple[float, SweepResult[QuestionResult], QuestionRow, str, float]]]
    candidates = {False: [], True: []}
    for result in results:
        answers = read_json(paths[result])
        for row, score in zip(rows, _question_scores(result.result, rows, answers, questions.rows), strict=True):
            distance = float(row.distance or 0)
            candidates[score >= _RIGHT_SCORE].append((distance, result, row, str(answers[row.id]), score))
    shown = []
    for is_right, members in candidates.items():
        members.sort(key=lambda member: (member[0], member[1].result.length, member[2].id))
        for _, result, row, prediction, score in spread([[member] for member in members], limit):
            shown.append(_question_row(result.result, row, prediction, score, questions, is_right))
    metric = results[0].result.published
    summary = f"{title}: {len(candidates[False]):,} answers with {metric} below {_RIGHT_SCORE:g} and "
    return Examples(f"{summary}{len(candidates[True]):,} others", ["tokens", "words to the end", metric], shown)


def _question_scores(
    result: QuestionResult, rows: Sequence[QuestionRow], answers: Mapping[str, str], texts: QuestionRows
) -> list[float]:
    """Return the score of each question in percent; 100 or 0 for equal answers if the metric is no mean of scores."""
    scores = result.scores_by_question()
    if scores is not None and len(scores) == len(rows):
        return [float(score) for score in scores]
    right = ({normalize_whitespace(texts.text(item)) for item in row.answers} for row in rows)
    return [100.0 * (normalize_whitespace(answers[row.id]) in texts) for row, texts in zip(rows, right, strict=True)]


def _question_row(
    result: QuestionResult, row: QuestionRow, prediction: str, score: float, questions: _Questions, is_right: bool
) -> ExampleRow:
    """Return one question as the model read it, with the last mention of a right answer in its document."""
    rows = questions.rows
    budget = prompt_budget(result.key, rows, questions.sets[result.set], row)
    tokens, _ = build_prompt(*rows.parts(row), budget, result.truncate, row.id)
    words = rows.decode(tokens.tolist()).split()
    answers = [rows.text(item).strip() for item in row.answers]
    cue = len(rows.text(row.cue).split())
    spans = last_mention(words[: len(words) - cue], answers)
    facts = [str(result.length), "" if row.distance is None else str(row.distance), f"{score:.0f}"]
    right = [Piece(" | ".join(dict.fromkeys(answers)))]
    return ExampleRow(is_right, facts, shorten(words, spans), right, [Piece(prediction, "" if is_right else "wrong")])


def last_mention(words: Sequence[str], answers: Sequence[str]) -> list[tuple[int, int]]:
    """Return where any of several answers is mentioned last in a text, as whole words in upper or lower case.

    Args:
        words: words of the text.
        answers: the answers.

    Returns:
        The index of the first word and the index after the last word, in a list; an empty list without a mention.
    """
    text, spans = " ".join(words), list[tuple[int, int]]()
    for answer in answers:
        phrase = r"\s".join(map(re.escape, answer.split()))
        ends = [match.span() for match in re.finditer(rf"(?<!\w){phrase}(?!\w)", text, re.IGNORECASE)] if phrase else []
        spans += ends[-1:]
    if not spans:
        return []
    start, end = max(spans, key=lambda span: (span[1], -span[0]))
    return [(text.count(" ", 0, start), text.count(" ", 0, end) + 1)]
