"""Parameters and FLOPs of a decoder, computed from its configuration without memory for its parameters.

A FLOP is one multiplication or one addition of a matrix product: a product of (n, a) and (a, b) has 2·n·a·b. Norms,
activations, softmax, and what an encoding computes (biases, rotations, content biases) are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from fairseq_rpe.core.attention_options import AttentionOptions
from fairseq_rpe.decoder.blocks import DecoderLayer, make_norm
from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.encodings.model import LayerEncodings

TRAINING_FACTOR = 3  # a backward pass has two products for each product of the forward pass


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of a model; tied parameters are counted once.

    Attributes:
        embedding: V·E of the token embedding, its projection E·C to another width and its norm.
        layers: all layers and the final norm.
        output: output projection, 0 if it is the token embedding, and its projection from another width.
        encoding: learned parameters of all encodings.
    """

    embedding: int
    layers: int
    output: int
    encoding: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.layers + self.output + self.encoding


@dataclass(frozen=True)
class RowFlops:
    """FLOPs of a forward pass of one row of n tokens.

    Attributes:
        linear: linear layers of all decoder layers, and projections of embeddings to another width.
        recomputed: those of ``linear`` that the backward pass computes again with ``checkpoint_activations``.
        attention: scores q·kᵀ and sums of values of all layers.
        output: output projection.
    """

    linear: int
    recomputed: int
    attention: int
    output: int

    @property
    def forward(self) -> int:
        """FLOPs of a forward pass."""
        return self.linear + self.attention + self.output

    def training(self, checkpoint_activations: bool) -> int:
        """Return the FLOPs of a forward and a backward pass.

        Args:
            checkpoint_activations: whether the backward pass computes each layer again, up to its last product.
        """
        again = self.recomputed + self.attention if checkpoint_activations else 0
        return TRAINING_FACTOR * self.forward + again


class LinearSizes(NamedTuple):
    """Inputs and outputs of a linear layer."""

    inputs: int
    outputs: int

    @property
    def weights(self) -> int:
        """Number of weights, without the bias."""
        return self.inputs * self.outputs


@cache
def _layer(config: DecoderConfig) -> DecoderLayer:
    """Return a decoder layer without memory for its parameters."""
    with torch.device("meta"):
        return DecoderLayer(config, 0)


@cache
def layer_linears(config: DecoderConfig) -> dict[str, LinearSizes]:
    """Return the linear layers of one decoder layer by name, such as ``fc1`` or ``self_attn.q_proj``.

    Args:
        config: sizes and blocks of the decoder.
    """
    modules = _layer(config).named_modules()
    return {name: LinearSizes(m.in_features, m.out_features) for name, m in modules if isinstance(m, nn.Linear)}


def layer_weights(config: DecoderConfig) -> int:
    """Return the number of weights of the linear layers of one decoder layer, without their biases.

    Args:
        config: sizes and blocks of the decoder.
    """
    return sum(linear.weights for linear in layer_linears(config).values())


def _projections(config: DecoderConfig) -> tuple[int, int]:
    """Return the weights of the projections from the width of the embedding and to the width of the features."""
    inputs, outputs = config.input_width or config.width, config.output_width or config.width
    return inputs * config.width * (inputs != config.width), config.width * outputs * (outputs != config.width)


def count_parameters(config: DecoderConfig, encodings: LayerEncodings) -> ParameterCounts:
    """Count the parameters of a decoder.

    Args:
        config: sizes and blocks.
        encodings: encodings of all layers.

    Returns:
        The numbers of a built decoder.
    """
    project_in, project_out = _projections(config)
    with torch.device("meta"):
        norm = sum(parameter.numel() for parameter in make_norm(config, config.width).parameters())
    layer = sum(parameter.numel() for parameter in _layer(config).parameters())
    embedding = config.vocabulary * (config.input_width or config.width)
    output = 0 if config.share_embeddings else config.vocabulary * (config.output_width or config.width)
    return ParameterCounts(
        embedding=embedding + project_in + norm * config.embedding_norm,
        layers=config.layers * layer + norm * config.final_norm,
        output=output + project_out,
        encoding=sum(parameter.numel() for parameter in encodings.parameters()),
    )


def visible_pairs(n: int, options: AttentionOptions | None = None) -> int:
    """Return the number of pairs (i, j) of n tokens for which query i sees key j.

    Causal attention has n(n + 1)/2 pairs. Within a window of w keys, query i sees min(i + 1, w) of them; within blocks
    of c positions, only those of its block.

    Args:
        n: number of tokens.
        options: attention options of an encoding, of which ``local`` (w) and ``block`` (c) matter; None: no limit.
    """
    window = min(int(options.local) or n, n) if options is not None else n
    block = min(int(options.block) or n, n) if options is not None else n
    count, rest = divmod(n, block)
    return count * _causal_pairs(block, window) + _causal_pairs(rest, window)


def _causal_pairs(n: int, window: int) -> int:
    """Return Σ min(i + 1, window) over n queries i."""
    near = min(n, window)
    return near * (near + 1) // 2 + (n - near) * window


def row_flops(
    config: DecoderConfig,
    options: Sequence[AttentionOptions],
    n: int,
    *,
    output_tokens: int | None = None,
    dense: bool = False,
) -> RowFlops:
    """Count the FLOPs of the matrix products of a forward pass of one row.

    Layers: 2·n·P for the P weights of their linear layers. Attention: 2·2·H·D for each visible pair of a query and a
    key, as kernels that skip hidden keys compute. Output: 2·n·C·V.

    Args:
        config: sizes and blocks of the decoder.
        options: attention options of each layer.
        n: tokens of the row.
        output_tokens: tokens whose logits are computed; None: all.
        dense: count all n² pairs, as the reference backend computes and as papers often count.

    Returns:
        The FLOPs.
    """
    project_in, project_out = _projections(config)
    linears = layer_linears(config)
    pairs = sum(n * n if dense else visible_pairs(n, layer) for layer in options)
    logits = n if output_tokens is None else output_tokens
    last = linears["fc2"].weights  # torch stops recomputing when the last saved tensor exists: the input of fc2
    return RowFlops(
        linear=2 * n * (config.layers * layer_weights(config) + project_in + project_out),
        recomputed=2 * n * config.layers * (layer_weights(config) - last),
        attention=4 * config.heads * config.head_dim * pairs,
        output=2 * logits * (config.output_width or config.width) * config.vocabulary,
    )


def attention_options_by_layer(config: DecoderConfig, encodings: LayerEncodings) -> list[AttentionOptions]:
    """Return the attention options of each layer.

    Args:
        config: sizes and blocks of the decoder.
        encodings: encodings of all layers.
    """
    return [encodings.layer(layer).attention_options for layer in range(config.layers)]
