"""What a run leaves on the disk, by name: checkpoints, the record of its settings, its starts, logs and results."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from fairseq_rpe.core import records
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import file_digest, read_json, write_json
from fairseq_rpe.runs.settings import Plan, Settings


@dataclass(frozen=True)
class Finished:
    """The end of a run: its updates and the digest of its last checkpoint."""

    updates: int | None = None
    checkpoint: str | None = None


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
class CheckpointFolder:
    """The ``--save-dir`` of a run."""

    path: Path

    @property
    def last(self) -> Path:
        return self.path / "checkpoint_last.pt"

    @property
    def lock(self) -> Path:
        """Held while a training writes here."""
        return self.path / ".lock"

    @property
    def record_path(self) -> Path:
        return self.path / "run.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

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

        Raises:
            UserError: the folder holds another run.
        """
        record = self.record() if self.last.exists() else None
        if record is None:
            return None
        self._check_same(record.settings, plan)
        if record.finished.updates != plan.updates:
            return None
        found = file_digest(self.last)
        return found if found == record.finished.checkpoint else None

    def _check_same(self, settings: Settings, plan: Plan) -> None:
        before, wanted = settings.record(), plan.settings.record()
        for key in {**wanted, **before}:
            if before.get(key) != wanted.get(key):
                raise UserError(
                    f"{self.path} holds another run ({key} is {before.get(key)!r} there, {wanted.get(key)!r} here): "
                    "choose another folder or delete it"
                )

    def starts(self) -> list[Start]:
        """What is on record of the run's starts, oldest first; nothing for a run of an older version."""
        if not self.environment.exists():
            return []
        found = read_json(self.environment).get("starts", [])
        return [records.read(Start, one, str(self.environment), "a start", strict=False) for one in found]

    def add_start(self, start: Start) -> None:
        """Put one more start on record."""
        write_json(self.environment, {"starts": [_said(one) for one in (*self.starts(), start)]})


def _said(start: Start) -> dict[str, object]:
    found = {f.name: getattr(start, f.name) for f in fields(start)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run of a sweep."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path / "checkpoints")

    @property
    def results(self) -> Path:
        return self.path / "eval.jsonl"

    @property
    def train_log(self) -> Path:
        return self.path / "train.log"

    @property
    def eval_log(self) -> Path:
        return self.path / "eval.log"

    @property
    def job(self) -> Path:
        """What a job elsewhere has to know to carry out the run."""
        return self.path / "cell.json"

    @property
    def lock(self) -> Path:
        """Held by whoever carries out the run's stages."""
        return self.path / ".lock"
