"""Configuration of the decoder: its sizes, its blocks and how it computes."""

import math
from dataclasses import dataclass
from typing import Any

from fairseq_rpe.core.errors import UserError

# values of --compute-dtype: dtype of matrix products; parameters and residual stream stay in float32
COMPUTE_DTYPES = ("fp32", "bf16")
NORMS = ("layernorm", "rmsnorm")
NORM_POSITIONS = ("pre", "post", "output", "sandwich", "parallel")
GATED_ACTIVATIONS = ("swiglu", "geglu", "clamped_swiglu")
BIASES = ("yes", "qkv", "no")
DEFAULT_FFN_MULTIPLE = 8
QK_NORMS = ("none", "head", "whole")
INITS = ("fairseq", "gpt2", "llama")
_LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "bias": "no",
    "init": "llama",
    "activation": "swiglu",
    "scale_embedding": False,
}
_GEMMA3 = {"norm_position": "sandwich", "activation": "geglu", "qk_norm": "head", "scale_embedding": True}
# value of --block -> the options of the blocks that it selects; the others have the defaults of DecoderConfig
BLOCK_PRESETS: dict[str, dict[str, Any]] = {
    "classic": {"norm": "layernorm", "norm_eps": 1e-5, "bias": "yes", "init": "fairseq"},
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "qk_norm": "head"},
    "olmo2": {**_LLAMA, "norm_eps": 1e-5, "norm_position": "output", "qk_norm": "whole"},
    "gemma3": {**_LLAMA, **_GEMMA3},
    "gpt-oss": {**_LLAMA, "norm_eps": 1e-5, "bias": "yes", "activation": "clamped_swiglu"},
    "gpt-neox": {
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "norm_position": "parallel",
        "bias": "yes",
        "init": "llama",
        "activation": "gelu",
        "scale_embedding": False,
    },
}


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and blocks of a decoder; the defaults are the blocks of fairseq's language models.

    Attributes:
        vocabulary: number of token ids V.
        padding_idx: id of padding.
        layers: number of layers N.
        width: model width C.
        heads: number of query heads H.
        ffn_width: width F of the feed-forward layers.
        kv_heads: number of key/value heads G, which divides H; query head h reads key/value head h // (H/G). None: H.
        head_width: width D of a head; None: C/H.
        input_width: width of the token embedding; None: C.
        output_width: width of the features before the output projection; None: C.
        norm: "layernorm" or "rmsnorm".
        norm_eps: ε of every norm.
        norm_position: where the norms N of the two sublayers f, attention and feed-forward, are: "pre" x + f(N(x)),
            "post" N(x + f(x)), "output" x + N(f(x)) as in OLMo 2, "sandwich" x + N'(f(N(x))) as in Gemma 2 and 3, or
            "parallel" x + attention(N(x)) + ffn(N'(x)) as in GPT-NeoX.
        final_norm: whether a norm follows the last layer.
        embedding_norm: whether a norm follows the embedding.
        activation: activation of the feed-forward layers, a key of ``blocks.ACTIVATIONS`` or ``blocks.GATES``.
        bias: biases: "yes" of all linear layers and layer norms, "qkv" of the projections to queries, keys and values
            alone, as in Qwen 2, or "no". The output projection has none.
        qk_norm: RMSNorm of queries and keys before the rotation: "none", "head" with one weight (D) for all heads, or
            "whole" over all heads of a token.
        init: initial weights: "fairseq" (Xavier), "gpt2" (normal, 0.02, residual outputs divided by √(2N)) or "llama"
            (normal, 0.02).
        scale_embedding: whether embeddings are multiplied by √C.
        share_embeddings: whether the output projection is the token embedding.
        logit_softcap: c of c·tanh(s/c), applied to the output logits s; 0: none.
        scale_attention: NormFormer's norm of the attention's output.
        scale_heads: NormFormer's learned factor of each head.
        scale_ffn: NormFormer's norm within the feed-forward layer.
        scale_residual: NormFormer's learned factors of the residual of the feed-forward layer.
        dropout: dropout of embeddings and of the output of attention and feed-forward layers.
        attention_dropout: dropout of attention weights.
        activation_dropout: dropout within feed-forward layers.
        checkpoint_activations: whether the backward pass computes the activations of each layer again.
        compute_dtype: one of :data:`COMPUTE_DTYPES`.
        backend: name of the attention backend.
    """

    vocabulary: int
    padding_idx: int
    layers: int
    width: int
    heads: int
    ffn_width: int
    kv_heads: int | None = None
    head_width: int | None = None
    input_width: int | None = None
    output_width: int | None = None
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    norm_position: str = "pre"
    final_norm: bool = True
    embedding_norm: bool = False
    activation: str = "relu"
    bias: str = "yes"
    qk_norm: str = "none"
    init: str = "fairseq"
    scale_embedding: bool = True
    share_embeddings: bool = False
    logit_softcap: float = 0.0
    scale_attention: bool = False
    scale_heads: bool = False
    scale_ffn: bool = False
    scale_residual: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    checkpoint_activations: bool = False
    compute_dtype: str = "fp32"
    backend: str = "auto"

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads G."""
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        """Width D of a head."""
        return self.head_width or self.width // self.heads

    @property
    def has_bias(self) -> bool:
        """Whether linear layers and layer norms have biases; see also :attr:`has_qkv_bias`."""
        return self.bias == "yes"

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return self.bias != "no"

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward layers multiply by a gate."""
        return self.activation in GATED_ACTIVATIONS

    def check(self) -> None:
        """Check that the blocks can be built.

        Raises:
            UserError: an option has an unknown value, or two options exclude each other.
        """
        choices = {"norm": NORMS, "norm_position": NORM_POSITIONS, "qk_norm": QK_NORMS, "init": INITS}
        choices |= {"bias": BIASES, "compute_dtype": COMPUTE_DTYPES}
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise UserError(f"{_flag(name)} is one of {', '.join(values)}, not '{getattr(self, name)}'")
        self._check_sizes()
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise UserError(f"--kv-heads {self.kv_heads} does not divide the {self.heads} attention heads")
        if self.head_width is None and self.width % self.heads:
            raise UserError(
                f"{self.heads} attention heads do not divide a width of {self.width}: choose another number of heads, "
                "or give --head-dim"
            )
        if self.head_width is not None and self.head_width < 1:
            raise UserError(f"--head-dim is a positive number of elements, not {self.head_width}")
        if self.scale_heads and self.head_dim * self.heads != self.width:
            raise UserError("--scale-heads divides the model width into heads: leave --head-dim out")
        if self.scale_residual and self.norm_position == "parallel":
            raise UserError(
                "--scale-resids scales the residual of the feed-forward layer, and --norm-position parallel has one "
                "residual for both sublayers: drop one of them"
            )
        if not 0 < self.norm_eps < math.inf:
            raise UserError(f"--norm-eps is a positive number, not {self.norm_eps:g}")
        if not 0 <= self.logit_softcap < math.inf:
            raise UserError(f"--logit-softcap is a positive number, or 0 for none, not {self.logit_softcap:g}")

    def _check_sizes(self) -> None:
        """Check the sizes of the decoder and the probabilities of dropout."""
        sizes = {"layers": "decoder-layers", "width": "decoder-embed-dim", "heads": "decoder-attention-heads"}
        for name, flag in (sizes | {"ffn_width": "decoder-ffn-embed-dim"}).items():
            if getattr(self, name) < 1:
                raise UserError(f"--{flag} is a positive number, not {getattr(self, name)}")
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{_flag(name)} is from 0 to below 1, not {getattr(self, name):g}")
        widths = (self.input_width or self.width, self.output_width or self.width)
        if self.share_embeddings and widths[0] != widths[1]:
            raise UserError(
                f"input and output embeddings have the widths {widths[0]} and {widths[1]}, so they cannot be shared: "
                "leave --share-decoder-input-output-embed out, or make the widths equal"
            )


def _flag(name: str) -> str:
    """Return the flag of an option of the blocks."""
    return "--block-init" if name == "init" else "--" + name.replace("_", "-")


def gated_ffn_width(width: int, multiple: int = DEFAULT_FFN_MULTIPLE) -> int:
    """Return the width of a gated feed-forward layer with about as many parameters as one of width 4C without gate.

    Three matrices of C·F elements replace two of 4C²: F = 8C/3, rounded up to a multiple.

    Args:
        width: model width C.
        multiple: number that divides the result.
    """
    return -(-int(8 * width / 3) // multiple) * multiple
