"""Parses the log of a training from the lines of fairseq-train."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

_STATISTICS = re.compile(r"\| (train_inner|train|valid) \| (\{.*\})\s*$")
TRAINING_LINE = "| fairseq_cli.train | training on "
EPOCH_LINE = "| fairseq_cli.train | Start iterating over samples"  # at each epoch, after its batches are made
# fact of a run, a field of TrainLog -> pattern of its value
_FACTS = {
    "parameters": r"num\. shared model params: ([\d,]+)",
    "vocabulary": r"\| dictionary: ([\d,]+) types",
    "backend": r"\| attention backend: (\S+)",
    "data": r"\| loaded [\d,]+ examples from: (.+)/train\s*$",
}
# kind of a line of statistics -> values without which it is damaged
_REQUIRED = {"train_inner": {"num_updates", "loss"}, "train": set(), "valid": {"valid_loss"}}


@dataclass
class TrainLog:
    """Contents of a run's log; what the log lacks is ``None`` or empty.

    Attributes:
        loss: training loss in bits per token by update, each the mean since the previous line.
        valid: validation loss in bits per token by update.
        seconds: time of all starts up to the last line of each, validation and saving included.
        tokens_per_second: median over the lines of the log.
        parameters: parameters of the model.
        vocabulary: types of the dictionary.
        backend: attention backend.
        data: data folder.
    """

    loss: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)
    seconds: float | None = None
    tokens_per_second: float | None = None
    parameters: int | None = None
    vocabulary: int | None = None
    backend: str | None = None
    data: str | None = None


def parse_statistics(line: str) -> tuple[str, dict[str, float]] | None:
    """Parse a line of statistics.

    Args:
        line: line of fairseq-train.

    Returns:
        The kind of line (train_inner, train or valid) and its values; None for another or a damaged line.
    """
    if (match := _STATISTICS.search(line)) is None:
        return None
    kind = match[1]
    try:
        values = {key: float(value) for key, value in json.loads(match[2]).items()}
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    # a damaged line may have Infinity or NaN for the number of updates, which is no integer
    has_updates = all(math.isfinite(value) for key, value in values.items() if key.endswith("num_updates"))
    return (kind, values) if has_updates and _REQUIRED[kind] <= values.keys() else None


def parse_fact(name: str, line: str) -> str | None:
    """Parse a line that states a fact of the run.

    Args:
        name: parameters, vocabulary, backend or data.
        line: line of fairseq-train.

    Returns:
        The value as text, None if the line does not state it.
    """
    return match[1] if (match := re.search(_FACTS[name], line)) else None


@dataclass
class TrainingLogParser:
    """State of a training, updated line by line.

    Attributes:
        updates: updates done.
        loss: training loss in bits per token.
        speed: tokens per second.
        valid: values of the last validation.
    """

    updates: int = 0
    loss: float | None = None
    speed: float | None = None
    valid: dict[str, float] = field(default_factory=dict)

    def parse_line(self, line: str) -> str | None:
        """Update the state; returns the kind of the line, None if it has no statistics."""
        kind, values = parse_statistics(line) or (None, {})
        if kind == "train_inner":
            self.updates, self.loss = int(values["num_updates"]), values["loss"]
            self.speed = values.get("wps", self.speed)
        elif kind is not None:
            self.updates = int(values.get(f"{kind}_num_updates", self.updates))
            self.valid = values if kind == "valid" else self.valid
        return kind


def read_log(path: Path) -> TrainLog:
    """Read the log of a run.

    Args:
        path: the log; an empty record is returned if it does not exist.

    Returns:
        What the log records.
    """
    log = TrainLog()
    if not path.is_file():
        return log
    start_seconds = [0.0]  # of each start: its time up to its last line so far
    speeds: list[float] = []  # tokens per second
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if TRAINING_LINE in line:
            start_seconds.append(0.0)
        elif (statistics := parse_statistics(line)) is None:
            _add_facts(log, line)
        else:
            kind, values = statistics
            prefix = "" if kind == "train_inner" else f"{kind}_"
            update = int(values.get(f"{prefix}num_updates", 0))
            if kind == "valid":
                log.valid[update] = values["valid_loss"]
                continue
            start_seconds[-1] = values.get(f"{prefix}wall", start_seconds[-1])
            if kind == "train_inner":
                # a resumed run repeats the updates after its last checkpoint: the later values count
                log.loss[update] = values["loss"]
                speeds.append(values.get("wps", math.nan))
    speeds = [speed for speed in speeds if speed > 0]  # drops NaN, too
    log.seconds = sum(start_seconds) or None
    log.tokens_per_second = median(speeds) if speeds else None
    return log


def _add_facts(log: TrainLog, line: str) -> None:
    """Store the facts of the run that a line states."""
    for name in _FACTS:
        if (text := parse_fact(name, line)) is not None:
            is_number = name in ("parameters", "vocabulary")
            setattr(log, name, int(text.replace(",", "")) if is_number else text)
