"""Files of a run: checkpoints, run.json (settings), environment.json (starts), logs and results."""

import os
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fairseq_rpe.checkpoints.checkpoint_file import intermediate_path, keep_weights
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.renamed import LAST_COMMIT_OF_OLD_LAYOUT
from fairseq_rpe.runs.settings import RunSettings, TrainingPlan
from fairseq_rpe.runs.training_config import TrainingConfig, read_config
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import sha256_of_files
from fairseq_rpe.utils.json_files import read_json, write_json

LAYOUT = 2  # value of "layout" in run.json and sweep.json
SWEEP_RECORD = "sweep.json"  # in the folder of a sweep
CheckpointKind = Literal["last", "best"]  # "best": best validation


@dataclass(frozen=True)
class FinishedTraining:
    """End of a run, recorded in run.json when the last update is done.

    The digests are SHA-256 digests of files, so that a later change of a file is noticed. The fields have the names in
    run.json.

    Attributes:
        updates: number of updates that were done, counted from the start of the first training of the run.
        checkpoint: digest of the last checkpoint.
        best: digest of the checkpoint with the best validation; None if no such file was saved.
        intermediate: digests of the weights that were kept on the way, by number of updates (as text, as JSON has it).
    """

    updates: int | None = None
    checkpoint: str | None = None
    best: str | None = None
    intermediate: Mapping[str, str] = field(default_factory=dict)

    def digest(self, kind: CheckpointKind) -> str | None:
        """Return the digest of the last or best checkpoint."""
        return self.checkpoint if kind == "last" else self.best


@dataclass(frozen=True)
class RunRecord:
    """Contents of run.json.

    Attributes:
        settings: settings of the training.
        updates: number of updates that the latest start was to reach; a later start may raise it.
        finished: end of the training; all of its fields are None until then.
    """

    settings: RunSettings = field(default_factory=RunSettings)
    updates: int | None = None
    finished: FinishedTraining = field(default_factory=FinishedTraining)


@dataclass(frozen=True)
class TrainingStart:
    """One start of a training; ``None``: not recorded.

    Attributes:
        time: UTC time in ISO format.
        from_update: updates done before this start.
        fairseq_rpe: version of this package.
        commit: git commit of this package, if git tracks it.
        fairseq, torch, python: versions.
        system, processor: names of the operating system and the processor.
        cores: number of processor cores that the training may use.
        gpus: names of the GPUs; empty if the training runs on processors.
        working_folder: current folder of the command.
        threads: value of OMP_NUM_THREADS in each process.
    """

    time: str | None = None
    from_update: int | None = None
    fairseq_rpe: str | None = None
    commit: str | None = None
    fairseq: str | None = None
    torch: str | None = None
    python: str | None = None
    system: str | None = None
    processor: str | None = None
    cores: int | None = None
    gpus: tuple[str, ...] | None = None
    working_folder: str | None = None
    threads: str | None = None


@dataclass(frozen=True)
class _Starts:
    """Contents of environment.json: the starts of a training, oldest first."""

    starts: tuple[TrainingStart, ...] = ()


def check_layout(record: Mapping[str, object], path: Path, kind: str) -> None:
    """Check that a record has the current layout.

    Args:
        record: contents of run.json or sweep.json.
        path: the file, for the message.
        kind: "run" or "sweep", for the message.

    Raises:
        UserError: the record was written by a version with another layout.
    """
    layout = record.get("layout")
    if layout is None:
        raise UserError(
            f"{path} is the record of a {kind} in an earlier layout: read it with commit {LAST_COMMIT_OF_OLD_LAYOUT} "
            "of fairseq-rpe, or use another folder"
        )
    if layout != LAYOUT:
        raise UserError(
            f"{path} is the record of a {kind} in layout {reprlib.repr(layout)}, this version reads layout {LAYOUT}: "
            "update fairseq-rpe, or use another folder"
        )


def read_run_config(path: Path) -> TrainingConfig:
    """Read the configuration in run.json.

    Args:
        path: the file.

    Returns:
        The configuration. Its relative paths are those in the working folder that the file names, so that they mean
        the same in every current folder; if that folder no longer exists, they stay relative to the current one.

    Raises:
        UserError: the file is missing or damaged, has another layout, or records no configuration.
    """
    if not path.is_file():
        raise UserError(f"--from-run {path} {'is not a file' if path.exists() else 'does not exist'}: name a run.json")
    record = read_json(path)
    check_layout(record, path, "run")
    if "config" not in record:
        raise UserError(f"{path} records no configuration: start the training with its options instead")
    config = read_config(record["config"], str(path))
    folder = str(record.get("working_folder", "."))
    is_elsewhere = os.path.isdir(folder) and not os.path.samefile(folder, ".")
    return config.with_paths_from(Path(folder)) if is_elsewhere else config


def _config_entries(config: TrainingConfig) -> dict[str, object]:
    """Return the entries of run.json that :func:`read_run_config` reads."""
    return {"layout": LAYOUT, "config": config.to_dict(), "working_folder": os.getcwd()}


class CheckpointFolder:
    """Folder of a run's checkpoints and records, ``--out`` of ``train``.

    A training holds a lock on ``lock`` while it writes here.

    Args:
        path: the folder; it need not exist.

    Attributes:
        last, best: paths of the last checkpoint, and of that with the best validation.
        lock: file that the training locks.
        record_path: path of run.json.
        environment: path of environment.json.
        log: path of train.log, the messages of fairseq-train. ``train`` writes it with the log format ``progress``
            only. A sweep uses ``json``, and writes the output of ``train`` to :attr:`RunFolder.train_log`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = path / "checkpoint_last.pt"
        self.best = path / "checkpoint_best.pt"
        self.lock = path / ".lock"
        self.record_path = path / "run.json"
        self.environment = path / "environment.json"
        self.log = path / "train.log"

    def read_record(self) -> RunRecord | None:
        """Read run.json; None if the run never began.

        Raises:
            UserError: the record is damaged or has another layout.
        """
        path = self.record_path
        if not path.exists():
            return None
        record = read_json(path)
        check_layout(record, path, "run")
        # not strict: a later version may have written keys that this one does not know
        return records.read_record(RunRecord, record, str(path), "the run", strict=False)

    def write_config(self, config: TrainingConfig) -> None:
        """Write a configuration to run.json, from which ``train --from-run`` starts.

        The other entries of the file stay, so that a finished run remains finished; :meth:`write_record` drops them.

        Args:
            config: configuration of the training.
        """
        record = read_json(self.record_path) if self.record_path.exists() else {}
        if (changed := {**record, **_config_entries(config)}) != record:
            write_json(self.record_path, changed)

    def write_record(
        self, config: TrainingConfig, plan: TrainingPlan, finished: FinishedTraining | None = None
    ) -> None:
        """Write all of run.json anew; without ``finished`` the run is no longer recorded as finished.

        Args:
            config: configuration of the training.
            plan: settings and number of updates of the training.
            finished: end of the training, None before it.
        """
        record = {**_config_entries(config), "settings": plan.settings.to_dict(), "updates": plan.updates}
        write_json(self.record_path, record if finished is None else {**record, "finished": records.to_dict(finished)})

    def finished_digest(self, plan: TrainingPlan) -> str | None:
        """Return the digest of the last checkpoint if the run is finished.

        Args:
            plan: settings and number of updates of the training.

        Returns:
            The digest. None if the training is not finished, or if its last checkpoint was changed since. The caller
            then starts the training again, which continues from the newest checkpoint and records the end anew.

        Raises:
            UserError: the folder holds another run.
        """
        record = self.read_record() if any(self.path.glob("checkpoint*.pt")) else None
        if record is None:
            return None
        if setting := plan.settings.first_difference(record.settings):
            remedy = "choose another folder or delete it"
            if setting == "warmup":  # the default depends on --updates, which may be raised
                remedy = f"give --warmup {record.settings.warmup} to continue it, or {remedy}"
            difference = plan.settings.difference(record.settings)
            raise UserError(f"{self.path} holds another run ({difference}): {remedy}")
        if record.finished.updates != plan.updates or not self.last.exists():
            return None
        digest = sha256_of_files(self.last)
        return digest if digest == record.finished.checkpoint else None

    def intermediate_path(self, updates: int) -> Path:
        """Return the file of the model after a number of updates, which need not exist.

        It is the file that ``--keep-at`` writes, or a checkpoint that fairseq has kept at its interval.

        Args:
            updates: number of updates.
        """
        path = intermediate_path(self.path, updates)
        of_interval = sorted(self.path.glob(f"checkpoint_[0-9]*_{updates}.pt"))
        return of_interval[0] if of_interval and not path.exists() else path

    def missing_updates(self, keep_at: Collection[int], done: int) -> list[int]:
        """Return the updates up to ``done`` whose weights should have been kept and are not in the folder.

        Args:
            keep_at: numbers of updates.
            done: updates of the training so far; weights are missing only if it has passed their update.
        """
        return sorted(n for n in keep_at if n < done and not self.intermediate_path(n).exists())

    def check_intermediate(self, keep_at: Collection[int], done: int, option: str) -> None:
        """Check that the folder has the weights of all updates that a training has passed.

        Weights of the update ``done`` itself are taken from the last checkpoint; see :meth:`keep_last`.

        Args:
            keep_at: numbers of updates.
            done: updates of the training so far.
            option: option that names the updates, for the message.

        Raises:
            UserError: the weights of an update are missing.
        """
        if missing := self.missing_updates(keep_at, done):
            raise UserError(
                f"{self.path} is at update {done} and did not keep the weights of update {missing[0]}: leave "
                f"{missing[0]} out of {option}, or delete the folder to train again"
            )

    def keep_last(self, keep_at: Collection[int], done: int) -> None:
        """Write the weights of the last checkpoint to their file if ``keep_at`` names its update and no file exists.

        Args:
            keep_at: numbers of updates.
            done: updates of the last checkpoint.
        """
        if done in keep_at and not self.intermediate_path(done).exists():
            keep_weights(self.last, done)

    def record_intermediate(self, keep_at: Collection[int]) -> None:
        """Add the digests of kept weights to the record of a finished run, if it lacks them.

        A training records what ``--keep-at`` has kept; the record lacks checkpoints that fairseq has kept otherwise.

        Args:
            keep_at: numbers of updates whose files exist, except for the last update, whose weights are kept now.
        """
        record = self.read_record()
        if record is not None and record.finished.updates is not None:
            self.keep_last(keep_at, record.finished.updates)
        recorded = record.finished.intermediate if record is not None else {}
        if missing := [updates for updates in keep_at if str(updates) not in recorded]:
            digests = {str(n): sha256_of_files(self.intermediate_path(n)) for n in sorted(missing)}
            table = read_json(self.record_path)
            table["finished"] = {**table["finished"], "intermediate": {**recorded, **digests}}
            write_json(self.record_path, table)

    def intermediate_digest(self, updates: int) -> str:
        """Return the digest of kept weights of a finished run, which are about to be evaluated.

        Args:
            updates: number of updates.

        Returns:
            The digest.

        Raises:
            UserError: the file is missing, not recorded, or was changed after the training.
        """
        record, file = self.read_record(), self.intermediate_path(updates)
        digest = record.finished.intermediate.get(str(updates)) if record is not None else None
        if digest is None or not file.exists() or sha256_of_files(file) != digest:
            raise UserError(f"{file} was changed after its training: delete {self.path} to train again")
        return digest

    def checkpoint_path(self, kind: CheckpointKind) -> Path:
        """Return the path of the last or best checkpoint."""
        return self.last if kind == "last" else self.best

    def checkpoint_digest(self, kind: CheckpointKind) -> str:
        """Return the digest of the last or best checkpoint of a finished run, which is about to be evaluated.

        A checkpoint that was changed is an error here: a finished run is not trained again, so nothing would repair it.

        Args:
            kind: "last" or "best".

        Returns:
            The digest.

        Raises:
            UserError: the file is missing or was changed after the training.
        """
        record, file = self.read_record(), self.checkpoint_path(kind)
        digest = record.finished.digest(kind) if record is not None else None
        if not digest or not file.exists() or sha256_of_files(file) != digest:
            raise UserError(f"{file} was changed after its training: delete {self.path} to train again")
        return digest

    def read_starts(self) -> list[TrainingStart]:
        """Read environment.json: the starts of the training, oldest first; empty without the file."""
        if not self.environment.exists():
            return []
        path = self.environment
        # not strict, as in read_record
        return list(records.read_record(_Starts, read_json(path), str(path), "the record", strict=False).starts)

    def add_start(self, start: TrainingStart) -> None:
        """Append a start to environment.json."""
        write_json(self.environment, {"starts": [records.to_dict(item) for item in (*self.read_starts(), start)]})


class RunFolder:
    """Folder of one run of a sweep: checkpoints, logs and results.

    The process that runs the stages of the run holds a lock on ``lock``.

    Args:
        path: the folder; it need not exist.

    Attributes:
        checkpoints: folder of the training.
        results: measurements, one JSON object a line.
        predictions: predicted answers of exact-match measurements, one JSON object a line.
        answers: folder of the answers to questions, with a folder for each method.
        train_log, eval_log: paths of the output of the commands ``train`` and ``eval…`` that the sweep starts.
        lock: file that the process locks.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.checkpoints = CheckpointFolder(path / "checkpoints")
        self.results = path / "eval.jsonl"
        self.predictions = path / "predictions.jsonl"
        self.answers = path / "answers"
        self.train_log = path / "train.log"
        self.eval_log = path / "eval.log"
        self.lock = path / ".lock"


def check_no_run(flag: str, folder: Path) -> None:
    """Check that a folder for a sweep is not that of a single training (``train``) or further training (``extend``).

    Args:
        flag: option that names the folder, for the message.
        folder: the folder; it need not exist.

    Raises:
        UserError: the folder has a run.json.
    """
    for checkpoints in (CheckpointFolder(folder), RunFolder(folder).checkpoints):
        path = checkpoints.record_path
        if path.exists():
            raise UserError(f"{flag} {folder} is the folder of a run (it has {path}): name another one")


def check_no_sweep(flag: str, folder: Path) -> None:
    """Check that a folder for a single training (``train``) or further training (``extend``) is not that of a sweep.

    Args:
        flag: option that names the folder, for the message.
        folder: the folder; it need not exist.

    Raises:
        UserError: the folder has a sweep.json.
    """
    if (folder / SWEEP_RECORD).exists():
        raise UserError(f"{flag} {folder} is the folder of a sweep (it has {SWEEP_RECORD}): name another one")
