"""Attention of every head to the needle of one example of a needle task."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_rpe.algorithms import Algorithm, Example
from fairseq_rpe.algorithms.needles import DepthTask
from fairseq_rpe.attention import AttentionPlan
from fairseq_rpe.attention.reference import attention_weights
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.generation import greedy_steps
from fairseq_rpe.evaluation.empirical_receptive_field import AttentionMassProbe
from fairseq_rpe.evaluation.needle_records import HeadAttention, NeedleAttention, round_weights
from fairseq_rpe.evaluation.records import ExactMatchRequest
from fairseq_rpe.evaluation.task_model import TaskModel, cut_after
from fairseq_rpe.runs.checkpoints import RpeCheckpoint
from fairseq_rpe.tasks.algorithmic import AlgorithmDataset
from fairseq_rpe.utils import files


class AttentionWeightsProbe(AttentionMassProbe):
    """Context manager that keeps the attention weights of the last queries of one text that passes through a decoder.

    The weights are those of the reference backend, with bias, window and null logit, in float32 or better.

    Args:
        decoder: decoder of a ``transformer_rpe_lm`` in evaluation mode.
        length: tokens of the text.
        rows: number of queries whose weights are kept, the last of the text.
    """

    def __init__(self, decoder: Any, length: int, rows: int) -> None:
        super().__init__(decoder, length, rows, epsilons=())
        self.layers: list[list[Tensor]] = [[] for _ in decoder.layers]  # blocks of weights (H, n, length)

    def record_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> None:
        """Keep the weights of some queries of one layer: q (1, H, n, D), k and v (1, G, m, D)."""
        weights = attention_weights(q, k, plan)[0]  # (H, n, m)
        self.layers[layer].append(F.pad(weights, (0, self.length - weights.shape[-1])))

    def weights(self) -> Tensor:
        """Return the weights (layers, H, rows, length); keys after a query have weight 0."""
        return torch.stack([torch.cat(blocks, dim=1) for blocks in self.layers]).cpu()


def needle_example(algorithm: Algorithm, split: str, length: int, depth: float, index: int) -> Example:
    """Return one example with a needle.

    Args:
        algorithm: a task with depths whose examples have needles.
        split: split with depths.
        length: number of tokens of prompt and answer.
        depth: depth of the needle, from 0 to 1.
        index: number of the example among those of its length and depth, from 0.

    Raises:
        UserError: the task has no needle, or not this length or example.
    """
    if not isinstance(algorithm, DepthTask) or not algorithm.depths(split):
        raise UserError(
            f"{algorithm.spec} has no needle at a depth: use a checkpoint of passkey, retrieval or induction"
        )
    least, most = algorithm.min_tokens, algorithm.max_length(split)
    if not least <= length <= most:
        raise UserError(f"--length {length}: {algorithm.spec} has {split} examples of {least} to {most} tokens")
    if not 0 <= depth <= 1:
        raise UserError(f"--depth {depth:g} is not between 0 (first) and 1 (last)")
    example = next(itertools.islice(algorithm.examples_at_depth(split, length, depth), index, None), None)
    if example is None:
        count = getattr(algorithm.config, split)
        raise UserError(f"--example {index}: there are {count} examples of a length and depth, counted from 0")
    if not example.needles:
        raise UserError(
            f"{algorithm.spec} does not record where its needle is: use a checkpoint of passkey or retrieval"
        )
    return example


@torch.no_grad()
def measure_needle_attention(
    request: ExactMatchRequest, checkpoint: RpeCheckpoint, length: int, depth: float, index: int = 0
) -> NeedleAttention:
    """Measure the attention to the needle of one example.

    Args:
        request: checkpoint, split and the settings that replace those of the checkpoint.
        checkpoint: the loaded checkpoint.
        length: number of tokens of prompt and answer.
        depth: depth of the needle, from 0 to 1.
        index: number of the example among those of its length and depth, from 0.

    Returns:
        The attention of every head.

    Raises:
        UserError: the checkpoint cannot be used, or :func:`needle_example` refuses the example.
    """
    task_model = TaskModel(request, checkpoint)
    model, example = task_model.model, needle_example(task_model.algorithm, request.split, length, depth, index)
    data = AlgorithmDataset([example], task_model.task.source_dictionary)
    prompts, answers = data.prompts([0])  # (1, P), (1, A)
    transform = task_model.fix_positions(length, prompts)
    generated = greedy_steps(model, prompts.to(next(model.parameters()).device), answers.shape[1])[0].tolist()
    return NeedleAttention(
        **vars(measure_head_attention(model, data)),
        checkpoint=files.sha256_of_files(request.checkpoint),
        encoding=checkpoint.encoding,
        algorithm=task_model.algorithm.spec,
        split=request.split,
        rpe=request.rpe,
        positions=request.positions_eval,
        transform=transform,
        length=length,
        depth=depth,
        example=index,
        tokens=(*example.prompt, *example.answer[:-1]),
        answer=example.answer,
        prediction=tuple(data.decode(cut_after(generated, data.dictionary.eos())).split(" ")),
    )


@torch.no_grad()
def measure_head_attention(model: Any, data: AlgorithmDataset) -> HeadAttention:
    """Measure the attention to the needle of an example with a model that is already loaded.

    Args:
        model: a ``transformer_rpe_lm`` in evaluation mode, with the positions of the example.
        data: a dataset whose first example has a needle.

    Returns:
        The attention of every head.
    """
    example = data.examples[0]
    prompts, answers = data.prompts([0])  # (1, P), (1, A), the last token is </s>
    queries = len(example.answer)
    tokens = torch.cat([prompts, answers[:, : queries - 1]], dim=1)  # (1, n)
    probe = AttentionWeightsProbe(model.decoder, tokens.shape[1], queries)
    with probe:
        model.decoder(tokens.to(next(model.parameters()).device), features_only=True)
    weights = probe.weights().double().mean(2).numpy()  # (layers, H, n)
    mass = sum(weights[..., start:end].sum(-1) for start, end in example.needles)  # (layers, H)
    layer, head = divmod(int(mass.argmax()), mass.shape[1])
    encodings = model.decoder.encodings
    return HeadAttention(
        needles=example.needles,
        queries=queries,
        mass=tuple(map(round_weights, mass)),
        total=tuple(map(round_weights, weights.sum(-1))),
        layer=layer,
        head=head,
        weights=round_weights(weights[layer, head]),
        layer_specs=tuple(encodings.layer_specs) if encodings.is_mixed else (),
    )
