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
from fairseq_rpe.runs.training_config import SETTINGS
from fairseq_rpe.sweeps import recipes
from fairseq_rpe.sweeps.sweep_record import Published, PublishedSettings, SweepRecord
from fairseq_rpe.utils.table import Cell, Table, TableRow, lowest, number_cell, text_cell

# field of PublishedSettings -> title, for settings that are compared for equality. `context` is no option, so it has no
# title among SETTINGS: it follows from the options for blocks and for documents
_COMPARED = {name: s.title for name, s in SETTINGS.items() if s.title} | {"context": "training sequences"}
_ANSWERS = {True: "yes", False: "no", None: "not verified"}  # whether a setting is the same, as the table shows it
_NEAR = 0.02  # relative difference up to which two counts, of parameters or of the vocabulary, are the same
_NOT_STATED = "not stated"
_CAUTION = (
    "Published values cannot be compared with those here one by one: tokeniser, data, model size and schedule differ "
    "or could not be verified to be the same. Compare trends only. Source:"
)


def upgrade_record(record: SweepRecord) -> SweepRecord:
    """Complete a record of an earlier version with title, paper and published settings from its recipe.

    Only recipes of this package are read: a recipe file of the user may have changed since.

    Args:
        record: record of a sweep.

    Returns:
        The record. Everything that it states has precedence over the recipe.
    """
    if record.recipe not in recipes.names():
        return record
    recipe = recipes.load(record.recipe)
    published = record.published
    if published and recipe.published:
        published = _complete_published(published, recipe.published)
    return replace(record, title=record.title or recipe.title, paper=record.paper or recipe.paper, published=published)


def _complete_published(recorded: Published, recipe: Published) -> Published:
    """Return the recorded published results, completed with the settings of the recipe."""
    if recorded.settings is None:
        # from a version in which recipes had no settings: all are the recipe's, and how the values are measured
        return replace(recipe, source=recorded.source, url=recorded.url or recipe.url, values=recorded.values)
    if recipe.settings and recorded.source == recipe.source:
        # Recipes state more settings since. They are added only for the same source: the settings that are recorded for
        # another one may be those of other runs.
        stated = {name: value for name, value in vars(recorded.settings).items() if value is not None}
        return replace(recorded, settings=replace(recipe.settings, **stated))
    return recorded


def comparison_blocks(
    record: SweepRecord, runs: Sequence[TrainedRun], perplexities: Perplexities | None = None
) -> list[Block]:
    """Build the comparison with published results.

    Args:
        record: record of the sweep.
        runs: trained runs.
        perplexities: results of a sweep on text; None for other sweeps.

    Returns:
        A warning and a table of the settings. For a sweep on text, a table of trends follows, and the published values
        come last. Empty if the record has no published results, and on text also if no compared method has one.
    """
    published = record.published
    if published is None:
        return []
    blocks: list[Block] = [Text(_CAUTION, published.source, published.url or "", plain_warning=True)]
    if published.settings:
        blocks.append(_settings_table(record, own_settings(record, runs), published.settings))
    if perplexities is None:
        return blocks
    values = {
        name: {int(length): value for length, value in row.items()}
        for name, row in published.values.items()
        if name in record.encodings
    }
    if not values:
        return []
    if published.settings and published.settings.tokens:
        blocks += _trends(perplexities, published, values, published.settings.tokens)
    return [*blocks, _values_table(published, values)]


def _values_table(published: Published, values: Mapping[str, Mapping[int, float]]) -> Table:
    """Return the table of the published values of the compared methods by length."""
    lengths = sorted({n for row in values.values() for n in row})
    best = {n: lowest([row.get(n) for row in values.values()]) for n in lengths}
    rows = [
        TableRow(name, [number_cell(row.get(n), published.number_format, best[n]) for n in lengths])
        for name, row in values.items()
    ]
    return Table(f"Published: {published.source}.", ["published", *map(str, lengths)], rows, best_label="least")


class _ComparedSetting(NamedTuple):
    """A setting of the sweep and of the paper.

    Attributes:
        title: title of the setting.
        ours: value of the sweep; None if it is not recorded.
        theirs: value of the paper; None if it is not stated.
        is_same: whether they are the same; None if that is not verified.
        note: what the table adds to the answer.
    """

    title: str
    ours: object
    theirs: object
    is_same: bool | None
    note: str = ""

    def to_row(self) -> TableRow:
        """Return the row of the table."""
        answer = text_cell(_ANSWERS[self.is_same] + self.note)
        return TableRow(
            self.title, [_value_cell(self.ours, NOT_RECORDED), _value_cell(self.theirs, _NOT_STATED), answer]
        )


def _settings_table(record: SweepRecord, ours: PublishedSettings, theirs: PublishedSettings) -> Table:
    """Return the table of the settings that the sweep records or the paper states.

    Args:
        record: record of the sweep.
        ours: settings of the sweep, in the form of a paper's.
        theirs: settings of the paper.
    """
    # min_lr is the last learning rate, which says nothing if the schedules differ
    is_compared = {key: key != "min_lr" or ours.schedule == theirs.schedule for key in _COMPARED}
    compared = [
        _compare_data(ours, theirs),
        _compare_tokenisers(ours, theirs),
        _compare_models(record, ours, theirs),
        _compare_parameters(ours, theirs),
        _compare_optimisers(ours, theirs),
        *(_compare_equal(key, title, ours, theirs) for key, title in _COMPARED.items() if is_compared[key]),
    ]
    rows = [setting.to_row() for setting in compared if setting.ours is not None or setting.theirs is not None]
    caption = "Settings that are the same and that differ; a setting that the paper does not state is not compared."
    return Table(caption, ["", "here", "published", "same?"], rows, is_text=True)


def _compare_data(ours: PublishedSettings, theirs: PublishedSettings) -> _ComparedSetting:
    """Compare the names of the data sets: different names are different texts, equal ones need not be equal texts."""
    is_same, note = None, ""
    if ours.data and theirs.data is not None:
        published_name = _plain_name(theirs.data)
        if published_name and _plain_name(PurePath(ours.data).name).startswith(published_name):
            note = ": the same name"
        else:
            is_same = False
    return _ComparedSetting("data", ours.data, theirs.data, is_same, note)


def _compare_tokenisers(ours: PublishedSettings, theirs: PublishedSettings) -> _ComparedSetting:
    """Compare the sizes of the vocabularies, which do not prove that the tokenisers are equal."""
    our_size, their_size = (f"{size:,} types" if size else None for size in (ours.vocabulary, theirs.vocabulary))
    tokeniser = ", ".join(filter(None, (theirs.tokeniser, their_size)))
    is_other = _is_near(ours.vocabulary, theirs.vocabulary) is False
    return _ComparedSetting("tokeniser", our_size, tokeniser or None, False if is_other else None)


def _compare_models(record: SweepRecord, ours: PublishedSettings, theirs: PublishedSettings) -> _ComparedSetting:
    """Compare the architectures, unless further flags of the sweep may have changed the size of its model."""
    is_same = None
    if theirs.model is not None and theirs.arch is not None and not record.settings.extra:
        is_same = full_arch_name(theirs.arch) == ours.model
    return _ComparedSetting("layers, width, heads", _model_size(record, ours.model), theirs.model, is_same)


def _compare_parameters(ours: PublishedSettings, theirs: PublishedSettings) -> _ComparedSetting:
    """Compare the numbers of parameters, of which papers state rounded ones."""
    is_near = _is_near(ours.parameters, theirs.parameters)
    note = f", within {_NEAR:.0%}" if is_near else ""
    return _ComparedSetting("parameters", ours.parameters, theirs.parameters, is_near, note)


def _compare_optimisers(ours: PublishedSettings, theirs: PublishedSettings) -> _ComparedSetting:
    """Compare the names of the optimisers.

    Different names prove nothing: a paper's plain "Adam" may or may not have a decoupled weight decay.
    """
    is_same = True if _equal(ours.optimiser, theirs.optimiser) else None
    return _ComparedSetting("optimiser", ours.optimiser, theirs.optimiser, is_same)


def _compare_equal(key: str, title: str, ours: PublishedSettings, theirs: PublishedSettings) -> _ComparedSetting:
    """Compare the setting ``key``; it is the same if both values are equal."""
    our_value, their_value = getattr(ours, key), getattr(theirs, key)
    if key == "batch_sentences" and ours.context == "within documents" and our_value is not None:
        # Sequences end with their document, so they differ in length. A batch then has the tokens of so many sequences
        # of the full length, and more sequences; that cannot be compared with a number of sequences.
        return _ComparedSetting(title, f"tokens of {our_value} full sequences", their_value, None)
    return _ComparedSetting(title, our_value, their_value, _equal(our_value, their_value))


def _equal(ours: object, theirs: object) -> bool | None:
    """Return whether two values are equal; None if one is unknown."""
    return None if ours is None or theirs is None else ours == theirs


def _is_near(ours: int | None, theirs: int | None) -> bool | None:
    """Return whether two counts agree up to rounding and fairseq's special symbols; None if one is unknown."""
    return abs(ours / theirs - 1) <= _NEAR if ours and theirs else None


def _model_size(record: SweepRecord, arch: str | None) -> str | None:
    """Return the size of an architecture in words, or its name if further flags may have changed the size."""
    size = find_size(arch) if arch and not record.settings.extra else None
    return f"{size.layers} layers of width {size.width}, {size.heads} heads" if size else arch


def _value_cell(value: object, missing: str) -> Cell:
    """Return the cell of a setting; ``missing`` is its text for None."""
    if isinstance(value, bool):  # share_embeddings, the only setting with yes or no
        return text_cell(TIED[value])
    if isinstance(value, (int, float)):
        return Cell(f"{value:,}" if isinstance(value, int) else f"{value:g}", value)
    if isinstance(value, tuple):
        return text_cell(", ".join(f"{item:g}" for item in value))
    return text_cell(missing if value is None else value)


def _plain_name(name: str) -> str:
    """Return a data set's name without case, spaces and punctuation: WikiText-103 is wikitext103."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _trends(
    perplexities: Perplexities, published: Published, values: Mapping[str, Mapping[int, float]], published_length: int
) -> list[Block]:
    """Build the table of perplexities at multiples of the training length, relative to that at the training length.

    Args:
        perplexities: results of the sweep.
        published: published results.
        values: published values of the compared methods, by length.
        published_length: training length of the paper in tokens.

    Returns:
        The table; empty if the sweep and the paper have no multiple in common.
    """
    train_length = perplexities.train_length
    if not all(published_length in row for row in values.values()):
        return []
    multiples = [
        length // train_length
        for length in perplexities.lengths
        if length > train_length
        and length % train_length == 0
        and all(published_length * (length // train_length) in row for row in values.values())
    ]
    rows = []
    for name, published_values in values.items():
        means = perplexities.mean_by_length(name)
        if train_length not in means:
            continue
        cells = []
        for multiple in multiples:
            mean = means.get(train_length * multiple)
            ratio = None if mean is None else mean / means[train_length]
            published_ratio = _published_ratio(published, published_values, published_length, multiple)
            cells += [number_cell(ratio, ".3f"), number_cell(published_ratio, ".3f")]
        rows.append(TableRow(name, cells))
    if not rows or not multiples:
        return []
    caption = (
        f"Trends: perplexity relative to the training length L ({train_length} here, {published_length} published), at "
        "multiples of L; below 1 is better than at L."
    )
    head = ["", *(["here", "published"] * len(multiples))]
    return [Table(caption, head, rows, groups=[f"{multiple} L" for multiple in multiples])]


def _published_ratio(published: Published, values: Mapping[int, float], length: int, multiple: int) -> float:
    """Return the published perplexity at a multiple of ``length``, relative to that at ``length``."""
    long, short = values[length * multiple], values[length]
    return math.exp(long) / math.exp(short) if published.measure == "log_ppl" else long / short
