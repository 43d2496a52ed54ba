"""Comparison of a sweep with published results: values, differences of the settings, and trends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import NamedTuple

from fairseq_rpe.checkpoints.model_sizes import find_size, full_arch_name
from fairseq_rpe.reports.chapters.training import TIED, TrainedRun, own_settings
from fairseq_rpe.reports.page import NOT_RECORDED, Block, Text
from fairseq_rpe.reports.sweep_results import Perplexities
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.sweep_record import Published, PublishedSettings, SweepRecord
from fairseq_rpe.utils.table import Cell, Table, TableRow, lowest, number_cell, text_cell

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
_NEAR = 0.02  # relative difference up to which two numbers of parameters count as the same
_NOT_STATED = "not stated"
_CAUTION = (
    "Published values cannot be compared with those here one by one: tokeniser, data, model size and schedule differ "
    "or could not be verified to be the same. Compare trends only. Source:"
)


def upgrade_record(record: SweepRecord) -> SweepRecord:
    """Complete a record of an earlier version from its recipe; recipes of the user are not read, as they may differ.

    Args:
        record: record of a sweep.

    Returns:
        The record with title, paper and published results of the recipe where it had none.
    """
    if record.recipe not in recipes.names():
        return record
    recipe, published = recipes.load(record.recipe), record.published
    if published and recipe.published:
        ours, recorded = recipe.published, published.settings
        if recorded is None:
            published = replace(ours, source=published.source, url=published.url or ours.url, values=published.values)
        elif ours.settings and published.source == ours.source:
            stated = {name: value for name, value in vars(recorded).items() if value is not None}
            published = replace(published, settings=replace(ours.settings, **stated))
    return replace(record, title=record.title or recipe.title, paper=record.paper or recipe.paper, published=published)


def comparison_blocks(
    record: SweepRecord, runs: Sequence[TrainedRun], perplexities: Perplexities | None = None
) -> list[Block]:
    """Build the comparison with published results.

    Args:
        record: record of the sweep.
        runs: trained runs.
        perplexities: results of a sweep on text; None for other sweeps.

    Returns:
        A warning and the differences of the settings, and for a sweep on text trends and, last, the published values;
        empty if nothing is published for the compared methods.
    """
    published = record.published
    if published is None:
        return []
    values = {
        name: {int(n): value for n, value in row.items()}
        for name, row in published.values.items()
        if perplexities and name in record.encodings
    }
    if perplexities and not values:
        return []
    shown: list[Block] = [Text(_CAUTION, published.source, published.url or "", plain_warning=True)]
    if published.settings:
        shown.append(_differences(record, own_settings(record, runs), published.settings))
    if perplexities and published.settings and published.settings.tokens:
        shown += _trends(perplexities, published, values, published.settings.tokens)
    return [*shown, _table(published, values)] if perplexities else shown


def _table(published: Published, values: Mapping[str, Mapping[int, float]]) -> Table:
    """Published values of the compared methods by length."""
    lengths = sorted({n for row in values.values() for n in row})
    best = {n: lowest([row.get(n) for row in values.values()]) for n in lengths}
    rows = [
        TableRow(name, [number_cell(v.get(n), published.number_format, best[n]) for n in lengths])
        for name, v in values.items()
    ]
    return Table(f"Published: {published.source}.", ["published", *map(str, lengths)], rows, best_label="least")


class _ComparedSetting(NamedTuple):
    """A setting of the sweep and of the paper.

    Attributes:
        name: title of the setting.
        ours: value of the sweep; None if it is not recorded.
        theirs: value of the paper; None if it is not stated.
        same: whether they are the same, in words.
    """

    name: str
    ours: object
    theirs: object
    same: str

    def to_row(self) -> TableRow:
        """Return the row of the table."""
        same = _OPEN if self.theirs is None else self.same
        cells = [_value_cell(self.ours, NOT_RECORDED), _value_cell(self.theirs, _NOT_STATED), text_cell(same)]
        return TableRow(self.name, cells)


def _differences(record: SweepRecord, ours: PublishedSettings, theirs: PublishedSettings) -> Table:
    """Settings of the sweep and of the paper, as far as either is known."""
    # an equal name does not prove an equal text, nor an equal vocabulary size an equal tokeniser
    published_name = _plain(theirs.data or "")
    same_name = ours.data is not None and published_name and _plain(PurePath(ours.data).name).startswith(published_name)
    our_types, their_types = (f"{n:,} types" if n else None for n in (ours.vocabulary, theirs.vocabulary))
    tokeniser = ", ".join(filter(None, (theirs.tokeniser, their_types)))
    model = None if theirs.arch is None or record.settings.extra else full_arch_name(theirs.arch) == ours.model
    near = _near(ours.parameters, theirs.parameters)
    compared = [
        _ComparedSetting(
            "data", ours.data, theirs.data, f"{_OPEN}: the same name" if same_name else _NO if ours.data else _OPEN
        ),
        _ComparedSetting(
            "tokeniser",
            our_types,
            tokeniser or None,
            _OPEN if _near(ours.vocabulary, theirs.vocabulary) is not False else _NO,
        ),
        _ComparedSetting("layers, width, heads", _sized(record, ours.model), theirs.model, _SAME[model]),
        _ComparedSetting(
            "parameters", ours.parameters, theirs.parameters, f"{_YES}, within {_NEAR:.0%}" if near else _SAME[near]
        ),
        # a plain Adam in a paper does not tell whether its weight decay is decoupled
        _ComparedSetting(
            "optimiser", ours.optimiser, theirs.optimiser, _SAME[ours.optimiser == theirs.optimiser or None]
        ),
    ]
    for key, name in _COMPARED.items():
        if key == "min_lr" and ours.schedule != theirs.schedule:
            continue
        our_value, their_value = getattr(ours, key), getattr(theirs, key)
        if key == "batch_sentences" and ours.context == "within documents" and our_value is not None:
            # blocks of one document differ in length, so a batch is a number of tokens
            compared.append(_ComparedSetting(name, f"tokens of {our_value} full sequences", their_value, _OPEN))
            continue
        is_same = None if our_value is None or their_value is None else our_value == their_value
        compared.append(_ComparedSetting(name, our_value, their_value, _SAME[is_same]))
    rows = [setting.to_row() for setting in compared if setting.ours is not None or setting.theirs is not None]
    caption = "Settings that are the same and that differ; a setting that the paper does not state is not compared."
    return Table(caption, ["", "here", "published", "same?"], rows, is_text=True)


def _near(ours: int | None, theirs: int | None) -> bool | None:
    """Return whether two counts agree up to rounding and fairseq's special symbols; None if one is unknown."""
    return abs(ours / theirs - 1) <= _NEAR if ours and theirs else None


def _sized(record: SweepRecord, arch: str | None) -> str | None:
    """Return the size of a model in words, or its architecture's name if further flags may have changed the size."""
    size = find_size(arch) if arch and not record.settings.extra else None
    return f"{size.layers} layers of width {size.width}, {size.heads} heads" if size else arch


def _value_cell(value: object, missing: str) -> Cell:
    if isinstance(value, bool):
        return text_cell(TIED[value])
    if isinstance(value, (int, float)):
        return Cell(f"{value:,}" if isinstance(value, int) else f"{value:g}", value)
    if isinstance(value, tuple):
        return text_cell(", ".join(f"{item:g}" for item in value))
    return text_cell(missing if value is None else value)


def _plain(name: str) -> str:
    """Return a data set's name without case, spaces and punctuation: WikiText-103 is wikitext103."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _trends(
    perplexities: Perplexities, published: Published, values: Mapping[str, Mapping[int, float]], published_length: int
) -> list[Block]:
    """Table of the perplexity over that at the training length, at multiples of it, here and published."""
    length = perplexities.train_length
    multiples = [
        n // length
        for n in perplexities.lengths
        if n > length and n % length == 0 and all(published_length * (n // length) in row for row in values.values())
    ]
    if not all(published_length in row for row in values.values()):
        return []
    rows = []
    for name, row in values.items():
        if length not in (means := perplexities.mean_by_length(name)):
            continue
        cells = []
        for m in multiples:
            ratio = means[length * m] / means[length] if length * m in means else None
            long, short = row[published_length * m], row[published_length]
            published_ratio = math.exp(long) / math.exp(short) if published.measure == "log_ppl" else long / short
            cells += [number_cell(ratio, ".3f"), number_cell(published_ratio, ".3f")]
        rows.append(TableRow(name, cells))
    caption = (
        f"Trends: perplexity relative to the training length L ({length} here, {published_length} published), at "
        "multiples of L; below 1 is better than at L."
    )
    head = ["", *(["here", "published"] * len(multiples))]
    return [Table(caption, head, rows, groups=[f"{m} L" for m in multiples])] if rows and multiples else []
