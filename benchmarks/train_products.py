"""Share of a training step that its matrix products alone would take.

    python benchmarks/train_products.py --rows tiny-64 tiny-512 small-512 --csv benchmarks/results/train_products.csv

A step is that of ``train_step.py``: forward and backward pass, clipping and Adam, with the encoding --rpe and with
--compute-dtype bf16. (In float32 torch computes the loss in one operation, whose products are not seen.) The script
records the shapes and dtypes of all matrix products of one step and then computes products of such tensors alone, in
the order of the step. Torch's fused attention counts as its two products in the forward pass and five in the backward
pass, one of which computes the scores again, with half of the keys where attention is causal. Four times are measured
in turns: the whole step, its products, its calls of the fused attention, and its loss with gradients. Medians of
--repeats rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
import train_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fairseq_rpe.analysis.speed import time_interleaved
from fairseq_rpe.modules.cross_entropy import linear_cross_entropy

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.baddbmm_)
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


class ProductRecorder(TorchDispatchMode):
    """Records the matrix products of a step as pairs of tensors, and the calls of fused attention.

    Attributes:
        products: pairs of random tensors of the shapes, strides and dtypes of the factors.
        attention: functions that repeat a call of fused attention, forward or backward, with its tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Tensor, Tensor]] = []
        self.attention: list[Callable[[], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in PRODUCTS:
            self.products.append((random_like(args[-2]), random_like(args[-1])))
        elif packet in (ATTENTION, ATTENTION_BACKWARD):
            self.attention.append(lambda: func(*args, **kwargs))
            self._add_attention_products(packet == ATTENTION_BACKWARD, args, kwargs)
        return func(*args, **kwargs)

    def _add_attention_products(self, is_backward: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        q, k = args[1:3] if is_backward else args[:2]  # (B, H, n, D), (B, H, m, D)
        is_causal = args[7] if is_backward else (args[4] if len(args) > 4 else kwargs.get("is_causal", False))
        n, m = q.shape[2], k.shape[2] // 2 if is_causal else k.shape[2]
        batch, width = q.shape[0] * q.shape[1], q.shape[3]
        rows, keys, scores = (torch.randn(batch, *shape).to(q.dtype) for shape in ((n, width), (m, width), (n, m)))
        forward = [(rows, keys.mT), (scores, keys)]  # scores, output
        backward = [(rows, keys.mT), (rows, keys.mT), (scores.mT, rows), (scores, keys), (scores.mT, rows)]
        self.products += backward if is_backward else forward


def random_like(x: Tensor) -> Tensor:
    """Return a random tensor of the shape, strides and dtype of x."""
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return y.copy_(torch.randn(x.shape))


def measure(row: str, rpe: str, repeats: int) -> dict[str, Any]:
    """Return the times of one row of the table."""
    step = train_step.build("bf16", *train_step.ROWS[row], rpe)
    step()
    recorder = ProductRecorder()
    with recorder:
        step()

    def products() -> None:
        for a, b in recorder.products:
            torch.matmul(a, b)

    def attention() -> None:
        with torch.no_grad():
            for call in recorder.attention:
                call()

    _, tokens, batch, vocabulary = train_step.ROWS[row]
    x = torch.randn(tokens * batch, step.model.decoder.output_projection.in_features, requires_grad=True)
    weight = torch.randn(vocabulary, x.shape[1], requires_grad=True)
    target = torch.randint(4, vocabulary, (len(x),))

    def loss() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            value = linear_cross_entropy(x, weight, target, ignore_index=1)
        torch.autograd.grad(value, (x, weight))

    steps = {"step": step, "products": products, "attention": attention, "loss": loss}
    time_interleaved(steps, 1, "cpu")
    times = {name: 1e3 * statistics.median(t) for name, t in time_interleaved(steps, repeats, "cpu").items()}
    operations = sum(2 * a.numel() * b.shape[-1] for a, b in recorder.products)
    return {
        "row": row,
        "tokens_per_s": round(1e3 * tokens * batch / times["step"]),
        "step_ms": round(times["step"], 1),
        "products_ms": round(times["products"], 1),
        "products_share": round(times["products"] / times["step"], 2),
        "attention_ms": round(times["attention"], 1),
        "loss_ms": round(times["loss"], 1),
        "products_gflops": round(operations / times["products"] / 1e6),
        "step_gflops": round(operations / times["step"] / 1e6),
    }


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows = ["tiny-64", "tiny-512", "small-512"]
    parser.add_argument("--rows", nargs="+", default=rows, choices=list(train_step.ROWS))
    parser.add_argument("--rpe", default="type1", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=11, help="rounds; the median counts")
    parser.add_argument("--csv", type=Path, default=train_step.OUT / "train_products.csv")
    args = parser.parse_args()
    results = []
    for row in args.rows:
        results.append(measure(row, args.rpe, args.repeats))
        print(results[-1], flush=True)
    head = (
        f"{machine.processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    machine.write_csv(args.csv, f"{head}, bfloat16, {args.rpe}, medians of {args.repeats}", results)


if __name__ == "__main__":
    main()
