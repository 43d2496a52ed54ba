"""The command line: errors in one line, training that survives being killed, evaluation of every token."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import run, run_here, with_documents

from fairseq_rpe.cli.main import COMMANDS, build_parser, main
from fairseq_rpe.core import files
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data import folder as corpus_files
from fairseq_rpe.runs import checkpoints
from fairseq_rpe.runs.run_folder import CheckpointFolder

LAST = "checkpoint_last.pt"

PROGRAM = [sys.executable, "-m", "fairseq_rpe.cli.main"]
SMALL = ["--", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "64"]
RUN = ["--rpe", "kerple_log", "--tokens", "32", "--batch-sentences", "4", "--device", "cpu", "--warmup", "1"]


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / LAST, weights_only=True)["model"]


def assert_equal_models(one: Path, two: Path) -> None:
    first, second = parameters(one), parameters(two)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def error_of(capsys, *argv: object) -> str:
    """Run a command that must fail with exactly one line; returns it."""
    capsys.readouterr()
    assert main([str(a) for a in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory) -> Path:
    """The folder of a finished run of 12 updates, never interrupted."""
    folder = tmp_path_factory.mktemp("trained") / "run with blanks"
    run_here("train", corpus, *RUN, "--save-dir", folder, "--updates", "12", "--save-every", "4", *SMALL)
    return folder


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_comes_without_torch(command):
    argv = [command, "--help"] if command else ["--help"]
    code = (
        "import sys\nfrom fairseq_rpe.cli.main import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "assert not {'torch', 'fairseq', 'matplotlib', 'sympy', 'mpmath'} & set(sys.modules)"
    )
    shown = run(sys.executable, "-c", code).stdout
    names = (command,) if command else ("prepare-stdlib", "train", "eval", "sweep", "report", "list")
    assert all(name in shown for name in names)


def test_a_command_loads_its_own_module_alone():
    code = (
        "import sys\nfrom fairseq_rpe.cli.main import main\n"
        "assert main(['user-dir']) == 0\n"
        "print(*(name for name in sys.modules if name.startswith('fairseq_rpe.cli.')))"
    )
    loaded = run(sys.executable, "-c", code).stdout.splitlines()[-1].split()
    assert set(loaded) == {f"fairseq_rpe.cli.{name}" for name in ("main", "list", "options")}


def test_every_command_has_its_options():
    parser = build_parser()
    [commands] = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    assert list(commands) == list(COMMANDS)
    for name, command in commands.items():
        assert command.get_default("run") is not None, name


def test_list_and_profile_and_user_dir(capsys):
    from fairseq_rpe import encodings

    assert main(["list", "--names"]) == 0
    assert capsys.readouterr().out.split() == encodings.names()
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert "form=" in shown and "Press" in shown
    assert main(["profile", "alibi", "--heads", "2", "--width", "8", "--length", "3"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows == [
        ["distance", "head1", "head2"],
        ["0", "0.0", "0.0"],
        ["1", "-0.0625", "-0.00390625"],
        ["2", "-0.125", "-0.0078125"],
    ]
    assert main(["user-dir"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "models").is_dir()


def test_own_module_is_listed(tmp_path, capsys):
    module = tmp_path / "mine.py"
    module.write_text(
        '"""Own encodings."""\nfrom fairseq_rpe.encodings import DistanceBias, register\n\n\n'
        '@register("cli_own")\nclass Own(DistanceBias):\n    """Nothing."""\n\n'
        '    formula = "0"\n    paper = "none"\n\n'
        "    def bias(self, d):\n        return d.new_zeros(self.heads, len(d))\n"
    )
    shown = run(*PROGRAM, "list", "--names", "--rpe-module", module).stdout
    assert "cli_own" in shown.split()
    assert "does not exist" in error_of(capsys, "list", "--rpe-module", tmp_path / "no.py")


@pytest.mark.parametrize("flag", ["--tokens=0", "--updates=-1", "--lr=0", "--lr=nan", "--dropout=1", "--nproc=x"])
def test_bad_numbers_are_refused_by_the_parser(flag, capsys):
    argv = ["train", "data", "--rpe", "alibi", "--save-dir", "x", flag]
    assert f"argument {flag.split('=')[0]}: " in error_of(capsys, *argv)


@pytest.mark.parametrize("lengths", ["", "64,0", "64,64", "1e3", "-5"])
def test_bad_lengths_are_refused_by_the_parser(lengths, capsys):
    assert "argument --lengths: " in error_of(capsys, "eval", "c.pt", "data", f"--lengths={lengths}")


def test_further_flags_only_where_they_go_somewhere(capsys):
    said = error_of(capsys, "report", "x", "--", "--max-epoch", "3")
    assert "'report' takes no further flags after --: only train and sweep do" in said


def test_train_refuses_in_one_line(corpus, tmp_path, capsys):
    def refused(*argv: object, data: Path = corpus, spec: str = "alibi") -> str:
        return error_of(capsys, "train", data, "--rpe", spec, "--save-dir", tmp_path / "run", *argv)

    assert "does not exist" in refused(data=tmp_path / "nowhere")
    assert "no dict.txt" in refused(data=tmp_path)
    assert "did you mean 'alibi'" in refused(spec="alibbi")
    assert "less than one block of 1000000" in refused("--tokens", "1000000")
    assert "does not exist" in refused("--rpe-module", tmp_path / "no.py")
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    assert "is a file" in error_of(capsys, "train", corpus, "--rpe", "alibi", "--save-dir", tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/checkpoint_last.pt").write_bytes(b"x")
    assert "no run.json" in error_of(capsys, "train", corpus, "--rpe", "alibi", "--save-dir", tmp_path / "other")


def test_dry_run_prints_the_command_and_writes_nothing(corpus, tmp_path, capsys):
    argv = ["train", str(corpus), *RUN, "--save-dir", str(tmp_path / "run"), "--dry-run", "--nproc", "3", *SMALL]
    assert main(argv) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert not (tmp_path / "run").exists()
    assert "-m torch.distributed.run --nproc-per-node 3 --standalone -m fairseq_rpe.runs.launch " in line
    assert "--rpe kerple_log" in line and "--decoder-embed-dim 32" in line and "--distributed-world-size 3" in line
    assert "--cpu --distributed-backend gloo --ddp-backend legacy_ddp" in line


def test_finished_run_returns_at_once_and_another_run_is_refused(trained, corpus, capsys):
    same = ["train", str(corpus), *RUN, "--save-dir", str(trained), "--save-every", "4"]
    before = {p: p.stat().st_mtime_ns for p in trained.iterdir()}
    assert main([*same, "--updates", "12", *SMALL]) == 0
    assert "finished run of 12 updates" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in trained.iterdir()}
    assert "(lr is 0.002 there, 0.5 here)" in error_of(capsys, *same, "--updates", "12", "--lr", "0.5", *SMALL)
    assert "holds 12 updates, more than --updates 5" in error_of(capsys, *same, "--updates", "5", *SMALL)
    with files.lock(trained / ".lock", "busy"):
        assert "another process is training" in error_of(capsys, *same, "--updates", "14", *SMALL)


def test_killed_training_goes_on_bit_equal(trained, corpus, tmp_path):
    """SIGKILL of the command takes its child along; a broken last checkpoint is replaced by the newest whole one."""
    folder = tmp_path / "run"
    command = ["train", str(corpus), *RUN, "--save-dir", str(folder), "--save-every", "4"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([*PROGRAM, *command, "--updates", "100000", *SMALL], stdout=log, stderr=log)
        deadline = time.monotonic() + 120
        while not (folder / LAST).exists() and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.02)
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while True:
        try:
            with files.lock(folder / ".lock", "the trainer outlived its parent"):
                break
        except UserError:
            assert time.monotonic() < deadline, "the trainer outlived its parent"
            time.sleep(0.1)
    found = [p for p in folder.glob("checkpoint_1_*.pt") if checkpoints.is_intact(p)]
    updates = max(int(p.stem.rpartition("_")[2]) for p in found)
    if updates > 12:  # a fast machine: keep what belongs to the first 12 updates
        pytest.skip("training passed 12 updates before the kill arrived")
    last = folder / LAST
    last.write_bytes(last.read_bytes()[:-1000])
    assert not checkpoints.is_intact(last)
    said = run_here(*command, "--updates", "12", *SMALL)
    log = (folder / "train.log").read_text()
    if updates < 12:
        assert f"@ {updates} updates" in log and f"after update {updates} ----\n" in log
        begun, *_, done = said.stdout.splitlines()
        what = rf"training \S+, [\d,]+ parameters, 12 updates, {updates} of them done, into {folder}"
        assert re.fullmatch(what, begun), said.stdout
        assert done.startswith("12 updates are done: ") and "INFO" not in said.stderr and "Warning" not in said.stderr
    assert "INFO" in log and "Warning" in log and "tensorboardX" not in log
    assert_equal_models(folder, trained)


def test_training_on_documents_goes_on_bit_equal_and_is_on_record(corpus, tmp_path, capsys):
    data = with_documents(corpus, tmp_path)
    command = ["train", data, *RUN, "--blocks", "document", "--save-every", "4"]
    run_here(*command, "--updates", "6", "--save-dir", tmp_path / "whole", *SMALL)
    for updates in ("3", "6"):
        run_here(*command, "--updates", updates, "--save-dir", tmp_path / "parts", *SMALL)
    assert_equal_models(tmp_path / "parts", tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["settings"]["blocks"] == "document"
    assert checkpoints.load(tmp_path / "whole" / LAST).task["blocks"] == "document"
    words = [str(word) for word in command if word not in ("--blocks", "document")]
    error = error_of(capsys, *words, "--updates", "6", "--save-dir", str(tmp_path / "whole"), *SMALL)
    assert "blocks is 'document' there, 'stream' here" in error


def test_training_on_separate_documents_is_on_record(corpus, tmp_path):
    data = with_documents(corpus, tmp_path)
    command = ["train", data, *RUN, "--updates", "3"]
    run_here(*command, "--separate-documents", "--save-dir", tmp_path / "separate", *SMALL)
    run_here(*command, "--save-dir", tmp_path / "together", *SMALL)
    assert json.loads((tmp_path / "separate" / "run.json").read_text())["settings"]["separate_documents"] is True
    assert checkpoints.load(tmp_path / "separate" / LAST).task["separate_documents"] is True
    first, second = parameters(tmp_path / "separate"), parameters(tmp_path / "together")
    assert first.keys() == second.keys() and any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rpe", "rope:scaling=dynamic_ntk,original_length=32"], "reads more of a row than positions"),
        (["--rpe", "alibi", "--positions-train", "randomized:max=64"], "moves the positions of whole rows"),
    ],
)
def test_what_does_not_separate_documents_is_refused_before_training(corpus, tmp_path, capsys, flags, words):
    same = [with_documents(corpus, tmp_path), "--tokens", "32", "--separate-documents", "--save-dir", tmp_path / "x"]
    assert words in error_of(capsys, "train", *same, *flags)
    assert not (tmp_path / "x").exists()


def test_training_on_documents_refuses_data_without_any(corpus, tmp_path, capsys):
    same = ["train", str(corpus), *RUN, "--blocks", "document", "--updates", "3", "--save-dir", str(tmp_path / "x")]
    assert "no document boundaries" in error_of(capsys, *same)
    long = ["--tokens", "1200", "--updates", "3", "--save-dir", str(tmp_path / "x")]
    data = with_documents(corpus, tmp_path)
    assert "the longest document" in error_of(capsys, "train", str(data), *RUN, "--blocks", "document", *long)
    assert not (tmp_path / "x").exists()


def test_two_processes_equal_two_accumulated_batches(corpus, tmp_path):
    command = ["train", corpus, *RUN, "--updates", "3"]
    run_here(*command, "--save-dir", tmp_path / "two", "--nproc", "2", *SMALL)
    run_here(*command, "--save-dir", tmp_path / "one", "--update-freq", "2", *SMALL)
    assert_equal_models(tmp_path / "one", tmp_path / "two")


def test_sigterm_ends_the_children(tmp_path):
    script = (
        "import sys\nfrom fairseq_rpe.runs import processes\n"
        "child = processes.spawn([sys.executable, '-c', 'import time; time.sleep(600)'], {})\n"
        "print(child.pid, flush=True)\n"
        "try:\n    processes.wait(child)\nexcept processes.Stopped:\n    sys.exit(143)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(30) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_eval_scores_every_token_once(trained, corpus, tmp_path, capsys):
    out = tmp_path / "results" / "eval.jsonl"
    command = ["eval", trained / LAST, corpus, "--device", "cpu", "--json", "--out", out]
    shown = run(*PROGRAM, *command, "--lengths", "32,100", "--log", tmp_path / "log").stdout
    rows = [json.loads(line) for line in shown.splitlines()]
    tokens = corpus_files.count_tokens(corpus, "test")
    assert [r["length"] for r in rows] == [32, 100]
    for row in rows:
        assert row["encoding"] == "kerple_log" and row["tokens"] == tokens and row["subset"] == "test"
        assert row["checkpoint"] == files.file_digest(trained / LAST)
        assert row["ppl"] == pytest.approx(2 ** row["loss_base2"]) and row["ppl"] > 1
    log = (tmp_path / "log").read_text()
    assert f"scored tokens: {tokens} of {tokens}" in log and "tensorboardX" not in log
    # the whole point of the count: the same number as fairseq's own command gives
    flags = ["--user-dir", files.PACKAGE, "--path", trained / LAST, "--gen-subset", "test"]
    flags += ["--tokens-per-sample", "100", "--sample-break-mode", "none", "--cpu"]
    own = run(sys.executable, "-m", "fairseq_cli.eval_lm", corpus, *flags)
    [shown] = re.findall(r"Perplexity: (\d+\.\d\d)\b", own.stdout + own.stderr)
    assert float(shown) == pytest.approx(rows[1]["ppl"], rel=1e-6, abs=0.0051)  # it is shown with two decimals

    known = out.read_text()
    assert main([str(c) for c in command] + ["--lengths", "100,32"]) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert again == rows[::-1] and out.read_text() == known

    too_long = error_of(capsys, *command, "--lengths", f"32,{tokens + 1}")
    assert f"less than one block of {tokens + 1}" in too_long
    assert "less than length 100" in error_of(capsys, *command, "--lengths", "100", "--max-tokens", "50")
    assert "no nope.idx" in error_of(capsys, *command, "--lengths", "32", "--subset", "nope")


def test_eval_refuses_bad_checkpoints(trained, corpus, tmp_path, capsys):
    def refused(checkpoint: Path) -> str:
        return error_of(capsys, "eval", checkpoint, corpus, "--lengths", "32")

    assert "does not exist" in refused(tmp_path / "no.pt")
    (tmp_path / "short.pt").write_bytes((trained / LAST).read_bytes()[:5000])
    assert "is not a checkpoint, or damaged" in refused(tmp_path / "short.pt")
    torch.save({"model": {}}, tmp_path / "foreign.pt")
    assert "is not a fairseq checkpoint" in refused(tmp_path / "foreign.pt")


def test_full_disk_is_one_line(monkeypatch, tmp_path, capsys):
    def full(args):
        raise OSError(28, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr("fairseq_rpe.cli.list.run_user_dir", full)
    assert "no space left on the disk while writing" in error_of(capsys, "user-dir")


def test_newest_whole_checkpoint_becomes_the_last(tmp_path):
    def save(name: str, updates: int) -> Path:
        torch.save({"cfg": {}, "optimizer_history": [{"num_updates": updates}]}, tmp_path / name)
        return tmp_path / name

    assert checkpoints.recover_last(CheckpointFolder(tmp_path)) == 0
    save("checkpoint_best.pt", 10)
    newest = save("checkpoint_1_20.pt", 20)
    assert checkpoints.recover_last(CheckpointFolder(tmp_path)) == 20  # there was no last one
    assert (tmp_path / LAST).read_bytes() == newest.read_bytes()
    save(LAST, 15)
    assert checkpoints.recover_last(CheckpointFolder(tmp_path)) == 20  # there was an older one
    newest.write_bytes(newest.read_bytes()[:-20])
    save(LAST, 15)
    assert checkpoints.recover_last(CheckpointFolder(tmp_path)) == 15
    (tmp_path / LAST).write_bytes(b"")
    assert checkpoints.recover_last(CheckpointFolder(tmp_path)) == 10
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(b"broken")
    assert checkpoints.recover_last(CheckpointFolder(tmp_path)) == 0
    assert not (tmp_path / LAST).exists()


def test_files_are_whole_or_absent(tmp_path):
    path = tmp_path / "deep" / "a.json"
    files.write_json(path, {"a": 1})
    assert files.read_json(path) == {"a": 1}

    def fail(target: Path) -> None:
        target.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.replace_with(path, fail)
    assert files.read_json(path) == {"a": 1} and os.listdir(path.parent) == ["a.json"]
    path.write_text("{")
    with pytest.raises(UserError, match="a.json line 1 is not a JSON object"):
        files.read_json(path)
    path.write_text('{"a": 1}\n["a"')
    with pytest.raises(UserError, match="line 2 is not a JSON object"):
        files.append_json_line(path, {})


def test_index_is_read_as_fairseq_reads_it(corpus, tmp_path):
    from fairseq.data import data_utils

    for split in ("train", "valid", "test"):
        dataset = data_utils.load_indexed_dataset(str(corpus / split), None, "mmap")
        assert corpus_files.count_tokens(corpus, split) == int(dataset.sizes.sum())
    whole = (corpus / "test.idx").read_bytes()
    for text, reason in ((whole[:30], "cut short"), (b"TNTIDX\x00\x00" + whole[8:], "not an mmap index")):
        (tmp_path / "test.idx").write_bytes(text)
        with pytest.raises(UserError, match=reason):
            corpus_files.count_tokens(tmp_path, "test")
    with pytest.raises(UserError, match="rename the folder"):
        corpus_files.check_folder(Path("a:b"))
