"""How managers change the record of a run on a disk: what ``write_record`` does with its files.

A record is the names of the changes that are in it, oldest first. Each change is made once, so that
no two records are equal. What is left out: durability, and file systems without links.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from explorer import Model, Outcomes, Process, Program, Step, World, create, read, remove, write

RECORD = "record"


def _rename(source: str, target: str) -> Step:
    """Whether the file was there."""

    def act(world: World) -> Outcomes:
        if source not in world:
            yield False, world
        else:
            rest = {key: value for key, value in world.items() if key != source}
            yield True, {**rest, target: world[source]}

    return Step(f"renames {source} to {target}", act)


def writing(me: str, changes: int, fault: str) -> Callable[[], Program]:
    """A manager that makes changes, each with a record that it has just read."""

    def program() -> Program:
        written: tuple[str, ...] = ()
        for number in range(changes):
            version = yield read(RECORD)
            data = (*version, f"{me}{number}")
            if (yield from _replaced(version, data, fault)):
                written = (*written, f"{me}{number}")
        return written

    return program


def _replaced(version: Hashable, data: Hashable, fault: str) -> Program:
    claim = f"claim of {version}"
    own = chosen = f"{claim} by {data}"
    yield write(own, data)
    is_known, is_written = True, False
    is_own = yield create(claim, data)
    if not is_own:
        found = yield read(claim)
        is_known, chosen = found is not None, f"{claim} by {found}"
    if fault == "the claim is moved":
        chosen = claim
    if is_known:
        if fault == "no second look" or (yield read(RECORD)) == version:
            is_written = (yield _rename(chosen, RECORD)) and is_own
        yield remove(claim)
    yield remove(own)
    return is_written


def cleaning(fault: str) -> Callable[[], Program]:
    """Deletes what killed writers have left."""

    def names(world: World) -> Outcomes:
        yield tuple(sorted(name for name in world if name.startswith("claim"))), world

    def program() -> Program:
        version: Hashable = None
        if fault == "names after the version":
            version = yield read(RECORD)
        found = yield Step("lists the folder", names)
        if fault != "names after the version":
            version = yield read(RECORD)
        for name in found:
            if not name.startswith(f"claim of {version}"):
                yield remove(name)
        return "clean"

    return program


def _problem(world: World, ends: Mapping[str, Hashable]) -> str | None:
    record = world[RECORD]
    assert isinstance(record, tuple)
    for name, end in ends.items():
        if isinstance(end, tuple):
            for change in end:
                if change not in record:
                    return f"{change} of {name} was written, and is lost: {record}"
    return None


def record_model(changes: Mapping[str, int], fault: str = "") -> Model:
    """Managers that make so many changes, and one that begins and cleans up."""
    processes = {me: Process(writing(me, count, fault)) for me, count in changes.items()}
    return Model({RECORD: ()}, processes | {"cleaner": Process(cleaning(fault))}, _problem)
