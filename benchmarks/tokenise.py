"""Time and peak memory of encoding a corpus, compared with fairseq's spm_encode.py.

    python benchmarks/tokenise.py                       # the standard library's sources, under a minute on two cores
    python benchmarks/tokenise.py --text FILE [FILE …]  # other texts: .txt, .jsonl, compressed or not

``fairseq`` is the loop of fairseq's spm_encode.py: it strips each line, calls EncodeAsPieces and writes the pieces,
separated by spaces, into a text file. ``fairseq with preprocess`` then runs fairseq-preprocess with two workers, which
writes the binarised split. ``here`` writes the binarised split directly. All use one sentencepiece BPE of 16,384
symbols that is learned from the text, and all read the text from a plain file. Each measurement runs in a separate
process. Memory is the sum of the peaks of all its processes; of fairseq-preprocess only the largest process counts.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from fairseq_rpe.data.documents import DocumentReader, SourceFile, find_source_files
from fairseq_rpe.data.prepare_options import CORPORA, preset_options
from fairseq_rpe.data.stream import SplitWriter, encode_chunks, group_pieces, split_pieces
from fairseq_rpe.data.tokenization import load_encoder
from fairseq_rpe.data.vocabulary import BpeLearner

OUT = Path(__file__).parent / "results" / "tokenise.csv"
IMPLEMENTATIONS = ("fairseq", "fairseq with preprocess", "here, 1 process", "here, 2 workers")
TYPES = 16384


def encode_as_fairseq(text: Path, folder: Path) -> None:
    """Run the loop of spm_encode.py with its default options, from ``text`` to ``folder/train.spm``."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor()
    pieces.Load(str(folder / "spm.model"))
    with open(text, encoding="utf-8") as lines, open(folder / "train.spm", "w", encoding="utf-8") as out:
        for line in lines:
            line = line.strip()
            if line:
                print(" ".join(pieces.EncodeAsPieces(line)), file=out)


def preprocess(folder: Path) -> None:
    """Binarise ``folder/train.spm`` with fairseq-preprocess."""
    command = [sys.executable, "-P", "-m", "fairseq_cli.preprocess", "--only-source", "--workers", "2"]
    command += ["--srcdict", str(folder / "dict.txt"), "--trainpref", str(folder / "train.spm")]
    command += ["--destdir", str(folder / "binarised"), "--dataset-impl", "mmap"]
    subprocess.run(command, check=True, capture_output=True)


def peak_mb(process: int | None) -> float:
    """Return the peak memory of a process; getrusage would include its parent's memory at the fork."""
    status = Path(f"/proc/{process or 'self'}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def encode_here(text: Path, folder: Path, workers: int) -> float:
    """Encode ``text`` into ``folder/train.bin`` and ``.idx`` with this project; return the workers' peak memory."""
    peaks: dict[int | None, float] = {}
    documents = DocumentReader([SourceFile(text)])
    pieces = (("train", piece) for document in documents for piece in split_pieces(document.blocks()))
    with SplitWriter(folder, "train", load_encoder("bpe", folder).dtype) as writer:
        for _, encoded in encode_chunks(group_pieces(pieces), "bpe", folder, workers):
            writer.add(encoded)
            for child in multiprocessing.active_children():
                peaks[child.pid] = peak_mb(child.pid)
    return sum(peaks.values())


def measure(text: Path, folder: Path, implementation: str) -> dict[str, float]:
    """Return seconds and peak memory of one run in this process."""
    start = time.perf_counter()
    children_peak_mb = 0.0
    if implementation.startswith("fairseq"):
        encode_as_fairseq(text, folder)
        if implementation != "fairseq":
            preprocess(folder)
            children_peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    else:
        workers = int(implementation.removeprefix("here, ")[0])
        children_peak_mb = encode_here(text, folder, workers)
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": sum(usage.ru_utime + usage.ru_stime for usage in usages),
        "peak_mb": peak_mb(None) + children_peak_mb,
    }


def measure_in_process(text: Path, folder: Path, implementation: str) -> dict[str, float]:
    """Call :func:`measure` in a new process."""
    command = [sys.executable, __file__, "--measure", str(text), str(folder), implementation]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def write_text(sources: list[Path], path: Path, times: int) -> None:
    """Write all texts into one file, repeated ``times`` times."""
    entries = find_source_files(sources)[0] if sources else preset_options(CORPORA["stdlib"], (), path.parent)["train"]
    texts = ("".join(document.blocks()) for document in DocumentReader(entries, skip_invalid=not sources))
    content = "".join(text if text.endswith("\n") else text + "\n" for text in texts)
    with open(path, "w", encoding="utf-8", newline="") as file:
        for _ in range(times):
            file.write(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files or folders (default: standard library)")
    parser.add_argument("--name", default="standard library", help="name of the text in the results")
    parser.add_argument("--times", type=int, default=1, help="repeat the text, to see the memory (default: 1)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each implementation, in rotation (default: 3)")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        text, folder, implementation = args.measure
        print(json.dumps(measure(Path(text), Path(folder), implementation)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        text = folder / "text.txt"
        write_text(args.text, text, args.times)
        learner = BpeLearner(TYPES, 20_000_000)
        for document in DocumentReader([SourceFile(text)]):
            learner.read(document.blocks())
        learner.write(folder)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in IMPLEMENTATIONS}
        for name in tqdm(IMPLEMENTATIONS * args.runs, unit="run"):
            runs[name].append(measure_in_process(text, folder, name))
        size = text.stat().st_size
    record(args.name, size, runs)


def record(name: str, size: int, runs: dict[str, list[dict[str, float]]]) -> None:
    """Print medians and append them to the CSV.

    Args:
        name: name of the text.
        size: bytes of the text.
        runs: implementation -> results of :func:`measure`.
    """
    medians = {
        implementation: {key: statistics.median(run[key] for run in results) for key in results[0]}
        for implementation, results in runs.items()
    }
    is_new = not OUT.exists()
    with open(OUT, "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(["text", "bytes", "way", "seconds", "cpu_seconds", "speedup", "peak_mb", "cores", "python"])
        for implementation, median in medians.items():
            seconds, cpu, peak = median["seconds"], median["cpu_seconds"], median["peak_mb"]
            ratio = medians["fairseq"]["seconds"] / seconds
            row = [name, size, implementation, f"{seconds:.3f}", f"{cpu:.3f}", f"{ratio:.2f}", f"{peak:.0f}"]
            writer.writerow([*row, os.cpu_count(), platform.python_version()])
            speed = f"{size / 1e6 / seconds:.2f} MB/s, {size / 1e6 / cpu:.2f} MB per CPU second"
            print(f"{name}, {implementation}: {speed}, {ratio:.2f} times fairseq, {peak:.0f} MB")


if __name__ == "__main__":
    main()
