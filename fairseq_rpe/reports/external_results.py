"""Writes reports on perplexities of models that no sweep has trained: those of ``extend``, and any other models."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fairseq_rpe.core.arguments import check_choice, check_count, check_number, check_text, describe_value
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.evaluation.records import TextResult
from fairseq_rpe.figures import WIDTHS
from fairseq_rpe.reports import effective_length, extrapolation_definition, page
from fairseq_rpe.reports.chapters import effective_length as length_chapter
from fairseq_rpe.reports.chapters import perplexities, training
from fairseq_rpe.reports.chapters.perplexities import ComparedModels
from fairseq_rpe.reports.extrapolation_definition import DELTA, NONE, PredictedVerdict
from fairseq_rpe.reports.page import Part, Section
from fairseq_rpe.reports.report_files import ReportFiles
from fairseq_rpe.reports.sweep_results import Perplexities, SweepResult
from fairseq_rpe.reports.write import write_figures, write_tables
from fairseq_rpe.runs.run_folder import RunFolder, RunRecord
from fairseq_rpe.sweeps.sweep_record import Method, SweepFolder
from fairseq_rpe.utils import records
from fairseq_rpe.utils.output_checks import check_output_folder


def write_report(
    rows: Mapping[str, Sequence[TextResult]],
    folder: Path | str,
    train_length: int,
    *,
    encodings: Mapping[str, Sequence[Encoding]] | None = None,
    delta: float = DELTA,
    title: str = "",
    width: str | None = None,
    latex: bool = False,
) -> Section:
    """Write the tables, figures and HTML page for several models that were evaluated on one text.

    The files are those of a sweep: results.csv, results.md, ppl.png, ppl.pdf, extrapolation.csv, effective_length.csv,
    report.html.

    Args:
        rows: results of each model by its name, in the order of the report.
        folder: output folder; created if it does not exist.
        train_length: training length of the models in tokens, for ratios and Definition 0.1.
        encodings: trained encodings of all layers, by name of the model, for the verdict on Σ exp(bias); models may be
            left out.
        delta: δ of Definition 0.1, relative.
        title: title of the page.
        width: ``column`` or ``page`` of a paper, for ppl.png and ppl.pdf; None: the width that the panels need.
        latex: whether to write the tables as LaTeX, results.tex, too.

    Returns:
        The section of the HTML page; its ``text`` is a summary.

    Raises:
        UserError: there are no results; a result has a value that no measurement can have, such as a perplexity below
            1, NaN or infinity; an argument has another type, ``train_length`` is below 1, ``delta`` not above 0,
            ``width`` unknown, or ``encodings`` has a name without results; two results are of different texts, or of
            one model and length; or ``folder`` belongs to a sweep.
    """
    folder = Path(folder)
    check_count("train_length", train_length)
    check_number("delta", delta, above=0)
    check_text("title", title, "Two models")
    check_choice("width", width, tuple(WIDTHS), optional=True)
    rows, encodings = _check_rows(rows), encodings or {}
    for name in encodings:
        if name not in rows:
            raise UserError(f"encodings has '{name}', for which rows has no results: add them, or drop it")
    about = _About(title, [("training length", f"{train_length:,} tokens")])
    return _write(rows, folder, train_length, about, encodings, delta, width, latex)


def write_extension_report(
    rows: Mapping[str, Sequence[TextResult]],
    run: RunFolder,
    original_length: int,
    *,
    title: str,
    width: str | None = None,
    latex: bool = False,
) -> Section:
    """Write the report of a further training on longer texts: a comparison, and chapters from the run's records.

    Args:
        rows: results of the model before and after, by label.
        run: folder of the finished run, for the report as well.
        original_length: training length of the model before, in tokens.
        title: title of the page.
        width: ``column`` or ``page`` of a paper, for ppl.png and ppl.pdf; None: the width that the panels need.
        latex: whether to write the tables as LaTeX, too.

    Returns:
        The section of the HTML page; its ``text`` is a summary.
    """
    record = run.checkpoints.read_record() or RunRecord()
    label = record.settings.rpe or run.name
    folder = RunFolder(run.path.resolve())  # "." has no name
    trained = training.load_run(label, folder, folder.checkpoints.log, record.finished.checkpoint, TextResult)
    facts = [("original length", f"{original_length:,} tokens"), *training.run_facts(trained, record)]
    about = _About(title, facts, training.run_parts([trained]))
    return _write(rows, run.path, original_length, about, {}, DELTA, width, latex)


class _About(NamedTuple):
    """What a page states besides the results.

    Attributes:
        title: title of the page.
        facts: name and value of each setting.
        parts: chapters on the trainings.
    """

    title: str
    facts: list[tuple[str, str]]
    parts: Sequence[Part] = ()


def _write(
    rows: Mapping[str, Sequence[TextResult]],
    folder: Path,
    train_length: int,
    about: _About,
    encodings: Mapping[str, Sequence[Encoding]],
    delta: float,
    width: str | None,
    latex: bool,
) -> Section:
    """Write all files of a report; the arguments are those of :func:`write_report`."""
    results = Perplexities(_sweep_results(rows, train_length), train_length)
    models = _compared_models(rows)
    _create_folder(folder)
    files = ReportFiles(folder, "text")
    verdicts = extrapolation_definition.observe_verdicts(results, _predict_verdicts(models, encodings))
    theory = extrapolation_definition.definition_blocks(verdicts, train_length, delta)
    lengths = effective_length.perplexity_lengths(results, delta, models.methods)
    length_blocks = length_chapter.perplexity_blocks(lengths)
    build_content = partial(perplexities.build_content, models, results, theory, lengths=length_blocks)
    content = build_content()
    measurements = page.measurements_part(len(results.results), content.build_measurements, files.csv.name)
    section = Section(
        name=folder.resolve().name,
        title=about.title,
        lead=content.lead,
        facts=[("split", models.split), *about.facts],
        parts=[chapter for chapter in (*content.parts, *about.parts, measurements) if chapter.blocks],
        text=f"{content.markdown}\nresults: {files.csv}\nfigure:  {files.figures[0]}\npage:    {files.page}",
    )
    with files.write_markdown_last(content.markdown):
        write_figures(files, content, build_content, width)
        tables = {
            "extrapolation.csv": extrapolation_definition.verdict_csv(verdicts, delta),
            effective_length.CSV_NAME: effective_length.lengths_csv(lengths),
        }
        write_tables(files, content, results, tables, latex)
        page.write_page([section], files.page)
    return section


def _predict_verdicts(
    models: ComparedModels, encodings: Mapping[str, Sequence[Encoding]]
) -> dict[str, PredictedVerdict]:
    """Predict the verdict of each model from its trained encodings, unless its positions are transformed."""
    return {
        name: extrapolation_definition.predict_from_encodings(list(layers))
        if models.methods[name].leaves_positions
        else PredictedVerdict(NONE, reason="positions are transformed")
        for name, layers in encodings.items()
    }


def _check_rows(rows: Mapping[str, Sequence[TextResult]]) -> dict[str, list[TextResult]]:
    """Return the results of each model as a list, all values checked."""
    if not isinstance(rows, Mapping):
        raise UserError(f"rows must be a dict with the results of each model by its name, not {describe_value(rows)}")
    checked = {}
    for name, results in rows.items():
        check_text("a key of rows", name, "alibi")
        if not isinstance(results, Sequence):
            raise UserError(f"the results of '{name}' must be a list of TextResult, not {describe_value(results)}")
        checked[name] = [_check_result(name, result) for result in results]
    return checked


def _check_result(name: str, result: TextResult) -> TextResult:
    """Check the values of a result by the rules for the lines of ``eval.jsonl``."""
    if not isinstance(result, TextResult):
        raise UserError(f"the results of '{name}' have a {type(result).__name__}: use objects of TextResult")
    what = f"the result at {result.length} tokens"
    return records.read_record(TextResult, result.to_json(), f"'{name}'", what, strict=False, remedy="measure it again")


def _sweep_results(rows: Mapping[str, Sequence[TextResult]], train_length: int) -> list[SweepResult[TextResult]]:
    """Return the results by model and length, each with its ratio to the perplexity at ``train_length``."""
    texts = {(result.data, result.split, result.tokens) for results in rows.values() for result in results}
    if len(texts) != 1:
        reason = "results are of different texts or splits" if texts else "there are no results"
        raise UserError(f"{reason}, so there is nothing to compare: evaluate each model on the same text first")
    sweep_results = []
    for name, results in rows.items():
        by_length = {result.length: result for result in results}
        if len(by_length) < len(results):
            raise UserError(f"'{name}' has two results of one length: give each model its own name")
        base = by_length.get(train_length)
        sweep_results += [
            SweepResult(name, 1, result, result.ppl / base.ppl if base else None)
            for _, result in sorted(by_length.items())
        ]
    return sweep_results


def _compared_models(rows: Mapping[str, Sequence[TextResult]]) -> ComparedModels:
    """Return what the first result of each model states about the model."""
    firsts = {name: results[0] for name, results in rows.items() if results}
    methods = {name: Method(name, r.encoding or name, positions_eval=r.positions) for name, r in firsts.items()}
    return ComparedModels(methods, next(iter(firsts.values())).split)


def _create_folder(folder: Path) -> None:
    """Create the output folder, which must not be that of a sweep."""
    if SweepFolder(folder).record_path.exists():
        raise UserError(f"{folder} is the folder of a sweep, whose report this would replace: use another folder")
    check_output_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
