"""Saves and loads transformers models of other types with an encoding of this package (``use_encoding``).

``save_pretrained`` writes the parameters of the encoding with those of the model, and the settings of the encoding as
``fairseq_rpe`` in config.json. ``from_pretrained`` of transformers does not know them and loads the model without its
encoding; :func:`load_with_encoding` loads both.
"""

from pathlib import Path
from typing import Any

from fairseq_rpe.adapters.transformers import (  # first, because it checks that transformers is installed
    NAME,
    EncodingAdapter,
    base_model,
    replace_encoding,
)

# isort: split

from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fairseq_rpe.core.errors import UserError


def load_with_encoding(folder: Path | str, *, backend: str = "auto", **options: Any) -> PreTrainedModel:
    """Load a model that was saved with an encoding.

    Args:
        folder: folder that ``save_pretrained`` wrote after ``use_encoding``.
        backend: attention backend, as in ``use_encoding``.
        options: options of ``AutoModelForCausalLM.from_pretrained``, such as ``dtype``.

    Returns:
        The model with its encoding, in evaluation mode.

    Raises:
        UserError: the folder was saved without an encoding or without a head for causal language modelling, or its
            weights are not those of the encoding.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json: name a folder that save_pretrained wrote")
    model: Any
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"{path} lacks the weights '{missing[0]}' of a {type(model).__name__}: save a model for causal language "
            "modelling"
        )
    settings = getattr(model.config, NAME, None)
    if not isinstance(settings, dict):
        raise UserError(f"{path} was saved without an encoding: call use_encoding(model, SPEC) before save_pretrained")
    try:
        replace_encoding(model, settings.pop("encoding"), backend=backend, is_complete=True, **settings)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}/config.json has settings of an encoding that cannot be used ({error})") from None
    adapter = getattr(base_model(model), NAME)
    assert isinstance(adapter, EncodingAdapter)
    weights = _read_weights(path)
    try:
        adapter.encodings.load_state_dict(weights)
    except RuntimeError as error:
        first = (str(error).split("\n\t")[1:2] or [str(error)])[0].strip()
        raise UserError(f"{path} has other weights than its encoding ({first}): save the model again") from None
    return model.eval()


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of the encodings in all safetensors files of a folder, by their names in the encodings."""
    weights, prefix = {}, f"{NAME}.encodings."
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if prefix in name:
                    weights[name.partition(prefix)[2]] = file.get_tensor(name)
    return weights
