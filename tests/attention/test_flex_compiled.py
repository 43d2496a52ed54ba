"""The flex backend compiled by inductor, whose C++ stands in for a GPU's Triton: what it makes of every kind of bias.

Both go through the same lowering of the functions of single pairs; only the C++ runs without a GPU. One compilation
each has to serve all lengths here.
"""

import shutil

import pytest
import torch
from calls import D, H, compare, left_padding, warped
from test_flex import ON_CPU, evaluation  # noqa: F401
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from fairseq_rpe.attention import flex as backend
from fairseq_rpe.core import DenseBias, PointwiseBias, Positions, ScaledDistanceBias, ToeplitzBias
from fairseq_rpe.encodings import build

pytestmark = [
    ON_CPU,
    pytest.mark.release,  # other tests have the same functions without inductor: test_flex.py
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler"),
]


@pytest.fixture(autouse=True)
def inductor(monkeypatch):
    """flex by inductor on the CPU.

    torch 2.13 puts its own variable for the size of a block, named ks0 or ks1, into the C++ by replacing text, and so
    breaks the size ks17: such a size of a block is given a name of its own. Inductor takes seconds to import, and the
    process that collects these tests seldom runs them.
    """
    from torch._inductor.codegen.common import KernelArgs
    from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported

    if not check_cpu_supported():
        pytest.skip("torch compiles FlexAttention for other processors")
    name_of = KernelArgs.size

    def size(self, symbol):
        if symbol.name.startswith("u"):
            return self.sizevars.setdefault(symbol, f"block_{symbol.name}_")
        return name_of(self, symbol)

    monkeypatch.setattr(KernelArgs, "size", size)
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend="inductor")
    monkeypatch.setattr(backend, "_compile_for", lambda device: compiled)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("t5_bias:init_std=1", ToeplitzBias),
        ("kerple_power", PointwiseBias),
        ("window:window=40", PointwiseBias),
        ("fire", ScaledDistanceBias),
    ],
)
def test_equals_the_reference(spec, kind):
    """Odd lengths with padding, and few queries against more keys, all in one compilation."""
    compiled = 0
    for n, m in ((150, 150), (301, 301), (140, 391)):
        pos = warped(n, m) if kind is PointwiseBias else Positions.arange(n, m)
        assert isinstance(build(spec, H, H * D, 64).position_bias(pos), kind)
        compare("flex", spec, n=n, m=m, pos=pos, padding=left_padding(m), grads=False)
        compiled = compiled or counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == compiled


def test_matrix():
    bias = torch.randn(1, H, 150, 150)
    compare("flex", lambda device: (bias, DenseBias(bias)), n=150, padding=left_padding(150), grads=False)


@pytest.mark.parametrize("spec", ["grape_a", "grape_a:gate=both"])
def test_products_of_gates(spec):
    compiled = 0
    for n, m in ((150, 150), (301, 301), (140, 391)):
        compare("flex", spec, n=n, m=m, padding=left_padding(m), grads=False)
        compiled = compiled or counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == compiled
