"""What real saves do to a folder, in a simulated world, and whether a model may do the same.

The log of the world has every operation in its order. Those that change the folder must be steps of
the model, in that order; what a process only looks at may come at any time in between.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from explorer import Model, at
from traces import Event

from dist_checkpointing import CheckpointingException
from dist_checkpointing.comm import Comm
from dist_checkpointing.filesystem import LOCK_NAME
from dist_checkpointing.format import SEAL_NAME, Attempt, CheckpointingConfig
from dist_checkpointing.testing.simulation.world import SHARED, Fault, World

FOLDER = f"{SHARED}/c"
ATTEMPT_NAME = ".dckpt/attempt.json"
_NAMES = ("a", "b", SEAL_NAME)
_KNOWN = {
    ("write", LOCK_NAME): "writes its name into file",
    ("unlink", LOCK_NAME): "deletes the lock file",
    ("rename", ATTEMPT_NAME): "writes dir/attempt",
    ("create", "a"): "creates dir/a",
    ("create", "b"): "creates dir/b",
    ("create", SEAL_NAME): "writes dir/seal",
    ("rename", "metadata.json"): "commits",
    ("unlink", "metadata.json"): "removes dir/metadata",
    ("unlink", "a"): "removes dir/a",
}
"""Operation, name, and what a model calls it. Of what is cleared, the first and one more."""


def _save(*, overwrite: bool) -> Callable[[Comm], None]:
    def work(_: Comm) -> None:
        with suppress(CheckpointingException):
            attempt = Attempt.begin(Path(FOLDER), _NAMES, overwrite=overwrite)
            try:
                for name in _NAMES:
                    os.close(os.open(f"{FOLDER}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                attempt.commit(CheckpointingConfig("zarr", 2))
            except (CheckpointingException, FileExistsError):
                attempt.abandon()

    return work


def folder_trace(seed: int, names: Sequence[str], *, overwrite: bool, kill: int) -> list[Event]:
    """Run saves in the order that a seed decides, the first killed at an operation."""
    world = World(seed, changes=0.5, keeps_log=True)

    def play() -> None:
        launches = []
        for name in names:
            launches.append(world.start(1, _save(overwrite=overwrite), name=f"{name}."))
            if len(launches) == 1:
                world.arm([Fault(kill, "kill")], launches[0])
            if overwrite and len(launches) == 1:  # there is something to overwrite then
                world.wait_for(launches[0])
        for launch in launches:
            world.wait_for(launch)

    world.run(play)
    return [*_events(world)]


def _events(world: World) -> Iterator[Event]:
    for line in world.log:
        name = line.process.partition(".")[0]
        if line.outcome == "kill":
            yield name, "dies"
        label = _KNOWN.get((line.name, re.sub(rf"^{FOLDER}/", "", line.path)))
        if label is not None and not line.outcome:
            yield name, label


State = tuple[frozenset[tuple[str, Any]], tuple[tuple[str, tuple[Any, ...] | None], ...]]
"""The folder, and the results that each process was sent; None for one that is dead."""


def first_impossible(model: Model, events: Sequence[Event]) -> str | None:
    """The first event that no path of the model has; None if the trace is one."""
    begin = frozenset(model.world.items()), tuple((name, ()) for name in model.processes)
    states: set[State] = _with_looks(model, {begin})
    for number, (name, label) in enumerate(events):
        is_next_killed = events[number + 1 : number + 2] == [(name, "dies")]
        if is_next_killed and label != "dies":
            continue  # it was about to be done
        after = {found for state in states for found in _after(model, state, name, label)}
        if not after:
            return f"event {number}: {name} {label}"
        states = _with_looks(model, after)
    return None


def _after(model: Model, state: State, name: str, label: str) -> Iterator[State]:
    points = dict(state[1])
    results, process = points[name], model.processes[name]
    if results is None:
        return
    if label == "dies":
        world = process.on_death(dict(state[0]))
        yield frozenset(world.items()), tuple({**points, name: None}.items())
        return
    step, _, _ = at(process, results)
    if step is not None and _named(step.label) == label:
        yield from _taken(state, name, step)
    elif label.startswith("removes dir/") and label.removeprefix("removes ") not in dict(state[0]):
        yield state  # there is nothing to delete


def _named(label: str) -> str:
    return re.sub(r" \d+$| = .*$", "", label)


def _taken(state: State, name: str, step: Any) -> Iterator[State]:
    points: Mapping[str, Any] = dict(state[1])
    for result, world in step.act(dict(state[0])):
        known = {**points, name: (*points[name], result)}
        yield frozenset(world.items()), tuple(known.items())


def _with_looks(model: Model, states: set[State]) -> set[State]:
    """These states, and all that follow without an event."""
    found, left = set(states), [*states]
    while left:
        state = left.pop()
        for name, results in state[1]:
            step = None if results is None else at(model.processes[name], results)[0]
            if step is None:
                continue
            label, folder = _named(step.label), dict(state[0])
            is_idle = (
                label.startswith("removes dir/") and label.removeprefix("removes ") not in folder
            )
            if label in _KNOWN.values() and not is_idle:
                continue
            for after in _taken(state, name, step):
                if after not in found:
                    found.add(after)
                    left.append(after)
    return found
