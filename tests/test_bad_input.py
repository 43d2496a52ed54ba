"""Bad input of every kind to every command: one line that names the culprit, and nothing left behind.

A case is a line of ``CASES``: a command, an arrow, and a text that its line must hold.
``{good}``, ``{data}`` and the files of ``{zoo}`` are made by ``fill_zoo``; a command runs in an empty folder, ``{here}``.
Every command must end with status 2, exactly one line ``error: …`` on standard error, and an empty folder.
"""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import checkpoint_with

from fairseq_rpe.cli.main import main

LONG = "x" * 300
SMALL = "--tokens 32 --updates 2 --device cpu"


def fill_zoo(zoo: Path, corpus: Path, state: dict) -> None:
    """Good files, and one of every kind of bad ones."""
    shutil.copytree(corpus, zoo / "data")
    (zoo / "made").mkdir()
    shutil.move(checkpoint_with(state, zoo / "made"), zoo / "good.pt")
    (zoo / "folder").mkdir()
    (zoo / "loop").symlink_to("loop")
    (zoo / "empty").write_bytes(b"")
    (zoo / "text").write_text("no checkpoint, no JSON, no corpus\n")
    (zoo / "garbage").write_bytes(np.random.default_rng(0).bytes(4096))
    whole = (zoo / "good.pt").read_bytes()
    (zoo / "cut.pt").write_bytes(whole[: len(whole) // 2])
    damage_data(zoo, corpus)
    write_texts(zoo)
    write_modules(zoo)
    write_sweeps(zoo)


def damage_data(zoo: Path, corpus: Path) -> None:
    index = (corpus / "test.idx").read_bytes()
    damage: dict[str, dict[str, bytes | None]] = {
        "no_dict": {"dict.txt": None},
        "empty_dict": {"dict.txt": b""},
        "odd_dict": {"dict.txt": b"\xff\xfe\x00word\n"},
        "no_test": {"test.idx": None},
        "no_bin": {"test.bin": None},
        "folder_bin": {"test.bin": None},
        "odd_index": {"test.idx": b"nonsense" * 100},
        "cut_index": {"test.idx": index[:50]},
        "new_index": {"test.idx": index[:9] + b"\x07" + index[10:]},
        "cut_bin": {"test.bin": (corpus / "test.bin").read_bytes()[:100]},
        "odd_manifest": {"corpus.json": b"[1, 2]"},
        "cut_manifest": {"corpus.json": b'{"made_by": '},
        "list_manifest": {"corpus.json": b'{"made_by": ["x"], "splits": [1], "files": 3}'},
    }
    for name, files in damage.items():
        shutil.copytree(corpus, zoo / name)
        for file, content in files.items():
            (zoo / name / file).unlink(missing_ok=True)
            if content is not None:
                (zoo / name / file).write_bytes(content)
    (zoo / "folder_bin" / "test.bin").mkdir()


def write_texts(zoo: Path) -> None:
    (zoo / "texts").mkdir()
    for number in range(40):
        (zoo / "texts" / f"{number}.txt").write_text(f"text number {number}\nof some words\n")
    for name, content in {
        "odd.jsonl": b'{"text": "fine"}\n{"text": 7}\n',
        "nofield.jsonl": b'{"words": "fine"}\n',
        "latin.txt": "caf\xe9 au lait\n".encode("latin-1") * 50,
        "odd.parquet": b"PAR1 this is none",
        "odd.zip": b"PK\x03\x04 this is none",
        "cut.txt.gz": gzip.compress(b"some text\n" * 999)[:40],
        "odd.toml": b"name = [\n",
        "bad_row.jsonl": b'{"length": 64}\n',
        "binary.jsonl": b'{"length": 64}\n\xff\xfe\x00\n',
        "list.jsonl": b"[1, 2, 3]\n",
        "deep.jsonl": b"[" * 200_000 + b"\n",
    }.items():
        (zoo / name).write_bytes(content)


def write_modules(zoo: Path) -> None:
    for name, code in {
        "exits.py": "import sys\nsys.exit(0)\n",
        "raises.py": "raise RuntimeError('no luck')\n",
        "misspelt.py": "def f(:\n",
        "binary.py": "\0\0\0",
        "imports.py": "import a_package_that_is_not_there\n",
    }.items():
        (zoo / name).write_text(code)


def write_sweeps(zoo: Path) -> None:
    """Folders of sweeps: a finished one of made-up numbers, and damaged ones."""
    for name, content in {
        "sweep_empty": "{}",
        "sweep_list": "[1]",
        "sweep_cut": '{"settings": ',
        "sweep_deep": "[" * 200_000,
        "sweep_binary": "\0\1\2",
    }.items():
        (zoo / name).mkdir()
        (zoo / name / "sweep.json").write_text(content)
    row = {"checkpoint": "c", "subset": "test", "loss_base2": 1.0, "tokens": 99}
    rows = [json.dumps({**row, "length": length, "ppl": ppl}) for length, ppl in ((64, 10.0), (128, 11.0))]
    state = {"settings": {"tokens": 64, "subset": "test"}, "encodings": ["alibi"], "seeds": [1], "lengths": [64, 128]}
    for name, lines in {
        "sweep": [*rows],
        "sweep_ppl": [rows[0], rows[1].replace("11.0", '"x"')],
        "sweep_negative": [rows[0], rows[1].replace("11.0", "-11.0")],
        "sweep_nan": [rows[0], rows[1].replace("11.0", "NaN")],
        "sweep_row": [*rows, "\x00"],
        "sweep_deep_row": [*rows, "[" * 200_000],
    }.items():
        run = zoo / name / "runs" / "alibi-seed1"
        (run / "checkpoints").mkdir(parents=True)
        (zoo / name / "sweep.json").write_text(json.dumps(state))
        (run / "checkpoints" / "run.json").write_text(json.dumps({"finished": {"checkpoint": "c"}}))
        (run / "eval.jsonl").write_text("\n".join(lines) + "\n")


CASES = r"""
# eval
eval {zoo}/absent.pt {data} --lengths 64  -> checkpoint absent.pt does not exist
eval {zoo}/folder {data} --lengths 64  -> checkpoint folder is not a file: name a file
eval {zoo}/empty {data} --lengths 64  -> is not a checkpoint, or damaged
eval {zoo}/text {data} --lengths 64  -> is not a checkpoint, or damaged
eval {zoo}/garbage {data} --lengths 64  -> is not a checkpoint, or damaged
eval {zoo}/cut.pt {data} --lengths 64  -> is not a checkpoint, or damaged
eval {zoo}/loop {data} --lengths 64  -> checkpoint loop is a link that leads back to itself
eval {zoo}/text/below.pt {data} --lengths 64  -> checkpoint text/below.pt is a file, or below one
eval {long} {data} --lengths 64  -> too long a name
eval {good} {zoo}/absent --lengths 64  -> data folder absent does not exist: make one, e.g. with fairseq-rpe
eval {good} {zoo}/text --lengths 64  -> data folder text does not exist: make one, e.g. with fairseq-rpe
eval {good} {zoo}/loop --lengths 64  -> data folder loop does not exist: make one, e.g. with fairseq-rpe
eval {good} {zoo}/folder --lengths 64  -> folder has no dict.txt: it is not a binarised data folder with test
eval {good} {long} --lengths 64  -> too long a name
eval {good} {zoo}/text/below --lengths 64  -> data folder text/below does not exist: make one, e.g. with fairseq-rpe
eval {good} {zoo}/no_dict --lengths 64  -> no_dict has no dict.txt: it is not a binarised data folder with test
eval {good} {zoo}/empty_dict --lengths 64  -> empty_dict/dict.txt line 1 is missing, the dictionary is empty: use the
eval {good} {zoo}/odd_dict --lengths 64  -> odd_dict/dict.txt line 1 is not UTF-8: use the file that the
eval {good} {zoo}/no_test --lengths 64  -> no_test has no test.idx: it is not a binarised data folder with test
eval {good} {zoo}/no_bin --lengths 64  -> no_bin has no test.bin: it is not a binarised data folder with test
eval {good} {zoo}/folder_bin --lengths 64  -> folder_bin has no test.bin: it is not a binarised data folder with test
eval {good} {zoo}/odd_index --lengths 64  -> odd_index/test.idx is not an mmap index: binarise again with
eval {good} {zoo}/cut_index --lengths 64  -> cut_index/test.idx is cut short: binarise the data again
eval {good} {zoo}/new_index --lengths 64  -> new_index/test.idx is an index of version 7, not 1: binarise the data
eval {good} {zoo}/cut_bin --lengths 64  -> cut_bin/test.bin does not hold the tokens that its index counts: binarise the
eval {good} {zoo}/odd_manifest --lengths 64  -> odd_manifest/corpus.json line 1 is not a JSON object (it is a list)
eval {good} {zoo}/cut_manifest --lengths 64  -> cut_manifest/corpus.json line 1 is not a JSON object (Expecting value at
eval {good} {zoo}/list_manifest --lengths 64  -> list_manifest/corpus.json: made_by of the corpus must be text, not
eval {good} {data} --lengths 64 --subset exam  -> data has no exam.idx: it is not a binarised data folder with exam
eval {good} {data} --lengths 64 --subset ''  -> '' is not the name of a split
eval {good} {data} --lengths 64 --subset ../test  -> '../test' is not the name of a split
eval {good} {data} --lengths 0  -> --lengths: '0' is not a whole number from 1 to 1000000000
eval {good} {data} --lengths -5  -> --lengths: '-5' is not a whole number from 1 to 1000000000
eval {good} {data} --lengths 64,64  -> --lengths: '64,64' gives a number twice
eval {good} {data} --lengths 64,,128  -> --lengths: '64,,128' has a comma with no number beside it
eval {good} {data} --lengths ''  -> --lengths: is empty: give at least one number
eval {good} {data} --lengths sixty  -> --lengths: 'sixty' is not a whole number from 1 to 1000000000
eval {good} {data} --lengths 1e3  -> --lengths: '1e3' is not a whole number from 1 to 1000000000
eval {good} {data} --lengths 64.5  -> --lengths: '64.5' is not a whole number from 1 to 1000000000
eval {good} {data} --lengths 99999999999999999999999  -> --lengths: '99999999999999999999999' is not a whole number from 1 to
eval {good} {data} --lengths 64 --max-tokens 0  -> --max-tokens: '0' is not a whole number from 1 to 1000000000
eval {good} {data} --lengths 64 --max-tokens 99999999999999999999  -> --max-tokens: '99999999999999999999' is not a whole number from 1 to
eval {good} {data} --lengths 64 --max-tokens 10  -> --max-tokens 10 is less than length 64: raise it
eval {good} {data} --lengths 64 --batch-size 0  -> --batch-size: '0' is not a whole number from 1 to 1000000000
eval {good} {data} --lengths 64 --batch-size 99999999999999999999  -> --batch-size: '99999999999999999999' is not a whole number from 1 to
eval {good} {data} --lengths 64 --rpe typ1  -> unknown encoding 'typ1' (did you mean 'type1'?); known: alibi, bipe
eval {good} {data} --lengths 64 --rpe ''  -> --rpe: is empty: write name or name:key=value,key=value
eval {good} {data} --lengths 64 --rpe alibi:x=1  -> 'alibi' has no option 'x'; its options and defaults: none
eval {good} {data} --lengths 64 --rpe kerple_log  -> the checkpoint does not fit this model (Missing key(s) in state_dict
eval {good} {data} --lengths 64 --rpe window:window=99999999999999999999999  -> option 'window' of 'window' must be at most 1000000000, not
eval {good} {data} --lengths 64 --rpe window:window=0  -> option 'window' of 'window' must be at least 1, not 0
eval {good} {data} --lengths 64 --positions wrap  -> unknown position transform 'wrap' (did you mean 'warp'?); known: cape
eval {good} {data} --lengths 64 --positions interpolate:ratio=0  -> option 'ratio' of 'interpolate' must be more than 0 and at most 1, not
eval {good} {data} --lengths 64 --positions interpolate:ratio=1/0  -> option 'ratio' of 'interpolate' wants a number or auto, not '1/0'
eval {good} {data} --lengths 64 --positions offset:by=1e400  -> option 'by' of 'offset' wants a whole number, not '1e400'
eval {good} {data} --lengths 64 --positions randomized:max=3  -> option 'max' of 'randomized' is 3 but a row has 64 tokens: raise max to
eval {good} {data} --lengths 64 --device gpu  -> --device: invalid choice: 'gpu' (choose from 'auto', 'cpu', 'cuda')
eval {good} {data} --lengths 64 --device cuda  -> --device cuda: no GPU is visible here: drop the flag, or check
eval {good} {data} --lengths 64 --compute-dtype fp16  -> --compute-dtype: invalid choice: 'fp16' (choose from 'fp32', 'bf16')
eval {good} {data} --lengths 64 --attention-backend flash  -> unknown attention backend 'flash'; known: auto, reference, sdpa, flex
eval {good} {data} --lengths 64 --attention-prune 2  -> pruning leaves out at most EPS of each query's attention: 0 < EPS < 1
eval {good} {data} --lengths 64 --attention-prune -1  -> pruning leaves out at most EPS of each query's attention: 0 < EPS < 1
eval {good} {data} --lengths 64 --attention-prune nan  -> pruning leaves out at most EPS of each query's attention: 0 < EPS < 1
eval {good} {data} --lengths 64 --engine fairseq --attention-prune 0.1  -> --attention-prune goes with --engine fast: fairseq-eval-lm cannot
eval {good} {data} --lengths 64 --engine fairseq --attention-backend sdpa  -> --attention-backend goes with --engine fast: fairseq-eval-lm takes the
eval {good} {data} --lengths 64 --engine turbo  -> --engine: invalid choice: 'turbo' (choose from 'fast', 'fairseq')
eval {good} {data} --lengths 64 --rpe-module {zoo}/absent.py  -> --rpe-module absent.py does not exist: name a Python file
eval {good} {data} --lengths 64 --rpe-module {zoo}/folder  -> --rpe-module folder is not a file: name a Python file
eval {good} {data} --lengths 64 --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
eval {good} {data} --lengths 64 --rpe-module {zoo}/raises.py  -> --rpe-module raises.py, line 1: RuntimeError: no luck; fix that file
eval {good} {data} --lengths 64 --rpe-module {zoo}/misspelt.py  -> --rpe-module misspelt.py, line 1: SyntaxError: invalid syntax
eval {good} {data} --lengths 64 --rpe-module {zoo}/binary.py  -> --rpe-module binary.py: SyntaxError: source code string cannot contain
eval {good} {data} --lengths 64 --rpe-module {zoo}/imports.py  -> --rpe-module imports.py, line 1: ModuleNotFoundError: No module named
eval {good} {data} --lengths 64 --out {zoo}/folder  -> --out folder is a folder: name a file
eval {good} {data} --lengths 64 --out {zoo}/text/below  -> --out text/below: text is a file, not a folder
eval {good} {data} --lengths 64 --out {zoo}/loop  -> --out loop is a link that leads back to itself: remove it or name
eval {good} {data} --lengths 64 --out /proc/nothing/x.jsonl  -> --out /proc/nothing/x.jsonl: /proc/nothing does not exist: name another
eval {good} {data} --lengths 64 --out {long}  -> too long a name
eval {good} {data} --lengths 64 --out ''  -> --out . is a folder: name a file
eval {good} {data} --lengths 64 --out {zoo}/bad_row.jsonl  -> bad_row.jsonl line 1: the result lacks checkpoint: delete that line or
eval {good} {data} --lengths 64 --out {zoo}/binary.jsonl  -> binary.jsonl line 2 is not a JSON object (not UTF-8): delete that line or
eval {good} {data} --lengths 64 --out {zoo}/list.jsonl  -> list.jsonl line 1 is not a JSON object (it is a list): delete that line or
eval {good} {data} --lengths 64 --out {zoo}/deep.jsonl  -> deep.jsonl line 1 is not a JSON object (nested too deep): delete that line
eval {good} {data} --lengths 64 --out {zoo}/text  -> text line 1 is not a JSON object (Expecting value at character 1): delete
eval {good} {data} --lengths 64 --log {zoo}/folder  -> --log folder is a folder: name a file
eval {good} {data} --lengths 64 --log {zoo}/text/below  -> --log text/below: text is a file, not a folder
eval {good} {data} --lengths 64 --log {zoo}/loop  -> --log loop is a link that leads back to itself: remove it or name
eval {good} {data} --lengths 64 --log /proc/nothing/x  -> --log /proc/nothing/x: /proc/nothing does not exist: name another place
eval {good} {data} --lengths 64 --log {long}  -> too long a name
eval {good} {zoo}/absent  -> data folder absent does not exist: make one, e.g. with fairseq-rpe
eval {good}  -> the following arguments are required: DATA
eval  -> the following arguments are required: CHECKPOINT, DATA
eval {good} {data} --lengths 64 --length 3  -> unrecognized arguments: --length 3
eval {good} {data} --lengths 64 -- --seed 1  -> 'eval' takes no further flags after --: only train and sweep do
eval {good}:{good} {data} --lengths 64  -> checkpoint good.pt:good.pt does not exist
# sliding
sliding {zoo}/absent.pt {data}  -> checkpoint absent.pt does not exist
sliding {zoo}/empty {data}  -> is not a checkpoint, or damaged
sliding {good} {zoo}/absent  -> data folder absent does not exist: make one, e.g. with fairseq-rpe
sliding {good} {zoo}/folder_bin  -> folder_bin has no test.bin: it is not a binarised data folder with test
sliding {good} {good} {data}  -> a checkpoint is named twice: leave one out
sliding {good} {data} --windows 0  -> --windows: '0' is not a whole number from 1 to 1000000000
sliding {good} {data} --windows 99999999999999999999  -> --windows: '99999999999999999999' is not a whole number from 1 to
sliding {good} {data} --stride 0  -> --stride: '0' is not a whole number from 1 to 1000000000
sliding {good} {data} --windows 16 --stride 17  -> --stride 17 is more than window 16: tokens in between would be left out
sliding {good} {data} --first-tokens 0  -> --first-tokens: '0' is not a whole number from 1 to 1000000000
sliding {good} {data} --first-tokens 99999999999999999999  -> --first-tokens: '99999999999999999999' is not a whole number from 1 to
sliding {good} {data} --workers -1  -> --workers: '-1' is not a whole number from 0 to 256
sliding {good} {data} --windows 16 --max-tokens 99999999999999999999  -> --max-tokens: '99999999999999999999' is not a whole number from 1 to
sliding {good} {data} --out {zoo}/text  -> --out text: text is a file, not a folder
sliding {good} {data} --out {zoo}/text/below  -> --out text/below: text is a file, not a folder
sliding {good} {data} --out {zoo}/loop  -> --out loop is a link that leads back to itself
sliding {good} {data} --out /proc/nothing  -> --out /proc/nothing does not exist: name another place
sliding {good} {data} --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
sliding {good} {data} --positions wrap  -> unknown position transform 'wrap' (did you mean 'warp'?); known: cape
sliding {good} {data} --subset exam  -> data has no exam.idx: it is not a binarised data folder with exam
# erf
erf {zoo}/absent.pt {data}  -> checkpoint absent.pt does not exist
erf {zoo}/text {data}  -> is not a checkpoint, or damaged
erf {good} {zoo}/absent  -> data folder absent does not exist: make one, e.g. with fairseq-rpe
erf {good} {data} --length 0  -> --length: '0' is not a whole number from 1 to 1000000000
erf {good} {data} --length 99999999999999999999  -> --length: '99999999999999999999' is not a whole number from 1 to
erf {good} {data} --blocks 0  -> --blocks: '0' is not a whole number from 1 to 1000000000
erf {good} {data} --blocks 99999999999999999999  -> --blocks: '99999999999999999999' is not a whole number from 1 to
erf {good} {data} --rows 99999999999  -> --rows: '99999999999' is not a whole number from 1 to 1000000000
erf {good} {data} --length 16 --blocks 2 --rows 17  -> --rows 17 is more than a block of 16 tokens
erf {good} {data} --epsilon 0  -> --epsilon 0 is not between 0 and 1: it is the part of the attention
erf {good} {data} --epsilon 2  -> --epsilon 2 is not between 0 and 1: it is the part of the attention
erf {good} {data} --epsilon nan  -> --epsilon nan is not between 0 and 1: it is the part of the attention
erf {good} {data} --epsilon ''  -> --epsilon: is empty: give at least one number
erf {good} {data} --epsilon 0.1,0.1  -> --epsilon: '0.1,0.1' gives a number twice
erf {good} {data} --batch-size 0  -> --batch-size: '0' is not a whole number from 1 to 1000000000
erf {good} {data} --out {zoo}/text  -> --out text: text is a file, not a folder
erf {good} {data} --out {zoo}/text/below  -> --out text/below: text is a file, not a folder
erf {good} {data} --out {zoo}/loop  -> --out loop is a link that leads back to itself
erf {good} {data} --out {long}  -> too long a name
erf {good} {data} --delta --length 16 --blocks 2 --out {zoo}/text  -> --out text: text is a file, not a folder
erf {good} {data} --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
# accuracy
accuracy {good}  -> good.pt was not trained on an algorithmic task: fairseq-rpe eval is for
accuracy {zoo}/absent.pt  -> checkpoint absent.pt does not exist
accuracy {zoo}/garbage  -> is not a checkpoint, or damaged
accuracy {good} --lengths 0  -> --lengths: '0' is not a whole number from 1 to 1000000000
accuracy {good} --split exam  -> --split: invalid choice: 'exam' (choose from 'train', 'valid', 'test')
accuracy {good} --out {zoo}/folder  -> good.pt was not trained on an algorithmic task: fairseq-rpe eval is for
accuracy {good} --out {zoo}/text/below  -> good.pt was not trained on an algorithmic task: fairseq-rpe eval is for
accuracy {good} --batch-size 0  -> --batch-size: '0' is not a whole number from 1 to 1000000000
accuracy {good} --unit bytes  -> --unit: invalid choice: 'bytes' (choose from 'items', 'tokens')
# verdict
verdict  -> give either SPEC…, or --formula, or --checkpoint
verdict typ1  -> unknown encoding 'typ1' (did you mean 'type1'?); known: alibi, bipe
verdict window:window=99999999999999999999999  -> option 'window' of 'window' must be at most 1000000000, not
verdict alibi --heads 0  -> --heads: '0' is not a whole number from 1 to 1024
verdict alibi --heads 1000000000  -> --heads: '1000000000' is not a whole number from 1 to 1024
verdict alibi --heads 99999999999999999999999  -> --heads: '99999999999999999999999' is not a whole number from 1 to 1024
verdict alibi --head-width 1000000000  -> --head-width: '1000000000' is not a whole number from 1 to 65536
verdict alibi --head-width 0  -> --head-width: '0' is not a whole number from 1 to 65536
verdict alibi --epsilon 0  -> --epsilon 0 is not between 0 and 1: it is the part of the attention
verdict alibi --epsilon 1  -> --epsilon 1 is not between 0 and 1: it is the part of the attention
verdict alibi --epsilon nan  -> --epsilon: 'nan' is not a number
verdict alibi --epsilon x  -> --epsilon: 'x' is not a number
verdict --formula ''  -> the formula is empty: give an expression in n, for example -2*log(n+1)
verdict --formula 'n+'  -> the formula 'n+' does not parse: write products as 2*n and powers as
verdict --formula 'x*n'  -> unknown name 'x' in the formula (the distance is called n); known: n
verdict --formula '__import__("os").system("true")'  -> '__import__("os").system("true")' cannot stand in a formula: use
verdict --formula 'open("x","w")'  -> unknown name 'open' in the formula; known: n, pi, e, log, exp, sin
verdict --formula '9**9**9**9*n'  -> the formula '9**9**9**9*n' has no real value at n = 0, or none that can
verdict --formula '-n' alibi  -> give either SPEC…, or --formula, or --checkpoint
verdict --formula '-n' --csv {zoo}/folder  -> --csv folder is a folder: name a file
verdict --formula '-n' --csv {zoo}/text/below  -> --csv text/below: text is a file, not a folder
verdict --formula '-n' --csv {zoo}/loop  -> --csv loop is a link that leads back to itself: remove it or name
verdict --formula '-n' --csv {long}  -> too long a name
verdict --checkpoint {zoo}/absent.pt  -> checkpoint absent.pt does not exist
verdict --checkpoint {zoo}/folder  -> checkpoint folder is not a file: name a file
verdict --checkpoint {zoo}/empty  -> is not a checkpoint, or damaged
verdict --checkpoint {zoo}/text  -> is not a checkpoint, or damaged
verdict --checkpoint {zoo}/garbage  -> is not a checkpoint, or damaged
verdict --checkpoint {zoo}/cut.pt  -> is not a checkpoint, or damaged
verdict --checkpoint {zoo}/loop  -> checkpoint loop is a link that leads back to itself
verdict --checkpoint {good} alibi  -> give either SPEC…, or --formula, or --checkpoint
verdict alibi --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
verdict alibi --rpe-module {zoo}/folder  -> --rpe-module folder is not a file: name a Python file
# trf
trf typ1  -> unknown encoding 'typ1' (did you mean 'type1'?); known: alibi, bipe
trf nope  -> nothing to draw: none of these sums converges, so there is no
trf  -> give either SPEC…, or --formula, or --checkpoint
trf alibi --quantised 0  -> --quantised: '0' is not a whole number from 1 to 1000000000
trf alibi --quantised 99999999999999999999  -> --quantised: '99999999999999999999' is not a whole number from 1 to
trf alibi --out {zoo}/text  -> --out text: text is a file, not a folder
trf alibi --out {zoo}/text/below  -> --out text/below: text is a file, not a folder
trf alibi --out {zoo}/loop  -> --out loop is a link that leads back to itself
trf alibi --out /proc/nothing  -> --out /proc/nothing does not exist: name another place
trf --checkpoint {zoo}/garbage  -> is not a checkpoint, or damaged
trf --formula 'n+'  -> the formula 'n+' does not parse: write products as 2*n and powers as
# fire-fit
fire-fit  -> the following arguments are required: SPEC
fire-fit typ1  -> unknown encoding 'typ1' (did you mean 'type1'?); known: alibi, bipe
fire-fit nope  -> 'nope' is not a bias of the distance alone, so there is nothing to fit
fire-fit alibi --length 0  -> --length: '0' is not a whole number from 1 to 1000000000
fire-fit alibi --length 99999999999999999999  -> --length: '99999999999999999999' is not a whole number from 1 to
fire-fit alibi --length 1e20  -> --length: '1e20' is not a whole number from 1 to 1000000000
fire-fit alibi --heads 1000000000 --model-width 1000000000  -> --heads: '1000000000' is not a whole number from 1 to 1024
fire-fit alibi --model-width 0  -> --model-width: '0' is not a whole number from 1 to 65536
fire-fit alibi --seed 1000000000000000000000000000000  -> --seed: '1000000000000000000000000000000' is not a whole number from 1
fire-fit alibi --seed -1  -> --seed: '-1' is not a whole number from 1 to 4294967295
fire-fit alibi --out {zoo}/folder  -> --out folder is a folder: name a file
fire-fit alibi --out {zoo}/text/below  -> --out text/below: text is a file, not a folder
fire-fit alibi --out {zoo}/loop  -> --out loop is a link that leads back to itself: remove it or name
fire-fit alibi --figure {zoo}/folder  -> --figure folder is a folder: name a file
fire-fit alibi --figure {zoo}/new.gif  -> name a file that ends with .png or .pdf
fire-fit alibi --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
# profile
profile typ1  -> unknown encoding 'typ1' (did you mean 'type1'?); known: alibi, bipe
profile alibi --length 100000000000  -> --length: '100000000000' is not a whole number from 1 to 16777216
profile alibi --length 1e20  -> --length: '1e20' is not a whole number from 1 to 16777216
profile alibi --length 0  -> --length: '0' is not a whole number from 1 to 16777216
profile alibi --heads 1000000000 --width 1000000000  -> --heads: '1000000000' is not a whole number from 1 to 1024
profile alibi --heads 0  -> --heads: '0' is not a whole number from 1 to 1024
profile alibi --heads 3 --width 128  -> 3 heads do not divide a model width of 128: choose another number of
profile window:window=99999999999999999999999  -> option 'window' of 'window' must be at most 1000000000, not
profile alibi --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
profile alibi --rpe-module {zoo}/raises.py  -> --rpe-module raises.py, line 1: RuntimeError: no luck; fix that file
profile t5_bias:buckets=99999999999999  -> option 'buckets' of 't5_bias' must be at most 65536, not 99999999999999
profile fire:hidden_width=99999999999999  -> 'fire' has no option 'hidden_width' (did you mean 'hidden'?); its
# list
list --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
list --rpe-module {zoo}/folder  -> --rpe-module folder is not a file: name a Python file
list --rpe-module {zoo}/binary.py  -> --rpe-module binary.py: SyntaxError: source code string cannot contain
list --positions --algorithms  -> not allowed with
# user-dir
user-dir extra  -> unrecognized arguments: extra
# report
report  -> the following arguments are required: DIR
report {zoo}/absent  -> absent holds no sweep.json: name the --out folder of a sweep
report {zoo}/text  -> text holds no sweep.json: name the --out folder of a sweep
report {zoo}/loop  -> loop holds no sweep.json: name the --out folder of a sweep
report {zoo}/folder  -> folder holds no sweep.json: name the --out folder of a sweep
report {long}  -> too long a name
report {zoo}/sweep_empty  -> sweep_empty/sweep.json: the sweep lacks settings: restore it or delete
report {zoo}/sweep_list  -> sweep_list/sweep.json line 1 is not a JSON object (it is a list): restore
report {zoo}/sweep_cut  -> sweep_cut/sweep.json line 1 is not a JSON object (Expecting value at
report {zoo}/sweep_deep  -> sweep_deep/sweep.json line 1 is not a JSON object (nested too deep)
report {zoo}/sweep_binary  -> sweep_binary/sweep.json line 1 is not a JSON object (Expecting value at
report {zoo}/sweep_ppl  -> sweep_ppl/runs/alibi-seed1/eval.jsonl line 2: ppl of the result must be
report {zoo}/sweep_row  -> sweep_row/runs/alibi-seed1/eval.jsonl line 3 is not a JSON object
report {zoo}/sweep --out {zoo}/folder  -> --out folder is a folder: name a file
report {zoo}/sweep --out {zoo}/text/below  -> --out text/below: text is a file, not a folder
report {zoo}/sweep --out {zoo}/loop  -> --out loop is a link that leads back to itself: remove it or name
report {zoo}/sweep --delta -1  -> --delta: '-1' is not a number above 0
report {zoo}/sweep --delta nan  -> --delta: 'nan' is not a number above 0
report {zoo}/sweep --delta x  -> --delta: 'x' is not a number above 0
report {zoo}/sweep --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
# figures
figures typ1  -> unknown encoding 'typ1' (did you mean 'type1'?); known: alibi, bipe
figures nope  -> 'nope' has no additive bias to draw: leave it out
figures alibi --length 0  -> --length: '0' is not a whole number from 1 to 1000000000
figures alibi --length 99999999999999999999  -> --length: '99999999999999999999' is not a whole number from 1 to
figures alibi --length 100000000  -> --length 100000000 is out of range: choose 2 to 16384
figures alibi --heads 0  -> --heads: '0' is not a whole number from 1 to 1024
figures alibi --heads 1000000000  -> --heads: '1000000000' is not a whole number from 1 to 1024
figures alibi --head 9  -> --head 9: there are 8 heads
figures alibi --seed -1  -> --seed: '-1' is not a whole number from 1 to 4294967295
figures alibi --seed 1000000000000000000000000000000  -> --seed: '1000000000000000000000000000000' is not a whole number from 1
figures alibi --out {zoo}/text  -> --out text: text is a file, not a folder: name another one
figures alibi --out {zoo}/text/below  -> --out text/below: text is a file, not a folder: name another one
figures alibi --out {zoo}/loop  -> --out loop is a link that leads back to itself
figures --sweep {zoo}/absent  -> absent holds no sweep.json: name the --out folder of a sweep
figures --sweep {zoo}/text  -> text holds no sweep.json: name the --out folder of a sweep
figures --sweep {zoo}/sweep_empty  -> sweep_empty/sweep.json: the sweep lacks settings: restore it or delete
figures --sweep {zoo}/sweep_deep  -> sweep_deep/sweep.json line 1 is not a JSON object (nested too deep)
figures --sweep {zoo}/sweep --data {zoo}/absent  -> sweep holds no finished run of seed 1: run its sweep first or choose
figures alibi --sweep {zoo}/sweep  -> name either specs or --sweep DIR, not both
figures alibi --data {data}  -> --data is for the empirical receptive field of checkpoints: give
figures --checkpoint {zoo}/absent.pt  -> checkpoint absent.pt does not exist
figures --checkpoint {zoo}/text  -> is not a checkpoint, or damaged
figures --checkpoint {good} --query 99999999  -> --query 99999999 is out of range: choose positions with --query
figures --checkpoint {good} --layers 0  -> --layers: all layers of
figures --checkpoint {good} --out {zoo}/text  -> --out text: text is a file, not a folder
figures --checkpoint {good} --length 64  -> --checkpoint is drawn by itself
figures --checkpoint {good} --seed 1  -> --checkpoint is drawn by itself
figures alibi --query 3  -> --query and --layers are for one checkpoint: give --checkpoint FILE too
figures alibi --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
# sensitivity
sensitivity --train-length 0  -> --train-length: '0' is not a whole number from 1 to 1000000000
sensitivity --train-length 99999999999999999999  -> --train-length: '99999999999999999999' is not a whole number from 1 to
sensitivity --train-length 100000000  -> --train-length 100000000: choose 2 to 65536 tokens
sensitivity --head-width 0  -> --head-width: '0' is not a whole number from 1 to 1000000000
sensitivity --head-width 3  -> --head-width 3: choose an even number from 2 to 4096, or leave it out
sensitivity --head-width 1000000000  -> --head-width 1000000000: choose an even number from 2 to 4096, or leave it
sensitivity --base 0  -> --base: '0' is not a number above 0
sensitivity --base nan  -> --base: 'nan' is not a number above 0
sensitivity --base inf  -> --base: 'inf' is not a number above 0
sensitivity --out {zoo}/text  -> --out text: text is a file, not a folder
sensitivity --out {zoo}/text/below  -> --out text/below: text is a file, not a folder
sensitivity --out {zoo}/loop  -> --out loop is a link that leads back to itself
# bench
bench --encodings typ1  -> unknown encoding 'typ1' (did you mean 'type1'?); known: alibi, bipe
bench --encodings ''  -> --encodings and --backends name at least one each
bench --backends turbo  -> --backends: unknown 'turbo'; known: reference, sdpa, flex, triton
bench --backends ''  -> --encodings and --backends name at least one each
bench --lengths 0  -> --lengths: '0' is not a whole number from 1 to 1000000000
bench --lengths 99999999999999999999  -> --lengths: '99999999999999999999' is not a whole number from 1 to
bench --lengths 1000000000  -> not enough memory
bench --batch 1000000000000  -> --batch: '1000000000000' is not a whole number from 1 to 1000000000
bench --heads 1000000000000  -> --heads: '1000000000000' is not a whole number from 1 to 1024
bench --head-width 7 --encodings rope  -> a rotary encoding turns pairs: the rotated width must be even and at
bench --head-width 1000000000000  -> --head-width: '1000000000000' is not a whole number from 1 to 65536
bench --dtype int8  -> --dtype: invalid choice: 'int8' (choose from 'fp32', 'bf16', 'fp16')
bench --passes backward  -> --passes: invalid choice: 'backward' (choose from 'forward'
bench --repeats 0  -> --repeats: '0' is not a whole number from 1 to 1000000000
bench --device cuda  -> --device cuda: no GPU is visible here: drop the flag, or check
bench --out {zoo}/text  -> --out text: text is a file, not a folder
bench --out {zoo}/loop  -> --out loop is a link that leads back to itself
bench --model tiny --lengths 1000000000  -> not enough memory
bench --model tiny --batch 1000000000  -> not enough memory
bench --model tiny --backends turbo  -> --backends: unknown 'turbo'; known: auto, reference, sdpa
bench --model tiny --head-width 7  -> --head-width goes not with --model: leave it out
bench --shared fire  -> --shared goes only with --model: leave it out
bench --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
# prepare
prepare {dest}  -> no text is given: name folders or files
prepare {zoo}/absent {dest}  -> absent does not exist: give a folder or file with text
prepare {zoo}/loop {dest}  -> loop does not exist: give a folder or file with text
prepare {zoo}/empty {dest}  -> the train split of 0 documents would be empty: give more documents
prepare {zoo}/garbage {dest}  -> garbage is a binary file: give text, .jsonl or .parquet
prepare {zoo}/folder {dest}  -> folder has no text, there are no files that could be read: give another
prepare {zoo}/text/below {dest}  -> text/below does not exist: give a folder or file with text
prepare {long} {dest}  -> too long a name
prepare {zoo}/texts --dest {zoo}/text  -> --dest text: text is a file, not a folder: name another one
prepare {zoo}/texts --dest {zoo}/text/below  -> --dest text/below: text is a file, not a folder: name another one
prepare {zoo}/texts --dest {zoo}/loop  -> --dest loop is a link that leads back to itself
prepare {zoo}/texts --dest /proc/nothing  -> --dest /proc/nothing does not exist: name another place
prepare {zoo}/texts --dest {zoo}/texts  -> texts is not empty and was not made by this command: move it or give
prepare {zoo}/texts --dest {long}  -> too long a name
prepare {zoo}/texts {dest} --vocab-size 3  -> --vocab-size 3 is out of range: use 300 to 1000000
prepare {zoo}/texts {dest} --vocab-size 99999999999999999999  -> --vocab-size 99999999999999999999 is out of range: use 300 to 1000000
prepare {zoo}/texts {dest} --vocab-size 100000  -> --vocab-size 100000 is too large for this text: the largest possible is
prepare {zoo}/texts {dest} --workers 0  -> --workers 0 is out of range: use 1 to 256
prepare {zoo}/texts {dest} --workers 99999999999  -> --workers 99999999999 is out of range: use 1 to 256
prepare {zoo}/texts {dest} --valid-fraction 0  -> --valid-fraction 0.0 is out of range: use more than 0 and less than 1
prepare {zoo}/texts {dest} --valid-fraction nan  -> --valid-fraction nan is out of range: use more than 0 and less than 1
prepare {zoo}/texts {dest} --valid-fraction 0.6 --test-fraction 0.6  -> --valid-fraction 0.6 and --test-fraction 0.6 leave no text for
prepare {zoo}/texts {dest} --seed x  -> --seed: invalid int value: 'x'
prepare {zoo}/texts {dest} --seed 1000000000000000000000000000000  -> --seed 1000000000000000000000000000000 is out of range
prepare {zoo}/texts {dest} --sample-bytes 5  -> --sample-bytes 5 is out of range: use 100000 to 10000000000
prepare {zoo}/texts {dest} --include '*.md'  -> texts has no text, there are no files that could be read: give another
prepare {zoo}/texts {dest} --valid {zoo}/texts  -> --valid is given without --test: give both, or none to divide the text
prepare {zoo}/texts {dest} --tokenizer gpt2 --gpt2 {zoo}/absent  -> --gpt2 absent has no vocab.json or encoder.json: put GPT-2's vocabulary
prepare {zoo}/texts {dest} --tokenizer gpt2 --gpt2 {zoo}/folder  -> --gpt2 folder has no vocab.json or encoder.json: put GPT-2's vocabulary
prepare {zoo}/texts {dest} --gpt2 {zoo}/folder  -> --tokenizer gpt2 and --gpt2 FOLDER go together: FOLDER has vocab.json
prepare {zoo}/texts {dest} --vocab-from {zoo}/absent  -> --vocab-from absent is not a prepared corpus: name a folder made by
prepare {zoo}/texts {dest} --vocab-from {zoo}/folder  -> --vocab-from folder is not a prepared corpus: name a folder made by
prepare {zoo}/texts {dest} --vocab-from {zoo}/odd_manifest  -> odd_manifest/corpus.json line 1 is not a JSON object (it is a list)
prepare {zoo}/texts {dest} --vocab-from {zoo}/cut_manifest  -> cut_manifest/corpus.json line 1 is not a JSON object (Expecting value at
prepare {zoo}/texts {dest} --vocab-from {zoo}/list_manifest  -> list_manifest/corpus.json: made_by of the corpus must be text, not
prepare {zoo}/odd.jsonl {dest}  -> odd.jsonl line 2 has a 'text' that is not a string: name another with
prepare {zoo}/deep.jsonl {dest}  -> deep.jsonl line 1 is not a JSON object (nested too deep): repair or remove
prepare {zoo}/nofield.jsonl {dest}  -> nofield.jsonl line 1 has no field 'text' but words: name one with
prepare {zoo}/latin.txt {dest}  -> latin.txt is not UTF-8 at byte 3: convert it, leave it out or give
prepare {zoo}/cut.txt.gz {dest}  -> cut.txt.gz is cut short or damaged (Compressed file ended before the
prepare {zoo}/odd.parquet {dest}  -> odd.parquet is cut short or damaged (Parquet magic bytes not found in
prepare {zoo}/odd.zip {dest}  -> odd.zip is cut short or damaged (File is not a zip file): get it again
prepare hub:nobody {dest}  -> hub:nobody is not a data set of the hub: use hub:OWNER/NAME or
# prepare-known
prepare-known nothing  -> NAME: invalid choice: 'nothing' (choose from 'wikitext103'
prepare-known wikitext103 --from {zoo}/absent {dest}  -> absent does not exist: give a folder or file with text
prepare-known wikitext103 --from {zoo}/texts {dest}  -> --vocab-size 16384 is too large for this text: the largest possible is
prepare-known github --from {zoo}/folder {dest}  -> folder has no text, there are no files that could be read: give another
prepare-known books --archive {dest}  -> --archive: this corpus has no archive, leave the option out
# prepare-stdlib
prepare-stdlib --source {zoo}/absent {dest}  -> absent does not exist: give a folder or file with text
prepare-stdlib --source {zoo}/text {dest}  -> the valid split of 1 documents would be empty: give more documents
prepare-stdlib --source {zoo}/folder {dest}  -> folder has no text, there are no files that could be read: give another
prepare-stdlib --source {zoo}/loop {dest}  -> loop does not exist: give a folder or file with text
prepare-stdlib --dest {zoo}/text  -> --dest text: text is a file, not a folder: name another one
prepare-stdlib {dest} --max-bytes 0  -> --max-bytes 0 is out of range: use 1 to 9223372036854775808
prepare-stdlib {dest} --max-bytes 10  -> the train split of 0 documents would be empty: give more documents
prepare-stdlib {dest} --vocab-size 3  -> --vocab-size 3 is out of range: use 300 to 1000000
# train
train {data} --rpe alibi  -> the following arguments are required: --save-dir
train {data} {run}  -> the following arguments are required: --rpe
train --rpe alibi {run}  -> name what to train on: either a DATA folder or --algorithm SPEC
train {data} --algorithm copy --rpe alibi {run}  -> name what to train on: either a DATA folder or --algorithm SPEC
train {zoo}/absent --rpe alibi {run}  -> data folder absent does not exist: make one, e.g. with fairseq-rpe
train {zoo}/text --rpe alibi {run}  -> data folder text does not exist: make one, e.g. with fairseq-rpe
train {zoo}/folder_bin --rpe alibi {run}  -> folder_bin/test.bin is not a file, but is named like one of a split: move it
train {zoo}/loop --rpe alibi {run}  -> data folder loop does not exist: make one, e.g. with fairseq-rpe
train {long} --rpe alibi {run}  -> too long a name
train {zoo}/no_dict --rpe alibi {run} {small}  -> no_dict has no dict.txt: it is not a binarised data folder with train
train {zoo}/empty_dict --rpe alibi {run} {small}  -> empty_dict/dict.txt line 1 is missing, the dictionary is empty: use the
train {zoo}/odd_dict --rpe alibi {run} {small}  -> odd_dict/dict.txt line 1 is not UTF-8: use the file that the
train {data} --rpe typ1 {run} {small}  -> unknown encoding 'typ1' (did you mean 'type1'?); known: alibi, bipe
train {data} --rpe '' {run} {small}  -> --rpe: is empty: write name or name:key=value,key=value
train {data} --rpe window:window=99999999999999999999999 {run} {small}  -> option 'window' of 'window' must be at most 1000000000, not
train {data} --rpe alibi --save-dir {data} {small}  -> is a data folder (it has dict.txt): name another one
train {data} --rpe alibi --save-dir {zoo}/text {small}  -> --save-dir text: text is a file, not a folder
train {data} --rpe alibi --save-dir {zoo}/text/below {small}  -> --save-dir text/below: text is a file, not a folder
train {data} --rpe alibi --save-dir {zoo}/loop {small}  -> --save-dir loop is a link that leads back to itself
train {data} --rpe alibi --save-dir /proc/nothing {small}  -> --save-dir /proc/nothing does not exist: name another place
train {data} --rpe alibi --save-dir {long} {small}  -> too long a name
train {data} --rpe alibi {run} --tensorboard {zoo}/text {small}  -> --tensorboard text: text is a file, not a folder: name another one
train {data} --rpe alibi {run} --tensorboard {zoo}/loop {small}  -> --tensorboard loop is a link that leads back to itself
train {data} --rpe alibi {run} --tensorboard /proc/nothing {small}  -> --tensorboard /proc/nothing does not exist: name another place
train {data} --rpe alibi {run} {small} --tokens 0  -> --tokens: '0' is not a whole number from 1 to 1000000000
train {data} --rpe alibi {run} {small} --tokens 99999999999999999999  -> --tokens: '99999999999999999999' is not a whole number from 1 to
train {data} --rpe alibi {run} {small} --updates 0  -> --updates: '0' is not a whole number from 1 to 1000000000
train {data} --rpe alibi {run} {small} --updates 99999999999999999999  -> --updates: '99999999999999999999' is not a whole number from 1 to
train {data} --rpe alibi {run} {small} --batch-sentences 99999999999999999999  -> --batch-sentences: '99999999999999999999' is not a whole number from 1
train {data} --rpe alibi {run} {small} --lr 0  -> --lr: '0' is not a number above 0 and at most 100
train {data} --rpe alibi {run} {small} --lr 1e30  -> --lr: '1e30' is not a number above 0 and at most 100
train {data} --rpe alibi {run} {small} --lr nan  -> --lr: 'nan' is not a number above 0 and at most 100
train {data} --rpe alibi {run} {small} --lr inf  -> --lr: 'inf' is not a number above 0 and at most 100
train {data} --rpe alibi {run} {small} --seed 1000000000000000000000000000000  -> --seed: '1000000000000000000000000000000' is not a whole number from 1
train {data} --rpe alibi {run} {small} --seed 0  -> --seed: '0' is not a whole number from 1 to 4294967295
train {data} --rpe alibi {run} {small} --dropout 1  -> --dropout: '1' is not a number from 0 to below 1
train {data} --rpe alibi {run} {small} --warmup 99999999999999999999  -> --warmup: '99999999999999999999' is not a whole number from 1 to
train {data} --rpe alibi {run} {small} --update-freq 99999999999999999999  -> --update-freq: '99999999999999999999' is not a whole number from 1 to
train {data} --rpe alibi {run} {small} --save-every 99999999999999999999  -> --save-every: '99999999999999999999' is not a whole number from 1 to
train {data} --rpe alibi {run} {small} --arch foo  -> --arch foo is not one of tiny, small, wiki103, base, large (or
train {data} --rpe alibi {run} {small} --arch transformer_lm  -> --arch transformer_lm is not one of tiny, small, wiki103, base, large (or
train {data} --rpe alibi {run} {small} --nproc 99999999999  -> --nproc: '99999999999' is not a whole number from 1 to 1024
train {data} --rpe alibi {run} {small} --nodes 2  -> --nodes 2: say which of them this is, with --node-rank 0 to 1
train {data} --rpe alibi {run} {small} --master somewhere  -> --master: 'somewhere' is not HOST:PORT
train {data} --rpe alibi {run} {small} --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
train {data} --rpe alibi {run} {small} --rpe-module {zoo}/folder  -> --rpe-module folder is not a file: name a Python file
train {data} --rpe alibi {run} {small} --positions-train wrap  -> unknown position transform 'wrap' (did you mean 'warp'?); known: cape
train {data} --rpe alibi {run} {small} --attention-backend flash  -> unknown attention backend 'flash'; known: auto, reference, sdpa, flex
train {data} --rpe alibi {run} {small} --inspect-every 5  -> --inspect-every writes for TensorBoard: give --tensorboard DIR too
train {data} --rpe alibi {run} {small} --device cuda  -> --device cuda: no GPU is visible here: drop the flag, or check
train {data} --rpe alibi {run} {small} -- --save-dir elsewhere  -> --save-dir after -- is set by this command itself: give --save-dir
train {data} --rpe alibi {run} {small} -- --no-such-flag  -> unrecognized arguments: --no-such-flag
train {data} --rpe alibi {run} {small} -- --max-update x  -> --max-update after -- is set by this command itself: give --updates
train {data} --rpe alibi {run} {small} -- --user-dir elsewhere  -> --user-dir after -- is set by this command itself: leave it out
train --algorithm nothing --rpe rope {run}  -> unknown algorithmic task 'nothing'; known: add_subtract, copy, passkey, retrieval, reverse
train --algorithm copy:items=0 --rpe rope {run}  -> option 'items' of 'copy' must be at least 2, not 0
train --algorithm copy:items=99999999999999 --rpe rope {run}  -> option 'items' of 'copy' must be at most 10000, not 99999999999999
train --algorithm copy --tokens 5 --rpe rope {run}  -> --tokens does not go with --algorithm: say how many items, e.g.
# sweep
sweep {data} --encodings alibi  -> --lengths is missing: name the lengths to evaluate in tokens, e.g.
sweep {data} --encodings '' {sweep}  -> --encodings is empty: name at least one, e.g. --encodings "alibi type1"
sweep {data} --encodings 'alibi alibi' {sweep}  -> --encodings names one twice: leave one out
sweep {data} --encodings typ1 {sweep}  -> unknown encoding 'typ1' (did you mean 'type1'?); known: alibi, bipe
sweep {data} --encodings 'alibi, alibi' {sweep}  -> --encodings names one twice: leave one out
sweep {zoo}/absent --encodings alibi {sweep}  -> data folder absent does not exist: make one, e.g. with fairseq-rpe
sweep {zoo}/folder_bin --encodings alibi {sweep}  -> folder_bin has no test.bin: it is not a binarised data folder with
sweep {zoo}/loop --encodings alibi {sweep}  -> data folder loop does not exist: make one, e.g. with fairseq-rpe
sweep {data} --encodings alibi --out {zoo}/text --lengths 64  -> --out text: text is a file, not a folder: name another one
sweep {data} --encodings alibi --out {zoo}/text/below --lengths 64  -> --out text/below: text is a file, not a folder: name another one
sweep {data} --encodings alibi --out {zoo}/loop --lengths 64  -> --out loop is a link that leads back to itself
sweep {data} --encodings alibi --out /proc/nothing --lengths 64  -> --out /proc/nothing does not exist: name another place
sweep {data} --encodings alibi --out {long} --lengths 64  -> too long a name
sweep {data} --encodings alibi --out {zoo}/sweep_empty --lengths 64  -> sweep_empty/sweep.json: the sweep lacks settings: restore it or delete
sweep {data} --encodings alibi --out {data} --lengths 64  -> is a data folder (it has dict.txt): name another one
sweep {data} --encodings alibi --out {zoo}/sweep_list --lengths 64  -> sweep_list/sweep.json line 1 is not a JSON object (it is a list): restore
sweep {data} --encodings alibi --out {zoo}/sweep_deep --lengths 64  -> sweep_deep/sweep.json line 1 is not a JSON object (nested too deep)
sweep {data} --encodings alibi {sweep} --max-tokens 63  -> --max-tokens 63 is less than length 64: raise it
sweep {data} --encodings alibi {sweep} --attention-backend flash  -> unknown attention backend 'flash'
sweep {data} --encodings alibi {sweep} --seeds 0  -> --seeds: '0' is not a whole number from 1 to 4294967295
sweep {data} --encodings alibi {sweep} --seeds 1000000000000000000000000000000  -> --seeds: '1000000000000000000000000000000' is not a whole number from 1
sweep {data} --encodings alibi {sweep} --seeds 1,1  -> --seeds: '1,1' gives a number twice
sweep {data} --encodings alibi {sweep} --jobs 0  -> --jobs: '0' is not a whole number from 1 to 1024
sweep {data} --encodings alibi {sweep} --arch foo  -> --arch foo is not one of tiny, small, wiki103, base, large (or
sweep {data} --encodings alibi {sweep} --lr 1e30  -> --lr: '1e30' is not a number above 0 and at most 100
sweep {data} --encodings alibi {sweep} --subset exam  -> data has no exam.idx: it is not a binarised data folder with train and
sweep {data} --encodings alibi {sweep} --max-tokens 99999999999999999999  -> --max-tokens: '99999999999999999999' is not a whole number from 1 to
sweep {data} --encodings alibi {sweep} --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0); fix that file
sweep {data} --encodings alibi {sweep} --slurm a=b  -> --slurm is for --launcher slurm (or dry-run): give that, or drop it
sweep {data} --encodings alibi {sweep} -- --save-dir x  -> --save-dir after -- is set by this command itself: give --save-dir
sweep {data} --recipe nothing  -> unknown recipe 'nothing'; known: extend, extend-abf
sweep {data} --recipe {zoo}/text  -> unknown recipe 'text'; known: extend, extend-abf
sweep {data} --recipe {zoo}/folder  -> unknown recipe 'folder'; known: extend, extend-abf
sweep {data} --recipe {zoo}/loop  -> unknown recipe 'loop'; known: extend, extend-abf
sweep {data} --recipe {zoo}/garbage  -> unknown recipe 'garbage'; known: extend, extend-abf
sweep {data} --recipe {zoo}/odd.toml --out {here}/s  -> recipe odd.toml is not TOML: Invalid value (at end of document)
sweep {data} --recipe fire-lm --scale galactic --out {here}/s  -> recipe 'fire-lm' has no scale 'galactic'; it has: laptop, paper
sweep {data} --recipe fire-lm --methods nothing --out {here}/s  -> recipe 'fire-lm' has no method 'nothing'; it has: nope, rope, alibi
sweep --algorithms nothing --encodings rope --out {here}/s  -> unknown algorithmic task 'nothing'; known: add_subtract, copy, passkey, retrieval, reverse
sweep --algorithms copy --encodings rope --out {here}/s --tokens 5  -> --tokens does not go with --algorithm: say how many items, e.g.
# nothing
nothing  -> unknown command 'nothing' (did you mean 'train'?); known
# --nothing
--nothing  -> the following arguments are required: COMMAND
# eval
eval --rpe  -> --rpe: expected one argument
eval {good} {data} --lengths 64 --out /dev/full  -> --out /dev/full is a device, a pipe or a socket: name a plain file
# verdict
verdict --formula '-n' --csv /dev/full  -> --csv /dev/full is a device, a pipe or a socket: name a plain file
# fire-fit
fire-fit alibi --length 9 --out /dev/full  -> --out /dev/full is a device, a pipe or a socket: name a plain file
# sliding
sliding {good} {data} --workers 99999999  -> --workers: '99999999' is not a whole number from 0 to 256
# erf
erf {good} {data} --length 100000000  -> less than 64 blocks of 100000000
# report
report {zoo}/sweep_negative  -> sweep_negative/runs/alibi-seed1/eval.jsonl line 2: ppl of the result
report {zoo}/sweep_nan  -> sweep_nan/runs/alibi-seed1/eval.jsonl line 2: ppl of the result must be
report {zoo}/sweep_deep_row  -> sweep_deep_row/runs/alibi-seed1/eval.jsonl line 3 is not a JSON object
# eval
verdict --checkpoint {good} --heads 3  -> --heads applies to a SPEC
verdict --formula '-n' --head-width 3  -> --head-width applies to a SPEC
"""


def cases() -> list[pytest.param]:
    split = [line.rsplit("  -> ", 1) for line in CASES.strip().splitlines() if line and not line.startswith("#")]
    return [pytest.param(command.strip(), words, id=command.strip()) for command, words in split]


@pytest.fixture(scope="module")
def zoo(corpus, state, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    fill_zoo(folder, corpus, state)
    return folder


def files_in(folder: Path) -> dict[str, float]:
    """All but locks, with the times of what is no folder: places are tried by making a file and removing it."""
    found = (path for path in folder.rglob("*") if path.name != ".lock")
    return {str(path): 0.0 if path.is_dir() else path.lstat().st_mtime for path in found}


@pytest.mark.parametrize(("command", "words"), cases())
def test_one_line_and_nothing_left(zoo, tmp_path, monkeypatch, capsys, command, words):
    monkeypatch.chdir(tmp_path)
    named = {
        "dest": f"--dest {tmp_path}/d",
        "run": f"--save-dir {tmp_path}/r",
        "sweep": f"--out {tmp_path}/s --lengths 64",
    }
    named |= {"zoo": zoo, "data": zoo / "data", "good": zoo / "good.pt", "long": LONG, "here": tmp_path, "small": SMALL}
    before = files_in(zoo)
    code = main(shlex.split(command.format(**named)))
    said, errors = capsys.readouterr()
    assert code == 2 and "Traceback" not in said + errors
    [line] = [line for line in errors.splitlines() if "error: " in line]
    assert line.startswith("error: ") and errors.endswith(line + "\n")
    shown = line.replace(f"{zoo}/", "").replace(str(tmp_path), "HERE")
    assert words in shown, shown
    assert len(shown) < 500 and not any(tmp_path.iterdir()) and files_in(zoo) == before


def test_there_are_enough_cases():
    assert len(cases()) >= 400
