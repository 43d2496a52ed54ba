"""Shared fixtures: a small dictionary and task, models by spec, and a binarised corpus."""

from __future__ import annotations

import contextlib
import io
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
# the first chapters of Wuthering Heights (Emily Brontë, 1847), twelve words a line: a fixed text, so that numbers stay
CORPUS = Path(__file__).with_name("corpus.txt")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # before anything imports triton: its kernels then run in the interpreter
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("FAIRSEQ_RPE_CACHE", "off")  # what the user has measured is not asked, and nothing is added to it

# These files start many programs. Begun first, they wait beside those that compute.
STARTERS = (
    *("test_slurm", "test_fairseq_cli", "test_sweep", "test_launch", "test_board", "test_cli", "test_moves"),
    *("test_ranks", "test_benchmarks", "test_compat", "test_accuracy"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(STARTERS)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="module", autouse=True)
def registries_as_they_were():
    """What the tests of a file register does not reach those of another, whichever process runs them."""
    from fairseq_rpe import algorithms, encodings, positions

    tables = [room.base.registry._table for room in (algorithms, encodings, positions)]
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


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
    """What fairseq's parser would hand to build_model, at a size that a test affords."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    small = {"tokens_per_sample": 64, "decoder_embed_dim": 32, "decoder_attention_heads": 4}
    args = Namespace(**{"rpe": rpe, "dropout": 0.0, "decoder_ffn_embed_dim": 64, **small, **changes})
    ARCH_CONFIG_REGISTRY[arch](args)
    return args


def make_model(task, rpe: str, seed: int = 0, **changes):
    """A small transformer_rpe_lm in evaluation mode."""
    from fairseq_rpe.models.transformer_rpe_lm import TransformerRPELanguageModel

    torch.manual_seed(seed)
    return TransformerRPELanguageModel.build_model(model_args(rpe, **changes), task).eval()


def with_vocabulary(corpus: Path, folder: Path, symbols: int) -> Path:
    """A copy of a prepared corpus, as of fairseq-preprocess, whose dictionary has so many symbols, its specials too."""
    from fairseq_rpe.data.folder import read_dictionary

    copy = folder / "bin"
    shutil.copytree(corpus, copy, ignore=shutil.ignore_patterns("corpus.json"))
    lacking = symbols - len(read_dictionary(copy / "dict.txt"))
    with open(copy / "dict.txt", "a", encoding="utf-8") as file:
        file.writelines(f"madeup{n} 0\n" for n in range(lacking))
    return copy


def with_documents(corpus: Path, folder: Path, lines: tuple[int, ...] = (1, 7, 2, 30, 3)) -> Path:
    """A copy of a binarised corpus of plain lines, as documents of so many lines in turn, a blank line after each."""
    import itertools

    import numpy as np

    from fairseq_rpe.data.folder import EOS_ID, SPLITS, read_split, write_index

    copy = folder / "documents"
    copy.mkdir()
    shutil.copyfile(corpus / "dict.txt", copy / "dict.txt")
    for split in SPLITS:
        ids, sizes = read_split(corpus, split)
        items, cycle = np.split(ids, np.cumsum(sizes)[:-1]), itertools.cycle(lines)
        left, made = next(cycle), []
        for item in items:
            if not left:
                made.append(np.array([EOS_ID], ids.dtype))
                left = next(cycle)
            made.append(item)
            left -= 1
        np.concatenate(made).tofile(copy / f"{split}.bin")
        write_index(copy / f"{split}.idx", io.BytesIO(np.array([len(x) for x in made], "<i4").tobytes()), ids.dtype.str)
    return copy


def save_checkpoint(folder, spec, layers=1, change=None, **model):
    """What a run of a sweep leaves behind, without the rest of its model."""
    from fairseq_rpe.encodings import build

    torch.manual_seed(0)
    made = [build(spec, 4, 32, 64) for _ in range(layers)]
    for encoding in made:
        if change is not None:
            change(encoding)
    values = {f"decoder.encodings.{i}.{k}": v for i, e in enumerate(made) for k, v in e.state_dict().items()}
    cfg = {"rpe": spec, "decoder_attention_heads": 4, "decoder_embed_dim": 32, "rpe_train_length": 64, **model}
    path = folder / "checkpoints" / "checkpoint_last.pt"
    path.parent.mkdir(parents=True)
    torch.save({"cfg": {"model": cfg}, "model": {"decoder.embed_tokens.weight": torch.zeros(3), **values}}, path)
    return path, made


def p_of_heads(*p):
    """A change for ``save_checkpoint``: Kerple-log's exponents."""
    from fairseq_rpe.encodings.kerple import positive_inverse

    def change(encoding):
        with torch.no_grad():
            encoding.raw_p.copy_(positive_inverse(torch.tensor(p), 0.01) - encoding._p_offset)

    return change


def run(*command: str | Path, ok: bool = True, timeout: int = 300, **kwargs) -> subprocess.CompletedProcess:
    """Run a command; by default it must succeed."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout, **kwargs)
    assert not ok or done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def run_here(*command: str | Path, ok: bool = True, processes: bool = False) -> subprocess.CompletedProcess:
    """Run a command of fairseq-rpe in this process; by default it must succeed.

    The trainings and evaluations that it starts run in this process too, unless ``processes`` is set.
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
    """The one line in which a command refuses; nothing is on standard output."""
    from fairseq_rpe.cli.main import main

    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, (out, err)
    return err


def assert_equal_models(one: Path, two: Path) -> None:
    """Two checkpoints have the same weights, bit for bit."""
    first, second = (torch.load(path, weights_only=True)["model"] for path in (one, two))
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def command_words(line: str) -> list[str]:
    """The words of a printed command line that follow the program."""
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
    """A folder that the first of pytest's processes to ask for it fills, and all use: its name, and what fills it."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent

    def folder_of(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = place / f"{name}-for-all", place / f"{name}-for-all.done"
        with filelock.FileLock(place / f"{name}-for-all.lock"):
            if not done.exists():
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def corpus(made_once) -> Path:
    """A binarised word-level corpus with 300 symbols: train, valid, test."""
    return made_once("corpus", _fill_corpus) / "bin"


def _fill_corpus(folder: Path) -> None:
    lines = CORPUS.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = {"train": lines[:600], "valid": lines[600:700], "test": lines[700:]}
    flags: list[str | Path] = ["--only-source", "--destdir", folder / "bin", "--nwordssrc", "300"]
    for name, part in parts.items():
        (folder / f"{name}.txt").write_text("".join(part), encoding="utf-8")
        flags += [f"--{name}pref", folder / f"{name}.txt"]
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
    """What is in it, the weights of words made larger so that predictions differ clearly."""
    state = torch.load(trained)
    for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
        state["model"][name] = 5 * state["model"][name]
    return state


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Figures are made but not drawn, which takes most of a report's time and is tested elsewhere."""
    monkeypatch.setattr("fairseq_rpe.figures.style.save", lambda figure, *paths: [path.touch() for path in paths])
    monkeypatch.setattr("fairseq_rpe.figures.sweep_curves.label_line_ends", lambda *_: None)
    monkeypatch.setattr("fairseq_rpe.reports.page.to_svg", lambda figure: b"<svg/>")


def checkpoint_with(state: dict, folder: Path, spec: str = "alibi", dtype=torch.float32, task=None, **model) -> Path:
    """The same model with another encoding, number type or other settings."""
    from fairseq_rpe.encodings import build

    cfg = {**state["cfg"]}
    heads, width = cfg["model"]["decoder_attention_heads"], cfg["model"]["decoder_embed_dim"]
    torch.manual_seed(0)
    own = build(spec, heads, width, 32).state_dict()
    weights = {k: v for k, v in state["model"].items() if not k.startswith("decoder.encodings.")}
    weights |= {f"decoder.encodings.0.{k}": v for k, v in own.items()}
    cfg["model"] = {**cfg["model"], "rpe": spec, "rpe_share": "model", **model}
    cfg["task"] = {**cfg["task"], **(task or {})}
    path = folder / "checkpoint.pt"
    torch.save({**state, "cfg": cfg, "model": {k: v.to(dtype) for k, v in weights.items()}}, path)
    return path
