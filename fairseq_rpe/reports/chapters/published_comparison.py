"""A sweep beside what was published: the values, what differs, and the trends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from fairseq_rpe.checkpoints.model_sizes import full_name, size_of
from fairseq_rpe.reports.chapters.training import TIED, Run, here
from fairseq_rpe.reports.page import NOT_RECORDED, Block, Text
from fairseq_rpe.reports.sweep_results import Perplexities
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.sweep_record import Published, PublishedSettings, State
from fairseq_rpe.utils.table import Cell, Row, Table, least, number, words

_YES, _NO, _OPEN = "yes", "no", "not verified"
_COMPARED = {
    "activation_fn": "activation",
    "share_embeddings": "embeddings",
    "context": "training sequences",
    "tokens": "training length",
    "batch_sentences": "sequences per update",
    "updates": "updates",
    "betas": "betas",
    "weight_decay": "weight decay",
    "lr": "peak learning rate",
    "warmup": "updates of warm-up",
    "schedule": "schedule",
    "min_lr": "rate at its end",
    "clip_norm": "gradients clipped at",
    "dropout": "dropout",
    "attention_dropout": "dropout of attention",
    "activation_dropout": "dropout of activations",
}
_SAME = {True: _YES, False: _NO, None: _OPEN}
_NEAR = 0.02
_NOT_STATED = "not stated"
_CAUTION = (
    "Published values cannot be compared with those here one by one: tokeniser, data, model size and schedule differ "
    "or could not be verified to be the same. Compare trends only. Source:"
)


def completed(state: State) -> State:
    """A record of an older version with what its recipe says; not one of the user's own, which may have changed."""
    if state.recipe not in recipes.names():
        return state
    recipe, known = recipes.load(state.recipe), state.published
    if known and recipe.published:
        ours, was = recipe.published, known.settings
        if was is None:
            known = replace(ours, source=known.source, url=known.url or ours.url, values=known.values)
        elif ours.settings and known.source == ours.source:
            given = {name: value for name, value in vars(was).items() if value is not None}
            known = replace(known, settings=replace(ours.settings, **given))
    return replace(state, title=state.title or recipe.title, paper=state.paper or recipe.paper, published=known)


def blocks(state: State, made: Sequence[Run], found: Perplexities | None = None) -> list[Block]:
    """The caution, what differs and, of a sweep on text, trends and values; nothing where none are published."""
    known = state.published
    if known is None:
        return []
    printed = {
        name: {int(n): value for n, value in row.items()}
        for name, row in known.values.items()
        if found and name in state.encodings
    }
    if found and not printed:
        return []
    shown: list[Block] = [Text(_CAUTION, known.source, known.url or "", plain_warning=True)]
    if known.settings:
        shown.append(_differences(state, here(state, made), known.settings))
    if found and known.settings and known.settings.tokens:
        shown += _trends(found, known, printed, known.settings.tokens)
    return [*shown, _table(known, printed)] if found else shown


def _table(known: Published, printed: Mapping[str, Mapping[int, float]]) -> Table:
    """The published values of the methods that were compared, by length."""
    lengths = sorted({n for row in printed.values() for n in row})
    best = {n: least([row.get(n) for row in printed.values()]) for n in lengths}
    rows = [Row(name, [number(v.get(n), known.form, best[n]) for n in lengths]) for name, v in printed.items()]
    return Table(f"Published: {known.source}.", ["published", *map(str, lengths)], rows, starred="least")


def _differences(state: State, own: PublishedSettings, there: PublishedSettings) -> Table:
    """The setting here beside the published one, as far as either is known."""
    # the same name, perhaps with the tokenizer's, is no proof of the same text, nor as many types of the same tokeniser
    named = _plain(there.data or "")
    alike = own.data is not None and named and _plain(PurePath(own.data).name).startswith(named)
    types = [f"{n:,} types" if n else None for n in (own.vocabulary, there.vocabulary)]
    tokeniser = ", ".join(filter(None, (there.tokeniser, types[1])))
    model = None if there.arch is None or state.settings.extra else full_name(there.arch) == own.model
    near = _near(own.parameters, there.parameters)
    compared: list[tuple[str, object, object, str]] = [
        ("data", own.data, there.data, f"{_OPEN}: the same name" if alike else _NO if own.data else _OPEN),
        (
            "tokeniser",
            types[0],
            tokeniser or None,
            _OPEN if _near(own.vocabulary, there.vocabulary) is not False else _NO,
        ),
        ("layers, width, heads", _sized(state, own.model), there.model, _SAME[model]),
        ("parameters", own.parameters, there.parameters, f"{_YES}, within {_NEAR:.0%}" if near else _SAME[near]),
        # of a plain Adam it is not said where its weight decay goes
        ("optimiser", own.optimiser, there.optimiser, _SAME[own.optimiser == there.optimiser or None]),
    ]
    for key, name in _COMPARED.items():
        if key == "min_lr" and own.schedule != there.schedule:
            continue
        ours, other = getattr(own, key), getattr(there, key)
        if key == "batch_sentences" and own.context == "within documents" and ours is not None:
            compared.append((name, f"as many as have the tokens of {ours} full ones", other, _OPEN))
            continue
        compared.append((name, ours, other, _SAME[None if ours is None or other is None else ours == other]))
    rows = [
        Row(name, [_said(ours, NOT_RECORDED), _said(other, _NOT_STATED), words(same if other is not None else _OPEN)])
        for name, ours, other, same in compared
        if ours is not None or other is not None
    ]
    caption = "What is the same and what is not: what a paper does not state is not compared."
    return Table(caption, ["", "here", "published", "same?"], rows, words=True)


def _near(ours: int | None, other: int | None) -> bool | None:
    """Whether two counts agree up to rounding, and a few symbols of fairseq's own; ``None``: one is not known."""
    return abs(ours / other - 1) <= _NEAR if ours and other else None


def _sized(state: State, arch: str | None) -> str | None:
    """The size of a model in words, or the name of its architecture where further flags may have changed it."""
    size = size_of(arch) if arch and not state.settings.extra else None
    return f"{size.layers} layers of width {size.width}, {size.heads} heads" if size else arch


def _said(value: object, missing: str) -> Cell:
    if isinstance(value, bool):
        return words(TIED[value])
    if isinstance(value, (int, float)):
        return Cell(f"{value:,}" if isinstance(value, int) else f"{value:g}", value)
    if isinstance(value, tuple):
        return words(", ".join(f"{one:g}" for one in value))
    return words(missing if value is None else value)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _trends(
    found: Perplexities, known: Published, printed: Mapping[str, Mapping[int, float]], there: int
) -> list[Block]:
    """Perplexity over that at the training length, at the multiples of it that both have."""
    length = found.trained_at
    multiples = [
        n // length
        for n in found.lengths
        if n > length and n % length == 0 and all(there * (n // length) in row for row in printed.values())
    ]
    if not all(there in row for row in printed.values()):
        return []
    rows = []
    for name, row in printed.items():
        if length not in (ours := found.means(name)):
            continue
        cells = []
        for m in multiples:
            own = ours[length * m] / ours[length] if length * m in ours else None
            theirs, start = row[there * m], row[there]
            published = math.exp(theirs) / math.exp(start) if known.measure == "log_ppl" else theirs / start
            cells += [number(own, ".3f"), number(published, ".3f")]
        rows.append(Row(name, cells))
    caption = (
        f"Trends: perplexity over the one at the training length L ({length} here, {there} published), at multiples of "
        "L; below 1 is better than at L."
    )
    head = ["", *(["here", "published"] * len(multiples))]
    return [Table(caption, head, rows, groups=[f"{m} L" for m in multiples])] if rows and multiples else []
