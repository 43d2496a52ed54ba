"""Shared fixtures: a small dictionary and task, models by spec, and a binarised corpus."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest
import torch
from in_process import children_in_process, fairseq

PACKAGE = Path(__file__).resolve().parents[1] / "fairseq_rpe"
VOCABULARY = 60
# The first chapters of Wuthering Heights (Emily Brontë, 1847), twelve words a line. The text is fixed, so that measured
# numbers do not change.
CORPUS = Path(__file__).with_name("corpus.txt")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # set before anything imports triton: its kernels then run in the interpreter
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("FAIRSEQ_RPE_CACHE", "off")  # tests neither read nor write the autotune cache of the user

# Test files that start many processes. They run first, so that their waiting overlaps with the computation of others.
STARTERS = ("test_slurm", "test_fairseq_cli", "test_sweep", "test_launch", "test_board", "test_cli", "test_moves")
STARTERS += ("test_benchmarks", "test_compat", "test_accuracy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: index for index, name in enumerate(STARTERS)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="module", autouse=True)
def registries_as_they_were():
    """After each test file, remove what its tests have registered, so that no other file of the process sees it."""
    from fairseq_rpe import algorithms, encodings, positions

    tables = [package.base.registry._table for package in (algorithms, encodings, positions)]
    copies = [dict(table) for table in tables]
    yield
    for table, copy in zip(tables, copies, strict=True):
        table.clear()
        table.update(copy)


@pytest.fixture(scope="session")
def task():
    """fairseq's language-modelling task over a dictionary of 60 types."""
    from fairseq.data import Dictionary
    from fairseq.tasks.language_modeling import LanguageModelingTask

    import fairseq_rpe.models  # noqa: F401

    dictionary = Dictionary()
    for i in range(VOCABULARY - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    return LanguageModelingTask(Namespace(add_bos_token=False), dictionary)


def model_args(rpe: str, arch: str = "transformer_rpe_lm_tiny", **changes) -> Namespace:
    """Return what fairseq's parser passes to ``build_model``, for a small model; ``changes`` are further settings."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    small = {"tokens_per_sample": 64, "decoder_embed_dim": 32, "decoder_attention_heads": 4}
    args = Namespace(**{"rpe": rpe, "dropout": 0.0, "decoder_ffn_embed_dim": 64, **small, **changes})
    ARCH_CONFIG_REGISTRY[arch](args)
    return args


def make_model(task, rpe: str, seed: int = 0, **changes):
    """Build a small transformer_rpe_lm in evaluation mode; ``changes`` are settings as for :func:`model_args`."""
    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

    torch.manual_seed(seed)
    return TransformerRPELanguageModel.build_model(model_args(rpe, **changes), task).eval()


def with_vocabulary(corpus: Path, folder: Path, symbols: int) -> Path:
    """Copy a corpus and pad its dictionary to a number of symbols, special ones included.

    The copy has no ``corpus.json``, like a corpus of fairseq-preprocess.
    """
    from fairseq_rpe.data.folder import read_dictionary

    copy = folder / "bin"
    shutil.copytree(corpus, copy, ignore=shutil.ignore_patterns("corpus.json"))
    missing = symbols - len(read_dictionary(copy / "dict.txt"))
    with open(copy / "dict.txt", "a", encoding="utf-8") as file:
        file.writelines(f"madeup{number} 0\n" for number in range(missing))
    return copy


def with_documents(corpus: Path, folder: Path, lines: tuple[int, ...] = (1, 7, 2, 30, 3)) -> Path:
    """Copy a binarised corpus and divide it into documents, with a blank line after each.

    Args:
        corpus: a corpus without documents.
        folder: where the copy is written.
        lines: numbers of lines of the documents, repeated in turn.
    """
    import numpy as np

    from fairseq_rpe.data.folder import EOS_ID, SPLITS, read_split, write_index

    copy = folder / "documents"
    copy.mkdir()
    shutil.copyfile(corpus / "dict.txt", copy / "dict.txt")
    for split in SPLITS:
        ids, sizes = read_split(corpus, split)
        line_counts, remaining = itertools.cycle(lines), 0
        new_lines = []
        for line in np.split(ids, np.cumsum(sizes)[:-1]):
            if not remaining:
                if new_lines:
                    new_lines.append(np.array([EOS_ID], ids.dtype))  # the blank line
                remaining = next(line_counts)
            new_lines.append(line)
            remaining -= 1
        np.concatenate(new_lines).tofile(copy / f"{split}.bin")
        lengths = np.array([len(line) for line in new_lines], "<i4")
        write_index(copy / f"{split}.idx", io.BytesIO(lengths.tobytes()), ids.dtype.str)
    return copy


def save_checkpoint(folder, spec, layers=1, change=None, **model):
    """Save a checkpoint that has encodings but no other weights of a model.

    Args:
        folder: run folder.
        spec: spec of the encodings.
        layers: number of encodings.
        change: called with each encoding before it is saved.
        model: settings of the model.

    Returns:
        The path of the checkpoint and its encodings.
    """
    from fairseq_rpe.encodings import build

    torch.manual_seed(0)
    encodings = [build(spec, 4, 32, 64) for _ in range(layers)]
    for encoding in encodings:
        if change is not None:
            change(encoding)
    weights = {
        f"decoder.encodings.{index}.{name}": value
        for index, encoding in enumerate(encodings)
        for name, value in encoding.state_dict().items()
    }
    cfg = {"rpe": spec, "decoder_attention_heads": 4, "decoder_embed_dim": 32, "rpe_train_length": 64, **model}
    path = folder / "checkpoints" / "checkpoint_last.pt"
    path.parent.mkdir(parents=True)
    torch.save({"cfg": {"model": cfg}, "model": {"decoder.embed_tokens.weight": torch.zeros(3), **weights}}, path)
    return path, encodings


def p_of_heads(*p):
    """Return a ``change`` for :func:`save_checkpoint` that sets Kerple-log's exponent p of each head."""
    from fairseq_rpe.encodings.kerple import positive_inverse

    def change(encoding):
        with torch.no_grad():
            encoding.raw_p.copy_(positive_inverse(torch.tensor(p), 0.01) - encoding._p_offset)

    return change


def run(*command: str | Path, ok: bool = True, timeout: int = 300, **kwargs) -> subprocess.CompletedProcess:
    """Run a command as a process; it must succeed unless ``ok`` is false."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout, **kwargs)
    assert not ok or done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def run_here(*command: str | Path, ok: bool = True, processes: bool = False) -> subprocess.CompletedProcess:
    """Run a command of fairseq-rpe in this process; it must succeed unless ``ok`` is false.

    Trainings and evaluations that the command starts run in this process, too, unless ``processes`` is set.
    """
    from fairseq_rpe.cli.main import main

    words, out, err = [str(word) for word in command], io.StringIO(), io.StringIO()
    children = contextlib.nullcontext() if processes else children_in_process()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), children:
        code = main(words)
    done = subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
    assert not ok or code == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def error_of(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    """Run a command of fairseq-rpe that must fail, and return its error, which must be its only output and one line."""
    from fairseq_rpe.cli.main import main

    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, (out, err)
    return err


def assert_equal_models(first: Path, second: Path) -> None:
    """Assert that two checkpoints have the same weights, bit for bit."""
    first_weights, second_weights = (torch.load(path, weights_only=True)["model"] for path in (first, second))
    assert first_weights.keys() == second_weights.keys()
    assert [name for name in first_weights if not torch.equal(first_weights[name], second_weights[name])] == []


def command_words(line: str) -> list[str]:
    """Return the words of a printed command line after the name of the program."""
    return shlex.split(line.partition(" fairseq_rpe.cli.main ")[2])


PROGRAM = (sys.executable, "-m", "fairseq_rpe.cli.main")
TRAIN_FLAGS = [
    *("--user-dir", str(PACKAGE), "--task", "language_modeling", "--arch", "transformer_rpe_lm_tiny"),
    *("--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64", "--criterion", "lm_cross_entropy"),
    *("--tokens-per-sample", "32", "--batch-size", "4", "--optimizer", "adam", "--lr", "0.003", "--cpu"),
    *("--no-epoch-checkpoints", "--num-workers", "0", "--log-format", "simple", "--log-interval", "1"),
]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """A function that returns a folder which all processes of pytest share, by its name.

    The process that first asks for the folder fills it with the function that it passes; others wait.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder of its own below that of the session
        base = base.parent

    def shared_folder(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = base / f"{name}-for-all", base / f"{name}-for-all.done"
        with filelock.FileLock(base / f"{name}-for-all.lock"):
            if not done.exists():
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return shared_folder


@pytest.fixture(scope="session")
def corpus(made_once) -> Path:
    """A binarised word-level corpus with 300 symbols: train, valid, test."""
    return made_once("corpus", _fill_corpus) / "bin"


def _fill_corpus(folder: Path) -> None:
    lines = CORPUS.read_text(encoding="utf-8").splitlines(keepends=True)
    splits = {"train": lines[:600], "valid": lines[600:700], "test": lines[700:]}
    flags: list[str | Path] = ["--only-source", "--destdir", folder / "bin", "--nwordssrc", "300"]
    for split, split_lines in splits.items():
        (folder / f"{split}.txt").write_text("".join(split_lines), encoding="utf-8")
        flags += [f"--{split}pref", folder / f"{split}.txt"]
    fairseq("preprocess", *flags)


@pytest.fixture(scope="session")
def trained(corpus, made_once) -> Path:
    """A checkpoint of fairseq-train: alibi, two layers, 4 updates at 32 tokens."""
    flags = ["--rpe", "alibi", "--max-update", "4", "--disable-validation"]

    def fill(folder: Path) -> None:
        fairseq("train", corpus, *TRAIN_FLAGS, *flags, "--save-dir", folder)

    return made_once("trained", fill) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def state(trained) -> dict:
    """The content of ``trained``, with larger weights of words, so that predictions differ clearly."""
    state = torch.load(trained)
    for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
        state["model"][name] = 5 * state["model"][name]
    return state


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Write empty pictures: drawing takes most of a report's time, and other tests draw figures."""
    monkeypatch.setattr("fairseq_rpe.figures.style.save", lambda figure, *paths: [path.touch() for path in paths])
    monkeypatch.setattr("fairseq_rpe.figures.sweep_curves.label_line_ends", lambda *_: None)
    monkeypatch.setattr("fairseq_rpe.reports.page.to_svg", lambda figure: b"<svg/>")


def checkpoint_with(state: dict, folder: Path, spec: str = "alibi", dtype=torch.float32, task=None, **model) -> Path:
    """Save a checkpoint with another encoding.

    Args:
        state: content of a checkpoint.
        folder: where it is written.
        spec: spec of the encoding, which all layers share; its weights are initial ones.
        dtype: dtype of all weights.
        task: settings of the task.
        model: settings of the model.
    """
    from fairseq_rpe.encodings import build

    cfg = {**state["cfg"]}
    heads, width = cfg["model"]["decoder_attention_heads"], cfg["model"]["decoder_embed_dim"]
    torch.manual_seed(0)
    encoding = build(spec, heads, width, 32)
    weights = {name: value for name, value in state["model"].items() if not name.startswith("decoder.encodings.")}
    weights |= {f"decoder.encodings.0.{name}": value for name, value in encoding.state_dict().items()}
    cfg["model"] = {**cfg["model"], "rpe": spec, "rpe_share": "model", **model}
    cfg["task"] = {**cfg["task"], **(task or {})}
    path = folder / "checkpoint.pt"
    torch.save({**state, "cfg": cfg, "model": {name: value.to(dtype) for name, value in weights.items()}}, path)
    return path
