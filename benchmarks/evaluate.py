"""Time and memory of ``fairseq-rpe eval`` at several lengths, compared with one fairseq-eval-lm process per length.

    python benchmarks/evaluate.py                  # 14 lengths, a few minutes on two cores
    python benchmarks/evaluate.py --lengths 9216

Both score the same untrained tiny model over the same random text, binarised by fairseq-preprocess, with 50,265 types.
At the longest length there is a third process, ``stock``: fairseq-eval-lm with the same weights in fairseq's own
transformer_lm and ALiBi as a dense mask (B·H, T, T), as the ALiBi fork of fairseq has it.
Time is that of whole processes, start included, on the clock and on the processor; peak memory is the kernel's resident
maximum of each. This process itself loads no torch: a child's maximum starts from what its parent had in use.
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
from typing import Any

import machine

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(__file__).parent / "results" / "evaluate.csv"
LENGTHS = "512,768,1024,1280,1536,1792,2048,3072,4096,5120,6144,7168,8192,9216"
TYPES = 50265
BATCH_TOKENS = 2048
STOCK_COLUMNS = ("stock_seconds", "stock_cpu_seconds", "stock_peak_MiB", "stock_relative_difference")
TINY = ["--arch", "transformer_rpe_lm_tiny", "--rpe", "alibi", "--criterion", "lm_cross_entropy", "--cpu"]
# fairseq-eval-lm's cli_main, but its result in full: it prints two digits of the perplexity.
EVAL_LM = """
import json
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import eval_lm
args = options.parse_args_and_arch(options.get_eval_lm_parser())
result = eval_lm.main(convert_namespace_to_omegaconf(args))
print(json.dumps({"loss_base2": float(result["loss"])}))
"""
# fairseq's own model in place of the checkpoint's; the mask is kept from batch to batch.
STOCK = """
import torch
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq_rpe.encodings.alibi import alibi_slopes
from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

def build(cls, args, task):
    args.no_token_positional_embeddings, args.max_target_positions = True, 1 << 20  # or longer blocks are left out
    model = TransformerLanguageModel.build_model.__func__(TransformerLanguageModel, args, task)
    kept = torch.zeros(args.decoder_attention_heads, 0, 0)

    def mask(x):
        nonlocal kept
        tokens, rows = x.shape[:2]
        if tokens > kept.shape[1]:
            at = torch.arange(tokens)
            slopes = torch.tensor(alibi_slopes(args.decoder_attention_heads))
            kept = slopes[:, None, None] * (at - at[:, None])
            kept += torch.full((tokens, tokens), float("-inf")).triu_(1)
        fit = kept[:, :tokens, :tokens]
        return fit if rows == 1 else fit.repeat(rows, 1, 1)

    model.decoder.buffered_future_mask = mask
    return model

TransformerRPELanguageModel.build_model = classmethod(build)
"""


def measure_command(*command: object) -> tuple[list[dict[str, Any]], float, float, float]:
    """Run a process; return its JSON lines, seconds, CPU seconds and peak memory in MiB."""
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
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return found, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def prepare(folder: Path, tokens: int) -> tuple[Path, Path]:
    """Return a binarised data folder and a checkpoint of one update at learning rate 0."""
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
        fast, seconds, busy, memory = measure_command("-m", "fairseq_rpe.cli.main", "eval", checkpoint, data, *flags)
        longest = max(found["length"] for found in fast)
        for found in fast:
            length = found["length"]
            flags = [data, "--path", checkpoint, "--user-dir", ROOT / "fairseq_rpe", "--gen-subset", "test", "--cpu"]
            flags += ["--tokens-per-sample", length, "--max-tokens", max(length, BATCH_TOKENS), "--num-workers", 0]
            [wanted], slow_seconds, slow_busy, slow_memory = measure_command("-c", EVAL_LM, *flags)
            rows.append(
                {
                    "length": length,
                    "fairseq_seconds": round(slow_seconds, 2),
                    "fast_seconds": round(found["seconds"], 2),
                    "fairseq_cpu_seconds": round(slow_busy, 2),
                    "fast_cpu_seconds": None,
                    "fairseq_peak_MiB": round(slow_memory),
                    "fast_peak_MiB": round(found["peak_mb"]),
                    "loss_base2": found["loss_base2"],
                    "relative_difference": f"{abs(found['loss_base2'] / wanted['loss_base2'] - 1):.1e}",
                    **dict.fromkeys(STOCK_COLUMNS),
                }
            )
            if length == longest:
                [stock], *used = measure_command("-c", STOCK + EVAL_LM, *flags)
                difference = abs(found["loss_base2"] / stock["loss_base2"] - 1)
                values = (*(round(x, 2) for x in used[:2]), round(used[2]), f"{difference:.1e}")
                rows[-1] |= dict(zip(STOCK_COLUMNS, values, strict=True))
            print(json.dumps(rows[-1]), flush=True)
    total, total_busy = (sum(row[column] for row in rows) for column in ("fairseq_seconds", "fairseq_cpu_seconds"))
    highest = max(row["fairseq_peak_MiB"] for row in rows)
    rows.append(
        {
            "length": "all",
            "fairseq_seconds": round(total, 2),
            "fast_seconds": round(seconds, 2),
            "fairseq_cpu_seconds": round(total_busy, 2),
            "fast_cpu_seconds": round(busy, 2),
            "fairseq_peak_MiB": highest,
            "fast_peak_MiB": round(memory),
            "relative_difference": max((row["relative_difference"] for row in rows), key=float),
        }
    )
    print(json.dumps(rows[-1]))
    print(f"time: {total / seconds:.2f} times shorter, on the processor {total_busy / busy:.2f} times")
    print(f"peak memory: {memory / highest:.2f} of fairseq's")
    threads = os.environ.get("OMP_NUM_THREADS")
    machine.write_csv(args.out, f"{machine.processor()}, {os.cpu_count()} cores, OMP_NUM_THREADS={threads}", rows)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
