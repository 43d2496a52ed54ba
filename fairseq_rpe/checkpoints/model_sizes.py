"""Sizes of the model ``transformer_rpe_lm`` by the short names of its architectures."""

from typing import NamedTuple


class ModelSize(NamedTuple):
    """Size of a model.

    Attributes:
        layers: Number of layers.
        width: Embedding dimension.
        heads: Number of attention heads.
        ffn: Dimension of the feed-forward layers.
        activation: Activation function of the feed-forward layers.
    """

    layers: int
    width: int
    heads: int
    ffn: int
    activation: str


MODEL_SIZES = {
    "tiny": ModelSize(2, 128, 4, 512, "relu"),
    "mini": ModelSize(4, 128, 4, 512, "gelu"),
    "small": ModelSize(3, 192, 4, 768, "gelu"),
    "wiki103": ModelSize(6, 512, 8, 2048, "relu"),
    "base": ModelSize(12, 768, 12, 3072, "relu"),
    "large": ModelSize(24, 1024, 16, 4096, "gelu"),
}
ARCH_PREFIX = "transformer_rpe_lm_"


def full_arch_name(arch: str) -> str:
    """Return the full name of an architecture: ``tiny`` is ``transformer_rpe_lm_tiny``; full names are unchanged."""
    return ARCH_PREFIX + arch if arch in MODEL_SIZES else arch


def find_size(arch: str) -> ModelSize | None:
    """Return the size of an architecture by its short or full name, or None for a user's architecture."""
    return MODEL_SIZES.get(arch.removeprefix(ARCH_PREFIX))
