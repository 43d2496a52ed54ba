"""Tables with one learned row for each position, for ``learned`` and ``tupe``."""

from typing import Any, ClassVar

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings.base import Encoding


class PositionTable(Encoding):
    """An encoding with the option ``max_positions``, the number of rows of a table of positions.

    Attributes:
        name: name of the encoding in specs, for messages.
    """

    name: ClassVar[str]

    @classmethod
    def position_limit(cls, config: Any, length: int | None) -> int | None:
        """Return the number of rows of the table."""
        return config.max_positions or length

    def count_rows(self) -> int:
        """Return the number of rows of the table.

        Raises:
            UserError: neither the option nor a training length states it, or the table is smaller than a training text.
        """
        name, rows = self.name, self.position_limit(self.config, self.length)
        if not rows:
            raise UserError(f"'{name}' needs a table size: give max_positions=N or a training length")
        if self.length and rows < self.length:
            raise UserError(
                f"'{name}:max_positions={rows}' is less than the training length {self.length}: raise it or use 0"
            )
        return rows

    def check_rows(self, largest: int, rows: int) -> None:
        """Refuse positions beyond the table.

        Args:
            largest: the largest position.
            rows: number of rows of the table.

        Raises:
            UserError: the position has no row.
        """
        if largest >= rows:
            raise UserError(
                f"position {largest} is beyond the {rows} positions that '{self.name}' was trained with: evaluate at "
                f"{rows} tokens or fewer, or train with an encoding that extrapolates"
            )
