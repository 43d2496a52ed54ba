"""Child processes that never outlive their parent and always hear its signals."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from fairseq_rpe.utils.child_processes import SAFE_PATH

_GRACE_SECONDS = 10.0  # between the signal and the kill
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shorten_thread_spinning() -> None:
    """Let waiting threads of torch sleep soon, in this process and its children; call it before torch is imported.

    By default they spin for milliseconds. On idle cores that gains nothing, and on a busy core they use up the time of
    the thread that they wait for. Environment variables that the user has set stay.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "5000"  # about 0.1 ms; 1000 costs up to a sixth on idle cores


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (Linux only)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes] | int | None = None,
    keep_open: Sequence[int] = (),
    errors: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a separate session; must be called from the main thread.

    This process alone passes Ctrl-C on; a terminal would signal the whole group as well. If this process is killed, the
    kernel kills the child, because two trainings must never write one folder. The kernel does so when the thread that
    started the child ends: hence the main thread. The current folder is not on the import path of a Python child.

    Args:
        command: program and arguments.
        environment: environment variables in addition to those of this process.
        log: target of the standard output; None: that of this process.
        keep_open: file descriptors that the child inherits.
        errors: target of the standard error; None: that of the standard output.

    Returns:
        The child process.
    """
    return subprocess.Popen(
        list(command),
        env={**os.environ, **SAFE_PATH, **environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT if log is not None and errors is None else errors,
        pass_fds=tuple(keep_open),
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


class Terminated(Exception):
    """SIGTERM arrived."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise :class:`Terminated` on SIGTERM, as Ctrl-C raises ``KeyboardInterrupt``."""

    def stop(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_all(children: Sequence[subprocess.Popen[bytes]], number: int = signal.SIGTERM) -> None:
    """Send a signal to every running child; kill those that do not end.

    Args:
        children: child processes.
        number: number of the signal.
    """
    alive = [child for child in children if child.poll() is None]
    for child in alive:
        child.send_signal(number)
    deadline = time.monotonic() + _GRACE_SECONDS
    for child in alive:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def wait(child: subprocess.Popen[bytes], stopping: Callable[[], None] = lambda: None) -> int:
    """Wait for a child to end; Ctrl-C and SIGTERM are passed on to it before they are raised here.

    Args:
        child: child process.
        stopping: called before a signal is passed on.

    Returns:
        The exit code.
    """
    try:
        with sigterm_raises():
            return child.wait()
    except (KeyboardInterrupt, Terminated) as signal_error:
        stopping()
        if isinstance(signal_error, KeyboardInterrupt):
            stop_all([child], signal.SIGINT)
        raise
    finally:
        # without effect on a child that has ended
        stop_all([child])
