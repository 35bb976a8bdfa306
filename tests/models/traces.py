"""What real saves, removals and loads ask of a store, and whether a model may do the same.

Each process is a thread. Before each request that the model knows, it waits for its turn, which a
seed decides; so the requests have an order, and every interleaving may come.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from explorer import Model, at

from dist_checkpointing import ObjectPath
from faults import store_requests

_KNOWN = (
    ("list_folder", r"", "lists the folder"),
    ("list_folder", r"data/", "lists data/"),
    ("list_folder", r"\.dckpt/commits/", "lists commits/"),
    ("list", r"", "lists all"),
    ("list", r"\.dckpt/", "lists claims"),
    ("get", r"\.dckpt/(claims|commits)/(\d+)\.json", r"reads \1/\2"),
    ("put_if_absent", r"\.dckpt/claims/(\d+)\.json", r"creates claims/\1"),
    ("put_if_absent", r"\.dckpt/commits/(\d+)\.json", r"puts commits/\1"),
    ("head", r"(metadata\.json)", r"reads \1"),
    ("put", r"(metadata\.json)", r"writes \1"),
    ("put", r"data/(\w+)/\.dckpt/attempt\.json", r"writes data/\1"),
    ("get", r"data/(\w+)/x\.bin", r"reads data/\1"),
    ("delete", r"(.+)", r"deletes \1"),
)
"""Request, name, and what a model calls it."""

Event = tuple[str, str]
"""A process, and what it did; "dies" is its last."""


class _Killed(BaseException):
    """The process ends here."""


class _Turns:
    """One thread runs at a time; which, and whether it is killed, is decided by a seed."""

    def __init__(self, seed: int, kills: int) -> None:
        self._random, self._kills = random.Random(seed), kills
        self._changed = threading.Condition()
        self._waiting = set[str]()
        self._running = set[str]()
        self._next: tuple[str, bool] | None = None

    def begin(self, names: Sequence[str]) -> None:
        self._running = {*names}

    def wait(self, name: str) -> bool:
        """Wait for the turn of a thread; whether it is killed."""
        with self._changed:
            self._waiting.add(name)
            self._choose()
            self._changed.wait_for(lambda: self._next is not None and self._next[0] == name)
            assert self._next is not None
            _, is_killed = self._next
            self._next = None
            self._waiting.discard(name)
            return is_killed

    def end(self, name: str) -> None:
        with self._changed:
            self._running.discard(name)
            self._choose()

    def _choose(self) -> None:
        if self._running and self._running == self._waiting and self._next is None:
            is_killed = self._kills > 0 and self._random.random() < 0.03
            self._kills -= is_killed
            self._next = self._random.choice(sorted(self._running)), is_killed
            self._changed.notify_all()


def traced(
    location: ObjectPath, processes: Mapping[str, Callable[[], object]], seed: int, kills: int
) -> list[Event]:
    """Run processes in the order that a seed decides; what they asked of the store."""
    turns, events = _Turns(seed, kills), list[Event]()
    turns.begin([*processes])

    def act(request: str, key: str, go: Callable[[], Any]) -> Any:
        name = threading.current_thread().name
        label = _label(request, key.replace(location.prefix, "")) if name in processes else None
        if label is not None:
            is_killed = turns.wait(name)
            events.append((name, "dies" if is_killed else label))
            if is_killed:
                raise _Killed
        return go()

    def run(name: str) -> None:
        try:
            turns.wait(name)
            processes[name]()
        except _Killed:
            pass
        finally:
            turns.end(name)

    threads = [threading.Thread(target=run, args=(name,), name=name) for name in processes]
    with store_requests(act):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return _by_process(events)


def _label(request: str, key: str) -> str | None:
    if request == "delete":
        names = [_short(name) for name in re.findall(r"[\w./-]+", key)]
        known = sorted({name for name in names if name})
        return f"deletes {', '.join(known)}" if known else None
    for asked, pattern, label in _KNOWN:
        match = re.fullmatch(pattern, key)
        if request == asked and match:
            return match.expand(label)
    return None


def _short(name: str) -> str:
    """What a model calls an object; empty if it knows none."""
    match = re.fullmatch(r"\.dckpt/(claims/\d+|commits/\d+)\.json|(data/\w+)/.+", name)
    return (match[1] or match[2]) if match else name if name == "metadata.json" else ""


def _by_process(events: Sequence[Event]) -> list[Event]:
    """Events in which an attempt is called as its process."""
    names = {label.rpartition("/")[2]: name for name, label in events if "writes data/" in label}

    def named(label: str) -> str:
        changed = re.sub(r"\b[0-9a-f]{32}\b", lambda match: names.get(match[0], match[0]), label)
        if changed.startswith("deletes "):
            changed = "deletes " + ", ".join(sorted(changed.removeprefix("deletes ").split(", ")))
        return changed

    return [(name, named(label)) for name, label in events]


def first_departure(model: Model, events: Sequence[Event]) -> str | None:
    """The first event that the model cannot have; None if the trace is a path of it."""
    world = model.world
    points: dict[str, tuple[Any, ...]] = dict.fromkeys(model.processes, ())
    ended: dict[str, object] = {}
    for number, (name, label) in enumerate(events):
        process = model.processes[name]
        while True:
            if label == "dies":
                ended[name], world = "dead", process.on_death(world)
                break
            step, end, _ = (None, ended[name], None) if name in ended else at(process, points[name])
            if step is None:
                if end != "dead" and label.startswith(("reads", "lists")):
                    break  # for the words of an error
                return f"event {number}: {name} {label}, but has ended: {end}"
            expected = step.label.partition(" = ")[0]
            if expected.startswith("watches"):
                number_of_claim = expected.rpartition(" ")[2]
                if label in (f"reads {kind}/{number_of_claim}" for kind in ("claims", "commits")):
                    break  # it looks who that is, and whether the claim was decided meanwhile
                outcome = (True, world)
            else:
                outcome = next(iter(step.act(world)))
                # Nothing is asked of the store where nothing is left.
                is_silent = expected.startswith("deletes") and outcome[1] == world
                if expected != label and not is_silent:
                    return f"event {number}: {name} {label}, where the model {expected}"
            points[name], world = (*points[name], outcome[0]), outcome[1]
            if expected == label:
                break
    return None
