"""Histories of what has failed once, each with its fault at many operations.

Usage: past_failures.py PACE [STORY...]    with PYTHONHASHSEED=0; PACE: from one operation to the
next; STORY: by default all
"""

import logging
import sys
from collections.abc import Callable, Iterable

from dist_checkpointing.testing.simulation.world import Fault
from histories import BACKENDS, Event, History
from history_player import Failure, play


def late_rank(at: int) -> Iterable[Event]:
    """A rank that is frozen in a save goes on when a restarted training has committed others."""
    yield from (Event("launch", 1, 2), Event("save", 2))
    yield Event("save", 3, 0, (Fault(at, "freeze", 900.0),))
    yield from (Event("launch", 4, 2), Event("save", 5), Event("wait", 6), Event("save", 7))


def late_record(at: int) -> Iterable[Event]:
    """A start is frozen between reading the record of the run and writing it, and goes on after
    a newer training has gone back.
    """
    yield from (Event("launch", 1, 2), Event("save", 2), Event("save", 3), Event("save", 4))
    yield Event("launch", 5, 2, (Fault(at % 3, "freeze", 600.0, "manager.json"),))
    yield from (Event("launch", 6, 2), Event("load", 7, 2), Event("save", 8), Event("wait", 9))
    yield from (Event("wait", 10), Event("launch", 11, 2))


def rollback(_: int) -> Iterable[Event]:
    """Steps that were abandoned are not loaded, nor in the way when the run comes to them again."""
    yield from (Event("launch", 1, 2), Event("save", 2), Event("save", 3), Event("save", 4))
    yield from (Event("load", 5, 2), Event("save", 6), Event("launch", 7, 2), Event("save", 8))
    yield from (Event("launch", 9, 1), Event("save", 10))


def second_manager(at: int) -> Iterable[Event]:
    """One of an earlier training, which was only frozen, saves on beside the new one."""
    yield from (Event("launch", 1, 1), Event("save", 2))
    yield Event("async save", 3, 0, (Fault(at, "freeze", 100.0),))
    yield from (Event("launch", 4, 1), Event("save", 5), Event("save", 6), Event("launch", 7, 2))


def late_files(at: int) -> Iterable[Event]:
    """A rank on another machine sees late, each time other files, what was committed."""
    kinds = (("launch", 2), ("save", 0), ("load", 0), ("save", 0), ("launch", 4), ("save", 0))
    for number, (kind, ranks) in enumerate(kinds):
        yield Event(kind, 10 * at + number, ranks)


STORIES: dict[Callable[[int], Iterable[Event]], str] = {
    late_rank: "leftovers not cleared",
    late_record: "version of the record in a store not compared",
    rollback: "steps of all branches in the history",
    second_manager: "attempt not noted",
    late_files: "late files not waited for",
}
"""Each with a planted fault that takes away what makes it go well."""


def main() -> None:
    pace, *names = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    for story in (story for story in STORIES if not names or story.__name__ in names):
        for number, at in enumerate(range(9, 160, int(pace))):
            place = ("store", "folder")[number % 2]
            events, is_late = tuple(story(at)), story is late_files
            backend = BACKENDS[number % 3]
            history = History(number, place, backend, 2, events, keep_last=3, is_late=is_late)
            end = play(history)
            if isinstance(end, Failure):
                sys.exit(f"{story.__name__} at {at}, {backend} in a {place}: {end.error!r}")


if __name__ == "__main__":
    main()
