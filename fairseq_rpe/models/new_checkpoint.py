"""Checkpoints of fairseq for weights that no training of this package has produced."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Before fairseq: registers the architectures, and makes the import of fairseq faster.
import fairseq_rpe.models  # noqa: F401

# isort: split
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_rpe.checkpoints.checkpoint import ENCODING_PREFIX
from fairseq_rpe.checkpoints.model_sizes import full_arch_name
from fairseq_rpe.decoder.config import DecoderConfig
from fairseq_rpe.encodings.model import build_for_model
from fairseq_rpe.utils.files import PACKAGE_DIR, vocabulary_digest

_ARCH = full_arch_name("base")  # all of its sizes are replaced
_FAIRSEQ_ACTIVATIONS = {"gelu_tanh": "gelu_accurate"}
_EMBEDDING, _OUTPUT = "embed_tokens.weight", "output_projection.weight"


@dataclass(frozen=True)
class NewModel:
    """A language model without a training.

    Attributes:
        config: sizes and blocks.
        rpe: spec of its encoding, or pattern of layers, without learned parameters.
        length: training length in tokens.
        data: folder of its dict.txt.
        symbols: symbols of its dictionary by id.
    """

    config: DecoderConfig
    rpe: str
    length: int
    data: Path
    symbols: Sequence[str]


def checkpoint_contents(model: NewModel, weights: Mapping[str, Tensor]) -> dict[str, object]:
    """Return what fairseq-train saves of a model after 0 updates; ``torch.save`` writes it.

    Args:
        model: the model.
        weights: weights of the decoder by name; the output projection is left out if it is the embedding.

    Returns:
        The contents. Tensors are not copied.
    """
    parser = options.get_training_parser("language_modeling")
    args = options.parse_args_and_arch(parser, input_args=_flags(model))
    settings = OmegaConf.to_container(convert_namespace_to_omegaconf(args), resolve=True, enum_to_str=True)
    assert isinstance(settings, dict)
    settings["model"]["rpe_vocabulary"] = vocabulary_digest(model.symbols)
    state = {f"decoder.{name}": value for name, value in weights.items()}
    if model.config.share_embeddings:
        state[f"decoder.{_OUTPUT}"] = state[f"decoder.{_EMBEDDING}"]
    config = model.config
    encodings = build_for_model(
        model.rpe, config.heads, config.width, config.layers, model.length, model.symbols, head_width=config.head_width
    )
    state |= {f"{ENCODING_PREFIX}{name}": value for name, value in encodings.state_dict().items()}
    state["decoder.version"] = Tensor([3])
    history = {
        "criterion_name": "LMCrossEntropy",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {"best": None},
        "num_updates": 0,
    }
    return {
        "args": None,
        "cfg": settings,
        "model": state,
        "criterion": None,
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {"metrics": {}, "previous_training_time": 0},
        "last_optimizer_state": None,
    }


def _flags(model: NewModel) -> list[str]:
    """Return the flags of fairseq-train that build the model."""
    config = model.config
    values: dict[str, object] = {
        "--user-dir": PACKAGE_DIR,
        "--task": "language_modeling",
        "--criterion": "lm_cross_entropy",
        "--optimizer": "adam",
        "--sample-break-mode": "none",
        "--tokens-per-sample": model.length,
        "--arch": _ARCH,
        "--decoder-layers": config.layers,
        "--decoder-embed-dim": config.width,
        "--decoder-attention-heads": config.heads,
        "--decoder-ffn-embed-dim": config.ffn_width,
        "--dropout": 0.0,
        "--norm": config.norm,
        "--norm-eps": config.norm_eps,
        "--norm-position": config.norm_position,
        "--bias": config.bias,
        "--block-init": config.init,
        "--activation-fn": _FAIRSEQ_ACTIVATIONS.get(config.activation, config.activation),
        "--qk-norm": config.qk_norm,
        "--logit-softcap": config.logit_softcap,
        "--kv-heads": config.kv_heads,
        "--head-dim": config.head_width,
        "--rpe": model.rpe,
    }
    flags = [str(model.data)]
    for flag, value in values.items():
        flags += [] if value is None else [flag, str(value)]
    flags += [] if config.scale_embedding else ["--no-scale-embedding"]
    return flags + (["--share-decoder-input-output-embed"] if config.share_embeddings else [])
