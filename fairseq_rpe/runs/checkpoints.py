"""Reads checkpoints of fairseq with their encodings, and recovers the newest intact checkpoint of a folder."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from fairseq_rpe.checkpoints import checkpoint, checkpoint_file
from fairseq_rpe.checkpoints.checkpoint import Checkpoint
from fairseq_rpe.core.errors import UserError
from fairseq_rpe.encodings import from_checkpoint
from fairseq_rpe.encodings.model import LayerEncodings
from fairseq_rpe.encodings.model_rotation import complete_spec_for_checkpoint
from fairseq_rpe.runs.run_folder import CheckpointFolder
from fairseq_rpe.utils.files import write_via_temporary


@dataclass(frozen=True)
class RpeCheckpoint(Checkpoint):
    """A checkpoint of fairseq with access to the encoding of its model."""

    @property
    def arch(self) -> str:
        """Name of the architecture."""
        return str(self.model.get("arch") or self.model.get("_name"))

    @property
    def encoding(self) -> str:
        """Spec of the encoding, or the name of the architecture of a model without one."""
        return str(self.model.get("rpe") or self.arch)

    def require_rpe_model(self, otherwise: str = "") -> None:
        """Check that the model is one of this package.

        Args:
            otherwise: further remedy, for the message.

        Raises:
            UserError: the model has no encoding of this package.
        """
        if "rpe" not in self.model:
            raise UserError(
                f"{self.path} is not of this plugin (its model is '{self.arch}'): name a transformer_rpe_lm{otherwise}"
            )

    def complete_spec(self, spec: str) -> str:
        """Complete the spec of an encoding with the model's rotation.

        Args:
            spec: encoding that replaces the model's; one from a user's module must be registered.

        Returns:
            The spec, unchanged if it states the rotation.

        Raises:
            UserError: the spec is not valid, or contradicts the rotation that the model was trained with.
        """
        return complete_spec_for_checkpoint(spec, str(self.model["rpe"])) if "rpe" in self.model else spec

    def load_encodings(self) -> LayerEncodings:
        """Build the trained encodings without importing fairseq; those of a user's module must be registered.

        Returns:
            The encodings of its layers.

        Raises:
            UserError: the model is not of this package, or its encodings are damaged.
        """
        self.require_rpe_model()
        return from_checkpoint.restore_encodings(self)


def load(path: Path) -> RpeCheckpoint:
    """Read a checkpoint without running code from the file.

    Args:
        path: file of the checkpoint.

    Returns:
        The checkpoint.

    Raises:
        UserError: the file is missing, damaged, not fairseq's, or has contents that no training writes.
    """
    return RpeCheckpoint(**vars(checkpoint.load_checkpoint(path)))


def is_intact(path: Path) -> bool:
    """Return whether a file is a complete file of torch with correct checksums."""
    try:
        checkpoint_file.check_file(path)
    except UserError:
        return False
    return True


def find_newest(folder: CheckpointFolder) -> tuple[int, Path | None]:
    """Find the newest intact checkpoint of a folder.

    Args:
        folder: folder of the checkpoints.

    Returns:
        Updates and path of the checkpoint; (0, None) if none is intact.
    """
    updates = {p: load(p).num_updates or 0 for p in folder.path.glob("checkpoint*.pt") if is_intact(p)}
    if not updates:
        return 0, None
    # checkpoint_last.pt wins a tie: then there is nothing to copy
    path = max(updates, key=lambda p: (updates[p], p == folder.last))
    return updates[path], path


def recover_last(folder: CheckpointFolder) -> int:
    """Make ``checkpoint_last.pt`` the newest intact checkpoint of a folder.

    fairseq writes a new file and then copies it over ``checkpoint_best.pt``, if it is the best one, and over
    ``checkpoint_last.pt``. A kill between these steps leaves the copies broken or old, and the newest checkpoint in the
    new file. ``checkpoint_best.pt`` is then repaired, too: fairseq would not write it again.

    Args:
        folder: folder of the checkpoints.

    Returns:
        Updates of the checkpoint, 0 if none is intact.
    """
    updates, path = find_newest(folder)
    if path is None:
        folder.last.unlink(missing_ok=True)
    elif path != folder.last:
        if load(path).is_best:
            write_via_temporary(folder.best, lambda target: shutil.copyfile(path, target))
        write_via_temporary(folder.last, lambda target: shutil.copyfile(path, target))
    return updates
