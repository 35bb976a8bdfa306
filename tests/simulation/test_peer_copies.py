"""Copies of each machine's part at another machine: what is lost with machines, and what is not."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch

from clusters import NODES, ROOT, Cluster, is_copy
from dist_checkpointing import CheckpointManager, Place, Retention
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import UnsupportedFormatError
from dist_checkpointing.testing.simulation.world import MEMORY, OWN, SHARED, Fault
from faults import store_down
from states import rows
from tiers import share

HOMES: Final = (ROOT, f"{SHARED}/run")


def state_of(comm: Comm, value: float) -> dict[str, Any]:
    """Rows of a tensor whose elements are all ``value``, as evenly on six ranks as on eight."""
    return {"rows": rows("rows", torch.full((24, 2), float(value)), comm), "value": value}


class PeerCopies(Cluster):
    """A run on four machines, each of which keeps the part of another one."""

    def __init__(self, seed: int, home: str, *, memory: bool = False) -> None:
        super().__init__(seed)
        self.places = [Place(f"{OWN}/run", copies=1), Place(home)]
        if memory:
            in_memory = Place(f"{MEMORY}/run", copies=1)
            self.places = [in_memory, Place(f"{OWN}/run", every=2), Place(home, every=100)]

    def train(self, *steps: int, is_copied: bool, **options: Any) -> None:
        """Save steps; if they are not copied into the store, the machines stop after a minute."""

        def work(comm: Comm) -> None:
            manager = CheckpointManager(self.places, comm=comm, **options)
            if manager.steps():
                manager.load(state_of(comm, 0))
            for step in steps:
                manager.save(step, state_of(comm, step))
            if is_copied:
                manager.close()
            else:
                time.sleep(60)

        with store_down(at=lambda name, key: not is_copied and is_copy(name, key)):
            self.on(work)

    def files(self, name: str, step: int) -> list[str]:
        """What the disk of a machine has of a step."""
        paths = (
            path for path, inode in self.world.machines[name].disk.tree() if not inode.is_folder
        )
        return [path for path in paths if f"step-{step:08d}" in path]

    def lose(self, *names: str) -> None:
        self.world.lose_power(names)
        for name in names:
            self.swap(name).close()

    def load(
        self, machines: tuple[str, ...] = (), faults: Sequence[Fault] = ()
    ) -> tuple[int, list[str]]:
        """The value that all ranks load, and the files of values that were read in the store."""
        self.world.log.clear()

        def work(comm: Comm) -> int:
            manager = CheckpointManager(self.places, comm=comm)
            loaded = manager.load(state_of(comm, 0))
            assert set(loaded["rows"].unique().tolist()) == {loaded["value"]}
            manager.close()
            return int(loaded["value"])

        values = self.on(work, machines, faults)
        assert values == [values[0]] * len(values)
        asked = [line.path for line in self.world.log if line.name in ("get", "open")]
        return values[0], [
            path for path in asked if "/data/model/" in path and not path.startswith((OWN, MEMORY))
        ]


def played(
    act: Callable[[PeerCopies], Any], seed: int = 7, home: str = ROOT, *, memory: bool = False
) -> None:
    made = PeerCopies(seed, home, memory=memory)
    made.world.run(lambda: act(made))


@pytest.mark.parametrize("machines", [NODES, NODES[:3]])
@pytest.mark.parametrize("lost", NODES)
@pytest.mark.parametrize("home", HOMES)
def test_a_lost_machine_costs_no_read_of_the_last_place(
    home: str, lost: str, machines: tuple[str, ...]
) -> None:
    def act(made: PeerCopies) -> None:
        made.train(1, 2, is_copied=True)
        made.lose(lost)
        if machines != NODES:  # the others go on without it
            left = tuple(name for name in NODES if name != lost)
            assert made.load(left) == (2, [])
        assert made.load() == (2, [])

    played(act, home=home)


@pytest.mark.parametrize("lost", NODES)
def test_a_step_that_is_on_the_disks_alone_survives_a_lost_machine(lost: str) -> None:
    def act(made: PeerCopies) -> None:
        made.train(1, is_copied=True)
        made.train(2, is_copied=False)
        made.lose(lost)
        assert made.load()[0] == 2

    played(act)


def test_a_restart_makes_the_copies_that_a_lost_machine_took_with_it() -> None:
    def act(made: PeerCopies) -> None:
        made.train(1, is_copied=True)
        made.train(2, is_copied=False)
        made.lose("node1")

        def resume(comm: Comm) -> None:
            manager = CheckpointManager(made.places, comm=comm)
            assert manager.load(state_of(comm, 0))["value"] == 2
            time.sleep(60)

        with store_down(at=is_copy):
            made.on(resume)
        made.lose("node2")  # which had what node1 wrote
        assert made.load()[0] == 2

    played(act)


def test_two_lost_neighbours_leave_what_the_store_has() -> None:
    def act(made: PeerCopies) -> None:
        made.train(1, is_copied=True)
        made.train(2, is_copied=False)
        made.lose("node1", "node2")
        assert made.load()[0] == 1

    played(act)


@pytest.mark.parametrize("lost", [(), ("node2",)])
def test_damage_on_a_disk_is_found_and_read_elsewhere(lost: tuple[str, ...]) -> None:
    """From another machine, or from the store if the damage is in what a lost one has left."""

    def act(made: PeerCopies) -> None:
        made.train(1, 2, is_copied=True)
        made.lose(*lost)
        made.flip("node3")
        value, asked = made.load()
        assert value == 2
        assert bool(asked) == bool(lost)
        assert made.load() == (2, [])

    played(act)


def test_the_store_gets_each_file_once() -> None:
    def act(made: PeerCopies) -> None:
        made.train(1, is_copied=True)
        puts = [line.path for line in made.world.log if line.name.startswith("put")]
        values = [path for path in puts if "/data/model/" in path]
        assert values
        assert len(values) == len({*values})

    played(act)


def test_retention_deletes_copies_too() -> None:
    def act(made: PeerCopies) -> None:
        made.train(1, 2, is_copied=True)
        assert all(made.files(name, 1) for name in NODES)
        made.train(3, 4, is_copied=True, retention=Retention(keep_last=1))
        for name in NODES:
            assert not [path for step in (1, 2) for path in made.files(name, step)]
        assert made.load() == (4, [])

    played(act)


def test_a_machine_that_has_fetched_a_step_deletes_it_when_it_is_due() -> None:
    def act(made: PeerCopies) -> None:
        made.train(1, is_copied=True)
        made.lose("node1")
        assert made.load() == (1, [])
        assert made.files("node1", 1)
        made.train(2, 3, 4, is_copied=True, retention=Retention(keep_last=1))
        assert not made.files("node1", 1)

    played(act)


@pytest.mark.parametrize("home", HOMES)
def test_what_is_in_memory_comes_to_the_disk_of_each_machine(home: str) -> None:
    def act(made: PeerCopies) -> None:
        made.train(*range(1, 8), is_copied=True)
        for machine in made.world.machines.values():
            in_memory = {path[:18] for path, _ in machine.memory.tree() if "step-" in path}
            on_disk = {path[:18] for path, _ in machine.disk.tree() if "step-" in path}
            assert in_memory == {f"/run/step-0000000{step}" for step in (6, 7)}
            assert on_disk == {f"/run/step-0000000{step}" for step in (1, 2, 4, 6)}
        made.lose("node2")
        assert made.load() == (7, [])  # in memory
        made.world.lose_power(["node0", "node1"])
        assert made.load()[0] == 7  # in the last place, as the last step of a run
        made.train(8, 9, is_copied=False)
        made.world.lose_power(["node0", "node1"])
        assert made.load()[0] == 8  # on the disks; then it is copied, too
        made.world.lose_power()
        assert made.load() == (8, [])
        made.train(9, 10, is_copied=False)
        assert made.load()[0] == 10

    played(act, home=home, memory=True)


def test_damage_in_memory_is_found_and_read_from_the_disk() -> None:
    def act(made: PeerCopies) -> None:
        made.train(1, 2, is_copied=True)
        made.world.lose_power(["node0"])
        made.flip("node3", "memory")
        made.flip("node2", "memory")
        assert made.load() == (2, [])

    played(act, memory=True)


def test_a_folder_that_all_machines_see_is_the_last_place() -> None:
    def act(made: PeerCopies) -> None:
        made.places.insert(1, Place(f"{SHARED}/between"))
        with pytest.raises(UnsupportedFormatError, match="shared by the same ranks"):
            made.on(lambda comm: CheckpointManager(made.places, comm=comm))

    played(act)


@pytest.mark.parametrize("failing", [1, 1000])
def test_a_disk_that_cannot_be_written_does_not_keep_a_run_from_loading(
    failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    def act(made: PeerCopies) -> None:
        made.train(1, 2, is_copied=True)
        made.lose("node1")
        # One write fails, or all do: the file, or all of the step, comes from the last place.
        errors = [Fault(number, "EIO", operation="step-00000002/data") for number in range(failing)]
        value, asked = made.load(faults=errors)
        assert value == 2
        assert asked

    played(act)
    assert ("step 2 is not read from the disks" in caplog.text) == (failing > 1)


def killed_at(made: PeerCopies, seed: int) -> None:
    """Kill the machine of whoever does some operation, take its disk away, and go on."""
    dice, reached = random.Random(seed), Counter({1: 8})
    made.train(1, is_copied=True)

    def work(comm: Comm) -> None:
        manager = CheckpointManager(made.places, comm=comm)
        manager.load(state_of(comm, 0))
        for step in (2, 3):
            manager.save(step, state_of(comm, step))
            time.sleep(60)
            reached[step] += 1  # this rank has lived for a minute, in which copies are made

    fault = Fault(dice.randrange(1500), "kill machine")
    with store_down(at=is_copy):
        launch = made.world.launch(8, work, machines=NODES, faults=[fault])
    dead = [rank for rank in range(8) if rank not in launch.results]
    killed = NODES[dead[0] // 2] if dead else dice.choice(NODES)
    if len(made.places) == 2 or dice.random() < 0.5:
        made.lose(killed)
    else:
        made.world.lose_power(dice.sample(NODES, dice.randint(1, 4)))
    copied = max(step for step, count in reached.items() if count == 8)
    assert made.load()[0] >= copied, (seed, fault, killed)
    made.train(4, is_copied=True)
    assert made.load() == (4, [])


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_no_killed_machine_takes_a_copied_step_with_it(first: int) -> None:
    for seed in range(first, first + share(20)):
        played(
            lambda made, seed=seed: killed_at(made, seed),  # type: ignore[misc]
            seed,
            HOMES[seed % 2],
            memory=seed % 4 > 1,
        )
