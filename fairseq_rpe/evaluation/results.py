"""What evaluations leave behind: JSON lines that say what was measured of what, so that nothing is measured twice."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fairseq_rpe.core import files, records


@dataclass(frozen=True, kw_only=True)
class Result:
    """A measurement of a model with an ``encoding``; ``of``: the record that is its key, equal where it is the same."""

    of: ClassVar[type[Any]]
    encoding: str = ""

    @property
    def key(self) -> Any:
        return records.filled(self.of, self)

    def record(self) -> dict[str, object]:
        """As a line of JSON keeps it: the fields that say something, and what replaces the checkpoint's settings."""
        return {k: v for k, v in records.write(self).items() if v is not None or k in ("rpe", "positions")}


Found = TypeVar("Found", bound=Result)


@dataclass(frozen=True, kw_only=True)
class TextKey:
    """What a perplexity is of; ``checkpoint`` and ``data`` are digests. Not the engine, which must not matter."""

    checkpoint: str
    data: str = ""
    subset: str
    rpe: str | None = None
    positions: str | None = None
    compute_dtype: str | None = None
    attention_prune: float | None = None
    length: int


@dataclass(frozen=True)
class Buckets:
    """Mean loss in bits of the tokens at positions up to ``upto`` (inclusive) and beyond the bucket before."""

    upto: tuple[int, ...]
    loss_base2: tuple[float, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TextResult(TextKey, Result):
    """A perplexity per token over every token of a split, in blocks of ``length`` tokens.

    ``loss_base2`` in bits per token, ``seconds`` of the measurement, ``peak_mb`` in MiB. What was not measured, or not
    yet when the result was written, is ``None``.
    """

    of = TextKey
    tokens: int
    loss_base2: float
    ppl: float
    seconds: float | None = None
    bits_per_byte: float | None = None
    word_ppl: float | None = None
    engine: str | None = None
    peak_mb: float | None = None
    positions_loss: Buckets | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerKey:
    """What a share of exact answers is of; ``unit``: of interpolation's ratio, items or tokens."""

    checkpoint: str
    algorithm: str
    split: str
    rpe: str | None = None
    positions: str | None = None
    unit: str = "items"
    length: int


@dataclass(frozen=True, kw_only=True)
class AnswerResult(AnswerKey, Result):
    """Exact answers to examples of ``length`` items; ``accuracy`` = right / examples, ``transform``: of positions."""

    of = AnswerKey
    examples: int
    right: int
    accuracy: float
    transform: str
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class SlidingKey:
    """What a perplexity with its time is of; windows and strides in tokens, ``mode`` is how the text is covered."""

    checkpoint: str
    data: str
    subset: str
    positions: str | None = None
    tokens: int
    workers: int | None = None
    max_tokens: int | None = None
    device: str | None = None
    mode: str
    window: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class SlidingResult(SlidingKey, Result):
    """Perplexity per token over ``tokens`` targets, and its time in ``seconds``.

    ``relative``: that as a multiple of the non-overlapping evaluation's, known beside it only.
    """

    of = SlidingKey
    loss_base2: float
    ppl: float
    seconds: float
    relative: float | None = None


def read(kind: type[Found], path: Path) -> list[Found]:
    """The results in a JSON-lines file, none if there is no such file."""
    lines = files.read_json_lines(path)
    return [records.read(kind, row, str(path), f"line {n}", strict=False) for n, row in enumerate(lines, start=1)]


def resumed(
    kind: type[Found], path: Path | None, wanted: Sequence[Any], begin: Callable[[Any], Callable[[Any], Found]]
) -> Iterator[Found]:
    """The result of every key in ``wanted``, in order: the known one, or one that is measured and kept in ``path``.

    ``begin``: called with the keys that are missing, if any: loads what it takes and gives the measurement of a key.
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
