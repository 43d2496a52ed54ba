"""Each repair of fairseq: that it works; before a release also what fails without it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PACKAGE, make_model, model_args, run
from refusal import refused

import fairseq_rpe.models  # noqa: F401  (applies the repairs)
from fairseq_rpe import compat
from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.compat import quick_start
from fairseq_rpe.compat.guards import check_eval_workers, check_scored_tokens
from fairseq_rpe.core import UserError

PAYLOAD = "touched"
RESUMED = """
from argparse import Namespace
import numpy as np
from fairseq.data import FairseqDataset
from fairseq.tasks import FairseqTask

class Rows(FairseqDataset):
    sizes = np.ones(12, dtype=np.int64)
    def __len__(self): return 12
    def __getitem__(self, i): return int(i)
    def collater(self, rows): return rows
    def size(self, i): return 1
    def num_tokens(self, i): return 1
    def num_tokens_vec(self, indices): return np.ones(len(indices), dtype=np.int64)
    def ordered_indices(self): return np.random.permutation(12)

def iterator(epoch):
    return FairseqTask(Namespace(data="x")).get_batch_iterator(Rows(), max_sentences=2, seed=1, epoch=epoch)

straight = iterator(1)
epochs = [list(straight.next_epoch_itr()) for _ in range(3)]
resumed = iterator(3)
resumed.load_state_dict({"epoch": 3, "iterations_in_epoch": 2, "version": 2, "shuffle": True})
at_its_start = iterator(3)
at_its_start.load_state_dict({"epoch": 3, "iterations_in_epoch": 0, "version": 2, "shuffle": True})
print(list(resumed.next_epoch_itr()) == epochs[2][2:], list(at_its_start.next_epoch_itr()) == epochs[2])
print(sorted(sum(epochs[2], [])) == list(range(12)), epochs[0] != epochs[1] != epochs[2])
# tasks of fairseq's own tests have no data folder
print(len(FairseqTask(Namespace(data=None)).get_batch_iterator(Rows(), max_sentences=2, seed=1).next_epoch_itr()))
"""
BLOCKS = """
import numpy as np
from fairseq.data import data_utils
sizes = np.full(41, 32)
batches = data_utils.batch_by_size(
    np.arange(41), num_tokens_fn=lambda i: 32, num_tokens_vec=sizes, max_sentences=4, required_batch_size_multiple=8)
print("blocks", sum(len(b) for b in batches), len(batches))
"""
QUICK = """
import logging, sys, types
logging.basicConfig(level=logging.INFO)
import fairseq_rpe.models, torch
assert not {'matplotlib', 'fairseq_rpe.modules.encoding_logger', 'fairseq_rpe.analysis'} & set(sys.modules)
import fairseq_rpe.evaluation.perplexity
assert not {'sklearn', 'scipy'} & set(sys.modules)
torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], lr=0.5).zero_grad()
assert not any(name.startswith('torch._dynamo.') for name in sys.modules)
from fairseq.criterions import sentence_prediction as scores
from fairseq.tasks.audio_classification import sklearn_metrics
import numpy as np
a, b = np.array([0, 1, 1, 0]), np.array([1, 1, 1, 0])
got = scores.acc_and_f1(a, b), scores.matthews_corrcoef(a, b), scores.pearson_and_spearman(a, b)
curve = sklearn_metrics.roc_curve(a, b)
import sklearn.metrics as own, scipy.stats
assert isinstance(own.f1_score, types.FunctionType) and isinstance(scipy.stats.pearsonr, types.FunctionType)
assert got[0]['f1'] == own.f1_score(b, a) == 0.8 and got[1] == own.matthews_corrcoef(b, a)
assert got[2]['pearson'] == scipy.stats.pearsonr(a, b)[0] and got[2]['spearmanr'] == scipy.stats.spearmanr(a, b)[0]
assert all(map(np.array_equal, curve, own.roc_curve(a, b)))
print('same')
"""
COMPILED = """
import fairseq_rpe.models, sys, torch
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.Adam([weight], lr=0.5)
assert torch.compiler.disable()(abs)(-2) == torch.compiler.disable(abs)(-2) == 2
seen = []
backend = lambda graph, inputs: seen.append(len(list(graph.graph.nodes))) or graph.forward
assert torch.compile(lambda x: 2 * x + 1, backend=backend)(torch.ones(2)).tolist() == [3.0, 3.0]
assert seen and torch._dynamo is sys.modules['torch._dynamo'] and torch._dynamo.__file__
import torch._dynamo.config
weight.sum().backward(); optimizer.step()
assert torch.allclose(weight, torch.tensor(0.5))
optimizer.add_param_group({'params': [torch.nn.Parameter(torch.ones(1))]})
print('compiled')
"""
# programs of the process without repairs, which runs them one after another, before a release
UNREPAIRED = {
    "the package alone": "import fairseq_rpe.encodings, numpy; print(hasattr(numpy, 'compat'))",
    "numpy": "import fairseq; import numpy as np; np.compat.long",
    "namespace": "import argparse, torch; torch.save({'args': argparse.Namespace(a=1)}, 'x.pt'); torch.load('x.pt')",
    "eval": f"import fairseq.utils as u; u.eval_str_list(\"[open('{PAYLOAD}', 'w')]\")",
    "resumed": RESUMED,
    "blocks": BLOCKS,
    "repairs": "import sys; print('fairseq_rpe.compat' in sys.modules)",
}
RUNNER = """
import contextlib, io, json, sys, traceback
answers = {}
for name, code in json.load(sys.stdin).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=err)
    answers[name] = [out.getvalue(), err.getvalue()]
print(json.dumps(answers))
"""


@pytest.mark.release
def test_fairseq_fails_without_the_repairs(tmp_path):
    """In a process that imports the package, which does not import fairseq; other tests have the repaired results."""
    done = run(sys.executable, "-c", RUNNER, input=json.dumps(UNREPAIRED), cwd=tmp_path)
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers["repairs"] == answers["the package alone"] == ["False\n", ""]
    assert (tmp_path / PAYLOAD).exists() and answers["eval"][0] == ""  # this string of a configuration has run
    assert "AttributeError" in answers["numpy"][1] and "UnpicklingError" in answers["namespace"][1]
    assert answers["resumed"][0].split() == ["False", "False", "True", "True", "6"]
    assert "blocks 40 10" in answers["blocks"][0]


def repaired(code: str) -> str:
    """What code prints in this process, where fairseq is repaired."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {"__name__": "__main__"})
    return out.getvalue()


def test_apply_twice_is_once():
    import fairseq.utils
    from fairseq_cli import eval_lm

    compat.apply()
    before = eval_lm.eval_lm, eval_lm.SequenceScorer, vars(fairseq.utils)["eval"]
    compat.apply()
    assert (eval_lm.eval_lm, eval_lm.SequenceScorer, vars(fairseq.utils)["eval"]) == before
    assert eval_lm.SequenceScorer.__mro__[1].__module__ == "fairseq.sequence_scorer"


def test_a_refusal_is_one_line_and_a_bug_a_traceback(capsys, monkeypatch):
    monkeypatch.delenv("FAIRSEQ_RPE_DEBUG", raising=False)
    wrapped = RuntimeError("of fairseq")
    wrapped.__context__ = UserError("no data there: name a folder")
    for error in (UserError("no data there: name a folder"), wrapped):
        sys.excepthook(type(error), error, None)
        assert capsys.readouterr().err == "error: no data there: name a folder\n"
    sys.excepthook(ValueError, ValueError("a bug"), None)
    assert "ValueError: a bug" in capsys.readouterr().err


@pytest.mark.release
def test_scores_of_other_tasks_and_the_compiler_are_imported_when_they_are_used():
    """They are a third of fairseq's start, which also says nothing of tensorboardX; an optimizer alone uses neither.

    Models load no figures either. That a command imports none of them: tests/cli/test_cli.py.
    """
    done = run(sys.executable, "-c", QUICK)
    assert done.stdout == "same\n" and "tensorboardX" not in done.stderr


def test_the_compiler_is_imported_for_anything_but_leaving_a_function_alone(monkeypatch):
    later, imported = quick_start._LazyCompiler("torch._dynamo"), []

    def importing(name: str) -> SimpleNamespace:
        imported.append((name, name in sys.modules))
        return SimpleNamespace(disable=lambda function, **named: (function, named), config="settings", __path__=["x"])

    monkeypatch.setitem(sys.modules, "torch._dynamo", later)
    monkeypatch.setattr(quick_start, "import_module", importing)
    assert later.disable(abs, wrapping=False) is abs and not imported
    with pytest.raises(AttributeError):
        _ = later.__wrapped__
    assert not imported
    assert later.disable(abs) == (abs, {}) and imported == [("torch._dynamo", False)]
    assert later.disable(None, wrapping=False) == (None, {"wrapping": False})
    assert later.disable(abs, wrapping=True) == (abs, {"wrapping": True})
    assert later.config == "settings" and later.__path__ == ["x"] and len(imported) == 5


@pytest.mark.release
def test_what_is_compiled_is_compiled_by_the_compiler_itself():
    assert run(sys.executable, "-c", COMPILED).stdout == "compiled\n"


def test_whoever_asks_for_them_while_fairseq_starts_learns_that_they_are_there(monkeypatch):
    for name in ("sklearn", "sklearn.metrics", "scipy.stats"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    asked = []

    def starting(name: str) -> None:
        asked.append((name, importlib.util.find_spec("sklearn").name))
        raise ImportError("no fairseq")

    monkeypatch.setattr(quick_start, "import_module", starting)
    with pytest.raises(ImportError, match="no fairseq"):
        quick_start._import_fairseq()
    assert asked == [("fairseq", "sklearn")]
    assert not {"sklearn", "sklearn.metrics", "scipy.stats"} & set(sys.modules)


def test_numpy_compat():
    assert np.compat.long is int


def test_namespace_checkpoints(tmp_path):
    torch.save({"args": argparse.Namespace(a=1)}, tmp_path / "x.pt")
    assert checkpoint_file.read_file(tmp_path / "x.pt")[0]["args"].a == 1
    assert torch.load(tmp_path / "x.pt")["args"].a == 1  # as fairseq does afterwards


def test_literals():
    for text in (
        "[(1, 64), (2, 128)]",
        "{'a': -1.5, 'b': None}",
        "1/4",
        "(0.9, 0.98)",
        "True",
        "[(5, 3)] * 2 + [(4, 5)]",
    ):
        assert compat.evaluate_literal(text) == eval(text)


NOT_LITERALS = ["__import__('os').system('x')", "open('x', 'w')", "[c for c in 'x']", "a", "().__class__", "'a' * 10"]
NOT_LITERALS += ["[0] * 10**9", "(lambda: 1)()", "", "[", "{**{}}", "f'{1}'"]


@pytest.mark.parametrize("text", NOT_LITERALS)
def test_anything_else_is_refused(text):
    with refused("only plain Python values"):
        compat.evaluate_literal(text)


def test_no_fairseq_module_can_eval(tmp_path, monkeypatch):
    import fairseq.models.transformer_lm
    import fairseq.utils

    monkeypatch.chdir(tmp_path)
    for evaluate in (fairseq.utils.eval_str_list, fairseq.utils.eval_str_dict, fairseq.utils.eval_bool):
        with pytest.raises(UserError):
            evaluate(f"[open('{PAYLOAD}', 'w')]")
    with pytest.raises(UserError):
        fairseq.models.transformer_lm.eval(f"open('{PAYLOAD}', 'w')")
    assert not (tmp_path / PAYLOAD).exists()
    assert fairseq.utils.eval_str_list("1,2") == [1.0, 2.0]


def test_a_checkpoint_names_no_code_to_import_or_evaluate(task, tmp_path, monkeypatch):
    """What else is no checkpoint: see test_hostile_checkpoints."""
    from fairseq.checkpoint_utils import load_checkpoint_to_cpu

    monkeypatch.chdir(tmp_path)
    history = [{"criterion_name": "LMCrossEntropy", "num_updates": 1, "best_loss": 1.0}]
    state = {"args": None, "model": make_model(task, "alibi").state_dict(), "optimizer_history": history}
    state["extra_state"] = {"train_iterator": {"epoch": 1}}

    def loaded(**settings):
        model = {**vars(model_args("alibi")), **settings, "_name": "transformer_rpe_lm"}
        torch.save({**state, "cfg": {"model": model}}, "x.pt")
        return load_checkpoint_to_cpu("x.pt")["cfg"]["model"]

    found = loaded(rpe_module="/tmp/x.py")
    assert found["rpe"] == "alibi" and found["rpe_module"] is None
    with refused("refused to evaluate"):
        loaded(character_embeddings=True, character_filters=f"[open('{PAYLOAD}', 'w')]")
    assert not (tmp_path / PAYLOAD).exists()


def test_resumed_in_a_later_epoch_meets_the_same_batches():
    assert repaired(RESUMED).split() == [*["True"] * 4, "6"]


def test_copies_are_atomic(tmp_path, monkeypatch):
    from fairseq.file_io import PathManager

    source, target = tmp_path / "a", tmp_path / "b"
    source.write_text("new")
    target.write_text("old")
    assert not PathManager.copy(str(source), str(target)) and target.read_text() == "old"

    def copying_until(error: BaseException):
        def fail(source: str, target: str) -> None:
            Path(target).write_text("ha")
            raise error

        return fail

    full = "could not be written .*No space left.*free some space"
    for error, told, words in (
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (OSError(28, "No space left on device"), UserError, full),
    ):
        with monkeypatch.context() as patch, pytest.raises(told, match=words):
            patch.setattr(shutil, "copyfile", copying_until(error))
            PathManager.copy(str(source), str(target), overwrite=True)
        assert target.read_text() == "old" and (told is KeyboardInterrupt or not list(tmp_path.glob("*.copying")))
    assert PathManager.copy(str(source), str(target), overwrite=True) and target.read_text() == "new"


def test_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    from fairseq import checkpoint_utils

    def full(obj, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    target = tmp_path / "checkpoint_last.pt"
    checkpoint_utils.torch_persistent_save({"x": 1}, str(target))
    with monkeypatch.context() as patch, refused(r"checkpoint_last\.pt could not be written .*free some space"):
        patch.setattr(torch, "save", full)
        checkpoint_utils.torch_persistent_save({"x": 2}, str(target))
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_last.pt"]
    assert torch.load(target) == {"x": 1}


def test_no_block_is_dropped():
    assert "blocks 41 11" in repaired(BLOCKS)


def test_bf16_is_not_tpu(monkeypatch):
    from fairseq import options

    flags = ["data", "--user-dir", str(PACKAGE), "--task", "language_modeling", "--arch", "transformer_rpe_lm_tiny"]
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *flags, "--bf16"])
    args = options.parse_args_and_arch(options.get_training_parser(), [*flags, "--bf16"])
    assert args.bf16 and not args.tpu
    assert options.parse_args_and_arch(options.get_training_parser(), [*flags, "--bf16", "--tpu"]).tpu


def test_guard_counts_tokens(monkeypatch):
    """Also where the module of the command is ``__main__``, as in its process."""

    def expect(tokens: int, **flags: int) -> None:
        check_eval_workers(lambda *_, **__: None, None, SimpleNamespace(sizes=np.ones(tokens)), **flags)

    class Scorer:
        def generate(self, models, sample, **kwargs):
            return [[{"positional_scores": torch.tensor(row)}] for row in sample]

    class Module:
        SequenceScorer = Scorer

        @staticmethod
        def eval_lm(models, batches, remove_bos_token=False):
            scorer = Module.SequenceScorer()
            for batch in batches:
                scorer.generate(models, batch)
            return {"loss": 1.0}

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "__main__", Module)
        check_scored_tokens()
        check_scored_tokens()
    expect(3)
    assert Module.eval_lm(None, [[[-1.0, -2.0], [-3.0]]])["scored_tokens"] == 3
    for scores, words in (([-1.0, -2.0], "scored 2 of 3 tokens"), ([-1.0, float("-inf"), 0.0], "probability 0")):
        with refused(words):
            Module.eval_lm(None, [[scores]])
    expect(3, num_shards=2)
    assert Module.eval_lm(None, [])["scored_tokens"] == 0
