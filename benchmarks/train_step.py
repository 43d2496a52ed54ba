"""Training speed and memory of type1, compared with stock fairseq with a dense bias per head.

    python benchmarks/train_step.py            # all rows; seven minutes with --repeats 5 on two cores
    python benchmarks/train_step.py --rows tiny-64 --repeats 5
    python benchmarks/train_step.py --rows wiki103-512 --profile     # where the time goes: the ten longest operations
    git worktree add ../before fb77813
    python benchmarks/train_step.py --before ../before --rows tiny-512 wiki103-512    # against another checkout

All sides train the same Transformer with fairseq's Adam on the same batches, in processes whose steps alternate.
``stock`` is fairseq's transformer_lm with its cross_entropy. Its bias is added to its causal mask, (B·H, T, T), which
is stored between steps, as in the ALiBi fork of fairseq. ``bf16`` is type1 with --compute-dtype bf16. All these
processes have the malloc settings of ``fairseq-rpe train`` on a CPU, with which glibc keeps freed memory. Stock fairseq
has these settings too, so that the speed-up does not include their effect. ``as_installed`` is stock fairseq without
these settings.

With --before each encoding of --rpe is trained by processes whose steps alternate: one imports the package of the
other checkout; the others import this package and have the malloc settings.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from tqdm import tqdm

OUT = Path(__file__).parent / "results"
# size, tokens per block, blocks per batch, vocabulary
ROWS = {
    "tiny-64": ("tiny", 64, 16, 4096),
    "tiny-512": ("tiny", 512, 4, 4096),
    "small-512": ("small", 512, 4, 4096),
    "tiny-64-50k": ("tiny", 64, 16, 50265),
    "tiny-512-50k": ("tiny", 512, 4, 50265),
    "wiki103-512": ("wiki103", 512, 4, 50265),
    "base-512": ("base", 512, 1, 50265),
}
SIDES = ("stock", "type1", "bf16")
AS_INSTALLED = "as_installed"
ANSWER = "answer "  # begins the lines that a trainer process answers with; other lines are messages of libraries


def build(
    side: str,
    size: str,
    tokens: int,
    batch: int,
    vocabulary: int,
    rpe: str = "type1",
    device: str = "cpu",
    **settings: str,
) -> Callable[[], float]:
    """Return a function that runs one training step and returns the loss in nats per token.

    The function has the model as its attribute ``model``.

    Args:
        side: ``stock`` for fairseq's model; ``bf16`` or another name for this project's.
        size: suffix of the architecture ``transformer_rpe_lm_…``.
        tokens: tokens per block.
        batch: blocks per batch.
        vocabulary: number of symbols of the dictionary.
        rpe: encoding of this project's model.
        device: "cpu" or "cuda".
        settings: further settings of the model, such as ``rpe_share``.
    """
    from fairseq.criterions.cross_entropy import CrossEntropyCriterion
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_CONFIG_REGISTRY
    from fairseq.models.transformer_lm import TransformerLanguageModel
    from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
    from fairseq.tasks.language_modeling import LanguageModelingTask

    import fairseq_rpe.models  # noqa: F401
    from fairseq_rpe.criterions.lm_cross_entropy import LMCrossEntropy
    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

    dictionary = Dictionary()
    for i in range(vocabulary - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    task = LanguageModelingTask(Namespace(add_bos_token=False), dictionary)
    args = Namespace(rpe=rpe, tokens_per_sample=tokens, dropout=0.0, **settings)
    ARCH_CONFIG_REGISTRY[f"transformer_rpe_lm_{size}"](args)
    torch.manual_seed(0)
    if side != "stock":
        args.compute_dtype = "bf16" if side == "bf16" else "fp32"
        model, criterion = TransformerRPELanguageModel.build_model(args, task), LMCrossEntropy(task, False)
    else:
        args.no_token_positional_embeddings = True
        model, criterion = TransformerLanguageModel.build_model(args, task), CrossEntropyCriterion(task, False)
        mask = dense_mask(args.decoder_attention_heads, tokens).repeat(batch, 1, 1)
        model.decoder.buffered_future_mask = lambda x: mask
    model.to(device).train()
    options = FairseqAdamConfig(adam_betas="(0.9, 0.98)", weight_decay=0.01, lr=[5e-4])
    optimizer = FairseqAdam(options, list(model.parameters()))
    generator = torch.Generator().manual_seed(1)

    def step() -> float:
        x = torch.randint(4, vocabulary, (batch, tokens + 1), generator=generator).to(device)
        sample = {
            "net_input": {"src_tokens": x[:, :-1], "src_lengths": torch.full((batch,), tokens).to(device)},
            "target": x[:, 1:].contiguous(),
            "ntokens": batch * tokens,
        }
        loss, size, _ = criterion(model, sample)
        optimizer.backward(loss)
        optimizer.multiply_grads(1 / size)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() / size

    step.model = model
    return step


def dense_mask(heads: int, tokens: int) -> torch.Tensor:
    """Return type1's bias (H, T, T) with -inf above the diagonal."""
    from fairseq_rpe.encodings.alibi import alibi_slopes

    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    scaled = torch.tensor(alibi_slopes(heads))[:, None, None] * distance
    return -torch.log1p(scaled.square()).masked_fill(distance < 0, float("inf"))


def print_profile(row: str, side: str, rpe: str = "type1") -> None:
    """Print the ten operations with the longest self time in five steps, and their share of the time."""
    step = build(side, *ROWS[row], rpe)
    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(5):
            step()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print(f"{row}, {rpe if side == 'type1' else side}: {total / 5000:.1f} ms a step")
    for event in events[:10]:
        print(f"  {100 * event.self_cpu_time_total / total:5.1f} %  {event.count // 5:5d} calls a step  {event.key}")


def serve_command(side: str, row: str, rpe: str) -> list[str]:
    """Return the command of a process that runs :func:`serve`."""
    return [sys.executable, __file__, "--serve", side, "--rows", row, "--rpe", rpe]


def checkout_environments(before: Path) -> dict[str, dict[str, str]]:
    """Return environments of processes that train with the package of another checkout and with this one."""
    from fairseq_rpe.runs.launch import malloc_settings

    here = {"PYTHONPATH": str(Path(__file__).parents[1]), **malloc_settings(0)}
    return {"before": {**os.environ, "PYTHONPATH": str(before.resolve())}, "after": {**os.environ, **here}}


class Trainer:
    """A process that runs single training steps on request, see :func:`serve`."""

    def __init__(self, row: str, side: str, rpe: str, environment: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            serve_command(side, row, rpe), env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def step(self) -> float:
        """Run a step; return the loss of the first step, and the seconds of each later step."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith(ANSWER):
                return float(line.removeprefix(ANSWER))
        sys.exit("a training ended early: its message is above")

    def end(self) -> tuple[float, float]:
        """End the process; return its peak memory in MiB, and the part of it beyond the built model."""
        self.process.stdin.close()
        lines = [x for x in self.process.stdout if x.startswith(ANSWER)]
        peak, built = (float(x.removeprefix(ANSWER)) for x in lines[-2:])
        return peak, peak - built


def serve(row: str, side: str, rpe: str) -> None:
    """Run a step for each line of the standard input and print its answer; at the end print peak and initial memory."""
    step = build(side, *ROWS[row], rpe)
    built = machine.status("VmRSS")
    is_first = True
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        print(f"{ANSWER}{loss if is_first else time.perf_counter() - start}", flush=True)
        is_first = False
    print(f"{ANSWER}{machine.status('VmHWM') / 1024}", flush=True)
    print(f"{ANSWER}{built / 1024}", flush=True)


def time_interleaved(
    trainers: dict[str, Trainer], repeats: int, about: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the first loss of each trainer and the median seconds of its later steps, timed in rotation."""
    losses = {name: trainer.step() for name, trainer in trainers.items()}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in tqdm(range(repeats), desc=about, leave=False):
        for name, trainer in trainers.items():
            times[name].append(trainer.step())
    return losses, {name: statistics.median(values) for name, values in times.items()}


def against_stock(row: str, repeats: int) -> dict[str, Any]:
    """Return a row of the comparison with stock fairseq."""
    from fairseq_rpe.runs.launch import malloc_settings

    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    trainers = {side: Trainer(row, side, "type1", {**here, **malloc_settings(0)}) for side in SIDES}
    trainers[AS_INSTALLED] = Trainer(row, "stock", "type1", here)
    losses, seconds = time_interleaved(trainers, repeats, row)
    _, tokens, batch, vocabulary = ROWS[row]
    peaks = {name: trainer.end()[1] for name, trainer in trainers.items()}
    return {
        "row": row,
        "vocabulary": vocabulary,
        **{f"{side}_tokens_per_s": round(tokens * batch / seconds[side]) for side in trainers},
        "speedup": round(seconds["stock"] / seconds["type1"], 2),
        "bf16_speedup": round(seconds["stock"] / seconds["bf16"], 2),
        f"speedup_{AS_INSTALLED}": round(seconds[AS_INSTALLED] / seconds["type1"], 2),
        **{f"{side}_peak_MiB": round(peaks[side]) for side in trainers},
        "memory_ratio": round(peaks["type1"] / peaks["stock"], 2),
        "loss_difference": f"{abs(losses['stock'] - losses['type1']):.1e}",
    }


def against_checkout(folder: Path, row: str, rpe: str, repeats: int, sides: dict[str, str]) -> dict[str, Any]:
    """Return a row of the comparison with the checkout in ``folder``; ``sides``: name in the row -> side of build."""
    environment = checkout_environments(folder)
    trainers = {"before": Trainer(row, "type1", rpe, environment["before"])}
    trainers |= {name: Trainer(row, side, rpe, environment["after"]) for name, side in sides.items()}
    losses, seconds = time_interleaved(trainers, repeats, f"{row}, {rpe}")
    _, tokens, batch, _ = ROWS[row]
    result: dict[str, Any] = {"row": row, "rpe": rpe}
    result |= {f"{name}_tokens_per_s": round(tokens * batch / seconds[name]) for name in trainers}
    result |= {f"{name}_speedup": round(seconds["before"] / seconds[name], 2) for name in sides}
    result |= {f"{name}_peak_MiB": round(trainer.end()[0]) for name, trainer in trainers.items()}
    return result | {"loss_difference": f"{abs(losses['before'] - losses['after']):.1e}"}


def write(rows: list[dict[str, Any]], target: Path, repeats: int) -> None:
    head = f"{machine.processor()}, {os.cpu_count()} cores, torch {torch.__version__}, "
    machine.write_csv(target, f"{head}{torch.get_num_threads()} threads, medians of {repeats}", rows)
    print(f"wrote {target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--repeats", type=int, default=15, help="timed steps a side; the median counts")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, and nothing else")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout of this project to compare with")
    parser.add_argument("--rpe", nargs="+", default=["type1", "kerple_log", "fire"], help="default: %(default)s")
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        (print_profile if args.profile else serve)(args.rows[0], args.serve, args.rpe[0])
        return
    if args.profile:
        return print_profiles(args)
    if args.before:
        sides = {"after": "type1", "bf16": "bf16"}
        rows = [against_checkout(args.before, row, rpe, args.repeats, sides) for row in args.rows for rpe in args.rpe]
        return write(rows, OUT / "train_step-before.csv", args.repeats)
    rows = []
    for row in args.rows:
        rows.append(against_stock(row, args.repeats))
        print(json.dumps(rows[-1]), flush=True)
    write(rows, OUT / "train_step.csv", args.repeats)


def print_profiles(args: argparse.Namespace) -> None:
    """Print the profiles of all rows: of both checkouts with --before, otherwise of all sides."""
    for row in args.rows:
        if not args.before:
            for side, rpe in [("stock", "type1"), *(("type1", x) for x in args.rpe), ("bf16", "type1")]:
                print_profile(row, side, rpe)
            continue
        for rpe in args.rpe:
            for name, environment in checkout_environments(args.before).items():
                print(f"{name}: ", end="", flush=True)
                subprocess.run([*serve_command("type1", row, rpe), "--profile"], env=environment, check=True)


if __name__ == "__main__":
    main()
