"""A sweep beside what was published: the values, what differs, and the trends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from fairseq_rpe.core.table import Cell, Row, Table, least, number, words
from fairseq_rpe.reports.chapters.training import Run, batch, data_name, vocabulary
from fairseq_rpe.reports.findings import Perplexities
from fairseq_rpe.reports.page import NOT_RECORDED, Block, Text
from fairseq_rpe.runs.settings import full_name
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.recipes import Recipe
from fairseq_rpe.sweeps.state import Published, PublishedSettings, State

_YES, _NO, _OPEN = "yes", "no", "not verified"


def recipe_of(state: State) -> Recipe | None:
    """The bundled recipe of a sweep; one of the user's own may have changed since."""
    return recipes.load(state.recipe) if state.recipe in recipes.names() else None


def title(state: State) -> str:
    """That of a sweep's recipe, nothing if it has none or is not known any more."""
    recipe = recipe_of(state)
    return state.title or (recipe.title if recipe else "")


def paper(state: State) -> str:
    """The same of the paper."""
    recipe = recipe_of(state)
    return state.paper or (recipe.paper if recipe else "")


def published(state: State) -> Published | None:
    """What is on record of the published experiment; a sweep of an older version lacks a part of it."""
    recipe, known = recipe_of(state), state.published
    if known and known.settings is None and recipe and recipe.published:
        more = recipe.published
        return replace(more, source=known.source, url=known.url or more.url, values=known.values)
    return known


def table(state: State) -> Table | None:
    """The published values of the methods that were compared, by length; nothing if there are none."""
    known = published(state)
    values = _values(known, state) if known else {}
    if not known or not values:
        return None
    lengths = sorted({n for found in values.values() for n in found})
    best = {n: least([found.get(n) for found in values.values()]) for n in lengths}
    rows = [Row(name, [number(v.get(n), known.form, best[n]) for n in lengths]) for name, v in values.items()]
    return Table(f"Published: {known.source}.", ["published", *map(str, lengths)], rows, starred="least")


def blocks(state: State, made: Sequence[Run], found: Perplexities | None) -> list[Block]:
    """The caution, what differs and, of a sweep on text, trends and values; nothing where none are published."""
    known, values = published(state), table(state)
    if known is None or (found is not None and values is None):
        return []
    shown: list[Block] = [caution(known)]
    if known.settings:
        shown.append(_differences(state, made, known.settings))
    if found is not None and known.settings and known.settings.tokens:
        shown += _trends(found, _perplexities(known, state), known.settings.tokens)
    return [*shown, values] if found is not None and values else shown


def caution(known: Published) -> Text:
    """What must be said before any published value is shown."""
    text = (
        "Published values cannot be held against those here one by one: tokeniser, data, model size and schedule "
        "differ or could not be verified to be the same. Compare trends only. Source:"
    )
    return Text(text, known.source, known.url or "", plain_warning=True)


def _differences(state: State, made: Sequence[Run], there: PublishedSettings) -> Table:
    """The setting here beside the published one, as far as either is known."""
    here = state.settings
    rows = []

    def compare(name: str, own: object, other: object, same: str) -> None:
        rows.append(Row(name, [_said(own), _said(other), words(same)]))

    if there.data is not None:
        data = None if state.algorithms else data_name(state, made)
        alike = data is not None and _plain(PurePath(data).name) == _plain(there.data)
        compare("data", data, there.data, f"{_OPEN}: the same name" if alike else _NO if data else _OPEN)
    if there.tokeniser is not None or there.vocabulary is not None:
        own = vocabulary(made)
        types = [f"{n:,} types" if n else None for n in (own, there.vocabulary)]
        other = own and there.vocabulary and own != there.vocabulary
        compare("tokeniser", types[0], ", ".join(filter(None, (there.tokeniser, types[1]))), _NO if other else _OPEN)
    if there.model is not None:
        open_ = there.arch is None or bool(here.extra)
        same = _OPEN if open_ else _YES if full_name(str(there.arch)) == here.arch else _NO
        compare("model", here.arch, there.model, same)
    for name, own, other in (
        ("training length", here.tokens, there.tokens),
        ("sequences an update", batch(state) or None, there.batch_sentences),
        ("updates", here.updates, there.updates),
        ("peak learning rate", here.lr, there.lr),
        ("updates of warm-up", here.warmup, there.warmup),
        ("schedule", here.schedule or (None if here.lr is None else "inverse_sqrt"), there.schedule),
    ):
        if other is not None:
            compare(name, own, other, _OPEN if own is None else _YES if own == other else _NO)
    return Table("What is the same and what is not.", ["", "here", "published", "same?"], rows, words=True)


def _values(known: Published, state: State) -> dict[str, dict[int, float]]:
    """As printed, by length in tokens; nothing for published results by task."""
    if state.algorithms:
        return {}
    named = {name: row for name, row in known.values.items() if name in state.encodings}
    return {name: {int(n): value for n, value in row.items()} for name, row in named.items()}


def _perplexities(known: Published, state: State) -> dict[str, dict[int, float]]:
    values = _values(known, state)
    if known.measure != "log_ppl":
        return values
    return {name: {n: math.exp(value) for n, value in row.items()} for name, row in values.items()}


def _said(value: object) -> Cell:
    if isinstance(value, (int, float)):
        return Cell(f"{value:,}" if isinstance(value, int) else f"{value:g}", value)
    return words(NOT_RECORDED if value is None else value)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _trends(found: Perplexities, values: Mapping[str, Mapping[int, float]], there: int) -> list[Table]:
    """Perplexity over that at the training length, at the multiples of it that both have."""
    here = found.trained_at
    multiples = [
        n // here
        for n in found.lengths
        if n > here and n % here == 0 and all(there * (n // here) in row for row in values.values())
    ]
    if not all(there in row for row in values.values()):
        return []
    rows = []
    for name, row in values.items():
        ours = found.means(name)
        if here not in ours:
            continue
        cells = []
        for m in multiples:
            own = ours[here * m] / ours[here] if here * m in ours else None
            cells += [number(own, ".3f"), number(row[there * m] / row[there], ".3f")]
        rows.append(Row(name, cells))
    caption = (
        f"Trends: perplexity over the one at the training length L ({here} here, {there} published), at multiples of "
        "L; below 1 is better than at L."
    )
    head = ["", *(["here", "published"] * len(multiples))]
    return [Table(caption, head, rows, groups=[f"{m} L" for m in multiples])] if rows and multiples else []
