"""Python child processes that import nothing from the current folder.

``python -m`` and ``python -c`` put the current folder first on the import path, so that a ``json.py`` that lies there
is executed in place of the standard library's. Every child starts with ``-P`` and with ``PYTHONSAFEPATH`` in its
environment, which its own children inherit. ``PYTHONPATH`` stays in force.
"""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from fairseq_rpe.utils.files import PACKAGE

SAFE_PATH: Mapping[str, str] = {"PYTHONSAFEPATH": "1"}
_RUN_MODULE = Path(__file__).with_name("run_module.py")
_FIND_PACKAGE = (
    "from importlib.util import find_spec; "
    f"spec = find_spec({PACKAGE.name!r}); "
    "print(spec.origin if spec and spec.origin else '')"
)


@functools.cache
def interpreter() -> tuple[str, ...]:
    """The words with which the command of a Python child process begins; ``-m`` and a module follow.

    Where a child would not import this very package (this process has it from the current folder alone, or from a path
    that its own program added), they end with ``run_module.py``, which makes it importable and nothing else beside it.
    """
    command = (sys.executable, "-P")
    done = subprocess.run(
        [*command, "-c", _FIND_PACKAGE], env={**os.environ, **SAFE_PATH}, capture_output=True, text=True, check=False
    )
    origin = (done.stdout.splitlines() or [""])[-1]  # other lines are from the user's sitecustomize
    if done.returncode == 0 and origin and Path(origin).resolve().parent == PACKAGE:
        return command
    return (*command, str(_RUN_MODULE))


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module`` in a Python child process.

    Args:
        module: the full name of the module, as for ``python -m``.
        arguments: its command-line arguments.

    Returns:
        The words of the command.
    """
    return [*interpreter(), "-m", module, *arguments]


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Set ``PYTHONSAFEPATH`` for every Python process that starts meanwhile, those of other libraries too."""
    before = {name: os.environ.get(name) for name in SAFE_PATH}
    os.environ.update(SAFE_PATH)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
