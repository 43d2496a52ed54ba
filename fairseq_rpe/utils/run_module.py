"""Run a module like ``python -m`` and make this package importable without adding a folder to the import path.

``python -P .../run_module.py -m fairseq_rpe.cli.main train ...``. It is started by its path, so it imports
nothing of this package before the package is importable.
"""

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).resolve().parents[1]


class _PackageFinder(MetaPathFinder):
    """Find this package by its path; the package's own path then finds its submodules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PACKAGE.name:
            return None
        folder = str(_PACKAGE)
        return importlib.util.spec_from_file_location(
            fullname, _PACKAGE / "__init__.py", submodule_search_locations=[folder]
        )


def main(words: Sequence[str]) -> None:
    """Run the module after ``-m`` with the arguments after it; ``-u`` before ``-m`` makes the output unbuffered.

    Args:
        words: Arguments of this program.

    Raises:
        SystemExit: There is no ``-m MODULE``, or the module ends with an exit code.
    """
    options = list(words)
    if options[:1] == ["-u"]:  # submitit puts it before -m
        del options[0]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if len(options) < 2 or options[0] != "-m":
        raise SystemExit("run_module.py: name a module with -m")
    sys.meta_path.insert(0, _PackageFinder())
    sys.argv[1:] = options[2:]
    runpy.run_module(options[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
