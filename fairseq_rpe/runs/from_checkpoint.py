"""What a further training takes over from a checkpoint: its architecture and dropout, as a request says them."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import fairseq_rpe.models  # noqa: F401  (before fairseq: registers, and lets it start quicker)

# isort: split
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELMConfig
from fairseq_rpe.runs.checkpoints import Checkpoint

# setting of a model: the field of a request that says the same
_SAID = {
    "dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "activation_dropout": "activation_dropout",
    "activation_fn": "activation_fn",
    "share_decoder_input_output_embed": "share_embeddings",
    "compute_dtype": "compute_dtype",
    "rpe_share": "rpe_share",
}
# of the text, of the machine, of what is another one in the further training; layers once left out are gone
_OTHER = {"max_target_positions", "tokens_per_sample", "add_bos_token", "tpu", "checkpoint_activations"}
_OTHER |= {"offload_activations", "min_params_to_wrap", "relu_dropout", "attention_backend", "decoder_layers_to_keep"}
_OTHER |= {"positions_train", "positions_eval", "decoder_xformers_att_config"}


def said(checkpoint: Checkpoint) -> dict[str, object]:
    """Fields of a request for the same model, ``extra`` among them: flags for what its architecture's name leaves open.

    Raises UserError: the architecture is not known here.
    """
    name, model = checkpoint.arch, checkpoint.model
    if name not in ARCH_CONFIG_REGISTRY:
        raise UserError(f"{checkpoint.path} has the architecture '{name}', unknown here: give --rpe-module FILE")
    usual = SimpleNamespace()
    ARCH_CONFIG_REGISTRY[name](usual)
    extra: list[str] = []
    for field in fields(TransformerRPELMConfig):
        key = field.name
        left = key.startswith(("_", "rpe", "char")) or key in _OTHER or key in _SAID
        if left or key not in model or model[key] == getattr(usual, key, field.default):
            continue
        extra += _flag(key, model[key], checkpoint)
    found: dict[str, object] = {request: model[key] for key, request in _SAID.items() if model.get(key) is not None}
    return {"arch": name, **found, "extra": tuple(extra)}


def _flag(key: str, value: Any, checkpoint: Checkpoint) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if value is True:
        return [flag]
    if value is False or value is None:
        raise UserError(f"{checkpoint.path} was trained with {key}={value}, which no flag says: train it again")
    return [flag, ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)]
