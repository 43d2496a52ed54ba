"""The runs of a sweep over questions: models trained on text, fine-tuned on each folder of questions, and asked."""

import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation import records
from fairseq_rpe.evaluation.position_limits import longest_row
from fairseq_rpe.evaluation.question_records import QuestionKey, QuestionRequest
from fairseq_rpe.questions import dataset
from fairseq_rpe.questions.streaming_metrics import adds_up
from fairseq_rpe.runs.settings import Request, plan
from fairseq_rpe.sweeps.fine_tuning_config import Folder, Tuning
from fairseq_rpe.sweeps.grid import Cell, Evaluation, command_line, common_words, further_plan, request_of, within
from fairseq_rpe.sweeps.recipes import Scale, divided
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.sweeps.sweep_record import Asking, Method, SweepFolder


def make(sweep: Sweep, data_digest: str | None, unseen: Collection[str] = ()) -> list[Cell]:
    """A cell for each (encoding, seed) that is trained on text, then one for each (folder of questions, method, seed).

    A method begins with the training of its own encoding, or of the one that it continues. ``data_digest``: of the
    text. The encodings in ``unseen`` are trained without --inspect-every. Raises UserError: a set cannot be asked.
    """
    sources = {method.name: method for method in sweep.trained}
    first: dict[str, Cell] = {}
    tuned: dict[str, Cell] = {}
    for name, folder in sweep.questions.items():
        for method in sweep.methods:
            source = sources[method.continues or method.name]
            for seed in sweep.seeds:
                begun = source.run_name(seed)
                if begun not in first:
                    first[begun] = _pretraining(sweep, source, seed, data_digest, source.rpe not in unseen)
                run = method.run_name(seed, name)
                if run not in tuned:
                    tuned[run] = _fine_tuning(sweep, name, method, seed, first[begun], method.rpe not in unseen)
                tuned[run].evaluations.append(_asked(sweep, folder, tuned[run], method))
    return [*first.values(), *tuned.values()]


def _pretraining(sweep: Sweep, method: Method, seed: int, digest: str | None, inspected: bool) -> Cell:
    """The training on text: one of this sweep's, or a finished one of the same in the folder that the recipe names."""
    own = _on_text(sweep, sweep.out, method, seed, digest, inspected)
    scale = sweep.scale
    if scale is None or scale.pretrained is None or own.folder.checkpoints.record() is not None:
        return own
    there = _on_text(sweep, Path(scale.pretrained), method, seed, digest, inspected)
    record, folder = there.folder.checkpoints.record(), there.folder.checkpoints
    if record is None:
        return own
    other = there.plan.settings.difference(record.settings)
    if not other and folder.finished(there.plan) is not None:
        return there
    print(f"{folder.path} is not used: {other or 'its training is not finished'}", file=sys.stderr)
    return own


def _on_text(sweep: Sweep, out: Path, method: Method, seed: int, digest: str | None, inspected: bool) -> Cell:
    request = request_of(replace(sweep, out=out), method, seed, None, None, inspected)
    return Cell(SweepFolder(out).run_of(method, seed), request, plan(request, digest or ""))


def _fine_tuning(sweep: Sweep, name: str, method: Method, seed: int, first: Cell, inspected: bool) -> Cell:
    scale = sweep.scale or Scale()
    tuning, asking = scale.tuning or Tuning(), scale.asking or Asking()
    request = request_of(sweep, method, seed, None, first, inspected)
    place, data = SweepFolder(sweep.out), Path(sweep.questions[name].data)
    folder = place.run_of(method, seed, name)
    request = replace(
        _tuned(request, tuning, sweep.base),
        data=data,
        blocks=None,  # each question is a row
        separate_documents=None,
        save_dir=folder.checkpoints.path,
        tensorboard=place.tensorboard / folder.name,
        # what encodings and positions go by stays the length of the training on text
        extra=(*request.extra, "--rpe-train-length", str(first.plan.settings.tokens), *tuning.flags(asking)),
    )
    digest = dataset.digest(data) if data.is_dir() else ""
    if asking.checkpoint == "best" and data.is_dir():
        _check_scores(data)
    fixed = further_plan(method, request, digest)
    return Cell(folder, request, fixed, first, kind="answers", asked=asking.checkpoint)


def _check_scores(data: Path) -> None:
    """Raises UserError: no set of the folder has a score that a validation can find."""
    if not any(adds_up(info.published) for info in dataset.load(data).sets.values()):
        raise UserError(
            f"no set of {data} is scored by a mean over questions, which the best checkpoint is chosen by: leave out "
            "asking.checkpoint"
        )


def _tuned(request: Request, tuning: Tuning, base: Request) -> Request:
    """The request with what the fine-tuning does in another way than the training on text."""
    own: dict[str, Any] = {key: value for key, value in tuning.given().items() if hasattr(request, key)}
    if tuning.batch_sentences is not None:
        own["batch_sentences"] = divided(tuning.batch_sentences, base)
    if (tuning.schedule or request.schedule) != "cosine":
        own["min_lr"] = None
    return replace(request, **own)


def _asked(sweep: Sweep, folder: Folder, cell: Cell, method: Method) -> Evaluation:
    """The command that asks a fine-tuned model, at every length that its positions reach."""
    asking = (sweep.scale or Scale()).asking or Asking()
    data, first = Path(folder.data), (cell.parent or cell).plan.settings.tokens
    lengths, left_out = within(longest_row(method.positions_eval, first), sweep.lengths, method, "tokens")
    request = QuestionRequest(
        checkpoint=cell.folder.checkpoints.file(asking.checkpoint),
        data=data,
        lengths=lengths,
        sets=folder.sets or None,
        subset=sweep.subset,
        rpe=method.rpe_eval,
        positions=method.positions_eval,
        by=asking.by,
        beam=asking.beam,
        cut=asking.cut,
    )
    words = command_line("answer", str(request.checkpoint), str(data), "--subset", sweep.subset)
    words += ["--sets", ",".join(folder.sets)] if folder.sets else []
    said = {key: value for key, value in asking.options.items() if value != getattr(Asking(), key)}
    words += [word for key, value in said.items() for word in (f"--{key}", str(value))]
    words += ["--predictions", str(cell.folder.path / "answers" / method.name)]
    words += common_words(cell, method, lengths)
    keys = request.keys_of("") if data.is_dir() else _supposed(request)
    return Evaluation(words, tuple(keys), data, left_out=left_out)


def _supposed(request: QuestionRequest) -> list[QuestionKey]:
    """What will be measured on a folder that is not there yet, of a set of which the name is not known."""
    of: dict[str, Any] = {"rpe": request.rpe, "positions": request.positions}
    of["draws"] = records.draws_of(request.positions)
    key = QuestionKey(checkpoint="", data="", subset=request.subset, set="", **of, length=1)
    return [replace(key, set=name, length=n) for name in request.sets or ("",) for n in request.lengths]
