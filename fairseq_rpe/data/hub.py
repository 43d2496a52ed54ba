"""Data sets of the Hugging Face hub as local files: parquet, JSON lines and text, never a loading script."""

import re
from pathlib import Path

from fairseq_rpe.core.errors import UserError

_SOURCE = re.compile(r"hub:([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)")
_ENDINGS = ("*.parquet", "*.jsonl", "*.jsonl.gz", "*.jsonl.xz", "*.jsonl.zst", "*.txt")


def local(source: str) -> Path:
    """The path of a source; one of the hub is fetched first."""
    return fetch(source) if source.startswith("hub:") else Path(source)


def fetch(source: str) -> Path:
    """Download ``hub:OWNER/NAME[/FOLDER]`` into the hub's own cache; returns the folder with its files.

    Raises:
        UserError: without network or permission, and if the data set has no files that can be read.
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise UserError(f"{source} is no data set of the hub: use hub:OWNER/NAME or hub:OWNER/NAME/FOLDER")
    name, folder = match[1], match[2].strip("/")
    by_hand = "or get its files in another way and give their folder instead"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        raise UserError(
            f"{source} needs the package huggingface_hub: pip install huggingface_hub pyarrow, {by_hand}"
        ) from None
    patterns = [f"{folder}/{ending}" if folder else ending for ending in _ENDINGS]
    try:
        place = Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns)) / folder
    except GatedRepoError:
        raise UserError(
            f"{source} is gated: accept its terms on its page and log in with 'hf auth login', {by_hand}"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(f"{source} does not exist or is private: check the name, {by_hand}") from None
    except Exception as error:  # the errors of its HTTP library have no common base
        reason = (str(error) or type(error).__name__).partition("\n")[0]
        raise UserError(f"{source} cannot be downloaded ({reason}): run this again, {by_hand}") from None
    if not any(next(place.rglob(ending), None) for ending in _ENDINGS):
        raise UserError(f"{source} has no parquet, .jsonl or .txt files (loading scripts are not run): {by_hand[3:]}")
    return place
