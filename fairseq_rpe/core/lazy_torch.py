"""The names of ``torch``, which is imported when one of them is first used.

Position transforms use it, so that a report or the list of a sweep's runs can read their options without the time that
importing ``torch`` takes. Names such as ``__file__`` are those of this module.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    value = globals()[name] = getattr(importlib.import_module("torch"), name)
    return value
