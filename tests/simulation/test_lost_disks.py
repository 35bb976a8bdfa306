"""Fast disks of which each machine has its own: what is lost with them, and what is not."""

import re
from collections.abc import Callable
from typing import Any, Final

import pytest

from clusters import NODES, PLACES, ROOT, Cluster, is_copy
from dist_checkpointing import CheckpointManager, ObjectPath, Retention
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from faults import store_down, store_requests
from simulated_states import loaded_from, state_of

TWO: Final = NODES[:2]


class LostDisks(Cluster):
    """A run on two machines, and steps of which the store may get no values."""

    names = TWO

    def train(
        self,
        *steps: int,
        back_to: int | None = None,
        is_copied: bool = True,
        machines: tuple[str, ...] = (),
        backend: Any = None,
        **options: Any,
    ) -> None:
        """Save steps whose values are their numbers, 1 more after going back."""

        def work(comm: Comm) -> None:
            manager = CheckpointManager(PLACES, backend, comm=comm, **options)
            if back_to is not None or manager.steps():
                manager.load({}, back_to)
            for step in steps:
                manager.save(step, state_of(comm, step + (back_to is not None)))
            if is_copied:
                manager.close()

        with store_down(at=lambda name, key: not is_copied and is_copy(name, key)):
            self.on(work, machines)

    def look(self, machines: tuple[str, ...] = ()) -> tuple[list[int], int | None, int]:
        """The steps, the latest one, and the value that is loaded, the same on all ranks."""

        def work(comm: Comm) -> tuple[list[int], int | None, int]:
            with CheckpointManager(PLACES, comm=comm) as manager:
                assert manager.latest() == manager.latest_valid()
                return manager.steps(), manager.latest(), loaded_from(manager, comm)

        found = self.on(work, machines)
        assert found == [found[0]] * len(found)
        result: tuple[list[int], int | None, int] = found[0]
        return result

    def stored(self) -> list[int]:
        """The steps that are committed in the store."""
        keys = " ".join(self.world.store.etags("s3://bucket"))
        return [int(number) for number in sorted(re.findall(r"step-(\d{8})/metadata.json", keys))]


def played(act: Callable[[LostDisks], Any]) -> None:
    made = LostDisks()
    made.world.run(lambda: act(made))


@pytest.mark.parametrize("lost", [("node0",), ("node1",), TWO])
def test_machines_whose_disks_are_gone_go_on_from_the_store(lost: tuple[str, ...]) -> None:
    def act(made: LostDisks) -> None:
        made.train(1, 2)
        for name in lost:
            made.swap(name)
        assert made.look() == ([1, 2], 2, 2)
        made.train(3)
        assert made.look() == ([1, 2, 3], 3, 3)

    played(act)


@pytest.mark.parametrize("lost", TWO)
def test_without_one_disk_the_newest_step_of_the_store_is_loaded(lost: str) -> None:
    def act(made: LostDisks) -> None:
        made.train(1)
        made.train(2, is_copied=False)
        old = made.swap(lost)
        assert made.look() == ([1], 1, 1)
        made.swap(lost, old)  # it comes back, and nothing was lost meanwhile
        assert made.look() == ([1, 2], 2, 2)
        made.swap(lost)
        assert made.look() == ([1, 2], 2, 2)

    played(act)


def test_what_replaces_a_step_of_the_store_is_newer_before_it_is_copied() -> None:
    def replace(comm: Comm) -> None:
        manager = CheckpointManager(PLACES, comm=comm)
        manager.load({})
        manager.save(1, state_of(comm, 5), overwrite=True)

    def act(made: LostDisks) -> None:
        made.train(1)
        with store_down(at=is_copy):
            made.on(replace)
        assert made.look() == ([1], 1, 5)

    played(act)


def test_a_step_that_a_lost_disk_took_with_it_is_saved_again() -> None:
    def act(made: LostDisks) -> None:
        made.train(1)
        made.train(2, is_copied=False)
        made.swap("node1")
        made.train(2, back_to=1)
        assert made.look() == ([1, 2], 2, 3)

    played(act)


def test_machines_come_back_as_other_ranks() -> None:
    def act(made: LostDisks) -> None:
        made.train(1)
        made.train(2, is_copied=False)
        # Rank 0 is on a machine whose disk is empty.
        assert made.look(("node2", "node0", "node1")) == ([1, 2], 2, 2)

    played(act)


def test_a_new_disk_of_rank_0_does_not_bring_back_what_was_abandoned() -> None:
    """Only the other disks know that the run has gone back: nothing of it is in the store."""

    def act(made: LostDisks) -> None:
        made.train(10, 20, 30, is_copied=False)
        made.train(15, back_to=10, is_copied=False)
        assert made.look(("node2", "node0", "node1")) == ([10, 15], 15, 16)

    played(act)


@pytest.mark.parametrize("lost", TWO)
def test_a_step_that_is_lost_does_not_bring_back_what_it_abandoned(lost: str) -> None:
    def act(made: LostDisks) -> None:
        made.train(10, 20, 30)
        made.train(15, back_to=10, is_copied=False)
        made.swap(lost)
        assert made.look() == ([10, 20, 30], 10, 10)

    played(act)


def test_a_disk_of_rank_0_that_was_away_knows_less_than_the_others() -> None:
    """Without it the run has gone back and saved another step 70, which is on disks alone."""

    def act(made: LostDisks) -> None:
        made.train(60, 70)
        made.train(80, is_copied=False)
        made.train(65, 70, back_to=60, is_copied=False, machines=("node2", "node1"))
        assert made.look(("node0", "node2", "node1")) == ([60, 65, 70], 70, 71)

    played(act)


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_run_goes_back(is_copied: bool) -> None:
    """Also before what it has saved since then is in the store."""

    def act(made: LostDisks) -> None:
        made.train(10, 20, 30)
        made.train(15, 20, back_to=10, is_copied=is_copied)
        assert made.look() == ([10, 15, 20, 30], 20, 21)
        assert made.stored() == [10, 15, 20, 30]

    played(act)


@pytest.mark.parametrize("node", TWO)
@pytest.mark.parametrize("is_copied", [True, False])
def test_damage_on_a_disk_is_mended_by_the_store_and_does_not_come_into_it(
    node: str, is_copied: bool
) -> None:
    def act(made: LostDisks) -> None:
        made.train(1)
        made.train(2, is_copied=is_copied)
        made.flip(node)
        assert made.on(newest) == [2 if is_copied else 1] * 4
        if not is_copied:
            made.train(2, back_to=1)
            assert made.look() == ([1, 2], 2, 3)

    played(act)


def newest(comm: Comm) -> int:
    manager = CheckpointManager(PLACES, comm=comm)
    return loaded_from(manager, comm)


def test_what_is_damaged_in_the_store_is_found_though_the_disks_are_whole() -> None:
    def verify(comm: Comm) -> None:
        manager = CheckpointManager(PLACES, comm=comm)
        with pytest.raises(CorruptCheckpointError):
            manager.verify(1)
        assert manager.latest_valid() is None

    def damage(_: Comm) -> None:
        place = ObjectPath.of(f"{ROOT}/step-00000001/data")
        for info in list(place.store.list_below(place.prefix)):
            if "/data/model/" in info.key:
                place.store.put(info.key, b"x" * info.num_bytes)

    def act(made: LostDisks) -> None:
        made.train(1)
        made.world.launch(1, damage)
        made.on(verify)

    played(act)


def test_a_machine_that_cannot_copy_is_named() -> None:
    def act(made: LostDisks) -> None:
        is_of_node1: Any = lambda name, key: is_copy(name, key) and "/model/2." in key  # noqa: E731
        with (
            store_down(at=is_of_node1),
            pytest.raises(
                CheckpointingException, match="step 1 is not in the last place"
            ) as raised,
        ):
            made.train(1)
        assert re.search("failed on rank [23] of 4", str(raised.value))
        assert made.look() == ([1], 1, 1)

    played(act)


@pytest.mark.parametrize(
    ("backend", "machines"),
    [("tensorstore", 1), ("tensorstore", 3), ("zarr", 3), ("torch_dist", 2)],
)
def test_any_layout_loads_what_two_machines_have_saved(backend: str, machines: int) -> None:
    def act(made: LostDisks) -> None:
        made.train(1, 2, backend=backend)
        assert made.look(("node0", "node1", "node2")[:machines]) == ([1, 2], 2, 2)

    played(act)


def test_disks_keep_what_is_not_in_the_store() -> None:
    def act(made: LostDisks) -> None:
        keep = Retention(keep_last=1)
        made.train(1, 2, 3, is_copied=False, retention=keep)
        assert made.stored() == []
        made.train(4, retention=keep)
        assert made.look() == ([4], 4, 4)
        assert made.stored() == [4]

    played(act)


def test_what_a_disk_has_is_not_read_from_the_store() -> None:
    def act(made: LostDisks) -> None:
        made.train(1)
        made.world.log.clear()
        assert made.on(newest) == [1] * 4
        asked = [line.path for line in made.world.log if line.name == "get"]
        assert asked
        assert not [path for path in asked if "/data/model/" in path]
        assert made.on(newest, ("node0", "node1", "node2")) == [1] * 6
        asked = [line.path for line in made.world.log if line.name == "get"]
        assert not [path for path in asked if "/data/model/" in path]

    played(act)


def test_ranks_meet_while_a_long_copy_goes_on() -> None:
    """Else they would take rank 0 for dead."""

    def act(made: LostDisks) -> None:
        def slowly(name: str, key: str, go: Callable[[], Any]) -> Any:
            if is_copy(name, key):
                made.world.scheduler.wait(lambda: False, 400.0)  # ranks wait for 300
            return go()

        made.train(1, is_copied=False)
        with store_requests(slowly):
            assert made.look() == ([1], 1, 1)

    played(act)


def test_what_needs_one_folder_is_refused() -> None:
    def work(comm: Comm) -> None:
        options: dict[str, Any] = {"comm": comm}
        with pytest.raises(UnsupportedFormatError, match="not all ranks share a disk"):
            CheckpointManager(PLACES, incremental=True, **options)
        own = "each machine has a separate disk"
        manager = CheckpointManager(PLACES, ("zarr", 1), **options)
        with pytest.raises(UnsupportedFormatError, match=own):
            manager.save(1, state_of(comm, 1))
        manager.close()
        with CheckpointManager(PLACES, **options) as manager:
            manager.save(1, state_of(comm, 1))
            with pytest.raises(UnsupportedFormatError, match=own):
                manager.save(2, state_of(comm, 2), base=manager.folder(1))
            with pytest.raises(CheckpointExistsError, match="the run is at step 1 already"):
                manager.save(1, state_of(comm, 7))

    played(lambda made: made.on(work))
