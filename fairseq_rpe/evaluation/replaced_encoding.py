"""An encoding that replaces a checkpoint's in an evaluation."""

from dataclasses import replace
from typing import TypeVar

from fairseq_rpe.encodings import load_module
from fairseq_rpe.evaluation.question_records import QuestionRequest
from fairseq_rpe.evaluation.records import AnswerRequest, TextRequest
from fairseq_rpe.runs import checkpoints

Request = TypeVar("Request", TextRequest, AnswerRequest, QuestionRequest)


def with_checkpoint_rotation(request: Request) -> Request:
    """Return the request with the checkpoint's rotation where its ``rpe`` leaves it open.

    So the results name the encoding that was really evaluated.

    Args:
        request: an evaluation, of which ``rpe`` may be None.

    Returns:
        The request, unchanged where no encoding replaces the checkpoint's.

    Raises:
        UserError: the checkpoint cannot be read, or ``rpe`` is not valid or contradicts the checkpoint's rotation.
    """
    if request.rpe is None:
        return request
    if request.rpe_module is not None:
        load_module(request.rpe_module)
    return replace(request, rpe=checkpoints.load(request.checkpoint).complete(request.rpe))
