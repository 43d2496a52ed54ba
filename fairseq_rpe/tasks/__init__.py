"""Tasks registered with fairseq."""

from . import algorithmic

__all__ = ["algorithmic"]
