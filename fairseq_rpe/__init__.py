"""Positional encodings for length extrapolation, as a fairseq plugin.

``--user-dir`` imports this package: that registers the models, criterions and encodings with fairseq.
Without fairseq loaded nothing of it is imported, so ``fairseq_rpe.encodings`` and ``fairseq_rpe.attention``
work in any torch project; ``import fairseq_rpe.models`` registers explicitly.
"""

import sys

__version__ = "0.1.0"

if "fairseq" in sys.modules:
    from . import models  # noqa: F401
