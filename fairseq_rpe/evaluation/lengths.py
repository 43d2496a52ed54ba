"""Evaluation lengths for a checkpoint where the user names none: multiples of its training length."""

import sys
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import parse
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.evaluation.position_limits import longest_row
from fairseq_rpe.runs import checkpoints

TIMES = (1, 2, 4, 8, 16)  # training lengths


def default_lengths(
    checkpoint: Path, data: Path, subset: str, rpe: str | None, positions: str | None, blocks: str | None = None
) -> list[int]:
    """1, 2, 4, 8 and 16 times the training length, as far as the split and the positions reach.

    A line on standard error names lengths that are left out, and why.

    Args:
        checkpoint: of which the lengths are.
        data: binarised data folder.
        subset: split that is scored.
        rpe: encoding in place of the checkpoint's, if any.
        positions: position transform in place of the checkpoint's, if any.
        blocks: stream or document, in place of those of the checkpoint's training, if any.

    Returns:
        Lengths in tokens, ascending; at least the training length.

    Raises:
        UserError: the checkpoint does not record its training length, or it or the data cannot be used.
    """
    model = checkpoints.load(checkpoint)
    trained = model.train_length()
    if not trained:
        raise UserError(f"--lengths is missing, and {checkpoint} does not record its training length: name lengths")
    corpus.check_folder(data, subset)
    tokens = corpus.count_tokens(data, subset)
    limits = {f"{data}/{subset} has {tokens} tokens": tokens}
    if (blocks or model.task.get("blocks")) == "document":
        corpus.check_documents(data, subset)
        longest = corpus.longest_document(data, subset)
        limits[f"the longest document of {data}/{subset} has {longest} tokens"] = longest
    spec = positions or model.model.get("positions_eval") or None
    if (limit := longest_row(spec, trained)) is not None:
        limits[f"'{spec}' has {limit} positions"] = limit
    name, given = parse(rpe or model.encoding)
    if name == "learned":
        rows = int(given.get("max_positions", 0)) or trained
        limits[f"'learned' has {rows} positions"] = rows
    why, most = min(limits.items(), key=lambda item: item[1])
    lengths = [times * trained for times in TIMES]
    kept = [n for n in lengths if n <= most] or lengths[:1]
    if left_out := lengths[len(kept) :]:
        print(f"lengths {', '.join(map(str, left_out))} are left out: {why}", file=sys.stderr)
    return kept
