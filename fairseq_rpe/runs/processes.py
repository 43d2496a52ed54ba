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

_GRACE_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wait_briefly() -> None:
    """Let the threads of torch sleep soon where they wait for each other, here and in children; before torch is loaded.

    They spin for milliseconds otherwise. On idle cores that gains nothing, and on a core that another process wants
    they use up the time that the thread waited for would need. What the user set stays.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "5000"  # about 0.1 ms; 1000 costs up to a sixth on idle cores


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends; only Linux can."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes] | int | None = None,
    keep_open: Sequence[int] = (),
    errors: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own; must be called from the main thread.

    A Python process does not have the current folder on its import path.
    ``log`` takes its output, ``errors`` its standard error, without which that goes the way of its output.

    Only we pass Ctrl-C on (a terminal would send it to the whole group as well), and if we are
    killed outright the kernel kills the child: two trainers must never write one folder.
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


class Stopped(Exception):
    """SIGTERM arrived."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into :class:`Stopped`, as Ctrl-C is ``KeyboardInterrupt``."""

    def stop(number: int, frame: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stop_all(children: Sequence[subprocess.Popen[bytes]], number: int = signal.SIGTERM) -> None:
    """Ask every child to end with signal ``number``; kill those that do not."""
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
    """Wait for its end; returns its code. Ctrl-C and SIGTERM are passed on to it before they are raised here.

    ``stopping`` is called before that.
    """
    try:
        with sigterm_raises():
            return child.wait()
    except (KeyboardInterrupt, Stopped) as why:
        stopping()
        if isinstance(why, KeyboardInterrupt):
            stop_all([child], signal.SIGINT)
        raise
    finally:
        stop_all([child])
