"""What evaluations leave behind: JSON lines that say what was measured of what, so that nothing is measured twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from fairseq_rpe.core import files, records


class Result(Protocol):
    """A measurement. ``key``: what makes two of them the same one."""

    @property
    def key(self) -> Any: ...

    def record(self) -> dict[str, object]: ...


Found = TypeVar("Found", bound=Result)


@dataclass(frozen=True)
class TextKey:
    """What a perplexity is of; ``checkpoint`` and ``data`` are digests. Not the engine, which must not matter."""

    checkpoint: str
    data: str
    subset: str
    length: int
    rpe: str | None = None
    positions: str | None = None
    compute_dtype: str | None = None
    attention_prune: float | None = None


@dataclass(frozen=True)
class Buckets:
    """Mean loss in bits of the tokens at positions up to ``upto`` (inclusive) and beyond the bucket before."""

    upto: tuple[int, ...]
    loss_base2: tuple[float, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TextResult:
    """A perplexity per token over every token of a split, in blocks of ``length`` tokens.

    ``loss_base2`` in bits per token, ``seconds`` of the measurement, ``peak_mb`` in MiB. What was not measured, or not
    yet when the result was written, is ``None``.
    """

    encoding: str = ""
    checkpoint: str
    data: str = ""
    subset: str
    rpe: str | None = None
    positions: str | None = None
    compute_dtype: str | None = None
    attention_prune: float | None = None
    length: int
    tokens: int
    loss_base2: float
    ppl: float
    seconds: float | None = None
    bits_per_byte: float | None = None
    word_ppl: float | None = None
    engine: str | None = None
    peak_mb: float | None = None
    positions_loss: Buckets | None = None
    always: ClassVar[tuple[str, ...]] = ("rpe", "positions")

    @property
    def key(self) -> TextKey:
        return part(TextKey, self)

    def record(self) -> dict[str, object]:
        """As a line of JSON keeps it."""
        return kept(self, self.always)


@dataclass(frozen=True)
class AnswerKey:
    """What a share of exact answers is of; ``unit``: of interpolation's ratio, items or tokens."""

    checkpoint: str
    algorithm: str
    split: str
    length: int
    rpe: str | None = None
    positions: str | None = None
    unit: str = "items"


@dataclass(frozen=True, kw_only=True)
class AnswerResult:
    """Exact answers to examples of ``length`` items; ``accuracy`` = right / examples, ``transform``: of positions."""

    encoding: str = ""
    checkpoint: str
    algorithm: str
    split: str
    rpe: str | None = None
    positions: str | None = None
    unit: str
    length: int
    examples: int
    right: int
    accuracy: float
    transform: str
    seconds: float | None = None
    always: ClassVar[tuple[str, ...]] = ("rpe", "positions")

    @property
    def key(self) -> AnswerKey:
        return part(AnswerKey, self)

    def record(self) -> dict[str, object]:
        """As a line of JSON keeps it."""
        return kept(self, self.always)


def part(kind: type[Any], of: object) -> Any:
    """The fields of ``of`` that a smaller record has."""
    return kind(**{f.name: getattr(of, f.name) for f in fields(kind)})


def kept(result: Any, always: Sequence[str]) -> dict[str, object]:
    """The fields of a result that say something, and those in ``always``."""
    return {name: value for name, value in records.write(result).items() if value is not None or name in always}


def read(kind: type[Found], path: Path) -> list[Found]:
    """The results in a JSON-lines file, none if there is no such file."""
    lines = files.read_json_lines(path)
    return [records.read(kind, row, str(path), f"line {n}", strict=False) for n, row in enumerate(lines, start=1)]


def resumed(
    kind: type[Found],
    path: Path | None,
    wanted: Sequence[Any],
    begin: Callable[[Sequence[Any]], Callable[[Any], Found]],
) -> Iterator[Found]:
    """The result of every key in ``wanted``, in order: the known one, or one that is measured and kept in ``path``.

    Args:
        begin: called once, with the keys that are missing, and only if there are any: loads what it takes and gives
            the measurement of a key.
    """
    known = {result.key: result for result in (read(kind, path) if path else [])}
    missing = [key for key in wanted if key not in known]
    measure = begin(missing) if missing else known.__getitem__
    for key in wanted:
        if key not in known:
            known[key] = measure(key)
            if path:
                files.append_json_line(path, known[key].record())
        yield known[key]
