"""Exact-match accuracy on algorithmic tasks, by number of items and depth, by greedy decoding with the KV cache.

A task with labels inside its prompts asks several questions in a sequence. One forward pass evaluates an example.
"""

import functools
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fairseq_rpe import positions
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.generation import greedy_steps
from fairseq_rpe.evaluation.example_scores import pack_hits
from fairseq_rpe.evaluation.needle_attention import measure_head_attention
from fairseq_rpe.evaluation.needle_records import HeadAttention, middle_depth
from fairseq_rpe.evaluation.predictions import append_predictions
from fairseq_rpe.evaluation.records import ExactMatchKey, ExactMatchRequest, ExactMatchResult, GapAccuracy
from fairseq_rpe.evaluation.task_model import TaskModel, cut_after
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.runs.defaults import defaults_for
from fairseq_rpe.tasks.algorithmic import AlgorithmDataset
from fairseq_rpe.utils.progress import Progress

# Query-key pairs of the prompts in a batch, whatever its size: 256 prompts of 256 tokens. Bounds the attention memory.
_MAX_PAIRS = 256**3


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
        self._task_model = TaskModel(request, checkpoint)
        self._algorithm, self._model, self._task = (
            self._task_model.algorithm,
            self._task_model.model,
            self._task_model.task,
        )
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
        self._task_model.fix_positions(key.length, None)
        if self._algorithm.has_labels:
            return len(indices) * self._algorithm.num_tokens(key.length)
        _, answers = data.prompts(indices[:1].tolist())  # answers of one length have about the same number of tokens
        return len(indices) * answers.shape[1]

    def __call__(self, key: ExactMatchKey) -> ExactMatchResult:
        """Measure one key."""
        start = time.monotonic()
        transform = self._task_model.fix_positions(key.length, None)
        is_random = positions.build(transform, self._task.train_tokens).random
        has_labels = self._algorithm.has_labels
        data, indices = self._examples[key]
        predict = self._predict_labels if has_labels else self._generate
        is_right = []  # (B,) for each batch, or (B, Q) for a task with Q labels
        predictions: list[str] = []
        max_prompts = max(1, _MAX_PAIRS // self._algorithm.num_tokens(key.length) ** 2)
        for batch in indices.split(min(self._request.batch_size, max_prompts)):
            rows = batch.tolist()
            if is_random:
                self._task_model.fix_positions(
                    key.length, data.questions(rows)[0] if has_labels else data.prompts(rows)[0]
                )
            predicted, answers = predict(data, rows)  # (B, A), (B, A) or (B, Q), (B, Q)
            is_equal = compare_tokens(predicted, answers, data.dictionary.pad())  # (B, A) or (B, Q)
            is_right.append(is_equal if has_labels else is_equal.all(1))
            if self._request.predictions is not None:
                end = None if has_labels else data.dictionary.eos()
                predictions += [data.decode(cut_after(tokens, end)) for tokens in predicted.tolist()]
        if self._request.predictions is not None:
            # before the result, so that a result that is stored has its predictions
            append_predictions(self._request.predictions, key, predictions, self._head_attention(key, data))
        is_right_by_example = torch.cat(is_right)  # (N,) or (N, Q)
        right, examples = int(is_right_by_example.sum()), is_right_by_example.numel()
        gaps = [data.examples[i].gaps for i in indices.tolist()] if has_labels else None
        return ExactMatchResult(
            **vars(key),
            examples=examples,
            right=right,
            accuracy=right / examples,
            by_gap=None if gaps is None else _count_by_gap(gaps, is_right_by_example),
            encoding=self._checkpoint.encoding,
            transform=transform,
            seconds=round(time.monotonic() - start, 3),
            hits=pack_hits(is_right_by_example.flatten().numpy()),
        )

    def _head_attention(self, key: ExactMatchKey, data: AlgorithmDataset) -> HeadAttention | None:
        """Return the attention to the needle of the first example at the middle depth; None at other depths."""
        depths = self._algorithm.depths(key.split)
        if key.depth is None or key.depth != middle_depth(depths) or not data.examples[0].needles:
            return None
        self._task_model.fix_positions(key.length, data.prompts([0])[0])
        return measure_head_attention(self._model, data)

    def _generate(self, data: AlgorithmDataset, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Generate the answers of B examples greedily; return them and the right answers, (B, A) each."""
        prompts, answers = data.prompts(rows)  # (B, P), (B, A)
        count_tokens = functools.partial(self._bar.update, len(rows))
        device = next(self._model.parameters()).device
        return greedy_steps(self._model, prompts.to(device), answers.shape[1], count_tokens).cpu(), answers

    @torch.no_grad()
    def _predict_labels(self, data: AlgorithmDataset, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Return the most likely token at each of Q labels of B examples, and the right tokens, (B, Q) each.

        One forward pass predicts all labels.
        """
        prompts, label_indices, answers = data.questions(rows)  # (B, T), (B, Q), (B, Q)
        device = next(self._model.parameters()).device
        features = self._model(prompts.to(device), features_only=True)[0]  # (B, T, C)
        queries = features[torch.arange(len(rows))[:, None].to(device), label_indices.to(device)]  # (B, Q, C)
        logits = self._model.decoder.output_layer(queries).float()  # (B, Q, V)
        if bool(logits.isnan().any()):
            raise UserError("this model's predictions are NaN: use an earlier checkpoint of its training")
        logits[..., data.dictionary.pad()] = -torch.inf  # padding is never predicted
        self._bar.update(prompts.numel())
        return logits.argmax(-1).cpu(), answers

    def _select_examples(self, key: ExactMatchKey) -> tuple[AlgorithmDataset, Tensor]:
        """Return a dataset and the indices of the key's examples in it."""
        if key.depth is None:
            if key.split not in self._task.datasets:
                self._task.load_dataset(key.split)
            data = self._task.dataset(key.split)
            return data, torch.from_numpy(data.items == key.length).nonzero().flatten()
        examples = list(self._algorithm.examples_at_depth(key.split, key.length, key.depth))
        return AlgorithmDataset(examples, self._task.source_dictionary), torch.arange(len(examples))


def compare_tokens(predicted: Tensor, answers: Tensor, pad: int) -> Tensor:
    """Return for each token whether a prediction is right.

    Args:
        predicted: (B, A) predicted tokens.
        answers: (B, A) right tokens; an answer that is shorter than others is padded after its end.
        pad: id of padding, at which any prediction is right.

    Returns:
        (B, A) bool.
    """
    return torch.eq(predicted, answers) | answers.eq(pad)


def _count_by_gap(gaps: Sequence[Sequence[int]], is_right: Tensor) -> tuple[GapAccuracy, ...]:
    """Count questions and right answers in bins of the gap: 1, 2 to 3, 4 to 7 and so on; empty bins are left out.

    Args:
        gaps: the gaps of Q questions in tokens, at least 1, for each of N examples.
        is_right: (N, Q) bool, whether each question is answered correctly.

    Returns:
        The counts of each bin, by ascending gap.
    """
    # floating-point logarithms would round
    exponents = torch.tensor([[gap.bit_length() - 1 for gap in row] for row in gaps])  # (N, Q)
    return tuple(
        GapAccuracy(gap=2**k, examples=int((exponents == k).sum()), right=int(is_right[exponents == k].sum()))
        for k in exponents.unique().tolist()
    )
