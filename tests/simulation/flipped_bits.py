"""Bits of stored files that flip, as they do on disks and in memory: nothing says that they did."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dist_checkpointing.testing.simulation.disk import Inode
from dist_checkpointing.testing.simulation.world import World


@dataclass(frozen=True, slots=True)
class FlippedBit:
    """A bit of a file or an object; to flip it once more mends it."""

    world: World
    path: str
    inode: Inode | None
    position: int
    bit: int

    @classmethod
    def chosen(cls, world: World, part: str, dice: random.Random) -> FlippedBit | None:
        """A bit of a file whose path has such a ``part``; None if there is none."""
        found: list[tuple[str, Inode | None, int]] = [
            (path, inode, len(inode.content))
            for path, inode in world.shared.tree()
            if part in path and not inode.is_folder
        ]
        found += [(key, None, size) for key, size in world.store.sizes(part).items()]
        whole = [(path, inode, size) for path, inode, size in sorted(found, key=_path) if size]
        if not whole:
            return None
        path, inode, size = dice.choice(whole)
        return cls(world, path, inode, dice.randrange(size), dice.randrange(8))

    def flip(self) -> None:
        if self.inode is None:
            self.world.store.flip(self.path, self.position, self.bit)
        else:
            data = bytearray(self.inode.content)
            data[self.position] ^= 1 << self.bit
            self.inode.content = bytes(data)


def _path(found: tuple[str, Inode | None, int]) -> str:
    return found[0]
