"""A sweep over questions: scores set by set and by context length, beside the published ones."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from fairseq_rpe.evaluation.position_limits import longest_row
from fairseq_rpe.figures import score_curves
from fairseq_rpe.reports.chapters import published_comparison
from fairseq_rpe.reports.chapters.training import Run
from fairseq_rpe.reports.page import Block, Findings, Part, Text, markdown, picture
from fairseq_rpe.reports.question_scores import MEAN, Scores, by_of, published_mean
from fairseq_rpe.sweeps.sweep_record import Published, State
from fairseq_rpe.utils.table import Cell, Row, Table, number, spread, words

_BY = {"generation": "written freely", "likelihood": "the likeliest of the choices"}
_FEW = 2
_BEYOND = "Published values cannot be compared one by one: what differs or is not stated stands on the page."


def findings(state: State, runs: Sequence[Run], found: Scores) -> Findings:
    """What a sweep found."""
    several = len(found.lengths) > 1
    tables = [_of_length(state, found, *one) for one in _metrics(found)] if several else []
    tables += [_of_sets(state, found, n) for n in found.lengths] if len(found.sets) > 1 or not several else []
    tables += [table for label in found.sets if (table := _of_distance(found, label))]
    printed = _published(state.published, found)
    figure = _figure(found)
    alt = "; ".join(
        f"{label}: " + ", ".join(f"{m} {_means(found.of(label, m))}" for m in found.methods) for label in found.sets
    )
    against = "the context length; dashed: of the fine-tuning" if several else "the set; shaded: the mean of the sets"
    drawn = picture(figure, f"Scores in per cent. {alt}.", f"Score in % against {against}.")
    about: list[Block] = [Text(_about(state, found)), *([Text(_BEYOND)] if printed else [])]
    return Findings(
        _lead(state, found),
        [
            Part("scores", "Scores", [*tables, *printed, drawn, Text(_about(state, found))]),
            Part("published", "Beside the published values", published_comparison.blocks(state, runs)),
        ],
        partial(_measurements, found),
        markdown([*tables, *printed, *about]).lstrip(),
        figure,
    )


def _of_sets(state: State, found: Scores, length: int) -> Table:
    """Methods × sets at a context length, the mean of the sets, and the published mean."""
    columns = {label: _at(found, label, length) for label in found.sets}
    known = state.published if by_of(state.published) == "set" else None
    wanted = found.mean_sets()
    if len(found.sets) > 1:
        columns[MEAN] = lambda method: found.over_sets(method).get(length, [])
    caption = f"Score in % on {length} tokens ({_scored(found)})."
    if 1 < len(wanted) < len(found.sets):
        caption += f" Mean of {', '.join(wanted)}."
    return _table(found, columns, caption, _printed(known, found, wanted))


def _at(found: Scores, label: str, length: int, metric: str | None = None) -> Callable[[str], list[float]]:
    return lambda method: found.of(label, method, metric).get(length, [])


def _metrics(found: Scores) -> list[tuple[str, str]]:
    """What is shown by context length: the metric that counts, and of a set that has few the others that differ."""
    return [
        (label, metric)
        for label in found.sets
        for metric in found.metrics(label)
        if metric == found.metric(label)
        or (
            len(found.metrics(label)) <= _FEW
            and any(found.of(label, m, metric) != found.of(label, m) for m in found.methods)
        )
    ]


def _of_length(state: State, found: Scores, label: str, metric: str) -> Table:
    """Methods × context lengths on a set, their mean, and the published mean."""
    columns: dict[str, Callable[[str], list[float]]] = {str(n): _at(found, label, n, metric) for n in found.lengths}
    columns[MEAN] = lambda method: found.over_lengths(label, method, metric)
    alike = by_of(state.published) == "length" and len(found.sets) == 1 and metric == found.metric(label)
    known = state.published if alike else None
    caption = (
        f"{label}: {metric} in % by context length, what is read and written, without further tuning; "
        f"fine-tuned at {found.tuned_at}."
    )
    ends = {}
    for name in found.methods:
        end = longest_row(state.method(name).positions_eval, found.trained_at)
        if end is not None and end < found.lengths[-1]:
            ends[name] = end
    if ends:
        caption += f" Positions end: {', '.join(f'{name} at {end}' for name, end in ends.items())}."
    return _table(found, columns, caption, _printed(known, found, list(map(str, found.lengths))))


def _of_distance(found: Scores, label: str) -> Table | None:
    """Methods × distances of the answer on a set, at the longest context."""
    length = found.lengths[-1]
    bands = found.by_distance(label, length)
    columns = {f"{least}–{most}": partial(_seeds, own) for (least, most), own in bands.items()}
    caption = (
        f"{label}: {found.metric(label)} in % on {length} tokens, by words between the answer and the document's end, "
        "about an eighth of the questions each."
    )
    return _table(found, columns, caption, {}) if columns else None


def _by_words(bands: Mapping[tuple[int, int], Mapping[str, list[float]]], method: str) -> dict[int, list[float]]:
    """The scores of a method at the middle of each range of words."""
    return {(least + most) // 2: own[method] for (least, most), own in bands.items() if method in own}


def _seeds(values: Mapping[str, list[float]], method: str) -> list[float]:
    return values.get(method, [])


def _table(
    found: Scores,
    columns: Mapping[str, Callable[[str], list[float]]],
    caption: str,
    printed: Mapping[str, float | None],
) -> Table:
    means = {head: {m: _mean(values(m)) for m in found.methods} for head, values in columns.items()}
    best = {head: max((v for v in own.values() if v is not None), default=None) for head, own in means.items()}
    rows = []
    for method in found.methods:
        own = {head: (means[head][method], values(method)) for head, values in columns.items()}
        cells = [
            spread(mean, ".2f", seeds, best[head])
            if head == MEAN
            else number(mean, ".2f", best[head], f"{min(seeds):.2f}–{max(seeds):.2f}" if len(seeds) > 1 else "")
            for head, (mean, seeds) in own.items()
        ]
        rows.append(Row(method, cells + ([number(printed.get(method), ".2f")] if printed else [])))
    head = ["method", *columns, *(["published mean"] if printed else [])]
    if any(len(values(m)) > 1 for values in columns.values() for m in found.methods):
        caption += " Mean over the seeds; of means in brackets, from the least to the largest."
    return Table(caption, head, rows, starred="largest")


def _printed(known: Published | None, found: Scores, keys: Sequence[str]) -> dict[str, float | None]:
    """The published mean of each method over the same sets or lengths, if there are several and there is one."""
    if known is None or len(keys) < 2:
        return {}
    values = {name: published_mean(known, name, keys) for name in found.methods if name in known.values}
    return values if any(value is not None for value in values.values()) else {}


def _published(known: Published | None, found: Scores) -> list[Block]:
    """The published values of the methods that were compared."""
    if known is None:
        return []
    rows = {name: known.values[name] for name in found.methods if name in known.values}
    heads = list(dict.fromkeys(key for row in rows.values() for key in row if key != MEAN))
    if not rows:
        return []
    means = {name: published_mean(known, name) for name in rows}
    best = {head: max((row[head] for row in rows.values() if head in row), default=None) for head in heads}
    top = max((value for value in means.values() if value is not None), default=None)
    lines = [
        Row(name, [*(number(row.get(h), known.form, best[h]) for h in heads), number(means[name], known.form, top)])
        for name, row in rows.items()
    ]
    return [Table(f"Published: {known.source}.", ["published", *heads, MEAN], lines, starred="largest")]


def _figure(found: Scores) -> Figure:
    if len(found.lengths) > 1:
        curves = {one: {m: found.of(one[0], m, one[1]) for m in found.methods} for one in _metrics(found)}
        known = {one: {m: points for m, points in own.items() if points} for one, own in curves.items()}
        back = {
            (label, found.metric(label)): {m: own for m in found.methods if (own := _by_words(bands, m))}
            for label in found.sets
            if (bands := found.by_distance(label, found.lengths[-1]))
        }
        return score_curves.over_length(known, found.tuned_at, back)
    (length,) = found.lengths
    values = {label: {m: found.of(label, m).get(length, []) for m in found.methods} for label in found.sets}
    if len(found.sets) > 1:
        values[MEAN] = {m: found.over_sets(m).get(length, []) for m in found.methods}
    return score_curves.by_set(values, f"{length} tokens, {_scored(found)}")


def _scored(found: Scores) -> str:
    """By which metric which sets are scored."""
    by: dict[str, list[str]] = {}
    for label in found.sets:
        by.setdefault(found.metric(label), []).append(label)
    if len(by) == 1:
        return next(iter(by))
    most = max(by, key=lambda metric: len(by[metric]))
    some = [f"{metric} of {', '.join(labels)}" for metric, labels in by.items() if metric != most or len(by[most]) < 5]
    return "; ".join([*some, *([f"{most} of the others"] if len(by[most]) >= 5 else [])])


def _about(state: State, found: Scores) -> str:
    asking, cut = state.asking, sum(row.result.cut_documents for row in found.rows)
    asked = sum(row.result.questions for row in found.rows)
    how = _BY[asking.by] if asking else ""
    beam = f", beam of {asking.beam}" if asking and asking.beam > 1 else ""
    where = f", their {asking.cut} left out" if asking and cut else ""
    best = ", by the checkpoint that was best in validation" if asking and asking.checkpoint == "best" else ""
    return (
        f"Answers of the {state.settings.subset} split, {how}{beam}{best}. Documents shortened for {cut / asked:.1%} "
        f"of all answers{where}."
    )


def _lead(state: State, found: Scores) -> list[str]:
    methods, asked = found.methods, sorted({row.result.questions for row in found.rows})
    counts = f"{asked[0]:,} to {asked[-1]:,}" if len(asked) > 1 else f"{asked[0]:,}"
    lengths = ", ".join(map(str, found.lengths))
    lines = [
        f"{len(methods)} method{'s' * (len(methods) > 1)}, trained on text at {found.trained_at} tokens, fine-tuned on "
        f"questions at {found.tuned_at} and asked at {lengths}; {counts} questions of {state.settings.subset} "
        f"of {', '.join(found.sets)}."
    ]
    for n in dict.fromkeys((found.lengths[0], found.lengths[-1])):
        values = {m: mean for m in methods if (mean := _mean(found.over_sets(m).get(n, []))) is not None}
        if values:
            best = max(values, key=values.__getitem__)
            of = f", mean of {len(found.mean_sets())} sets" if len(found.mean_sets()) > 1 else ""
            lines.append(f"Best score on {n} tokens{of}: {best}, {values[best]:.2f} %.")
    return lines


def _measurements(found: Scores) -> Table:
    lines = []
    for row in found.rows:
        one = row.result
        others = ", ".join(f"{name} {value:.2f}" for name, value in one.metrics.items() if name != one.published)
        counts = [Cell(f"{n:,}", n) for n in (one.questions, one.cut_documents, one.empty)]
        about = [Cell(str(row.seed), row.seed), Cell(one.set), Cell(str(one.length), one.length), Cell(one.published)]
        cells = [*about, number(one.score, ".3f"), words(others), *counts, number(one.seconds, ".1f")]
        lines.append(Row(row.method, cells))
    head = ["method", "seed", "set", "length", "metric", "score", "others", "questions", "cut", "empty", "seconds"]
    return Table("What scores.csv holds, and what each measurement took.", head, lines, folded=True)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _means(points: Mapping[int, Sequence[float]]) -> str:
    return ", ".join(f"{sum(v) / len(v):.2f} at {n}" for n, v in points.items())
