"""The language model ``transformer_rpe_lm`` and its sizes."""

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Optional

import torch
from fairseq import distributed_utils, options
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig, base_lm_architecture
from fairseq.modules import AdaptiveInput
from omegaconf import II

from fairseq_rpe.checkpoints.model_sizes import ARCH_PREFIX, SIZES
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import load_module
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.modules.decoder import COMPUTE, RPEDecoder
from fairseq_rpe.positions.position_transforms import Moves, check_moves
from fairseq_rpe.utils.files import vocabulary_digest

logger = logging.getLogger(__name__)
SHARES = ("auto", "model", "layer")

# no `X | None` and no postponed annotations here: fairseq's parser reads these annotations at run time


def _flag(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class TransformerRPELMConfig(TransformerLanguageModelConfig):
    """Flags beside those of fairseq's transformer_lm."""

    rpe: str = _flag(
        "sinusoidal", "positional encoding: name or name:key=value,key=value ('fairseq-rpe list' shows all)"
    )
    rpe_share: str = _flag(
        "auto", "one encoding for the whole 'model', one per 'layer', or 'auto': what the encoding's paper does"
    )
    attention_backend: str = _flag("auto", "auto, reference, sdpa, flex or triton")
    compute_dtype: Optional[str] = _flag(
        None, "fp32, or bf16: matrix products in bfloat16, all else in float32 (default: fp32)"
    )
    positions_train: str = _flag("identity", "position transform in training: name or name:key=value,key=value")
    positions_eval: Optional[str] = _flag(
        None, "position transform in evaluation (default: what the training transform names, or identity)"
    )
    rpe_module: Optional[str] = _flag(None, "Python file that registers encodings of your own")
    rpe_inspect_every: int = _flag(
        0, "updates between pictures of the bias in TensorBoard; 0 = none; needs --tensorboard-logdir"
    )
    rpe_tensorboard: Optional[str] = II("common.tensorboard_logdir")
    # its own copy of the training length: --model-overrides may change tokens_per_sample when a checkpoint is evaluated
    rpe_train_length: Optional[int] = field(
        default=II("task.tokens_per_sample"),
        metadata={
            "help": "tokens of the training that encodings go by, of one that goes on with longer texts the "
            "original's (default: --tokens-per-sample)"
        },
    )
    rpe_seed: int = II("common.seed")
    rpe_vocabulary: Optional[str] = _flag(
        None, "set by training: the dictionary's digest, which an evaluation compares"
    )


@register_model("transformer_rpe_lm", dataclass=TransformerRPELMConfig)
class TransformerRPELanguageModel(TransformerLanguageModel):
    """fairseq's Transformer language model with any positional encoding, usable at any length."""

    @classmethod
    def build_model(cls, args, task):
        """From a Namespace or DictConfig; UserError for an encoding, option or fairseq feature that is not here."""
        args.compute_dtype = getattr(args, "compute_dtype", None) or "fp32"
        _refuse_unsupported(args)
        if args.rpe_module:
            load_module(args.rpe_module)
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        if not args.rpe_train_length:
            args.rpe_train_length = args.tokens_per_sample
        _check_vocabulary(args, task.source_dictionary)
        if args.max_target_positions not in (None, args.tokens_per_sample):
            logger.warning("max_target_positions=%s has no effect: any length is accepted", args.max_target_positions)

        cfg = TransformerConfig.from_namespace(args)
        cfg.no_token_positional_embeddings = True
        encodings = _encodings(args, task.source_dictionary.symbols)
        rank = distributed_utils.get_data_parallel_rank() if torch.distributed.is_initialized() else 0
        moves = _moves(args, encodings[0], rank)
        embedding, backend = cls._embedding(args, task), str(args.attention_backend)
        decoder = RPEDecoder(cfg, task.target_dictionary, embedding, encodings, moves, backend, args.compute_dtype)
        if every := args.rpe_inspect_every:
            from fairseq_rpe.modules.encoding_logger import (
                Inspector,  # draws with matplotlib: most runs load nothing of it
            )

            inspector = Inspector(str(args.rpe), every, str(args.rpe_tensorboard), args.rpe_train_length, rank)
            decoder.register_forward_pre_hook(inspector)
        return cls(decoder)

    @classmethod
    def _embedding(cls, args, task):
        if not args.adaptive_input:
            return cls.build_embedding(args, task.source_dictionary, args.decoder_input_dim)
        given = (args.adaptive_input_factor, args.adaptive_input_cutoff, args.decoder_input_dim)
        softmax = (args.adaptive_softmax_factor, args.adaptive_softmax_cutoff, args.decoder_output_dim)
        if args.tie_adaptive_weights and given != softmax:
            raise UserError(
                "--tie-adaptive-weights needs equal factor, cutoff and dimension for adaptive input and softmax"
            )
        types, cutoff = task.source_dictionary, options.eval_str_list(args.adaptive_input_cutoff, type=int)
        width, noise = args.decoder_embed_dim, (args.quant_noise_pq, args.quant_noise_pq_block_size)
        return AdaptiveInput(len(types), types.pad(), given[2], given[0], width, cutoff, *noise)

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """As fairseq's; parameters that do not fit are one line."""
        try:
            return super().load_state_dict(state_dict, strict, model_cfg, args)
        except RuntimeError as error:
            first = str(error).split("\n\t")[1:2] or [str(error)]
            raise UserError(
                f"the checkpoint does not fit this model ({first[0].strip()}): use the flags that it was trained with"
            ) from None


def _refuse_unsupported(args):
    refusals = {
        "character_embeddings": "character embeddings are not supported: drop --character-embeddings",
        "no_token_positional_embeddings": "--no-token-positional-embeddings: use --rpe nope instead",
        "decoder_learned_pos": "--decoder-learned-pos: use --rpe learned instead",
        "decoder_xformers_att_config": "xFormers attention has no position bias: drop --decoder-xformers-att-config",
        "offload_activations": "--offload-activations is not supported: use --checkpoint-activations",
    }
    for key, message in refusals.items():
        if getattr(args, key, None):
            raise UserError(message)
    if args.tie_adaptive_weights and not args.adaptive_input:
        raise UserError("--tie-adaptive-weights needs --adaptive-input")
    if str(args.rpe_share) not in SHARES:
        raise UserError(f"--rpe-share is one of {', '.join(SHARES)}, not '{args.rpe_share}'")
    if args.compute_dtype not in COMPUTE:
        raise UserError(f"--compute-dtype is one of {', '.join(COMPUTE)}, not '{args.compute_dtype}'")
    if args.rpe_inspect_every < 0:
        raise UserError(f"--rpe-inspect-every is 0 (off) or a number of updates, not {args.rpe_inspect_every}")
    if args.rpe_inspect_every and not args.rpe_tensorboard:
        raise UserError("--rpe-inspect-every writes for TensorBoard: give --tensorboard-logdir DIR too")


def _check_vocabulary(args, dictionary):
    """Note the dictionary of a training; refuse another one of the same size, which would only give wrong numbers."""
    digest = vocabulary_digest(dictionary.symbols)
    known = getattr(args, "rpe_vocabulary", None)
    if known and known != digest:
        raise UserError(
            "the checkpoint was trained with another vocabulary than this data folder's dict.txt: prepare the text "
            "again with --vocab-from and the folder that it was trained on"
        )
    args.rpe_vocabulary = digest


def _encodings(args, symbols):
    """One encoding for the model, or one per layer."""
    sizes = (args.decoder_attention_heads, args.decoder_embed_dim, args.decoder_layers)
    return build_for_model(str(args.rpe), *sizes, args.rpe_train_length, symbols, str(args.rpe_share))


def _moves(args, encoding, rank):
    """The position transforms, refused where the encoding cannot follow them."""
    train, evaluation = str(args.positions_train), str(args.positions_eval or "")
    moves = Moves(train, evaluation, args.rpe_train_length, args.rpe_seed, rank)
    check_moves(moves, encoding, str(args.rpe))
    return moves


PARTS = ("decoder_layers", "decoder_embed_dim", "decoder_attention_heads", "decoder_ffn_embed_dim", "activation_fn")


def _architecture(size, args):
    """Set what the flags leave open."""
    own = {name: getattr(TransformerRPELMConfig, name) for name in TransformerRPELMConfig.__annotations__}
    other = {
        "compute_dtype": "fp32",
        "rpe_tensorboard": getattr(args, "tensorboard_logdir", None),
        "rpe_train_length": None,
        "rpe_seed": getattr(args, "seed", 1),
        "max_target_positions": None,
        "decoder_xformers_att_config": None,
    }
    for key, value in {**own, **other, **dict(zip(PARTS, size, strict=True))}.items():
        setattr(args, key, getattr(args, key, value))
    base_lm_architecture(args)


for _name, _size in SIZES.items():
    register_model_architecture("transformer_rpe_lm", ARCH_PREFIX + _name)(partial(_architecture, _size))
