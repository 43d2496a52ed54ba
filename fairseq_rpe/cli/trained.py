"""The encodings of a checkpoint with their learned parameters, without fairseq and without the rest of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairseq_rpe.cli import checkpoints
from fairseq_rpe.core.errors import UserError

if TYPE_CHECKING:
    from fairseq_rpe.encodings import Encoding

_PREFIX = "decoder.encodings."


@dataclass(frozen=True)
class Trained:
    """``encodings``: one for the model, or one per layer. ``train_length`` in tokens; ``positions`` in training."""

    spec: str
    encodings: list[Encoding]
    train_length: int
    positions: str


def not_ours(path: Path, model: dict[str, Any]) -> UserError:
    """What to say of a checkpoint of another model; ``model``: its config."""
    name = model.get("arch") or model.get("_name")
    return UserError(f"{path} is not of this plugin (its model is '{name}'): name a transformer_rpe_lm")


def load_encodings(path: Path) -> Trained:
    """Read the encodings of a checkpoint of this plugin. One of the user's own is to be loaded before.

    Raises:
        UserError: the file is missing, damaged or of another model.
    """
    from fairseq_rpe.encodings import build

    state = checkpoints.load_header(path)
    model = state["cfg"].get("model") or {}
    if "rpe" not in model:
        raise not_ours(path, model)
    spec, heads, width = str(model["rpe"]), model["decoder_attention_heads"], model["decoder_embed_dim"]
    length = int(model["rpe_train_length"])
    values = {key.removeprefix(_PREFIX): value for key, value in state["model"].items() if key.startswith(_PREFIX)}
    count = 1 + max((int(key.partition(".")[0]) for key in values), default=0)
    encodings = []
    for index in range(count):
        encoding = build(spec, heads, width, length)
        own = {key.partition(".")[2]: value for key, value in values.items() if key.partition(".")[0] == str(index)}
        try:
            encoding.load_state_dict(own)
        except RuntimeError:
            raise UserError(f"{path} holds other parameters than '{spec}' has: train it again") from None
        encodings.append(encoding.eval())
    return Trained(spec, encodings, length, str(model.get("positions_train") or "identity"))
