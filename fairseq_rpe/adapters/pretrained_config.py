"""Configuration of the transformers model type ``fairseq_rpe``."""

from dataclasses import MISSING, fields
from typing import Any

from fairseq_rpe.adapters import _require_transformers  # noqa: F401

# isort: split

from transformers import AutoConfig, PreTrainedConfig

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.decoder.config import DecoderConfig

MODEL_TYPE = "fairseq_rpe"
# field of DecoderConfig -> name in transformers' configurations; other fields keep their names
STANDARD_NAMES = {
    "vocabulary": "vocab_size",
    "padding_idx": "pad_token_id",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "ffn_width": "intermediate_size",
    "activation": "hidden_act",
    "share_embeddings": "tie_word_embeddings",
    "logit_softcap": "final_logit_softcapping",
    "dropout": "hidden_dropout",
    "backend": "attention_backend",
}
# fields of DecoderConfig that transformers sets by a method of the model
_NOT_STORED = ("checkpoint_activations",)
UNLIMITED_POSITIONS = 2**31 - 1


class FairseqRpeConfig(PreTrainedConfig):
    """Configuration of a decoder of this package with its encodings.

    Besides the following attributes, it has every field of :class:`DecoderConfig`, such as ``norm`` or ``qk_norm``,
    with the name that transformers uses where there is one (``STANDARD_NAMES``).

    Attributes:
        rpe: spec of the encoding, or a pattern of layers.
        rpe_share: sharing of encodings, as ``--rpe-share``.
        train_length: training length in tokens, or None if unknown.
        positions_train: position transform in training.
        positions_eval: position transform in evaluation; empty for the default of ``positions_train``.
        positions_seed: seed of random positions.
        encoding_shapes: shapes of the tensors of encodings that depend on the dictionary, by name.
        max_position_embeddings: length in tokens of the longest row that the encodings have positions for.
        blocks: how the training text was split into blocks, stream or document; not read by the model.
        separate_documents: whether documents in one block of training were separate; not read by the model.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012, as in transformers

    vocab_size: int = 1000
    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 2048
    hidden_act: str = "relu"
    hidden_dropout: float | int = 0.0
    final_logit_softcapping: float | int | None = 0.0
    tie_word_embeddings: bool = False
    attention_backend: str = "auto"
    pad_token_id: int | None = 1
    bos_token_id: int | None = 2
    eos_token_id: int | list[int] | None = 2
    use_cache: bool = True
    max_position_embeddings: int = UNLIMITED_POSITIONS
    rpe: str = "sinusoidal"
    rpe_share: str = "auto"
    train_length: int | None = None
    positions_train: str = "identity"
    positions_eval: str = ""
    positions_seed: int = 1
    encoding_shapes: dict | None = None
    blocks: str | None = None
    separate_documents: bool | None = None

    @classmethod
    def from_decoder(cls, config: DecoderConfig, **others: Any) -> "FairseqRpeConfig":
        """Return the configuration of a decoder.

        Args:
            config: sizes and blocks.
            others: further attributes, such as ``rpe``.
        """
        settings = {
            STANDARD_NAMES.get(field.name, field.name): getattr(config, field.name)
            for field in fields(DecoderConfig)
            if field.name not in _NOT_STORED
        }
        # other programs compute sizes from these, so they are never None
        settings |= {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
        return cls(**settings, **others)

    def to_decoder(self) -> DecoderConfig:
        """Return the configuration of the decoder.

        Raises:
            UserError: a setting is missing, or has a value that the decoder refuses.
        """
        settings = {}
        for field in fields(DecoderConfig):
            name = STANDARD_NAMES.get(field.name, field.name)
            if field.name in _NOT_STORED:
                continue
            value = getattr(self, name, field.default)
            if value is MISSING:
                raise UserError(f"the config of this model has no {name}: export it again")
            is_tuple = isinstance(field.default, tuple)  # JSON has lists only
            settings[field.name] = tuple(value) if is_tuple else value
        settings["logit_softcap"] = settings["logit_softcap"] or 0.0
        try:
            config = DecoderConfig(**settings)
            config.check()
        except TypeError as error:
            raise UserError(
                f"the config of this model has a value of a wrong type ({error}): export it again"
            ) from None
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes, without the file of ``export --remote-code``, which is not saved again."""
        return {name: value for name, value in super().to_dict().items() if name != "auto_map"}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: saved folders need the package, not a copy of this file."""


def register() -> None:
    """Register the configuration with ``AutoConfig``; a second call has no effect."""
    AutoConfig.register(MODEL_TYPE, FairseqRpeConfig, exist_ok=True)


register()
