"""Whatever goes wrong is one line, and what cannot be shown does not stop the work."""

from __future__ import annotations

import errno
import functools
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from conftest import run, run_here

from fairseq_rpe.cli.main import COMMANDS, main
from fairseq_rpe.core import checkpoint_file, errors, files
from fairseq_rpe.evaluation import results
from fairseq_rpe.figures import style
from fairseq_rpe.runs import messages, processes
from fairseq_rpe.runs.further import OURS

PROGRAM = [sys.executable, "-m", "fairseq_rpe.cli.main"]
SMALL = ["--rpe", "alibi", "--tokens", "32", "--updates", "2", "--batch-sentences", "4", "--device", "cpu"]


def error_of(capsys, *argv: object, code: int = 2) -> str:
    capsys.readouterr()
    assert main([str(word) for word in argv]) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and "Traceback" not in said, said
    return said


def path_error(number: int, path: str = "/a/b") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_error_is_one_line_and_debug_shows_where_it_comes_from(command, monkeypatch, capsys):
    def broken(*_: object) -> None:
        raise LookupError("no such thing\nat all")

    monkeypatch.setattr("fairseq_rpe.cli.main.make_ready", broken)
    monkeypatch.setattr("fairseq_rpe.cli.main.Parser.parse_known_args", lambda self, argv: (Asked(command), []))
    said = error_of(capsys, command, code=70)
    assert said == "error: internal: LookupError: no such thing at all; run again with --debug for the traceback\n"
    assert main([command, "--debug"]) == 70
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last):" in shown and "in broken" in shown
    assert shown.endswith("error: internal: LookupError: no such thing at all\n")
    assert errors.DEBUG not in os.environ


class Asked:
    def __init__(self, command: str) -> None:
        self.command = command


@pytest.mark.parametrize(
    "words", [("verdict", "alibi", "--csv"), ("verdict", "alibi", "--latex"), ("fire-fit", "alibi", "--out")]
)
@pytest.mark.parametrize("name", ["dict.txt", "checkpoint.pt", "sweep.json", "results.csv"])
def test_a_table_replaces_nothing_but_tables(words, name, tmp_path):
    file = tmp_path / name
    file.write_text("kept")
    if not (words[2] == "--csv" and name == "results.csv"):
        done = run_here(*words, file, ok=False)
        assert done.returncode == 2 and f"{name} exists and would be replaced" in done.stderr
        assert file.read_text() == "kept"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (path_error(errno.ENOENT), "/a/b does not exist: "),
        (path_error(errno.EISDIR), "/a/b is a folder: name a file"),
        (path_error(errno.ENOTDIR), "/a/b is a file, or below one: "),
        (path_error(errno.EEXIST), "/a/b already exists: "),
        (path_error(errno.EACCES), "/a/b may not be read or written: "),
        (path_error(errno.EROFS), "/a/b is on a read-only disk: "),
        (path_error(errno.ENAMETOOLONG, "x" * 300), "x has too long a name: shorten it"),
        (path_error(errno.ELOOP), "/a/b is a link that leads back to itself: "),
        (path_error(errno.ENOSPC), "no space left on the disk while writing /a/b: free some and run this again"),
        (OSError(errno.EFBIG, ""), "larger than this process may write: raise ulimit -f"),
        (path_error(errno.EIO), f"/a/b cannot be used ({os.strerror(errno.EIO)}): "),
        (OSError(errno.EMFILE, ""), "raise ulimit -n"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "could not read or write (Input/output error): check the disk"),
        (RuntimeError("can't start new thread"), "no more processes can be started: ask for fewer"),
        (ImportError("libopen.so: failed to map segment from shared object"), "to load libopen.so: raise the limit of"),
        (OSError("libopen.so: failed to map segment from shared object"), "to load libopen.so: raise the limit of"),
        (MemoryError(), "not enough memory: choose smaller "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000 bytes."), "(8,000 bytes"),
        (RuntimeError("Symlink loop from '/a/b'"), "/a/b is a link that leads back to itself: "),
    ],
)
def test_errors_of_the_system_are_one_line(error, words, monkeypatch, capsys):
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("fairseq_rpe.cli.list.run_user_dir", fail)
    assert words in error_of(capsys, "user-dir")


def test_a_library_on_a_disk_without_programs_is_not_a_lack_of_memory(monkeypatch):
    try:
        try:
            raise ImportError("libopen.so: failed to map segment from shared object")
        except ImportError as error:
            raise ImportError("IMPORTANT: PLEASE READ THIS\nfor advice") from error
    except ImportError as error:
        long = error
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert "libopen.so cannot be loaded: " in (said := errors.told(long)) and "noexec: install elsewhere" in said


def test_an_error_about_no_path_stays_a_bug(monkeypatch, capsys):
    def leave(_: object) -> None:
        sys.exit(0)

    assert errors.told(OSError(errno.EBADF, "bad")) is None and errors.told(RuntimeError("x")) is None
    monkeypatch.setattr("fairseq_rpe.cli.list.run_user_dir", leave)
    assert "internal: SystemExit" in error_of(capsys, "user-dir", code=70)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("eval x y --lengths 0", "argument --lengths: '0' is not a whole number from 1 to "),
        ("eval x y --lengths 64,,128", "has a comma with no number beside it"),
        ("eval x y --lengths 64 --rpe=", "argument --rpe: is empty"),
        ("eval x y --lengths 64 --max-tokens 99999999999999999999", "is not a whole number from 1 to 1000000000"),
        ("eval x y --lengths 64 --nothing", "unrecognized arguments: --nothing (see fairseq-rpe eval --help)"),
        ("eval x y --lengths=--", "argument --lengths: '--' is no value of an option"),
        ("accuracy x --unit=--", "argument --unit: '--' is no value of an option"),
        ("prepare x --dest d --seed " + "9" * 5000, "argument --seed: invalid int value: '999"),
        ("evla", "unknown command 'evla' (did you mean 'eval'?)"),
        ("", "the following arguments are required: COMMAND"),
        ("sliding x y --workers 99999999", "is not a whole number from 0 to 256"),
        ("verdict alibi --heads 1000000000", "is not a whole number from 1 to 1024"),
        ("profile alibi --length 100000000000", "is not a whole number from 1 to 16777216"),
        ("profile window:window=99999999999999999999999", "must be at most 1000000000"),
        ("profile t5_bias:buckets=1000000", "must be at most 65536"),
        ("fire-fit alibi --seed 1000000000000000000000000000000", "is not a whole number from 1 to 4294967295"),
        ("train d --rpe alibi --save-dir r --lr 1e30", "'1e30' is not a number above 0 and at most 100"),
        ("train d --rpe alibi --save-dir r --nproc 99999999999", "is not a whole number from 1 to 1024"),
        ("sweep d --encodings alibi --out s --lengths 64 --seeds 99999999999", "is not a whole number from 1 to "),
    ],
)
def test_the_parser_s_mistakes_are_one_line(argv, words, capsys):
    assert words in error_of(capsys, *argv.split())


@pytest.mark.parametrize("arch", ["foo", "transformer_lm", "tiny "])
def test_only_our_architectures(arch, corpus, tmp_path, capsys):
    words = ["--save-dir", tmp_path / "r", "--arch", arch]
    assert "is not one of tiny, small, wiki103, base, large" in error_of(
        capsys, "train", corpus, "--rpe", "rope", *words
    )
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("flag", OURS)
def test_flags_that_train_sets_itself_are_refused_after_two_minus(flag, corpus, tmp_path, capsys):
    said = error_of(capsys, "train", corpus, *SMALL, "--save-dir", tmp_path / "r", "--", f"{flag}=1")
    assert said.startswith(f"error: {flag} after -- is set by this command itself: ")
    assert not (tmp_path / "r").exists()


def test_more_processes_than_cores_bear_are_refused(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(processes, "cores", lambda: 2)
    said = error_of(capsys, "train", corpus, *SMALL, "--save-dir", tmp_path / "r", "--nproc", "17")
    assert "--nproc 17: the 2 cores here take 16 at most" in said and not (tmp_path / "r").exists()
    assert "unknown attention backend" in error_of(
        capsys, "train", corpus, *SMALL, "--save-dir", tmp_path / "r", "--attention-backend", "flash"
    )


@pytest.mark.parametrize(
    "text", ["import sys\nsys.exit(0)\n", "raise RuntimeError('no luck')\n", "\x00", "if", "x = 1"]
)
def test_a_module_that_is_none_is_refused(text, tmp_path, capsys):
    (tmp_path / "own.py").write_text(text)
    assert f"--rpe-module {tmp_path}/own.py" in error_of(capsys, "list", "--rpe-module", tmp_path / "own.py")
    assert f"--rpe-module {tmp_path} is not a file" in error_of(capsys, "list", "--rpe-module", tmp_path)


@pytest.fixture
def bad_files(tmp_path) -> dict[str, Path]:
    """Places where no file can be written, by what the message says of them."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "device").symlink_to("/dev/full")
    os.mkfifo(tmp_path / "pipe")
    return {
        "is a folder": tmp_path,
        "is a file, not a folder": tmp_path / "file" / "below",
        "leads back to itself": tmp_path / "loop",
        "is a device": tmp_path / "device",
        "a pipe": tmp_path / "pipe",
        "too long a name": tmp_path / ("x" * 250),
        "does not exist": Path("/proc/nothing/x"),
    }


def test_files_that_cannot_be_written_are_found_before_any_work(bad_files, corpus, trained, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    for words, path in bad_files.items():
        for flag in ("--out", "--log"):
            said = error_of(capsys, "eval", trained, corpus, "--lengths", 32, flag, path)
            assert f"error: {flag} " in said and words in said
        assert words in error_of(capsys, "verdict", "alibi", "--csv", path)
        assert words in error_of(capsys, "fire-fit", "alibi", "--length", 9, "--out", path)
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "kept"


def test_folders_that_cannot_be_written_are_found_before_any_work(bad_files, corpus, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    for words, path in bad_files.items():
        if words in ("is a folder", "too long a name"):
            continue
        words = "is a file, not a folder" if words in ("is a device", "a pipe") else words
        for argv in (
            ("train", corpus, *SMALL, "--save-dir", path),
            ("train", corpus, *SMALL, "--save-dir", tmp_path / "r", "--tensorboard", path),
            ("sweep", corpus, "--encodings", "alibi", "--lengths", 32, "--out", path),
            ("trf", "alibi", "--out", path),
            ("figures", "alibi", "--out", path),
            ("sensitivity", "--out", path),
            ("bench", "--lengths", 8, "--out", path),
            ("prepare", corpus / "dict.txt", "--dest", path),
        ):
            assert words in error_of(capsys, *argv), argv
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_is_tried_out_and_left_as_it_was(tmp_path, monkeypatch):
    files.check_file("--out", tmp_path / "a/b/c.csv")
    files.check_folder(tmp_path / "d/e")
    assert list(tmp_path.iterdir()) == []

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(errors.UserError, match="--out .*c.csv: no space left on the disk"):
        files.check_file("--out", tmp_path / "a/b/c.csv")
    assert list(tmp_path.iterdir()) == []


def test_trying_a_place_out_makes_no_folder_that_another_trial_could_lose(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append((tmp_path / "a").exists()))
    files.check_folder(tmp_path / "a/b")
    files.check_file("--out", tmp_path / "a/c.csv")
    assert seen == [False, False]


def test_a_lock_outlives_the_removal_of_its_folder_by_another(tmp_path, monkeypatch):
    opened = []

    def removed_first(path: Path, *rest: int) -> int:
        if not opened.append(path) and len(opened) == 1:
            (tmp_path / "a").rmdir()
        return real(path, *rest)

    real = os.open
    monkeypatch.setattr(os, "open", removed_first)
    with files.lock(tmp_path / "a/.lock", "busy"):
        assert len(opened) == 2 and (tmp_path / "a/.lock").is_file()


def test_a_lock_leaves_nothing_beside_a_refusal(tmp_path):
    with pytest.raises(errors.UserError), files.lock(tmp_path / "a/b/.lock", "busy"):
        raise errors.UserError("no")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(errors.UserError), files.lock(tmp_path / "a/.lock", "busy"):
        (tmp_path / "a/kept").touch()
        raise errors.UserError("no")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".lock", "kept"]


def test_a_result_that_cannot_be_stored_is_given_first(tmp_path, monkeypatch):
    def full(path: Path, row: object) -> None:
        raise OSError(errno.ENOSPC, "no space", str(path))

    monkeypatch.setattr(files, "append_json_line", full)
    key = results.TextKey(checkpoint="c", subset="test", length=8)
    found = results.TextResult(**vars(key), tokens=1, loss_base2=1.0, ppl=2.0)
    given = results.resumed(results.TextResult, tmp_path / "out", [key], lambda missing: lambda key: found)
    assert next(given) == found
    with pytest.raises(OSError):
        next(given)


def status_of(command: list[object], reader: str) -> tuple[int, str]:
    """The status and standard error of a command whose output goes into a reader of a shell."""
    words = [*PROGRAM, *map(str, command)]
    shell = f'"$@" {reader}; exit ${{PIPESTATUS[0]}}'
    done = run("bash", "-c", shell, "bash", *words, ok=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("reader", ["| head -c 1", ">&-", ">&- 2>&-"])
def test_work_goes_on_when_nobody_reads(reader, corpus, trained, tmp_path):
    command = ["eval", trained, corpus, "--lengths", "8,16,32", "--out", tmp_path / "out", "--device", "cpu"]
    assert status_of(command, reader) == (0, "")
    assert len((tmp_path / "out").read_text().splitlines()) == 3


def test_an_output_that_cannot_be_written_is_told_after_the_work(corpus, trained, tmp_path):
    command = ["eval", trained, corpus, "--lengths", "8,16", "--out", tmp_path / "out", "--device", "cpu"]
    code, said = status_of(command, "> /dev/full")
    assert code == 2 and said.startswith("error: standard output cannot be written (") and said.count("\n") == 1
    assert len((tmp_path / "out").read_text().splitlines()) == 2


def test_ascii_terminals_and_warnings_that_are_errors(corpus, trained):
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONWARNINGS": "error"}
    done = run(*PROGRAM, "list", env=plain)
    assert "alibi" in done.stdout and done.stdout.isascii() and done.stderr == ""
    run(*PROGRAM, "eval", trained, corpus, "--lengths", "8", "--device", "cpu", env=plain)


def test_a_failing_trainer_is_one_line(corpus, tmp_path):
    """Its usage or traceback is not shown, unless asked for; nothing is left of a run that never began."""
    command = [*PROGRAM, "train", corpus, *SMALL, "--save-dir", tmp_path / "r"]
    done = run(*command, "--", "--no-such-flag", ok=False)
    told = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 2 and len(told) == 1 and "unrecognized arguments: --no-such-flag" in told[0]
    assert "usage" not in done.stdout + done.stderr and not (tmp_path / "r").exists()


def relayed(script: str, capsys, code: int = 0) -> tuple[messages.Ending, str, str]:
    child = processes.spawn([sys.executable, "-c", script], {}, subprocess.PIPE, (), subprocess.PIPE)
    relay = messages.Relay(child)
    assert processes.wait(child) == code
    return relay.finish(code), *capsys.readouterr()


def test_a_child_s_words_are_passed_on_and_its_last_ones_become_one_line(capsys, monkeypatch):
    says = "import sys; print('ä', flush=True); print('note', file=sys.stderr)"
    assert relayed(says, capsys) == (messages.Ending(0, "", False), "ä\n", "note\n")
    traceback = f"{says}; raise ValueError('bad shape')"
    ending, out, err = relayed(traceback, capsys, code=1)
    assert ending.why == "fairseq-train failed: ValueError: bad shape; run again with --debug for the traceback"
    assert (out, err) == ("ä\n", "note\n")
    ours = f"{says}; sys.exit('error: unknown encoding')"
    assert relayed(ours, capsys, code=1) == (messages.Ending(1, "unknown encoding", False), "ä\n", "note\n")
    survived = f"{says}; print('error: of no weight', file=sys.stderr)"
    assert relayed(survived, capsys)[2] == "note\nerror: of no weight\n"
    killed = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    assert "ended by SIGKILL, perhaps for lack of memory" in relayed(killed, capsys, code=-9)[0].why
    monkeypatch.setenv(errors.DEBUG, "1")
    ending, out, err = relayed(traceback, capsys, code=1)
    assert ending.why == "fairseq-train failed: ValueError: bad shape" and "Traceback" in err


def test_the_keyboard_stops_training_without_a_traceback(corpus, tmp_path):
    command = [*PROGRAM, "train", corpus, *SMALL[:-6], "--updates", "100000", "--device", "cpu"]
    command += ["--save-dir", tmp_path / "r", "--save-every", "4"]
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        # a shell has its background jobs ignore it, these tests perhaps among them
        heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen([str(word) for word in command], stdout=out, stderr=err, preexec_fn=heard)
        deadline = time.monotonic() + 120
        while not (tmp_path / "r/checkpoint_last.pt").exists() and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "err").read_text()[-2000:]
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(40) == 130
        finally:
            process.kill()
    said = (tmp_path / "err").read_text()
    assert said.splitlines()[-1] == "stopped by the keyboard; rerun the same command to resume"
    assert "Traceback" not in said + (tmp_path / "out").read_text()


@pytest.mark.parametrize("place", ["dict.txt", "corpus.json", "test.idx", "recipe.toml", "questions.jsonl", "pipe.py"])
def test_pipes_and_devices_are_refused_where_a_file_is_read(place, corpus, trained, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    (data / place).unlink(missing_ok=True)
    os.mkfifo(data / place)
    commands: dict[str, tuple[object, ...]] = {
        "recipe.toml": ("sweep", corpus, "--recipe", data / place, "--out", tmp_path / "s"),
        "questions.jsonl": (
            *("prepare-answers", "--train", data / place, "--valid", data / place),
            *("--dest", tmp_path / "d", "--vocab-from", corpus),
        ),
        "pipe.py": ("list", "--rpe-module", data / place),
    }
    command = commands.get(place, ("eval", trained, data, "--lengths", "8", "--device", "cpu"))
    said = error_of(capsys, *command)
    assert place in said and ("pipe or a socket" in said or "not a file" in said or "has no " in said), said


def test_what_a_pipe_would_give_is_refused_by_every_reader(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (files.read_json, files.read_json_lines, files.file_digest, files.read_input):
        with pytest.raises(errors.UserError, match="pipe is a device, a pipe or a socket: name a plain file"):
            read(tmp_path / "pipe")
        with pytest.raises(errors.UserError, match="/dev/zero is a device"):
            read(Path("/dev/zero"))


def test_a_full_disk_names_the_file_that_was_written(tmp_path, monkeypatch):
    """Writing itself does not say where; the name of a temporary file would not help."""

    def full(path: Path) -> None:
        with open(path, "wb"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError) as caught:
        files.replace_with(tmp_path / "a/b/figure.png", full)
    assert errors.told(caught.value).startswith(f"no space left on the disk while writing {tmp_path}/a/b/figure.png: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [".png", ".pdf"])
def test_a_full_disk_under_a_figure_is_named(ending, tmp_path, monkeypatch):
    """matplotlib's own writer of PDF files would hide it behind an AttributeError."""

    class Full(io.FileIO):
        def write(self, content: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path: object, mode: str = "r", *rest: object, **more: object):
        return Full(os.open(path, os.O_WRONLY), mode="w") if "w" in mode else real(path, mode, *rest, **more)

    figure = style.Figure()
    figure.add_subplot().plot([1, 2])
    real = io.open
    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr("builtins.open", opened)
    with pytest.raises(OSError) as caught:
        style.save(figure, tmp_path / f"figure{ending}")
    assert f"no space left on the disk while writing {tmp_path}/figure{ending}" in errors.told(caught.value)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_read_in_a_locale_that_cannot_name_it(trained, tmp_path):
    """Python then holds half surrogate pairs in the place of other bytes, which torch's own reader refuses."""
    path = tmp_path / "m\udce4" / "checkpoint.pt"
    path.parent.mkdir()
    shutil.copy(trained, path)
    (copy, _), (state, _) = checkpoint_file.read(path), checkpoint_file.read(trained)
    assert copy["model"].keys() == state["model"].keys()


def test_a_log_that_is_never_written_leaves_no_folders(corpus, trained, tmp_path, capsys):
    log = tmp_path / "a/b/log"
    error_of(capsys, "eval", trained, corpus, "--lengths", "8", "--log", log, "--rpe-module", tmp_path / "none.py")
    error_of(capsys, "eval", trained, corpus, "--lengths", "8", "--log", log, "--subset", "none")
    assert list(tmp_path.iterdir()) == []
