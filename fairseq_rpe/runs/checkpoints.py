"""Which checkpoint of a folder can be trusted, and what it holds: settings, weights, the encodings that it learned."""

import pickle
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fairseq_rpe.core.errors import UserError
from fairseq_rpe.core.files import replace_with
from fairseq_rpe.encodings import Encoding, build
from fairseq_rpe.runs.run_folder import CheckpointFolder

_PREFIX = "decoder.encodings."


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of fairseq's, its tensors left on disk.

    ``model`` and ``task``: the settings that fairseq keeps of each. ``updates``: behind it, if it says so.
    """

    path: Path
    model: Mapping[str, object]
    task: Mapping[str, object]
    weights: Mapping[str, Tensor]
    updates: int | None

    @property
    def arch(self) -> str:
        return str(self.model.get("arch") or self.model.get("_name"))

    @property
    def encoding(self) -> str:
        """The spec string that the model was trained with, or its architecture's name if it has none."""
        return str(self.model.get("rpe") or self.arch)

    def require_ours(self, otherwise: str = "") -> None:
        """Refuse a checkpoint of another model; ``otherwise``: a further remedy.

        Raises UserError: it has no encoding of this plugin.
        """
        if "rpe" not in self.model:
            raise UserError(
                f"{self.path} is not of this plugin (its model is '{self.arch}'): name a transformer_rpe_lm{otherwise}"
            )

    def learned(self) -> list[Encoding]:
        """The encodings with their parameters, one for the model or one per layer, without fairseq.

        One of the user's own is to be registered before. Raises UserError: they are of another model, or damaged.
        """
        self.require_ours()
        heads, width, length = (
            int(str(self.model[key])) for key in ("decoder_attention_heads", "decoder_embed_dim", "rpe_train_length")
        )
        values: dict[str, dict[str, Tensor]] = {}
        for key, value in self.weights.items():
            if key.startswith(_PREFIX):
                index, _, name = key.removeprefix(_PREFIX).partition(".")
                values.setdefault(index, {})[name] = value
        encodings = []
        for index in range(1 + max(map(int, values), default=0)):
            encoding = build(self.encoding, heads, width, length)
            try:
                encoding.load_state_dict(values.get(str(index), {}))
            except RuntimeError:
                remedy = "train it again"
                raise UserError(f"{self.path} holds other parameters than '{self.encoding}' has: {remedy}") from None
            encodings.append(encoding.eval())
        return encodings


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; runs no code from the file.

    Raises UserError: it is missing, damaged, or not fairseq's.
    """
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist")
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"checkpoint {path} cannot be loaded ({reason}): train again or restore it") from None
    if not isinstance(state, dict) or not isinstance(state.get("cfg"), dict):
        raise UserError(f"{path} is not a fairseq checkpoint with a config: train again with this version")
    model, task = (state["cfg"].get(part) or {} for part in ("model", "task"))
    history = state.get("optimizer_history") or [{}]
    return Checkpoint(path, model, task, state.get("model") or {}, history[-1].get("num_updates"))


def is_intact(path: Path) -> bool:
    """True for a complete torch file: a zip whose every member has the right checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError):
        return False


def newest(folder: CheckpointFolder) -> tuple[int, Path | None]:
    """The updates behind the newest intact checkpoint of ``folder`` and its file; 0: none is intact."""
    found = {p: load(p).updates or 0 for p in folder.path.glob("checkpoint*.pt") if is_intact(p)}
    if not found:
        return 0, None
    # Among equals the last one: then there is nothing to copy.
    path = max(found, key=lambda p: (found[p], p == folder.last))
    return found[path], path


def recover_last(folder: CheckpointFolder) -> int:
    """Make ``checkpoint_last.pt`` the newest intact checkpoint of ``folder``; returns its updates.

    fairseq writes one file safely and then copies it over ``checkpoint_last.pt``, so a kill during
    the copy leaves the last one broken or old while the newest lies beside it. 0: none is intact.
    """
    updates, path = newest(folder)
    if path is None:
        folder.last.unlink(missing_ok=True)
    elif path != folder.last:
        replace_with(folder.last, lambda target: shutil.copyfile(path, target))
    return updates
