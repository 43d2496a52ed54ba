"""The page's comparison of a sweep with what was published: the values, what differs, and the trends."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Any

from fairseq_rpe.cli import recipes, report
from fairseq_rpe.cli.defaults import full_name
from fairseq_rpe.cli.page import NOT_RECORDED, Block, Cell, Row, Table, Text, least, number, words
from fairseq_rpe.cli.page_runs import Run

_YES, _NO, _OPEN = "yes", "no", "not verified"


def recipe_of(state: dict[str, Any]) -> recipes.Recipe | None:
    """The bundled recipe of a sweep; one of the user's own may have changed since."""
    name = state.get("recipe")
    return recipes.load(name) if name in recipes.names() else None


def about(state: dict[str, Any], what: str) -> str:
    """The ``title`` or the ``paper`` of a sweep's recipe, nothing if it has none or is not known any more."""
    return str(state.get(what) or getattr(recipe_of(state), what, ""))


def published(state: dict[str, Any]) -> dict[str, Any]:
    """What is on record of the published experiment; a sweep of an older version lacks a part of it."""
    recipe = recipe_of(state)
    known = state.get("published") or {}
    if recipe and known and "settings" not in known:
        about = {key: value for key, value in recipe.published.items() if key not in recipes.values(recipe.published)}
        return {**about, **known}
    return known


def blocks(state: dict[str, Any], rows: list[dict[str, Any]], made: list[Run], data: str | None) -> list[Block]:
    """Nothing for a sweep without published values."""
    known = published(state)
    values = {
        name: {int(n): value for n, value in found.items()}
        for name, found in recipes.values(known).items()
        if name in state["encodings"]
    }
    if not values:
        return []
    shown: list[Block] = [caution(known)]
    settings = known.get("settings") or {}
    if settings:
        shown.append(differences(state, made, data, settings))
    trained = (state["settings"]["tokens"], settings.get("tokens"))
    if trained[1] and (trends := _trends(rows, _perplexities(known, values), trained)):
        shown.append(trends)
    lengths = sorted({n for found in values.values() for n in found})
    form = recipes.decimals(known)
    best = {n: least([found.get(n) for found in values.values()]) for n in lengths}
    lines = [Row(name, [number(v.get(n), form, best[n]) for n in lengths]) for name, v in values.items()]
    shown.append(Table(f"Published: {known['source']}. ★: least of its column.", ["", *map(str, lengths)], lines))
    return shown


def caution(known: dict[str, Any]) -> Text:
    """What must be said before any published value is shown."""
    text = (
        "Published values cannot be held against those here one by one: tokeniser, data, model size and schedule "
        "differ or could not be verified to be the same. Compare trends only. Source:"
    )
    return Text(text, known["source"], known.get("url", ""), plain_warning=True)


def differences(state: dict[str, Any], made: list[Run], data: str | None, settings: dict[str, Any]) -> Table:
    """The setting here beside the published one, as far as either is known."""
    here = state["settings"]
    vocabulary = next((run.log.vocabulary for run in made if run.log.vocabulary), None)
    batch = here.get("batch_sentences", 0) * here.get("update_freq", 1) * here.get("nproc", 1)
    schedule = here.get("schedule", "inverse_sqrt") if "lr" in here else None
    lines = []
    if "data" in settings:
        alike = data is not None and _plain(PurePath(data).name) == _plain(settings["data"])
        same = f"{_OPEN}: the same name" if alike else _NO if data else _OPEN
        lines.append(("data", data, settings["data"], same))
    if "tokeniser" in settings or "vocabulary" in settings:
        other = vocabulary and settings.get("vocabulary") and vocabulary != settings["vocabulary"]
        there = [settings.get("tokeniser"), f"{settings['vocabulary']:,} types" if "vocabulary" in settings else None]
        own = f"{vocabulary:,} types" if vocabulary else None
        lines.append(("tokeniser", own, ", ".join(filter(None, there)), _NO if other else _OPEN))
    if "model" in settings:
        arch = settings.get("arch")
        same = _OPEN if arch is None or here.get("extra") else _YES if full_name(arch) == here.get("arch") else _NO
        lines.append(("model", here.get("arch"), settings["model"], same))
    for title, key, value in (
        ("training length", "tokens", here.get("tokens")),
        ("sequences an update", "batch_sentences", batch or None),
        ("updates", "updates", here.get("updates")),
        ("peak learning rate", "lr", here.get("lr")),
        ("updates of warm-up", "warmup", here.get("warmup")),
        ("schedule", "schedule", schedule),
    ):
        if key in settings:
            same = _OPEN if value is None else _YES if value == settings[key] else _NO
            lines.append((title, value, settings[key], same))
    rows = [Row(title, [_said(own), _said(there), words(same)]) for title, own, there, same in lines]
    return Table("What is the same and what is not.", ["", "here", "published", "same?"], rows, words=True)


def _perplexities(known: dict[str, Any], values: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    if known.get("measure") != "log_ppl":
        return values
    return {name: {n: math.exp(value) for n, value in found.items()} for name, found in values.items()}


def _said(value: Any) -> Cell:
    if isinstance(value, (int, float)):
        return Cell(f"{value:,}" if isinstance(value, int) else f"{value:g}", value)
    return words(NOT_RECORDED if value is None else value)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _trends(rows: list[dict[str, Any]], values: dict[str, dict[int, float]], trained: tuple[int, int]) -> Table | None:
    """Perplexity over that at the training length, at the multiples of it that both have."""
    here, there = trained
    _, lengths = report.names_and_lengths(rows)
    multiples = [
        n // here
        for n in lengths
        if n > here and n % here == 0 and all(there * (n // here) in found for found in values.values())
    ]
    if not multiples or not all(there in found for found in values.values()):
        return None
    lines = []
    for name, found in values.items():
        own = report.mean(rows, name, here, "ppl")
        if own is None:
            continue
        cells = []
        for m in multiples:
            ours = report.mean(rows, name, here * m, "ppl")
            cells.append(number(None if ours is None else ours / own, ".3f"))
            cells.append(number(found[there * m] / found[there], ".3f"))
        lines.append(Row(name, cells))
    caption = (
        f"Trends: perplexity over the one at the training length L ({here} here, {there} published), at multiples of "
        "L; below 1 is better than at L."
    )
    head = ["", *(["here", "published"] * len(multiples))]
    return Table(caption, head, lines, groups=[f"{m} L" for m in multiples]) if lines else None
