"""Machines with two ranks and a disk each, and a last place behind them."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from dist_checkpointing import Place
from dist_checkpointing.comm import Comm
from dist_checkpointing.testing.simulation.disk import Disk
from dist_checkpointing.testing.simulation.world import OWN, Fault, World

NODES: Final = ("node0", "node1", "node2", "node3")
RANKS_A_NODE: Final = 2
ROOT: Final = "s3://bucket/run"
PLACES: Final = [Place(f"{OWN}/run"), Place(ROOT)]


def is_copy(name: str, key: str) -> bool:
    """Whether a request to the store copies a file of values there."""
    return name.startswith("put") and "/data/" in key


class Cluster:
    """Four machines, and those that a run is on if a test names no others."""

    names: ClassVar[tuple[str, ...]] = NODES

    def __init__(self, seed: int = 7) -> None:
        self.world = World(seed, machines=len(NODES), changes=0.0, keeps_log=True)

    def on(
        self,
        work: Callable[[Comm], Any],
        machines: tuple[str, ...] = (),
        faults: Sequence[Fault] = (),
    ) -> list[Any]:
        """Run work on the ranks of machines; what each returns."""
        machines = machines or self.names
        ranks = RANKS_A_NODE * len(machines)
        results = self.world.launch(ranks, work, machines=machines, faults=faults).results
        errors = [error for error in results.values() if isinstance(error, Exception)]
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(ranks)]

    def swap(self, name: str, disk: Disk | None = None) -> Disk:
        """Put another disk into a machine, by default an empty one; the one that was there."""
        machine = self.world.machines[name]
        old = machine.disk
        machine.disk = disk or Disk(old.device, self.world.scheduler.random)
        return old

    def flip(self, name: str, where: str = "disk") -> None:
        """Flip a byte in each file of values on the disk of a machine, or in its memory."""
        for path, inode in getattr(self.world.machines[name], where).tree():
            if "/data/model/" in path and not inode.is_folder:
                content = bytearray(inode.content)
                content[5] ^= 1
                inode.content = bytes(content)
