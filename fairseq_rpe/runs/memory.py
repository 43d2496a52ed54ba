"""Estimated memory of a training on one device: weights, gradients, optimizer, activations and loss.

Every function returns bytes. Activations are the tensors that the backward pass needs, as the layers here save them:
Korthikanti et al. (2022, arXiv 2205.05198) count them in the same way for layers of another implementation. Attention
saves queries, keys, values, its output and one log-sum-exp for each query, since its backends compute the n×n weights
again; the backend ``reference`` keeps them.

Not counted: activations of the encodings themselves (FIRE's MLP, content biases and DAPE's MLP in short rows, the
integration of FLOATER), the context of the device, and the fragmentation of its allocator, for which
:data:`FREE_SHARE` stays free.
"""

from dataclasses import dataclass, replace

from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.decoder.costs import ParameterCounts, layer_linears, layer_weights
from fairseq_rpe.encodings import Encoding
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.modules.cross_entropy import CHUNK, count_chunk_rows

FREE_SHARE = 0.1  # share of a device's memory that its context and the fragmentation of its allocator take
ANSWER_TOKENS = 64  # assumed tokens of the answer to a question, whose logits a fine-tuning keeps
FLOAT = 4  # bytes of float32
ADAM_MOMENTS = 2
# tensors of the width F that a feed-forward layer saves; relu and tanh share theirs with the next linear layer
_ACTIVATION_TENSORS = {
    "relu": 1,
    "tanh": 1,
    "linear": 1,
    "relu_squared": 2,
    "gelu": 2,
    "silu": 2,
    "swiglu": 4,
    "geglu": 4,
    "gelu_tanh": 5,
    "clamped_swiglu": 7,
}
_NORMS = {"sandwich": 4}  # norms of a layer by their position; two elsewhere
_SAVE_OUTPUT = ("relu", "tanh")  # activations whose output the backward pass needs


@dataclass(frozen=True)
class Workload:
    """What determines the memory of a training besides its model.

    Attributes:
        rows: rows of a batch of one device.
        tokens: tokens of a row.
        processes: data-parallel processes.
        update_freq: batches that are accumulated for an update.
        logit_tokens: tokens whose logits are kept: those of answers; None: a text, whose logits are computed in chunks.
        on_gpu: whether the device is a GPU, whose kernels save smaller dropout masks and fewer tensors of RMSNorm.
    """

    rows: int
    tokens: int
    processes: int = 1
    update_freq: int = 1
    logit_tokens: int | None = None
    on_gpu: bool = True


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a training on one device.

    Attributes:
        weights: 4·N for N parameters.
        gradients: 4·N, and once more for the buckets that several processes exchange.
        optimizer: 8·N, both moments of Adam.
        activations: saved activations of a batch.
        recomputed: activations of the layer that the backward pass computes again, with checkpoint_activations.
        loss: gradient of the output projection, and a chunk of logits.
        biases: tables of the encodings.
        working: gradients of activations, or temporary tensors of the optimizer.
        peak: the largest sum of those that exist at the same time.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    recomputed: int
    loss: int
    biases: int
    working: int
    peak: int

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer


def compute_bytes(config: DecoderConfig) -> int:
    """Return the bytes of an element of a matrix product.

    Args:
        config: sizes and blocks of the decoder.
    """
    return 2 if config.compute_dtype == "bf16" else FLOAT


def _norm_bytes(config: DecoderConfig, width: int, on_gpu: bool) -> int:
    """Return the bytes that a norm saves for a token: input and statistics, in float32."""
    if config.norm == "layernorm":
        return FLOAT * width + 2 * FLOAT
    return (1 if on_gpu else 2) * FLOAT * width + FLOAT


def _attention_bytes(config: DecoderConfig, encoding: Encoding, tokens: int) -> int:
    """Return the bytes that attention saves for a token, its projections' outputs included."""
    size, is_float = compute_bytes(config), compute_bytes(config) == FLOAT
    q_width, kv_width = config.heads * config.head_dim, config.num_kv_heads * config.head_dim
    # q, k, v, output and log-sum-exp; values and output are as wide as rotated queries
    saved = size * encoding.rotated_width_factor * (2 * q_width + 2 * kv_width) + FLOAT * config.heads
    if config.num_kv_heads != config.heads or (encoding.rotates and not is_float):
        saved += size * q_width  # the output projection copies the output
    if encoding.rotated_width_factor > 1:
        saved += FLOAT * (3 * q_width + kv_width)  # q and k before the rotation, and a product twice as wide as q
    elif encoding.rotates and any(True for _ in encoding.parameters()):
        saved += (2 * FLOAT if is_float else 2) * (q_width + kv_width)  # a learned rotation needs its input
    if config.backend == "reference":
        saved += 2 * FLOAT * config.heads * tokens + tokens  # weights before and after masking, and the mask
    return saved


def _feed_forward_bytes(config: DecoderConfig, on_gpu: bool) -> int:
    """Return the bytes that a feed-forward layer saves for a token."""
    size, width = compute_bytes(config), config.ffn_width
    saved = size * width * _ACTIVATION_TENSORS[config.activation]
    if config.activation == "gelu" and size < FLOAT:
        saved += (FLOAT - size) * width  # fairseq computes it in float32
    if config.activation_dropout > 0:
        saved += (1 if on_gpu else size) * width + size * width * (config.activation in _SAVE_OUTPUT)
    return saved + _norm_bytes(config, width, on_gpu) * config.scale_ffn


def layer_token_bytes(config: DecoderConfig, encoding: Encoding, tokens: int, on_gpu: bool) -> int:
    """Return the bytes that a decoder layer saves for a token.

    With C the model width, D the width of a head, H and G the query and key heads, F the feed-forward width and s the
    bytes of a matrix product's element: two norms with 4·C each, the inputs of the linear layers s·C (with bf16 a copy
    for each of them), s·(2·H·D + 2·G·D) of attention, and s·F for each tensor of the activation.

    Args:
        config: sizes and blocks of the decoder.
        encoding: encoding of the layer.
        tokens: tokens of a row.
        on_gpu: whether the device is a GPU.
    """
    size, width = compute_bytes(config), config.width
    copies = 2 if size == FLOAT else len(layer_linears(config)) - 2  # inputs of all linear layers but out_proj and fc2
    norms = _NORMS.get(config.norm_position, 2)
    saved = norms * _norm_bytes(config, width, on_gpu) + copies * size * width
    if config.norm_position == "parallel":
        saved -= FLOAT * width  # both norms have the same input
    saved += _attention_bytes(config, encoding, tokens) + _feed_forward_bytes(config, on_gpu)
    if config.qk_norm != "none":
        heads = (config.heads + config.num_kv_heads) * config.head_dim
        saved += _norm_bytes(replace(config, norm="rmsnorm"), heads, on_gpu)
    if config.dropout > 0:
        saved += 2 * (1 if on_gpu else size) * width
    return saved + (_norm_bytes(config, width, on_gpu) + size * width) * config.scale_attention


def activation_bytes(config: DecoderConfig, encodings: LayerEncodings, load: Workload) -> int:
    """Return the bytes of the activations that a forward pass saves, the loss included.

    With ``checkpoint_activations``, a layer saves its input alone, 4·C bytes for a token.

    Args:
        config: sizes and blocks of the decoder.
        encodings: encodings of all layers.
        load: batch of one device.
    """
    width, tokens = config.width, load.rows * load.tokens
    layers = [encodings.layer(layer) for layer in range(config.layers)]
    if config.checkpoint_activations:
        saved = FLOAT * width * config.layers
    else:
        saved = sum(layer_token_bytes(config, encoding, load.tokens, load.on_gpu) for encoding in layers)
    if config.dropout > 0:  # of the embedding
        saved += (1 if load.on_gpu else FLOAT) * width
    if config.final_norm:
        saved += _norm_bytes(config, width, load.on_gpu)
    saved += 2 * FLOAT * (config.output_width or width)  # features and their gradient
    copies = 0
    if compute_bytes(config) < FLOAT and not config.checkpoint_activations:
        copies = compute_bytes(config) * config.layers * layer_weights(config)  # autocast's copies of the weights
    return tokens * saved + copies


def loss_bytes(config: DecoderConfig, load: Workload) -> int:
    """Return the bytes of the loss: the gradient of the output projection, and logits.

    A text computes its logits in chunks: 4·V·C for the gradient in float32, and two tensors of a chunk in float32. With
    bf16 the chunks may be larger, and there are a third tensor in bfloat16, copies of the output projection and of its
    gradient in bfloat16, and the gradient of a chunk in float32. Answers keep their logits, log-probabilities,
    predictions and gradients.

    Args:
        config: sizes and blocks of the decoder.
        load: batch of one device.
    """
    vocabulary, width = config.vocabulary, config.output_width or config.width
    is_float = compute_bytes(config) == FLOAT
    if load.logit_tokens is not None:
        return 4 * FLOAT * load.rows * load.logit_tokens * vocabulary
    tokens = load.rows * load.tokens
    if is_float:
        return vocabulary * FLOAT * (width + 2 * min(CHUNK, tokens))
    tables = 2 * FLOAT + 2 * compute_bytes(config)
    return vocabulary * (tables * width + (2 * FLOAT + compute_bytes(config)) * count_chunk_rows(tokens, vocabulary))


def bias_bytes(config: DecoderConfig, encodings: LayerEncodings, tokens: int) -> int:
    """Return the bytes of the biases: a table of H·n values for each encoding, or H·n² with the backend reference.

    Args:
        config: sizes and blocks of the decoder.
        encodings: encodings of all layers.
        tokens: tokens n of a row.
    """
    columns = tokens * tokens if config.backend == "reference" else tokens
    return FLOAT * config.heads * columns * sum(encoding.adds_bias for encoding in encodings)


def estimate_memory(
    config: DecoderConfig, encodings: LayerEncodings, parameters: ParameterCounts, load: Workload
) -> MemoryEstimate:
    """Estimate the memory of a training in float32 or with ``--compute-dtype bf16``, and Adam in float32.

    Three moments compete for the peak. The start of the backward pass has all activations; its end, and the update,
    have all gradients. Only with accumulated batches do both exist at once. Buckets of several processes always exist.

    Args:
        config: sizes and blocks of the decoder.
        encodings: encodings of all layers.
        parameters: parameters of the model.
        load: batch of one device.

    Returns:
        The estimate.
    """
    tokens, size = load.rows * load.tokens, compute_bytes(config)
    weights = gradients = FLOAT * parameters.total
    buckets = gradients if load.processes > 1 else 0
    activations, loss = activation_bytes(config, encodings, load), loss_bytes(config, load)
    biases = bias_bytes(config, encodings, load.tokens)
    recomputed = 0
    if config.checkpoint_activations:
        layers = {id(encodings.layer(layer)): encodings.layer(layer) for layer in range(config.layers)}
        of_layer = (layer_token_bytes(config, e, load.tokens, load.on_gpu) for e in layers.values())
        recomputed = tokens * max(of_layer)
    table = FLOAT * config.vocabulary * (config.output_width or config.width)
    of_update = max(table, FLOAT * config.width * config.ffn_width)
    of_backward = tokens * size * config.ffn_width
    held = gradients if load.update_freq > 1 else 0
    optimizer = ADAM_MOMENTS * weights
    moments = (
        activations + biases + held + loss,
        activations + biases + held + recomputed + of_backward + table,
        gradients + of_update,
    )
    return MemoryEstimate(
        weights=weights,
        gradients=gradients + buckets,
        optimizer=optimizer,
        activations=activations,
        recomputed=recomputed,
        loss=loss,
        biases=biases,
        working=max(of_backward, of_update),
        peak=weights + optimizer + buckets + max(moments),
    )


def largest_batch(
    config: DecoderConfig, encodings: LayerEncodings, parameters: ParameterCounts, load: Workload, memory: float
) -> int:
    """Return the largest number of rows with which a training fits a device; 0 if one row does not fit.

    Args:
        config: sizes and blocks of the decoder.
        encodings: encodings of all layers.
        parameters: parameters of the model.
        load: batch of one device; its rows are ignored.
        memory: memory of the device in bytes, of which :data:`FREE_SHARE` stays free.
    """

    def fits(rows: int) -> bool:
        peak = estimate_memory(config, encodings, parameters, replace(load, rows=rows)).peak
        return peak <= (1 - FREE_SHARE) * memory

    low, high = 0, 1
    while fits(high) and high < 2**20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def checkpoint_bytes(parameters: ParameterCounts) -> int:
    """Return the bytes of a checkpoint: weights and both moments of Adam in float32, 12·N.

    Args:
        parameters: parameters of the model.
    """
    return FLOAT * (1 + ADAM_MOMENTS) * parameters.total
