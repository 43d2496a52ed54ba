"""Predicted answers of exact-match measurements: a JSON-lines file with one line for each measurement.

The file has no prompts and no right answers: the spec of the task in the key determines every example, see
:meth:`fairseq_rpe.algorithms.Algorithm.examples`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.evaluation.needle_records import HeadAttention
from fairseq_rpe.evaluation.records import ExactMatchKey
from fairseq_rpe.utils import output_checks, records
from fairseq_rpe.utils.json_files import append_json_line
from fairseq_rpe.utils.records import TextTuple, from_attributes

END = "</s>"  # word that ends a generated answer


@dataclass(frozen=True, kw_only=True)
class Predictions(ExactMatchKey):
    """Predicted answers of one exact-match measurement.

    Attributes:
        answers: predicted answer of each example, in the order in which the task generates the examples: its words,
            separated by blanks. A generated answer includes ``</s>`` if the model ended it within as many words as the
            right answer has. For a task with labels inside its prompts, the words are the predicted labels.
        needle: attention to the needle of the first example; None unless the task has needles and the depth is the
            middle one of the task.
    """

    answers: TextTuple
    needle: HeadAttention | None = None

    @property
    def key(self) -> ExactMatchKey:
        """Key of the measurement."""
        return from_attributes(ExactMatchKey, self)


def append_predictions(
    path: Path, key: ExactMatchKey, answers: Sequence[str], needle: HeadAttention | None = None
) -> None:
    """Append the predictions of one measurement as one line, which is synced to disk on return.

    Args:
        path: JSON-lines file; it is created if it is missing.
        key: key of the measurement.
        answers: predicted answers as in :class:`Predictions`.
        needle: attention to a needle as in :class:`Predictions`.

    Raises:
        UserError: the file is damaged.
        OSError: the line cannot be written; the file ends as before.
    """
    row = records.to_dict(Predictions(**vars(key), answers=tuple(answers), needle=needle))
    append_json_line(path, {name: value for name, value in row.items() if value is not None})


def read_predictions(path: Path) -> dict[ExactMatchKey, Predictions]:
    """Read the predictions by key; of several lines with one key, the last one counts.

    A last line that a killed process left unfinished is ignored.

    Args:
        path: JSON-lines file; without such a file there are no predictions.

    Raises:
        UserError: a line is damaged.
    """
    rows = records.read_records(Predictions, path, "the predictions")
    return {row.key: row for row in rows}


def keys_without_predictions(path: Path, keys: Sequence[ExactMatchKey], results: Path | None) -> set[ExactMatchKey]:
    """Return the keys whose predictions ``path`` lacks, after checking that it can be written.

    Args:
        path: JSON-lines file of the predictions.
        keys: keys of the requested measurements.
        results: file of the results, which must be another one; None: results are not stored.

    Raises:
        UserError: the file cannot be written, is damaged, or is that of the results.
    """
    output_checks.check_plain_file("--predictions", path)
    if results is not None and path.resolve() == results.resolve():
        raise UserError(f"--predictions {path} is also the file of --out: name another file")
    missing = set(keys) - set(read_predictions(path))
    if missing:
        output_checks.check_output_file("--predictions", path)
    return missing
