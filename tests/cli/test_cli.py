"""The command line: what commands offer and options mean, training that survives kills, evaluation of every token."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import PROGRAM, assert_equal_models, error_of, run, run_here, with_documents
from in_process import fairseq
from live_processes import wait_for
from sweep_commands import SMALL

from fairseq_rpe import encodings
from fairseq_rpe.cli.main import COMMANDS, build_parser
from fairseq_rpe.cli.options import apply_common_options, spec_list
from fairseq_rpe.cli.train import help_text
from fairseq_rpe.core import renamed
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus_files
from fairseq_rpe.runs import checkpoints, launch, processes
from fairseq_rpe.runs.run_folder import CheckpointFolder
from fairseq_rpe.utils import files, json_files

LAST = "checkpoint_last.pt"
RUN = ["--rpe", "kerple_log", "--tokens", "32", "--batch-sentences", "4", "--device", "cpu", "--warmup", "1"]
HELP = """
import contextlib, io, sys
from fairseq_rpe.cli.main import COMMANDS, build_parser, main

def ours():
    return {name.rpartition(".")[2] for name in sys.modules if name.startswith("fairseq_rpe.cli.")}

assert main(["user-dir"]) == 0 and ours() == {"main", "list", "options"}, ours()
assert build_parser("sensitivity") and "numpy" not in sys.modules
for command in ("", *COMMANDS):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main([command, "--help"] if command else ["--help"]) == 0
    shown = text.getvalue()
    assert all(name in shown for name in ([command] if command else COMMANDS)), command
    heavy = {"torch", "fairseq", "matplotlib", "sympy", "mpmath"} & set(sys.modules)
    assert not heavy, (command, heavy)
print("done")
"""


# a command, and that it has imported neither what only other tasks and figures use nor torch's compiler
LEAN = """
import sys
from fairseq_rpe.cli.main import main

code = main(sys.argv[1:])
heavy = {"sklearn", "scipy", "matplotlib", "tensorboardX"} & set(sys.modules)
heavy |= {name for name in sys.modules if name.startswith("torch._dynamo.")}
assert not heavy, heavy
sys.exit(code)
"""


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory) -> Path:
    """The folder of a finished run of 4 updates."""
    folder = tmp_path_factory.mktemp("trained") / "run with blanks"
    run_here("train", corpus, *RUN, "--out", folder, "--updates", "4", "--save-every", "4", *SMALL)
    return folder


def test_help_comes_without_torch_and_a_command_loads_its_own_module_alone():
    assert run(sys.executable, "-c", HELP).stdout.endswith("\ndone\n")


def test_every_command_has_its_options():
    commands = subparsers()
    assert list(commands) == list(COMMANDS)
    assert all(command.get_default("run") is not None for command in commands.values())


def subparsers() -> dict:
    [commands] = [action.choices for action in build_parser()._actions if isinstance(action.choices, dict)]
    return commands


def renamed_options() -> list[tuple[str, str, str]]:
    """(command, old option, new option) of the table; the command "" stands for all that have only the new option."""
    options = {name: set(parser._option_string_actions) for name, parser in subparsers().items()}
    rows = []
    for (command, old), new in renamed.OPTIONS.items():
        names = [
            name for name in options if command in ("", name) and new in options[name] and old not in options[name]
        ]
        assert names or command == "prepare-stdlib", (command, old)  # which splits by file, so it has no --split-by
        rows += [(name, old, new) for name in names]
    return rows


@pytest.mark.parametrize(("old", "new"), renamed.COMMANDS.items())
def test_an_old_command_is_refused_with_the_new_name(old, new, capsys):
    assert new in COMMANDS and old not in COMMANDS
    assert f"use fairseq-rpe {new}" in error_of(capsys, old, "--help")


@pytest.mark.parametrize(("command", "old", "new"), renamed_options())
def test_an_old_option_is_refused_with_the_new_name(command, old, new, capsys):
    for words in ([old, "x"], [f"{old}=x"]):
        assert f"the option {old} of '{command}' is called {new} now" in error_of(capsys, command, *words)


def test_the_help_groups_the_commands():
    shown = build_parser("").format_help()
    groups = ("data", "training", "evaluation", "theory", "figures and reports", "this machine")
    places = [shown.index(f"\n{group}:\n") for group in groups]
    assert places == sorted(places)
    assert shown.index("\n  train ") > places[1] and shown.index("\n  user-dir ") > places[-1]


def test_specs_are_separated_by_blanks_or_commas():
    for text in ("alibi rope", "alibi, rope", "alibi,rope", "alibi , rope,"):
        assert spec_list(text) == ("alibi", "rope")
    assert spec_list("type1:variant=paper, rope:base=5,factor=4 nope") == (
        "type1:variant=paper",
        "rope:base=5,factor=4",
        "nope",
    )
    assert spec_list("alibi,rope:scaling=linear,factor=4, t5_bias") == (
        "alibi",
        "rope:scaling=linear,factor=4",
        "t5_bias",
    )
    assert spec_list(" , ") == ()


def test_the_help_has_the_defaults_of_the_architectures():
    defaults = {
        "tokens": "64 for tiny, else 512",
        "updates": "400 for tiny, else 50000; generated tasks: 3000 for tiny, else 40000",
        "dropout": "0.0 for tiny, else 0.1",
        "batch_sentences": "16 for tiny, else 128; generated tasks: 64",
        "warmup": "80 for tiny, else 4000; generated tasks: 200 for tiny, else 2400; at most a fifth of the updates",
    }
    for name, words in defaults.items():
        assert help_text(name).endswith(f" (default: {words})"), name
    for command in ("train", "sweep"):
        [commands] = [a.choices for a in build_parser(command)._actions if isinstance(a.choices, dict)]
        shown = " ".join(commands[command].format_help().split())
        for name in (*defaults, "lr", "schedule"):
            assert help_text(name) in shown, name


@pytest.mark.parametrize("line", ["train DATA --rpe x --out y", "eval C D --lengths 8", "sweep D"])
def test_no_cache_holds_for_what_a_command_starts_too(line, monkeypatch):
    monkeypatch.setenv("FAIRSEQ_RPE_CACHE", "somewhere")
    for more, found in ([], "somewhere"), (["--no-cache"], "off"):
        apply_common_options(build_parser(line.split()[0]).parse_args([*line.split(), *more]))
        assert os.environ["FAIRSEQ_RPE_CACHE"] == found


@pytest.mark.parametrize("line", ["train data --rpe mine --out x", "sweep data --encodings mine --out x"])
def test_a_training_imports_encodings_only_when_it_has_work(line, tmp_path):
    """What is finished already is told without them; other commands import them at once."""
    module = tmp_path / "mine.py"
    module.write_text("raise RuntimeError('imported')")

    def begin(*words):
        apply_common_options(build_parser(words[0]).parse_args([*words, "--rpe-module", str(module)]))

    begin(*line.split())
    with pytest.raises(UserError, match="imported"):
        begin("list")


def test_list_and_bias_and_user_dir():
    assert run_here("list", "--names").stdout.split() == encodings.names()
    shown = run_here("list").stdout
    assert "variant=" in shown and "Press" in shown
    profile = run_here("bias", "alibi", "--heads", "2", "--width", "8", "--length", "3").stdout
    assert profile.split() == "distance,head1,head2 0,0.0,0.0 1,-0.0625,-0.00390625 2,-0.125,-0.0078125".split()
    assert (Path(run_here("user-dir").stdout.strip()) / "models").is_dir()


def test_finished_run_returns_at_once_and_another_run_is_refused(trained, corpus, capsys):
    same = ["train", corpus, *RUN, "--out", trained, "--save-every", "4"]
    before = {p: p.stat().st_mtime_ns for p in trained.iterdir()}
    assert "finished run of 4 updates" in run_here(*same, "--updates", "4", *SMALL).stdout
    assert before == {p: p.stat().st_mtime_ns for p in trained.iterdir()}
    assert "(lr is 0.002 there, 0.5 here)" in error_of(capsys, *same, "--updates", "4", "--lr", "0.5", *SMALL)
    assert "holds 4 updates, more than --updates 3" in error_of(capsys, *same, "--updates", "3", *SMALL)
    with files.exclusive_lock(trained / ".lock", "busy"):
        assert "another process is training" in error_of(capsys, *same, "--updates", "14", *SMALL)


def is_free(lock: Path) -> bool:
    try:
        with files.exclusive_lock(lock, "busy"):
            return True
    except UserError:
        return False


def updates_in(folder: Path) -> int:
    """The number of updates behind the newest whole checkpoint."""
    whole = [path for path in folder.glob("checkpoint_1_*.pt") if checkpoints.is_intact(path)]
    return max((int(path.stem.rpartition("_")[2]) for path in whole), default=0)


def test_killed_training_goes_on_bit_equal(corpus, tmp_path):
    """SIGKILL of the command takes its child along; a broken last checkpoint is replaced by the newest whole one."""
    folder, err = tmp_path / "run", tmp_path / "err"
    command = ["train", corpus, *RUN, "--save-every", "4"]
    words = [*PROGRAM, *command, "--out", folder, "--updates", "100000", *SMALL]
    with open(err, "wb") as errors:
        process = subprocess.Popen([str(w) for w in words], stdout=subprocess.DEVNULL, stderr=errors)
        wait_for(lambda: updates_in(folder) > 0, process, err)
        process.kill()
        process.wait(60)
    wait_for(lambda: is_free(folder / ".lock"))  # the trainer does not outlive its parent
    updates, last = updates_in(folder), folder / LAST
    last.write_bytes(last.read_bytes()[:-1000])
    assert not checkpoints.is_intact(last)
    done = run_here(*command, "--out", folder, "--updates", updates + 4, *SMALL)
    log = (folder / "train.log").read_text()
    assert f"@ {updates} updates" in log and f"after update {updates} ----\n" in log
    begun, *_, end = done.stdout.splitlines()
    what = rf"training \S+, [\d,]+ parameters, {updates + 4} updates, {updates} of them done, into {folder}"
    assert re.fullmatch(what, begun), done.stdout
    assert end.startswith(f"{updates + 4} updates are done: ") and not re.search("INFO|Warning", done.stderr)
    assert "INFO" in log and "Warning" in log and "tensorboardX" not in log
    run_here(*command, "--out", tmp_path / "whole", "--updates", updates + 4, *SMALL)
    assert_equal_models(folder / LAST, tmp_path / "whole" / LAST)


def test_an_interrupted_training_is_one_line(corpus, tmp_path, monkeypatch):
    """The keyboard interrupts as soon as the end of the trainer is waited for; SIGTERM: tests/runs/test_launch.py."""
    children = []

    def spawn(*given: object, real=processes.spawn, **options: object):
        child = real(*given, **options)
        wait = child.wait
        interrupt = functools.partial(signal.raise_signal, signal.SIGINT)
        monkeypatch.setattr(child, "wait", lambda *timeout: wait(*timeout) if timeout else interrupt())
        children.append(child)
        return child

    monkeypatch.setattr(processes, "spawn", spawn)
    monkeypatch.setattr(launch, "training_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    # a shell has its background jobs ignore SIGINT, these tests perhaps among them
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        train = ("train", corpus, *RUN, "--updates", "4", "--out", tmp_path / "run", *SMALL)
        done = run_here(*train, ok=False, processes=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 130 and "Traceback" not in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "stopped by the keyboard; rerun the same command to resume"
    assert [child.poll() is None for child in children] == [False]


def test_training_on_documents_goes_on_bit_equal_and_is_on_record(corpus, tmp_path, capsys):
    data = with_documents(corpus, tmp_path)

    def train(name: str, updates: int, *flags: str) -> Path:
        run_here("train", data, *RUN, *flags, "--updates", updates, "--out", tmp_path / name, *SMALL)
        return tmp_path / name / LAST

    document = ("--save-every", "2", "--blocks", "document")
    whole = train("whole", 4, *document)
    train("parts", 2, *document)
    assert_equal_models(train("parts", 4, *document), whole)
    separate, together = train("separate", 2, "--separate-documents"), train("together", 2)
    for path, name, value in ((whole, "blocks", "document"), (separate, "separate_documents", True)):
        assert json_files.read_json(path.with_name("run.json"))["settings"][name] == value
        assert checkpoints.load(path).task[name] == value
    first, second = (checkpoints.load(path).weights for path in (separate, together))
    assert first.keys() == second.keys() and any(not torch.equal(first[name], second[name]) for name in first)
    error = error_of(capsys, "train", data, *RUN, "--updates", "4", "--out", whole.parent, *document[:2], *SMALL)
    assert "blocks is 'document' there, 'stream' here" in error


@pytest.mark.parametrize(
    ("blank_lines", "flags", "words"),
    [
        (
            True,
            "--rpe rope:scaling=dynamic_ntk,original_length=32 --separate-documents",
            "depends on more than positions",
        ),
        (
            True,
            "--rpe alibi --positions-train randomized:max_position=64 --separate-documents",
            "transforms the positions of whole",
        ),
        (False, "--rpe alibi --blocks document", "no document boundaries"),
        (True, "--rpe alibi --blocks document --tokens 1200", "the longest document"),
    ],
)
def test_documents_that_cannot_be_trained_on_are_refused(blank_lines, flags, words, corpus, tmp_path, capsys):
    data = with_documents(corpus, tmp_path) if blank_lines else corpus
    assert words in error_of(capsys, "train", data, "--tokens", "32", "--out", tmp_path / "x", *flags.split())
    assert not (tmp_path / "x").exists()


def test_eval_scores_every_token_once(trained, corpus, tmp_path, capsys):
    """A process of its own, whose terminal has ASCII only and in which warnings are errors."""
    out, tokens = tmp_path / "results" / "eval.jsonl", corpus_files.count_tokens(corpus, "test")
    command = ["eval", trained / LAST, corpus, "--device", "cpu", "--json", "--out", out]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONWARNINGS": "error"}
    words = (*command, "--lengths", "32,100", "--log", tmp_path / "log")
    done = run(sys.executable, "-c", LEAN, *words, env={**os.environ, **ascii_only})
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.stderr == ""
    assert [r["length"] for r in rows] == [32, 100]
    for row in rows:
        assert row["encoding"] == "kerple_log" and row["tokens"] == tokens and row["split"] == "test"
        assert row["checkpoint"] == files.sha256_of_files(trained / LAST)
        assert row["ppl"] == pytest.approx(2 ** row["loss_base2"]) and row["ppl"] > 1
    log = (tmp_path / "log").read_text()
    assert f"scored tokens: {tokens} of {tokens}" in log and "tensorboardX" not in log
    # the whole point of the count: the same number as fairseq's own command gives
    flags = "--gen-subset test --tokens-per-sample 100 --sample-break-mode none --cpu".split()
    own = fairseq("eval_lm", corpus, "--user-dir", files.PACKAGE_DIR, "--path", trained / LAST, *flags)
    [shown] = re.findall(r"Perplexity: (\d+\.\d\d)\b", own.stdout + own.stderr)
    assert float(shown) == pytest.approx(rows[1]["ppl"], rel=1e-6, abs=0.0051)  # it is shown with two decimals

    known = out.read_text()
    again = run_here(*command, "--lengths", "100,32").stdout.splitlines()
    assert [json.loads(line) for line in again] == rows[::-1] and out.read_text() == known
    assert f"less than one block of {tokens + 1}" in error_of(capsys, *command, "--lengths", f"32,{tokens + 1}")


def test_newest_whole_checkpoint_becomes_the_last(tmp_path):
    def save(name: str, updates: int, **extra_state: float) -> Path:
        state = {"cfg": {}, "optimizer_history": [{"num_updates": updates}], "extra_state": extra_state}
        torch.save(state, tmp_path / name)
        return tmp_path / name

    def recover() -> int:
        return checkpoints.recover_last(CheckpointFolder(tmp_path))

    assert recover() == 0
    save("checkpoint_best.pt", 10)
    newest = save("checkpoint_1_20.pt", 20)
    assert recover() == 20 and (tmp_path / LAST).read_bytes() == newest.read_bytes()  # there was no last one
    save(LAST, 15)
    assert recover() == 20  # there was an older one
    newest.write_bytes(newest.read_bytes()[:-20])
    save(LAST, 15)
    assert recover() == 15
    (tmp_path / LAST).write_bytes(b"")
    assert recover() == 10
    save(LAST, 15, val_loss=2.0, best=2.0)
    save("checkpoint_best.pt", 15, val_loss=2.0, best=2.0)
    for loss, best_updates in ((3.0, 15), (1.0, 20)):  # a kill before the copies of the checkpoint after 20 updates
        save("checkpoint_1_20.pt", 20, val_loss=loss, best=min(loss, 2.0))
        assert recover() == 20 and checkpoints.load(tmp_path / "checkpoint_best.pt").num_updates == best_updates
        save(LAST, 15)
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(b"broken")
    assert recover() == 0 and not (tmp_path / LAST).exists()


def test_files_are_whole_or_absent(tmp_path):
    path = tmp_path / "deep" / "a.json"
    json_files.write_json(path, {"a": 1})

    def fail(target: Path) -> None:
        target.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_via_temporary(path, fail)
    assert json_files.read_json(path) == {"a": 1} and os.listdir(path.parent) == ["a.json"]


def test_index_is_read_as_fairseq_reads_it(corpus):
    from fairseq.data import data_utils

    for split in ("train", "valid", "test"):
        dataset = data_utils.load_indexed_dataset(str(corpus / split), None, "mmap")
        assert corpus_files.count_tokens(corpus, split) == int(dataset.sizes.sum())
    with pytest.raises(UserError, match="rename the folder"):
        corpus_files.check_folder(Path("a:b"))
