"""fairseq dataset of a prepared question data set, for training and validation."""

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from fairseq.data import Dictionary

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.questions.dataset import QuestionRow, QuestionRows, SetInfo
from fairseq_rpe.questions.mixture import epoch_rows, mixture_weights, rows_per_epoch
from fairseq_rpe.questions.prompt import build_prompt, check_token_budget, token_budget
from fairseq_rpe.tasks.collate import PromptAnswerDataset

logger = logging.getLogger(__name__)
_LENGTH_NOISE = 0.05  # relative noise on lengths before sorting, so that each epoch has other batches


def score_group(row: QuestionRow) -> str:
    """Return the name of the group that a question is scored with; a question without a group is its own."""
    return row.group or f"\0{row.id}"


class _Row(NamedTuple):
    """A question with one of its answers.

    Attributes:
        question: number of the question in the split.
        answer: index of the answer among those of the question.
        set: name of the question's set.
        tokens: tokens of prompt and answer, after truncation, without the end.
    """

    question: int
    answer: int
    set: str
    tokens: int


class QuestionAnswerDataset(PromptAnswerDataset):
    """Questions with their answers, truncated to a number of tokens.

    In validation each question is one row with its first answer, sorted by length. In training each answer is a row;
    ``mixture`` determines how many rows of each set an epoch has, and seed and epoch determine which ones. Answers that
    are longer than their set allows are truncated at the end.

    Args:
        split: name of the split.
        rows: questions of the split.
        sets: question sets by name.
        dictionary: dictionary of the tokens.
        length: most tokens of a row, the answer and its end included.
        truncate: where a document that is too long is truncated: end, start or middle.
        mixture: as for :func:`mixture_weights`; None for validation.
        seed: seed of the sampling of rows.

    Raises:
        UserError: a question does not fit into ``length`` tokens, or the mixture is wrong.
    """

    def __init__(
        self,
        split: str,
        rows: QuestionRows,
        sets: Mapping[str, SetInfo],
        dictionary: Dictionary,
        length: int,
        truncate: str,
        mixture: str | None,
        seed: int,
    ) -> None:
        super().__init__(dictionary)
        self.split, self.rows, self.truncate, self.mixture, self.seed = split, rows, truncate, mixture, seed
        self.sets = {name: info for name, info in sets.items() if split in info.splits}
        self.token_budgets = {name: token_budget(length, info.answer_tokens, name) for name, info in self.sets.items()}
        self.max_answer_tokens = {name: info.answer_tokens - 1 for name, info in self.sets.items()}  # without the end
        self.epoch = 1
        self._measure_rows(length)
        self._plan = self._plan_epoch() if mixture is not None else {}

    def _measure_rows(self, length: int) -> None:
        """Compute the length of every row without reading its text."""
        rows: list[_Row] = []
        lost_tokens = []  # of each question
        long_answers = 0
        for number, question in enumerate(self.rows):
            read, lost = self._measure_prompt(question, length)
            lost_tokens.append(lost)
            max_answer = self.max_answer_tokens[question.set]
            for answer_index, answer in enumerate(
                question.answers if self.mixture is not None else question.answers[:1]
            ):
                answer_tokens = int(self.rows.sizes[answer])
                long_answers += answer_tokens > max_answer
                rows.append(_Row(number, answer_index, question.set, read + min(answer_tokens, max_answer)))
        self._question_numbers = np.array([row.question for row in rows], np.int64)
        self._answer_indices = np.array([row.answer for row in rows], np.int64)
        self.sizes = np.array([row.tokens for row in rows], np.int64)
        self._rows_of_set = {
            name: np.array([index for index, row in enumerate(rows) if row.set == name], np.int64) for name in self.sets
        }
        self._log_lengths(length, np.array(lost_tokens, np.int64), long_answers)

    def _measure_prompt(self, question: QuestionRow, length: int) -> tuple[int, int]:
        """Return the tokens of prompt, truncated document and cue, and the tokens that truncation removes."""
        fixed, document = self.rows.lengths(question)  # tokens of prompt and cue, and of the document
        available = check_token_budget(fixed, self.token_budgets[question.set], question.id)
        read = fixed + min(available, document)
        if not read:
            raise UserError(f"question '{question.id}' has nothing to read at {length} tokens: leave it out")
        return read, max(0, document - available)

    def _log_lengths(self, length: int, lost: np.ndarray, long_answers: int) -> None:
        """Log how many rows there are and what is truncated; ``lost`` (questions,) are the tokens that are removed."""
        messages = [f"{self.split}: {len(self):,} rows of {len(self.rows):,} questions, at most {length:,} tokens each"]
        if lost.any():
            percent = 100 * float((lost > 0).mean())
            text = (
                f"{int((lost > 0).sum()):,} questions ({percent:.1f} %) are truncated at the document's {self.truncate}"
            )
            messages.append(f"{text} and lose {int(lost.sum()):,} tokens")
        else:
            messages.append("no document is truncated")
        if long_answers:
            messages.append(f"{long_answers:,} answers are longer than their set allows and are truncated at the end")
        logger.info("; ".join(messages))

    def _plan_epoch(self) -> dict[str, int]:
        """Return and log the number of rows of each set in an epoch."""
        available = {name: len(rows) for name, rows in self._rows_of_set.items()}
        plan = rows_per_epoch(mixture_weights(self.mixture or "", available), len(self))
        total = sum(plan.values())
        if len(plan) > 1:
            shares = ", ".join(
                f"{name} {count:,} rows ({100 * count / total:.2f} %, each {count / available[name]:.3g} times)"
                for name, count in plan.items()
            )
            logger.info(f"mixture {self.mixture}: an epoch has {shares}")
        return plan

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Whether every epoch has the same batches; fairseq reads this."""
        return self.mixture is None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which seeds the sampling of rows; fairseq calls this."""
        self.epoch = epoch

    def ordered_indices(self) -> np.ndarray:
        """Return the rows of an epoch: all by length in validation, sampled by the mixture in training."""
        if self.mixture is None:
            return np.argsort(self.sizes, kind="stable")
        sampled_by_set = []
        for name, count in self._plan.items():
            rows = self._rows_of_set[name]
            sampled_by_set.append(rows[epoch_rows(name, len(rows), count, self.epoch, self.seed)])
        sampled = np.concatenate(sampled_by_set)
        noise = 1 + _LENGTH_NOISE * np.random.default_rng([self.seed, self.epoch]).random(len(sampled))
        return sampled[np.argsort(self.sizes[sampled] * noise, kind="stable")]

    def row(self, index: int) -> tuple[np.ndarray, int]:
        """Return the tokens (n,) of a row, prompt, answer and ``</s>``, and the length of the prompt."""
        question = self.question(index)
        budget = self.token_budgets[question.set]
        prompt, _ = build_prompt(*self.rows.parts(question), budget, self.truncate, question.id)
        answer_item = question.answers[int(self._answer_indices[index])]
        answer = self.rows.tokens(answer_item)[: self.max_answer_tokens[question.set]]
        return np.concatenate((prompt, answer, [self.dictionary.eos()])).astype(np.int64), len(prompt)

    def question(self, index: int) -> QuestionRow:
        """Return the question of a row."""
        return self.rows[int(self._question_numbers[index])]

    @cached_property
    def groups(self) -> dict[str, dict[str, int]]:
        """Number of each group, by set and name of the group."""
        numbers: dict[str, dict[str, int]] = {name: {} for name in self.sets}
        for row in self.rows:
            set_groups = numbers[row.set]
            set_groups.setdefault(score_group(row), len(set_groups))
        return numbers

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Collate rows, with the name of the split as ``split``."""
        batch = super().collater(samples)
        return {**batch, "split": self.split} if batch else {}
