"""A sweep on text: perplexities over length, loss by position, Definition 0.1."""

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from fairseq_rpe.evaluation.position_limits import longest_row
from fairseq_rpe.figures import sweep_curves
from fairseq_rpe.reports.chapters import published_comparison
from fairseq_rpe.reports.chapters.training import Run, here
from fairseq_rpe.reports.extrapolation_definition import contextless
from fairseq_rpe.reports.page import Block, Findings, Part, Picture, Text, markdown, picture
from fairseq_rpe.reports.sweep_results import Perplexities
from fairseq_rpe.sweeps.sweep_record import State
from fairseq_rpe.utils.table import Cell, Row, Table, least, number, spread, words


def findings(state: State, runs: Sequence[Run], found: Perplexities, theory: list[Block]) -> Findings:
    """What a sweep found; ``theory``: what Definition 0.1 says of it."""
    beside, further = published_comparison.blocks(state, runs, found), _further(state, found)
    values, drawn, figure = _over_length(state, found)
    others = {name: _over_length(state, of, name) for name, of in found.others.items()}
    texts = [Part(f"perplexity-{name}", f"The same on {name}", own[:2]) for name, own in others.items()]
    return Findings(
        _lead(state, found, here(state, runs).data),
        [
            Part("perplexity", "Perplexity over length", [values, *further, drawn, *_mean(found)]),
            *texts,
            Part("published", "Beside the published values", beside),
            Part("positions", "Loss by position", _positions(found)),
            Part("verdict", "Does it extrapolate?", theory),
        ],
        partial(_measurements, found),
        # of what stands beside, the caution and the values
        values.markdown()
        + markdown([*further, *(own[0] for own in others.values()), *theory, *beside[:1], *beside[-1:]]),
        figure,
        {name: own[2] for name, own in others.items()},
    )


def _over_length(state: State, found: Perplexities, text: str = "") -> tuple[Table, Picture, Figure]:
    """Table and figure on one text, ``text`` if it is not the one that was trained on."""
    on = f" on {text}" if text else ""
    curves, ratios = ({name: of(name) for name in found.encodings} for of in (found.of, found.ratios))
    figure = sweep_curves.perplexity(curves, ratios, found.trained_at, text)
    alt = "; ".join(
        f"{name} " + ", ".join(f"{means[n]:.2f} at {n}" for n in found.shown_lengths if n in means)
        for name in found.encodings
        if (means := found.means(name))
    )
    drawn = picture(
        figure,
        f"Perplexity per token{on} against evaluation length: {alt}.",
        f"Perplexity per token{on} against evaluation length; dashed: the training length of {found.trained_at} tokens."
        + (f" Below: over the perplexity at {found.trained_at} tokens, enlarged." if len(figure.axes) > 1 else "")
        + (" Mean over the seeds; bars from the least to the largest." if len(state.seeds) > 1 else ""),
    )
    return _table(state, found, on), drawn, figure


def _further(state: State, found: Perplexities) -> list[Text]:
    """What the training of methods that continue others was."""
    lines = []
    for method in map(state.method, found.encodings):
        if method.continues:
            updates = f" for {method.further.updates:,} updates" if method.further.updates else ""
            at = f" at {method.further.tokens} tokens" if method.further.tokens else ""
            lines.append(f"{method.name} continues the training of {method.continues}{updates}{at}")
    if not lines:
        return []
    judged = "; Definition 0.1 goes by the length of the further training" if found.longer else ""
    return [Text(f"{'; '.join(lines)}. So more training went into what continues than into the rest{judged}.")]


def _lead(state: State, found: Perplexities, data: str | None) -> list[str]:
    settings, encodings, lengths = state.settings, found.encodings, found.lengths
    scored = " or ".join(f"{n:,}" for n in sorted({row.result.tokens for row in found.rows}))
    first, last = found.trained_at, lengths[-1]
    kind = "encodings" if all(state.method(name).leaves_positions for name in encodings) else "methods"
    trained = f", trained at {first} tokens" + (f" on {data}" if data else "")
    updates = f" for {settings.updates:,} updates" if settings.updates is not None else ""
    lead = [
        f"{len(encodings)} {kind if len(encodings) > 1 else kind[:-1]}{trained}{updates}; {scored} tokens of the "
        f"{settings.subset} split scored at each of {len(lengths)} lengths, {lengths[0]} to {last}."
    ]
    for n in dict.fromkeys((first, last)):
        values = {name: means[n] for name in encodings if n in (means := found.means(name))}
        if values:
            best = min(values, key=values.__getitem__)
            lead.append(f"Lowest perplexity at {n} tokens: {best}, {values[best]:.2f}.")
    unused = [name for name in encodings if contextless(found, name)]
    if unused:
        lead.append(f"Not trained for long enough to use the context, so no verdict: {', '.join(unused)}.")
    ratios = [ratio for name in encodings if (ratio := found.ratio(name)) is not None]
    if ratios and last > first:
        held = sum(ratio <= 1 for ratio in ratios)
        lead.append(f"At {last} tokens {held} of {len(ratios)} have no higher perplexity than at {first}.")
    return lead


def _table(state: State, found: Perplexities, on: str = "") -> Table:
    """Perplexity per token, encodings × lengths; the last column is the longest over the training length."""
    last, lengths = found.lengths[-1], found.shown_lengths
    means = {name: found.means(name) for name in found.encodings}
    best = {n: least([row.get(n) for row in means.values()]) for n in lengths}
    smallest = least([found.ratio(name) for name in means])
    rows, ended = [], False
    for name, row in means.items():
        seeds = found.of(name)
        spans = {n: f"{min(v):.2f}–{max(v):.2f}" for n in lengths if len(v := seeds.get(n, ())) > 1}
        end = longest_row(state.method(name).positions_eval, found.trained_at)
        cells = [
            number(row.get(n), ".2f", best[n], spans.get(n, "")) if end is None or n <= end else words(f"ends at {end}")
            for n in lengths
        ]
        ended |= end is not None and end < last
        cells.append(spread(found.ratio(name), ".3f", found.ratios(name).get(last, []), smallest))
        method = state.method(name)
        spec = f"{method.rpe}, evaluated as {method.rpe_eval}" if method.rpe_eval else method.rpe
        rows.append(Row(name, cells, spec if spec != name else ""))
    ratio = f"{last} / {found.trained_at}"
    caption = f"Perplexity per token{on} by evaluation length and, last, its ratio {ratio}."
    if len(state.seeds) > 1:
        caption += " Mean over the seeds, least to largest below it."
    if len(lengths) < len(found.lengths):
        caption += f" It shows {len(lengths)} of {len(found.lengths):,} lengths; the CSV file has all."
    if ended:
        caption += " Ends at N: the method has positions for rows of up to N tokens, so it is not evaluated beyond."
    return Table(caption, ["encoding", *map(str, lengths), ratio], rows, starred="least")


def _mean(found: Perplexities) -> list[Block]:
    """The mean over lengths; nothing of one length alone or one method alone."""
    lengths = found.shared_lengths
    if len(lengths) < 2 or len(found.encodings) < 2:
        return []
    values = {name: found.over_lengths(name) for name in found.encodings}
    said = ", ".join(f"{name} {sum(seeds) / len(seeds):.2f}" for name, seeds in values.items())
    caption = f"Mean of the perplexities at the {len(lengths)} lengths from {lengths[0]} to {lengths[-1]} tokens."
    return [picture(sweep_curves.mean_perplexity(values, lengths), f"{caption} {said}.", caption)]


def _positions(found: Perplexities) -> list[Block]:
    """At the longest length at which it is on record; nothing where no evaluation looked at positions."""
    looked = [(row.method, one, row.result.length) for row in found.rows if (one := row.result.positions_loss)]
    if not looked:
        return []
    longest = max(length for _, _, length in looked)
    curves: dict[str, list[dict[int, float]]] = {}
    for name, one, length in looked:
        if length == longest:
            curves.setdefault(name, []).append(dict(zip(one.upto, one.loss_base2, strict=True)))
    # those that all results have: an edited file may lack some
    ends_of_all = sorted(set.intersection(*(set(one) for seeds in curves.values() for one in seeds)))
    if not ends_of_all:
        return []
    means = {
        name: {n: sum(one[n] for one in seeds) / len(seeds) for n in ends_of_all} for name, seeds in curves.items()
    }
    ends = ", ".join(f"{name} {list(loss.values())[-1]:.2f}" for name, loss in means.items())
    alt = f"Loss in bits per token against the position in blocks of {longest} tokens. At their ends: {ends}."
    caption = f"Loss by position in blocks of {longest} tokens, mean of each doubling of the position."
    counted = next(one for _, one, length in looked if length == longest)
    counts = {n: count for n, count in zip(counted.upto, counted.tokens, strict=True) if n in ends_of_all}
    return [picture(sweep_curves.positions(means), alt, caption), _by_position(means, counts)]


def _by_position(means: Mapping[str, Mapping[int, float]], counts: Mapping[int, int]) -> Table:
    """The same in numbers: the positions of each bucket, how many tokens were there, and the loss of each method."""
    ends = list(next(iter(means.values())))
    begins = [0, *(end + 1 for end in ends)]
    head = [str(end) if begin == end else f"{begin}–{end}" for begin, end in zip(begins, ends, strict=False)]
    rows = [Row(name, [number(loss.get(end), ".3f") for end in ends]) for name, loss in means.items()]
    rows.append(Row("tokens scored", [number(counts.get(end), ",d") for end in ends]))
    return Table("Loss in bits per token by position in the block, from 0.", ["position", *head], rows)


def _measurements(found: Perplexities) -> Table:
    """Every row, with what its measurement took where that is on record."""
    titles = {"seconds": "seconds", "peak_mb": "peak memory (MiB)", "engine": "engine"}
    more = [key for key in titles if any(getattr(row.result, key) is not None for row in found.rows)]
    head = ["encoding", "seed", "length", "perplexity", "bits per token", "ratio", "tokens"]
    lines = []
    for row in found.rows:
        one = row.result
        cells = [Cell(str(row.seed), row.seed), Cell(str(one.length), one.length)]
        cells += [number(one.ppl, ".4f"), number(one.loss_base2, ".5f"), number(row.ratio, ".4f")]
        cells.append(number(one.tokens, ",d"))
        for key in more:
            value = getattr(one, key)
            cells.append(number(value, ".1f") if isinstance(value, (int, float)) else words(value))
        lines.append(Row(row.method, cells))
    caption = "What results.csv holds, and what each measurement took."
    return Table(caption, [*head, *(titles[key] for key in more)], lines, folded=True)
