"""Exact-match accuracy on algorithmic tasks, by number of items and depth, by greedy decoding with the KV cache."""

import functools
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fairseq_rpe import algorithms, positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.generation import check_length_independent, greedy_steps
from fairseq_rpe.evaluation.loading import load_model
from fairseq_rpe.evaluation.records import ExactMatchKey, ExactMatchRequest, ExactMatchResult
from fairseq_rpe.positions import registry
from fairseq_rpe.positions.position_transforms import seeded_generator
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.runs.defaults import defaults_for
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
        spec: spec of a position transform; one without an automatic ratio is returned as it is.
        train_length: training length, in items or tokens.
        length: evaluation length, in the same unit.

    >>> explicit_ratio("interpolate", 20, 80)
    'interpolate:ratio=0.25'
    """
    cls, _, config = registry.resolve(spec)
    return cls.spec_for_length(config, train_length, length) or spec


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
    evaluator = _Evaluator(request, checkpoint, bar)
    bar.start_timing(sum(evaluator.prepare_examples(key) for key in keys))
    return evaluator


class _Evaluator:
    """Measures the accuracy of one key: decodes its examples greedily and compares whole answers.

    Args:
        request: checkpoint, split, positions and batch size.
        checkpoint: the loaded checkpoint.
        bar: progress bar; counts generated tokens.

    Raises:
        UserError: the checkpoint cannot be used.
    """

    def __init__(self, request: ExactMatchRequest, checkpoint: RpeCheckpoint, bar: Progress) -> None:
        self._request, self._checkpoint, self._bar = request, checkpoint, bar
        self._algorithm = checkpoint_algorithm(checkpoint)
        self._model, self._task = load_model(request.checkpoint, request, log=request.log)
        check_length_independent(self._model)
        self._transforms = self._model.decoder.position_transforms
        default = self._transforms.train.evaluation
        # Spec of the position transform; an automatic ratio is replaced for each length.
        self._transform = str(request.positions_eval or checkpoint.model.get("positions_eval") or default)
        # Dataset, and indices of the key's examples in it.
        self._examples: dict[ExactMatchKey, tuple[AlgorithmDataset, Tensor]] = {}

    def prepare_examples(self, key: ExactMatchKey) -> int:
        """Select the examples of a key, and return the number of tokens that are generated for them.

        Raises:
            UserError: there is no such example, or the length has no positions.
        """
        data, indices = self._examples[key] = self._select_examples(key)
        if not len(indices):
            raise UserError(f"the {key.split} split has no example of {key.length} items: leave it out")
        self._fix_positions(key.length, None)
        _, answers = data.prompts(indices[:1].tolist())  # answers of one length have the same number of tokens
        return len(indices) * answers.shape[1]

    def __call__(self, key: ExactMatchKey) -> ExactMatchResult:
        """Measure one key."""
        start = time.monotonic()
        transform = self._fix_positions(key.length, None)
        is_random = positions.build(transform, self._task.train_tokens).random
        data, indices = self._examples[key]
        device = next(self._model.parameters()).device
        right = 0
        max_prompts = max(1, _MAX_PAIRS // self._algorithm.num_tokens(key.length) ** 2)
        for batch in indices.split(min(self._request.batch_size, max_prompts)):
            prompts, answers = data.prompts(batch.tolist())  # (B, P), (B, A)
            if is_random:
                self._fix_positions(key.length, prompts)
            count_tokens = functools.partial(self._bar.update, len(batch))
            generated = greedy_steps(self._model, prompts.to(device), answers.shape[1], count_tokens)  # (B, A)
            right += int(torch.eq(generated.cpu(), answers).all(1).sum())
        return ExactMatchResult(
            **vars(key),
            examples=len(indices),
            right=right,
            accuracy=right / len(indices),
            encoding=self._checkpoint.encoding,
            transform=transform,
            seconds=round(time.monotonic() - start, 3),
        )

    def _fix_positions(self, length: int, prompts: Tensor | None) -> str:
        """Fix the positions of prompt and answer of ``length`` items before decoding; return the transform's spec.

        Random positions are sampled for each of ``prompts`` (B, P); without prompts they are only checked.
        """
        tokens, train_tokens = self._algorithm.num_tokens(length), self._task.train_tokens
        if self._request.ratio_unit == "items":
            spec = explicit_ratio(self._transform, self._algorithm.max_length("train"), length)
        else:
            spec = explicit_ratio(self._transform, train_tokens, tokens)
        transform = positions.build(spec, train_tokens)
        if prompts is None or not transform.random:
            frozen = positions.freeze(transform, tokens, seeded_generator(self._transform, length))
        else:
            generators = [seeded_generator(self._transform, length, prompt) for prompt in prompts.tolist()]
            frozen = positions.freeze_rows(transform, [tokens] * len(generators), generators)
        self._transforms.evaluation = frozen
        return spec

    def _select_examples(self, key: ExactMatchKey) -> tuple[AlgorithmDataset, Tensor]:
        """Return a dataset and the indices of the key's examples in it."""
        if key.depth is None:
            if key.split not in self._task.datasets:
                self._task.load_dataset(key.split)
            data = self._task.dataset(key.split)
            return data, torch.from_numpy(data.items == key.length).nonzero().flatten()
        examples = list(self._algorithm.examples_at_depth(key.split, key.length, key.depth))
        return AlgorithmDataset(examples, self._task.source_dictionary), torch.arange(len(examples))
