"""Base class of position transforms, which map the index of each token to the position that encodings see.

A transform is independent of encodings and attention backends. It is called once per forward pass, so all layers see
the same positions. Random transforms draw only from the CPU generator that is passed to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fairseq_rpe.core.arguments import check_count, describe_value
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from fairseq_rpe.core import lazy_torch as torch

MAX_EXACT_POSITION = 1 << 24  # float32 represents all integers up to here


@dataclass(frozen=True)
class TransformedPositions:
    """Positions after a transform.

    Attributes:
        k: (B or 1, m) positions, in the dtype and on the device of the index.
        step: number of which all differences between positions of real tokens of a row are multiples; None if the
            spacing is arbitrary.
        contiguous: whether real tokens one index apart are exactly ``step`` apart. Neighbouring columns need not be one
            index apart, since a row may have padding inside; the caller checks that.
    """

    k: Tensor
    step: float | None
    contiguous: bool


class Transform:
    """Base class of all position transforms. Implement ``transform``; check options in ``setup``.

    Args:
        config: an instance of ``Config``, a frozen dataclass of the options.
        train_length: training length in tokens, or None if unknown.

    Attributes:
        formula: mathematical formula of the transform, in one line.
        paper: authors, year and arXiv number of the paper, in one line.
        random: whether positions are drawn at random.
        fractional: whether positions may be fractions.
        length_invariant: whether a token keeps its position when its row gets longer. False, the default, is always
            correct.
        evaluation: spec of the transform for evaluation of a model trained with this one, unless the user names one.
        max_length: length in tokens of the longest row that has positions, or None: the result of ``position_limit``.
    """

    @dataclass(frozen=True)
    class Config:
        """No options; subclasses declare theirs with ``option``."""

    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    random: ClassVar[bool] = False
    fractional: bool = False
    length_invariant: bool = False
    evaluation: str = "identity"
    max_length: int | None = None

    def __init__(self, config: Any, train_length: int | None = None) -> None:
        self.config, self.train_length = config, train_length
        self.max_length = self.position_limit(config, train_length)
        self.setup()

    def setup(self) -> None:
        """Check the options. ``config`` and ``train_length`` are set before this is called."""

    @classmethod
    def position_limit(cls, config: Any, train_length: int | None) -> int | None:
        """Return the length in tokens of the longest row that has positions, or None for no limit.

        Args:
            config: an instance of ``Config``.
            train_length: training length in tokens, or None if unknown.
        """
        return None

    @classmethod
    def length_within(cls, config: Any, train_length: int | None, positions: int) -> int:
        """Return the length in tokens of the longest row whose positions are all below ``positions``.

        Args:
            config: an instance of ``Config``.
            train_length: training length in tokens, or None if unknown.
            positions: number of positions that an encoding has.
        """
        limit = cls.position_limit(config, train_length)
        draws_beyond = cls.random and limit is not None and limit > positions
        return 0 if draws_beyond else positions

    @classmethod
    def spec_for_length(cls, config: Any, train_length: int, length: int) -> str | None:
        """Return the spec with which all rows of a test have the same spacing, or None for the transform itself.

        Args:
            config: an instance of ``Config``.
            train_length: training length, in items or tokens.
            length: length of the longest row of the test, in the same unit.
        """
        return None

    def __call__(
        self, index: Tensor, lengths: Tensor, generator: torch.Generator | None = None
    ) -> TransformedPositions:
        """Return the positions of the tokens of one forward pass.

        Args:
            index: (B or 1, m) float plain positions 0, 1, 2 … of each row, counted without padding; values at padding
                are arbitrary.
            lengths: (B,) int64 number of real tokens of each row.
            generator: generator on the CPU, for random transforms.

        Raises:
            UserError: a random transform gets no generator, or an argument has a wrong type, dtype or shape.
        """
        _check(index, lengths, generator)
        if self.random and generator is None:
            raise UserError(f"position transform {type(self).__name__} draws random numbers: pass a generator")
        return self.transform(index, lengths, generator)

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions of the tokens; the arguments of ``__call__``, which checks them."""
        raise NotImplementedError


def _check(index: Any, lengths: Any, generator: Any) -> None:
    """Check the arguments of ``Transform.__call__``."""
    if not isinstance(index, torch.Tensor) or index.dim() != 2 or index.dtype not in (torch.float32, torch.float64):
        raise UserError(f"index must be a float32 or float64 tensor (batch or 1, tokens), not {_kind(index)}")
    if not isinstance(lengths, torch.Tensor) or lengths.dim() != 1 or lengths.dtype != torch.int64 or not len(lengths):
        raise UserError(f"lengths must be an int64 tensor (batch,), not {_kind(lengths)}")
    if len(index) not in (1, len(lengths)):
        raise UserError(f"index has {len(index)} rows and lengths has {len(lengths)}: pass those of the same rows")
    for name, x in (("index", index), ("lengths", lengths)):
        if x.is_meta or x.layout != torch.strided:
            raise UserError(f"{name} must be a dense tensor with values, not {x.layout} on {x.device}")
    _check_generator(generator)


def _check_generator(generator: Any) -> None:
    if generator is not None and (not isinstance(generator, torch.Generator) or generator.device.type != "cpu"):
        raise UserError(f"generator must be a torch.Generator on the CPU, not {describe_value(generator)}")


def _kind(x: Any) -> str:
    """Describe a value for a message."""
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else describe_value(x)


registry: Registry[type[Transform]] = Registry("position transform", "fairseq_rpe.positions")
register = registry.register


class FrozenPositions(Transform):
    """Positions from a table, which :func:`freeze` and :func:`freeze_rows` create; not registered.

    Args:
        positions: table of positions (B, n), or (1, n) for all rows of a batch.
        fractional: whether the table has fractions.
    """

    length_invariant = True

    def __init__(self, positions: TransformedPositions, fractional: bool) -> None:
        self.positions, self.fractional = positions, fractional
        super().__init__(self.Config())

    def transform(self, index: Tensor, lengths: Tensor, generator: torch.Generator | None) -> TransformedPositions:
        """Return the positions (B or 1, m) of the tokens."""
        table = self.positions.k.to(index)
        if int(lengths.max()) > table.shape[1]:
            raise UserError(
                f"a row of {int(lengths.max())} tokens is longer than the {table.shape[1]} frozen positions"
            )
        at, rows = index.clamp(0, table.shape[1] - 1).long(), max(len(index), len(table))
        return TransformedPositions(
            table.expand(rows, -1).gather(1, at.expand(rows, -1)), self.positions.step, self.positions.contiguous
        )

    def select_rows(self, order: Tensor) -> FrozenPositions:
        """Return the positions of the rows ``order`` (B',) int64."""
        if len(self.positions.k) == 1:
            return self
        selected = TransformedPositions(
            self.positions.k[order.to(self.positions.k.device)], self.positions.step, self.positions.contiguous
        )
        return FrozenPositions(selected, self.fractional)


def freeze(transform: Transform, length: int, generator: torch.Generator | None = None) -> Transform:
    """Return a transform with the fixed positions that ``transform`` gives a row of ``length`` tokens.

    In token-by-token decoding, interpolation without a ratio would change with every token, and random positions would
    be drawn again. With frozen positions cached tokens keep theirs, and decoding equals a full forward pass over the
    finished row.

    Args:
        transform: any transform.
        length: length of the finished row in tokens; longer rows are refused.
        generator: generator on the CPU, for random transforms.

    Raises:
        UserError: ``transform`` is not a transform or refuses the length, or ``length`` is not a positive integer.
    """
    check_count("length", length)
    return FrozenPositions(_positions_of_full_row(transform, length, generator), transform.fractional)


def freeze_rows(transform: Transform, lengths: Sequence[int], generators: Sequence[torch.Generator]) -> Transform:
    """Return a transform with fixed positions for several rows, as :func:`freeze` does for one.

    Each row is drawn with its own generator. The positions of a row depend only on its length and its generator, not on
    other rows or padding.

    Args:
        transform: any transform.
        lengths: lengths of the rows in tokens.
        generators: one generator on the CPU for each row.

    Raises:
        UserError: there are no rows, or not as many generators as lengths, or :func:`freeze` refuses a row.
    """
    if not len(lengths) or len(lengths) != len(generators):
        raise UserError(f"{len(lengths)} lengths and {len(generators)} generators: pass one of each for every row")
    for length in lengths:
        check_count("length", length, 0)
    table = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)  # 0 after the end of a shorter row
    steps, contiguous = set[float | None](), True
    # the longest row first, so that a refusal names its length
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        row = _positions_of_full_row(transform, lengths[index], generators[index])
        table[index, : lengths[index]] = row.k[0]
        steps.add(row.step)
        contiguous = contiguous and row.contiguous
    step = steps.pop() if len(steps) == 1 else None
    contiguous = contiguous and step is not None
    return FrozenPositions(TransformedPositions(table, step, contiguous), transform.fractional)


def _positions_of_full_row(
    transform: Transform, length: int, generator: torch.Generator | None
) -> TransformedPositions:
    if not isinstance(transform, Transform):
        raise UserError(f"transform must come from positions.build(...), not {describe_value(transform)}")
    index = torch.arange(length, dtype=torch.float64)[None]
    return transform(index, torch.tensor([length]), generator)


def clamp_to_row(index: Tensor, lengths: Tensor) -> Tensor:
    """Return the index (B, m) clamped to the real tokens of each row, so that padding has a valid index."""
    last = (lengths - 1).clamp_min(0).to(index)
    return index.clamp_min(0).minimum(last[:, None])


def check_row_length(lengths: Tensor, limit: int, name: str, key: str, unit: int | None = None) -> None:
    """Refuse rows of more tokens than a transform has positions.

    Args:
        lengths: (B,) tokens of each row.
        limit: number of positions.
        name: registered name of the transform.
        key: option that sets the limit.
        unit: positions per unit of the option, or None if it counts positions.

    Raises:
        UserError: a row is longer than ``limit``.
    """
    longest = int(lengths.max())
    if longest > limit:
        value = f"is {limit}" if unit is None else f"gives {limit} positions"
        raise UserError(
            f"option '{key}' of '{name}' {value} but a row has {longest} tokens: "
            f"raise {key} to at least {-(-longest // (unit or 1))}"
        )


def draw_below(limits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw uniformly from 0 … limit-1 for each of ``limits`` (int64, >= 1); same shape, on the CPU."""
    limits = limits.cpu()
    uniform = torch.rand(limits.shape, dtype=torch.float64, generator=generator)
    return (uniform * limits).long().minimum(limits - 1)  # the product may round up to limit


def draw_subset(size: int, limit: int, generator: torch.Generator | None) -> Tensor:
    """Draw ``size`` distinct integers of 0 … limit-1 in ascending order, every subset equally likely.

    A sparse subset is filled by draws with replacement, of which repetitions are dropped. This treats all integers
    alike, so it favours no subset, and needs O(size) memory.
    """
    if 2 * size >= limit:
        return torch.randperm(limit, generator=generator)[:size].sort().values
    numbers = torch.empty(0, dtype=torch.int64)
    while len(numbers) < size:
        new = torch.randint(limit, (size - len(numbers),), generator=generator)
        numbers = torch.cat([numbers, new]).unique()
    return numbers
