"""Perplexities along one training: those of the checkpoints of ``--evaluate-at``."""

from collections.abc import Iterator, Sequence

from fairseq_rpe.evaluation.records import TextResult
from fairseq_rpe.reports.sweep_results import PlannedRun, TrainingPoint, checkpoint_results, planned_runs
from fairseq_rpe.runs.run_folder import RunRecord
from fairseq_rpe.sweeps.sweep_record import SweepFolder, SweepRecord

CSV_NAME = "training_axis.csv"
FIGURE_NAME = "training axis"  # further texts, whose figures have names, too, have names without blanks
CURVE_TAG = "1_along_training/ppl_ratio"  # of TensorBoard; its step is the number of tokens trained


def load_training_axis(folder: SweepFolder, record: SweepRecord) -> list[TrainingPoint]:
    """Read the perplexities of all evaluated checkpoints of the finished runs of a sweep, on the text of the training.

    Args:
        folder: folder of the sweep.
        record: its record.

    Returns:
        The points by method, seed, updates and length; empty if no checkpoint on the way was evaluated.
    """
    if not record.evaluate_at:
        return []
    points = [point for run in planned_runs(folder, record) for point in _points_of_run(run, record)]
    return points if len({(point.method, point.seed, point.updates) for point in points}) > 1 else []


def _points_of_run(run: PlannedRun, record: SweepRecord) -> Iterator[TrainingPoint]:
    """Yield the points of one run, by updates and length."""
    finished = (run.folder.checkpoints.read_record() or RunRecord()).finished
    digests = {int(updates): digest for updates, digest in finished.intermediate.items()}
    if finished.updates is not None and finished.checkpoint is not None:
        digests[finished.updates] = finished.checkpoint
    others = {text.digest for text in record.evaluate.values()}
    training_text = record.settings.data  # None: not recorded, as is the empty digest of a result
    tokens_per_update: float | None = None
    for updates in sorted(digests):
        results = checkpoint_results(TextResult, run.folder, run.method, digests[updates])
        rows = [r for r in results if r.split == record.settings.split and r.data not in others]
        rows = [row for row in rows if training_text is None or row.data in ("", training_text)]
        by_length = {row.length: row for row in sorted(rows, key=lambda row: row.length)}
        tokens = next((row.tokens_trained for row in rows if row.tokens_trained is not None), None)
        if tokens is not None:
            tokens_per_update = tokens / updates
        elif tokens_per_update is not None:  # the end of a training that an earlier version has evaluated
            tokens = round(tokens_per_update * updates)
        base = by_length.get(record.settings.tokens or 0)
        for length, row in by_length.items():
            ratio = row.ppl / base.ppl if base is not None else None
            yield TrainingPoint(run.method.name, run.seed, updates, tokens, length, row.ppl, ratio)


def longest_points(points: Sequence[TrainingPoint]) -> list[TrainingPoint]:
    """Return the points at the longest length whose tokens trained and ratio are known.

    Args:
        points: all points.
    """
    longest = max((point.length for point in points), default=0)
    return [p for p in points if p.length == longest and p.tokens is not None and p.ratio is not None]


def curve_by_tokens(points: Sequence[TrainingPoint], method: str, seed: int) -> dict[int, float]:
    """Return the ratio of one run at the longest length by tokens trained, ascending.

    Args:
        points: all points.
        method: name of the method.
        seed: seed of the run.
    """
    of_run = [p for p in longest_points(points) if (p.method, p.seed) == (method, seed)]
    return {p.tokens: p.ratio for p in of_run if p.tokens is not None and p.ratio is not None}
