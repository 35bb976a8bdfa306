"""Saves behind a training: the part of ``save_load.py`` that measures them, and its goals."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_contestants import dcp_contestants, our_contestants
from async_others import other_contestants
from async_rounds import AsyncRun
from bench_cases import Case
from bench_world import World, start_world

NAME = "async"
WEIGHT = 200.0
"""About how many seconds it takes, as ``Case.weight``."""

_ROUNDS = 7
_SHARING_CONTESTANTS = 3


@dataclass(frozen=True, slots=True)
class AsyncJob:
    """What the one process does.

    Attributes:
        case: the state.
        end: ``time.monotonic()`` when it should be done.
        say: called with a line of progress.
    """

    case: Case
    end: float
    say: Callable[[str], None]

    def __call__(self, world: World, folder: Path) -> None:
        del world
        others, missing = other_contestants()
        contestants = [*our_contestants(), *dcp_contestants(), *others]
        if _shared_memory_bytes() < _SHARING_CONTESTANTS * self.case.num_bytes:
            # A process that touches more of it than there is dies of SIGBUS.
            missing |= {c.name: "too little shared memory" for c in contestants if c.shares_memory}
            contestants = [c for c in contestants if not c.shares_memory]
        report = AsyncRun(self.case, folder / NAME, self.say).measure(contestants, self.end)
        report["left_out"] = missing
        (folder / f"{NAME}.json").write_text(json.dumps(report))


def _shared_memory_bytes() -> int:
    """How much of /dev/shm is free; 0 where there is none."""
    place = Path("/dev/shm")  # noqa: S108 - where torch puts shared tensors
    return shutil.disk_usage(place).free if place.exists() else 0


def async_case(mib: int, *, quick: bool, rounds: int | None) -> Case:
    """The state: tensors of 16 MiB."""
    case = Case(
        NAME,
        f"{mib} MiB in {mib // 16} tensors, fp32, one rank, saved behind a training",
        mib // 16,
        (2048, 2048),
        rounds=_ROUNDS,
        weight=WEIGHT,
    )
    case = case.quick() if quick else case
    return case if rounds is None else replace(case, rounds=rounds)


def run_async(case: Case, folder: Path, minutes: float, say: Callable[[str], None]) -> Any:
    """The report: plain values, for tables and JSON.

    Args:
        case: of ``async_case``.
        folder: to work in.
        minutes: no round begins after so long.
        say: can be pickled; called with a line of progress.
    """
    (folder / NAME).mkdir()
    job = AsyncJob(case, time.monotonic() + 60 * minutes, say)
    # DCP's process needs a group to copy, even of one rank.
    start_world(1, job, folder, group_of_one=True)
    return json.loads((folder / f"{NAME}.json").read_text())
