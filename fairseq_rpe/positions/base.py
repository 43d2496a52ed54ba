"""What a position transform is: a function from the plain index of a token to the position that encodings see.

Transforms know no encoding and no attention backend. One call serves a whole forward pass, so that all layers see the
same positions. Random ones draw from the CPU generator that they are given and from nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fairseq_rpe.core.arguments import check_count, described
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.registry import Registry

EXACT = 1 << 24  # float32 holds every whole number up to here


@dataclass(frozen=True)
class TransformedPositions:
    """Positions after a transform.

    Attributes:
        k: (B or 1, m) positions, in the dtype and on the device of the index.
        step: every difference between real tokens of a row is a multiple of it; None where spacing is arbitrary.
        contiguous: the transform keeps even spacing: real tokens one index apart are exactly ``step`` apart. Whether
            the *columns* are one index apart (no padding inside a row) is for the caller to add.
    """

    k: Tensor
    step: float | None
    contiguous: bool


class Transform:
    """Base class of all position transforms. Fill ``move``; check options against each other in ``setup``.

    ``config`` is an instance of ``Config``; ``train_length`` the training length in tokens, where known; ``longest``,
    settled by ``setup``, the tokens of the longest row that has positions, None for no limit.

    Class attributes: ``formula`` and ``paper`` (one line each), ``random`` (draws numbers, or is a pure function),
    ``fractional`` (may put a token between two whole positions), ``settled`` (a token stays where it is when its row
    gets longer; False, as here, is always right), ``evaluation`` (the transform that a model trained with this one is
    evaluated with where the user names none).
    """

    @dataclass(frozen=True)
    class Config: ...

    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    random: ClassVar[bool] = False
    fractional: bool = False
    length_invariant: bool = False
    evaluation: str = "identity"
    longest: int | None = None

    def __init__(self, config: Any, train_length: int | None = None) -> None:
        self.config, self.train_length = config, train_length
        self.setup()

    def setup(self) -> None:
        """Check and prepare; ``config`` and ``train_length`` are set."""

    def __call__(
        self, index: Tensor, lengths: Tensor, generator: torch.Generator | None = None
    ) -> TransformedPositions:
        """Move the tokens of one forward pass; ``generator`` is on the CPU.

        index (B or 1, m) float: the plain positions 0, 1, 2 … of each row counted without padding; tokens that are
        padding hold anything. lengths (B,) int64: real tokens of each row.

        Raises:
            UserError: the transform draws random numbers and there is no generator, or an argument is of another type,
                dtype or shape.
        """
        _check(index, lengths, generator)
        if self.random and generator is None:
            raise UserError(f"position transform {type(self).__name__} draws random numbers: pass a generator")
        return self.transform(index, lengths, generator)

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        raise NotImplementedError


def _check(index: Any, lengths: Any, generator: Any) -> None:
    if not isinstance(index, Tensor) or index.dim() != 2 or index.dtype not in (torch.float32, torch.float64):
        raise UserError(f"index is a float32 or float64 tensor (batch or 1, tokens), not {_kind(index)}")
    if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.dtype != torch.int64 or not len(lengths):
        raise UserError(f"lengths are an int64 tensor (batch,), not {_kind(lengths)}")
    if len(index) not in (1, len(lengths)):
        raise UserError(f"index has {len(index)} rows and lengths are of {len(lengths)}: give those of the same rows")
    for name, x in (("index", index), ("lengths", lengths)):
        if x.is_meta or x.layout != torch.strided:
            raise UserError(f"{name} must be a dense tensor with values, not {x.layout} on {x.device}")
    _check_generator(generator)


def _check_generator(generator: Any) -> None:
    if generator is not None and (not isinstance(generator, torch.Generator) or generator.device.type != "cpu"):
        raise UserError(f"generator is a torch.Generator on the CPU, not {described(generator)}")


def _kind(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else described(x)


registry: Registry[type[Transform]] = Registry("position transform", "fairseq_rpe.positions")
register = registry.register


class Fixed(Transform):
    """Looks positions up in a table, one for all rows or one for each; not registered, made by :func:`freeze`."""

    length_invariant = True

    def __init__(self, moved: TransformedPositions, fractional: bool) -> None:
        self.moved, self.fractional = moved, fractional
        super().__init__(self.Config())

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        table = self.moved.k.to(index)
        if int(lengths.max()) > table.shape[1]:
            raise UserError(
                f"a row of {int(lengths.max())} tokens is longer than the {table.shape[1]} frozen positions"
            )
        at, rows = index.clamp(0, table.shape[1] - 1).long(), max(len(index), len(table))
        return TransformedPositions(
            table.expand(rows, -1).gather(1, at.expand(rows, -1)), self.moved.step, self.moved.contiguous
        )

    def of_rows(self, order: Tensor) -> "Fixed":
        """The same for the rows ``order`` (B',) int64 of these."""
        if len(self.moved.k) == 1:
            return self
        moved = TransformedPositions(
            self.moved.k[order.to(self.moved.k.device)], self.moved.step, self.moved.contiguous
        )
        return Fixed(moved, self.fractional)


def freeze(transform: Transform, length: int, generator: torch.Generator | None = None) -> Transform:
    """The positions that ``transform`` gives a finished row of ``length`` tokens; longer rows are refused.

    While a row is decoded token by token, interpolation without a ratio would change with every token and random
    positions would be drawn anew; frozen, the cached tokens stay where they are and decoding equals the full forward
    pass over the finished row.

    Raises:
        UserError: ``transform`` is none, ``length`` is no number of tokens, or what ``transform`` refuses.
    """
    check_count("length", length)
    return Fixed(_finished(transform, length, generator), transform.fractional)


def freeze_rows(transform: Transform, lengths: Sequence[int], generators: Sequence[torch.Generator]) -> Transform:
    """The same for rows of ``lengths`` tokens, each with a draw of its own from its own generator.

    A row's positions depend on its length and generator alone, not on the rows beside it or on padding.

    Raises:
        UserError: there are no rows, or not as many generators as lengths; or what :func:`freeze` refuses.
    """
    if not len(lengths) or len(lengths) != len(generators):
        raise UserError(f"{len(lengths)} lengths and {len(generators)} generators: give one of each for every row")
    for length in lengths:
        check_count("length", length, 0)
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    check = _finished(transform, lengths[longest], generators[longest])  # first, so that a refusal names its length
    rest = zip(lengths, generators, strict=True)
    found = [check if row == longest else _finished(transform, *one) for row, one in enumerate(rest)]
    table = torch.zeros(len(found), max(lengths), dtype=torch.float64)
    for row, one in zip(table, found, strict=True):
        row[: one.k.shape[1]] = one.k[0]
    steps = {one.step for one in found}
    step = steps.pop() if len(steps) == 1 else None
    even = step is not None and all(one.contiguous for one in found)
    return Fixed(TransformedPositions(table, step, even), transform.fractional)


def _finished(transform: Transform, length: int, generator: torch.Generator | None) -> TransformedPositions:
    if not isinstance(transform, Transform):
        raise UserError(f"transform is what positions.build(...) returns, not {described(transform)}")
    index = torch.arange(length, dtype=torch.float64)[None]
    return transform(index, torch.tensor([length]), generator)


def clamped(index: Tensor, lengths: Tensor) -> Tensor:
    """(B, m) index with padding moved onto the first or last real token of its row."""
    last = (lengths - 1).clamp_min(0).to(index)
    return index.clamp_min(0).minimum(last[:, None])


def check_longest(lengths: Tensor, limit: int, name: str, key: str, unit: int | None = None) -> None:
    """Refuse rows of more than ``limit`` tokens; option ``key`` counts them in units where one is given."""
    longest = int(lengths.max())
    if longest > limit:
        said = f"is {limit}" if unit is None else f"gives {limit} positions"
        raise UserError(
            f"option '{key}' of '{name}' {said} but a row has {longest} tokens: "
            f"raise {key} to at least {-(-longest // (unit or 1))}"
        )


def below(limits: Tensor, generator: torch.Generator | None) -> Tensor:
    """One uniform draw from 0 … limit-1 for each of ``limits`` (int64, >= 1), same shape."""
    limits = limits.cpu()
    u = torch.rand(limits.shape, dtype=torch.float64, generator=generator)
    return (u * limits).long().minimum(limits - 1)


def subset(size: int, limit: int, generator: torch.Generator | None) -> Tensor:
    """``size`` distinct numbers of 0 … limit-1 in ascending order, every subset equally likely. O(size) memory.

    A sparse subset grows by draws with replacement, of which repetitions are dropped; nothing in that distinguishes one
    number from another, so that no subset is favoured.
    """
    if 2 * size >= limit:
        return torch.randperm(limit, generator=generator)[:size].sort().values
    chosen = torch.empty(0, dtype=torch.int64)
    while len(chosen) < size:
        fresh = torch.randint(limit, (size - len(chosen),), generator=generator)
        chosen = torch.cat([chosen, fresh]).unique()
    return chosen
