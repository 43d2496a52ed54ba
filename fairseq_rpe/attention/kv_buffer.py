"""Keys and values of a text that grows token by token, in memory with room for the next ones."""

import torch
from torch import Tensor

SPARE = 256  # tokens; a step reads all keys anyway, so copying them once in so many steps costs little


class Room:
    """Memory (B, H, capacity, D) whose first ``used`` tokens are taken; at most a third of it, or ``SPARE``, waits.

    Nothing that is taken is written again: more goes behind it, and only behind all of it. So a cache may be copied
    and continued in two ways: the one that comes second finds the place taken, and is given memory of its own.
    """

    def __init__(self, memory: Tensor, used: int) -> None:
        self.memory, self.used = memory, used

    @classmethod
    def behind(cls, old: Tensor, more: int) -> "Room":
        """A copy of old (B, H, m, D) with room for at least ``more`` tokens behind it."""
        batch, heads, used, width = old.shape
        room = cls(old.new_empty(batch, heads, used + more + max(SPARE, used // 2), width), used)
        room.memory[:, :, :used] = old
        return room

    def fits(self, old: Tensor, more: int) -> bool:
        """Whether ``old`` is all that is taken, and ``more`` tokens can follow it."""
        memory, used = self.memory, self.used
        return (
            old.data_ptr() == memory.data_ptr()
            and old.shape == (*memory.shape[:2], used, memory.shape[3])
            and old.stride() == memory.stride()
            and used + more <= memory.shape[2]
            and (torch.is_inference_mode_enabled() or not memory.is_inference())
        )

    def add(self, new: Tensor) -> Tensor:
        """All that was there, and new (B, H, n, D)."""
        start, self.used = self.used, self.used + new.shape[2]
        self.memory[:, :, start : self.used] = new
        return self.memory[:, :, : self.used]

    def reordered(self, rows: Tensor) -> tuple[Tensor, "Room"]:
        """Rows (B',) int64 of what is taken, in new memory with as much room."""
        other = Room(self.memory.new_empty(len(rows), *self.memory.shape[1:]), self.used)
        held = other.memory[:, :, : self.used]
        return torch.index_select(self.memory[:, :, : self.used], 0, rows, out=held), other


def followed(room: Room | None, old: Tensor, new: Tensor) -> tuple[Tensor, Room | None]:
    """old (B, H, m, D) and then new (B, H, n, D), and the room that they are in; ``room``: where ``old`` may be from.

    In no room, but joined as torch joins them, where gradients may be asked for, which writing behind what an earlier
    step has used would spoil, or where their types differ.
    """
    if torch.is_grad_enabled() or old.dtype != new.dtype or old.device != new.device:
        return torch.cat([old, new], dim=2), None
    if room is None or not room.fits(old, new.shape[2]):
        room = Room.behind(old, new.shape[2])
    return room.add(new), room
