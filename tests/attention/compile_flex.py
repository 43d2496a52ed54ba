"""Compile what inductor makes of the flex backend for CUDA devices of compute capability 10·major + minor, without one.

usage: python tests/attention/compile_flex.py 90     # prints each bias and kernel that compiled

torch's lowering for GPUs is applied to tensors on the CPU, which needs its test for the CPU taken out; inductor then
ends in an error, after the kernels have been written.
"""

import contextlib
import importlib.util
import logging
import sys
from pathlib import Path

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import choices, select_algorithm
from torch._inductor.compile_fx import compile_fx_inner, select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.kernel.flex import flex_attention as lowering
from torch._inductor.runtime import triton_heuristics
from torch.nn.attention import flex_attention as torch_flex
from torch.utils import _triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from fairseq_rpe.attention import AttentionPlan
from fairseq_rpe.attention import flex as backend
from fairseq_rpe.core import Positions
from fairseq_rpe.encodings import build

HEADS, WIDTH, N = 4, 32, 150
written: list[str] = []  # paths of kernels


def pretend(capability: tuple[int, int]) -> None:
    """A GPU of this kind, as far as writing kernels asks for one."""
    torch.cuda.get_device_capability = lambda *device: capability
    _triton.triton_hash_with_backend = lambda: ""
    torch_flex._validate_device = lambda q, k, v: None
    backend.refusal_reason = lambda q, k, v, plan, dropout: None
    heuristics = choices.InductorChoices.get_config_heuristics
    choices.InductorChoices.get_config_heuristics = lambda self, device="cuda": heuristics(self, "cuda")
    select_algorithm.TritonTemplate.all_templates.clear()
    source = Path(lowering.__file__).read_text().replace('query.get_device().type == "cpu"', "False")
    exec(source, lowering.__dict__)
    generate = select_algorithm.TritonTemplate.generate

    def noted(self, *args, **kwargs):
        made = generate(self, *args, **kwargs)
        written.append(made.bmreq.module_path)
        return made

    select_algorithm.TritonTemplate.generate = noted


def write(spec: str, warped: bool, backwards: bool) -> str:
    """The path of the first kernel for this bias."""
    written.clear()
    torch._dynamo.reset()
    back = aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        bw_compiler=lambda graph, inputs: compile_fx_inner(graph, inputs),
        decompositions=select_decomp_table,
    )
    made = torch.compile(
        torch_flex.flex_attention, dynamic=True, fullgraph=True, backend=back if backwards else "inductor"
    )
    backend._compile_for = lambda device: made
    at = torch.arange(float(N))[None] ** 0.9
    pos = Positions(at, at, None, False) if warped else Positions.arange(N)
    q, k, v = (torch.randn(2, HEADS, N, WIDTH, requires_grad=True) for _ in range(3))
    form = build(spec, HEADS, HEADS * WIDTH).position_bias(pos)
    with contextlib.suppress(InductorError):
        backend.flex(q, k, v, AttentionPlan(pos, form, torch.zeros(2, N, dtype=torch.bool))).sum().backward()
    return written[0]


def compile_kernel(path: str, arch: int) -> str:
    """Compile the kernel of a module; its name."""
    found = {}
    triton_heuristics.template = lambda **given: lambda kernel: found.update(given, kernel=kernel)
    spec = importlib.util.spec_from_file_location("written", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    signature = {  # numbers on the CPU are arguments, on a GPU tensors
        name: f"*{kind}" if name.startswith("in_ptr") and not kind.startswith("*") else kind
        for name, kind in found["triton_meta"]["signature"].items()
    }
    compile(
        ASTSource(fn=found["kernel"], signature=signature, constexprs={}),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": found["num_warps"], "num_stages": found["num_stages"]},
    )
    return found["kernel"].__name__


if __name__ == "__main__":
    arch = int(sys.argv[1])
    logging.disable(logging.WARNING)
    pretend(divmod(arch, 10))
    for spec, warped in (("kerple_log", False), ("kerple_log", True), ("window", True), ("fire", False)):
        for backwards in (False, True):
            name = compile_kernel(write(spec, warped, backwards), arch)
            print(spec, "warped" if warped else "even", name, flush=True)
