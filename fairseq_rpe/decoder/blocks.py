"""Blocks of a decoder: norms, activations and the layer of self-attention and feed-forward network."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_rpe.attention import AttentionPlan
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.spec import did_you_mean
from fairseq_rpe.decoder.cache import LayerCache
from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.decoder.dropout import Dropout
from fairseq_rpe.decoder.self_attention import SelfAttention

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}
_CLAMP, _SLOPE = 7.0, 1.702  # of gpt-oss


def clamped_swiglu(gate: Tensor, x: Tensor) -> Tensor:
    """Return g·σ(1.702·g)·(u + 1), where g is the gate clamped to at most 7, and u is x clamped to [-7, 7].

    This is the gated activation of gpt-oss (OpenAI 2025, arXiv 2508.10925).

    Args:
        gate: (…, F).
        x: (…, F).

    Returns:
        (…, F).
    """
    gate = gate.clamp(max=_CLAMP)
    return gate * torch.sigmoid(_SLOPE * gate) * (x.clamp(-_CLAMP, _CLAMP) + 1)


# gated activation -> function of the gate and of the values that it multiplies
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, x: F.silu(gate) * x,
    "geglu": lambda gate, x: F.gelu(gate, approximate="tanh") * x,
    "clamped_swiglu": clamped_swiglu,
}


class RMSNorm(nn.RMSNorm):
    """y = w·x/√(mean(x²) + ε) in the wider dtype of x and w, as autocast computes a layer norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x (…, C)."""
        weight = self.weight
        x = x if x.dtype == weight.dtype else x.to(torch.promote_types(x.dtype, weight.dtype))
        if torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
            return super().forward(x)
        # torch's own function takes twice as long on a CPU, of which a decoding step of a small model has many
        squares = x.square().sum(-1, keepdim=True)  # (…, 1)
        mean = torch.add(_epsilon(self.eps, x.dtype), squares, alpha=1 / x.shape[-1])
        return x.mul(mean.rsqrt_()).mul_(weight)


@functools.lru_cache
@torch.inference_mode(False)
def _epsilon(eps: float | None, dtype: torch.dtype) -> Tensor:
    """Return ε of an RMSNorm as a tensor (), which is faster to add than a number; None: that of torch."""
    return torch.tensor(torch.finfo(dtype).eps if eps is None else eps, dtype=dtype)


def make_norm(config: DecoderConfig, width: int) -> nn.Module:
    """Return a layer norm or an RMSNorm."""
    if config.norm == "rmsnorm":
        return RMSNorm(width, eps=config.norm_eps)
    return nn.LayerNorm(width, eps=config.norm_eps, bias=config.has_bias)


def find_activation(name: str) -> Callable[..., Tensor]:
    """Return an activation function by its name; a gated one is a function of the gate and of what it multiplies.

    Raises:
        UserError: there is no such activation.
    """
    functions: dict[str, Callable[..., Tensor]] = {**ACTIVATIONS, **GATES}
    if name not in functions:
        raise UserError(f"unknown activation '{name}'{did_you_mean(name, functions)}; known: {', '.join(functions)}")
    return functions[name]


class DecoderLayer(nn.Module):
    """Self-attention and a feed-forward network, each with a norm and a residual connection.

    The feed-forward network is fc2(a(fc1(x))), or fc2(a(fc_gate(x), fc1(x))) with a gated activation, which is
    a(g) ⊙ x for SwiGLU and GeGLU (Shazeer 2020, arXiv 2002.05202). Parameters have the names of fairseq's decoder
    layer.

    ``self_attn_layer_norm`` and ``final_layer_norm`` are the norms of attention and of the feed-forward network.
    ``self_attn_output_norm`` and ``ffn_output_norm`` are the second norms of "sandwich"; otherwise they are None.

    Args:
        config: sizes and blocks of the decoder.
        index: index of the layer in the full stack, from 0.
    """

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.index, self.norm_position = index, config.norm_position
        self.activation = find_activation(config.activation)
        self.dropout_module = Dropout(config.dropout)
        # checkpoints and optimizer states depend on the order of these parameters
        self.self_attn = SelfAttention(config)
        self.attn_ln = make_norm(config, config.width) if config.scale_attention else None
        self.c_attn = nn.Parameter(torch.ones(config.heads)) if config.scale_heads else None
        self.activation_dropout_module = Dropout(config.activation_dropout)
        self.self_attn_layer_norm = make_norm(config, config.width)
        self.ffn_layernorm = make_norm(config, config.ffn_width) if config.scale_ffn else None
        self.w_resid = nn.Parameter(torch.ones(config.width)) if config.scale_residual else None
        self.fc1 = nn.Linear(config.width, config.ffn_width, bias=config.has_bias)
        self.fc2 = nn.Linear(config.ffn_width, config.width, bias=config.has_bias)
        self.fc_gate = nn.Linear(config.width, config.ffn_width, bias=config.has_bias) if config.is_gated else None
        self.final_layer_norm = make_norm(config, config.width)
        is_sandwich = config.norm_position == "sandwich"
        self.self_attn_output_norm = make_norm(config, config.width) if is_sandwich else None
        self.ffn_output_norm = make_norm(config, config.width) if is_sandwich else None

    def forward(self, x: Tensor, plan: AttentionPlan, cache: LayerCache | None = None) -> Tensor:
        """Compute the output (n, B, C) of the layer for its input x (n, B, C).

        Args:
            x: (n, B, C).
            plan: attention plan of the layer's encoding.
            cache: KV cache of the layer, or None.
        """
        y = self._attend(self._norm_before(x, self.self_attn_layer_norm), plan, cache)
        if self.norm_position == "parallel":
            z = self._feed_forward(self.final_layer_norm(x))
            out: Tensor = x + self.dropout_module(y) + self.dropout_module(z)
            return out
        x = self._add(x, y, self.self_attn_layer_norm, self.self_attn_output_norm)
        y = self._feed_forward(self._norm_before(x, self.final_layer_norm))
        residual = x if self.w_resid is None else torch.mul(self.w_resid, x)
        return self._add(residual, y, self.final_layer_norm, self.ffn_output_norm)

    def _norm_before(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Return the input of a sublayer."""
        return norm(x) if self.norm_position in ("pre", "sandwich", "parallel") else x

    def _add(self, residual: Tensor, y: Tensor, norm: nn.Module, second_norm: nn.Module | None) -> Tensor:
        """Return the sum of the residual and the output of a sublayer, with dropout and the sublayer's norms."""
        output_norm = norm if self.norm_position == "output" else second_norm
        y = y if output_norm is None else output_norm(y)
        x = residual + (self.dropout_module(y) if self.dropout_module.active_p > 0 else y)
        return norm(x) if self.norm_position == "post" else x

    def _attend(self, x: Tensor, plan: AttentionPlan, cache: LayerCache | None) -> Tensor:
        """Return the output (n, B, C) of attention."""
        x = self.self_attn(x, plan, cache)
        if self.c_attn is not None:
            heads = x.unflatten(2, (len(self.c_attn), -1))  # (n, B, H, C/H)
            x = torch.einsum("nbhd,h->nbhd", heads, self.c_attn).flatten(2)
        return x if self.attn_ln is None else self.attn_ln(x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        """Return the output (n, B, C) of the feed-forward network."""
        gate = self.fc_gate
        h = self.activation(self.fc1(x)) if gate is None else self.activation(gate(x), self.fc1(x))  # (n, B, F)
        if self.activation_dropout_module.active_p > 0:
            h = self.activation_dropout_module(h)
        y: Tensor = self.fc2(h if self.ffn_layernorm is None else self.ffn_layernorm(h))
        return y


@torch.no_grad()
def initialize(modules: nn.Module, init: str, layers: int) -> None:
    """Set initial weights of GPT-2 or Llama; fairseq's are set by the constructors.

    Weights are normal with a standard deviation of 0.02, and biases are 0. With "gpt2" the weights of the two outputs
    that each layer adds to the residual stream are divided by √(2N) for N layers (Radford et al. 2019), so that the
    variance of their sum does not grow with N.

    Args:
        modules: decoder without its encodings, whose weights are set.
        init: "gpt2" or "llama".
        layers: number of layers N.
    """
    std = 0.02
    embeddings = {id(m.weight) for m in modules.modules() if isinstance(m, nn.Embedding)}
    for name, module in modules.named_modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in embeddings:
            is_residual_output = name.endswith((".out_proj", ".fc2"))
            scale = math.sqrt(2 * layers) if init == "gpt2" and is_residual_output else 1.0
            nn.init.normal_(module.weight, std=std / scale)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
