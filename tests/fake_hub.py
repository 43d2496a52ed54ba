"""A stand-in for the library of the Hugging Face hub, whose data sets are in memory."""

from __future__ import annotations

import fnmatch
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


class FakeHub(types.ModuleType):
    """Takes the place of ``huggingface_hub``.

    ``files`` are the contents by data set and branch, then by path; ``downloaded`` are the paths in the order of their
    downloads; ``failures`` are raised by the download of a path, or of a data set as a whole.
    """

    def __init__(self, cache: Path, files: Mapping[tuple[str, str | None], Mapping[str, bytes]]) -> None:
        super().__init__("huggingface_hub")
        self.cache, self.files = cache, {place: dict(content) for place, content in files.items()}
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
        [content] = [c for (one, branch), c in self.files.items() if (one, f"sha of {branch}") == (name, revision)]
        begin = f"{folder}/" if folder else ""
        found = sorted(path for path in content if path.startswith(begin))
        if not found:
            raise self.errors.EntryNotFoundError("404")
        yield types.SimpleNamespace(path=f"{begin}deeper")  # a folder has no size
        yield from (types.SimpleNamespace(path=path, size=1) for path in found)

    def hf_hub_download(self, name: str, path: str, repo_type: str, revision: str | None) -> str:
        assert repo_type == "dataset"
        [content] = [
            content[path]
            for (one, branch), content in self.files.items()
            if one == name and revision in (None, f"sha of {branch}") and path in content
        ]
        return str(self._kept(path, content))

    def snapshot_download(self, name: str, repo_type: str, allow_patterns: Sequence[str]) -> str:
        assert repo_type == "dataset"
        if name in self.failures:
            raise self.failures[name]
        for path, content in self.files[name, None].items():
            if any(fnmatch.fnmatch(path, pattern) for pattern in allow_patterns):
                self._kept(path, content)
        return str(self.cache)

    def _kept(self, path: str, content: bytes) -> Path:
        if path in self.failures:
            raise self.failures[path]
        self.downloaded.append(path)
        (self.cache / path).parent.mkdir(parents=True, exist_ok=True)
        (self.cache / path).write_bytes(content)
        return self.cache / path
