"""Count the measurements of block sizes over calls at several lengths; clock and GPU are replaced by stand-ins.

usage: python tests/attention/tune_kernels.py
Prints a line per call: candidates measured so far, programs launched; the last line is in deterministic mode.
"""

import torch

from fairseq_rpe.attention.triton import bias_gradient, tuning
from fairseq_rpe.attention.triton.autograd import Options, TritonAttention

TUNERS = (tuning.FORWARD, tuning.QUERY_GRADIENT, tuning.KEY_GRADIENT)
measured, grids = [], []


def measure(*args, config, **kwargs):
    measured.append(config)
    return [1.0 + len(measured)] * 3


def record(*args, grid, **kwargs):
    grids.append(grid(kwargs))


def call(n: int, m: int, width: int) -> None:
    grids.clear()
    q, k, v = (torch.zeros(2, 3, length, width, requires_grad=True) for length in (n, m, m))
    table = torch.zeros(3, m, requires_grad=True)
    TritonAttention.apply(q, k, v, None, Options(), table).sum().backward()
    print(len(measured), *(f"{blocks}x{heads}x{batch}" for blocks, heads, batch in grids))


if __name__ == "__main__":
    assert not tuning.INTERPRETED
    for tuner in TUNERS:
        tuner._bench, tuner.fn.run = measure, record
    bias_gradient.diagonal_sums.run = record
    for n, m, width in ((300, 300, 64), (301, 301, 64), (1001, 1001, 64), (1, 1001, 64), (300, 300, 32)):
        call(n, m, width)
    torch.are_deterministic_algorithms_enabled = lambda: True  # to set it imports much
    measured.clear()
    for tuner in TUNERS:
        tuner.cache.clear()
    call(300, 300, 64)
