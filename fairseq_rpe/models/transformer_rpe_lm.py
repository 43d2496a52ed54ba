"""fairseq model ``transformer_rpe_lm``: a Transformer language model with any encoding, and its architectures."""

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Optional

import torch
from fairseq import distributed_utils, options, utils
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig, base_lm_architecture
from fairseq.modules import AdaptiveInput
from omegaconf import II

from fairseq_rpe.checkpoints.model_sizes import ARCH_PREFIX, MODEL_SIZES
from fairseq_rpe.compat.intermediate_checkpoints import parse_updates
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.layer_pattern import is_pattern, parse_pattern
from fairseq_rpe.decoder.config import (
    BLOCK_PRESETS,
    COMPUTE_DTYPES,
    DEFAULT_FFN_MULTIPLE,
    GATED_ACTIVATIONS,
    gated_ffn_width,
)
from fairseq_rpe.encodings import load_module
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.modules.decoder import RPEDecoder, decoder_config
from fairseq_rpe.positions.position_transforms import PositionTransforms, check_transforms
from fairseq_rpe.utils.files import vocabulary_digest

logger = logging.getLogger(__name__)
SHARING_OPTIONS = ("auto", "model", "layer")

# no `X | None` and no postponed annotations here: fairseq's parser reads these annotations at run time


def _flag(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class TransformerRPELMConfig(TransformerLanguageModelConfig):
    """Flags in addition to those of fairseq's transformer_lm."""

    rpe: str = _flag(
        "sinusoidal",
        "positional encoding: name or name:key=value,key=value ('fairseq-rpe list' shows all), or a pattern of layers "
        "such as '3*rope:local=128|nope', repeated over the layers and cut off at the last one",
    )
    rpe_share: str = _flag("auto", "one encoding per 'model' or per 'layer', or 'auto': as in the encoding's paper")
    attention_backend: str = _flag("auto", "auto, reference, sdpa, flex or triton")
    block: str = _flag(
        "classic",
        "blocks of the layers: classic, or llama with RMSNorm, SwiGLU, no biases and unscaled embeddings, or qwen3, "
        "olmo2, gemma3, gpt-oss (without experts) or gpt-neox; the following flags change single options",
    )
    norm: Optional[str] = _flag(None, "layernorm or rmsnorm (default: that of --block)")
    norm_eps: Optional[float] = _flag(
        None, "epsilon of every norm (default: that of --block, 1e-5 for classic, 1e-6 for llama)"
    )
    norm_position: Optional[str] = _flag(
        None,
        "pre: x + f(N(x)); output: x + N(f(x)) as in OLMo 2; sandwich: x + N2(f(N1(x))) as in Gemma 3; or parallel: "
        "x + attention(N1(x)) + ffn(N2(x)) as in GPT-NeoX (default: that of --block, pre for classic and llama)",
    )
    bias: Optional[str] = _flag(
        None,
        "yes: biases of linear layers and layer norms; qkv: only of the projections to queries, keys and values, as "
        "in Qwen 2; or no (default: that of --block, yes for classic, no for llama)",
    )
    block_init: Optional[str] = _flag(
        None,
        "initial weights: fairseq (Xavier), llama (normal, 0.02) or gpt2 (as llama, and outputs to the residual "
        "divided by the square root of their number); default: that of --block, fairseq or llama",
    )
    activation_fn: Optional[ChoiceEnum([*utils.get_available_activation_fns(), *GATED_ACTIVATIONS])] = _flag(
        None,
        "activation of feed-forward layers; swiglu, geglu and clamped_swiglu (of gpt-oss) multiply by a gate "
        "(default: that of --block, swiglu for llama; for classic that of the architecture)",
    )
    ffn_multiple: Optional[int] = _flag(
        None,
        "with a gated activation and without --decoder-ffn-embed-dim: the feed-forward layers are 8/3 times as wide "
        "as the model, rounded up to a multiple of this number (default: 8)",
    )
    kv_heads: Optional[int] = _flag(
        None, "key/value heads, each shared by as many query heads (default: --decoder-attention-heads)"
    )
    head_dim: Optional[int] = _flag(
        None, "width of an attention head (default: --decoder-embed-dim / --decoder-attention-heads)"
    )
    qk_norm: Optional[str] = _flag(
        None,
        "RMSNorm of queries and keys before their rotation: none, head or whole, over all heads (default: that of "
        "--block, none for classic and llama)",
    )
    logit_softcap: Optional[float] = _flag(
        None, "c of c*tanh(s/c), applied to the output logits s; 0: none (default: 0)"
    )
    compute_dtype: Optional[str] = _flag(
        None, "dtype of matrix products: fp32, or bf16 with all else in float32 (default: fp32)"
    )
    positions_train: str = _flag("identity", "position transform in training: name or name:key=value,key=value")
    positions_eval: Optional[str] = _flag(
        None, "position transform in evaluation (default: the one that --positions-train implies, or identity)"
    )
    rpe_module: Optional[str] = _flag(None, "Python file that registers your encodings")
    rpe_log_encodings_every: int = _flag(
        0, "updates between plots of the encodings in TensorBoard; 0: none; needs --tensorboard-logdir"
    )
    rpe_keep_at: Optional[str] = _flag(
        None, "numbers of updates, e.g. 100,200,400: keep the weights after each of them in SAVE_DIR/intermediate"
    )
    rpe_tensorboard: Optional[str] = II("common.tensorboard_logdir")
    # a copy of the training length, because --model-overrides may change tokens_per_sample in evaluation
    rpe_train_length: Optional[int] = field(
        default=II("task.tokens_per_sample"),
        metadata={
            "help": "training length in tokens that encodings use; when fine-tuning on longer texts, the original "
            "one (default: --tokens-per-sample)"
        },
    )
    rpe_seed: int = II("common.seed")
    rpe_vocabulary: Optional[str] = _flag(None, "set by training: digest of the dictionary, checked in evaluation")


@register_model("transformer_rpe_lm", dataclass=TransformerRPELMConfig)
class TransformerRPELanguageModel(TransformerLanguageModel):
    """fairseq's Transformer language model with any positional encoding, for texts of any length."""

    @classmethod
    def build_model(cls, args, task):
        """Build the model; fairseq calls this.

        Args:
            args: settings, a Namespace or DictConfig.
            task: fairseq task with the dictionary.

        Raises:
            UserError: unknown encoding or option, or a feature of fairseq that is not supported.
        """
        args.compute_dtype = getattr(args, "compute_dtype", None) or "fp32"
        _refuse_unsupported(args)
        if args.rpe_module:
            load_module(args.rpe_module)
        _check_vocabulary(args, task.source_dictionary)
        _complete_settings(args)
        blocks = _block_options(args)

        cfg = TransformerConfig.from_namespace(args)
        cfg.no_token_positional_embeddings = True
        dictionary = task.target_dictionary
        computation = {"backend": str(args.attention_backend), "compute_dtype": args.compute_dtype}
        config = decoder_config(cfg, len(dictionary), dictionary.pad(), **blocks, **computation)
        config.check()
        encodings = _encodings(args, task.source_dictionary.symbols)
        rank = distributed_utils.get_data_parallel_rank() if torch.distributed.is_initialized() else 0
        transforms = _position_transforms(args, encodings, rank)
        embedding = cls._embedding(args, task)
        decoder = RPEDecoder(cfg, config, dictionary, embedding, encodings, transforms)
        if args.rpe_log_encodings_every:
            _log_encodings(decoder, args, rank)
        return cls(decoder)

    @classmethod
    def _embedding(cls, args, task):
        if not args.adaptive_input:
            return cls.build_embedding(args, task.source_dictionary, args.decoder_input_dim)
        factor, cutoff, width = args.adaptive_input_factor, args.adaptive_input_cutoff, args.decoder_input_dim
        softmax = (args.adaptive_softmax_factor, args.adaptive_softmax_cutoff, args.decoder_output_dim)
        if args.tie_adaptive_weights and (factor, cutoff, width) != softmax:
            raise UserError(
                "--tie-adaptive-weights needs equal factor, cutoff and dimension for adaptive input and softmax"
            )
        dictionary = task.source_dictionary
        return AdaptiveInput(
            vocab_size=len(dictionary),
            padding_idx=dictionary.pad(),
            initial_dim=width,
            factor=factor,
            output_dim=args.decoder_embed_dim,
            cutoff=options.eval_str_list(cutoff, type=int),
            q_noise=args.quant_noise_pq,
            qn_block_size=args.quant_noise_pq_block_size,
        )

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """Load parameters; raise UserError if they do not fit the model."""
        try:
            return super().load_state_dict(state_dict, strict, model_cfg, args)
        except RuntimeError as error:
            first = str(error).split("\n\t")[1:2] or [str(error)]
            raise UserError(
                f"the checkpoint does not fit this model ({first[0].strip()}): use the flags that it was trained with"
            ) from None


def _refuse_unsupported(args):
    """Raise UserError for features of fairseq that the model lacks, and for values that a flag does not allow."""
    refusals = {  # setting -> message if it is on
        "character_embeddings": "character embeddings are not supported: drop --character-embeddings",
        "no_token_positional_embeddings": "--no-token-positional-embeddings: use --rpe nope instead",
        "decoder_learned_pos": "--decoder-learned-pos: use --rpe learned instead",
        "decoder_xformers_att_config": "xFormers attention has no position bias: drop --decoder-xformers-att-config",
        "base_layers": "mixture-of-experts layers are not supported: drop --base-layers",
        "offload_activations": "--offload-activations is not supported: use --checkpoint-activations",
    }
    for key, message in refusals.items():
        if getattr(args, key, None):
            raise UserError(message)
    if args.decoder_layers_to_keep and is_pattern(str(args.rpe)):
        raise UserError(
            "--decoder-layers-to-keep would give the remaining layers other encodings: use one encoding for all layers"
        )
    if args.tie_adaptive_weights and not args.adaptive_input:
        raise UserError("--tie-adaptive-weights needs --adaptive-input")
    if str(args.rpe_share) not in SHARING_OPTIONS:
        raise UserError(f"--rpe-share is one of {', '.join(SHARING_OPTIONS)}, not '{args.rpe_share}'")
    if args.compute_dtype not in COMPUTE_DTYPES:
        raise UserError(f"--compute-dtype is one of {', '.join(COMPUTE_DTYPES)}, not '{args.compute_dtype}'")
    if args.rpe_log_encodings_every < 0:
        raise UserError(
            f"--rpe-log-encodings-every is 0 (off) or a number of updates, not {args.rpe_log_encodings_every}"
        )
    if args.rpe_keep_at:
        parse_updates(str(args.rpe_keep_at))
    if args.rpe_log_encodings_every and not args.rpe_tensorboard:
        raise UserError("--rpe-log-encodings-every writes to TensorBoard: give --tensorboard-logdir DIR too")


def _complete_settings(args):
    """Set the number of layers and the training length if they follow from other flags."""
    if args.decoder_layers_to_keep:
        args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
    if not args.rpe_train_length:
        args.rpe_train_length = args.tokens_per_sample
    if args.max_target_positions not in (None, args.tokens_per_sample):
        logger.warning("max_target_positions=%s has no effect: any length is accepted", args.max_target_positions)


def _log_encodings(decoder, args, rank):
    """Log the encodings to TensorBoard during training."""
    from fairseq_rpe.modules.encoding_logger import EncodingLogger  # imports matplotlib, which most runs do not need

    spec, folder = str(args.rpe), str(args.rpe_tensorboard)
    encoding_logger = EncodingLogger(spec, args.rpe_log_encodings_every, folder, args.rpe_train_length, rank)
    decoder.register_forward_pre_hook(encoding_logger)


def _complete_block_flags(args):
    """Set each flag of the blocks that the user left out to the value of the preset; checkpoints record all flags."""
    preset = BLOCK_PRESETS[args.block]
    values = {
        "norm": preset["norm"],
        "norm_eps": preset["norm_eps"],
        "bias": preset["bias"],
        "block_init": preset["init"],
        "activation_fn": preset.get("activation", "relu"),
        "qk_norm": preset.get("qk_norm", "none"),
        "norm_position": preset.get("norm_position"),
        "logit_softcap": 0.0,
    }
    for name, value in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if not preset.get("scale_embedding", True):
        args.no_scale_embedding = True


def _block_options(args):
    """Return the options of the blocks as a decoder's configuration names them; raise UserError if they contradict."""
    if args.block not in BLOCK_PRESETS:
        raise UserError(f"--block is one of {', '.join(BLOCK_PRESETS)}, not '{args.block}'")
    _complete_block_flags(args)
    _refuse_block_options(args)
    return {
        "norm": args.norm,
        "norm_eps": args.norm_eps,
        "norm_position": getattr(args, "norm_position", None) or ("pre" if args.decoder_normalize_before else "post"),
        "bias": args.bias,
        "init": args.block_init,
        "qk_norm": args.qk_norm,
        "logit_softcap": args.logit_softcap,
        "kv_heads": getattr(args, "kv_heads", None),
        "head_width": getattr(args, "head_dim", None),
        # TransformerConfig lacks these if it is made from a DictConfig
        "scale_attention": bool(getattr(args, "scale_attn", False)),
        "scale_heads": bool(getattr(args, "scale_heads", False)),
        "scale_ffn": bool(getattr(args, "scale_fc", False)),
        "scale_residual": bool(getattr(args, "scale_resids", False)),
    }


def _refuse_block_options(args):
    """Raise UserError for options of the blocks that have no effect together; the decoder checks their values."""
    if getattr(args, "ffn_multiple", None) is not None and str(args.activation_fn) not in GATED_ACTIVATIONS:
        raise UserError(
            f"--ffn-multiple sets the width of gated feed-forward layers, and --activation-fn {args.activation_fn} has "
            "no gate: give --decoder-ffn-embed-dim"
        )
    if (multiple := getattr(args, "ffn_multiple", None)) is not None and multiple < 1:
        raise UserError(f"--ffn-multiple is a positive number, not {multiple}")
    if args.logit_softcap and args.adaptive_softmax_cutoff is not None:
        raise UserError("--logit-softcap: an adaptive softmax has no logits of the whole vocabulary: drop one of them")


def _check_vocabulary(args, dictionary):
    """Store the dictionary's digest in training; raise UserError if a checkpoint has that of another dictionary."""
    digest = vocabulary_digest(dictionary.symbols)
    trained_digest = getattr(args, "rpe_vocabulary", None)
    if trained_digest and trained_digest != digest:
        raise UserError(
            "the checkpoint was trained with another vocabulary than this data folder's dict.txt: prepare the text "
            "again with --vocab-from and the folder that it was trained on"
        )
    args.rpe_vocabulary = digest


def _encodings(args, symbols):
    """Build the encodings of the layers."""
    spec, layers = str(args.rpe), args.decoder_layers
    if is_pattern(spec) and layers % (period := len(parse_pattern(spec).period)):
        logger.info("%s is cut off at the last layer: %d layers are no multiple of %d", spec, layers, period)
    sizes = (args.decoder_attention_heads, args.decoder_embed_dim, layers)
    head_width = getattr(args, "head_dim", None)
    return build_for_model(spec, *sizes, args.rpe_train_length, symbols, str(args.rpe_share), head_width)


def _position_transforms(args, encodings, rank):
    """Build the position transforms; raise UserError if the encodings cannot use them."""
    train, evaluation = str(args.positions_train), str(args.positions_eval or "")
    transforms = PositionTransforms(train, evaluation, args.rpe_train_length, args.rpe_seed, rank)
    check_transforms(transforms, encodings)
    return transforms


# settings in the order of ModelSize
ARCHITECTURE_FIELDS = (
    "decoder_layers",
    "decoder_embed_dim",
    "decoder_attention_heads",
    "decoder_ffn_embed_dim",
    "activation_fn",
)


def _architecture(size, args):
    """Set the flags that the user does not give to the values of an architecture; fairseq calls this."""
    defaults = {name: getattr(TransformerRPELMConfig, name) for name in TransformerRPELMConfig.__annotations__}
    overrides = {  # for defaults that refer to other settings, and for flags of fairseq
        "compute_dtype": "fp32",
        "rpe_tensorboard": getattr(args, "tensorboard_logdir", None),
        "rpe_train_length": None,
        "rpe_seed": getattr(args, "seed", 1),
        "max_target_positions": None,
        "decoder_xformers_att_config": None,
    }
    architecture = dict(zip(ARCHITECTURE_FIELDS, size, strict=True))
    preset = BLOCK_PRESETS.get(getattr(args, "block", "classic"), {})
    activation = str(getattr(args, "activation_fn", None) or preset.get("activation", size.activation))
    architecture["activation_fn"] = activation
    if activation in GATED_ACTIVATIONS:
        width = getattr(args, "decoder_embed_dim", size.width)
        multiple = getattr(args, "ffn_multiple", None) or DEFAULT_FFN_MULTIPLE
        architecture["decoder_ffn_embed_dim"] = gated_ffn_width(width, multiple)
    for key, value in {**defaults, **overrides, **architecture}.items():
        setattr(args, key, getattr(args, key, value))
    base_lm_architecture(args)
    if args.block in BLOCK_PRESETS:  # the model refuses another value
        _complete_block_flags(args)


for _name, _size in MODEL_SIZES.items():
    register_model_architecture("transformer_rpe_lm", ARCH_PREFIX + _name)(partial(_architecture, _size))
