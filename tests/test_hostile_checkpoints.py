"""Checkpoints that are damaged, of something else or made to do harm: one line, and nothing in them is run.

A row of ``FILES`` or ``STATES``: its name, what makes the file, and what the line must say (a regular expression). The
loader meets every row, every command a few, in an empty folder, with a value in the environment that must not show.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import re
import shutil
import signal
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import PACKAGE, checkpoint_with, error_of, run_here
from hypothesis import given, settings
from hypothesis import strategies as some
from in_process import fairseq

from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.checkpoints.checkpoint import check_model_size
from fairseq_rpe.cli.main import build_parser
from fairseq_rpe.cli.train import stated_settings
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.folder import corpus_digest
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.run_folder import CheckpointFolder
from fairseq_rpe.runs.settings import make_plan
from fairseq_rpe.runs.training_config import TrainingConfig
from fairseq_rpe.utils.json_files import append_json_line, write_json

CANARY = "canary-5e1f"
PAYLOAD = "EXECUTED"
SECONDS = 120  # after which the whole test run ends; a case takes a hundredth of a second


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {PAYLOAD}",)


class Subclass(dict):
    def __reduce__(self):
        return eval, (f"open({PAYLOAD!r}, 'w')",)


# what is done to the bytes of a good file


def swap(part: str, content: bytes | None, method: int = zipfile.ZIP_STORED):
    """The same zip with another content of one part, or without it."""

    def make(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            parts = {n: content if n.endswith(part) else archive.read(n) for n in archive.namelist()}
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, found in parts.items():
                if found is not None:
                    archive.writestr(name, found)

    return make


def other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", b"<w/>")


def rewrite(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def flipped(part: str):
    """One bit of the last byte of a part."""

    def make(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            [info] = [i for i in archive.infolist() if i.filename.endswith(part)]
            content, whole = archive.read(info), bytearray(path.read_bytes())
        whole[whole.index(content, info.header_offset) + len(content) - 1] ^= 1
        path.write_bytes(whole)

    return make


def bomb(path: Path) -> None:
    """4 GiB of zeros in 4 MB, which zipfile writes without holding them."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("checkpoint/data.pkl", "w", force_zip64=True) as part:
            part.write(b"\x80\x02")
            part.write(bytes(2**24))
    # what the directory says is all that is ever read of it
    whole = path.read_bytes()
    path.write_bytes(whole.replace((2**24 + 2).to_bytes(4, "little"), (2**32 - 2).to_bytes(4, "little")))


def overlapping(path: Path) -> None:
    """A directory of many names for the same bytes."""
    with zipfile.ZipFile(path, "a") as archive:
        [big] = [i for i in archive.infolist() if i.filename.endswith("/data/1")]
        for number in range(500):
            again = copy.copy(big)
            again.filename = f"{big.filename}{number}x"
            archive.filelist.append(again)
            archive.NameToInfo[again.filename] = again
        archive._didModify = True


def twice(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        pickled = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        archive.writestr(pickled.upper(), b"cposix\nsystem\n.")


def legacy(content: object):
    return lambda path: torch.save(content, path, _use_new_zipfile_serialization=False)


def instead_of_file(make):
    return lambda path: (path.unlink(), make(path))


NONE = "is not a checkpoint, or damaged"
FILES = {
    "absent": (Path.unlink, "does not exist"),
    "folder": (instead_of_file(Path.mkdir), "is not a file"),
    "pipe": (instead_of_file(os.mkfifo), "is not a file"),
    "loop": (instead_of_file(lambda path: path.symlink_to(path)), "is a link that leads back to itself"),
    "empty": (rewrite(lambda b: b""), NONE + r" \(it is empty"),
    "text": (rewrite(lambda b: b"not a checkpoint\n"), NONE),
    "zeros": (rewrite(lambda b: bytes(len(b))), NONE),
    "cut-one-byte": (rewrite(lambda b: b[:-1]), NONE),
    "no-directory": (rewrite(lambda b: b[:-200] + bytes(200)), NONE),
    "prefixed": (rewrite(lambda b: b"#!/bin/sh\n" + b), NONE),
    "flip-weight": (flipped("/data/0"), r"the checksum of checkpoint/data/0 in it is wrong"),
    "flip-settings": (flipped("/data.pkl"), r"the checksum of checkpoint/data\.pkl in it is wrong"),
    "deflated": (swap("?", None, zipfile.ZIP_DEFLATED), "is compressed, which torch never does"),
    "bomb": (bomb, "is compressed, which torch never does"),
    "overlapping": (overlapping, "parts are larger than the file"),
    "two-pickles": (twice, "two parts of the same name"),
    "other-zip": (other_zip, NONE),
    "script": (lambda p: torch.jit.save(torch.jit.script(torch.nn.ReLU()), str(p)), NONE),
    "no-weights": (swap("/data/0", None), NONE),
    "short-weights": (swap("/data/1", b"1234"), NONE),
    "no-pickle": (swap("/data.pkl", None), NONE),
    "empty-pickle": (swap("/data.pkl", b""), NONE),
    "odd-pickle": (swap("/data.pkl", b"\xff" * 100), "holds more than weights|" + NONE),
    "cut-pickle": (swap("/data.pkl", b"\x80\x02}q\x00(X"), NONE),
    "nested-pickle": (swap("/data.pkl", b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."), "no model"),
    "huge-pickle": (swap("/data.pkl", b"N" * 2**25), "bytes of names and settings are more than a checkpoint has"),
    "posix-pickle": (swap("/data.pkl", b"cposix\nsystem\n(S'touch EXECUTED'\ntR."), r"\(posix\.system\)"),
    "legacy-evil": (legacy({"model": Evil()}), r"more than weights and settings \(posix\.system\)"),
    "legacy-other": (legacy({"weights": 1}), "is not a fairseq checkpoint: it holds no model"),
    "evil-pickle": (rewrite(lambda b: pickle.dumps(Evil())), NONE),
}

# what a hostile author makes of a good checkpoint's content, in files that torch reads


def setting(part: str = "model", **values):
    """Other settings of a part."""
    return lambda state: state["cfg"][part].update(values)


def put(**values):
    return lambda state: state.update(values)


def drop(key: str, *where: str):
    return lambda state: (functools.reduce(dict.__getitem__, where, state).pop(key), None)[1]


def more(name: str, tensor):
    return lambda state: state["model"].update({name: tensor})


def weight(name: str, change):
    return lambda state: more(name, change(state["model"][name]))(state)


def all_weights(change):
    return lambda state: state.update(model={k: change(v) for k, v in state["model"].items()})


def wrapped(depth: int, times: int = 1) -> list:
    """Lists in lists; with ``times`` = 2 a billion values in thirty of them."""
    return functools.reduce(lambda inner, _: [inner] * times, range(depth), [])


def cycle() -> dict:
    found: dict = {}
    found["again"] = found
    return found


def many_layers(state: dict) -> None:
    """One large layer, and as many empty ones as a small file can name."""
    state["cfg"]["model"].update(decoder_layers=500)
    for n in range(2, 500):
        state["model"][f"decoder.layers.{n}.fc1.bias"] = torch.zeros(1)


def whole_numbers(state: dict) -> None:
    state["cfg"]["model"].update(rpe="t5_bias")
    state["model"]["decoder.encodings.0.table"] = torch.zeros(32, 4, dtype=torch.int64)


def encodings(*names: str):
    return lambda state: state["model"].update({f"decoder.encodings.{name}": torch.zeros(4) for name in names})


Q0, FC = "decoder.layers.0.self_attn.q_proj.weight", "decoder.layers.1.fc1.weight"
STORED = torch.zeros(1).expand  # of any size, in four bytes
STATES = {
    # more than weights and settings
    "evil-model": (put(model=Evil()), r"more than weights and settings \(posix\.system\)"),
    "evil-extra": (put(extra_state=Evil()), r"more than weights and settings \(posix\.system\)"),
    "evil-eval": (put(task_state=Subclass()), r"more than weights and settings"),
    # of something else
    "list": (lambda s: [1, 2], "is not a fairseq checkpoint"),
    "tensor": (lambda s: torch.zeros(3), "is not a fairseq checkpoint"),
    "empty-table": (lambda s: {}, "is not a fairseq checkpoint: it holds no model"),
    "bare-weights": (lambda s: s["model"], "is not a fairseq checkpoint: it holds no model"),
    "no-cfg": (drop("cfg"), "is not a fairseq checkpoint: it holds no settings"),
    "cfg-none": (put(cfg=None), "is not a fairseq checkpoint: it holds no settings"),
    # fields of the wrong type
    "cfg-int-keys": (put(cfg={1: 2}), "its cfg is a dict, not a table"),
    "model-settings-str": (lambda s: s["cfg"].update(model="x"), r"its cfg\.model is 'x', not a table"),
    "task-settings-str": (lambda s: s["cfg"].update(task="x"), r"its cfg\.task is 'x', not a table"),
    "args-dict": (put(args={"arch": "x"}), "its args is a dict, not a table"),
    "model-none": (put(model=None), "its model is a NoneType, not a table of weights"),
    "model-number": (more("decoder.version", 7), r"its weight decoder\.version is 7, not a tensor"),
    "model-text": (more("x", "text"), "its weight x is 'text', not a tensor"),
    "long-number": (setting(seed_of_mine=10**5000), "more than weights and settings"),
    "digits": (setting(seed_of_mine=10**300), "a number of more than 63 bits"),
    "setting-tensor": (setting(dropout=torch.zeros(1)), r"its cfg\.model\.dropout is a Tensor, not a plain value"),
    "history-text": (put(optimizer_history="x"), "its optimizer_history is 'x', not a list of tables"),
    "history-numbers": (put(optimizer_history=[1]), "its optimizer_history is a list, not a list of tables"),
    "updates-text": (put(optimizer_history=[{"num_updates": "x"}]), "its num_updates is 'x'"),
    "updates-huge": (put(optimizer_history=[{"num_updates": 10**30}]), "its num_updates is"),
    "updates-64-bits": (put(optimizer_history=[{"num_updates": 2**63}]), f"its num_updates is {2**63}, not a number"),
    "extra-list": (put(extra_state=[1]), "its extra_state is a list, not a table"),
    "optimizer-text": (put(last_optimizer_state="x"), "its last_optimizer_state is 'x', not a table"),
    # the environment
    "env": (setting(rpe="${oc.env:CANARY}"), r"its cfg\.model\.rpe is '\$\{oc\.env:CANARY\}', to be filled in from"),
    "env-within": (setting(positions_train="warp:alpha=${oc.env:CANARY}"), r"its cfg\.model\.positions_train is"),
    "env-deep": (setting("task", x=[{"y": ["${oc.env:CANARY}"]}]), r"its cfg\.task\.x\.y is '\$\{oc"),
    "env-key": (setting("task", **{"${oc.env:CANARY}": 1}), r"'\$\{oc\.env:CANARY\}'"),
    "env-args": (put(args=Namespace(arch="${oc.env:CANARY}")), r"its args\.arch is '\$\{oc"),
    "reference": (setting(rpe="${task.data}"), r"its cfg\.model\.rpe is '\$\{task\.data\}'"),
    "reference-escaped": (setting(rpe=r"\${task.data}"), r"its cfg\.model\.rpe is"),
    # numbers of another kind
    "int8": (all_weights(lambda w: w.to(torch.int8)), r"its weight decoder\.\S+ is of int8, not of floating-point"),
    "complex": (weight(Q0, lambda w: w.to(torch.complex64)), rf"its weight {Q0} is of complex64"),
    "sparse": (weight(Q0, lambda w: w.to_sparse()), rf"its weight {Q0} is of sparse_coo"),
    "meta": (weight(Q0, lambda w: w.to("meta")), rf"its weight {Q0} is"),
    "quantised": (weight(Q0, lambda w: torch.quantize_per_tensor(w, 1.0, 0, torch.qint8)), rf"its weight {Q0} is of"),
    # sizes
    "layers-many": (setting(decoder_layers=90_000), "say decoder_layers=90000, its weights 2 layers"),
    "layers-fewer": (setting(decoder_layers=1), "say decoder_layers=1, its weights 2 layers"),
    "layer-far": (more("decoder.layers.999999999.x", torch.zeros(1)), "say decoder_layers=2, its weights 3 layers"),
    "width": (setting(decoder_embed_dim=2**20), "say decoder_embed_dim=1048576, its weights decoder.layers.0"),
    "inner": (setting(decoder_ffn_embed_dim=2**24), "say decoder_ffn_embed_dim=16777216, its weights"),
    "input": (setting(decoder_input_dim=2**20), "say decoder_input_dim=1048576, its weights decoder.embed_tokens"),
    "output": (setting(decoder_output_dim=2**20), "say decoder_output_dim=1048576, its weights"),
    "encoding-far": (encodings("999999999.x"), "its encodings are 1, one of them '999999999'"),
    "encoding-odd": (encodings("x.y"), "its encodings are 1, one of them 'x'"),
    "encoding-01": (encodings("0.x", "01.x"), "its encodings are 2, one of them '01'"),
    "encoding-huge": (encodings("9" * 5000 + ".x"), "its encodings are 1, one of them '9999"),
    "encodings-many": (encodings("0.x", "1.x", "2.x"), "say decoder_layers=2, its weights 3 encodings"),
    "expanded": (more("x", STORED(10**12)), "its weight x is larger than what the file holds"),
    "same-often": (lambda s: s["model"].update({f"x{n}": s["model"][FC] for n in range(2000)}), "than the file"),
    "reference-below-number": (setting(x={1: "${x}"}), r"its cfg\.model\.x is '\$\{x\}'"),
    "reference-below-long-name": (setting(x={60 * "k": "${x}"}), r"its cfg\.model\.x is '\$\{x\}'"),
    "nested": (setting(x=wrapped(300)), "more settings, or deeper ones, than any training has"),
    "laughs": (setting(x=wrapped(30, times=2)), "more settings, or deeper ones, than any training has"),
    "cycle": (setting(x=cycle()), "more settings, or deeper ones, than any training has"),
}
MOST = 2**31 - 1
SIZES = {  # beyond their ranges, and of other types
    "model.rpe_train_length": ("x", -1, MOST + 1, [64], 64.5, True),
    "model.decoder_layers": ("2", 0, 100_001),
    "model.decoder_attention_heads": (0, 4097),
    "model.decoder_embed_dim": ("wide", 0, 2**20 + 1),
    "model.decoder_ffn_embed_dim": (0, 2**24 + 1),
    "model.decoder_input_dim": (0, 2**20 + 1),
    "model.decoder_output_dim": (0, 2**20 + 1),
    "model.max_target_positions": (-1, MOST + 1),
    "model.rpe_log_encodings_every": (-1, MOST + 1),
    "task.tokens_per_sample": ("x", -1, MOST + 1),
    "task.output_dictionary_size": ("x", -2, MOST + 1),
}
OWN = {  # of encodings: commands that restore them say so; accuracy looks at the task first
    "table": (setting(rpe="learned:max_positions=2000000000"), "has other parameters than|2000000000"),
    "table-length": (setting(rpe="learned", rpe_train_length=2**31 - 1), "has other parameters than 'learned'"),
    "buckets": (setting(rpe="t5_bias:buckets=1000000000,max_distance=2000000000"), "other parameters|buckets"),
    "hidden": (setting(rpe="fire:hidden=1000000"), "has other parameters than|hidden"),
    "dim": (setting(rpe="sandwich:dim=1000000000"), "dim"),
    "other-spec": (setting(rpe="kerple_log"), "has other parameters than 'kerple_log'"),
    "unknown-spec": (setting(rpe="$(touch EXECUTED)"), "unknown encoding|is not key=value"),
    "number-spec": (setting(rpe=7), "unknown encoding '7'"),
    "heads-odd": (setting(decoder_attention_heads=5), "5 heads do not divide"),
    "int-table": (whole_numbers, "table is of int64, the model's of float32"),
}
WHOLE = {  # of the whole model: what builds it says so
    "layers-named": (many_layers, "its settings say 500 layers of width 32 and 64, its weights are"),
    "layers-of-nothing": (lambda s: s.update(model={"x": torch.zeros(9)}), "its settings say 2 layers of width 32"),
    "base-layers": (setting(base_layers=10**9), "say base_layers=1000000000, its weights 37 tensors"),
}


@pytest.fixture(scope="module")
def good(state, tmp_path_factory) -> Path:
    return checkpoint_with(state, tmp_path_factory.mktemp("good"))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty folder to run in, which stays empty; a canary in the environment."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CANARY", CANARY)
    signal.alarm(SECONDS)
    yield folder
    signal.alarm(0)
    assert list(folder.iterdir()) == []


def check_line(said: str, words: str) -> None:
    assert re.search(words, said), said
    assert CANARY not in said and "weights_only" not in said and said.strip().count("\n") == 0 and len(said) < 700, said


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_checkpoints(name, good, here, tmp_path):
    file = Path(shutil.copyfile(good, tmp_path / "bad.pt"))
    make, words = FILES[name]
    make(file)
    with pytest.raises(UserError) as caught:
        checkpoints.load(file)
    check_line(str(caught.value), words)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(some.data())
def test_a_file_that_is_cut_or_has_a_wrong_bit_is_refused_or_holds_the_same(good, tmp_path_factory, data):
    whole = bytearray(good.read_bytes())
    if data.draw(some.booleans(), "cut"):
        del whole[data.draw(some.integers(0, len(whole) - 1), "length") :]
    else:  # a date in the zip's directory has no checksum
        whole[data.draw(some.integers(0, len(whole) - 1), "place")] ^= 1 << data.draw(some.integers(0, 7), "bit")
    file = tmp_path_factory.mktemp("damaged") / "bad.pt"
    file.write_bytes(whole)
    try:
        found = checkpoints.load(file)
    except UserError as error:
        check_line(str(error), "bad.pt")
        return
    known = checkpoints.load(good)
    assert found.model == known.model and found.weights.keys() == known.weights.keys()
    assert all(torch.equal(found.weights[name], known.weights[name]) for name in known.weights)


def saved(state: dict, change, file: Path) -> Path:
    content = {k: (dict(v) if k == "model" else copy.deepcopy(v)) for k, v in state.items()}
    other = change(content)
    torch.save(content if other is None else other, file)
    return file


@pytest.mark.parametrize("name", [*STATES, *OWN, *WHOLE])
def test_contents_that_no_training_leaves(name, good, here, tmp_path):
    change, words = {**STATES, **OWN, **WHOLE}[name]
    with pytest.raises(UserError) as caught:
        checkpoint = checkpoints.load(saved(torch.load(good), change, tmp_path / "bad.pt"))
        assert name not in STATES
        checkpoint.load_encodings() if name in OWN else check_model_size(checkpoint)
    check_line(str(caught.value), words)


@pytest.mark.parametrize(("tables", "refused"), [(18, False), (19, True)])
def test_settings_may_be_tables_in_tables_as_deep_as_is_read(tables, refused, good, tmp_path):
    nested = functools.reduce(lambda inner, _: {"t": inner}, range(tables), 1)
    file = saved(torch.load(good), setting(x=nested), tmp_path / "deep.pt")
    if refused:
        with pytest.raises(UserError, match="more settings, or deeper ones, than any training has"):
            checkpoints.load(file)
    else:
        assert checkpoints.load(file).model["x"] == nested


@pytest.mark.parametrize("name", SIZES)
def test_sizes_out_of_their_range(name, good, tmp_path):
    part, _, key = name.partition(".")
    for value in SIZES[name]:
        file = saved(torch.load(good), setting(part, **{key: value}), tmp_path / "bad.pt")
        with pytest.raises(UserError, match=rf"its {part}\.{key} is .*, not a whole number from -?\d+ to \d+"):
            checkpoints.load(file)


LOADED = {  # commands that look at a checkpoint, and of what is refused the kinds that each looks for by itself
    "eval {file} {data} --lengths 32 --device cpu": ("env", "layers-named", "int-table", "flip-weight"),
    "eval {file} {data} --lengths 32 --engine fairseq": ("env", "layers-named", "int-table", "flip-weight"),
    "verdict --checkpoint {file}": ("env", "int-table", "flip-weight"),
    "erf {file} {data} --device cpu --blocks 2": ("env", "layers-named", "int-table"),
    "sliding {file} {data} --device cpu": ("env", "layers-named", "int-table"),
    "key-tokens {file} {data} --short-context 8 --out x.json --device cpu": ("env", "layers-named", "flip-weight"),
    "eval-task {file} --device cpu": ("env", "flip-weight"),
    "needle-attention {file} --device cpu --out x": ("env",),
    "figures --checkpoint {file} --query 4": ("env", "int-table"),
    "extend {file} {data} --tokens 64 --out x": ("env", "flip-weight"),
    "train {data} --rpe alibi --finetune-from {file} --out x --tokens 32 --device cpu": ("env", "layers-named"),
}


@pytest.mark.parametrize(("command", "name"), [(command, name) for command, names in LOADED.items() for name in names])
def test_every_command_looks_before_it_builds(command, name, good, corpus, here, tmp_path, capsys):
    make, words = {**FILES, **STATES, **OWN, **WHOLE}[name]
    if name in FILES:
        make(file := Path(shutil.copyfile(good, tmp_path / "bad.pt")))
    else:
        file = saved(torch.load(good), make, tmp_path / "bad.pt")
    check_line(error_of(capsys, *command.format(file=file, data=corpus).split()), words)


@pytest.mark.parametrize("name", ["env", "evil-model", "model-none"])
def test_a_training_goes_on_from_no_such_file(name, good, corpus, here, tmp_path, capsys):
    """Refused before fairseq starts; the folder stays as it was."""
    runs = tmp_path / "run"
    runs.mkdir()
    command = f"train {corpus} --rpe alibi --out {runs} --tokens 32 --updates 9 --device cpu"
    config = TrainingConfig(**stated_settings(build_parser("train").parse_args(command.split())))
    CheckpointFolder(runs).write_record(config, make_plan(config, corpus_digest(corpus)))
    change, words = STATES[name]
    last = saved(torch.load(good), change, runs / "checkpoint_last.pt")
    before = {path.name: path.read_bytes() for path in runs.iterdir()}
    check_line(error_of(capsys, *command.split()), words)
    assert last.exists() and before == {p.name: p.read_bytes() for p in runs.iterdir() if p.name != ".lock"}


@pytest.mark.parametrize("command", ["figures --sweep {}", "report {}"])
@pytest.mark.parametrize("name", ["env", "evil-model"])
def test_pages_and_figures_of_sweeps_with_such_files(command, name, good, here, tmp_path, capsys):
    sweep, row = tmp_path / "sweep", {"checkpoint": "c", "split": "test", "loss_base2": 1.0, "tokens": 99, "ppl": 2.0}
    place = sweep / "runs" / "alibi-seed1"
    write_json(place / "checkpoints" / "run.json", {"layout": 2, "finished": {"checkpoint": "c"}})
    settings = {"tokens": 32, "split": "test"}
    write_json(sweep / "sweep.json", {"layout": 2, "settings": settings, "encodings": ["alibi"], "seeds": [1]})
    for length in (32, 64):
        append_json_line(place / "eval.jsonl", {**row, "length": length})
    change, words = STATES[name]
    saved(torch.load(good), change, place / "checkpoints" / "checkpoint_last.pt")
    check_line(error_of(capsys, *command.format(sweep).split()), words)


GOOD = {  # what was good stays good
    "older": [
        *(drop(name, "cfg", "model") for name in ("rpe_seed", "rpe_train_length", "rpe_vocabulary", "compute_dtype")),
        all_weights(lambda w: w.half()),
    ],
    "weights-alone": [drop("task_state"), drop("last_optimizer_state"), all_weights(lambda w: w.double())],
    "namespace": [setting(x=float("inf")), lambda s: s["cfg"].update(model=Namespace(**s["cfg"]["model"]))],
}


@pytest.mark.parametrize("name", GOOD)
def test_good_checkpoints_stay_good(name, good, corpus, here, tmp_path):
    file = saved(torch.load(good), lambda state: [change(state) for change in GOOD[name]] and None, tmp_path / "ok.pt")
    for engine in ("fast", "fairseq"):
        run_here("eval", file, corpus, "--lengths", 32, "--device", "cpu", "--engine", engine)


def test_old_checkpoints_with_parsed_arguments(state, corpus, here, tmp_path, capsys):
    """fairseq of before 2021 saved ``args`` and no ``cfg``; torch of before 1.6 no zip."""
    parts = {**state["cfg"]["task"], **state["cfg"]["model"], "task": "language_modeling", "data": str(corpus)}
    args = Namespace(**{k: v for k, v in parts.items() if not k.startswith(("rpe", "positions_"))})
    args.arch = args._name = "transformer_lm"
    weights = {k: v for k, v in state["model"].items() if not k.startswith("decoder.encodings.")}
    old = {**state, "cfg": None, "args": args, "model": weights}
    torch.save(old, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    command = ("eval", tmp_path / "old.pt", corpus, "--lengths", 32, "--device", "cpu")
    run_here(*command, "--engine", "fairseq")
    words = r"old\.pt is not of this plugin \(its model is 'transformer_lm'\): .*--engine fairseq"
    check_line(error_of(capsys, *command), words)


def test_fairseq_eval_lm_says_the_same(good, corpus, here, tmp_path):
    """Where torch's protection is switched off besides."""
    file = saved(torch.load(good), STATES["evil-model"][0], tmp_path / "bad.pt")
    flags = ("--user-dir", PACKAGE, "--path", file, "--task", "language_modeling", "--cpu")
    done = fairseq("eval_lm", corpus, *flags, ok=False, environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"})
    assert done.returncode == 1 and "Traceback" not in done.stderr
    said = f"error: checkpoint {file} is refused: it holds more than weights and settings (posix.system)\n"
    assert done.stderr.endswith(said)


def test_checksums_are_read_once(good, tmp_path, monkeypatch):
    file = Path(shutil.copyfile(good, tmp_path / "a.pt"))
    read = []
    original = zipfile.ZipFile.testzip
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda archive: read.append(1) or original(archive))
    for _ in range(3):
        checkpoint_file.check_file(file)
    assert len(read) == 1
    flipped("/data/1")(file)
    with pytest.raises(UserError, match="checksum"):
        checkpoint_file.check_file(file)
    assert len(read) == 2
