"""Small valid inputs of every kind for ``odd_inputs.py``, damaged ones, and valid command lines of every command."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

SMALL = "--tokens 16 --updates 2 --warmup 1 --batch-sentences 4 --device cpu"
TINY = "-- --decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --decoder-attention-heads 4 --decoder-layers 1"

# Command lines that succeed within seconds. {f} is the folder of fixtures, {o} a folder two levels deep that does not
# exist yet. train and sweep pass the words after "--" to fairseq-train.
COMMANDS: dict[str, tuple[str, ...]] = {
    "prepare-stdlib": ("--source {f}/code --out {o}/d --vocab-size 300 --workers 1",),
    "prepare": (
        "{f}/texts --out {o}/d --vocab-size 300 --workers 1",
        "{f}/lines.jsonl --out {o}/d --vocab-size 300 --workers 1",
        "{f}/texts --out {o}/d --vocab-from {f}/data --workers 1",
    ),
    "prepare-corpus": ("wikitext103 --from {f}/wikitext --out {o}/d --tokenizer words --workers 1",),
    "prepare-questions": (
        "--train {f}/train.jsonl --valid {f}/valid.jsonl --out {o}/d --vocab-from {f}/data --name own",
        "rte --from {f}/rte --no-counts --out {o}/d --vocab-from {f}/data",
    ),
    "prepare-cloze": (
        "--train {f}/novels/a.txt --valid {f}/novels/b.txt --test {f}/novels/c.txt --tokens 256 --questions 8 "
        "--valid-questions 8 --out {o}/d --vocab-from {f}/data",
    ),
    "train": (
        "{f}/data --rpe alibi --out {o}/r " + f"{SMALL} {TINY}",
        "--algorithm copy:items=4 --rpe rope --out {o}/r --updates 2 --warmup 1 --batch-sentences 4 --device cpu "
        + TINY,
        "{f}/asked --rpe alibi --out {o}/r --tokens 96 --updates 2 --warmup 1 --batch-sentences 4 --device cpu " + TINY,
    ),
    "extend": ("{f}/rope.pt {f}/data --tokens 32 --out {o}/r --updates 2 --warmup 1 --batch-sentences 2 --device cpu",),
    "eval": (
        "{f}/alibi.pt {f}/data --lengths 16,32 --device cpu",
        "{f}/rope.pt {f}/data --lengths 16 --out {o}/e.jsonl",
    ),
    "sliding": ("{f}/alibi.pt {f}/data --windows 16 --stride 8 --first-tokens 64 --out {o}/s --device cpu",),
    "key-tokens": (
        "{f}/rope.pt {f}/data --short-context 8 --length 16 --alpha 0 --beta -99 --device cpu --out {o}/k.json",
    ),
    "context-use": ("{f}/alibi.pt {f}/data --lengths 16 --device cpu --out {o}/c",),
    "position-profile": ("{f}/alibi.pt {f}/data --length 16 --blocks 2 --device cpu --out {o}/p",),
    "longrope-search": (
        "{f}/rope.pt {f}/data --tokens 32 --population 4 --iterations 1 --samples 1 --device cpu --out {o}/l.jsonl",
    ),
    "eval-task": ("{f}/copy.pt --lengths 4 --batch-size 64 --device cpu --out {o}/a.jsonl --predictions {o}/p.jsonl",),
    "eval-questions": (
        "{f}/alibi.pt {f}/asked --lengths 96 --device cpu --out {o}/a.jsonl --predictions {o}/p",
        "{f}/alibi.pt {f}/asked --lengths 96 --device cpu --beam 2",
        "{f}/alibi.pt {f}/asked --lengths 96 --device cpu --answer-mode likelihood",
    ),
    "sweep": (
        "{f}/data --encodings alibi --lengths 16,32 --out {o}/s --jobs 1 " + f"{SMALL} {TINY}",
        "--recipe {f}/recipe.toml --out {o}/s --jobs 1 --device cpu",
        "{f}/data --encodings alibi --lengths 16 --out {o}/s --launcher dry-run " + SMALL,
    ),
    "report": ("{f}/sweep --out {o}/page.html",),
    "figures": ("alibi --length 8 --heads 2 --out {o}/f", "--checkpoint {f}/alibi.pt --query 4 --out {o}/f"),
    "verdict": ("alibi --heads 2", "--formula -2*log(n+1) --csv {o}/v.csv", "--checkpoint {f}/alibi.pt"),
    "trf": ("alibi --heads 2 --out {o}/t",),
    "erf": ("{f}/alibi.pt {f}/data --length 16 --blocks 2 --out {o}/e --device cpu",),
    "sensitivity": ("--train-length 8 --head-width 4 --out {o}/s",),
    "fire-fit": ("alibi --length 8 --heads 2 --out {o}/f.csv",),
    "bench": (
        "--encodings alibi --backends sdpa --lengths 8 --heads 2 --head-width 8 --repeats 1 --device cpu --out {o}/b",
    ),
    "selftest": ("--encodings alibi --backends sdpa --dtype fp32 --device cpu --out {o}/s",),
    "list": ("", "--names", "--algorithms"),
    "bias": ("alibi --length 4",),
    "user-dir": ("",),
}
# Records that a case changes, and commands that read them. Digests in "{f}/asked" are corrected after a change.
RECORDS: dict[str, tuple[str, ...]] = {
    "asked/answers.json": ("eval-questions", "train"),
    "asked/valid.rows.jsonl": ("eval-questions",),
    "asked/train.rows.jsonl": ("train",),
    "data/corpus.json": ("eval", "prepare", "train"),
    "sweep/sweep.json": ("report", "sweep"),
    "sweep/runs/alibi-seed1/eval.jsonl": ("report", "sweep"),
    "sweep/runs/alibi-seed1/checkpoints/run.json": ("report", "sweep"),
    "sweep/runs/alibi-seed1/checkpoints/environment.json": ("report",),
    "train.jsonl": ("prepare-questions",),
    "lines.jsonl": ("prepare",),
    "recipe.toml": ("sweep",),
    "measured/eval.jsonl": ("eval",),
    "measured/sliding.jsonl": ("sliding",),
}
# Further commands that read one of these records.
READERS: dict[str, str] = {
    "sweep/sweep.json": "sweep {f}/data --encodings alibi --lengths 16,32 --out {f}/sweep --jobs 1 "
    + f"{SMALL} {TINY}",
    "measured/eval.jsonl": "eval {f}/alibi.pt {f}/data --lengths 16,32 --device cpu --out {f}/measured/eval.jsonl",
    "measured/sliding.jsonl": "sliding {f}/alibi.pt {f}/data --windows 16 --stride 8 --first-tokens 64 --device cpu "
    "--out {f}/measured",
}
READERS |= {name: READERS["sweep/sweep.json"] for name in RECORDS if name.startswith("sweep/runs")}
# Files of which a case replaces, removes or adds bytes.
BINARIES = ("alibi.pt", "rope.pt", "copy.pt", "data/test.bin", "data/test.idx", "data/dict.txt", "data/spm.model")
BINARIES += ("asked/valid.bin", "asked/valid.idx", "rte/train.tsv", "train.jsonl", "recipe.toml", "module.py")

RECIPE = """title = "A small one"
paper = "none"
kind = "text"

[methods.alibi]
rpe = "alibi"

[methods.rope]
rpe = "rope"
rpe_eval = "rope:scaling=linear,factor=2"

[presets.laptop]
data = "{f}/data"
arch = "transformer_rpe_lm_tiny"
tokens = 16
updates = 2
warmup = 1
batch_sentences = 4
lr = 0.001
lengths = [16, 32]
seeds = [1]
extra = ["--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "32", "--decoder-layers", "1"]
"""
MODULE = '''"""An encoding of a user."""
from fairseq_rpe.encodings import DistanceBias, register


@register("own")
class Own(DistanceBias):
    """Falls with the distance."""

    formula = "-d"
    paper = "none"

    def bias(self, d):
        return -d.expand(self.heads, -1)
'''
NAMES_END = ("sin", "win", "la", "wick", "dris", "ton", "ley")
NAMES = ("Tamsin", "Bren", "Oswin", "Marla", "Fenwick", "Idris")


def words(command: str, folder: Path, out: Path) -> list[str]:
    """Return the words of a command line of this file."""
    return shlex.split(command.replace("{f}", str(folder)).replace("{o}", str(out)))


def fill(folder: Path, run: Callable[[list[str]], None]) -> None:
    """Write all fixtures into ``folder``; ``run`` runs a command line and raises an error if it fails."""
    folder.mkdir(parents=True)
    _write_texts(folder)
    for command in (
        "prepare {f}/texts --out {f}/data --vocab-size 400 --workers 1 --valid-fraction 0.2 --test-fraction 0.2",
        "prepare-questions --train {f}/train.jsonl --valid {f}/valid.jsonl --vocab-from {f}/data --out {f}/asked "
        "--name own",
        f"train {{f}}/data --rpe rope --out {{f}}/made/rope {SMALL} {TINY}",
        "train --algorithm copy:items=4 --rpe rope --out {f}/made/copy --updates 2 --warmup 1 "
        f"--batch-sentences 4 --device cpu {TINY}",
        READERS["sweep/sweep.json"],
    ):
        run(words(command, folder, folder))
    sweep = folder / "sweep/runs/alibi-seed1/checkpoints/checkpoint_last.pt"
    for name, path in {
        "rope": folder / "made/rope/checkpoint_last.pt",
        "copy": folder / "made/copy/checkpoint_last.pt",
        "alibi": sweep,
    }.items():
        shutil.copyfile(path, folder / f"{name}.pt")
    shutil.rmtree(folder / "made")
    for name in ("eval", "sliding"):
        run(words(READERS[f"measured/{name}.jsonl"], folder, folder))
    _write_odd_ones(folder / "odd", folder / "alibi.pt")


def _write_texts(folder: Path) -> None:
    """Write texts, questions, rows of a benchmark, a recipe and a module."""
    for name in ("texts", "code", "novels", "wikitext", "rte"):
        (folder / name).mkdir()
    for i in range(60):
        lines = [f"Text {i} of {NAMES[(i + k) % 6]}: the river rose by {i * k} feet in March." for k in range(12)]
        (folder / "texts" / f"{i}.txt").write_text("\n".join(lines) + "\n")
        (folder / "code" / f"m{i}.py").write_text(f"def f{i}(x):\n    return x + {i}\n" * 9)
    rows = [json.dumps({"text": f"Row {i}: {NAMES[i % 6]} mended the old wheel of mill {i}."}) for i in range(200)]
    (folder / "lines.jsonl").write_text("\n".join(rows) + "\n")
    for number, name in enumerate("abc"):
        generator = random.Random(number)
        people = [first + second for first in ("Tam", "Bren", "Os", "Mar", "Fen") for second in NAMES_END]
        sentences = (f"Then the old miller saw {generator.choice(people)} near the mill." for _ in range(2000))
        (folder / "novels" / f"{name}.txt").write_text("\n".join(sentences) + "\n")
    for split in ("train", "valid", "test"):
        lines = [f" = Heading {split} {i} =\n {NAMES[i % 6]} went to the mill ." for i in range(40)]
        (folder / "wikitext" / f"wiki.{split}.tokens").write_text("\n".join(lines) + "\n")
    for split, start in (("train", 0), ("valid", 40)):
        lines = [json.dumps(_question(i)) for i in range(start, start + 12)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    for split in ("train", "dev"):
        lines = [f"{i}\tThe river {i} rose.\tIt rose.\t{('entailment', 'not_entailment')[i % 2]}" for i in range(20)]
        (folder / "rte" / f"{split}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *lines]) + "\n")
    (folder / "recipe.toml").write_text(RECIPE.replace("{f}", str(folder)))
    (folder / "module.py").write_text(MODULE)


def _question(i: int) -> Mapping[str, object]:
    return {
        "id": f"q{i}",
        "prompt": "Who mended the wheel?\n",
        "document": f"In March {NAMES[i % 6]} mended the wheel of mill {i}.",
        "cue": "\nAnswer:",
        "answers": [NAMES[i % 6]],
        "choices": list(NAMES),
    }


def _write_odd_ones(odd: Path, checkpoint: Path) -> None:
    """Write files that no command accepts as input; ``PATHS`` of odd_values.py has their names."""
    odd.mkdir()
    (odd / "folder").mkdir()
    (odd / "empty").touch()
    (odd / "text").write_text("no checkpoint, no JSON, no corpus\n")
    (odd / "binary").write_bytes(bytes(range(256)) * 16)
    (odd / "cut.pt").write_bytes(checkpoint.read_bytes()[:-500])
    (odd / "loop").symlink_to("loop")
    (odd / "nothing").symlink_to("absent")
    os.mkfifo(odd / "pipe")
    (odd / "sparse").touch()
    os.truncate(odd / "sparse", 1 << 40)
    (odd / "unreadable").write_text("secret\n")
    (odd / "unreadable").chmod(0)
