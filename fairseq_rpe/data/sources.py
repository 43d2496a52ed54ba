"""Known corpora: where they are, how they are divided, and what a right copy counts."""

import re
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.data.download import download, local
from fairseq_rpe.data.folder import SPLITS
from fairseq_rpe.data.sourcefiles import UNWANTED, Entry, find_entries

_SPLIT_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "test": "test"}
_IN_NAME = re.compile(r"(?<![a-z])(train|valid|validation|val|test)(?![a-z])")


@dataclass(frozen=True)
class Known:
    """A corpus that has a name."""

    about: str  # one sentence for the user
    hub: tuple[str, ...] = ()  # data sets of the hub that it consists of
    archives: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # file name: addresses, best first
    divided: bool = False  # divide its documents even if files are named after splits
    include: tuple[str, ...] = ()  # patterns of file names in local folders
    exclude: tuple[str, ...] = UNWANTED  # patterns of names that are left out there
    keep_binary: bool = False  # all files there that fit are text
    options: Mapping[str, Any] = field(default_factory=dict)  # by the names of PrepareOptions
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # published ones of a right copy, by split


def _wikitext(variant: str, *more: str, tokenizer: str = "bpe") -> Known:
    archive = f"wikitext-103-{variant}.zip"
    return Known(
        about=f"WikiText-103 ({variant}), Merity et al. 2016, CC BY-SA 3.0 and GFDL",
        hub=(f"hub:Salesforce/wikitext/wikitext-103-{variant}",),
        archives={archive: (f"https://wikitext.smerity.com/{archive}", *more)},
        options={"rows_are_lines": True, "tokenizer": tokenizer},
        counts={"words": {"train": 103_227_021, "valid": 217_646, "test": 245_569}},
    )


KNOWN = {
    "wikitext103": _wikitext(
        "raw-v1", "https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip"
    ),
    "wikitext103-words": _wikitext("v1", tokenizer="words"),
    "books": Known(
        about="PG-19 (Rae et al. 2019): the lawful stand-in for BookCorpus, which may not be redistributed; "
        "perplexities on it are not those of papers that used BookCorpus",
        hub=("hub:emozilla/pg19/data",),
        counts={"documents": {"train": 28_602, "valid": 50, "test": 100}},
    ),
    "github": Known(
        about="source code: the GitHub part of the Pile (100,000 rows of it), or your own folder of repositories",
        hub=("hub:timaeus/pile-github",),
        divided=True,
        include=(
            *("*.py", "*.c", "*.h", "*.cc", "*.cpp", "*.java", "*.js", "*.ts", "*.go", "*.rs"),
            *("*.jsonl*", "*.parquet"),
        ),
    ),
    "wikibook": Known(
        about="English Wikipedia of November 2023 with PG-19's books, in place of BERT's Wikipedia with BookCorpus",
        hub=("hub:wikimedia/wikipedia/20231101.en", "hub:emozilla/pg19/data"),
        divided=True,
        options={"valid_fraction": 0.002, "test_fraction": 0.002},
    ),
    "stdlib": Known(
        about="the sources of the installed Python's standard library, each file a part of one text",
        divided=True,
        include=("*.py",),
        exclude=("__pycache__",),
        keep_binary=True,
        options={"divide_by": "path", "boundaries": False, "vocab_size": 4096, "sample_bytes": None},
    ),
}

# Installed packages are no part of the library, and its tests are a third of it with odd encodings. The last was
# written when Python was built: it holds the paths and compiler of that machine.
_NOT_LIBRARY = (*("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"), "_sysconfigdata_*")

_GPT2_BASE = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
_GPT2 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def gpt2_vocabulary(folder: Path) -> Path:
    """The folder with GPT-2's vocabulary, downloaded into ``folder`` unless it is there."""
    for name, sha256 in _GPT2.items():
        mirror = f"https://dl.fbaipublicfiles.com/fairseq/gpt2_bpe/{name}"
        download([_GPT2_BASE + name, mirror], folder / name, sha256)
    return folder


def choose(known: Known, own: Sequence[Path], downloads: Path, archive: bool = False) -> dict[str, Any]:
    """What a corpus is prepared with, by the names of the options: its own ones, and its files by split.

    It is taken from ``own`` folders and files; without any from a download (an archive, kept in ``downloads``, instead
    of the hub's files if ``archive``), or the installed library.

    Raises UserError without network or permission, with what to do by hand; if some splits have files and others none.
    """
    if archive and not known.archives:
        raise UserError("--archive: there is none of this corpus, leave the option out")
    options, include, exclude = dict(known.options), known.include, known.exclude
    if own:
        paths = own
    elif archive:
        paths, include = [download(urls, downloads / name) for name, urls in known.archives.items()], ()
    elif known.hub:
        paths, include = [local(source) for source in known.hub], ()
    else:
        paths, exclude, options["skip_invalid"] = [Path(sysconfig.get_path("stdlib"))], _NOT_LIBRARY, True
    entries, _ = find_entries(paths, include, exclude, known.keep_binary)
    return {**options, **_by_split(known, paths, entries)}


def _by_split(known: Known, paths: Sequence[Path], entries: Sequence[Entry]) -> dict[str, tuple[Entry, ...]]:
    """Files by the split in their names; all under ``train`` if they are to be divided by document."""
    named: dict[str, list[Entry]] = {split: [] for split in SPLITS}
    for entry in entries:
        if found := _IN_NAME.findall(entry.name.lower()):
            named[_SPLIT_NAMES[found[-1]]].append(entry)
    if known.divided or not any(named.values()):
        return {"train": tuple(entries)}
    for split, files in named.items():
        if not files:
            raise UserError(f"{' '.join(map(str, paths))} has no file with '{split}' in its name: add or rename it")
    return {split: tuple(files) for split, files in named.items()}


def compare(known: Known, splits: Mapping[str, Mapping[str, Any]], say: Callable[[str], None] = print) -> None:
    """Say whether the counts of a prepared corpus are the published ones."""
    for what, published in known.counts.items():
        for split, expected in published.items():
            found = splits[split][what]
            if found == expected:
                say(f"{split}: {found} {what}, as published")
            else:
                say(f"warning: {split} has {found} {what} instead of the published {expected}: this is another text")
