"""Chapters on a sweep on text: perplexity over length, loss by position, Definition 0.1."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from matplotlib.figure import Figure

from fairseq_rpe.evaluation.position_limits import max_length
from fairseq_rpe.figures import sweep_curves
from fairseq_rpe.reports.chapters import published_comparison
from fairseq_rpe.reports.chapters.training import TrainedRun, own_settings
from fairseq_rpe.reports.extrapolation_definition import unused_context_reasons
from fairseq_rpe.reports.page import Block, Part, Picture, ReportContent, Text, markdown, svg_picture
from fairseq_rpe.reports.sweep_results import Perplexities
from fairseq_rpe.sweeps.sweep_record import SweepRecord
from fairseq_rpe.utils.table import Cell, Table, TableRow, cell_with_range, lowest, number_cell, text_cell


class _LengthBlocks(NamedTuple):
    """Perplexity over length on one text: the table, and the figure for the page and for files."""

    table: Table
    picture: Picture
    figure: Figure


def build_content(
    record: SweepRecord, runs: Sequence[TrainedRun], perplexities: Perplexities, theory: list[Block]
) -> ReportContent:
    """Build the report of a sweep on text.

    Args:
        record: record of the sweep.
        runs: trained runs; empty for models that no sweep has trained.
        perplexities: results.
        theory: blocks on Definition 0.1, the chapter "Does it extrapolate?".

    Returns:
        The chapters; ``other_figures`` has the figure of each further text by its name.
    """
    published = published_comparison.comparison_blocks(record, runs, perplexities)
    notes = _continued_training(record, perplexities)
    main = _over_length(record, perplexities)
    texts = {name: _over_length(record, results, name) for name, results in perplexities.other_texts.items()}
    over_length = [main.table, *notes, main.picture, *_mean_over_lengths(perplexities)]
    # of the comparison with published values only its first block, the warning, and its last, the values
    summary = [*notes, *(text.table for text in texts.values()), *theory, *published[:1], *published[-1:]]
    return ReportContent(
        lead=_lead(record, perplexities, own_settings(record, runs).data),
        parts=[
            Part("perplexity", "Perplexity over length", over_length),
            *(
                Part(f"perplexity-{name}", f"Perplexity on {name}", [text.table, text.picture])
                for name, text in texts.items()
            ),
            Part("published", "Comparison with published values", published),
            Part("positions", "Loss by position", _loss_by_position(perplexities)),
            Part("verdict", "Does it extrapolate?", theory),
        ],
        build_measurements=partial(_measurements, perplexities),
        markdown=main.table.to_markdown() + markdown(summary),
        figure=main.figure,
        other_figures={name: text.figure for name, text in texts.items()},
    )


def _over_length(record: SweepRecord, perplexities: Perplexities, text: str = "") -> _LengthBlocks:
    """Table and figure on one text; ``text`` is its name, or "" for the training text."""
    on = f" on {text}" if text else ""
    train_length = perplexities.train_length
    curves = {name: perplexities.values_by_length(name) for name in perplexities.encodings}
    ratios = {name: perplexities.ratios_by_length(name) for name in perplexities.encodings}
    figure = sweep_curves.draw_perplexity(curves, ratios, train_length, text)
    alt = "; ".join(
        f"{name} " + ", ".join(f"{means[n]:.2f} at {n}" for n in perplexities.shown_lengths if n in means)
        for name in perplexities.encodings
        if (means := perplexities.mean_by_length(name))
    )
    caption = (
        f"Perplexity per token{on} against evaluation length; dashed: the training length of {train_length} tokens."
    )
    if len(figure.axes) > 1:
        caption += f" Below: ratio to the perplexity at {train_length} tokens, enlarged."
    if len(record.seeds) > 1:
        caption += " Mean over the seeds; bars from the lowest to the highest seed."
    picture = svg_picture(figure, f"Perplexity per token{on} against evaluation length: {alt}.", caption)
    return _LengthBlocks(_perplexity_table(record, perplexities, on), picture, figure)


def _continued_training(record: SweepRecord, perplexities: Perplexities) -> list[Text]:
    """Note on methods that continue the training of others."""
    notes = []
    for method in map(record.method, perplexities.encodings):
        if method.continues:
            updates = f" for {method.further.updates:,} updates" if method.further.updates else ""
            length = f" at {method.further.tokens} tokens" if method.further.tokens else ""
            notes.append(f"{method.name} continues the training of {method.continues}{updates}{length}")
    if not notes:
        return []
    definition = "; Definition 0.1 uses the length of the continued training" if perplexities.continued_lengths else ""
    return [Text(f"{'; '.join(notes)}. Continued methods have had more training than the others{definition}.")]


def _lead(record: SweepRecord, perplexities: Perplexities, data: str | None) -> list[str]:
    settings, encodings, lengths = record.settings, perplexities.encodings, perplexities.lengths
    scored = " or ".join(f"{n:,}" for n in sorted({row.result.tokens for row in perplexities.results}))
    first, last = perplexities.train_length, lengths[-1]
    kind = "encodings" if all(record.method(name).leaves_positions for name in encodings) else "methods"
    count = f"{len(encodings)} {kind if len(encodings) > 1 else kind[:-1]}"
    text = f" on {data}" if data else ""
    updates = f" for {settings.updates:,} updates" if settings.updates is not None else ""
    lead = [
        f"{count}, trained at {first} tokens{text}{updates}; {scored} tokens of the {settings.split} split scored at "
        f"each of {len(lengths)} lengths, {lengths[0]} to {last}."
    ]
    for n in dict.fromkeys((first, last)):
        values = {name: means[n] for name in encodings if n in (means := perplexities.mean_by_length(name))}
        if values:
            best = min(values, key=values.__getitem__)
            lead.append(f"Lowest perplexity at {n} tokens: {best}, {values[best]:.2f}.")
    untrained = [name for name in encodings if unused_context_reasons(perplexities, name)]
    if untrained:
        lead.append(f"Not trained for long enough to use the context, so no verdict: {', '.join(untrained)}.")
    ratios = [ratio for name in encodings if (ratio := perplexities.final_ratio(name)) is not None]
    if ratios and last > first:
        not_higher = sum(ratio <= 1 for ratio in ratios)
        lead.append(f"At {last} tokens {not_higher} of {len(ratios)} have no higher perplexity than at {first}.")
    return lead


def _perplexity_table(record: SweepRecord, perplexities: Perplexities, on: str = "") -> Table:
    """Perplexity per token, encodings × lengths; last column: longest length over training length."""
    last, lengths = perplexities.lengths[-1], perplexities.shown_lengths
    means = {name: perplexities.mean_by_length(name) for name in perplexities.encodings}
    best = {n: lowest([row.get(n) for row in means.values()]) for n in lengths}
    best_ratio = lowest([perplexities.final_ratio(name) for name in means])
    rows, any_limit = [], False
    for name, row in means.items():
        seeds = perplexities.values_by_length(name)
        spans = {n: f"{min(v):.2f}–{max(v):.2f}" for n in lengths if len(v := seeds.get(n, ())) > 1}
        method = record.method(name)
        limit = max_length(method.positions_eval, perplexities.train_length)
        cells = [
            number_cell(row.get(n), ".2f", best[n], spans.get(n, ""))
            if limit is None or n <= limit
            else text_cell(f"ends at {limit}")
            for n in lengths
        ]
        any_limit |= limit is not None and limit < last
        ratios = perplexities.ratios_by_length(name).get(last, [])
        cells.append(cell_with_range(perplexities.final_ratio(name), ".3f", ratios, best_ratio))
        spec = f"{method.rpe}, evaluated as {method.rpe_eval}" if method.rpe_eval else method.rpe
        rows.append(TableRow(name, cells, spec if spec != name else ""))
    ratio = f"{last} / {perplexities.train_length}"
    caption = f"Perplexity per token{on} by evaluation length, and in the last column the ratio {ratio}."
    if len(record.seeds) > 1:
        caption += " Mean over the seeds; below it the range over seeds."
    if len(lengths) < len(perplexities.lengths):
        caption += f" The table has {len(lengths)} of {len(perplexities.lengths):,} lengths; the CSV file has all."
    if any_limit:
        caption += " Ends at N: the method has positions for at most N tokens, so it is not evaluated beyond."
    return Table(caption, ["encoding", *map(str, lengths), ratio], rows, best_label="least")


def _mean_over_lengths(perplexities: Perplexities) -> list[Block]:
    """Figure of the mean over lengths; nothing for one length or one method."""
    lengths = perplexities.shared_lengths
    if len(lengths) < 2 or len(perplexities.encodings) < 2:
        return []
    values = {name: perplexities.seed_means(name) for name in perplexities.encodings}
    means = ", ".join(f"{name} {sum(seeds) / len(seeds):.2f}" for name, seeds in values.items())
    caption = f"Mean of the perplexities at the {len(lengths)} lengths from {lengths[0]} to {lengths[-1]} tokens."
    return [svg_picture(sweep_curves.draw_mean_perplexity(values, lengths), f"{caption} {means}.", caption)]


def _loss_by_position(perplexities: Perplexities) -> list[Block]:
    """Loss by position at the longest length that has it; nothing if no result has it."""
    results = [(row.method, row.result.length, row.result.positions_loss) for row in perplexities.results]
    measured = [(name, length, buckets) for name, length, buckets in results if buckets]
    if not measured:
        return []
    longest = max(length for _, length, _ in measured)
    at_longest = [(name, buckets) for name, length, buckets in measured if length == longest]
    curves: dict[str, list[dict[int, float]]] = {}
    for name, buckets in at_longest:
        curves.setdefault(name, []).append(dict(zip(buckets.upto, buckets.loss_base2, strict=True)))
    # buckets that all results have: an edited file may lack some
    shared_ends = sorted(set.intersection(*(set(curve) for seeds in curves.values() for curve in seeds)))
    if not shared_ends:
        return []
    means = {
        name: {n: sum(curve[n] for curve in seeds) / len(seeds) for n in shared_ends} for name, seeds in curves.items()
    }
    final = ", ".join(f"{name} {list(loss.values())[-1]:.2f}" for name, loss in means.items())
    alt = f"Loss in bits per token against the position in blocks of {longest} tokens. At the end of blocks: {final}."
    caption = f"Loss by position in blocks of {longest} tokens, mean of each doubling of the position."
    first = at_longest[0][1]
    counts = {n: count for n, count in zip(first.upto, first.tokens, strict=True) if n in shared_ends}
    picture = svg_picture(sweep_curves.draw_loss_by_position(means), alt, caption)
    return [picture, _position_table(means, counts)]


def _position_table(means: Mapping[str, Mapping[int, float]], counts: Mapping[int, int]) -> Table:
    """Positions of each bucket, loss of each method, and number of tokens."""
    ends = list(next(iter(means.values())))
    begins = [0, *(end + 1 for end in ends)]
    head = [str(end) if begin == end else f"{begin}–{end}" for begin, end in zip(begins, ends, strict=False)]
    rows = [TableRow(name, [number_cell(loss.get(end), ".3f") for end in ends]) for name, loss in means.items()]
    rows.append(TableRow("tokens scored", [number_cell(counts.get(end), ",d") for end in ends]))
    return Table("Loss in bits per token by position in the block, from 0.", ["position", *head], rows)


def _measurements(perplexities: Perplexities) -> Table:
    """Every result, with its costs if they are recorded."""
    titles = {"seconds": "seconds", "peak_mb": "peak memory (MiB)", "engine": "engine"}
    costs = [key for key in titles if any(getattr(row.result, key) is not None for row in perplexities.results)]
    head = ["encoding", "seed", "length", "perplexity", "bits per token", "ratio", "tokens"]
    rows = []
    for row in perplexities.results:
        r = row.result
        cells = [Cell(str(row.seed), row.seed), Cell(str(r.length), r.length)]
        cells += [number_cell(r.ppl, ".4f"), number_cell(r.loss_base2, ".5f"), number_cell(row.ratio, ".4f")]
        cells.append(number_cell(r.tokens, ",d"))
        for key in costs:
            value = getattr(r, key)
            cells.append(number_cell(value, ".1f") if isinstance(value, (int, float)) else text_cell(value))
        rows.append(TableRow(row.method, cells))
    caption = "Contents of results.csv, and costs of each measurement."
    return Table(caption, [*head, *(titles[key] for key in costs)], rows, is_folded=True)
