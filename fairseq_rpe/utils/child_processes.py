"""Commands for Python child processes that import nothing from the current folder.

``python -m`` and ``python -c`` put the current folder first on the import path, so a ``json.py`` in it would replace
the standard library's. Every child starts with ``-P`` and with ``PYTHONSAFEPATH`` in its environment, which its own
children inherit. ``PYTHONPATH`` stays in force.
"""

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from fairseq_rpe.utils.files import PACKAGE_DIR

SAFE_PATH: Mapping[str, str] = {"PYTHONSAFEPATH": "1"}
_RUN_MODULE = Path(__file__).with_name("run_module.py")
_FIND_PACKAGE = (
    "from importlib.util import find_spec; "
    f"spec = find_spec({PACKAGE_DIR.name!r}); "
    "print(spec.origin if spec and spec.origin else '')"
)


@functools.cache
def python_command() -> tuple[str, ...]:
    """Return the first words of the command of a Python child process; ``-m`` and a module follow.

    If a child would not import this very package (because this process imported it from the current folder, or from a
    path that its program added), they end with ``run_module.py``, which makes this package importable and nothing else.
    """
    command = (sys.executable, "-P")
    result = subprocess.run(
        [*command, "-c", _FIND_PACKAGE], env={**os.environ, **SAFE_PATH}, capture_output=True, text=True, check=False
    )
    origin = (result.stdout.splitlines() or [""])[-1]  # other lines are from the user's sitecustomize
    if result.returncode == 0 and origin and Path(origin).resolve().parent == PACKAGE_DIR:
        return command
    return (*command, str(_RUN_MODULE))


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``module`` in a Python child process.

    Args:
        module: Full name of the module, as for ``python -m``.
        arguments: Its command-line arguments.

    Returns:
        The words of the command.
    """
    return [*python_command(), "-m", module, *arguments]


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Set ``PYTHONSAFEPATH`` for every Python process that starts meanwhile, including those of other libraries."""
    saved = {name: os.environ.get(name) for name in SAFE_PATH}
    os.environ.update(SAFE_PATH)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
