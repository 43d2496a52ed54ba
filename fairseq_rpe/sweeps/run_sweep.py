"""A sweep from its folder's state to its end: checked, put on record, and what is left of it carried out."""

import contextlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.question_records import QuestionKey
from fairseq_rpe.evaluation.records import TextKey
from fairseq_rpe.questions import dataset
from fairseq_rpe.runs import launch, training_data
from fairseq_rpe.sweeps import local_executor, slurm
from fairseq_rpe.sweeps.grid import Cell, Stage, command_line
from fairseq_rpe.sweeps.resolve import Sweep
from fairseq_rpe.sweeps.sweep_record import Asking, Questions, Scored, State, SweepFolder, SweepSettings
from fairseq_rpe.utils.files import lock

Slurm = Sequence[tuple[str, str]] | None


def check_data(sweep: Sweep, dry: bool = False) -> str | None:
    """The digest of the text to train and evaluate on, if it is one; ``dry``: what a recipe prepares need not be there.

    Raises UserError: it is not there, or not whole, or has another vocabulary than the recipe, or a further text to
    evaluate on is not one that the same models can read.
    """
    if sweep.data is None:
        return None
    if sweep.preparation and not sweep.data.is_dir():
        if dry:
            _check_others(sweep, None, dry)
            _check_questions(sweep, None, dry)
            return None
        how = shlex.join(("fairseq-rpe", *sweep.preparation))
        raise UserError(f"data folder {sweep.data} does not exist: make it with {how}")
    if dataset.is_prepared(sweep.data):
        raise UserError(
            f"{sweep.data} holds questions, and a sweep trains on a text first: name a text, and give the questions to "
            f"a recipe about answers, e.g. --recipe fire-scrolls --eval-data NAME={sweep.data}"
        )
    corpus.check_folder(sweep.data, "train", "valid", *([] if sweep.questions else [sweep.subset]))
    if sweep.scale is not None:
        sweep.scale.check(sweep.data)
    digest = corpus.digest(sweep.data)
    symbols = corpus.read_dictionary(sweep.data / "dict.txt")
    _check_others(sweep, symbols, dry, digest)
    _check_questions(sweep, symbols, dry)
    return digest


def _check_others(sweep: Sweep, symbols: Sequence[str] | None, dry: bool, digest: str | None = None) -> None:
    """Refuse further texts to evaluate on that are not there, or have another vocabulary, or are one text twice.

    ``symbols`` and ``digest`` are of the text of the training, None where it is not there yet.
    """
    seen = {} if digest is None else {digest: "the one that is trained on"}
    for name, place in sweep.evaluate.items():
        how = shlex.join(("fairseq-rpe", *sweep.preparing(name)))
        if not place.is_dir():
            if dry and name in sweep.prepared:
                continue
            raise UserError(f"data folder {place} does not exist: make it with {how}")
        corpus.check_text(place, sweep.subset)
        if symbols is not None and corpus.read_dictionary(place / "dict.txt") != symbols:
            raise UserError(f"{place} has another vocabulary than {sweep.data}: prepare another folder, e.g. {how}")
        if (same := corpus.digest(place)) in seen:
            raise UserError(f"--eval-data {name}: {place} holds the same text as {seen[same]}: leave it out")
        seen[same] = name


def _check_questions(sweep: Sweep, symbols: Sequence[str] | None, dry: bool) -> None:
    """Refuse folders of questions that are not there, cannot be learned from and asked, or have another vocabulary.

    ``symbols``: the vocabulary of the training, None where its text is not there yet.
    """
    for name, folder in sweep.questions.items():
        place, how = Path(folder.data), shlex.join(("fairseq-rpe", *sweep.preparing_questions(name)))
        if not place.is_dir():
            if dry and folder.prepare:
                continue
            raise UserError(f"data folder {place} does not exist: make it with {how}")
        if not dataset.is_prepared(place):
            raise UserError(f"{place} holds no questions: make another folder, e.g. with {how}")
        corpus.check_folder(place, "train", "valid")
        if symbols is not None and corpus.read_dictionary(place / "dict.txt") != symbols:
            raise UserError(f"{place} has another vocabulary than {sweep.data}: prepare another folder, e.g. {how}")


def check_lengths(sweep: Sweep, cells: list[Cell]) -> None:
    """Refuse a text that does not fill blocks, questions that do not fit, and batches smaller than a block."""
    longest = max([*sweep.lengths, *(cell.plan.settings.tokens for cell in cells if cell.kind == "text")], default=0)
    if sweep.max_tokens and sweep.max_tokens < longest:
        raise UserError(f"--max-tokens {sweep.max_tokens} is less than length {longest}: raise it")
    for request, tokens in ((c.request, c.plan.settings.tokens) for c in cells if c.kind == "answers"):
        if request.data is not None and request.data.is_dir():
            training_data.check_questions(request.data, tokens, request.extra)
    if sweep.data is None or not sweep.data.is_dir():
        return
    tokens = max(cell.plan.settings.tokens for cell in cells if cell.kind != "answers")
    separate = bool(sweep.base.separate_documents)
    training_data.check_blocks(sweep.data, tokens, sweep.base.blocks, separate)
    for data in filter(Path.is_dir, () if sweep.questions else (sweep.data, *sweep.evaluate.values())):
        longest = max(tokens, *sweep.lengths)
        corpus.check_block(data, sweep.subset, longest)
        if sweep.base.blocks == "document" or separate:
            corpus.check_documents(data, sweep.subset)
        if sweep.base.blocks == "document":
            corpus.check_document_block(data, sweep.subset, longest)


def commands(sweep: Sweep, cells: list[Cell], on_slurm: Slurm) -> list[str]:
    """Every command as a line, and as comments what is started in turn."""
    made = [sweep.preparation] if sweep.preparation else []
    made += [sweep.preparing(name) for name in sweep.evaluate if name in sweep.prepared]
    made += [sweep.preparing_questions(name) for name, one in sweep.questions.items() if one.prepare]
    lines = [shlex.join(command_line(*words)) for words in made]
    if on_slurm is not None:
        given = ", ".join(f"{key}={value}" for key, value in slurm.settings(sweep, on_slurm).items())
        firsts = [cell for cell in cells if cell.parent is None]
        lines.append(f"# an array of {len(firsts)} SLURM jobs: {given}")
        if behind := len(cells) - len(firsts):
            lines.append(f"# and one of {behind} that wait for those that they continue (dependency=afterany)")
    base = sweep.base
    gpus = launch.gpus(base, dry=True) if on_slurm is None else 0 if base.device == "cpu" else base.nproc
    for cell in cells:
        if on_slurm is not None:
            lines.append(f"# job {cell.name}{f', after {cell.parent.name}' if cell.parent else ''}:")
        lines.append(shlex.join(cell.train_command))
        if base.world > 1:
            lines.append(f"# starts: {cell.torchrun(on_slurm is not None, gpus)}")
        for evaluation in cell.evaluations:
            lines += [f"# {evaluation.left_out}"] * bool(evaluation.left_out) + [shlex.join(evaluation.command)]
    return lines


def left_out(cells: Sequence[Cell]) -> list[str]:
    """A line for each method that cannot be evaluated at every length, whatever the seed."""
    return list(dict.fromkeys(e.left_out for cell in cells for e in cell.evaluations if e.left_out))


def carry_out(sweep: Sweep, left: Mapping[Cell, list[Stage]], cells: list[Cell], on_slurm: Slurm) -> list[str]:
    """Carry out what is left; returns a line for each run that failed. On this machine no job may be busy with it."""
    if not left:
        return []
    if on_slurm is not None:
        return slurm.execute(sweep, on_slurm, left)
    with contextlib.ExitStack() as held:
        for cell in left:
            busy = f"a job is busy with {cell.name}: wait for it, or stop it with scancel"
            held.enter_context(lock(cell.folder.lock, busy))
        return local_executor.execute(
            left, cells, local_executor.places(sweep.base.device, sweep.base.nproc, sweep.jobs)
        )


def state(sweep: Sweep, cells: list[Cell]) -> State:
    """What the sweep is about, for the report; methods, tasks, lengths and seeds may be added to those on record.

    Raises UserError: the folder holds another sweep.
    """
    folder = SweepFolder(sweep.out)
    before = folder.state() if folder.state_path.exists() else None
    plan, of_tasks = cells[0].plan, ("data", "tokens") if sweep.algorithms else ()
    # what the runs do not share
    own: dict[str, Any] = dict.fromkeys(("rpe", "seed", "positions_train", "positions_eval", *of_tasks))
    settings = SweepSettings(**{**vars(plan.settings), **own}, updates=plan.updates, subset=sweep.subset)
    last = cells[-1].plan
    further: dict[str, Any] = {**vars(last.settings), **own, "data": None, "finetune_from": None}
    tuned = SweepSettings(**further, updates=last.updates, subset=sweep.subset) if sweep.questions else None
    asking = ((sweep.scale and sweep.scale.asking) or Asking()) if sweep.questions else None
    if before is not None:
        if other := settings.difference(replace(before.settings, **own)):
            raise UserError(f"{sweep.out} holds another sweep ({other}): choose another --out")
        if before.kind != ("algorithms" if sweep.algorithms else "answers" if sweep.questions else "text"):
            raise UserError(f"{sweep.out} holds a sweep of another kind: choose another --out")
        if before.tuned and tuned and (other := tuned.difference(before.tuned)):
            raise UserError(f"{sweep.out} holds a sweep with another fine-tuning ({other}): choose another --out")
        if before.asking != asking:
            raise UserError(f"{sweep.out} holds answers asked for in another way: choose another --out")
    known = dict(before.methods) if before else {}
    for method in sweep.methods:
        if known.get(method.name, method) != method:
            raise UserError(f"{sweep.out} holds other positions for '{method.name}': choose another --out")
        known[method.name] = method
    old = before or State(settings, (), ())
    about = {name: getattr(sweep.recipe or old, name) for name in ("title", "paper", "published")}
    return State(
        settings=settings,
        recipe=sweep.recipe_name or old.recipe,
        **about,
        encodings=_added(old.encodings, (m.name for m in sweep.methods)),
        methods=known,
        evaluate=_evaluated(sweep, old, cells),
        questions=_on_questions(sweep, old, cells),
        tuned=tuned,
        asking=asking,
        seeds=tuple(sorted({*old.seeds, *sweep.seeds})),
        lengths=tuple(sorted({*old.lengths, *(n for cell in cells for n in cell.lengths)})),
        # what is carried out, by run: nothing is known of the runs of an older version
        commands=old.commands,
        data=str(sweep.data) if sweep.data is not None else None,
        algorithms=_added(old.algorithms, sweep.algorithms),
    )


def _evaluated(sweep: Sweep, old: State, cells: list[Cell]) -> dict[str, Scored]:
    """The further texts on record and those that are asked for now."""
    found = dict(old.evaluate)
    for one in (evaluation for cell in cells for evaluation in cell.evaluations):
        if one.corpus is None or not isinstance(one.keys[0], TextKey):
            continue
        if one.corpus in found and found[one.corpus].digest != one.keys[0].data:
            raise UserError(f"{sweep.out} holds another text '{one.corpus}': choose another name or --out")
        found[one.corpus] = Scored(str(one.data), one.keys[0].data)
    return found


def _on_questions(sweep: Sweep, old: State, cells: list[Cell]) -> dict[str, Questions]:
    """The folders of questions on record and those that are asked for now, with the sets that were asked."""
    found = dict(old.questions)
    for name, folder in sweep.questions.items():
        place, names = Path(folder.data), [m.run_name(seed, name) for m in sweep.methods for seed in sweep.seeds]
        keys = [key for cell in cells if cell.name in names for one in cell.evaluations for key in one.keys]
        sets = dict.fromkeys(key.set for key in keys if isinstance(key, QuestionKey))
        made = Questions(str(place), dataset.digest(place), tuple(sets))
        if name in found and found[name].digest != made.digest:
            raise UserError(f"{sweep.out} holds other questions '{name}': choose another name or --out")
        found[name] = replace(made, sets=_added(found[name].sets if name in found else (), made.sets))
    return found


def noted(record: State, left: Mapping[Cell, list[Stage]]) -> State:
    """The state with the commands of what is left among those that its runs have on record."""
    known = {run: dict(stages) for run, stages in record.commands.items()}
    for cell, stages in left.items():
        lines = known.setdefault(cell.name, {})
        for stage in stages:
            lines[stage.name] = _added(lines.get(stage.name, ()), (shlex.join(stage.command),))
    return replace(record, commands=known)


def _added(known: Sequence[str], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*known, *more]))
