"""What a run leaves on the disk, by name: checkpoints, the record of its settings, its starts, logs and results."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.runs.settings import Plan, Settings
from fairseq_rpe.utils import records
from fairseq_rpe.utils.files import file_digest, read_json, write_json

SWEEP_RECORD = "sweep.json"  # in the folder of a sweep
Which = Literal["last", "best"]  # of a run's checkpoints; the best one by its validations


@dataclass(frozen=True)
class Finished:
    """The end of a run: its updates and the digests of its last checkpoint and of the best one by validation."""

    updates: int | None = None
    checkpoint: str | None = None
    best: str | None = None

    def digest(self, which: Which) -> str | None:
        """That of the last checkpoint or of the best one."""
        return self.checkpoint if which == "last" else self.best


@dataclass(frozen=True)
class RunRecord:
    """What ``run.json`` says of a run."""

    settings: Settings = field(default_factory=Settings)
    updates: int | None = None
    finished: Finished = field(default_factory=Finished)


@dataclass(frozen=True)
class Start:
    """One start of a training: when, after which update, on what. ``None``: not on record."""

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
    starts: tuple[Start, ...] = ()


class CheckpointFolder:
    """The ``--save-dir`` of a run; ``lock`` is held while a training writes here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = path / "checkpoint_last.pt"
        self.best = path / "checkpoint_best.pt"
        self.lock = path / ".lock"
        self.record_path = path / "run.json"
        self.environment = path / "environment.json"
        self.log = path / "train.log"

    def record(self) -> RunRecord | None:
        """What is on record of the run, nothing if it never began."""
        if not self.record_path.exists():
            return None
        return records.read(RunRecord, read_json(self.record_path), str(self.record_path), "the run", strict=False)

    def write(self, plan: Plan, finished: Finished | None = None) -> None:
        """Put a run on record."""
        ended = {} if finished is None else {"finished": records.write(finished)}
        write_json(self.record_path, {"settings": plan.settings.record(), "updates": plan.updates, **ended})

    def finished(self, plan: Plan) -> str | None:
        """The digest of the finished run's checkpoint, or nothing if there is work left.

        Raises UserError: the folder holds another run.
        """
        record = self.record() if self.last.exists() else None
        if record is None:
            return None
        if other := plan.settings.difference(record.settings):
            remedy = "choose another folder or delete it"
            if other.startswith("warmup is"):  # a default one depends on --updates, which may be raised
                remedy = f"give --warmup {record.settings.warmup} to continue it, or {remedy}"
            raise UserError(f"{self.path} holds another run ({other}): {remedy}")
        if record.finished.updates != plan.updates:
            return None
        found = file_digest(self.last)
        return found if found == record.finished.checkpoint else None

    def file(self, which: Which) -> Path:
        """The last checkpoint or the best one."""
        return self.last if which == "last" else self.best

    def chosen(self, which: Which) -> str:
        """The digest of a finished run's last checkpoint or best one.

        Raises UserError: that file is not what the run left.
        """
        record, file = self.record(), self.file(which)
        found = record and record.finished.digest(which)
        if not found or not file.exists() or file_digest(file) != found:
            raise UserError(f"{file} is not what its finished training left: delete {self.path} to train again")
        return found

    def starts(self) -> list[Start]:
        """What is on record of the run's starts, oldest first; nothing for a run of an older version."""
        if not self.environment.exists():
            return []
        found = records.read(_Starts, read_json(self.environment), str(self.environment), "the record", strict=False)
        return list(found.starts)

    def add_start(self, start: Start) -> None:
        """Put one more start on record."""
        write_json(self.environment, {"starts": [records.write(one) for one in (*self.starts(), start)]})


class RunFolder:
    """The folder of one run of a sweep; ``lock`` is held by whoever carries out the run's stages."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.checkpoints = CheckpointFolder(path / "checkpoints")
        self.results = path / "eval.jsonl"
        self.train_log = path / "train.log"
        self.eval_log = path / "eval.log"
        self.lock = path / ".lock"


def check_no_run(flag: str, folder: Path) -> None:
    """Refuse, as the folder of a sweep, one that a training or an extension has written.

    Args:
        flag: the option that names the folder, for the message.
        folder: it need not exist.

    Raises:
        UserError: there is the record of a run in it.
    """
    for place in (CheckpointFolder(folder), RunFolder(folder).checkpoints):
        if place.record_path.exists():
            raise UserError(f"{flag} {folder} is the folder of a run (it has {place.record_path}): name another one")


def check_no_sweep(flag: str, folder: Path) -> None:
    """Refuse, as the folder of a training or an extension, one that a sweep has written.

    Args:
        flag: the option that names the folder, for the message.
        folder: it need not exist.

    Raises:
        UserError: there is the record of a sweep in it.
    """
    if (folder / SWEEP_RECORD).exists():
        raise UserError(f"{flag} {folder} is the folder of a sweep (it has {SWEEP_RECORD}): name another one")
