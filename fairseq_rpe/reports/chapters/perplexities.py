"""Chapters on perplexities: perplexity over length, loss by position, Definition 0.1."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from matplotlib.figure import Figure

from fairseq_rpe.evaluation.statistics import Estimate, mean_over_seeds
from fairseq_rpe.figures import sweep_curves
from fairseq_rpe.reports import uncertainty
from fairseq_rpe.reports.chapters import effective_length, perplexity_figures, training_axis
from fairseq_rpe.reports.chapters.training import TrainedRun, own_settings
from fairseq_rpe.reports.extrapolation_definition import unused_context_reasons
from fairseq_rpe.reports.page import Block, Part, Picture, ReportContent, Text, markdown, svg_picture
from fairseq_rpe.reports.sweep_results import Perplexities
from fairseq_rpe.reports.training_axis import FIGURE_NAME
from fairseq_rpe.reports.uncertainty import ClusteredScores
from fairseq_rpe.sweeps.sweep_record import Method, SweepRecord
from fairseq_rpe.utils.table import Cell, Table, TableRow, cell_with_range, lowest, number_cell, text_cell


class _LengthBlocks(NamedTuple):
    """Perplexity by length on one text.

    Attributes:
        table: perplexity of each method at each length.
        pictures: figures for the page.
        figure: the first of them, for files.
    """

    table: Table
    pictures: Sequence[Picture]
    figure: Figure


class _Column(NamedTuple):
    """A column of the table of perplexities.

    Attributes:
        means: mean over seeds of each method, None without results.
        losses: clustered losses in bits of each method, None if unknown.
        best: lowest mean.
        ties: methods that are not shown to differ from the lowest mean; None if the methods cannot be compared.
    """

    means: Mapping[str, float | None]
    losses: Mapping[str, ClusteredScores | None]
    best: float | None
    ties: set[str] | None

    @classmethod
    def compare(cls, means: Mapping[str, float | None], losses: Mapping[str, ClusteredScores | None]) -> "_Column":
        """Return the column of some means, with the comparison of all methods that have one."""
        measured = {name: mean for name, mean in means.items() if mean is not None}
        ties = uncertainty.ties_with_best(measured, losses, is_loss=True)
        return cls(means, losses, lowest(list(measured.values())), ties)

    def mark(self, cell: Cell, name: str, number_format: str) -> Cell:
        """Return the cell of a method with half of the 95 % interval, and with a mark if the method is a tie."""
        losses, mean = self.losses[name], self.means[name]
        if losses is None or mean is None:
            return cell
        low, high = uncertainty.perplexity_interval(mean, losses.estimate())
        suffix = uncertainty.half_width_text(low, high, number_format)
        return uncertainty.with_suffix(cell, suffix, name in (self.ties or ()))


@dataclass(frozen=True)
class ComparedModels:
    """What the chapters state about models, whether a sweep has trained them or not.

    Attributes:
        methods: encodings and position transforms, by name of the model.
        split: split of the text that they are evaluated on.
        seeds: number of trainings of each model.
        updates: number of updates of the training, None if unknown.
        data: name of the training text, None if unknown.
    """

    methods: Mapping[str, Method]
    split: str
    seeds: int = 1
    updates: int | None = None
    data: str | None = None

    @classmethod
    def from_sweep(cls, record: SweepRecord, runs: Sequence[TrainedRun]) -> "ComparedModels":
        """Return what the record of a sweep and its runs state."""
        methods = {name: record.method(name) for name in record.encodings}
        settings = record.settings
        return cls(methods, settings.split, len(record.seeds), settings.updates, own_settings(record, runs).data)


def build_content(
    models: ComparedModels,
    perplexities: Perplexities,
    theory: list[Block],
    published: Sequence[Block] = (),
    lengths: Sequence[Block] = (),
) -> ReportContent:
    """Build the report on perplexities.

    Args:
        models: the models.
        perplexities: results.
        theory: blocks on Definition 0.1, the chapter "Does it extrapolate?".
        published: blocks of the comparison with published results; empty without any.
        lengths: blocks on effective lengths; empty without any.

    Returns:
        The chapters; ``other_figures`` has the figure of each further text by its name, and that along the training.
    """
    notes = _continued_training(models, perplexities)
    main = _over_length(models, perplexities)
    axis = training_axis.training_axis_blocks(perplexities)
    texts = {name: _over_length(models, results, name) for name, results in perplexities.other_texts.items()}
    seeds = _seed_differences(perplexities)
    over_length = [main.table, *notes, *main.pictures, *seeds, *_mean_over_lengths(perplexities)]
    # the Markdown has the first and the last block of the comparison: the warning and the published values
    published_values = [published[0], published[-1]] if published else []
    along_training = [axis.table] if axis else []
    errors = [Text(about_errors)] if (about_errors := _about_errors(perplexities)) else []
    summary = [
        *errors,
        *notes,
        *seeds,
        *along_training,
        *(text.table for text in texts.values()),
        *theory,
        *lengths,
        *published_values,
    ]
    return ReportContent(
        lead=_lead(models, perplexities),
        parts=[
            Part("perplexity", "Perplexity over length", over_length),
            *(
                Part(f"perplexity-{name}", f"Perplexity on {name}", [text.table, *text.pictures])
                for name, text in texts.items()
            ),
            Part("training-axis", "Perplexity along the training", [axis.picture, axis.table] if axis else []),
            Part("published", "Comparison with published values", published),
            Part("positions", "Loss by position", _loss_by_position(perplexities)),
            Part("verdict", "Does it extrapolate?", theory),
            effective_length.chapter(lengths),
        ],
        build_measurements=partial(_measurements, perplexities),
        markdown=main.table.to_markdown() + markdown(summary),
        figure=main.figure,
        other_figures={name: text.figure for name, text in texts.items()}
        | ({FIGURE_NAME: axis.figure} if axis else {}),
    )


def _over_length(models: ComparedModels, perplexities: Perplexities, text: str = "") -> _LengthBlocks:
    """Build table and figure of the perplexity on one text.

    Args:
        models: the models.
        perplexities: results on the text.
        text: name of the text; empty for the training text.
    """
    on = f" on {text}" if text else ""
    figure = perplexity_figures.draw_perplexity(models.methods, perplexities, text)
    caption = perplexity_figures.perplexity_caption(perplexities, figure, text, models.seeds)
    alt = f"Perplexity per token{on} against evaluation length: {_means_text(perplexities)}."
    pictures = [svg_picture(figure, alt, caption), *perplexity_figures.extremes(models.methods, perplexities, text)]
    return _LengthBlocks(_perplexity_table(models, perplexities, on), pictures, figure)


def _means_text(perplexities: Perplexities) -> str:
    """Return the mean perplexities of each method in words."""
    texts = []
    for name in perplexities.encodings:
        means = perplexities.mean_by_length(name)
        if means:
            shown = [f"{means[length]:.2f} at {length}" for length in perplexities.shown_lengths if length in means]
            texts.append(f"{name} {', '.join(shown)}")
    return "; ".join(texts)


def _continued_training(models: ComparedModels, perplexities: Perplexities) -> list[Text]:
    """Build a note on methods that continue the training of others; nothing if there are none."""
    notes = []
    for method in (models.methods[name] for name in perplexities.encodings):
        if method.continues:
            updates = f" for {method.further.updates:,} updates" if method.further.updates else ""
            length = f" at {method.further.tokens} tokens" if method.further.tokens else ""
            notes.append(f"{method.name} continues the training of {method.continues}{updates}{length}")
    if not notes:
        return []
    definition = "; Definition 0.1 uses the length of the continued training" if perplexities.continued_lengths else ""
    return [Text(f"{'; '.join(notes)}. Continued methods have had more training than the others{definition}.")]


def _lead(models: ComparedModels, perplexities: Perplexities) -> list[str]:
    """Return the first paragraph and the list of main results."""
    encodings, first, last = perplexities.encodings, perplexities.train_length, perplexities.lengths[-1]
    lead = [_describe_models(models, perplexities)]
    for length in dict.fromkeys((first, last)):
        means = {name: perplexities.mean_by_length(name).get(length) for name in encodings}
        measured = {name: mean for name, mean in means.items() if mean is not None}
        if measured:
            best = min(measured, key=measured.__getitem__)
            lead.append(f"Lowest perplexity at {length} tokens: {best}, {measured[best]:.2f}.")
    untrained = [name for name in encodings if unused_context_reasons(perplexities, name)]
    if untrained:
        lead.append(f"Not trained for long enough to use the context, so no verdict: {', '.join(untrained)}.")
    ratios = [ratio for name in encodings if (ratio := perplexities.final_ratio(name)) is not None]
    if ratios and last > first:
        not_higher = sum(ratio <= 1 for ratio in ratios)
        lead.append(f"At {last} tokens {not_higher} of {len(ratios)} have no higher perplexity than at {first}.")
    return lead


def _describe_models(models: ComparedModels, perplexities: Perplexities) -> str:
    """Return in words what was trained and evaluated."""
    encodings, lengths = perplexities.encodings, perplexities.lengths
    noun = "encoding" if all(models.methods[name].leaves_positions for name in encodings) else "method"
    count = f"{len(encodings)} {noun}{'s' if len(encodings) > 1 else ''}"
    text = f" on {models.data}" if models.data else ""
    updates = f" for {models.updates:,} updates" if models.updates is not None else ""
    scored = " or ".join(f"{tokens:,}" for tokens in sorted({row.result.tokens for row in perplexities.results}))
    return (
        f"{count}, trained at {perplexities.train_length} tokens{text}{updates}; {scored} tokens of the "
        f"{models.split} split scored at each of {len(lengths)} lengths, {lengths[0]} to {lengths[-1]}."
    )


def _perplexity_table(models: ComparedModels, perplexities: Perplexities, on: str = "") -> Table:
    """Return the table of the perplexity per token: encodings × lengths.

    The last column has the ratio of the perplexity at the longest length to that at the training length.

    Args:
        models: the models.
        perplexities: results on the text.
        on: " on" and the name of the text; empty for the training text.
    """
    last, lengths = perplexities.lengths[-1], perplexities.shown_lengths
    columns = {length: _length_column(perplexities, length) for length in lengths}
    ratios = _ratio_column(perplexities)
    limits = {name: models.methods[name].position_limit(perplexities.train_length) for name in perplexities.encodings}
    rows = []
    for name in perplexities.encodings:
        cells = _perplexity_cells(perplexities, name, limits[name], columns)
        last_ratios = perplexities.ratios_by_length(name).get(last, [])
        cell = cell_with_range(ratios.means[name], ".3f", last_ratios, ratios.best)
        cells.append(ratios.mark(cell, name, ".3f"))
        method = models.methods[name]
        spec = f"{method.rpe}, evaluated as {method.rpe_eval}" if method.rpe_eval else method.rpe
        rows.append(TableRow(name, cells, spec if spec != name else ""))
    ratio = f"{last} / {perplexities.train_length}"
    caption = f"Perplexity per token{on} by evaluation length, and in the last column the ratio {ratio}."
    if models.seeds > 1:
        caption += " Mean over the seeds; below it the range over seeds."
    if about_errors := _about_errors(perplexities):
        caption += f" {about_errors}"
    if len(lengths) < len(perplexities.lengths):
        caption += f" The table has {len(lengths)} of {len(perplexities.lengths):,} lengths; the CSV file has all."
    if any(limit is not None and limit < last for limit in limits.values()):
        caption += " Ends at N: the method has positions for at most N tokens, so it is not evaluated beyond."
    return Table(caption, ["encoding", *map(str, lengths), ratio], rows, best_label="least")


def _perplexity_cells(
    perplexities: Perplexities, name: str, limit: int | None, columns: Mapping[int, _Column]
) -> list[Cell]:
    """Return the cells of one method at each shown length.

    Args:
        perplexities: results on the text.
        name: name of the method.
        limit: number of tokens that the method has positions for; None: any number.
        columns: means of all methods, by length.
    """
    seeds = perplexities.values_by_length(name)
    cells = []
    for length in perplexities.shown_lengths:
        if limit is not None and length > limit:
            cells.append(text_cell(f"ends at {limit}"))
            continue
        values = seeds.get(length, [])
        seed_range = f"{min(values):.2f}–{max(values):.2f}" if len(values) > 1 else ""
        column = columns[length]
        cells.append(column.mark(number_cell(column.means[name], ".2f", column.best, seed_range), name, ".2f"))
    return cells


def _length_column(perplexities: Perplexities, length: int) -> _Column:
    """Return the perplexities of all methods at one length."""
    means = {name: perplexities.mean_by_length(name).get(length) for name in perplexities.encodings}
    return _Column.compare(means, {name: perplexities.losses_by_length(name).get(length) for name in means})


def _is_paired(perplexities: Perplexities, length: int) -> bool:
    """Return whether all methods with a perplexity at a length have losses of the same segments."""
    names = [name for name in perplexities.encodings if length in perplexities.mean_by_length(name)]
    losses = [perplexities.losses_by_length(name).get(length) for name in names]
    return len({scores and scores.identity for scores in losses}) == 1 and None not in losses


def _ratio_column(perplexities: Perplexities) -> _Column:
    """Return the ratios of the perplexity at the longest length to that at the training length."""
    means = {name: perplexities.final_ratio(name) for name in perplexities.encodings}
    return _Column.compare(means, {name: perplexity_figures.loss_change(perplexities, name) for name in means})


def _about_errors(perplexities: Perplexities) -> str:
    """Return in words what ± and the mark of the table are; nothing if no result has segments."""
    losses = [
        by_length for name in perplexities.encodings for by_length in perplexities.losses_by_length(name).values()
    ]
    if not losses:
        return ""
    clusters = uncertainty.describe_clusters(losses)
    seeds = max(
        len(values) for name in perplexities.encodings for values in perplexities.values_by_length(name).values()
    )
    of = "these trained models, whose losses are averaged over the seeds" if seeds > 1 else "these trained models"
    text = f"±: half of the 95 % interval over {clusters}, for {of}."
    if len(perplexities.encodings) > 1:
        text += (
            f" {uncertainty.TIE_MARK}: not shown to differ from the lowest value of the column ({clusters}, paired; "
            "Holm's correction for the methods of the column, p ≥ 0.05)."
        )
        if not all(_is_paired(perplexities, length) for length in perplexities.shown_lengths):
            text += " Columns in which not all methods have losses of the same segments have no such mark."
    return text


def _seed_differences(perplexities: Perplexities) -> list[Block]:
    """Build the table of differences between methods over seeds; nothing for one seed or one method.

    Seeds of two methods are paired, because they have the order of the data and the initial weights in common.
    """
    lengths = dict.fromkeys((perplexities.train_length, perplexities.lengths[-1]))
    columns = {length: _seed_ratios(perplexities, length) for length in lengths}
    seeds = max((ratio.clusters for column in columns.values() for ratio in column.ratios.values()), default=0)
    if seeds < 2:
        return []
    rows = []
    for name in perplexities.encodings:
        cells = []
        for column in columns.values():
            ratio = column.ratios.get(name)
            text = "lowest" if column.ratios and name == column.lowest else None
            if ratio is not None:
                text = f"{2**ratio.mean:.3f} ({2**ratio.low:.3f} to {2**ratio.high:.3f})"
            cells.append(text_cell(text))
        rows.append(TableRow(name, cells))
    caption = (
        f"Perplexity divided by the lowest one of the column, geometric mean over {seeds} seeds, and its 95 % t "
        "interval over the seeds, which covers the variation between trainings and not the choice of the text. An "
        "interval with 1 in it shows no difference of the methods."
    )
    return [Table(caption, ["encoding", *(f"at {length}" for length in lengths)], rows)]


class _SeedRatios(NamedTuple):
    """The methods compared at one length, with the seeds that they have in common.

    Attributes:
        lowest: method with the lowest perplexity.
        ratios: log2 of the ratio of a method's perplexity to the lowest one, over the seeds that both have; methods
            that share fewer than two seeds with it are left out.
    """

    lowest: str
    ratios: dict[str, Estimate]


def _seed_ratios(perplexities: Perplexities, length: int) -> _SeedRatios:
    """Compare the methods at one length over seeds."""
    by_seed = {
        name: {row.seed: row.result.ppl for row in perplexities.results_for(name) if row.result.length == length}
        for name in perplexities.encodings
    }
    means = {name: perplexities.mean_by_length(name).get(length, math.inf) for name in by_seed}
    best = min(means, key=means.__getitem__)
    ratios = {}
    for name, values in by_seed.items():
        shared = values.keys() & by_seed[best].keys()
        if name != best and len(shared) > 1:
            ratios[name] = mean_over_seeds([math.log2(values[seed] / by_seed[best][seed]) for seed in sorted(shared)])
    return _SeedRatios(best, ratios)


def _mean_over_lengths(perplexities: Perplexities) -> list[Block]:
    """Build the figure of the mean over lengths; nothing for one length or one method."""
    lengths = perplexities.shared_lengths
    if len(lengths) < 2 or len(perplexities.encodings) < 2:
        return []
    values = {name: perplexities.seed_means(name) for name in perplexities.encodings}
    means = ", ".join(f"{name} {sum(seeds) / len(seeds):.2f}" for name, seeds in values.items())
    caption = f"Mean of the perplexities at the {len(lengths)} lengths from {lengths[0]} to {lengths[-1]} tokens."
    return [svg_picture(sweep_curves.draw_mean_perplexity(values, lengths), f"{caption} {means}.", caption)]


def _loss_by_position(perplexities: Perplexities) -> list[Block]:
    """Build figure and table of the loss by position at the longest length that has it; nothing without such results.

    A result has the mean loss of each bucket of positions: 0, 1, 2–3, 4–7, and so on.
    """
    results = [(row.method, row.result.length, row.result.positions_loss) for row in perplexities.results]
    longest = max((length for _, length, buckets in results if buckets), default=None)
    at_longest = [(name, buckets) for name, length, buckets in results if buckets and length == longest]
    if not at_longest:
        return []
    curves: dict[str, list[dict[int, float]]] = {}  # method -> for each seed, loss by last position of the bucket
    for name, buckets in at_longest:
        curves.setdefault(name, []).append(dict(zip(buckets.upto, buckets.loss_base2, strict=True)))
    # results in an edited file may lack some buckets
    shared_ends = sorted(set.intersection(*(set(curve) for seeds in curves.values() for curve in seeds)))
    if not shared_ends:
        return []
    means = {
        name: {end: sum(curve[end] for curve in seeds) / len(seeds) for end in shared_ends}
        for name, seeds in curves.items()
    }
    final = ", ".join(f"{name} {loss[shared_ends[-1]]:.2f}" for name, loss in means.items())
    alt = f"Loss in bits per token against the position in blocks of {longest} tokens. At the end of blocks: {final}."
    caption = f"Loss by position in blocks of {longest} tokens, mean of each doubling of the position."
    picture = svg_picture(sweep_curves.draw_loss_by_position(means), alt, caption)
    _, first_buckets = at_longest[0]
    token_counts = dict(zip(first_buckets.upto, first_buckets.tokens, strict=True))
    return [picture, _position_table(means, token_counts)]


def _position_table(means: Mapping[str, Mapping[int, float]], token_counts: Mapping[int, int]) -> Table:
    """Return the table of loss by bucket of positions, and of the number of tokens in each bucket.

    Args:
        means: loss by method and last position of the bucket.
        token_counts: number of tokens by last position of the bucket.
    """
    ends = list(next(iter(means.values())))
    begins = [0, *(end + 1 for end in ends[:-1])]
    head = [str(end) if begin == end else f"{begin}–{end}" for begin, end in zip(begins, ends, strict=True)]
    rows = [TableRow(name, [number_cell(loss[end], ".3f") for end in ends]) for name, loss in means.items()]
    rows.append(TableRow("tokens scored", [number_cell(token_counts[end], ",d") for end in ends]))
    return Table("Loss in bits per token by position in the block, from 0.", ["position", *head], rows)


def _measurements(perplexities: Perplexities) -> Table:
    """Return the table with a row for each result, with its costs if they are recorded."""
    titles = {"seconds": "seconds", "peak_mb": "peak memory (MiB)", "engine": "engine"}
    costs = [key for key in titles if any(getattr(row.result, key) is not None for row in perplexities.results)]
    head = ["encoding", "seed", "length", "perplexity", "bits per token", "ratio", "tokens"]
    errors = [uncertainty.perplexity_columns(row.result) for row in perplexities.results]
    has_errors = any(clusters is not None for *_, clusters, _ in errors)
    head += uncertainty.error_titles() if has_errors else []
    rows = []
    for row, columns in zip(perplexities.results, errors, strict=True):
        r = row.result
        cells = [Cell(str(row.seed), row.seed), Cell(str(r.length), r.length)]
        cells += [number_cell(r.ppl, ".4f"), number_cell(r.loss_base2, ".5f"), number_cell(row.ratio, ".4f")]
        cells.append(number_cell(r.tokens, ",d"))
        cells += uncertainty.error_cells(columns, ".4f") if has_errors else []
        for key in costs:
            value = getattr(r, key)
            cells.append(number_cell(value, ".1f") if isinstance(value, (int, float)) else text_cell(value))
        rows.append(TableRow(row.method, cells))
    caption = "Contents of results.csv, and costs of each measurement."
    return Table(caption, [*head, *(titles[key] for key in costs)], rows, is_folded=True)
