"""The sizes of the model ``transformer_rpe_lm`` by the short names of its architectures."""

from typing import NamedTuple


class Size(NamedTuple):
    """Layers, width of the model, attention heads, width of the feed-forward part and its activation."""

    layers: int
    width: int
    heads: int
    ffn: int
    activation: str


SIZES = {
    "tiny": Size(2, 128, 4, 512, "relu"),
    "small": Size(3, 192, 4, 768, "gelu"),
    "wiki103": Size(6, 512, 8, 2048, "relu"),
    "base": Size(12, 768, 12, 3072, "relu"),
    "large": Size(24, 1024, 16, 4096, "gelu"),
}
ARCH_PREFIX = "transformer_rpe_lm_"


def full_name(arch: str) -> str:
    """``tiny`` stands for ``transformer_rpe_lm_tiny``; a full name stays as it is."""
    return ARCH_PREFIX + arch if arch in SIZES else arch


def size_of(arch: str) -> Size | None:
    """The size of an architecture by either of its names; ``None``: one of the user's own."""
    return SIZES.get(arch.removeprefix(ARCH_PREFIX))
