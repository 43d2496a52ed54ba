"""Positional encodings for length extrapolation, for PyTorch and as a fairseq plugin.

``attend``, ``RelativeAttention`` and ``build`` work in any torch program. They are imported when they are first used,
so importing this package does not need torch. If fairseq is already imported, as with ``--user-dir``, importing this
package registers its models, criterions and encodings with fairseq; ``import fairseq_rpe.models`` does so explicitly.
Exported models are registered with the Auto classes of transformers, before or after which this package is imported.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from fairseq_rpe.adapters.registration import register_on_import

if TYPE_CHECKING:
    from fairseq_rpe.attention.functional import RelativeAttention, attend
    from fairseq_rpe.encodings import build

__version__ = "0.1.0"
__all__ = ["RelativeAttention", "attend", "build"]

_MODULE_OF_NAME = {"RelativeAttention": "attention.functional", "attend": "attention.functional", "build": "encodings"}

register_on_import()
if sys.modules.get("fairseq") is not None:
    from fairseq_rpe import models  # noqa: F401


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_MODULE_OF_NAME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
