"""The commit in a local folder: `flock`, the note of the attempt, exclusive files, `metadata.json`.

What is left out: durability (see the power cuts), file systems without `flock`, several files of
one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from explorer import (
    Model,
    Outcomes,
    Process,
    Program,
    Step,
    World,
    create,
    read,
    remove,
    wait_for,
    write,
)

LOCK, ATTEMPT, CONFIG, SEAL = "dir/lock", "dir/attempt", "dir/metadata", "dir/seal"
DATA = ("dir/a", "dir/b")
"""One file of each rank."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What is left out of the protocol, to see that the model finds it."""

    without_second_look: bool = False
    without_excl: bool = False
    commit_before_data: bool = False
    clear_before_end: bool = False
    without_flock: bool = False
    reader_looks_once: bool = False
    reader_forgets_commit: bool = False


def _open_lock(me: str) -> Step:
    """Create the lock file or open the one that is there: the number of the file."""

    def act(world: World) -> Outcomes:
        if LOCK in world:
            yield world[LOCK], world
        else:
            number = world["files made"]
            assert isinstance(number, int)
            yield number, {**world, LOCK: number, "files made": number + 1}

    return Step(f"opens the lock file ({me})", act)


def _flock(number: int, me: str) -> Step:
    def act(world: World) -> Outcomes:
        if f"flock/{number}" in world:
            yield False, world
        else:
            yield True, {**world, f"flock/{number}": me}

    return Step(f"locks file {number}", act)


def _name_holder(number: int, me: str) -> Step:
    """Write into the open file who has it."""
    return Step(
        f"writes its name into file {number}",
        lambda world: iter([(None, {**world, f"holder/{number}": me})]),
    )


def _remove_lock(me: str) -> Step:
    """Delete the lock file if it is of this holder: the process has it open, so nothing changes
    between the look and the step.
    """

    def act(world: World) -> Outcomes:
        number = world.get(LOCK)
        is_mine = number is not None and world.get(f"holder/{number}") == me
        gone = (LOCK, f"holder/{number}") if is_mine else ()
        yield None, {key: value for key, value in world.items() if key not in gone}

    return Step("deletes the lock file", act)


def freed(me: str) -> Callable[[World], World]:
    """What the kernel does when a process ends: its locks are gone."""
    return lambda world: {
        key: value for key, value in world.items() if not (key.startswith("flock/") and value == me)
    }


def _unlock(me: str) -> Step:
    return Step("unlocks", lambda world: iter([(None, freed(me)(world))]))


def _acquired(me: str, faults: Faults) -> Program:
    """Take the lock of the folder; whether it was taken."""
    while True:
        number = yield _open_lock(me)
        if not faults.without_flock and not (yield _flock(number, me)):
            return False
        if faults.without_second_look or (yield read(LOCK)) == number:
            yield _name_holder(number, me)
            return True
        yield _unlock(me)  # its last holder has deleted it


def _released(me: str) -> Program:
    yield _remove_lock(me)
    yield _unlock(me)
    return None


def _cleared(faults: Faults) -> Program:
    """Delete what the last attempt was about to create, its commit first."""
    order = (CONFIG, *DATA, SEAL)
    for name in order[1:] + order[:1] if faults.clear_before_end else order:
        yield remove(name)
    return None


def saving(
    me: str, *, overwrite: bool, has_late_rank: bool, faults: Faults
) -> Callable[[], Program]:
    """Rank 0 of a save."""

    def program() -> Program:
        if not overwrite and (yield read(CONFIG)) is not None:
            return "refused"
        if not (yield from _acquired(me, faults)):
            return "refused"
        end = "refused"
        if overwrite or (yield read(CONFIG)) is None:
            end = yield from _saved(me, has_late_rank, faults)
        yield from _released(me)
        return end

    return program


def _saved(me: str, has_late_rank: bool, faults: Faults) -> Program:
    """What is done under the lock; how it ends."""
    if (yield read(ATTEMPT)) is not None:
        yield from _cleared(faults)
    yield write(ATTEMPT, me)
    if faults.commit_before_data:
        yield _commit(me)
    if has_late_rank:
        yield write(f"claimed/{me}", True)
    is_written = yield _created(DATA[0], me, faults)
    is_other_written = yield _wait(me) if has_late_rank else _created(DATA[1], me, faults)
    if is_other_written == "silent":
        return "failed"  # it may write yet: the next save clears
    if not (is_written and is_other_written):
        if (yield read(ATTEMPT)) == me:
            yield from _cleared(faults)
        return "failed"
    yield write(SEAL, me)
    if (yield read(ATTEMPT)) != me:
        return "failed"
    yield _commit(me)
    return "committed"


def _commit(me: str) -> Step:
    """Rename `metadata.json` into its place; that it happened is noted for the invariants."""
    return Step(
        "commits",
        lambda world: iter([(None, {**world, CONFIG: me, f"committed/{me}": True})]),
    )


def _wait(me: str) -> Step:
    """Wait for rank 1, which is given up after a while."""

    def act(world: World) -> Outcomes:
        yield "silent", world
        if f"written/{me}" in world:
            yield world[f"written/{me}"], world

    return Step("waits for rank 1", act)


def _created(name: str, value: str, faults: Faults) -> Step:
    if not faults.without_excl:
        return create(name, value)
    return Step(f"writes {name}", lambda world: iter([(True, {**world, name: value})]))


def late_rank(me: str, faults: Faults) -> Callable[[], Program]:
    """Rank 1 of a save: it writes its file whenever it gets to it."""

    def program() -> Program:
        yield wait_for(f"claimed/{me}")
        is_written = yield _created(DATA[1], me, faults)
        yield write(f"written/{me}", is_written)
        return "done"

    return program


def removing(me: str, faults: Faults) -> Callable[[], Program]:
    """A removal of the whole checkpoint."""

    def program() -> Program:
        if not (yield from _acquired(me, faults)):
            return "refused"
        yield write("removal", True)
        yield from _cleared(faults)
        yield remove(ATTEMPT)
        yield from _released(me)
        return "removed"

    return program


def reading(faults: Faults) -> Callable[[], Program]:
    """A load without ``verify``: the values that it returns, or why it fails."""

    def program() -> Program:
        before = yield read(ATTEMPT)
        if (yield read(CONFIG)) is None:
            return "no checkpoint"
        values: tuple[Hashable, ...] = ()
        for name in DATA:
            values = (*values, (yield read(name)))
        if None in values:
            return "missing files"
        if not faults.reader_looks_once and (yield read(ATTEMPT)) != before:
            return "overwritten meanwhile"
        if not faults.reader_forgets_commit and (yield read(CONFIG)) is None:
            return "overwritten meanwhile"
        return ("read", *values)

    return program


def problem_of(*, may_be_replaced: bool) -> Callable[[World, Mapping[str, Hashable]], str | None]:
    """What must hold in every state of the folder."""

    def problem(world: World, ends: Mapping[str, Hashable]) -> str | None:
        committed = world.get(CONFIG)
        if committed is not None:
            for name in (*DATA, SEAL):
                if world.get(name) != committed:
                    return f"{name} is {world.get(name)} in the checkpoint of {committed}"
        winners = [name for name, end in ends.items() if end == "committed"]
        if not may_be_replaced and len(winners) > 1:
            return f"two saves have committed: {winners}"
        if not may_be_replaced and winners and committed != winners[0]:
            return f"what {winners[0]} has committed is gone"
        for name, end in ends.items():
            if isinstance(end, tuple) and len({*end[1:]}) > 1:
                return f"{name} has read a mixture: {end[1:]}"
            if isinstance(end, tuple) and f"committed/{end[1]}" not in world:
                return f"{name} has read what {end[1]} has not committed"
        return None

    return problem


def folder_model(
    saves: Sequence[str],
    *,
    overwrite: bool,
    late: Sequence[str] = (),
    has_removal: bool = False,
    faults: Faults = Faults(),
) -> Model:
    """Saves that begin at any time, the late ones on two ranks, a reader and perhaps a removal."""
    processes = {}
    for me in saves:
        program = saving(me, overwrite=overwrite, has_late_rank=me in late, faults=faults)
        processes[me] = Process(program, on_death=freed(me))
    for me in late:
        processes[f"{me}.1"] = Process(late_rank(me, faults), may_die=False)
    if has_removal:
        processes["removal"] = Process(removing("removal", faults), on_death=freed("removal"))
    processes["reader"] = Process(reading(faults), may_die=False)
    may_be_replaced = overwrite or has_removal
    return Model({"files made": 0}, processes, problem_of(may_be_replaced=may_be_replaced))
