"""Exact-match accuracy on algorithmic tasks, by number of items and depth, by greedy decoding with the KV cache."""

import functools
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fairseq_rpe import algorithms, positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import configure, parse
from fairseq_rpe.decoder.generation import check_length_independent, greedy_steps
from fairseq_rpe.evaluation.loading import load_model
from fairseq_rpe.evaluation.records import ExactMatchKey, ExactMatchRequest, ExactMatchResult
from fairseq_rpe.positions import registry
from fairseq_rpe.positions.position_transforms import seeded_generator
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.runs.settings import IDENTITY
from fairseq_rpe.tasks.algorithmic import AlgorithmDataset
from fairseq_rpe.utils.progress import Progress

# Query-key pairs of the prompts in a batch, whatever its size: 256 prompts of 256 tokens. Bounds the attention memory.
_MAX_PAIRS = 256**3


def checkpoint_algorithm(checkpoint: RpeCheckpoint) -> algorithms.Algorithm:
    """Return the algorithmic task that a checkpoint was trained on.

    Args:
        checkpoint: a loaded checkpoint.

    Raises:
        UserError: it was trained on text.
    """
    spec = checkpoint.task.get("algorithm")
    if not spec:
        raise UserError(f"{checkpoint.path} was not trained on an algorithmic task: use fairseq-rpe eval for text")
    return algorithms.build(str(spec))


def explicit_ratio(spec: str, train_length: int, length: int) -> str:
    """Return ``spec`` with an automatic interpolation ratio replaced by its value, min(1, train_length / length).

    Args:
        spec: spec of a position transform; any other than ``interpolate`` with an automatic ratio is returned as it is.
        train_length: training length, in items or tokens.
        length: evaluation length, in the same unit.

    >>> explicit_ratio("interpolate", 20, 80)
    'interpolate:ratio=0.25'
    """
    name, options = parse(spec)
    config = configure(registry.get(name).Config, name, options)
    if name != "interpolate" or config.ratio != "auto" or config.train is not None:
        return spec
    return f"interpolate:ratio={train_length / length!r}" if length > train_length else IDENTITY


def make_evaluator(
    request: ExactMatchRequest, checkpoint: RpeCheckpoint, bar: Progress, keys: Sequence[ExactMatchKey]
) -> Callable[[ExactMatchKey], ExactMatchResult]:
    """Load the model and the examples of a split.

    Args:
        request: checkpoint, split, positions and batch size.
        checkpoint: the loaded checkpoint.
        bar: progress bar; counts generated tokens.
        keys: the keys that will be evaluated.

    Returns:
        Function that measures one key.

    Raises:
        UserError: the checkpoint cannot be used, or a number of items has no example or no positions.
    """
    threads = defaults_for(checkpoint.arch, algorithm=True).threads
    if threads and "OMP_NUM_THREADS" not in os.environ:
        # decoding single tokens of a small model: more threads would only wait for each other
        torch.set_num_threads(threads)
    algorithm = checkpoint_algorithm(checkpoint)
    model, task = load_model(request.checkpoint, request, log=request.log)
    transforms, device = model.decoder.position_transforms, next(model.parameters()).device
    check_length_independent(model)
    requested = str(request.positions_eval or checkpoint.model.get("positions_eval") or transforms.train.evaluation)

    def fix_positions(length: int, prompts: Tensor | None = None) -> str:
        """Fix the positions of prompt and answer of ``length`` items before decoding; return the transform's spec.

        Random positions are sampled for each of ``prompts`` (B, P); without prompts they are only checked.
        """
        tokens, train_tokens = algorithm.num_tokens(length), task.train_tokens
        sizes = (algorithm.max_length("train"), length) if request.ratio_unit == "items" else (train_tokens, tokens)
        spec = explicit_ratio(requested, *sizes)
        transform = positions.build(spec, train_tokens)
        if prompts is None or not transform.random:
            transforms.evaluation = positions.freeze(transform, tokens, seeded_generator(requested, length))
        else:
            generators = [seeded_generator(requested, length, prompt) for prompt in prompts.tolist()]
            transforms.evaluation = positions.freeze_rows(transform, [tokens] * len(generators), generators)
        return spec

    @functools.cache
    def select_examples(key: ExactMatchKey) -> tuple[AlgorithmDataset, Tensor]:
        """Return a dataset and the indices of the key's examples in it, which counting and evaluating both need."""
        if key.depth is None:
            if request.split not in task.datasets:
                task.load_dataset(request.split)
            data = task.dataset(request.split)
            return data, torch.from_numpy(data.items == key.length).nonzero().flatten()
        examples = list(algorithm.examples_at_depth(key.split, key.length, key.depth))
        return AlgorithmDataset(examples, task.source_dictionary), torch.arange(len(examples))

    def evaluate(key: ExactMatchKey) -> ExactMatchResult:
        start = time.monotonic()
        transform = fix_positions(key.length)
        is_random = positions.build(transform, task.train_tokens).random
        data, indices = select_examples(key)
        right = 0
        batch_size = min(request.batch_size, max(1, _MAX_PAIRS // algorithm.num_tokens(key.length) ** 2))
        for batch in indices.split(batch_size):
            prompts, answers = data.prompts(batch.tolist())  # (B, P), (B, A)
            if is_random:
                fix_positions(key.length, prompts)
            count_tokens = functools.partial(bar.update, len(batch))
            generated = greedy_steps(model, prompts.to(device), answers.shape[1], count_tokens)  # (B, A)
            right += int(torch.eq(generated.cpu(), answers).all(1).sum())
        return ExactMatchResult(
            **vars(key),
            examples=len(indices),
            right=right,
            accuracy=right / len(indices),
            encoding=checkpoint.encoding,
            transform=transform,
            seconds=round(time.monotonic() - start, 3),
        )

    generated_tokens = 0
    for key in keys:
        data, indices = select_examples(key)
        if not len(indices):
            raise UserError(f"the {request.split} split has no example of {key.length} items: leave it out")
        fix_positions(key.length)  # raises UserError if the length has no positions
        _, answers = data.prompts(indices[:1].tolist())  # answers of one length have the same number of tokens
        generated_tokens += len(indices) * answers.shape[1]
    bar.start_timing(generated_tokens)
    return evaluate
