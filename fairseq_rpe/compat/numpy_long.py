"""A name that numpy has given up."""

import types

import numpy as np


def numpy_compat() -> None:
    """``np.compat.long`` (sample-break-mode eos, fairseq-interactive, generation) left numpy with 2.0."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)
