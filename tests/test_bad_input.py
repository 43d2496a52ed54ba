"""Bad input of every kind: one line that names the culprit, and nothing left behind.

A row of ``CASES`` is a command, an arrow, and a text that its line must hold. Checks that several commands share have
their kinds of bad input with one command, mostly ``eval``, and one row for the others: ``+eval|erf --out x`` stands for
the good lines of ``eval`` and ``erf`` in ``GOOD``, each with ``--out x``; ``trf|erf x`` for two plain commands.
``{good}``, ``{data}`` and the files of ``{zoo}`` are made by ``fill_zoo``; a command runs in an empty folder, ``{here}``.
Every command must end with status 2, exactly one line ``error: …`` on standard error, and an empty folder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import checkpoint_with, error_of

from fairseq_rpe.cli.main import build_parser, main
from fairseq_rpe.cli.options import (
    decay,
    fraction,
    heads,
    integer,
    nonnegative_float,
    positive_float,
    positive_int,
    rate,
)

LONG = "x" * 300
GOOD = {
    "eval": "eval {good} {data} --lengths 64",
    "sliding": "sliding {good} {data}",
    "erf": "erf {good} {data}",
    "key-tokens": "key-tokens {good} {data} --short-context 32 --out {here}/k.json",
    "context-use": "context-use {good} {data}",
    "position-profile": "position-profile {good} {data}",
    "eval-task": "eval-task {good}",
    "verdict": "verdict alibi",
    "learned": "verdict --checkpoint {good}",
    "formula": "verdict --formula -n",
    "trf": "trf alibi",
    "fire-fit": "fire-fit alibi",
    "bias": "bias alibi",
    "list": "list",
    "report": "report {zoo}/sweep",
    "compare": "compare {zoo}/sweep/runs/alibi-seed1 {zoo}/sweep/runs/alibi-seed1",
    "figures": "figures alibi",
    "drawn": "figures --checkpoint {good}",
    "sensitivity": "sensitivity",
    "bench": "bench",
    "prepare": "prepare {zoo}/texts --out {here}/d",
    "stdlib": "prepare-stdlib --out {here}/d",
    "train": "train {data} --rpe alibi --out {here}/r --tokens 32 --updates 2 --device cpu",
    "sweep": "sweep {data} --encodings alibi --out {here}/s --lengths 64",
}


def fill_zoo(zoo: Path, corpus: Path, state: dict) -> None:
    """Good files, and one of every kind of bad ones."""
    shutil.copytree(corpus, zoo / "data")
    (zoo / "made").mkdir()
    shutil.move(checkpoint_with(state, zoo / "made"), zoo / "good.pt")
    for name in ("folder", "foreign", "texts"):
        (zoo / name).mkdir()
    for file in ("dict.txt", "test.idx", "corpus.json"):
        folder = shutil.copytree(corpus, zoo / f"pipe_{file}")
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)
    for name in ("pipe.toml", "pipe.jsonl", "pipe.py"):
        os.mkfifo(zoo / name)
    for name, content in {
        **{f"texts/{number}.txt": f"text number {number}\nof some words\n" for number in range(40)},
        "text": "no checkpoint, no JSON, no corpus\n",
        "foreign/checkpoint_last.pt": "x",
        "garbage": "\0\0",
        "odd.jsonl": '{"text": "fine"}\n{"text": 7}\n',
        "nofield.jsonl": '{"words": "fine"}\n',
        "odd.zip": "PK\3\4 this is none",
        "odd.toml": "name = [\n",
        "bad_row.jsonl": '{"length": 64}\n',
        "exits.py": "import sys\nsys.exit(0)\n",
        "binary.py": "\0\0\0",
    }.items():
        (zoo / name).write_text(content)
    write_sweeps(zoo)


def write_sweeps(zoo: Path) -> None:
    """Folders of sweeps of made-up numbers: a finished one, one with a number that is none, and one with no record."""
    (zoo / "sweep_empty").mkdir()
    (zoo / "sweep_empty" / "sweep.json").write_text('{"layout": 2}')
    row = {"checkpoint": "c", "split": "test", "loss_base2": 1.0, "tokens": 99}
    state = {
        "layout": 2,
        "settings": {"tokens": 64, "split": "test"},
        "encodings": ["alibi"],
        "seeds": [1],
        "lengths": [64, 128],
    }
    for name, last in (("sweep", 11.0), ("sweep_nan", math.nan)):
        rows = [json.dumps({**row, "length": length, "ppl": ppl}) for length, ppl in ((64, 10.0), (128, last))]
        run = zoo / name / "runs" / "alibi-seed1"
        (run / "checkpoints").mkdir(parents=True)
        (zoo / name / "sweep.json").write_text(json.dumps(state))
        (run / "checkpoints" / "run.json").write_text(json.dumps({"layout": 2, "finished": {"checkpoint": "c"}}))
        (run / "eval.jsonl").write_text("\n".join(rows) + "\n")


CASES = r"""
# Paths that cannot be written; of every kind in tests/cli/test_failures.py
+eval|report|compare|fire-fit|key-tokens --out {zoo}/folder  -> --out folder is a folder: name a file
+eval --log {zoo}/folder  -> --log folder is a folder: name a file
+formula --csv {zoo}/folder  -> --csv folder is a folder: name a file
+fire-fit --figure {zoo}/folder  -> --figure folder is a folder: name a file
+fire-fit --figure {zoo}/new.gif  -> use the ending .png or .pdf
+sliding|context-use|position-profile|erf|trf|figures|drawn|sensitivity|bench|sweep --out {zoo}/text  -> --out text: text is a file, not a folder
+prepare|stdlib --out {zoo}/text  -> --out text: text is a file, not a folder: name another one
+train --out {zoo}/text  -> --out text: text is a file, not a folder
+train --tensorboard {zoo}/text  -> --tensorboard text: text is a file, not a folder
+train --out {data}  -> is a data folder (it has dict.txt): name another one
+train --out {zoo}/foreign  -> no run.json
+sweep|figures|drawn|trf|erf|sliding|context-use|position-profile|bench|sensitivity --out {data}  -> is a data folder (it has dict.txt): name another one
+sweep --out {zoo}/sweep_empty  -> sweep_empty/sweep.json: the sweep lacks settings: restore it or delete
+prepare --out {here}  -> is the current folder or one above it
+train --out {zoo}/sweep  -> is the folder of a sweep (it has sweep.json)
+sweep --out {zoo}/sweep/runs/alibi-seed1  -> is the folder of a run (it has
+prepare --out {zoo}/texts  -> texts is not empty and was not made by this command: move it or give
# modules of the user
+eval|sliding|key-tokens|context-use|position-profile|erf|verdict|fire-fit|bias|list|report|figures|bench|train|sweep --rpe-module {zoo}/exits.py  -> --rpe-module exits.py, line 2: it ends Python (0)
+list --rpe-module {zoo}/absent.py  -> --rpe-module absent.py does not exist: name a Python file
+list --rpe-module {zoo}/folder  -> --rpe-module folder is not a file: name a Python file
+list --rpe-module {zoo}/binary.py  -> --rpe-module binary.py: SyntaxError: source code string cannot contain
+list --rpe-module {zoo}/pipe.py  -> pipe.py
# checkpoints; of every kind in tests/test_hostile_checkpoints.py
eval {zoo}/absent.pt {data} --lengths 64  -> checkpoint absent.pt does not exist
eval {long} {data} --lengths 64  -> too long a name
eval {good}:{good} {data} --lengths 64  -> checkpoint good.pt:good.pt does not exist
sliding {good} {good} {data}  -> a checkpoint is named twice: leave one out
# binarised data; damaged in every way in tests/data/test_damage.py
eval {good} {zoo}/absent --lengths 64  -> data folder absent does not exist: make one, e.g. with fairseq-rpe
eval {good} {zoo}/folder --lengths 64  -> folder has no dict.txt: it is not a binarised data folder with test
eval {good} {zoo}/pipe_dict.txt --lengths 64  -> pipe_dict.txt
eval {good} {zoo}/pipe_test.idx --lengths 64  -> pipe_test.idx
eval {good} {zoo}/pipe_corpus.json --lengths 64  -> pipe_corpus.json/corpus.json is a device, a pipe or a socket
erf {good} {zoo}/absent  -> data folder absent does not exist: make one, e.g. with fairseq-rpe
train {zoo}/absent --rpe alibi --out {here}/r  -> data folder absent does not exist: make one, e.g. with fairseq-rpe
sweep {zoo}/absent --encodings alibi --out {here}/s --lengths 64  -> data folder absent does not exist
+eval|sliding|key-tokens|context-use|position-profile|sweep --split exam  -> data has no exam.idx: it is not a binarised data folder with
# specs
+eval|key-tokens|train --rpe typ1  -> unknown encoding 'typ1' (did you mean 'type1'?); known: abacus, alibi
verdict|trf|fire-fit|bias|figures typ1  -> unknown encoding 'typ1' (did you mean 'type1'?)
+sweep --encodings typ1  -> unknown encoding 'typ1' (did you mean 'type1'?)
+eval|train --rpe ''  -> --rpe: is empty: write name or name:key=value,key=value
bias window:window=99999999999999999999999  -> option 'window' of 'window' must be at most 1000000000, not
bias xpos:gamma=1e308  -> option 'gamma' of 'xpos' must be at most 1e+06, not
bias t5_bias:buckets=1000000  -> option 'buckets' of 't5_bias' must be at most 65536
bias fire:hidden_width=9  -> 'fire' has no option 'hidden_width' (did you mean 'hidden'?); its
+eval|sliding|key-tokens|context-use --positions-eval wrap  -> unknown position transform 'wrap' (did you mean 'warp'?); known: cape
+train --positions-train wrap  -> unknown position transform 'wrap'
+eval --positions-eval interpolate:ratio=0  -> option 'ratio' of 'interpolate' must be more than 0 and at most 1, not
+eval --positions-eval offset:tokens=1e400  -> option 'tokens' of 'offset' wants a whole number, not '1e400'
+eval --positions-eval randomized:max_position=3  -> option 'max_position' of 'randomized' is 3 but a row has 64 tokens: raise max_position to
# the parser; numbers are in NUMBERS
--nothing  -> the following arguments are required: COMMAND
nothing  -> unknown command 'nothing' (did you mean 'train'?); known
eval  -> the following arguments are required: CHECKPOINT, DATA
train {data} --rpe alibi  -> --out is missing: give --out DIR
eval --rpe  -> --rpe: expected one argument
+eval --length 3  -> unrecognized arguments: --length 3 (see fairseq-rpe eval --help)
+eval -- --seed 1  -> 'eval' takes no further flags after --: only train and sweep do
+eval --log=--  -> argument --log: '--' is not a value of an option
+eval --lengths 64,64  -> --lengths: '64,64' gives a number twice
+eval --lengths 64,,128  -> --lengths: '64,,128' has a comma with no number beside it
+eval --lengths ''  -> --lengths: is empty: give at least one number
+eval --device gpu  -> --device: invalid choice: 'gpu' (choose from 'auto', 'cpu', 'cuda')
+eval|bench|train --device cuda  -> --device cuda: no GPU is visible here: drop the flag, or check
passkey {good} --out {here}/p  -> the following arguments are required: --lengths
passkey {good} --lengths 0 --out {here}/p  -> --lengths: '0' is not a whole number from 1 to
passkey {good} --lengths 900 --depths 0 --out {here}/p  -> --depths: '0' is not a whole number from 1 to
passkey {good} --lengths 900 --examples 0 --out {here}/p  -> --examples: '0' is not a whole number from 1 to
passkey {good} --lengths 900 --choices 1 --out {here}/p  -> --choices: '1' is not a whole number from 2 to
passkey {good} --lengths 900 --choices 4 --out {here}/p  -> --choices has no effect on --answer generation
passkey {good} --lengths 900 --out {here}/p  -> has no tokenizer
passkey {here} --lengths 900 --out {here}/p  -> has no config.json
passkey gone --lengths 900 --out {here}/p  -> gone
needle-attention {good} --length 0  -> --length: '0' is not a whole number from 1 to
needle-attention {good} --example -1  -> --example: '-1' is not a whole number from 0 to
needle-attention {good} --depth -0.5  -> --depth: '-0.5' is not
needle-attention {good}  -> good.pt was not trained on an algorithmic task: use fairseq-rpe eval for text
+eval-task --split exam  -> --split: invalid choice: 'exam' (choose from 'train', 'valid', 'test')
+list --positions --algorithms  -> not allowed with
user-dir extra  -> unrecognized arguments: extra
prepare-corpus nothing  -> NAME: invalid choice: 'nothing' (choose from 'wikitext103'
# eval, sliding, erf
+eval --max-tokens 10  -> --max-tokens 10 is less than length 64: raise it
+key-tokens --max-tokens 10  -> --max-tokens 10 is less than length 512: raise it
+key-tokens --blocks document  -> data/test has no document boundaries
+key-tokens --out {zoo}/text  -> --out text exists and would be replaced: name another one, which ends in .json
+key-tokens --beta nan  -> --beta nan is not a log-probability: use 0 or less
+eval --key-tokens {zoo}/absent  -> --key-tokens absent does not exist: name a checkpoint or a file of key tokens
+eval --key-tokens {zoo}/garbage  -> garbage
+eval --key-tokens {zoo}/folder  -> folder is a folder: name a file
+eval --key-tokens {good}  -> that it chose itself, which is circular: use the key tokens of another checkpoint
+eval --key-tokens {zoo}/bad_row.jsonl  -> bad_row.jsonl: the file of key tokens lacks evaluator
+eval --shuffle-far  -> --shuffle-far needs --key-tokens: add it or drop the flag
+eval|train|sweep --attention-backend flash  -> unknown attention backend 'flash'; known: auto, reference, sdpa, flex
+eval --attention-prune 2  -> pruning leaves out at most EPS of each query's attention: 0 < EPS < 1
+eval --attention-prune nan  -> pruning leaves out at most EPS of each query's attention: 0 < EPS < 1
+eval --engine fairseq --attention-backend sdpa  -> --attention-backend needs --engine fast
+eval --out {zoo}/bad_row.jsonl  -> bad_row.jsonl line 1: the result lacks checkpoint: delete that line or
+erf --length 16 --blocks 2 --rows 17  -> --rows 17 is more than a block of 16 tokens
+erf --delta --quantised  -> --quantised does not go with --delta
+erf --delta --epsilon 0.1  -> --epsilon does not go with --delta
+erf|verdict --epsilon 0  -> --epsilon 0 is not between 0 and 1: it is the part of the attention
+erf --epsilon 0.1,0.1  -> --epsilon: '0.1,0.1' gives a number twice
# verdict, trf, fire-fit, bias
verdict --formula '9**9**9**9*n'  -> the formula '9**9**9**9*n' has no real value at n = 0, or none that can
trf nope  -> nothing to draw: none of these sums converges, so there is no
verdict|trf  -> give either SPEC…, or --formula, or --checkpoint
+formula|learned alibi  -> give either SPEC…, or --formula, or --checkpoint
+learned --heads 3  -> --heads applies to a SPEC
+formula --head-width 3  -> --head-width applies to a SPEC
verdict --formula ''  -> the formula is empty: give an expression in n, for example -2*log(n+1)
verdict --formula 'x*n'  -> unknown name 'x' in the formula (the distance is called n); known: n
verdict --formula '__import__("os").system("true")'  -> '__import__("os").system("true")' cannot stand in a formula
+bias --heads 3 --width 128  -> 3 heads do not divide a model width of 128: choose another number of
# report, compare, figures
report {zoo}/absent  -> absent holds no sweep.json: name the --out folder of a sweep
figures --sweep {zoo}/absent  -> absent holds no sweep.json: name the --out folder of a sweep
report {long}  -> too long a name
report {zoo}/sweep_empty  -> sweep_empty/sweep.json: the sweep lacks settings: restore it or delete
compare {zoo}/absent {zoo}/sweep  -> absent does not exist: name a run folder or a results file
compare {zoo}/sweep {zoo}/sweep  -> sweep is the folder of a sweep: name one of its runs
compare {zoo}/folder {zoo}/sweep  -> folder has no eval.jsonl: name the results file of eval
compare {zoo}/text {zoo}/text  -> text line 1 is not a JSON object
compare {zoo}/pipe.jsonl {zoo}/text  -> pipe.jsonl
compare {zoo}/bad_row.jsonl {zoo}/bad_row.jsonl  -> bad_row.jsonl has no perplexities, accuracies or scores
+compare  -> alibi-seed1: the result at 64 tokens lacks the losses of segments: evaluate the model again
report {zoo}/sweep_nan  -> sweep_nan/runs/alibi-seed1/eval.jsonl line 2: ppl of the result must be
+figures --length 100000000  -> --length 100000000 is out of range: choose 2 to 16384
+drawn --query 99999999  -> --query 99999999 is out of range: choose positions with --query
+drawn --layers 0  -> --layers: all layers of
# bench
+bench --lengths 1000000000  -> not enough memory
+bench --model tiny --lengths 1000000000  -> not enough memory
# prepare and its relatives
prepare --out {here}/d  -> no text is given: name folders or files
prepare {zoo}/absent --out {here}/d  -> absent does not exist: give a folder or file with text
prepare {long} --out {here}/d  -> too long a name
prepare {zoo}/garbage --out {here}/d  -> garbage is a binary file: give text, .jsonl or .parquet
prepare {zoo}/odd.jsonl --out {here}/d  -> odd.jsonl line 2 has a 'text' that is not a string: name another with
prepare {zoo}/nofield.jsonl --out {here}/d  -> nofield.jsonl line 1 has no field 'text' but words: name one with
prepare {zoo}/odd.zip --out {here}/d  -> odd.zip is cut short or damaged (File is not a zip file): get it again
prepare hub:nobody --out {here}/d  -> hub:nobody is not a data set of the hub: use hub:OWNER/NAME or
+prepare|stdlib --vocab-size 3  -> --vocab-size 3 is out of range: use 300 to 1000000
+prepare --vocab-size 100000  -> --vocab-size 100000 is too large for this text: the largest possible is
+prepare --workers 0  -> --workers 0 is out of range: use 1 to 256
+prepare --workers 257  -> --workers 257 is out of range: use 1 to 256
+prepare --valid-fraction 0  -> --valid-fraction 0.0 is out of range: use more than 0 and less than 1
+prepare --valid-fraction nan  -> --valid-fraction nan is out of range: use more than 0 and less than 1
+prepare --valid-fraction 0.6 --test-fraction 0.6  -> --valid-fraction 0.6 and --test-fraction 0.6 leave no text for
+prepare --seed -1  -> --seed -1 is out of range
+prepare --sample-bytes 5  -> --sample-bytes 5 is out of range: use 100000 to 10000000000
+prepare --include '*.md'  -> texts has no text, there are no files that could be read: give another
+prepare --valid {zoo}/texts  -> --valid is given without --test: give both, or none to split the text
+prepare --gpt2 {zoo}/folder  -> --tokenizer gpt2 and --gpt2 FOLDER go together: FOLDER has vocab.json
+prepare --vocab-from {zoo}/absent  -> --vocab-from absent is not a prepared corpus: name a folder made by
+prepare --tokenizer gpt2 --gpt2 {zoo}/folder  -> --gpt2 folder has no vocab.json or encoder.json: put GPT-2's vocabulary
prepare-questions --train {zoo}/pipe.jsonl --valid {zoo}/pipe.jsonl --out {here}/d --vocab-from {data}  -> pipe.jsonl
prepare-corpus books --archive --out {here}/d  -> --archive: this corpus has no archive, leave the option out
+stdlib --max-bytes 0  -> --max-bytes 0 is out of range: use 1 to 9223372036854775808
# train
train --rpe alibi --out {here}/r  -> name what to train on: either a DATA folder or --algorithm SPEC
+train --algorithm copy  -> name what to train on: either a DATA folder or --algorithm SPEC
train --algorithm copy --tokens 5 --rpe rope --out {here}/r  -> --tokens does not go with --algorithm: say how many
+train --tokens 1000000  -> less than one block of 1000000
+train|sweep --arch foo  -> --arch foo is not one of tiny, mini, small, wiki103, base, large (or
+train --arch transformer_lm  -> --arch transformer_lm is not one of tiny, mini, small, wiki103, base, large (or
+train --arch 'tiny '  -> is not one of tiny, mini, small, wiki103, base, large (or
+train --log-encodings-every 5  -> --log-encodings-every writes to TensorBoard: give --tensorboard DIR too
# sweep
sweep {data} --encodings alibi  -> --lengths is missing: name the lengths to evaluate in tokens, e.g.
+sweep --encodings ''  -> --encodings is empty: name at least one, e.g. --encodings "alibi type1"
+sweep --encodings 'alibi, alibi'  -> --encodings names one twice: leave one out
+sweep --max-tokens 63  -> --max-tokens 63 is less than length 64: raise it
+sweep -- --save-dir x  -> --save-dir after -- is set by this command itself: give --out
sweep {data} --recipe nothing  -> unknown recipe 'nothing'; known: addition, divergent-series, extend
sweep {data} --recipe {zoo}/pipe.toml --out {here}/s  -> pipe.toml
sweep {data} --recipe {zoo}/odd.toml --out {here}/s  -> recipe odd.toml is not TOML: Invalid value (at end of document)
sweep --algorithms copy --encodings rope --out {here}/s --tokens 5  -> --tokens does not go with --algorithm: say how many
"""
# What each option with a number takes, in the words that refuse "x"; where commands differ, by command and option.
NUMBERS = {
    "a whole number from 1 to 1000000000": "--kv-heads --head-dim --answer-tokens --tokens --valid-tokens --min-tokens --questions "
    "--valid-questions --documents --save-every --log-interval --updates --batch-sentences --warmup --update-freq "
    "--log-encodings-every --lengths --max-tokens --batch-size --position-samples --windows --stride --first-tokens --samples "
    "--population --iterations --beam --length --head --quantised --blocks --rows --train-length --batch --repeats "
    "--devices --top-k --short-context --stretch --keep-at --evaluate-at --examples",
    "a whole number from 1 to 4294967295": "--seed --seeds",
    "a whole number from 0 to 1000000000": "--node-rank --query --layers --example",
    "a whole number from 2 to 1000": "--choices",
    "a whole number from 1 to 1024": "--nodes --nproc --jobs --heads",
    "a whole number from 0 to 256": "--workers",
    "a whole number from 1 to 65536": "--model-width --vocabulary --head-width",
    "a number": "--depths --epsilon --beta",
    "a number above 0 and at most 100": "--lr",
    "a number from 0 on": "--alpha --depth --temperature --min-lr --clip-norm --length-penalty --logit-softcap",
    "a number from 0 to 100": "--weight-decay",
    "a number above 0 and at most 1": "--utilisation --top-p",
    "a number from 0 to below 1": "--min-p --dropout --attention-dropout --activation-dropout --betas",
    "a number above 0": "--delta --base --tokens-per-second --tflops --memory --repetition-penalty",
}
OF_CORPORA = "a whole number from 0 to 9223372036854775808"  # and below 0, with the range said by another check
ELSEWHERE = {
    option: f"a whole number from 1 to {most}"
    for option, most in (
        *(("sensitivity --head-width", 10**9), ("bias --width", 65536), ("bias --length", 2**24)),
        *(
            ("verdict --layers", 1024),
            ("trf --layers", 1024),
            ("plan --vocabulary", 10**9),
            ("passkey --depths", 10**9),
        ),
    )
}


def cases() -> list[pytest.param]:
    found = []
    for line in CASES.strip().splitlines():
        command, arrow, words = line.rpartition("  -> ")
        first, _, rest = command.partition(" ")
        starts = [GOOD[name] for name in first[1:].split("|")] if first.startswith("+") else first.split("|")
        lines = [f"{start} {rest}".strip() for start in starts]
        found += [pytest.param(one, words, id=one) for one in lines if arrow]
    return found


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
    named = {"zoo": zoo, "data": zoo / "data", "good": zoo / "good.pt", "long": LONG, "here": tmp_path}
    before = files_in(zoo)
    code = main(shlex.split(command.format(**named)))
    said, errors = capsys.readouterr()
    assert code == 2 and "Traceback" not in said + errors
    [line] = [line for line in errors.splitlines() if "error: " in line]
    assert line.startswith("error: ") and errors.endswith(line + "\n")
    shown = line.replace(f"{zoo}/", "").replace(str(tmp_path), "HERE")
    assert words in shown, shown
    assert len(shown) < 500 and not any(tmp_path.iterdir()) and files_in(zoo) == before


@pytest.mark.parametrize(("dest", "more"), [("d", ("--name", "\udcff")), ("\udcff", ())])
def test_a_name_of_questions_that_is_not_utf_8_is_refused(dest, more, zoo, tmp_path, capsys):
    words = ("--train", zoo / "text", "--valid", zoo / "text", "--vocab-from", zoo / "data", "--out", tmp_path / dest)
    assert r"--name '\udcff' is not UTF-8" in error_of(capsys, "prepare-questions", *words, *more)


def test_every_number_has_its_range():
    [commands] = [action.choices for action in build_parser()._actions if isinstance(action.choices, dict)]
    wanted = {option: words for words, options in NUMBERS.items() for option in options.split()}
    seen = set()
    for command, parser in commands.items():
        for action in parser._actions:
            option = action.option_strings[-1] if action.option_strings else action.dest
            try:
                action.type and action.type("x")
            except argparse.ArgumentTypeError as error:
                words = str(error).partition("'x' is not ")[2]
                if words.startswith(("a number", "a whole number")):
                    seen.add(option)
                    usual = OF_CORPORA if action.type is integer else wanted.get(option)
                    assert words == ELSEWHERE.get(f"{command} {option}", usual), (command, option)
            except ValueError:  # int and float themselves
                continue
    assert set(wanted) <= seen


@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        (positive_int, "1 7 1000000000", "0 -5 1000000001 99999999999999999999 1e3 64.5 sixty ٣"),
        (heads, "1 1024", "0 1025"),
        (integer, "-9223372036854775808 0 7 9223372036854775808", "9223372036854775809 1.5 ٣ x"),
        (positive_float, "1e-9 1e300", "0 -1 nan inf x"),
        (rate, "1e-9 100", "0 100.1 nan inf 1e30"),
        (nonnegative_float, "0 7.5", "-0.1 inf nan"),
        (decay, "0 100", "-0.1 100.1 nan"),
        (fraction, "0 0.999", "1 -0.1 nan"),
    ],
)
def test_numbers_of_each_kind(kind, taken, refused):
    assert [kind(text) for text in taken.split()] == [float(text) for text in taken.split()]
    for text in refused.split():
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is not a"):
            kind(text)
