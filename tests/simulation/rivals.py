"""Several programs that save into one folder at the same time, and one that reads there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dist_checkpointing import (
    CheckpointExistsError,
    CheckpointingException,
    CheckpointNotFoundError,
    load,
    save,
)
from dist_checkpointing.comm import Comm
from dist_checkpointing.storage.progress import Progress
from dist_checkpointing.testing.simulation.scheduler import Process
from dist_checkpointing.testing.simulation.world import Fault, Launch, World
from run_states import ViolationError

_TRIES: Final = 3
_READS: Final = 4
_LONG_SECONDS: Final = 100.0
"""More than a save may be silent."""


@dataclass(eq=False)
class Rivals:
    """A checkpoint that several programs save, each on some ranks.

    Attributes:
        path: Where they save.
        backend: How they save.
        state_of: What a rank saves for a value, or its template.
        value_of: The value of what was loaded.
        may_be: Values that the checkpoint may have now; None stands for no checkpoint.
    """

    world: World
    path: str
    backend: tuple[str, int]
    state_of: Callable[[Comm, int | None], dict[str, Any]]
    value_of: Callable[[Any], int]
    may_be: set[int | None] = field(default_factory=lambda: {None})
    left: list[Process] = field(default_factory=list)
    """What was frozen, and may hold a lock until it goes on."""

    def save(
        self, dice: random.Random, values: Callable[[], int], faults: Sequence[Fault], *, calm: bool
    ) -> None:
        """Let up to three programs save at once, and look at what is there then.

        Nothing but a rival may keep one from saving if the world is ``calm`` and has no ``faults``.

        Raises:
            ViolationError: if two have saved without ``overwrite``, one has ended another, a reader
                got what nobody has saved, or nothing at all was saved.
        """
        self.left = [
            process for process in self.left if process.frozen_until > self.world.scheduler.now
        ]
        calm = calm and not self.left
        overwrite = dice.random() < 0.5
        tried = [[values() for _ in range(_TRIES)] for _ in range(dice.choice([1, 2, 2, 3]))]
        done: list[list[int]] = [[] for _ in tried]
        refused: list[Exception] = []
        slow = dice.choice([None, None, 0])
        begins = [0.0 if slow in (None, number) else 1.0 for number in range(len(tried))]
        launches = [
            self._start(
                number, own, begins[number], done[number], refused, overwrite, number == slow
            )
            for number, own in enumerate(tried)
        ]
        pauses = [10.0 ** dice.uniform(-3, 1) for _ in range(_READS)]
        reader = self.world.start(1, lambda comm: self._read(comm, tried, pauses), name="reader")
        # A reader that stops for a while may meet another checkpoint when it goes on.
        is_of_reader = any(fault.kind == "freeze" for fault in faults) and dice.random() < 0.4
        self.world.arm(faults, reader if is_of_reader else launches[0])
        for launch in (*launches, reader):
            self.world.wait_for(launch)
        self.world.arm(())
        self.left += (process for launch in launches for process in launch.processes)
        for launch in launches:
            for error in launch.results.values():
                if isinstance(error, Exception):
                    raise ViolationError(f"a rival raised {error!r}") from error
        if isinstance(error := reader.results.get(0), ViolationError):
            raise error
        num_done = sum(map(len, done))
        if not overwrite and num_done > (None in self.may_be):
            raise ViolationError(f"{num_done} saves have ended well without overwrite")
        if calm and not faults:
            self._judge(refused, done, overwrite=overwrite)
        self._expect(tried, done, overwrite=overwrite, is_calm=calm and not faults)

    def _start(
        self,
        number: int,
        values: Sequence[int],
        begins_after: float,
        done: list[int],
        refused: list[Exception],
        overwrite: bool,
        is_slow: bool,
    ) -> Launch:
        def work(comm: Comm) -> None:
            time.sleep(begins_after)
            for value in values:
                options: dict[str, Any] = {"overwrite": overwrite, "comm": comm}
                if is_slow and value == values[0]:
                    options["progress"] = _sleep_as_it_writes
                try:
                    save(self.state_of(comm, value), self.path, self.backend, **options)
                except (CheckpointingException, OSError) as error:
                    refused.append(error)
                else:
                    done.append(value)

        machines = [*self.world.machines]
        chosen = machines[number % len(machines)]
        return self.world.start(1, work, name=f"rival{number}-", machines=[chosen])

    def _read(self, comm: Comm, tried: Sequence[Sequence[int]], pauses: Sequence[float]) -> None:
        for pause in pauses:
            time.sleep(pause)
            try:
                value = self.value_of(load(self.state_of(comm, None), self.path, comm=comm))
            except (CheckpointingException, OSError):
                continue
            if value not in {*self.may_be, *(value for own in tried for value in own)}:
                raise ViolationError(f"a reader got {value}, which nobody has saved")

    def _judge(
        self, refused: Sequence[Exception], done: Sequence[Sequence[int]], *, overwrite: bool
    ) -> None:
        for error in refused:
            if not isinstance(error, CheckpointExistsError):
                raise ViolationError(f"a rival was refused by {error!r}") from error
            if "taken over" in str(error):
                raise ViolationError(f"a save that is alive was ended: {error}") from error
        if not any(done) and (overwrite or self.may_be == {None}):
            raise ViolationError(f"nobody could save: {refused}")

    def _expect(
        self,
        tried: Sequence[Sequence[int]],
        done: Sequence[Sequence[int]],
        *,
        overwrite: bool,
        is_calm: bool,
    ) -> None:
        """Look at what is there, and compare it with what may be there."""
        may_be: set[int | None] = {own[-1] for own in done if own}
        if not is_calm:
            may_be |= {*self.may_be, *(value for own in tried for value in own)}
            # On a disk, the checkpoint that is replaced ends before the new one is written.
            may_be |= {None} if overwrite and not self.path.startswith("s3:") else set()
        found = self.found()
        if found not in (may_be or self.may_be):
            raise ViolationError(f"{self.path} holds {found}, not one of {may_be or self.may_be}")
        # A commit that was cut off may come to light with the next save.
        self.may_be = {found} if is_calm else may_be | {found}

    def found(self) -> int | None:
        """The value that is there."""

        def look(comm: Comm) -> int | None:
            try:
                template = self.state_of(comm, None)
                return self.value_of(load(template, self.path, comm=comm, verify=True))
            except CheckpointNotFoundError:
                return None

        self.world.scheduler.wait(lambda: False, 40.0)
        losses, self.world.store.losses = self.world.store.losses, 0.0
        result = self.world.launch(1, look, name="reader").results[0]
        self.world.store.losses = losses
        if isinstance(result, Exception):
            raise ViolationError(f"a reader of {self.path} failed: {result!r}") from result
        value: int | None = result
        return value


def _sleep_as_it_writes(progress: Progress) -> None:
    if progress.phase == "writing":
        time.sleep(_LONG_SECONDS)
