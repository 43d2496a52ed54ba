"""Sweeps on text: perplexity over length, on the text of the training and on further texts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.records import TextKey, TextResult
from fairseq_rpe.reports.kind_report import KindReport, MetricTags
from fairseq_rpe.reports.sweep_results import Perplexities, load_perplexities
from fairseq_rpe.reports.training_axis import CURVE_TAG, curve_by_tokens, load_training_axis
from fairseq_rpe.runs import training_data
from fairseq_rpe.sweeps import grid
from fairseq_rpe.sweeps.grid import Evaluation, ForwardPass, SweepRun
from fairseq_rpe.sweeps.resolve import Inputs, Sweep
from fairseq_rpe.sweeps.sweep_kind import SweepKind
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder, SweepRecord

if TYPE_CHECKING:
    from fairseq_rpe.reports.chapters.training import TrainedRun
    from fairseq_rpe.reports.page import ReportContent

_Texts = Mapping[str | None, tuple[Path, str]]  # folder and digest by name; None names the text of the training


class TextKind(SweepKind):
    """Evaluation on text."""

    name = "text"
    result_type = TextResult

    def build_runs(self, sweep: Sweep, inputs: Inputs, without_bias: Collection[str] = ()) -> list[SweepRun]:
        """Build one run per method and seed, evaluated on each text."""
        texts: dict[str | None, tuple[Path, str]] = {}
        if sweep.data is not None:
            texts[None] = sweep.data, inputs.data or ""
        texts |= {name: (data, inputs.texts[name]) for name, data in sweep.evaluate.items()}
        return grid.build_runs(sweep, inputs.data, without_bias, self.result_type, partial(_evaluations, sweep, texts))

    def check_lengths(self, sweep: Sweep, runs: Sequence[SweepRun]) -> None:
        """Check that texts fill blocks of all lengths, and that batches hold a block."""
        train_tokens = max(run.plan.settings.tokens for run in runs)
        longest = max(train_tokens, *sweep.lengths)
        if sweep.max_tokens and sweep.max_tokens < longest:
            raise UserError(f"--max-tokens {sweep.max_tokens} is less than length {longest}: raise it")
        if sweep.data is None or not sweep.data.is_dir():
            return
        check_training_text(sweep, train_tokens)
        by_document = sweep.base_config.blocks == "document"
        for text in filter(Path.is_dir, (sweep.data, *sweep.evaluate.values())):
            corpus.check_block_length(text, sweep.split, longest)
            if by_document or sweep.base_config.separate_documents:
                corpus.check_documents(text, sweep.split)
            if by_document:
                corpus.check_document_block(text, sweep.split, longest)


class TextReport(KindReport[Perplexities]):
    """Report on perplexities."""

    subject = "text"
    measured = "perplexities"
    csv_name, figure_name = "results", "ppl"
    extra_tables = ("extrapolation.csv", "effective_length.csv")
    has_definition = True

    def load_results(self, folder: SweepFolder, record: SweepRecord) -> Perplexities:
        """Read the perplexities of the finished runs."""
        axis = load_training_axis(folder, record)
        return replace(load_perplexities(folder, record), training_axis=axis)

    def content_builder(
        self, folder: SweepFolder, record: SweepRecord, runs: Sequence[TrainedRun], results: Perplexities, delta: float
    ) -> tuple[Callable[[], ReportContent], dict[str, str]]:
        """Return chapters on perplexities, and CSV files of the verdicts on Definition 0.1 and of effective lengths."""
        from fairseq_rpe.reports import effective_length, extrapolation_definition
        from fairseq_rpe.reports.chapters import effective_length as length_chapter
        from fairseq_rpe.reports.chapters import perplexities, published_comparison

        predictions = extrapolation_definition.predict_verdicts(folder, record)
        verdicts = extrapolation_definition.observe_verdicts(results, predictions)
        theory = extrapolation_definition.definition_blocks(verdicts, results.train_length, delta)
        published = published_comparison.comparison_blocks(record, runs, results)
        models = perplexities.ComparedModels.from_sweep(record, runs)
        lengths = effective_length.perplexity_lengths(results, delta, models.methods)
        length_blocks = length_chapter.perplexity_blocks(lengths)
        builder = partial(perplexities.build_content, models, results, theory, published, length_blocks)
        tables = {"extrapolation.csv": extrapolation_definition.verdict_csv(verdicts, delta)}
        return builder, {**tables, effective_length.CSV_NAME: effective_length.lengths_csv(lengths)}

    def metric_tags(self, results: Perplexities) -> MetricTags:
        """Return a metric per length, and the effective lengths."""
        from fairseq_rpe.reports import effective_length

        names = {f"ppl_at/{n}": f"ppl at {n} tokens" for n in results.shown_lengths}
        names |= effective_length.titles_by_tag(effective_length.perplexity_lengths(results))
        further = {"perplexity ratio along the training (step = tokens trained)": CURVE_TAG}
        title = "perplexity over evaluation length (step = tokens)"
        return MetricTags(names, "1_by_length/ppl", title, further if results.training_axis else {})

    def further_curves(self, results: Perplexities, method: str) -> dict[str, dict[int, float]]:
        """Return the ratio of perplexities along the training of a run."""
        curve = curve_by_tokens(results.training_axis, method, results.results[0].seed)
        return {CURVE_TAG: curve} if curve else {}

    def metrics_and_curve(
        self, results: Perplexities, method: str, task: str | None
    ) -> tuple[dict[str, float], dict[int, float]]:
        """Return the perplexities and the effective lengths of a run."""
        from fairseq_rpe.reports import effective_length

        curve = {row.result.length: row.result.ppl for row in results.results}
        lengths = effective_length.lengths_by_tag(effective_length.perplexity_lengths(results))
        return {f"ppl_at/{length}": ppl for length, ppl in curve.items()} | lengths, curve


def check_training_text(sweep: Sweep, train_tokens: int) -> None:
    """Check that the text of the training fills blocks of the training length.

    Args:
        sweep: sweep whose text exists.
        train_tokens: largest training length in tokens.

    Raises:
        UserError: the text is too short.
    """
    base = sweep.base_config
    assert sweep.data is not None
    training_data.check_blocks(sweep.data, train_tokens, base.blocks, bool(base.separate_documents))


def _evaluations(sweep: Sweep, texts: _Texts, run: SweepRun, method: Method) -> list[Evaluation]:
    """Return the evaluations of a method on each text; the lengths include those of all trainings."""
    further = (other.further.tokens for other in sweep.methods)
    train_length = (run.parent or run).plan.settings.tokens
    requested = sorted({train_length, *filter(None, further), *sweep.lengths})
    limit = method.position_limit(run.plan.settings.tokens)
    lengths, skipped = grid.lengths_within_limit(limit, requested, method, "tokens")
    words = ["--split", sweep.split, *grid.common_arguments(run, method, lengths if sweep.lengths or skipped else ())]
    words += ["--max-tokens", str(sweep.max_tokens)] if sweep.max_tokens else []
    key = grid.method_key(TextKey, method, run.config, split=sweep.split)
    evaluations = [
        Evaluation(
            grid.command_line("eval", str(run.folder.checkpoints.last), str(data), *words),
            tuple(replace(key, data=digest, length=n) for n in lengths),
            partial(_passes, data, sweep.split, lengths),
            data,
            name,
            skipped,
        )
        for name, (data, digest) in texts.items()
    ]
    # on the text of the training alone; the last update is that of the evaluation above
    of_training = [evaluation for evaluation in evaluations if evaluation.text_name is None]
    for updates in (n for n in sweep.evaluate_at if n < run.plan.updates):
        path = str(run.folder.checkpoints.intermediate_path(updates))
        command = grid.command_line("eval", path, str(sweep.data), *words)
        evaluations += [replace(evaluation, command=command, updates=updates) for evaluation in of_training]
    return evaluations


def _passes(data: Path, split: str, lengths: Sequence[int]) -> list[ForwardPass]:
    """Return all tokens of the split, at each length."""
    tokens = corpus.count_tokens(data, split)
    return [ForwardPass(tokens, length) for length in lengths]


KIND = TextKind()
REPORT = TextReport()
