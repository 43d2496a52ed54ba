"""The report of a sweep, written for perplexities that were measured elsewhere: of models that no sweep has trained."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fairseq_rpe.core.arguments import check_choice, check_count, check_number, check_text, described
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.evaluation.records import TextResult
from fairseq_rpe.figures import WIDTHS, style
from fairseq_rpe.reports import extrapolation_definition, page
from fairseq_rpe.reports.chapters import perplexities
from fairseq_rpe.reports.extrapolation_definition import DELTA, NONE, Prediction
from fairseq_rpe.reports.page import Section
from fairseq_rpe.reports.report_files import Places
from fairseq_rpe.reports.sweep_results import Finding, Perplexities
from fairseq_rpe.sweeps.sweep_record import Method, State, SweepFolder, SweepSettings
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import atomic_write, check_folder
from fairseq_rpe.utils.table import latex_text


def write_report(
    rows: Mapping[str, Sequence[TextResult]],
    folder: Path | str,
    trained_at: int,
    *,
    encodings: Mapping[str, Sequence[Encoding]] | None = None,
    delta: float = DELTA,
    title: str = "",
    width: str | None = None,
    latex: bool = False,
) -> Section:
    """Write table, figure and page on several models that were scored on one text; what they say is on ``text``.

    The files are a sweep's: results.csv, results.md, ppl.png and .pdf, extrapolation.csv, report.html.

    Args:
        rows: the results of each model by its name, in the order to be shown.
        folder: where they are written; made if it is not there.
        trained_at: tokens of the models' training, by which ratios and Definition 0.1 go.
        encodings: of models, as they were trained; the verdict on Σ exp(bias) then stands beside what was measured.
        delta: δ of Definition 0.1, relative.
        title: of the page.
        width: ``column`` or ``page`` of a paper, for ppl.png and .pdf; by default as the panels need it.
        latex: whether the tables are written as LaTeX, results.tex, as well.

    Raises:
        UserError: there are no results; a result holds a value that no measurement can have, such as a perplexity of
            below 1, NaN or infinity; an argument is of another type, ``trained_at`` is below 1, ``delta`` not above 0,
            ``width`` unknown, or ``encodings`` has a name without results; two results are of different texts, or of
            one model and length; or ``folder`` belongs to a sweep.
    """
    folder = Path(folder)
    check_count("trained_at", trained_at)
    check_number("delta", delta, above=0)
    check_text("title", title, "Two models")
    check_choice("width", width, tuple(WIDTHS), optional=True)
    rows = _checked_rows(rows)
    for name in encodings or ():
        if name not in rows:
            raise UserError(f"encodings has '{name}', of which rows has no results: give them, or drop it")
    found = Perplexities(_findings(rows, trained_at), trained_at)
    at = _places(folder)
    state = _state(rows, trained_at, title)
    said = {
        name: extrapolation_definition.of_encodings(list(own))
        if state.method(name).leaves_positions
        else Prediction(NONE, why="positions are moved")
        for name, own in (encodings or {}).items()
    }
    judged = extrapolation_definition.judge(found, said)
    build = partial(perplexities.findings, state, [], found, extrapolation_definition.blocks(judged, trained_at, delta))
    made = build()
    parts = [*made.parts, page.measurements(len(found.rows), made.every, at.results.name)]
    section = Section(
        name=folder.resolve().name,
        title=title,
        lead=made.lead,
        facts=[("split", str(state.settings.subset)), ("training length", f"{trained_at:,} tokens")],
        parts=[part for part in parts if part.blocks],
        text=f"{made.markdown}\nresults: {at.results}\nfigure:  {at.figures[0]}\npage:    {at.page}",
    )
    with style.drawn_at(width):
        style.save((build() if width else made).figure, *at.figures)
    if latex:
        atomic_write(at.latex, latex_text(page.tables(made.parts)))
    page.write([section], at.page)
    atomic_write(at.others[0], extrapolation_definition.csv(judged, delta))
    atomic_write(at.table, made.markdown)
    atomic_write(at.results, found.csv())
    return section


def _checked_rows(rows: Mapping[str, Sequence[TextResult]]) -> dict[str, list[TextResult]]:
    if not isinstance(rows, Mapping):
        raise UserError(f"rows must be a dict with the results of each model by its name, not {described(rows)}")
    checked = {}
    for name, own in rows.items():
        check_text("a key of rows", name, "alibi")
        if not isinstance(own, Sequence):
            raise UserError(f"the results of '{name}' must be a list of TextResult, not {described(own)}")
        checked[name] = [_checked(name, one) for one in own]
    return checked


def _checked(name: str, result: TextResult) -> TextResult:
    """The result, if a measurement can have its values: the rules of the lines of ``eval.jsonl`` apply."""
    if not isinstance(result, TextResult):
        raise UserError(f"the results of '{name}' hold a {type(result).__name__}: give objects of TextResult")
    what = f"the result at {result.length} tokens"
    return records.read(TextResult, result.record(), f"'{name}'", what, strict=False, remedy="measure it again")


def _findings(rows: Mapping[str, Sequence[TextResult]], trained_at: int) -> list[Finding[TextResult]]:
    texts = {(one.data, one.subset, one.tokens) for own in rows.values() for one in own}
    if len(texts) != 1:
        what = "results are of different texts or splits" if texts else "there are no results"
        raise UserError(f"{what}, so there is nothing to compare: evaluate each model on the same text first")
    found = []
    for name, own in rows.items():
        by_length = {one.length: one for one in own}
        if len(by_length) < len(own):
            raise UserError(f"'{name}' has two results of one length: give each model a name of its own")
        base = by_length.get(trained_at)
        found += [Finding(name, 1, one, one.ppl / base.ppl if base else None) for _, one in sorted(by_length.items())]
    return found


def _state(rows: Mapping[str, Sequence[TextResult]], trained_at: int, title: str) -> State:
    """What a sweep would have on record of these models."""
    firsts = {name: own[0] for name, own in rows.items() if own}
    methods = {name: Method(name, one.encoding or name, positions_eval=one.positions) for name, one in firsts.items()}
    settings = SweepSettings(tokens=trained_at, subset=next(iter(firsts.values())).subset)
    return State(settings, tuple(firsts), (1,), methods=methods, title=title)


def _places(folder: Path) -> Places:
    sweep = SweepFolder(folder)
    if sweep.state_path.exists():
        raise UserError(f"{folder} is the folder of a sweep, whose report this would replace: name another one")
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return Places(sweep, State(SweepSettings(), (), ()))
