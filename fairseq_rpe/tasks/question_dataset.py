"""The rows of a prepared folder of questions, for training and validation."""

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from fairseq.data import Dictionary

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.questions.dataset import Row, Rows, SetInfo
from fairseq_rpe.questions.mixture import drawn, per_epoch, shares
from fairseq_rpe.questions.prompt import check_room, fitted, room
from fairseq_rpe.tasks.collate import AnswerRows

logger = logging.getLogger(__name__)
_SIMILAR = 0.05  # rows whose lengths differ by less may change places, so that each epoch has other batches


def group_of(row: Row) -> str:
    """What a question is scored together with: its group, or itself where it has none."""
    return row.group or f"\0{row.id}"


class QuestionRows(AnswerRows):
    """Questions with an answer each, cut to ``length`` tokens, the answer and its end included.

    In validation a question is one row, with the first of its answers, and all come once, by length. In training it is
    a row for each of its answers; how many rows of which set come in an epoch is what ``mixture`` says, and which they
    are and beside which is drawn from ``seed`` and epoch alone. Of an answer that is too long for its set, the
    beginning is learned, and ``</s>`` after it. Raises UserError: a question that fits nowhere, or a wrong mixture.

    Args:
        split: its name; ``rows``: its questions, of ``sets``.
        cut: where a document is shortened.
        mixture: as for :func:`shares`; None: a validation.
    """

    def __init__(
        self,
        split: str,
        rows: Rows,
        sets: Mapping[str, SetInfo],
        dictionary: Dictionary,
        length: int,
        cut: str,
        mixture: str | None,
        seed: int,
    ) -> None:
        super().__init__(dictionary)
        self.split, self.rows, self.cut, self.mixture, self.seed = split, rows, cut, mixture, seed
        self.sets = {name: info for name, info in sets.items() if split in info.splits}
        self.rooms = {name: room(length, info.answer_tokens, name) for name, info in self.sets.items()}
        self.most = {name: info.answer_tokens - 1 for name, info in self.sets.items()}  # beside the end
        self.epoch = 1
        self._look_through(length)
        self._plan = self._mix() if mixture is not None else {}

    def _look_through(self, length: int) -> None:
        """Find the length of every row, without reading its texts."""
        asked, sizes, belongs, cuts = [], [], [], []
        cut_answers, numbers = 0, {name: number for number, name in enumerate(self.sets)}
        for number, row in enumerate(self.rows):
            kept, text = self.rows.lengths(row)
            left, most = check_room(kept, self.rooms[row.set], row.id), self.most[row.set]
            read = kept + min(left, text)
            if not read:
                raise UserError(f"question '{row.id}' has nothing to read at {length} tokens: leave it out")
            cuts.append(max(0, text - left))
            for place, answer in enumerate(row.answers if self.mixture is not None else row.answers[:1]):
                size = int(self.rows.sizes[answer])
                cut_answers += size > most
                asked.append((number, place))
                sizes.append(read + min(size, most))
                belongs.append(numbers[row.set])
        self._asked, self.sizes = np.array(asked, np.int64).reshape(-1, 2), np.array(sizes, np.int64)
        sets = np.array(belongs, np.int64)
        self._members = {name: np.flatnonzero(sets == number) for name, number in numbers.items()}
        lost = np.array(cuts, np.int64)
        parts = [f"{self.split}: {len(self):,} rows of {len(self.rows):,} questions, at most {length:,} tokens each"]
        if lost.any():
            share = 100 * float((lost > 0).mean())
            text = f"{int((lost > 0).sum()):,} questions ({share:.1f} %) are cut at the document's {self.cut}"
            parts.append(f"{text} and lose {int(lost.sum()):,} tokens")
        else:
            parts.append("no document is cut")
        if cut_answers:
            parts.append(f"of {cut_answers:,} answers that are longer than their set allows the beginning is taken")
        logger.info("; ".join(parts))

    def _mix(self) -> dict[str, int]:
        """Rows of each set in an epoch, which is said."""
        there = {name: len(members) for name, members in self._members.items()}
        plan = per_epoch(shares(self.mixture or "", there), len(self))
        total = sum(plan.values())
        if len(plan) > 1:
            said = ", ".join(
                f"{name} {count:,} rows ({100 * count / total:.2f} %, each {count / there[name]:.3g} times)"
                for name, count in plan.items()
            )
            logger.info(f"mixture {self.mixture}: an epoch has {said}")
        return plan

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Only where every epoch has the same batches."""
        return self.mixture is None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def ordered_indices(self) -> np.ndarray:
        if self.mixture is None:
            return np.argsort(self.sizes, kind="stable")
        chosen = np.concatenate(
            [
                self._members[name][drawn(name, len(self._members[name]), count, self.epoch, self.seed)]
                for name, count in self._plan.items()
            ]
        )
        noise = 1 + _SIMILAR * np.random.default_rng([self.seed, self.epoch]).random(len(chosen))
        return chosen[np.argsort(self.sizes[chosen] * noise, kind="stable")]

    def row(self, index: int) -> tuple[np.ndarray, int]:
        number, place = self._asked[index].tolist()
        row = self.rows[number]
        prompt, _ = fitted(*self.rows.parts(row), self.rooms[row.set], self.cut, row.id)
        answer = self.rows.tokens(row.answers[place])[: self.most[row.set]]
        return np.concatenate((prompt, answer, [self.dictionary.eos()])).astype(np.int64), len(prompt)

    def question(self, index: int) -> Row:
        """The question that a row is of."""
        return self.rows[int(self._asked[index, 0])]

    @cached_property
    def groups(self) -> dict[str, dict[str, int]]:
        """For each set the numbers of its groups by name."""
        found: dict[str, dict[str, int]] = {name: {} for name in self.sets}
        for row in self.rows:
            own = found[row.set]
            own.setdefault(group_of(row), len(own))
        return found

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """As of every kind of rows, and the name of the ``split``."""
        batch = super().collater(samples)
        return {**batch, "split": self.split} if batch else {}
