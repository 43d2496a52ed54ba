"""What a model reads of a question: prompt, truncated document and cue, and whether all questions fit into a length.

``prompt`` is the text before the document. Where a limit of a prompt is meant, it holds for all three texts together.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.questions.dataset import QuestionDataset, load_dataset

Tokens: TypeAlias = np.ndarray
Truncate = Literal["end", "start", "middle"]  # where a document loses tokens; "end" keeps its beginning
TRUNCATE: tuple[Truncate, ...] = get_args(Truncate)
_NO_TOKENS = np.empty(0, np.int64)


def check_truncate(truncate: str) -> None:
    """Check the name of a way to truncate.

    Raises:
        UserError: The name is not one of :data:`TRUNCATE`.
    """
    if truncate not in TRUNCATE:
        raise UserError(
            f"--truncate {truncate} is not one of {', '.join(TRUNCATE)}: name the side at which documents are truncated"
        )


def token_budget(length: int, answer_tokens: int, set_name: str) -> int:
    """Return the tokens that prompt, document and cue may have together.

    Args:
        length: Most tokens of prompt and answer together.
        answer_tokens: Most tokens of an answer, the end symbol ``</s>`` included.
        set_name: Name of the set of questions, for the message.

    Raises:
        UserError: No token is left for a prompt.
    """
    if length <= answer_tokens:
        raise UserError(
            f"{length} tokens leave no room for a question: answers of {set_name} take up to {answer_tokens} of them; "
            "give a greater length"
        )
    return length - answer_tokens


def build_prompt(
    prompt: Tokens | None,
    document: Tokens | None,
    cue: Tokens | None,
    budget: int,
    truncate: str = "end",
    question_id: str = "",
) -> tuple[Tokens, int]:
    """Concatenate prompt, document and cue, and truncate the document to a token budget.

    Args:
        prompt: (tokens,) ids, or None; never truncated.
        document: (tokens,) ids, or None.
        cue: (tokens,) ids, or None; never truncated.
        budget: Most tokens of the result.
        truncate: Where the document loses tokens: at its ``end``, its ``start``, or in its ``middle``, where the first
            half keeps one token more if their number is odd.
        question_id: Identifier of the question, for messages.

    Returns:
        The (tokens,) int64 ids, and the number of tokens that were removed.

    Raises:
        UserError: Prompt and cue alone exceed the budget, or ``truncate`` is unknown.

    >>> build_prompt(np.array([1, 2]), np.array([5, 6, 7, 8, 9]), np.array([3]), 6, "middle")
    (array([1, 2, 5, 6, 9, 3]), 2)
    """
    before, text, after = (_NO_TOKENS if tokens is None else tokens for tokens in (prompt, document, cue))
    available = check_token_budget(len(before) + len(after), budget, question_id)
    removed = max(0, len(text) - available)
    if removed:
        check_truncate(truncate)
        head_size = {"end": available, "start": 0, "middle": (available + 1) // 2}[truncate]
        text = np.concatenate((text[:head_size], text[len(text) - (available - head_size) :]))
    return np.concatenate((before, text, after)).astype(np.int64), removed


def check_token_budget(tokens: int, budget: int, question_id: str, set_name: str = "") -> int:
    """Check that prompt and cue fit into a budget, and return the tokens that it leaves for the document.

    Args:
        tokens: Tokens of prompt and cue.
        budget: Most tokens of prompt, document and cue.
        question_id: Identifier of the question, for messages.
        set_name: Name of the set of questions, for the message.

    Raises:
        UserError: Prompt and cue alone exceed the budget.
    """
    if tokens > budget:
        question = f"question '{question_id}'" + (f" of {set_name}" if set_name else "")
        raise UserError(
            f"{question} takes {tokens} tokens without its document, where {max(0, budget)} may be read: give a "
            "greater length, or leave it out"
        )
    return budget - tokens


@dataclass(frozen=True)
class _PromptSize:
    """Tokens of a question that are never truncated.

    Attributes:
        question_id: Identifier of the question.
        fixed: Tokens of prompt and cue.
        choice: Tokens of the longest choice; 0 without choices.
    """

    question_id: str
    fixed: int = 0
    choice: int = 0


@dataclass
class _LongestPrompts:
    """The questions of a set that need the most tokens.

    Attributes:
        longest_fixed: The question with the longest prompt and cue.
        with_choice: The question with the longest prompt, cue and choice.
        without_choices: Id of the first question that has no choices.
    """

    longest_fixed: _PromptSize = _PromptSize("")
    with_choice: _PromptSize = _PromptSize("")
    without_choices: str | None = None


def check_lengths(
    folder: QuestionDataset,
    split: str,
    lengths: Sequence[int],
    sets: Collection[str] | None = None,
    compare_choices: bool = False,
) -> None:
    """Check, before any training or evaluation, that all questions of a split fit into each of some lengths.

    Args:
        folder: Prepared questions.
        split: Name of the split: ``train``, ``valid`` or ``test``.
        lengths: Each bounds the tokens of prompt and answer together.
        sets: Names of the sets to check; None checks all that have the split.
        compare_choices: The likelihoods of choices are compared, instead of generating an answer.

    Raises:
        UserError: A length leaves no tokens for prompts, prompt and cue of a question exceed what is left, or a
            question has no choices to compare.
    """
    for name in folder.sets if sets is None else sets:
        info = folder.sets[name]
        if split not in info.splits:
            continue
        budgets = [token_budget(length, info.answer_tokens, name) for length in lengths]
        longest = info.splits[split].longest  # tokens of prompt, document and cue; 0 if not recorded
        if not compare_choices and longest and all(longest <= budget for budget in budgets):
            continue
        prompts = _longest_prompts(folder.folder, split, _file_stamps(folder.folder, split))[name]
        if compare_choices and prompts.without_choices is not None:
            remedy = "use --answer-mode generation, in a recipe question_config.answer_mode"
            raise UserError(f"question '{prompts.without_choices}' of {name} has no choices to compare: {remedy}")
        for length, budget in zip(lengths, budgets, strict=True):
            check_token_budget(prompts.longest_fixed.fixed, budget, prompts.longest_fixed.question_id, name)
            if compare_choices:
                size = prompts.with_choice
                # 1 for the end symbol, which is scored after each choice; there is no start symbol
                check_token_budget(size.fixed, length - 1 - size.choice, size.question_id, name)


def _file_stamps(folder: Path, split: str) -> tuple[int, ...]:
    """Return sizes and modification times of the files of a split: the key of the cache."""
    paths = [folder / f"{split}{suffix}" for suffix in (".idx", ".rows.jsonl")]
    stats = [path.stat() for path in paths if path.exists()]
    return tuple(number for stat in stats for number in (stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=64)
def _longest_prompts(folder: Path, split: str, _: tuple[int, ...]) -> dict[str, _LongestPrompts]:
    """Return the longest prompts by set. Cached, because a sweep checks the same folder for each run."""
    by_set: dict[str, _LongestPrompts] = {}
    rows = load_dataset(folder).split(split)
    for row in rows:
        longest = by_set.setdefault(row.set, _LongestPrompts())
        fixed, _document = rows.lengths(row)
        size = _PromptSize(row.id, fixed, max((int(rows.sizes[item]) for item in row.choices), default=0))
        if size.fixed > longest.longest_fixed.fixed:
            longest.longest_fixed = size
        if size.fixed + size.choice > longest.with_choice.fixed + longest.with_choice.choice:
            longest.with_choice = size
        if not row.choices and longest.without_choices is None:
            longest.without_choices = row.id
    return by_set
