"""Whatever goes wrong is one line, and what cannot be shown does not stop the work."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from conftest import error_of, run, run_here

from fairseq_rpe.checkpoints import checkpoint_file
from fairseq_rpe.cli.main import main
from fairseq_rpe.core import errors
from fairseq_rpe.evaluation import records
from fairseq_rpe.figures import style
from fairseq_rpe.runs import child_output, processes
from fairseq_rpe.runs.reserved_flags import RESERVED_FLAGS
from fairseq_rpe.utils import files, json_files, output_checks

SMALL = ["--rpe", "alibi", "--tokens", "32", "--updates", "2", "--batch-sentences", "4", "--device", "cpu"]


def path_error(number: int, path: str = "/a/b") -> OSError:
    return OSError(number, os.strerror(number), path)


def test_an_unknown_error_is_one_line_and_debug_shows_where_it_comes_from(monkeypatch, capsys):
    def broken(*_: object) -> None:
        raise LookupError("no such thing\nat all")

    monkeypatch.setattr("fairseq_rpe.cli.main.apply_common_options", broken)
    said = error_of(capsys, "user-dir", code=70)
    assert said == "error: internal: LookupError: no such thing at all; run again with --debug for the traceback\n"
    assert main(["user-dir", "--debug"]) == 70
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last):" in shown and "in broken" in shown
    assert shown.endswith("error: internal: LookupError: no such thing at all\n")
    assert errors.DEBUG_VARIABLE not in os.environ


@pytest.mark.parametrize("words", ["verdict alibi --csv", "verdict alibi --latex", "fire-fit alibi --out"])
def test_a_table_replaces_nothing_but_tables(words, tmp_path, capsys):
    for name in ("dict.txt", "checkpoint.pt", "sweep.json", *([] if "--csv" in words else ["results.csv"])):
        (tmp_path / name).write_text("kept")
        assert f"{name} exists and would be replaced" in error_of(capsys, *words.split(), tmp_path / name)
        assert (tmp_path / name).read_text() == "kept"


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
        (path_error(errno.ENOENT, "a\nb"), "a b does not exist: "),
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
def test_errors_of_the_system_are_one_line(error, words):
    assert words in (said := errors.user_message(error)) and "\n" not in said


def test_a_known_error_of_a_command_is_its_one_line_and_one_about_no_path_a_bug(monkeypatch, capsys):
    def fail(_: object) -> None:
        raise path_error(errno.ENOSPC)

    monkeypatch.setattr("fairseq_rpe.cli.list.run_user_dir", fail)
    assert "no space left on the disk while writing /a/b" in error_of(capsys, "user-dir")
    assert errors.user_message(OSError(errno.EBADF, "bad")) is None and errors.user_message(RuntimeError("x")) is None
    monkeypatch.setattr("fairseq_rpe.cli.list.run_user_dir", lambda args: sys.exit(0))
    assert "internal: SystemExit" in error_of(capsys, "user-dir", code=70)


def test_a_library_on_a_disk_without_programs_is_not_a_lack_of_memory(monkeypatch):
    try:
        try:
            raise ImportError("libopen.so: failed to map segment from shared object")
        except ImportError as error:
            raise ImportError("IMPORTANT: PLEASE READ THIS\nfor advice") from error
    except ImportError as error:
        long = error
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert (
        "libopen.so cannot be loaded: " in (said := errors.user_message(long)) and "noexec: install elsewhere" in said
    )


def test_flags_that_train_sets_itself_and_too_many_processes_are_refused(corpus, tmp_path, capsys, monkeypatch):
    command = ("train", corpus, *SMALL, "--out", tmp_path / "r")
    for flag in RESERVED_FLAGS:
        said = error_of(capsys, *command, "--", f"{flag}=1")
        assert said.startswith(f"error: {flag} after -- is set by this command itself: ")
    monkeypatch.setattr(processes, "available_cores", lambda: 2)
    assert "--nproc 17: the 2 cores here take 16 at most" in error_of(capsys, *command, "--nproc", "17")
    assert not (tmp_path / "r").exists()


def test_places_that_cannot_be_written_are_found_before_any_work(tmp_path):
    """Every command calls these two with its flags: see tests/test_bad_input.py."""
    (tmp_path / "file").write_text("kept")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nothing").symlink_to("absent")
    (tmp_path / "device").symlink_to("/dev/full")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.rglob("*"))
    for words, path in {
        "is a folder": tmp_path,
        "is a file, not a folder": tmp_path / "file" / "below",
        "leads back to itself": tmp_path / "loop",
        "is a device": tmp_path / "device",
        "a pipe": tmp_path / "pipe",
        "too long a name": tmp_path / ("x" * 250),
        "does not exist": Path("/proc/nothing/x"),
    }.items():
        with pytest.raises(errors.UserError, match=f"^--out .*{words}"):
            output_checks.check_output_file("--out", path)
        if words != "is a folder":
            words = "is a file, not a folder" if words in ("is a device", "a pipe") else words
            with pytest.raises(errors.UserError, match=f"^--out .*{words}"):
                output_checks.check_output_folder(path.with_name("x" * 300) if "name" in words else path, flag="--out")
    for below in (tmp_path / "nothing", tmp_path / "nothing/below"):
        with pytest.raises(errors.UserError, match=r"^--out .*nothing is a link to nothing, not a folder"):
            output_checks.check_output_folder(below)
    with pytest.raises(errors.UserError, match=f"^--out .*{tmp_path.name} is a folder"):
        output_checks.check_output_folder(tmp_path.parent, [tmp_path.name])
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "kept"


def test_a_place_is_tried_out_and_left_as_it_was(tmp_path, monkeypatch):
    """The folder itself is not made meanwhile: another trial could lose it."""
    seen = []

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", lambda handle: seen.append((tmp_path / "a").exists()))
    output_checks.check_output_file("--out", tmp_path / "a/b/c.csv")
    output_checks.check_output_folder(tmp_path / "a/b")
    assert seen == [False, False]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(errors.UserError, match="--out .*c.csv: no space left on the disk"):
        output_checks.check_output_file("--out", tmp_path / "a/b/c.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_outlives_the_removal_of_its_folder_by_another(tmp_path, monkeypatch):
    opened = []

    def removed_first(path: Path, *rest: int) -> int:
        if not opened.append(path) and len(opened) == 1:
            (tmp_path / "a").rmdir()
        return real(path, *rest)

    real = os.open
    monkeypatch.setattr(os, "open", removed_first)
    with files.exclusive_lock(tmp_path / "a/.lock", "busy"):
        assert len(opened) == 2 and (tmp_path / "a/.lock").is_file()


def test_a_lock_leaves_nothing_beside_a_refusal(tmp_path):
    with pytest.raises(errors.UserError), files.exclusive_lock(tmp_path / "a/b/.lock", "busy"):
        raise errors.UserError("no")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(errors.UserError), files.exclusive_lock(tmp_path / "a/.lock", "busy"):
        (tmp_path / "a/kept").touch()
        raise errors.UserError("no")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".lock", "kept"]


def test_a_result_that_cannot_be_stored_is_given_first(tmp_path, monkeypatch):
    def full(path: Path, row: object) -> None:
        raise OSError(errno.ENOSPC, "no space", str(path))

    monkeypatch.setattr(json_files, "append_json_line", full)
    key = records.TextKey(checkpoint="c", split="test", length=8)
    found = records.TextResult(**vars(key), tokens=1, loss_base2=1.0, ppl=2.0)
    given = records.resume_results(records.TextResult, tmp_path / "out", [key], lambda missing: lambda key: found)
    assert next(given) == found
    with pytest.raises(OSError):
        next(given)


# A command that writes more than a pipe holds and then does its work; nothing of it needs torch.
TALKATIVE = """
import sys
from pathlib import Path
from fairseq_rpe.cli import list, main

def work(args):
    for number in range(30_000):
        print("line", number, flush=not number)
    Path(sys.argv[1]).touch()

list.run_user_dir = work
sys.exit(main.main(["user-dir"]))
"""


@pytest.mark.parametrize(("reader", "code"), [("| head -c 1", 0), (">&-", 0), (">&- 2>&-", 0), ("> /dev/full", 2)])
def test_work_goes_on_when_nobody_reads(reader, code, tmp_path):
    shell = f'"$@" {reader}; exit ${{PIPESTATUS[0]}}'
    done = run("bash", "-c", shell, "bash", sys.executable, "-c", TALKATIVE, tmp_path / "done", ok=False)
    assert done.returncode == code and (tmp_path / "done").exists()
    if code:
        assert done.stderr.startswith("error: standard output cannot be written (") and done.stderr.count("\n") == 1
    else:
        assert done.stderr == ""


def test_ascii_terminals(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["list"]) == 0
    sys.stdout.flush()
    assert b"alibi" in (shown := sys.stdout.buffer.getvalue()) and b"?" in shown


def test_a_failing_trainer_is_one_line(corpus, tmp_path):
    """Its usage or traceback is not shown, unless asked for; nothing is left of a run that never began."""
    done = run_here("train", corpus, *SMALL, "--out", tmp_path / "r", "--", "--no-such-flag", ok=False)
    told = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 2 and len(told) == 1 and "unrecognized arguments: --no-such-flag" in told[0]
    assert "usage" not in done.stdout + done.stderr and not (tmp_path / "r").exists()


def relayed(script: str, capsys, code: int = 0) -> tuple[child_output.ChildExit, str, str]:
    child = processes.spawn([sys.executable, "-c", script], {}, subprocess.PIPE, (), subprocess.PIPE)
    relay = child_output.OutputRelay(child)
    assert processes.wait(child) == code
    return relay.finish(code), *capsys.readouterr()


def test_a_child_s_words_are_passed_on_and_its_last_ones_become_one_line(capsys, monkeypatch):
    says = "import sys; print('ä', flush=True); print('note', file=sys.stderr)"
    assert relayed(says, capsys) == (child_output.ChildExit(0, "", False), "ä\n", "note\n")
    traceback, why = f"{says}; raise ValueError('bad shape')", "fairseq-train failed: ValueError: bad shape"
    ending, out, err = relayed(traceback, capsys, code=1)
    assert (ending.reason, out, err) == (f"{why}; run again with --debug for the traceback", "ä\n", "note\n")
    ours = f"{says}; sys.exit('error: unknown encoding')"
    assert relayed(ours, capsys, code=1) == (child_output.ChildExit(1, "unknown encoding", False), "ä\n", "note\n")
    survived = f"{says}; print('error: of no weight', file=sys.stderr)"
    assert relayed(survived, capsys)[2] == "note\nerror: of no weight\n"
    killed = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    assert "ended by SIGKILL, perhaps for lack of memory" in relayed(killed, capsys, code=-9)[0].reason
    monkeypatch.setenv(errors.DEBUG_VARIABLE, "1")
    ending, out, err = relayed(traceback, capsys, code=1)
    assert ending.reason == why and "Traceback" in err


def test_what_a_pipe_would_give_is_refused_by_every_reader(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (json_files.read_json, json_files.read_json_lines, files.sha256_of_files, files.read_input):
        with pytest.raises(errors.UserError, match="pipe is a device, a pipe or a socket: name a plain file"):
            read(tmp_path / "pipe")
        with pytest.raises(errors.UserError, match="/dev/zero is a device"):
            read(Path("/dev/zero"))


def test_a_full_disk_names_the_file_that_was_written(tmp_path):
    """Writing itself does not say where; the name of a temporary file would not help."""

    def full(path: Path) -> None:
        with open(path, "wb"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError) as caught:
        files.write_via_temporary(tmp_path / "a/b/figure.png", full)
    assert errors.user_message(caught.value).startswith(
        f"no space left on the disk while writing {tmp_path}/a/b/figure.png: "
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [".png", ".pdf"])
def test_a_full_disk_under_a_figure_is_named_and_leaves_the_old_one(ending, tmp_path, monkeypatch):
    """matplotlib's own writer of PDF files would hide it behind an AttributeError."""

    class Full(io.FileIO):
        def write(self, content: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path: object, mode: str = "r", *rest: object, **more: object):
        return Full(os.open(path, os.O_WRONLY), mode="w") if "w" in mode else real(path, mode, *rest, **more)

    figure = style.Figure()
    figure.add_subplot().plot([1, 2])
    real = io.open
    path = tmp_path / f"figure{ending}"
    path.write_bytes(b"old")
    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr("builtins.open", opened)
    with pytest.raises(OSError) as caught:
        style.save(figure, path)
    assert f"no space left on the disk while writing {path}" in errors.user_message(caught.value)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_a_checkpoint_is_read_in_a_locale_that_cannot_name_it(trained, tmp_path):
    """Python then holds half surrogate pairs in the place of other bytes, which torch's own reader refuses."""
    path = tmp_path / "m\udce4" / "checkpoint.pt"
    path.parent.mkdir()
    shutil.copy(trained, path)
    (copy, _), (state, _) = checkpoint_file.read_file(path), checkpoint_file.read_file(trained)
    assert copy["model"].keys() == state["model"].keys()


def test_a_log_that_is_never_written_leaves_no_folders(corpus, trained, tmp_path, capsys):
    log = tmp_path / "a/b/log"
    error_of(capsys, "eval", trained, corpus, "--lengths", "8", "--log", log, "--rpe-module", tmp_path / "none.py")
    error_of(capsys, "eval", trained, corpus, "--lengths", "8", "--log", log, "--split", "none")
    assert list(tmp_path.iterdir()) == []
