"""What the log of a training run says about it, read from fairseq's own lines."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

_STATISTICS = re.compile(r"\| (train_inner|train|valid) \| (\{.*\})\s*$")
TRAINS = "| fairseq_cli.train | training on "
BEGINS = "| fairseq_cli.train | Start iterating over samples"  # of every epoch, after its batches are made
_FACTS = {
    "parameters": r"num\. shared model params: ([\d,]+)",
    "vocabulary": r"\| dictionary: ([\d,]+) types",
    "backend": r"\| attention backend: (\S+)",
    "data": r"\| loaded [\d,]+ examples from: (.+)/train\s*$",
}
_NEEDED = {"train_inner": {"num_updates", "loss"}, "train": set(), "valid": {"valid_loss"}}


@dataclass
class TrainLog:
    """One run. What its log does not say is ``None`` or empty.

    Attributes:
        loss: training loss in bits per token by update, each the mean since the line before.
        valid: the same on the validation split.
        seconds: of all starts together, validation and saving included, up to the last line of each.
        tokens_per_second: median over the lines of the log.
    """

    loss: dict[int, float] = field(default_factory=dict)
    valid: dict[int, float] = field(default_factory=dict)
    seconds: float | None = None
    tokens_per_second: float | None = None
    parameters: int | None = None
    vocabulary: int | None = None
    backend: str | None = None
    data: str | None = None


def statistics(line: str) -> tuple[str, dict[str, float]] | None:
    """What a line says in numbers, after train_inner, train or valid; nothing if it does not, or is damaged."""
    if (match := _STATISTICS.search(line)) is None:
        return None
    kind = match[1]
    try:
        values = {key: float(value) for key, value in json.loads(match[2]).items()}
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    whole = all(math.isfinite(value) for key, value in values.items() if key.endswith("num_updates"))
    return (kind, values) if whole and _NEEDED[kind] <= values.keys() else None


def fact(name: str, line: str) -> str | None:
    """What a line says of the run's parameters, vocabulary, backend or data, if it does."""
    return match[1] if (match := re.search(_FACTS[name], line)) else None


@dataclass
class Heard:
    """What the lines of a training have said so far: updates done, loss in bits per token, tokens/s, validation."""

    updates: int = 0
    loss: float | None = None
    speed: float | None = None
    valid: dict[str, float] = field(default_factory=dict)

    def hear(self, line: str) -> str | None:
        """Take in a line; says of what it is in numbers, as :func:`statistics` does."""
        kind, values = statistics(line) or (None, {})
        if kind == "train_inner":
            self.updates, self.loss = int(values["num_updates"]), values["loss"]
            self.speed = values.get("wps", self.speed)
        elif kind is not None:
            self.updates = int(values.get(f"{kind}_num_updates", self.updates))
            self.valid = values if kind == "valid" else self.valid
        return kind


def read(path: Path) -> TrainLog:
    """Read a log; a missing one says nothing."""
    found = TrainLog()
    if not path.is_file():
        return found
    walls, speeds = [0.0], []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if TRAINS in line:
            walls.append(0.0)
            continue
        if (told := statistics(line)) is None:
            for name in _FACTS:
                if (text := fact(name, line)) is not None:
                    counted = name in ("parameters", "vocabulary")
                    setattr(found, name, int(text.replace(",", "")) if counted else text)
            continue
        kind, values = told
        prefix = "" if kind == "train_inner" else f"{kind}_"
        update = int(values.get(f"{prefix}num_updates", 0))
        if kind == "valid":
            found.valid[update] = values["valid_loss"]
            continue
        walls[-1] = values.get(f"{prefix}wall", walls[-1])
        if kind == "train_inner":
            # a resumed run repeats what it did after its last checkpoint
            found.loss[update] = values["loss"]
            speeds.append(values.get("wps", math.nan))
    speeds = [speed for speed in speeds if speed > 0]
    found.seconds = sum(walls) or None
    found.tokens_per_second = median(speeds) if speeds else None
    return found
