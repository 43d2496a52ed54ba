"""The oracle of a window: what a reader of only the last tokens of a prompt would get."""

from collections.abc import Iterable

from fairseq_rpe.algorithms.base import Algorithm, Example


def window_accuracy(algorithm: Algorithm, examples: Iterable[Example], window: int) -> float | None:
    """Return the expected accuracy of a reader who sees only the last tokens of each prompt.

    The reader answers with :meth:`~fairseq_rpe.algorithms.base.Algorithm.answer_from_suffix`, and guesses if the tokens
    do not determine an answer. In tasks with labels, the window ends at each label, and the accuracy is the mean over
    labels. This is nearly the most that a model gets on average whose layers together reach back fewer tokens; it could
    only guess better, from what the tokens show of the answer.

    Args:
        algorithm: Task of the examples.
        examples: Examples of the task.
        window: Number of tokens w of the window, at least 1.

    Returns:
        Accuracy from 0 to 1; None if the task has no chance accuracy or there are no examples.
    """
    scores = [score for example in examples for score in _scores(algorithm, example, window)]
    if not scores or None in scores:
        return None
    return sum(filter(None, scores)) / len(scores)


def _scores(algorithm: Algorithm, example: Example, window: int) -> list[float | None]:
    """Return the expected score of each label of an example, or the one of its answer."""
    prompt, answer, n = example.prompt, example.answer, example.length
    if not algorithm.has_labels:
        return [_score(algorithm, list(prompt), list(answer), n, window)]
    ends = [index + 1 for index in example.label_indices]
    return [_score(algorithm, list(prompt[:end]), [word], n, window) for end, word in zip(ends, answer, strict=True)]


def _score(algorithm: Algorithm, prompt: list[str], answer: list[str], n: int, window: int) -> float | None:
    if window >= len(prompt):
        return 1.0  # every task is defined so that the prompt determines the answer
    guess = algorithm.answer_from_suffix(prompt[-window:], n)
    return algorithm.chance_accuracy(n) if guess is None else float(guess == answer)
