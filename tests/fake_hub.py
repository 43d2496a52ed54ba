"""A stand-in for ``huggingface_hub`` with data sets in memory."""

from __future__ import annotations

import fnmatch
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


class FakeHub(types.ModuleType):
    """Module that replaces ``huggingface_hub``.

    Attributes:
        cache: folder of downloaded files.
        files: (data set, branch) -> path -> content; the branch None is the default one.
        downloaded: paths in the order of their downloads.
        failures: exceptions that the download of a path, or of a whole data set, raises.
    """

    def __init__(self, cache: Path, files: Mapping[tuple[str, str | None], Mapping[str, bytes]]) -> None:
        super().__init__("huggingface_hub")
        self.cache, self.files = cache, {key: dict(content) for key, content in files.items()}
        self.downloaded: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.errors: Any = types.ModuleType("huggingface_hub.errors")
        for kind in ("GatedRepo", "RepositoryNotFound", "EntryNotFound", "RevisionNotFound"):
            setattr(self.errors, f"{kind}Error", type(f"{kind}Error", (OSError,), {}))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", self)
        monkeypatch.setitem(sys.modules, "huggingface_hub.errors", self.errors)

    def HfApi(self) -> FakeHub:
        return self

    def repo_info(self, name: str, repo_type: str, expand: Sequence[str], revision: str | None = None) -> Any:
        assert (repo_type, expand) == ("dataset", ["sha"])
        if (name, revision) not in self.files:
            raise self.errors.RevisionNotFoundError("404")
        return types.SimpleNamespace(sha=f"sha of {revision}")

    def list_repo_tree(self, name: str, folder: str | None, recursive: bool, revision: str, repo_type: str) -> Any:
        assert (recursive, repo_type) == (True, "dataset")
        [files] = self._files_of(name, revision)
        start = f"{folder}/" if folder else ""
        paths = sorted(path for path in files if path.startswith(start))
        if not paths:
            raise self.errors.EntryNotFoundError("404")
        yield types.SimpleNamespace(path=f"{start}deeper")  # a folder has no size
        yield from (types.SimpleNamespace(path=path, size=1) for path in paths)

    def hf_hub_download(self, name: str, path: str, repo_type: str, revision: str | None) -> str:
        assert repo_type == "dataset"
        [content] = [files[path] for files in self._files_of(name, revision) if path in files]
        return str(self._download(path, content))

    def snapshot_download(self, name: str, repo_type: str, allow_patterns: Sequence[str]) -> str:
        assert repo_type == "dataset"
        if name in self.failures:
            raise self.failures[name]
        for path, content in self.files[name, None].items():
            if any(fnmatch.fnmatch(path, pattern) for pattern in allow_patterns):
                self._download(path, content)
        return str(self.cache)

    def _files_of(self, name: str, revision: str | None) -> list[dict[str, bytes]]:
        """Return the files of the branches of a data set that have this revision; None: of all its branches."""
        return [
            files
            for (data_set, branch), files in self.files.items()
            if data_set == name and revision in (None, f"sha of {branch}")
        ]

    def _download(self, path: str, content: bytes) -> Path:
        """Write a file into the cache, or raise its failure."""
        if path in self.failures:
            raise self.failures[path]
        self.downloaded.append(path)
        (self.cache / path).parent.mkdir(parents=True, exist_ok=True)
        (self.cache / path).write_bytes(content)
        return self.cache / path
