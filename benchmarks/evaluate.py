"""Time and memory of ``fairseq-rpe eval`` at several lengths, compared with one fairseq-eval-lm process per length.

    python benchmarks/evaluate.py                  # 14 lengths, a few minutes on two cores
    python benchmarks/evaluate.py --lengths 9216

Both score the same random text with the same untrained tiny model. fairseq-preprocess binarises the text, which has
50,265 types. At the longest length a third process runs, ``stock``: fairseq-eval-lm with the same weights in fairseq's
own transformer_lm and ALiBi as a dense mask (B·H, T, T), as in the ALiBi fork of fairseq.

Times are wall-clock and CPU times of whole processes, including their start. Peak memory is the largest resident memory
of each process, as the kernel reports it. This script does not import torch, because the kernel counts the memory of
the parent process at the fork too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import machine

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(__file__).parent / "results" / "evaluate.csv"
LENGTHS = "512,768,1024,1280,1536,1792,2048,3072,4096,5120,6144,7168,8192,9216"
TYPES = 50265
BATCH_TOKENS = 2048
STOCK_COLUMNS = ("stock_seconds", "stock_cpu_seconds", "stock_peak_MiB", "stock_relative_difference")
TINY = ["--arch", "transformer_rpe_lm_tiny", "--rpe", "alibi", "--criterion", "lm_cross_entropy", "--cpu"]
# fairseq-eval-lm's cli_main, which prints only two digits of the perplexity; this prints the loss with all digits
EVAL_LM = """
import json
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm
args = options.parse_args_and_arch(options.get_eval_lm_parser())
result = eval_lm.main(convert_namespace_to_omegaconf(args))
print(json.dumps({"loss_base2": float(result["loss"])}))
"""
# replaces the model of the checkpoint by fairseq's own; its mask is stored from batch to batch
STOCK = """
import torch
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq_rpe.encodings.alibi import alibi_slopes
from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

def build(cls, args, task):
    args.no_token_positional_embeddings, args.max_target_positions = True, 1 << 20  # or longer blocks are left out
    model = TransformerLanguageModel.build_model.__func__(TransformerLanguageModel, args, task)
    stored = torch.zeros(args.decoder_attention_heads, 0, 0)

    def future_mask(x):
        nonlocal stored
        tokens, rows = x.shape[:2]
        if tokens > stored.shape[1]:
            index = torch.arange(tokens)
            slopes = torch.tensor(alibi_slopes(args.decoder_attention_heads))
            stored = slopes[:, None, None] * (index - index[:, None])  # (H, T, T)
            stored += torch.full((tokens, tokens), float("-inf")).triu_(1)
        mask = stored[:, :tokens, :tokens]
        return mask if rows == 1 else mask.repeat(rows, 1, 1)

    model.decoder.buffered_future_mask = future_mask
    return model

TransformerRPELanguageModel.build_model = classmethod(build)
"""


class Measurement(NamedTuple):
    """What a process printed and used.

    Attributes:
        lines: its JSON lines.
        seconds: wall-clock seconds.
        cpu_seconds: seconds of all its threads.
        peak_mib: peak memory in MiB.
    """

    lines: list[dict[str, Any]]
    seconds: float
    cpu_seconds: float
    peak_mib: float


def measure_command(*command: object) -> Measurement:
    """Run a Python process with these arguments, and measure it."""
    start = time.perf_counter()
    argv = [sys.executable, "-P", *map(str, command)]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        out.seek(0)
        lines = out.read().splitlines()
    if status:
        raise SystemExit("\n".join([*lines, errors]))
    results = [json.loads(line) for line in lines if line.startswith("{")]
    return Measurement(results, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def prepare(folder: Path, tokens: int) -> tuple[Path, Path]:
    """Write a random text of ``tokens`` tokens; return its data folder and a checkpoint after one update at rate 0."""
    words = [f"w{i}" for i in range(TYPES - 4)]
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in words))
    generator = random.Random(0)
    lines = [" ".join(generator.choices(words, k=24)) for _ in range(tokens // 25)]
    lines += ["w0 " * (tokens % 25 - 1)] * (tokens % 25 > 0)
    (folder / "text").write_text("\n".join(lines) + "\n")
    flags = ["--only-source", "--srcdict", folder / "dict.txt", "--testpref", folder / "text"]
    measure_command("-m", "fairseq_cli.preprocess", *flags, "--trainpref", folder / "text", "--destdir", folder / "bin")
    flags = ["--user-dir", ROOT / "fairseq_rpe", "--task", "language_modeling", "--tokens-per-sample", "512", *TINY]
    flags += ["--batch-size", "1", "--optimizer", "adam", "--lr", "0", "--max-update", "1", "--disable-validation"]
    measure_command("-m", "fairseq_cli.train", folder / "bin", *flags, "--save-dir", folder / "run")
    return folder / "bin", folder / "run" / "checkpoint_last.pt"


def compare_length(result: dict[str, Any], data: Path, checkpoint: Path, with_stock: bool) -> dict[str, Any]:
    """Run fairseq-eval-lm at the length of a result of ``fairseq-rpe eval``, and return the row of both.

    Args:
        result: JSON line of ``fairseq-rpe eval``.
        data: binarised data folder.
        checkpoint: checkpoint file.
        with_stock: whether fairseq's own model is measured too.
    """
    length, loss = result["length"], result["loss_base2"]
    flags = [data, "--path", checkpoint, "--user-dir", ROOT / "fairseq_rpe", "--gen-subset", "test", "--cpu"]
    flags += ["--tokens-per-sample", length, "--max-tokens", max(length, BATCH_TOKENS), "--num-workers", 0]
    fairseq = measure_command("-c", EVAL_LM, *flags)
    row = {
        "length": length,
        "fairseq_seconds": round(fairseq.seconds, 2),
        "fast_seconds": round(result["seconds"], 2),
        "fairseq_cpu_seconds": round(fairseq.cpu_seconds, 2),
        "fast_cpu_seconds": None,
        "fairseq_peak_MiB": round(fairseq.peak_mib),
        "fast_peak_MiB": round(result["peak_mb"]),
        "loss_base2": loss,
        "relative_difference": _relative_difference(loss, fairseq),
        **dict.fromkeys(STOCK_COLUMNS),
    }
    if with_stock:
        stock = measure_command("-c", STOCK + EVAL_LM, *flags)
        values = round(stock.seconds, 2), round(stock.cpu_seconds, 2), round(stock.peak_mib)
        row |= dict(zip(STOCK_COLUMNS, (*values, _relative_difference(loss, stock)), strict=True))
    return row


def _relative_difference(loss: float, measurement: Measurement) -> str:
    """Return the relative difference of a loss from the loss that a process printed."""
    [result] = measurement.lines
    return f"{abs(loss / result['loss_base2'] - 1):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=LENGTHS, metavar="N,N,...")
    parser.add_argument(
        "--tokens", type=int, default=10_000, metavar="N", help="length of the text in tokens (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="default: %(default)s")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        data, checkpoint = prepare(Path(name), args.tokens)
        flags = ["--lengths", args.lengths, "--device", "cpu", "--json"]
        fast = measure_command("-m", "fairseq_rpe.cli.main", "eval", checkpoint, data, *flags)
        longest = max(result["length"] for result in fast.lines)
        for result in fast.lines:
            rows.append(compare_length(result, data, checkpoint, with_stock=result["length"] == longest))
            print(json.dumps(rows[-1]), flush=True)
    total, total_cpu = (sum(row[column] for row in rows) for column in ("fairseq_seconds", "fairseq_cpu_seconds"))
    highest = max(row["fairseq_peak_MiB"] for row in rows)
    rows.append(
        {
            "length": "all",
            "fairseq_seconds": round(total, 2),
            "fast_seconds": round(fast.seconds, 2),
            "fairseq_cpu_seconds": round(total_cpu, 2),
            "fast_cpu_seconds": round(fast.cpu_seconds, 2),
            "fairseq_peak_MiB": highest,
            "fast_peak_MiB": round(fast.peak_mib),
            "relative_difference": max((row["relative_difference"] for row in rows), key=float),
        }
    )
    print(json.dumps(rows[-1]))
    print(f"time: {total / fast.seconds:.2f} times shorter, on the processor {total_cpu / fast.cpu_seconds:.2f} times")
    print(f"peak memory: {fast.peak_mib / highest:.2f} of fairseq's")
    threads = os.environ.get("OMP_NUM_THREADS")
    machine.write_csv(args.out, f"{machine.processor()}, {os.cpu_count()} cores, OMP_NUM_THREADS={threads}", rows)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
