"""Checks that a supported version of transformers is installed; import this before transformers."""

import importlib
import sys
from importlib.util import find_spec

from fairseq_rpe.core.errors import UserError

if find_spec("transformers") is None:
    raise UserError('the package transformers is not installed: pip install -e ".[transformers]"')

from transformers import __version__, utils

if int(__version__.partition(".")[0]) < 5:
    raise UserError(f"transformers {__version__} has other attention than this adapter knows: install transformers>=5")


def _disable_broken_torchaudio() -> None:
    """Hide torchaudio from transformers if it fails to load, e.g. next to another build of torch."""
    if find_spec("torchaudio") is None or "transformers.audio_utils" in sys.modules:
        return
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):
        utils.is_torchaudio_available = utils.import_utils.is_torchaudio_available = lambda: False


_disable_broken_torchaudio()
