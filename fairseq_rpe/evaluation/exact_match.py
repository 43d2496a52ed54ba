"""Exact answers to an algorithmic task by number of items, and depth, by greedy decoding with the cache."""

import functools
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fairseq_rpe import algorithms, positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import configure, parse
from fairseq_rpe.decoder.generation import check_fixed, continued
from fairseq_rpe.evaluation.loading import load
from fairseq_rpe.evaluation.records import AnswerKey, AnswerRequest, AnswerResult
from fairseq_rpe.positions import registry
from fairseq_rpe.positions.position_transforms import generator_of
from fairseq_rpe.runs.checkpoints import Checkpoint
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.runs.settings import IDENTITY
from fairseq_rpe.tasks.algorithmic import AnswerDataset
from fairseq_rpe.utils.progress import Progress

# Query-key pairs of the prompts that are answered together, however many are asked for: 256 of 256 tokens. It bounds
# the memory of attention.
_PAIRS = 256**3


def algorithm_of(checkpoint: Checkpoint) -> algorithms.Algorithm:
    """The task that a checkpoint was trained on; one that was trained on text is refused."""
    spec = checkpoint.task.get("algorithm")
    if not spec:
        raise UserError(f"{checkpoint.path} was not trained on an algorithmic task: fairseq-rpe eval is for text")
    return algorithms.build(str(spec))


def interpolated(spec: str, trained: int, length: int) -> str:
    """``spec`` with interpolation's automatic ratio made explicit: trained / length, 1 where the length was trained.

    >>> interpolated("interpolate", 20, 80)
    'interpolate:ratio=0.25'
    """
    name, given = parse(spec)
    config = configure(registry.get(name).Config, name, given)
    if name != "interpolate" or config.ratio != "auto" or config.train is not None:
        return spec
    return f"interpolate:ratio={trained / length!r}" if length > trained else IDENTITY


def measuring(
    request: AnswerRequest, checkpoint: Checkpoint, bar: Progress, wanted: Sequence[AnswerKey]
) -> Callable[[AnswerKey], AnswerResult]:
    """Load the model and the examples of a split, to be asked one number of items, and depth, after the other.

    ``bar`` is told of the tokens that are written, of all that ``wanted`` asks for.

    Raises UserError if the checkpoint cannot be used, or a number of items has no example or no positions.
    """
    threads = defaults_for(checkpoint.arch, algorithm=True).threads
    if threads and "OMP_NUM_THREADS" not in os.environ:
        # single tokens of a small model: more threads only wait for each other
        torch.set_num_threads(threads)
    algorithm = algorithm_of(checkpoint)
    model, task = load(request.checkpoint, request, log=request.log)
    moves, device = model.decoder.moves, next(model.parameters()).device
    check_fixed(model)
    given = str(request.positions or checkpoint.model.get("positions_eval") or moves.train.evaluation)

    def place(length: int, prompts: Tensor | None = None) -> str:
        """Settle the positions of whole rows of ``length`` items before their first token is read, and name them.

        ``prompts`` (B, P): random positions are drawn for each; without, they are only checked.
        """
        whole, trained = algorithm.tokens(length), task.train_tokens
        sizes = (algorithm.longest("train"), length) if request.unit == "items" else (trained, whole)
        spec = interpolated(given, *sizes)
        transform = positions.build(spec, trained)
        if prompts is None or not transform.random:
            moves.evaluation = positions.freeze(transform, whole, generator_of(given, length))
        else:
            own = [generator_of(given, length, prompt) for prompt in prompts.tolist()]
            moves.evaluation = positions.freeze_rows(transform, [whole] * len(own), own)
        return spec

    @functools.cache
    def asked(key: AnswerKey) -> tuple[AnswerDataset, Tensor]:
        """The examples of a key among those of a data set."""
        if key.depth is None:
            if request.split not in task.datasets:
                task.load_dataset(request.split)
            data = task.dataset(request.split)
            return data, torch.from_numpy(data.items == key.length).nonzero().flatten()
        own = AnswerDataset(list(algorithm.at(key.split, key.length, key.depth)), task.source_dictionary)
        return own, torch.arange(len(own))

    def measure(key: AnswerKey) -> AnswerResult:
        start = time.monotonic()
        transform = place(key.length)
        drawn = positions.build(transform, task.train_tokens).random
        data, rows = asked(key)
        right = 0
        for part in rows.split(min(request.batch_size, max(1, _PAIRS // algorithm.tokens(key.length) ** 2))):
            prompts, answers = data.prompts(part.tolist())
            if drawn:
                place(key.length, prompts)
            written = continued(model, prompts.to(device), answers.shape[1], functools.partial(bar.update, len(part)))
            right += int(torch.eq(written.cpu(), answers).all(1).sum())
        counts = {"examples": len(rows), "right": right, "accuracy": right / len(rows)}
        took = round(time.monotonic() - start, 3)
        return AnswerResult(**vars(key), **counts, encoding=checkpoint.encoding, transform=transform, seconds=took)

    total = 0
    for key in wanted:
        data, rows = asked(key)
        if not len(rows):
            raise UserError(f"the {request.split} split has no example of {key.length} items: leave it out")
        place(key.length)
        total += len(rows) * data.prompts(rows[:1].tolist())[1].shape[1]
    bar.begin(total)
    return measure
