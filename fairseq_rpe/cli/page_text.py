"""The page on a sweep over text: perplexities, the published ones beside them, Definition 0.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq_rpe.cli import definition, figure, page_published, report
from fairseq_rpe.cli.definition import Judged
from fairseq_rpe.cli.page import Block, Cell, Part, Row, Section, Table, Text, least, number, picture, words
from fairseq_rpe.cli.page_runs import Run, parts, runs

_DEFINITION = "Exploring Transformer Extrapolation (arXiv 2307.10156)"
_URL = "https://arxiv.org/abs/2307.10156"


def section(
    folder: Path, state: dict[str, Any], rows: list[dict[str, Any]], judged: list[Judged], delta: float
) -> Section:
    """Everything on a sweep; ``rows`` of ``report.collect``."""
    made = runs(folder, state)
    data = data_name(state, made)
    trained_at = state["settings"]["tokens"]
    encodings, lengths = report.names_and_lengths(rows)
    alt = "; ".join(
        f"{name} " + ", ".join(f"{value:.2f} at {n}" for n in lengths if (value := _mean(rows, name, n)) is not None)
        for name in encodings
    )
    drawn = picture(
        figure.perplexity(rows, trained_at),
        f"Perplexity per token against evaluation length: {alt}.",
        f"Perplexity per token against evaluation length; dashed: the training length of {trained_at} tokens.",
    )
    own = [
        Part("perplexity", "Perplexity over length", [_perplexity(state, rows, trained_at), drawn]),
        Part("published", "Beside the published values", page_published.blocks(state, rows, made, data)),
        Part("positions", "Loss by position", _positions(rows)),
        Part("verdict", "Does it extrapolate?", _verdict(judged, trained_at, delta)),
        *parts(state, made),
        Part("measurements", "Every measurement", [_measurements(rows)]),
    ]
    return Section(
        name=folder.resolve().name,
        title=page_published.about(state, "title"),
        lead=_lead(state, rows, data),
        facts=facts(state, made, data),
        parts=[part for part in own if part.blocks],
    )


def data_name(state: dict[str, Any], made: list[Run]) -> str | None:
    """The data folder as it was named, from the sweep's record or from a training log."""
    return state.get("data") or next((run.log.data for run in made if run.log.data), None)


def facts(state: dict[str, Any], made: list[Run], data: str | None) -> list[tuple[str, str]]:
    """What was trained and how, as far as it is on record."""
    settings = state["settings"]
    vocabulary = next((run.log.vocabulary for run in made if run.log.vocabulary), None)
    sizes = sorted({run.log.parameters for run in made if run.log.parameters})
    batch = settings.get("batch_sentences", 0) * settings.get("update_freq", 1) * settings.get("nproc", 1)
    schedule = {"linear": "linear to 0"}.get(settings.get("schedule", ""), "inverse square root")
    training = f"{settings.get('updates', 0):,} updates of {batch} sequences"
    rate = f"{settings.get('lr', 0):g}, {settings.get('warmup')} of warm-up, {schedule}"
    found = [
        ("recipe", state.get("recipe")),
        ("paper", page_published.about(state, "paper")),
        ("tasks", ", ".join(state.get("algorithms") or [])),
        ("compared", ", ".join(state["encodings"])),
        ("data", data),
        ("data, SHA-256", None if state.get("algorithms") else settings.get("data")),
        ("vocabulary", f"{vocabulary:,} types" if vocabulary else None),
        ("architecture", settings.get("arch")),
        ("parameters", " to ".join(f"{n:,}" for n in dict.fromkeys((sizes[0], sizes[-1]))) if sizes else None),
        ("training length", f"{settings['tokens']} tokens" if settings.get("tokens") else None),
        ("training", training if batch and "updates" in settings else None),
        ("learning rate", rate if "lr" in settings else None),
        ("dropout", f"{settings['dropout']:g}" if "dropout" in settings else None),
        ("further flags", " ".join(settings.get("extra") or [])),
        ("seeds", ", ".join(map(str, state["seeds"]))),
    ]
    return [(key, value) for key, value in found if value]


def _lead(state: dict[str, Any], rows: list[dict[str, Any]], data: str | None) -> list[str]:
    settings = state["settings"]
    encodings, lengths = report.names_and_lengths(rows)
    scored = " or ".join(f"{n:,}" for n in sorted({r["tokens"] for r in rows}))
    first, last = settings["tokens"], lengths[-1]
    kind = "encodings" if all(report.leaves_positions(report.method_of(state, n)) for n in encodings) else "methods"
    trained = f", trained at {first} tokens" + (f" on {data}" if data else "")
    updates = f" for {settings['updates']:,} updates" if "updates" in settings else ""
    lead = [
        f"{len(encodings)} {kind if len(encodings) > 1 else kind[:-1]}{trained}{updates}; {scored} tokens of the "
        f"{settings['subset']} split scored at each of {len(lengths)} lengths, {lengths[0]} to {last}."
    ]
    for n in dict.fromkeys((first, last)):
        values = {name: value for name in encodings if (value := _mean(rows, name, n)) is not None}
        if values:
            best = min(values, key=values.__getitem__)
            lead.append(f"Lowest perplexity at {n} tokens: {best}, {values[best]:.2f}.")
    ratios = {name: r for name in encodings if (r := report.mean(rows, name, last, "ratio")) is not None}
    if ratios and last > first:
        held = sum(ratio <= 1 for ratio in ratios.values())
        lead.append(f"At {last} tokens {held} of {len(ratios)} have no higher perplexity than at {first}.")
    return lead


def _mean(rows: list[dict[str, Any]], name: str, length: int) -> float | None:
    return report.mean(rows, name, length, "ppl")


def _perplexity(state: dict[str, Any], rows: list[dict[str, Any]], trained_at: int) -> Table:
    encodings, lengths = report.names_and_lengths(rows)
    last = lengths[-1]
    best = {n: least([_mean(rows, name, n) for name in encodings]) for n in lengths}
    smallest = least([report.mean(rows, name, last, "ratio") for name in encodings])
    lines = []
    for name in encodings:
        cells = [number(_mean(rows, name, n), ".2f", best[n], _span(rows, name, n)) for n in lengths]
        cells.append(number(report.mean(rows, name, last, "ratio"), ".3f", smallest))
        spec = report.method_of(state, name)["rpe"]
        lines.append(Row(name, cells, spec if spec != name else ""))
    ratio = f"{last} / {trained_at}"
    caption = f"Perplexity per token by evaluation length and, last, its ratio {ratio}."
    if len(state["seeds"]) > 1:
        caption += " Mean over the seeds, least to largest below it."
    return Table(f"{caption} ★: least of its column.", ["", *map(str, lengths), ratio], lines)


def _span(rows: list[dict[str, Any]], name: str, length: int) -> str:
    values = [r["ppl"] for r in rows if (r["encoding"], r["length"]) == (name, length)]
    return f"{min(values):.2f}–{max(values):.2f}" if len(values) > 1 else ""


def _positions(rows: list[dict[str, Any]]) -> list[Block]:
    """At the longest length at which it is on record; nothing where no evaluation looked at positions."""
    looked = [r for r in rows if r.get("positions_loss")]
    if not looked:
        return []
    length = max(r["length"] for r in looked)
    curves: dict[str, list[dict[int, float]]] = {}
    for r in looked:
        if r["length"] == length:
            found = r["positions_loss"]
            curves.setdefault(r["encoding"], []).append(dict(zip(found["upto"], found["loss_base2"], strict=True)))
    means = {
        name: {upto: sum(one[upto] for one in seeds) / len(seeds) for upto in seeds[0]}
        for name, seeds in curves.items()
    }
    ends = ", ".join(f"{name} {list(loss.values())[-1]:.2f}" for name, loss in means.items())
    alt = f"Loss in bits per token against the position in blocks of {length} tokens. At their ends: {ends}."
    caption = f"Loss by position in blocks of {length} tokens, mean of each doubling of the position."
    return [picture(figure.positions(means), alt, caption)]


def _verdict(judged: list[Judged], trained_at: int, limit: float) -> list[Block]:
    if not judged:
        return []
    head = ["", "Σ exp(bias) as trained", "largest", "worst rise", "at the end", "extrapolates", "one-sided"]
    lines = []
    for one in judged:
        found = one.found
        numbers = [number(found.largest, ".3f"), number(found.worst, ".3f"), number(found.end, "+.3f")]
        answers = [Cell("yes" if found.extrapolates(limit, side) else "no") for side in (False, True)]
        lines.append(Row(one.name, [words(one.prediction), *numbers, *answers]))
    blocks: list[Block] = [
        Text(
            f"Definition 0.1: a model extrapolates if |ppl_n − ppl_{trained_at}| / ppl_{trained_at} < δ = {limit:g} at "
            f"every length n > {trained_at}; one-sided, improvements are free. Its theorems: it does if Σ exp(bias) "
            "converges.",
            _DEFINITION,
            _URL,
        ),
        Table("Relative deviation from the perplexity at the training length, and what the series says.", head, lines),
    ]
    tables = [definition.observed(judged, limit, side) for side in (False, True)]
    for side, table in enumerate(tables):
        if side and table == tables[0]:
            blocks.append(Text(f"One-sided, the table is the same. {definition.where(judged, True)}"))
            continue
        rows = [Row(label, [_list(names) for names in sides]) for label, sides in table.items()]
        caption = f"Predicted (rows) and observed (columns) at δ = {limit:g}{', one-sided' if side else ''}."
        blocks.append(Table(caption, ["Σ exp(bias)", "extrapolates", "does not"], rows, words=True))
        blocks.append(Text(definition.where(judged, bool(side))))
    return blocks


def _list(names: list[str]) -> Cell:
    return Cell(f"{len(names)}: {', '.join(names)}" if names else "0")


def _measurements(rows: list[dict[str, Any]]) -> Table:
    more = [key for key in ("seconds", "peak_mb", "engine") if any(r.get(key) is not None for r in rows)]
    titles = {"seconds": "seconds", "peak_mb": "peak memory (MiB)", "engine": "engine"}
    head = ["", "seed", "length", "perplexity", "bits per token", "ratio", "tokens", *(titles[key] for key in more)]
    lines = []
    for r in rows:
        cells = [Cell(str(r["seed"]), r["seed"]), Cell(str(r["length"]), r["length"])]
        cells += [number(r["ppl"], ".4f"), number(r["loss_base2"], ".5f"), number(r["ratio"], ".4f")]
        cells.append(number(r["tokens"], ",d"))
        for key in more:
            value = r.get(key)
            cells.append(words(value) if isinstance(value, str) or value is None else number(value, ".1f"))
        lines.append(Row(r["encoding"], cells))
    return Table("What results.csv holds, and what each measurement took.", head, lines, folded=True)
