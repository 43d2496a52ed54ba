"""Paired comparison of two trained models from their results files: is one better, or is no difference shown?"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fairseq_rpe.algorithms import build
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation.question_records import QuestionResult
from fairseq_rpe.evaluation.records import ExactMatchResult, TextResult, last_of_each
from fairseq_rpe.evaluation.statistics import Estimate, holm, smallest_detectable_difference
from fairseq_rpe.reports import uncertainty
from fairseq_rpe.reports.uncertainty import SIGNIFICANCE, ClusteredScores
from fairseq_rpe.runs.run_folder import SWEEP_RECORD, CheckpointFolder, RunFolder
from fairseq_rpe.utils import records
from fairseq_rpe.utils.json_files import DELETE_LINE, read_json_lines

ModelResult = TextResult | ExactMatchResult | QuestionResult
# Settings that an evaluation may replace in a model. Results with other values are those of another model.
_MODEL_SETTINGS = ("checkpoint", "rpe", "positions", "compute_dtype", "attention_prune")
CSV_COLUMNS = (
    *("measurement", "metric", "first", "second", "first_value", "second_value", "difference", "low", "high"),
    *("clusters", "cluster_unit", "p_value", "is_shown", "smallest_difference"),
)


@dataclass(frozen=True)
class RunResults:
    """Results of one model.

    Attributes:
        path: the run folder or results file.
        file: the results file.
        name: name of the model, for messages.
        results: results of the model, the last one of each key.
    """

    path: Path
    file: Path
    name: str
    results: Sequence[ModelResult]


@dataclass(frozen=True)
class Comparison:
    """Difference of two models in one measurement.

    Attributes:
        measurement: what was measured, such as "at 512 tokens".
        metric: ``perplexity``, ``accuracy`` or ``score``; the last two are in percent.
        first, second: names of the models.
        first_value, second_value: their values.
        difference: ratio of the perplexities first / second, or difference first − second in percentage points.
        low, high: bounds of its 95 % interval.
        clusters: number of clusters.
        cluster_unit: what a cluster is, in the plural.
        p_value: p-value after Holm's correction for all comparisons of the two models.
        smallest_difference: smallest true difference that the test shows with a probability of 80 %: in percent of the
            perplexity, or in points.
    """

    measurement: str
    metric: Literal["perplexity", "accuracy", "score"]
    first: str
    second: str
    first_value: float
    second_value: float
    difference: float
    low: float
    high: float
    clusters: int
    cluster_unit: str
    p_value: float
    smallest_difference: float

    @property
    def is_shown(self) -> bool:
        """Whether the models are shown to differ."""
        return self.p_value < SIGNIFICANCE

    def to_json(self) -> dict[str, object]:
        """Return the values by column of the CSV file."""
        values = asdict(self) | {"is_shown": self.is_shown}
        return {name: values[name] for name in CSV_COLUMNS}

    def csv_row(self) -> list[object]:
        """Return the values of ``CSV_COLUMNS``."""
        return [("yes" if value else "no") if isinstance(value, bool) else value for value in self.to_json().values()]

    def __str__(self) -> str:
        better = self._better_first()
        data = f"{better.clusters:,} {better.cluster_unit}, {_p_text(better.p_value)}"
        percent = "" if better.metric == "perplexity" else " %"
        digits = 2 if better.metric == "perplexity" else 1
        values = f"{better.first_value:,.{digits}f}{percent} against {better.second_value:,.{digits}f}{percent}"
        if better.metric == "perplexity":
            size = f"a perplexity ratio of {better.difference:.3f} (95 % interval {better.low:.3f} to {better.high:.3f}"
        else:
            size = (
                f"a difference of {better.difference:.1f} points (95 % interval {better.low:.1f} to {better.high:.1f}"
            )
        if better.is_shown:
            return f"{better.first} is better than {better.second} {better.measurement}: {values}, {size}, {data})"
        text = f"no difference between {self.first} and {self.second} is shown {self.measurement}: {values}, "
        text += f"{size}, {data})"
        if not better.smallest_difference:
            return f"{text}; the two have the same score in all {better.cluster_unit}"
        unit, source = ("%", "text") if better.metric == "perplexity" else ("points", better.cluster_unit)
        these = "this" if source == "text" else "these"
        smallest = f"{better.smallest_difference:.2g} {unit} with {these} {source}"
        return f"{text}; the smallest detectable difference is {smallest}"

    def _better_first(self) -> "Comparison":
        """Return the comparison with the better model as the first one; nothing changes if an unshown one is better."""
        is_ratio = self.metric == "perplexity"
        is_better = self.difference <= 1 if is_ratio else self.difference >= 0
        if is_better or not self.is_shown:
            return self
        bounds = (
            (1 / self.difference, 1 / self.high, 1 / self.low)
            if is_ratio
            else (-self.difference, -self.high, -self.low)
        )
        difference, low, high = bounds
        return replace(
            self,
            first=self.second,
            second=self.first,
            first_value=self.second_value,
            second_value=self.first_value,
            difference=difference,
            low=low,
            high=high,
        )


def _p_text(p: float) -> str:
    if p < 0.001:
        return "p < 0.001"
    return f"p = {p:.2f}" if p >= 0.1 else f"p = {p:.3f}"


def load_run(path: Path) -> RunResults:
    """Read the results of one model.

    Args:
        path: run folder of a sweep or of ``extend``, or the JSON-lines file of ``--out`` of an evaluation.

    Returns:
        The results of the run's last checkpoint, or of its best one if there are none of the last. Without a record of
        the training, the file must hold results of one model. If results with replaced settings, such as another
        encoding, are there as well, those with the settings of the model count.

    Raises:
        UserError: there are no results, or those of several models; a line is damaged.
    """
    folder = RunFolder(path)
    if (path / SWEEP_RECORD).is_file():
        runs = sorted(run.name for run in (path / "runs").glob("*") if (run / "eval.jsonl").is_file())
        example = f", such as {path / 'runs' / runs[0]}" if runs else ""
        raise UserError(f"{path} is the folder of a sweep: name one of its runs{example}")
    if not path.exists():
        raise UserError(f"{path} does not exist: name a run folder or a results file")
    if path.is_dir() and not folder.results.is_file():
        raise UserError(
            f"{path} has no {folder.results.name}: name the results file of eval, eval-task or eval-questions"
        )
    file = folder.results if path.is_dir() else path
    results = _read_results(file)
    if not results:
        raise UserError(f"{file} has no perplexities, accuracies or scores of questions: evaluate the model first")
    if path.is_dir():
        results = _of_finished_training(path, results)
    results = _of_one_model(file, results)
    return RunResults(path, file, results[0].rpe or results[0].encoding or path.stem, results)


def _read_results(path: Path) -> list[ModelResult]:
    """Read the perplexities, accuracies and scores in a results file; other results are left out."""
    results = []
    for number, row in enumerate(read_json_lines(path), start=1):
        kind = _result_type(row)
        if kind is not None:
            source = f"{path} line {number}"
            results.append(records.read_record(kind, row, source, "the result", strict=False, remedy=DELETE_LINE))
    return results


def _result_type(row: Mapping[str, object]) -> type[Any] | None:
    if "algorithm" in row and "right" in row:
        return ExactMatchResult
    if "set" in row and "published" in row:
        return QuestionResult
    is_text = {"length", "ppl", "loss_base2"} <= row.keys() and TextResult.is_stored_in(row)
    return TextResult if is_text else None


def _of_finished_training(path: Path, results: list[ModelResult]) -> list[ModelResult]:
    """Return the results of a run's last checkpoint, or of its best one; all results if no training is recorded."""
    for checkpoints in (RunFolder(path).checkpoints, CheckpointFolder(path)):
        record = checkpoints.read_record()
        if record is None:
            continue
        for digest in (record.finished.checkpoint, record.finished.best):
            of_checkpoint = [result for result in results if result.checkpoint == digest]
            if of_checkpoint:
                return of_checkpoint
    return results


def _of_one_model(path: Path, results: Sequence[ModelResult]) -> list[ModelResult]:
    """Return the results of the only model, or of the only one whose settings no option replaces."""
    by_model: dict[tuple[object, ...], list[ModelResult]] = {}
    for result in results:
        settings = tuple(getattr(result, name, None) for name in _MODEL_SETTINGS)
        by_model.setdefault(settings, []).append(result)
    unchanged = [settings for settings in by_model if not any(settings[1:])]
    chosen = unchanged if len(unchanged) == 1 else list(by_model)
    if len(chosen) > 1:
        checkpoints = len({settings[0] for settings in by_model})
        what = f"{checkpoints} checkpoints" if checkpoints > 1 else "one model with several encodings or positions"
        raise UserError(f"{path} has results of {what}: evaluate the model into a file of its own with --out")
    return last_of_each(by_model[chosen[0]])


class _Pair(NamedTuple):
    """Scores of two models in one measurement.

    Attributes:
        measurement: what was measured, in words.
        metric: as for :class:`Comparison`.
        values: values of both models.
        scores: clustered scores of both models: losses in bits, right answers, or percent.
    """

    measurement: str
    metric: Literal["perplexity", "accuracy", "score"]
    values: tuple[float, float]
    scores: tuple[ClusteredScores, ClusteredScores]


def compare_runs(first: RunResults, second: RunResults) -> list[Comparison]:
    """Compare two models in each measurement that both have.

    Args:
        first: results of one model.
        second: results of the other model.

    Returns:
        A comparison for each length of a text, each range of lengths of a generated task (trained and longer ones), and
        each set of questions and context length.

    Raises:
        UserError: there is no common measurement, or results do not state the losses of segments or the answers of
            examples, or they are of other segments or examples.
    """
    names = _distinct_names(first, second)
    pairs = [*_text_pairs(first, second), *_task_pairs(first, second), *_question_pairs(first, second)]
    if not pairs:
        raise UserError(_nothing_shared(first, second))
    differences = [pair.scores[0].minus(pair.scores[1]) for pair in pairs]
    p_values = holm([uncertainty.paired_p_value(*pair.scores) for pair in pairs])
    return [
        _comparison(names, pair, difference.estimate(), p, difference.unit)
        for pair, difference, p in zip(pairs, differences, p_values, strict=True)
    ]


def _distinct_names(first: RunResults, second: RunResults) -> tuple[str, str]:
    """Return different names of two models: their encodings, else the names of their folders, else the paths."""
    for names in ((first.name, second.name), (first.path.resolve().name, second.path.resolve().name)):
        if names[0] != names[1]:
            return names
    return str(first.path), str(second.path)


def _comparison(names: tuple[str, str], pair: _Pair, difference: Estimate, p_value: float, unit: str) -> Comparison:
    """Return the comparison of a pair, whose ``difference`` is in bits, as a share, or in percent."""
    if difference.standard_error is None:
        raise UserError(f"{pair.measurement} there is a single cluster of {unit}: evaluate on more data")
    smallest = smallest_detectable_difference(difference.standard_error)
    if pair.metric == "perplexity":
        # the ratio of the reported perplexities, which differ from the losses of segments by rounding
        ratio = pair.values[0] / pair.values[1]
        bounds = (ratio, *uncertainty.perplexity_interval(ratio, difference))
        smallest = 100 * (2**smallest - 1)
    else:
        scale = 100.0 if pair.metric == "accuracy" else 1.0
        bounds = (scale * difference.mean, scale * difference.low, scale * difference.high)
        smallest *= scale
    return Comparison(
        pair.measurement, pair.metric, *names, *pair.values, *bounds, difference.clusters, unit, p_value, smallest
    )


def _text_pairs(first: RunResults, second: RunResults) -> Iterator[_Pair]:
    """Yield the perplexities at each length of each text, with the same context of tokens, that both models have."""
    rows = [row for run in (first, second) for row in run.results if isinstance(row, TextResult)]
    # earlier versions recorded the stated options alone, whose defaults depend on the training
    has_contexts = all(row.context is not None for row in rows)
    names = ("data", "split", *(("context",) if has_contexts else ("blocks", "separate_documents")))
    shared = _shared(first, second, TextResult, (*names, "length"))
    texts = list(dict.fromkeys(tuple(getattr(a, name) for name in names) for a, _ in shared))
    for a, b in sorted(shared, key=lambda pair: pair[0].length):
        where = f"at {a.length:,} tokens"
        if len(texts) > 1:
            stated = [a.blocks and f"blocks {a.blocks}", a.separate_documents and "separate documents"]
            context = [a.context] if has_contexts else stated
            where += f" of text {', '.join([a.data[:8], a.split, *filter(None, context)])}"
        scores = _paired_scores(first, second, uncertainty.text_losses, (a, b), where)
        yield _Pair(where, "perplexity", (a.ppl, b.ppl), scores)


def _task_pairs(first: RunResults, second: RunResults) -> Iterator[_Pair]:
    """Yield the mean accuracies over trained lengths, and over longer ones, on each generated task of both models."""
    shared = _shared(first, second, ExactMatchResult, ("algorithm", "split", "unit", "length", "depth"))
    ranges: dict[tuple[str, str, bool], list[tuple[ExactMatchResult, ExactMatchResult]]] = {}
    for a, b in shared:
        is_longer = a.length > build(a.algorithm).max_length("train")
        ranges.setdefault((a.algorithm, a.split, is_longer), []).append((a, b))
    for (algorithm, _, is_longer), group in sorted(ranges.items()):
        lengths = sorted({a.length for a, _ in group})
        numbers = f"{lengths[0]:,} to {lengths[-1]:,}" if len(lengths) > 1 else f"{lengths[0]:,}"
        what = "longer than in training" if is_longer else "as in training"
        where = f"on {algorithm} at {numbers} {build(algorithm).length_unit} ({what})"
        pairs = [_paired_scores(first, second, uncertainty.exact_match_scores, pair, where) for pair in group]
        scores = tuple(uncertainty.join(column) for column in zip(*pairs, strict=True))
        values = tuple(100 * sum(row.accuracy for row in column) / len(group) for column in zip(*group, strict=True))
        assert scores[0] is not None and scores[1] is not None
        yield _Pair(where, "accuracy", (values[0], values[1]), (scores[0], scores[1]))


def _question_pairs(first: RunResults, second: RunResults) -> Iterator[_Pair]:
    """Yield the scores on each set of questions at each context length that both models have."""
    names = ("data", "set", "split", "answer_mode", "beam", "length_penalty", "truncate", "length")
    for a, b in _shared(first, second, QuestionResult, names):
        where = f"on {a.set} at {a.length:,} tokens"
        scores = _paired_scores(first, second, uncertainty.question_scores, (a, b), where)
        yield _Pair(where, "score", (a.score, b.score), scores)


def _shared(first: RunResults, second: RunResults, kind: type[Any], names: Sequence[str]) -> list[tuple[Any, Any]]:
    """Return the pairs of results of a type that are equal in the attributes with these names."""

    def by_measurement(run: RunResults) -> dict[Hashable, Any]:
        of_kind = [result for result in run.results if isinstance(result, kind)]
        return {tuple(getattr(result, name) for name in names): result for result in of_kind}

    others = by_measurement(second)
    return [(result, others[key]) for key, result in by_measurement(first).items() if key in others]


def _paired_scores(
    first: RunResults,
    second: RunResults,
    scores_of: Callable[[Any], ClusteredScores | None],
    results: tuple[Any, Any],
    where: str,
) -> tuple[ClusteredScores, ClusteredScores]:
    """Return the clustered scores of two results, after checking that they can be paired."""
    a, b = map(scores_of, results)
    for run, scores in ((first, a), (second, b)):
        if scores is None:
            missing = "the losses of segments" if isinstance(results[0], TextResult) else "the score of each example"
            raise UserError(
                f"{run.path}: the result {where} lacks {missing}: evaluate the model again, into another --out"
            )
    assert a is not None and b is not None
    if a.identity != b.identity:
        what = "segments of the text" if isinstance(results[0], TextResult) else "examples"
        raise UserError(
            f"{first.path} and {second.path} have scores of different {what} {where}: evaluate both again, into "
            "another --out"
        )
    return a, b


def _nothing_shared(first: RunResults, second: RunResults) -> str:
    """Return why two runs have no measurement in common, and the remedy."""
    texts = [{(r.data, r.split) for r in run.results if isinstance(r, TextResult)} for run in (first, second)]
    if all(texts) and not texts[0] & texts[1]:
        reason = "were evaluated on different texts or splits: evaluate both on the same one"
        return f"{first.path} and {second.path} {reason}"
    return (
        f"{first.path} and {second.path} have no measurement in common ({_describe(first)}; {_describe(second)}): "
        "evaluate both on the same data at the same lengths, with the same --blocks and --separate-documents"
    )


def _describe(run: RunResults) -> str:
    """Return in words what a run has results of."""
    kinds = {TextResult: "perplexity", ExactMatchResult: "generated tasks", QuestionResult: "questions"}
    parts = []
    for kind, name in kinds.items():
        lengths = sorted({result.length for result in run.results if isinstance(result, kind)})
        if lengths:
            shown = ", ".join(map(str, lengths[:4])) + (", …" if len(lengths) > 4 else "")
            parts.append(f"{name} at {shown}")
    return f"{run.path.name} has {' and '.join(parts)}"
