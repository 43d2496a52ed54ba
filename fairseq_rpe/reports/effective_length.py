"""Effective length: the longest text at which a method keeps its perplexity, or still answers correctly.

An effective length is the largest evaluated length such that a criterion holds at this length and at all shorter
evaluated lengths. There is one number for each method and each kind of evidence:

- perplexity: Definition 0.1 of "Exploring Transformer Extrapolation" (arXiv 2307.10156);
- exact match on generated tasks, and scores of generated answers to questions: the threshold of RULER (arXiv
  2404.06654), and that of NoLiMa (arXiv 2502.05167), which is relative to the method's own score at trained lengths.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from fairseq_rpe.algorithms import build
from fairseq_rpe.analysis.extrapolation import Deviation, deviations_by_length, mean_deviation
from fairseq_rpe.reports.extrapolation_definition import DELTA, unused_context_reasons
from fairseq_rpe.reports.question_scores import Scores
from fairseq_rpe.reports.sweep_results import Accuracies, Perplexities, group_by
from fairseq_rpe.sweeps.sweep_record import Method
from fairseq_rpe.utils.table import Cell, csv_text

CSV_NAME = "effective_length.csv"
RULER_PERCENT = 85.6  # a length passes if the score exceeds this: the score of Llama2-7B-chat at 4,096 tokens in RULER
NOLIMA_SHARE = 0.85  # a length passes if the score is at least this share of the method's own at trained lengths
# A task is learned if NoLiMa's threshold exceeds the accuracy of a guess by at least so many percentage points. Without
# this rule, a method that guesses would pass at all lengths.
LEARNED_MARGIN = 10.0
DEFINITION, ONE_SIDED, RULER, NOLIMA = "Definition 0.1", "Definition 0.1, one-sided", "RULER", "NoLiMa"
NO_VERDICT, NOT_LEARNED = "no verdict", "not learned"
# tag and title in TensorBoard by definition
TAGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        DEFINITION: ("effective_length/perplexity", f"effective length, Definition 0.1, δ = {DELTA:g}"),
        ONE_SIDED: ("effective_length/perplexity_one_sided", f"effective length, one-sided, δ = {DELTA:g}"),
        RULER: ("effective_length/ruler", f"effective length, RULER, above {RULER_PERCENT:g} %"),
        NOLIMA: ("effective_length/nolima", f"effective length, NoLiMa, {NOLIMA_SHARE:.0%} of base score"),
    }
)
_ROUNDING = 1e-9  # means of equal scores may differ by rounding errors
_CSV_HEAD = (
    *("method", "evidence", "task", "definition", "trained_at", "unit", "effective_length", "evaluated_to"),
    *("is_lower_bound", "threshold", "base_score", "seeds", "lowest_seed", "highest_seed", "remark"),
)
_Curve = Mapping[int, float]  # score in percent by length
_SeedCurves = Mapping[int, _Curve]  # curves by seed


@dataclass(frozen=True)
class EffectiveLength:
    """An effective length.

    Attributes:
        length: the effective length; 0 if the shortest evaluated length does not pass, None without a verdict.
        evaluated_to: longest evaluated length.
        is_lower_bound: whether all evaluated lengths pass, and longer ones may pass, too.
        remark: ``NO_VERDICT`` or ``NOT_LEARNED`` if ``length`` is None; empty otherwise.
    """

    length: int | None
    evaluated_to: int
    is_lower_bound: bool = False
    remark: str = ""

    def __str__(self) -> str:
        if self.length is None:
            return self.remark
        return f"{'≥ ' if self.is_lower_bound else ''}{self.length}" if self.length else "none"


@dataclass(frozen=True)
class MethodLength:
    """Effective length of one method by one definition.

    Attributes:
        method: name of the method.
        evidence: ``perplexity``, ``exact match`` or ``score``.
        task: generated task or set of questions; empty for perplexity.
        definition: a key of ``TAGS``.
        trained_at: training length.
        unit: unit of all lengths, such as ``tokens``.
        mean: effective length of the mean over seeds.
        seeds: effective length of each seed.
        threshold: δ of Definition 0.1, or the threshold of the score in percent; None without a base score.
        base_score: best score at the evaluated lengths up to ``trained_at``, in percent, as mean over seeds; None for
            perplexity, or without such lengths.
    """

    method: str
    evidence: str
    task: str
    definition: str
    trained_at: int
    unit: str
    mean: EffectiveLength
    seeds: Sequence[EffectiveLength]
    threshold: float | None
    base_score: float | None = None

    @property
    def seed_range(self) -> list[EffectiveLength]:
        """The lowest and the highest effective length of a seed; empty if no seed has one."""
        seeds = [seed for seed in self.seeds if seed.length is not None]
        seeds.sort(key=lambda seed: (seed.length, seed.is_lower_bound))
        return [seeds[0], seeds[-1]] if seeds else []

    def cell(self) -> Cell:
        """Return the effective length, with the range over seeds if they differ."""
        text, ends = str(self.mean), self.seed_range
        if ends and ends[0] != ends[1]:
            text += f" ({ends[0]} to {ends[1]})"
        return Cell(text, self.mean.length)


def effective_length(passes: Mapping[int, bool], may_continue: bool = True) -> EffectiveLength:
    """Return the largest length such that it and all shorter evaluated lengths pass.

    Args:
        passes: whether each evaluated length passes; at least one length.
        may_continue: whether the method can process texts beyond the longest evaluated length.

    >>> str(effective_length({64: True, 128: True, 256: False, 512: True}))
    '128'
    """
    longest = 0
    for length in sorted(passes):
        if not passes[length]:
            break
        longest = length
    return EffectiveLength(longest, max(passes), may_continue and longest == max(passes))


def perplexity_lengths(
    perplexities: Perplexities, delta: float = DELTA, methods: Mapping[str, Method] = MappingProxyType({})
) -> list[MethodLength]:
    """Return the effective lengths by perplexity of each method that was evaluated at its training length and beyond.

    A length passes if the deviations at the evaluated lengths up to it are below δ. With several seeds, the mean of
    their largest deviations decides, as in :func:`~fairseq_rpe.reports.extrapolation_definition.observe_verdicts`. The
    deviations count as measured, without their intervals.

    Args:
        perplexities: perplexities of a sweep on one text.
        delta: δ of the definition.
        methods: methods by name. If a method has positions for a limited number of tokens, its effective length is no
            lower bound.

    Returns:
        The effective lengths of each method: two-sided, as in the paper, then one-sided. Each is at least the training
        length.
    """
    rows = []
    for name in perplexities.encodings:
        start = perplexities.continued_lengths.get(name, perplexities.train_length)
        seeds = [deviations_by_length(curve, start) for curve in perplexities.seed_curves(name)]
        shared = sorted(set.intersection(*map(set, seeds))) if seeds else []
        if not shared:
            continue
        mean = {length: mean_deviation([seed[length] for seed in seeds]) for length in shared}
        limit = methods[name].position_limit(perplexities.train_length) if name in methods else None
        may_continue = limit is None or limit >= perplexities.lengths[-1]
        is_unused = bool(unused_context_reasons(perplexities, name))
        for definition in (DEFINITION, ONE_SIDED):
            results = []
            for deviations in (mean, *seeds):
                result = effective_length(_passes_definition(deviations, start, delta, definition), may_continue)
                results.append(_without_verdict(result, NO_VERDICT) if is_unused else result)
            rows.append(
                MethodLength(name, "perplexity", "", definition, start, "tokens", results[0], results[1:], delta)
            )
    return rows


def _passes_definition(
    deviations: Mapping[int, Deviation], start: int, delta: float, definition: str
) -> dict[int, bool]:
    """Return whether each length passes; the training length ``start`` always does."""
    one_sided = definition == ONE_SIDED
    return {start: True} | {n: change.extrapolates(delta, one_sided) for n, change in deviations.items()}


def _without_verdict(result: EffectiveLength, remark: str) -> EffectiveLength:
    return EffectiveLength(None, result.evaluated_to, remark=remark)


class _Setting(NamedTuple):
    """What the scores of one task have in common.

    Attributes:
        evidence: ``exact match`` or ``score``.
        task: generated task or set of questions.
        trained_at: training length.
        unit: unit of the lengths.
        chance: accuracy of a guess at trained lengths in percent; 0 if it is unknown.
    """

    evidence: str
    task: str
    trained_at: int
    unit: str
    chance: float = 0.0


def accuracy_lengths(accuracies: Accuracies) -> list[MethodLength]:
    """Return the effective lengths of each task and method by exact match, as mean over depths and seeds.

    Args:
        accuracies: accuracies of a sweep over generated tasks.

    Returns:
        The effective lengths: with RULER's threshold, then with NoLiMa's. If all of several tasks have the same
        training length and unit, those of the mean over tasks come first, as in RULER.
    """
    curves = {
        task: {method: _accuracy_curves(accuracies, task, method) for method in accuracies.methods(task)}
        for task in accuracies.tasks
    }
    settings = {task: _task_setting(accuracies, task) for task in curves}
    limited = {method for _, method in accuracies.position_limits}
    rows = _mean_lengths(list(settings.values()), curves, limited)
    for task, setting in settings.items():
        for method, seeds in curves[task].items():
            rows += _score_lengths(setting, method, seeds, (task, method) not in accuracies.position_limits)
    return rows


def _task_setting(accuracies: Accuracies, task: str) -> _Setting:
    algorithm, trained_at = build(task), accuracies.train_items[task]
    trained = {row.result.length for row in accuracies.results if row.task == task and row.result.length <= trained_at}
    chance = max((algorithm.chance_accuracy(n) or 0.0 for n in trained), default=0.0)
    return _Setting("exact match", task, trained_at, algorithm.length_unit, 100 * chance)


def _accuracy_curves(accuracies: Accuracies, task: str, method: str) -> _SeedCurves:
    """Return the accuracy in percent by seed and length, as mean over depths."""
    by_seed = group_by(accuracies.results_for(task, method), lambda row: row.seed)
    return {
        seed: {
            length: 100 * fmean(row.result.accuracy for row in at_length)
            for length, at_length in group_by(rows, lambda row: row.result.length).items()
        }
        for seed, rows in by_seed.items()
    }


def score_lengths(scores: Scores) -> list[MethodLength]:
    """Return the effective lengths of each set of questions and method by score, as mean over seeds.

    Sets at a single context length are left out. So are sets whose answers are chosen and not generated, because the
    score of a guess is unknown.

    Args:
        scores: scores of a sweep over questions.

    Returns:
        The effective lengths: with RULER's threshold, then with NoLiMa's. Those of the mean over several sets come
        first.
    """
    curves: dict[str, dict[str, _SeedCurves]] = {}
    generated = [row for row in scores.results if row.result.answer_mode == "generation"]
    for label, of_set in group_by(generated, scores.set_label).items():
        if len({row.result.length for row in of_set}) > 1:
            curves[label] = {
                method: {
                    seed: {row.result.length: row.result.score for row in of_seed}
                    for seed, of_seed in group_by(rows, lambda row: row.seed).items()
                }
                for method, rows in group_by(of_set, lambda row: row.method).items()
            }
    settings = {label: _Setting("score", label, scores.fine_tuning_length, "tokens") for label in curves}
    rows = _mean_lengths(list(settings.values()), curves)
    for label, setting in settings.items():
        for method, seeds in curves[label].items():
            rows += _score_lengths(setting, method, seeds)
    return rows


def _mean_lengths(
    settings: Sequence[_Setting], curves: Mapping[str, Mapping[str, _SeedCurves]], limited: Collection[str] = ()
) -> list[MethodLength]:
    """Return the effective lengths of the mean over several tasks with the same training length and unit.

    Args:
        settings: setting of each task.
        curves: scores by task, method, seed and length. Methods without scores of all tasks have no mean.
        limited: methods with a limited number of positions.
    """
    if len(settings) < 2 or len({(setting.trained_at, setting.unit) for setting in settings}) > 1:
        return []
    chance = fmean(setting.chance for setting in settings)
    mean_setting = settings[0]._replace(task=f"mean of {len(settings)} tasks", chance=chance)
    rows = []
    for method in dict.fromkeys(method for by_method in curves.values() for method in by_method):
        tasks = [by_method.get(method, {}) for by_method in curves.values()]
        seeds = sorted(set.intersection(*map(set, tasks)))
        means = {seed: _mean_curve([task[seed] for task in tasks]) for seed in seeds}
        rows += _score_lengths(mean_setting, method, means, method not in limited)
    return rows


def _score_lengths(
    setting: _Setting, method: str, curves: _SeedCurves, may_continue: bool = True
) -> list[MethodLength]:
    """Return the effective lengths of one method on one task, by RULER's and by NoLiMa's threshold.

    Args:
        setting: the task.
        method: name of the method.
        curves: score in percent by seed and length.
        may_continue: whether the method can process texts beyond the longest evaluated length.

    Returns:
        Both; empty if the seeds have no length in common.
    """
    mean = _mean_curve(list(curves.values()))
    if not mean:
        return []
    rows = []
    for definition, judge in ((RULER, _ruler_length), (NOLIMA, _nolima_length)):
        result, *seeds = (judge(curve, setting, may_continue) for curve in (mean, *curves.values()))
        base = _base_score(mean, setting.trained_at)
        relative = None if base is None else NOLIMA_SHARE * base
        threshold = RULER_PERCENT if definition == RULER else relative
        about = (method, setting.evidence, setting.task, definition, setting.trained_at, setting.unit)
        rows.append(MethodLength(*about, result, seeds, threshold, base))
    return rows


def _mean_curve(curves: Sequence[_Curve]) -> dict[int, float]:
    """Return the mean of several curves at the lengths that all of them have."""
    shared = sorted(set.intersection(*map(set, curves))) if curves else []
    return {length: fmean(curve[length] for curve in curves) for length in shared}


def _base_score(curve: _Curve, trained_at: int) -> float | None:
    """Return the best score at trained lengths in percent, as in NoLiMa; None without such lengths."""
    return max((score for length, score in curve.items() if length <= trained_at), default=None)


def _ruler_length(curve: _Curve, setting: _Setting, may_continue: bool) -> EffectiveLength:
    passes = {length: score > RULER_PERCENT + _ROUNDING for length, score in curve.items()}
    return effective_length(passes, may_continue)


def _nolima_length(curve: _Curve, setting: _Setting, may_continue: bool) -> EffectiveLength:
    base = _base_score(curve, setting.trained_at)
    if base is None:
        return EffectiveLength(None, max(curve), remark=NO_VERDICT)
    threshold = NOLIMA_SHARE * base
    if threshold < setting.chance + LEARNED_MARGIN - _ROUNDING:
        return EffectiveLength(None, max(curve), remark=NOT_LEARNED)
    return effective_length({n: score >= threshold - _ROUNDING for n, score in curve.items()}, may_continue)


def lengths_csv(rows: Sequence[MethodLength]) -> str:
    """Return a CSV row for each effective length.

    ``effective_length`` is 0 if the shortest evaluated length does not pass, and empty without a verdict, for which
    ``remark`` has the reason. ``lowest_seed`` and ``highest_seed`` are the range over seeds.
    """
    lines = []
    for row in rows:
        seeds = [seed.length for seed in row.seed_range] or [None, None]
        is_bound = "yes" if row.mean.is_lower_bound else "no"
        about = (row.method, row.evidence, row.task, row.definition, row.trained_at, row.unit)
        numbers = (row.mean.length, row.mean.evaluated_to, is_bound, row.threshold, row.base_score, len(row.seeds))
        lines.append((*about, *numbers, *seeds, row.mean.remark))
    return csv_text(_CSV_HEAD, lines)


def lengths_by_tag(rows: Sequence[MethodLength]) -> dict[str, float]:
    """Return the effective lengths of one method by tag of TensorBoard: the first one of each definition.

    Those without a verdict are left out.
    """
    values: dict[str, float] = {}
    for row in rows:
        tag, _ = TAGS[row.definition]
        if row.mean.length is not None:
            values.setdefault(tag, float(row.mean.length))
    return values


def titles_by_tag(rows: Sequence[MethodLength]) -> dict[str, str]:
    """Return the title of each tag of TensorBoard that some of the rows have."""
    return dict(TAGS[row.definition] for row in rows)
