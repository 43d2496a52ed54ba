"""Fills in what an evaluation request leaves open from its checkpoint, before fairseq is imported."""

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import is_pattern, parse_pattern
from fairseq_rpe.data import folder as corpus
from fairseq_rpe.encodings import load_module, registry
from fairseq_rpe.evaluation.generation_records import GenerationRequest
from fairseq_rpe.evaluation.key_token_records import KeyTokenEvalRequest, KeyTokenRequest
from fairseq_rpe.evaluation.position_limits import length_within, max_length
from fairseq_rpe.evaluation.question_records import QuestionRequest
from fairseq_rpe.evaluation.records import ExactMatchRequest, TextRequest
from fairseq_rpe.runs import checkpoints

LENGTH_MULTIPLES = (1, 2, 4, 8, 16)  # default evaluation lengths, in training lengths
Request = TypeVar(
    "Request", KeyTokenRequest, KeyTokenEvalRequest, TextRequest, ExactMatchRequest, QuestionRequest, GenerationRequest
)


def default_lengths(
    checkpoint: Path, data: Path, split: str, rpe: str | None, positions: str | None, blocks: str | None = None
) -> list[int]:
    """Return 1, 2, 4, 8 and 16 training lengths, as far as the split and the positions allow.

    Prints a line to standard error that names the lengths left out, and the reason.

    Args:
        checkpoint: checkpoint file.
        data: binarised data folder.
        split: name of the split to score.
        rpe: encoding in place of the checkpoint's, if any.
        positions: position transform in place of the checkpoint's, if any.
        blocks: stream or document, in place of those of the checkpoint's training, if any.

    Returns:
        Lengths in tokens, ascending; at least the training length.

    Raises:
        UserError: the checkpoint does not record its training length, or it or the data cannot be used.
    """
    trained = checkpoints.load(checkpoint)
    train_length = trained.train_length()
    if not train_length:
        raise UserError(f"{checkpoint} does not record its training length: use --lengths")
    corpus.check_folder(data, split)
    limits = _text_limits(data, split, blocks or str(trained.task.get("blocks")))
    transform = str(positions or trained.model.get("positions_eval") or "")
    limits |= position_limits(rpe or trained.encoding, transform or None, train_length)
    reason, limit = min(limits.items(), key=lambda item: item[1])
    candidates = [multiple * train_length for multiple in LENGTH_MULTIPLES]
    lengths = [length for length in candidates if length <= limit] or candidates[:1]
    if left_out := candidates[len(lengths) :]:
        print(f"lengths {', '.join(map(str, left_out))} are left out: {reason}", file=sys.stderr)
    return lengths


def _text_limits(data: Path, split: str, blocks: str) -> dict[str, int]:
    """Return upper limits of the length in tokens that the text sets, by the sentence that explains them."""
    tokens = corpus.count_tokens(data, split)
    limits = {f"{data}/{split} has {tokens} tokens": tokens}
    if blocks == "document":
        corpus.check_documents(data, split)
        longest = corpus.longest_document(data, split)
        limits[f"the longest document of {data}/{split} has {longest} tokens"] = longest
    return limits


def position_limits(rpe: str, positions: str | None, train_length: int) -> dict[str, int]:
    """Return upper limits of the length in tokens that positions set, by the sentence that explains them.

    Args:
        rpe: spec of an encoding, or a pattern of layers.
        positions: spec of a position transform, or None.
        train_length: training length in tokens.
    """
    limits: dict[str, int] = {}
    if (limit := max_length(positions, train_length)) is not None:
        limits[f"'{positions}' has {limit} positions"] = limit
    with suppress(UserError):  # loading the model refuses an unknown or wrong encoding
        for spec in parse_pattern(rpe).specs if is_pattern(rpe) else (rpe,):
            cls, name, config = registry.resolve(spec)
            if (rows := cls.position_limit(config, train_length)) is not None:
                limit = length_within(positions, train_length, rows)
                by_transform = "" if limit == rows else f", which '{positions}' reaches after {limit} tokens"
                limits[f"'{name}' has {rows} positions{by_transform}"] = limit
    return limits


def with_checkpoint_rotation(request: Request) -> Request:
    """Complete the request's encoding with the rotation settings of the checkpoint.

    Results then name the encoding that was really evaluated.

    Args:
        request: an evaluation request; its ``rpe`` may be None.

    Returns:
        The request, unchanged if it does not replace the encoding.

    Raises:
        UserError: the checkpoint cannot be read, or ``rpe`` is not valid or contradicts the checkpoint's rotation.
    """
    if request.rpe is None:
        return request
    if request.rpe_module is not None:
        load_module(request.rpe_module)
    return replace(request, rpe=checkpoints.load(request.checkpoint).complete_spec(request.rpe))
