"""Work that is interrupted at each of its operations, one after the other, in simulated worlds.

Whatever happens, a reader finds the old value of everything or the new one, the next work succeeds,
and nothing is left over in the end that would not be there without the interruption.
"""

import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from dist_checkpointing import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointManager,
    CheckpointNotFoundError,
    ObjectPath,
    Place,
    Retention,
    StateMismatchError,
    load,
    remove_sharded_tensors,
    save,
)
from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem import LOCK_NAME
from dist_checkpointing.format import remove_checkpoint
from dist_checkpointing.testing.simulation.world import OWN, SHARED, Fault, Launch, World
from simulated_states import loaded_from, state_of, value_of
from tiers import share

Act = Callable[[Comm], Any]
FOLDER, RUN = f"{SHARED}/c", f"{SHARED}/run"
STORE, STORED_RUN = "s3://bucket/c", "s3://bucket/run"
BACKENDS: Final = ("tensorstore", "zarr", ("zarr", 1), "torch_dist")
FOR_EVER: Final = 1e9
"""Seconds of a rank that goes on when the test says so."""


def saves(value: int, root: str = FOLDER, backend: Any = "zarr", **options: Any) -> Act:
    """All ranks save a state of which everything is one value."""
    return lambda comm: save(state_of(comm, value), root, backend, comm=comm, **options)


def removes(root: str) -> Act:
    place = ObjectPath.of(root) if "://" in root else Path(root)
    return lambda comm: comm.from_rank0("removing", lambda: remove_checkpoint(place))


def drops(prefix: str, root: str = FOLDER) -> Act:
    return lambda comm: remove_sharded_tensors(root, prefix, comm=comm)


def value_at(root: str) -> Act:
    """What a reader finds, who verifies it; None if there is no checkpoint."""

    def look(comm: Comm) -> int | None:
        with suppress(CheckpointNotFoundError):
            template = state_of(comm, None)
            return value_of(load(template, root, comm=comm, verify=True))
        return None

    return look


def trains(*steps: int, root: Any = RUN, back_to: int | None = None, **options: Any) -> Act:
    """A manager saves steps of which everything is 100 times its number, or ``back_to`` more."""

    def act(comm: Comm) -> None:
        with CheckpointManager(root, comm=comm, **options) as manager:
            if back_to is not None or manager.steps():
                manager.load({}, back_to)
            for step in steps:
                manager.save(step, state_of(comm, 100 * step + (back_to or 0)))

    return act


def deletes(step: int, root: str = RUN) -> Act:
    def act(comm: Comm) -> None:
        manager = CheckpointManager(root, comm=comm)
        comm.from_rank0("removing", lambda: manager.delete(step))

    return act


def run_at(root: Any, **options: Any) -> Act:
    """The values of all steps of a run, and the latest one."""

    def look(comm: Comm) -> tuple[list[int], int | None]:
        manager = CheckpointManager(root, comm=comm, **options)
        steps = manager.steps()
        values = [loaded_from(manager, comm, step) for step in steps]
        assert manager.latest() == manager.latest_valid()
        return values, manager.latest()

    return look


@dataclass(frozen=True, slots=True)
class Scenario:
    """Attributes:
    before: What was done first, undisturbed.
    work: What is interrupted.
    ends: What may be found after that.
    again: What is done then.
    lasts: What may be found in the end.
    look: Finds it.
    """

    before: tuple[Act, ...]
    work: Act
    ends: tuple[Any, ...]
    again: Act
    lasts: tuple[Any, ...]
    look: Act
    ranks: int = 2
    look_ranks: int = 1
    may_freeze: bool = True
    has_flock: bool = True


def first(root: str, backend: Any, **options: Any) -> Scenario:
    again = saves(3, root, backend, overwrite=True)
    work = saves(1, root, backend)
    return Scenario((), work, (None, 1), again, (3,), value_at(root), **options)


def overwrite(root: str, backend: Any, **options: Any) -> Scenario:
    before, work, again = (saves(n, root, backend, overwrite=n > 1) for n in (1, 2, 3))
    # While it is replaced, a folder holds no checkpoint for a while; a store always does.
    ends = (1, 2) if root == STORE else (1, None, 2)
    return Scenario((before,), work, ends, again, (3,), value_at(root), **options)


def removal(root: str) -> Scenario:
    again = saves(3, root, overwrite=True)
    before = (saves(1, root), saves(2, root, overwrite=True))
    return Scenario(before, removes(root), (2, None), again, (3,), value_at(root), ranks=1)


def retention(root: str) -> Scenario:
    keep: dict[str, Any] = {"root": root, "retention": Retention(keep_last=1)}
    ends = (([100], 1), ([100, 200], 2), ([200], 2))
    # The one that was loaded last is kept, too.
    again, kept = trains(3, 4, **keep), ([100, 400], [200, 400], [300, 400], [400])
    # One that was frozen may come after all, and is the latest then.
    lasts = (*((values, 4) for values in kept), ([200, 400], 2))
    return Scenario((trains(1, **keep),), trains(2, **keep), ends, again, lasts, run_at(root))


def rollback(root: str) -> Scenario:
    """The run comes to step 70 again, of which one is there of a branch that it has left."""
    before = (trains(60, 70, 80, root=root), trains(65, root=root, back_to=60))
    old, new = [6000, 6560, 7000, 8000], [6000, 6560, 7065, 8000]
    # One that was frozen may come after all, and is the latest then.
    lasts = (([*old, 9000], 90), ([*new, 9000], 90), ([*new, 9000], 70))
    work, again = trains(70, root=root, back_to=65), trains(90, root=root)
    return Scenario(before, work, ((old, 65), (new, 70)), again, lasts, run_at(root))


def deletion(root: str) -> Scenario:
    ends = (([900, 1000], 10), ([900], 9))
    again = trains(11, root=root, retention=Retention(keep_last=2))
    lasts = (([1000, 1100], 11), ([900, 1100], 11), ([1100], 11))
    before, work, look = (trains(9, 10, root=root),), deletes(10, root), run_at(root)
    return Scenario(before, work, ends, again, lasts, look, ranks=1)


def incremental(backend: Any) -> Scenario:
    base = f"{SHARED}/base"
    before = (saves(1, base, backend),)
    work, again = (saves(n, FOLDER, backend, base=base, overwrite=n > 2) for n in (2, 3))

    def look(comm: Comm) -> tuple[Any, Any]:
        return value_at(base)(comm), value_at(FOLDER)(comm)

    return Scenario(before, work, ((1, None), (1, 2)), again, ((1, 3),), look)


def dropped(backend: Any) -> Scenario:
    """Tensors are removed from a checkpoint, of which the others stay."""

    def look(comm: Comm) -> tuple[int, bool]:
        template = state_of(comm, None)
        same = template.pop("same")
        rows = load(template, FOLDER, comm=comm, verify=True)["rows"]
        with suppress(StateMismatchError):
            assert {*load({"same": same}, FOLDER, comm=comm)["same"].tolist()} == {1.0}
            return int(rows[0, 0]), True
        return int(rows[0, 0]), False

    before, work = (saves(1, FOLDER, backend),), drops("optimizer")
    return Scenario(before, work, ((1, True), (1, False)), work, ((1, False),), look, ranks=1)


def tiers(home: str) -> Scenario:
    """Each machine has a disk of its own in front of another place."""
    options: dict[str, Any] = {"root": [Place(f"{OWN}/run"), Place(home)]}
    before, work, again = (trains(step, **options) for step in (1, 2, 3))
    ends = (([100], 1), ([100, 200], 2))
    lasts = (([100, 300], 3), ([100, 200, 300], 3))
    # A rank that was frozen may commit on its disk what the others have cleared away by now.
    return Scenario(
        (before,), work, ends, again, lasts, run_at(**options), look_ranks=2, may_freeze=False
    )


SCENARIOS: Final = {
    **{f"first save, {backend}": first(FOLDER, backend) for backend in BACKENDS},
    **{f"overwrite, {backend}": overwrite(FOLDER, backend) for backend in BACKENDS},
    "first save without flock": first(FOLDER, "zarr", has_flock=False),
    "overwrite without flock": overwrite(FOLDER, "zarr", has_flock=False),
    "first save, store": first(STORE, "tensorstore"),
    "overwrite, store": overwrite(STORE, "zarr"),
    "removal": removal(FOLDER),
    "removal, store": removal(STORE),
    "retention": retention(RUN),
    "retention, store": retention(STORED_RUN),
    "rollback": rollback(RUN),
    "rollback, store": rollback(STORED_RUN),
    "deletion": deletion(RUN),
    "deletion, store": deletion(STORED_RUN),
    **{f"incremental, {backend}": incremental(backend) for backend in BACKENDS[:3]},
    **{f"dropped, {backend}": dropped(backend) for backend in BACKENDS},
    "fast disks": tiers(RUN),
    "fast disks, store": tiers(STORED_RUN),
}
KINDS: Final = ("kill", "power", "freeze", "kill all", "EIO", "ENOSPC")
PACE: Final = 140 // share(10)
"""Operations from one interruption to the next: all are in turn, with other seeds."""


class Play:
    """A scenario in a world of its own; see ``at``."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.world = World(seed, machines=2)
        self.world.shared.has_flock = scenario.has_flock

    def at(self, fault: Fault) -> tuple[bool, frozenset[str]]:
        """Whether there was such an operation, and the names of what is there in the end."""
        return self.world.run(lambda: self._play(fault))

    def _play(self, fault: Fault) -> tuple[bool, frozenset[str]]:
        scenario, world = self.scenario, self.world
        for act in scenario.before:
            self.done(act)
        launch = world.start(scenario.ranks, scenario.work)
        world.arm([fault], launch)
        world.wait_for(launch)
        is_met = world.counted[fault] > fault.at
        world.arm(())
        for result in launch.results.values():
            if isinstance(result, Exception) and not isinstance(result, CheckpointingException):
                assert isinstance(result, OSError), repr(result)
        world.scheduler.wait(lambda: False, 60.0)  # until a dead claim is one
        if fault.kind != "freeze":
            launch.end()
        if fault.kind != "freeze":
            self.look(scenario.ends)
        if not scenario.has_flock and fault.kind != "freeze":  # as people do then
            world.shared.remove(lambda name: name.startswith(LOCK_NAME))
        try:
            self.done(scenario.again)
        except CheckpointExistsError:  # what is frozen has a lock
            assert fault.kind == "freeze"
            self.wake(launch)
            self.look(scenario.ends)
            self.done(scenario.again)
        self.wake(launch)
        self.look(scenario.lasts)
        return is_met, frozenset(map(_nameless, self.names()))

    def wake(self, launch: Launch) -> None:
        """Let what is frozen go on to its end."""
        for process in launch.processes:
            process.frozen_until = 0.0
        self.world.wait_for(launch)

    def done(self, act: Act) -> None:
        """Do work that nothing disturbs."""
        results = self.world.launch(self.scenario.ranks, act).results
        errors = [error for error in results.values() if isinstance(error, Exception)]
        if errors:
            raise errors[0]

    def look(self, allowed: tuple[Any, ...]) -> None:
        results = self.world.launch(self.scenario.look_ranks, self.scenario.look).results
        if isinstance(results[0], Exception):
            raise results[0]
        assert results[0] in allowed, f"found {results[0]}"

    def names(self) -> list[str]:
        files = [path for path, inode in self.world.shared.tree() if not inode.is_folder]
        # The next save into a folder takes the lock over that a process has left there.
        found = [*files, *self.world.store.etags("s3://bucket")]
        return [path for path in found if not path.endswith(LOCK_NAME)]


def _nameless(path: str) -> str:
    return re.sub(r"[0-9a-f]{8,}|(?<=claims/)\d+|(?<=commits/)\d+", "*", path)


def kinds_of(scenario: Scenario) -> Iterator[str]:
    return itertools.cycle(kind for kind in KINDS if scenario.may_freeze or kind != "freeze")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCENARIOS)
def test_interrupted(name: str) -> None:
    check(name)


@pytest.mark.skipif(PACE == 14, reason="test_interrupted plays all scenarios")
def test_interrupted_now_and_then() -> None:
    for name in [*SCENARIOS][:: PACE // 14]:
        check(name)


def check(name: str) -> None:
    scenario = SCENARIOS[name]
    _, expected = Play(scenario, 0).at(Fault(1 << 40, "kill"))
    for number, kind in enumerate(kinds_of(scenario)):
        fault = Fault(PACE * number + zlib.crc32(name.encode()) % 14, kind, FOR_EVER)
        try:
            is_met, left = Play(scenario, number).at(fault)
        except Exception as error:
            error.add_note(f"{name}, {fault}")
            raise
        assert kind == "freeze" or left == expected, fault
        if not is_met:
            break
    assert number >= 1


def test_a_deletion_that_takes_long_forgets_no_save_of_another_manager() -> None:
    """It wrote the record again as it was before."""
    Play(SCENARIOS["deletion"], 46).at(Fault(46, "freeze", FOR_EVER))


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("deletion", "link"),
        ("deletion", "rename"),
        ("deletion, store", "put"),
        ("rollback, store", "put"),
        ("retention, store", "put"),
    ],
)
def test_who_is_frozen_before_the_record_is_written_writes_no_old_one(
    name: str, operation: str
) -> None:
    """The steps that others had saved meanwhile were forgotten, and the run went back."""
    for at in range(3):
        Play(SCENARIOS[name], at).at(Fault(at, "freeze", FOR_EVER, operation))


@pytest.mark.parametrize("root", [FOLDER, STORE])
@pytest.mark.parametrize("backend", ["tensorstore", "zarr", "torch_dist"])
def test_a_reader_that_stops_while_its_checkpoint_is_overwritten(root: str, backend: str) -> None:
    """It finds the old one, or the new one, or says what has happened; never a mixture."""
    for at in itertools.count(1, max(1, PACE // 4)):
        world = World(at, machines=2)

        def play(world: World = world, at: int = at) -> tuple[Any, bool]:
            world.launch(2, saves(1, root, backend))
            reader = world.start(2, value_at(root))
            fault = Fault(at, "freeze", FOR_EVER)
            world.arm([fault], reader)
            world.wait_for(reader)
            is_met = world.counted[fault] > at
            world.arm(())
            world.launch(2, saves(2, root, backend, overwrite=True))
            for process in reader.processes:
                process.frozen_until = 0.0
            world.wait_for(reader)
            return reader.results, is_met

        results, is_met = world.run(play)
        for result in results.values():
            if not isinstance(result, CheckpointingException):
                assert result in (1, 2, None), at
        if not is_met:
            break
    assert at > 1


def race(seed: int, works: Sequence[Act], before: Act | None, look: Act) -> tuple[list[Any], Any]:
    """What rank 0 of each work returns or raises, and what is found in the end."""
    world = World(seed, machines=2, changes=0.4)

    def play() -> tuple[list[Any], Any]:
        if before is not None:
            world.launch(1, before)
        launches = [world.start(1, work, name=f"{n}.") for n, work in enumerate(works)]
        for launch in launches:
            world.wait_for(launch)
        ended = [launch.results[0] for launch in launches]
        return ended, world.launch(1, look).results[0]

    return world.run(play)


@pytest.mark.parametrize("root", [FOLDER, STORE])
@pytest.mark.parametrize("has_old", [False, True])
def test_of_saves_at_once_one_is_there(root: str, has_old: bool) -> None:
    works = [saves(number, root, overwrite=has_old) for number in (1, 2, 3)]
    for seed in range(share(20)):
        ended, found = race(seed, works, saves(9, root) if has_old else None, value_at(root))
        won = [number for number, end in enumerate(ended, 1) if end is None]
        refused = [end for end in ended if end is not None]
        assert all(isinstance(end, CheckpointExistsError) for end in refused), refused
        # One after the other they may overwrite what is there.
        assert found in won
        assert len(won) == 1 or has_old


def test_a_base_may_go_while_a_save_shares_its_files() -> None:
    base = f"{SHARED}/base"
    for seed in range(share(40)):
        backend = BACKENDS[seed % 3]
        works = [saves(2, FOLDER, backend, base=base), removes(base)]
        ended, found = race(seed, works, saves(1, base, backend), value_at(FOLDER))
        if ended[0] is None:
            assert found == 2
        else:
            assert isinstance(ended[0], CheckpointingException)
            assert found is None
