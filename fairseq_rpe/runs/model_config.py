"""The decoder that a configuration trains, without building it and without fairseq."""

from types import SimpleNamespace
from typing import Any

from fairseq_rpe.checkpoints.model_sizes import find_size, full_arch_name
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.config import (
    BLOCK_PRESETS,
    DEFAULT_FFN_MULTIPLE,
    GATED_ACTIVATIONS,
    DecoderConfig,
    gated_ffn_width,
)
from fairseq_rpe.runs.model_check import model_size
from fairseq_rpe.runs.reserved_flags import flag_values
from fairseq_rpe.runs.settings import TrainingPlan
from fairseq_rpe.runs.training_config import TrainingConfig

_PADDING_IDX = 1
# flags of fairseq-train without a value -> the field of the decoder's configuration that they set
_SWITCHES = {
    "--checkpoint-activations": ("checkpoint_activations", True),
    "--no-decoder-final-norm": ("final_norm", False),
    "--layernorm-embedding": ("embedding_norm", True),
    "--scale-attn": ("scale_attention", True),
    "--scale-heads": ("scale_heads", True),
    "--scale-fc": ("scale_ffn", True),
    "--scale-resids": ("scale_residual", True),
    "--share-decoder-input-output-embed": ("share_embeddings", True),
}
# flags with a number -> the field
_NUMBERS = {
    "--decoder-input-dim": "input_width",
    "--decoder-output-dim": "output_width",
    "--decoder-ffn-embed-dim": "ffn_width",
    "--dropout": "dropout",
    "--attention-dropout": "attention_dropout",
    "--activation-dropout": "activation_dropout",
    "--relu-dropout": "activation_dropout",
}
_FAIRSEQ_ACTIVATIONS = {"gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh"}
# flags that change the model or its states in ways that no formula covers
NOT_ESTIMATED = (
    "--adaptive-input",
    "--adaptive-softmax-cutoff",
    "--quant-noise-pq",
    "--fp16",
    "--bf16",
    "--memory-efficient-fp16",
    "--memory-efficient-bf16",
    "--optimizer",
    "--zero-sharding",
)


def trained_decoder(config: TrainingConfig, plan: TrainingPlan, vocabulary: int) -> DecoderConfig:
    """Return the configuration of the decoder that a training builds.

    Args:
        config: configuration of the training; another package's architecture must be registered by ``rpe_module``.
        plan: settings and numbers of updates that the configuration resolves to.
        vocabulary: number of token ids.

    Returns:
        The sizes and blocks, as fairseq's model has them.

    Raises:
        UserError: a flag after ``--`` changes the model in a way that is not estimated, or the blocks cannot be built.
    """
    words = {word.partition("=")[0] for word in config.extra}
    for flag in NOT_ESTIMATED:
        if flag in words:
            raise UserError(f"{flag} after --: the costs of such a training are not estimated: leave it out")
    s, size = plan.settings, model_size(config)
    preset = BLOCK_PRESETS[s.block or "classic"]
    flags = flag_values(config.extra, ("--bias", "--ffn-multiple", "--activation-fn", *_NUMBERS))
    ffn_width, activation = _feed_forward(
        config, flags.get("--activation-fn") or s.effective("activation_fn"), size.width, flags.get("--ffn-multiple")
    )
    fields: dict[str, Any] = {
        "input_width": size.width,
        "output_width": size.width,
        "ffn_width": ffn_width,
        "share_embeddings": bool(s.effective("share_embeddings")),
        "dropout": s.dropout or 0.0,
        "attention_dropout": s.attention_dropout or 0.0,
        "activation_dropout": s.activation_dropout or 0.0,
        **{field: value for flag, (field, value) in _SWITCHES.items() if flag in words},
        **{_NUMBERS[flag]: _number(flag, value) for flag, value in flags.items() if flag in _NUMBERS},
    }
    decoder = DecoderConfig(
        vocabulary=vocabulary,
        padding_idx=_PADDING_IDX,
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        kv_heads=config.kv_heads,
        head_width=config.head_dim,
        norm=s.effective("norm"),
        norm_eps=preset["norm_eps"],
        norm_position=s.effective("norm_position"),
        activation=_FAIRSEQ_ACTIVATIONS.get(activation, activation),
        bias=flags.get("--bias") or s.effective("bias"),
        qk_norm=s.effective("qk_norm"),
        init=s.effective("block_init"),
        scale_embedding=preset.get("scale_embedding", True),
        logit_softcap=s.effective("logit_softcap"),
        compute_dtype=s.effective("compute_dtype"),
        backend=config.attention_backend,
        **fields,
    )
    decoder.check()
    return decoder


def _feed_forward(config: TrainingConfig, activation: str | None, width: int, multiple: str | None) -> tuple[int, str]:
    """Return the width and the activation of the feed-forward layers.

    Args:
        config: configuration of the training.
        activation: activation that is stated, or that the blocks or a size of this project have; None: none.
        width: model width.
        multiple: value of ``--ffn-multiple``.
    """
    size = find_size(config.arch or "tiny")
    if activation in GATED_ACTIVATIONS:
        return gated_ffn_width(width, int(multiple or DEFAULT_FFN_MULTIPLE)), activation
    if size is not None:
        return size.ffn, activation or size.activation
    from fairseq.models import ARCH_CONFIG_REGISTRY

    args = SimpleNamespace(decoder_embed_dim=width, **({"activation_fn": activation} if activation else {}))
    ARCH_CONFIG_REGISTRY[full_arch_name(config.arch or "tiny")](args)
    return int(args.decoder_ffn_embed_dim), str(args.activation_fn)


def _number(flag: str, value: str) -> float:
    """Return the number that follows a flag; raise UserError if it is none."""
    try:
        return float(value) if "dropout" in flag else int(value)
    except ValueError:
        raise UserError(f"{flag} {value} after -- is not a number") from None
