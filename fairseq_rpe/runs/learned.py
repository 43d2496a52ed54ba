"""The encodings of a checkpoint with their learned parameters, without fairseq and without the rest of the model."""

from dataclasses import dataclass
from pathlib import Path

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding, build
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.settings import IDENTITY

_PREFIX = "decoder.encodings."


@dataclass(frozen=True)
class Learned:
    """``encodings``: one for the model, or one per layer. ``train_length`` in tokens; ``positions`` in training."""

    spec: str
    encodings: list[Encoding]
    train_length: int
    positions: str


def load_encodings(path: Path) -> Learned:
    """Read the encodings of a checkpoint of this plugin. One of the user's own is to be loaded before.

    Raises:
        UserError: the file is missing, damaged or of another model.
    """
    found = checkpoints.load(path)
    found.require_ours()
    model = found.model
    heads, width, length = (
        int(str(model[key])) for key in ("decoder_attention_heads", "decoder_embed_dim", "rpe_train_length")
    )
    values = {key.removeprefix(_PREFIX): value for key, value in found.weights.items() if key.startswith(_PREFIX)}
    count = 1 + max((int(key.partition(".")[0]) for key in values), default=0)
    encodings = []
    for index in range(count):
        encoding = build(found.encoding, heads, width, length)
        own = {key.partition(".")[2]: value for key, value in values.items() if key.partition(".")[0] == str(index)}
        try:
            encoding.load_state_dict(own)
        except RuntimeError:
            raise UserError(f"{path} holds other parameters than '{found.encoding}' has: train it again") from None
        encodings.append(encoding.eval())
    return Learned(found.encoding, encodings, length, str(model.get("positions_train") or IDENTITY))
