"""Histories of a training: what a seed makes, and which are shorter."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dist_checkpointing.testing.simulation.world import Fault

BACKENDS: Final = (("tensorstore", 1), ("zarr", 2), ("torch_dist", 1), ("zarr", 1))
"""The last one writes into folders only."""
ERRORS: Final = ("EIO", "ENOSPC", "EMFILE", "ESTALE", "EINTR")
_OF_FOLDERS: Final = ("create", "fsync", "rename", "unlink", "flock")
_OF_FOLDERS_FILES: Final = ("metadata.json", "attempt.json", "manager.json", "common.pt", ".lock")
_OF_STORES: Final = ("put", "put if absent", "delete", "list")
_OF_STORES_FILES: Final = ("/commits/", "/claims/", "metadata.json", "manager.json")
_OPERATIONS: Final = {
    "folder": ((), _OF_FOLDERS, _OF_FOLDERS_FILES),
    "store": ((), _OF_STORES, _OF_STORES_FILES),
    "fast": ((), (*_OF_FOLDERS, *_OF_STORES), (*_OF_FOLDERS_FILES, *_OF_STORES_FILES)),
}
"""Faults come at any operation, at one of a kind, or at one on a file that a protocol turns on."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a history.

    Attributes:
        kind: "launch", "save", "async save", "old save", "load", "roll back", "remove",
            "power cut", "clock", "wait", "rivals" or "damage".
        seed: Of what happens in it.
        number: Ranks of a launch; which step is loaded or removed, counted from the newest.
        faults: What happens to operations of the event.
    """

    kind: str
    seed: int
    number: int = 0
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        faults = ", ".join(
            f"{fault.kind} at {fault.operation or 'operation'} {fault.at}"
            + (f" for {fault.seconds:.0f} s" if fault.seconds else "")
            for fault in self.faults
        )
        return f"{self.kind} {self.number or ''}{' with ' if faults else ''}{faults}".strip()


@dataclass(frozen=True, slots=True)
class History:
    """A training: where it saves and how, and what happens.

    Attributes:
        seed: That it was made of.
        place: "folder", "store", or "fast": disks of the machines and a store.
        is_late: Whether machines see late what others have done.
        is_busy: Whether threads stop for a while now and then.
        is_lossy: Whether the store loses requests.
        has_memory: Whether the disks are behind the memory of the machines.
        copies: On how many other machines the part of each is kept.
        is_bare: Whether the store compares ETags without the quotes that it gives, as Ceph 16 does.
        has_parts: Whether objects are uploaded in small parts.
    """

    seed: int
    place: str
    backend: tuple[str, int]
    machines: int
    events: tuple[Event, ...]
    keep_last: int | None = None
    is_incremental: bool = False
    is_late: bool = False
    is_busy: bool = False
    is_lossy: bool = False
    has_flock: bool = True
    changes: float = 0.1
    has_memory: bool = False
    copies: int = 0
    is_bare: bool = False
    has_parts: bool = False

    @classmethod
    def of(cls, seed: int) -> History:
        """The history that a seed makes; every tenth is of a kind that chance seldom makes."""
        dice = random.Random(seed)
        if seed % 10 == 9:
            return cls._rare(seed, dice)
        place = dice.choice(["folder", "folder", "folder", "store", "store", "fast"])
        machines = dice.choice([1, 1, 2, 2, 3, 4])
        events = [_event(dice, "launch", place)]
        for _ in range(dice.randint(1, 7)):
            kinds = ["save"] * 6 + ["async save"] * 3 + ["launch"] * 3
            kinds += ["load", "load", "remove", "power cut", "clock", "wait", "old save", "damage"]
            kinds += ["roll back"] * 2 + ["rivals"] * 3
            events.append(_event(dice, dice.choice(kinds), place))
            # What was not synced is lost where the power goes soon after an error.
            if any(fault.kind in ERRORS for fault in events[-1].faults) and dice.random() < 0.5:
                events.append(_event(dice, "power cut", place))
        return cls(
            seed,
            place,
            dice.choice(BACKENDS if place == "folder" else BACKENDS[:-1]),
            machines,
            tuple(events),
            keep_last=dice.choice([None, 1, 2, 3]),
            is_incremental=place == "folder" and dice.random() < 0.3,
            is_late=machines > 1 and dice.random() < 0.4,
            is_busy=dice.random() < 0.3,
            is_lossy=place != "folder" and dice.random() < 0.4,
            has_flock=dice.random() < 0.85,
            changes=dice.choice([0.02, 0.1, 0.5]),
            has_memory=place == "fast" and dice.random() < 0.5,
            copies=dice.randint(0, 1) if place == "fast" else 0,
            is_bare=place == "store" and dice.random() < 0.3,
            has_parts=place == "store" and dice.random() < 0.3,
        )

    @classmethod
    def _rare(cls, seed: int, dice: random.Random) -> History:
        def event(kind: str, number: int = 0, *faults: Fault) -> Event:
            return Event(kind, dice.randrange(1 << 30), number, faults)

        def fault(kinds: Sequence[str], operations: Sequence[str], most: float) -> Fault:
            seconds = dice.uniform(310, 1000)
            at = int(10 ** dice.uniform(0, most)) - 1
            return Fault(at, dice.choice(kinds), seconds, dice.choice(operations))

        ranks, events = dice.choice([1, 2, 3]), list[Event]()
        kinds = ("replaced step", "replaced checkpoint", "rivals", "silent rank", "late record")
        kind = dice.choice(kinds)
        if kind == "replaced step":
            killed = fault(("kill", "kill machine", "kill all", "power"), ("",), 2.2)
            events = [event("launch", ranks), *(event("save") for _ in range(3))]
            events += [event("load", dice.choice([1, 2])), event("save", 0, killed)]
            events += [event("launch", ranks), event("save")]
        elif kind == "replaced checkpoint":
            at = ("", "unlink", "unlink", "fsync")
            events = [event("rivals", 0, fault(("power",), at, 1.5)) for _ in range(6)]
        elif kind == "rivals":
            events = [event("rivals") for _ in range(8)]
        elif kind == "late record":
            frozen = fault(("freeze",), ("manager.json",), 0.5)
            events = [event("launch", ranks), *(event("save") for _ in range(3))]
            events += [event("launch", ranks, frozen), event("launch", ranks), event("load", 2)]
            events += [event("save"), event("wait"), event("launch", ranks), event("save")]
        else:
            frozen = fault(("freeze",), ("", "", "create"), 2.0)
            events = [event("launch", 2), event("save"), event("save", 0, frozen)]
            events += [event("wait"), event("launch", ranks), event("save"), event("save")]
        return cls(
            seed,
            "folder",
            dice.choice(BACKENDS),
            machines=dice.choice([2, 3]),
            events=tuple(events),
            changes=dice.choice([0.1, 0.5, 0.9]),
        )

    def described(self) -> str:
        """The training and its events, a line each."""
        what = {
            f"seed {self.seed}": True,
            f"{self.backend[0]} {self.backend[1]} in a {self.place}": True,
            f"{self.machines} machines": True,
            f"keep_last={self.keep_last}": self.keep_last is not None,
            "incremental": self.is_incremental,
            "machines see changes late": self.is_late,
            "threads stall": self.is_busy,
            "requests are lost": self.is_lossy,
            "no flock": not self.has_flock,
            "in memory first": self.has_memory,
            "copies at peers": self.copies > 0,
            "ETags are compared without quotes": self.is_bare,
            "uploads in parts": self.has_parts,
        }
        training = ", ".join(text for text, is_so in what.items() if is_so)
        return "\n".join([training, *(f"  {event}" for event in self.events)])

    def shorter(self) -> Iterator[History]:
        """Histories that leave something out: an event, a fault, a trouble of the world."""
        for number, event in enumerate(self.events):
            before, after = self.events[:number], self.events[number + 1 :]
            yield replace(self, events=(*before, *after))
            if event.faults:
                yield replace(self, events=(*before, replace(event, faults=()), *after))
        flags = ("is_late", "is_busy", "is_lossy", "has_memory", "is_bare", "has_parts")
        for name, calm in (*((flag, False) for flag in flags), ("copies", 0)):
            if getattr(self, name) != calm:
                yield replace(self, **{name: calm})  # type: ignore[arg-type]
        if not self.has_flock:
            yield replace(self, has_flock=True)


def _event(dice: random.Random, kind: str, place: str) -> Event:
    faults = []
    faulty = ("launch", "save", "async save", "load", "roll back", "remove", "rivals")
    if kind in faulty and dice.random() < 0.5:
        operation = dice.choice([*dice.choice(_OPERATIONS[place])] or [""])
        at = int(10 ** dice.uniform(0, 1.0 if operation else 2.4)) - 1
        kinds = ["kill", "kill machine", "kill all", "power", "power", "freeze", "error"]
        # Of rivals, one that is taken for dead and goes on is what commits are made for.
        what = dice.choice([*kinds, "power", *["freeze"] * 5] if kind == "rivals" else kinds)
        seconds = 0.0
        if what == "freeze":
            seconds = 10.0 ** dice.uniform(1.8 if kind == "rivals" else 0.5, 3)
        elif what == "error":
            what = dice.choice(ERRORS)
        faults.append(Fault(at, what, seconds, operation))
    number = 0
    if kind == "launch":
        number = dice.choice([1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 8])
    elif kind in ("load", "roll back", "remove", "damage"):
        number = dice.randint(0, 3)
    return Event(kind, dice.randrange(1 << 30), number, tuple(faults))
