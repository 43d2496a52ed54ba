"""Which checkpoint of a folder can be trusted, and what it holds: settings, weights, the encodings that it learned."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from fairseq_rpe.checkpoints import checkpoint, checkpoint_file
from fairseq_rpe.checkpoints.checkpoint import State
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import Encoding, from_checkpoint
from fairseq_rpe.encodings.model_rotation import complete_for_checkpoint
from fairseq_rpe.runs.run_folder import CheckpointFolder
from fairseq_rpe.utils.files import replace_with


@dataclass(frozen=True)
class Checkpoint(State):
    """A checkpoint of fairseq's, and what is ours in it."""

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

    def complete(self, spec: str) -> str:
        """Return ``spec``, an encoding to replace the model's, with the model's rotation where it leaves it open.

        Args:
            spec: an encoding; one of the user's own is to be registered before.

        Returns:
            The spec, unchanged where nothing is missing.

        Raises:
            UserError: it is not valid, or contradicts the rotation that the model was trained with.
        """
        return complete_for_checkpoint(spec, str(self.model["rpe"])) if "rpe" in self.model else spec

    def learned(self) -> list[Encoding]:
        """The encodings with their parameters, one for the model or one per layer, without fairseq.

        One of the user's own is to be registered before. Raises UserError: they are of another model, or damaged.
        """
        self.require_ours()
        return from_checkpoint.restore(self)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; runs no code from the file.

    Raises UserError: it is missing, damaged, not fairseq's, or holds what no training leaves behind.
    """
    return Checkpoint(**vars(checkpoint.load(path)))


def is_intact(path: Path) -> bool:
    """True for a whole file of torch's, every part of it with the right checksum."""
    try:
        checkpoint_file.check(path)
    except UserError:
        return False
    return True


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
