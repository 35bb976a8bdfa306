"""Threads that run one at a time, in an order that a seed decides, and a clock that only they move.

A thread may give way where it calls the operating system or a store, and gives way where it waits.
Time passes when every thread waits: a timeout of minutes takes none.
"""

from __future__ import annotations

import _thread
import queue
import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")
_TICK_SECONDS: Final = 2e-5
"""What an operation takes."""
_LONGEST_STALL: Final = 1.3
"""Power of ten of seconds."""


class Killed(BaseException):
    """The process of this thread has been killed: nothing that it does has an effect any more."""


class StuckError(Exception):
    """Every thread waits for another one, without a timeout."""


class Process:
    """A simulated process: threads that are killed, and frozen, together.

    Attributes:
        name: What the log calls it.
        machine: Name of the machine it runs on.
        pid: What ``os.getpid`` says in it.
        is_dead: Whether it has ended or was killed.
        frozen_until: The time before which none of its threads goes on.
        on_death: Called when it dies.
    """

    def __init__(self, name: str, machine: str, pid: int) -> None:
        self.name: str = name
        self.machine: str = machine
        self.pid: int = pid
        self.is_dead: bool = False
        self.frozen_until: float = 0.0
        self.on_death: list[Callable[[], object]] = []

    def die(self) -> None:
        """End every thread of this process where it is, without an effect on anything."""
        if not self.is_dead:
            self.is_dead = True
            for call in self.on_death:
                call()


class Task:
    """A thread of a process. It waits until ``is_ready()``, at most to the time ``wakes_at``."""

    def __init__(self, process: Process, name: str) -> None:
        self.process: Process = process
        self.name: str = name
        self.is_done = False
        self.is_ready: Callable[[], bool] | None = None
        self.wakes_at: float | None = None
        self.gate: _thread.LockType = _thread.allocate_lock()
        self.gate.acquire()


class Scheduler:
    """Decides which thread goes on.

    Attributes:
        random: What all decisions are drawn from.
        changes: How likely another thread goes on at an operation, from 0 to 1.
        stalls: How likely a thread stops for a while at an operation, as on a busy machine.
        now: Seconds since the world began.
        running: The task whose turn it is: that of the calling thread, if it is of this world.
    """

    def __init__(self, seed: int, changes: float = 0.1, stalls: float = 0.0) -> None:
        self.random: random.Random = random.Random(seed)  # noqa: S311 - this is no secret
        self.changes: float = changes
        self.stalls: float = stalls
        self.now: float = 0.0
        self.running: Task
        self._tasks: list[Task] = []
        self._of_thread: dict[int, Task] = {}
        self._main: Task | None = None
        self._error: StuckError | None = None

    @property
    def task(self) -> Task | None:
        """The task that this thread is; None if it is not of this world."""
        return self._of_thread.get(_thread.get_ident())

    def run(self, work: Callable[[], T], process: Process) -> T:
        """Run ``work`` as the first thread, and all that it starts, until it returns.

        Every thread that is left is killed then. The process of ``work`` must not be.

        Raises:
            StuckError: if no thread could go on any more.
            BaseException: what ``work`` raises.
        """
        ended, outcome = _thread.allocate_lock(), dict[str, Any]()
        ended.acquire()

        def first() -> None:
            try:
                outcome["result"] = work()
            except BaseException as error:  # noqa: BLE001 - raised below
                outcome["error"] = error
            for task in [*self._tasks]:
                if task is not main:
                    task.process.die()
            self._error = None
            self.wait(lambda: self._tasks == [main])

        main = self._main = self.spawn(first, "main", process, at_end=ended.release)
        main.gate.release()
        ended.acquire()
        if "error" in outcome:
            raise outcome["error"]
        result: T = outcome["result"]
        return result

    def spawn(
        self,
        work: Callable[[], object],
        name: str,
        process: Process,
        at_end: Callable[[], None] | None = None,
    ) -> Task:
        """Begin a thread, which runs when its turn comes; ``work`` must raise nothing."""
        task = Task(process, name)
        self._tasks.append(task)

        def body() -> None:
            task.gate.acquire()
            self.running = self._of_thread[_thread.get_ident()] = task
            try:
                if not process.is_dead:
                    work()
            except Killed:
                pass
            finally:
                task.is_done = True
                self._tasks.remove(task)
                del self._of_thread[_thread.get_ident()]
                if at_end is None:
                    self._next().gate.release()
                else:
                    at_end()

        _thread.start_new_thread(body, ())
        return task

    def pause(self) -> None:
        """Say that the running task is about to do an operation: another one may go on before.

        Raises:
            Killed: if its process is dead.
        """
        task = self.running
        _raise_if_dead(task)
        self.now += _TICK_SECONDS
        dice = self.random.random()
        if dice < self.stalls:
            self.wait(lambda: False, 10.0 ** self.random.uniform(-3, _LONGEST_STALL))
        elif dice > 1 - self.changes or task.process.frozen_until > self.now:
            self._give_way(task)

    def wait(self, is_ready: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until something is so, or for some seconds; whether it is so then."""
        task = self.task
        if task is None:
            return is_ready()
        _raise_if_dead(task)
        task.is_ready = is_ready
        task.wakes_at = None if seconds is None else self.now + max(seconds, 1e-6)
        try:
            self._give_way(task)
        finally:
            task.is_ready = task.wakes_at = None
        return is_ready()

    def _give_way(self, task: Task) -> None:
        following = self._next()
        if following is not task:
            following.gate.release()
            task.gate.acquire()
            self.running = task
        _raise_if_dead(task)
        if task is self._main and self._error is not None:
            raise self._error

    def _next(self) -> Task:
        """The task that goes on; the clock does if there is none for now."""
        while True:
            able, now = [], self.now
            for task in self._tasks:
                process, wakes_at = task.process, task.wakes_at
                if process.is_dead:
                    return task  # first, because nobody sees how it ends
                if process.frozen_until > now:
                    continue
                is_late = wakes_at is not None and wakes_at <= now
                if is_late or task.is_ready is None or task.is_ready():
                    able.append(task)
            if able:
                return able[0] if len(able) == 1 else self.random.choice(able)
            later = min(filter(None, map(self._goes_on_at, self._tasks)), default=None)
            if later is not None:
                self.now = max(self.now, later)
                continue
            names = ", ".join(f"{task.process.name} {task.name}" for task in self._tasks)
            self._error = StuckError(f"every thread waits for another one: {names}")
            assert self._main is not None
            return self._main

    def _goes_on_at(self, task: Task) -> float | None:
        """When a task that cannot go on now will, if nothing happens before."""
        times = [task.process.frozen_until]
        if task.is_ready is not None and not task.is_ready():
            if task.wakes_at is None:
                return None
            times.append(task.wakes_at)
        return max(times) if max(times) < float("inf") else None


def _raise_if_dead(task: Task) -> None:
    if task.process.is_dead:
        raise Killed


class SimulatedLock:
    """Stands in for ``threading.Lock``, or ``RLock``: who waits for it lets others go on."""

    def __init__(self, scheduler: Scheduler, *, is_reentrant: bool) -> None:
        self._scheduler, self._is_reentrant = scheduler, is_reentrant
        self._owner: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = self._scheduler.task
        if self._depth and self._is_reentrant and self._owner is task:
            self._depth += 1
            return True
        if self._depth and task is not None:
            seconds = None if timeout < 0 else timeout
            if not blocking or not self._scheduler.wait(lambda: not self._depth, seconds):
                return False
        self._owner, self._depth = task, 1
        return True

    def release(self) -> None:
        self._depth = max(0, self._depth - 1)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def released(self) -> int:
        """Release it however often it was acquired; how often that was."""
        depth, self._depth = self._depth, 0
        return depth

    def acquired(self, depth: int) -> None:
        """Acquire it, as if so often."""
        self.acquire()
        self._depth = depth


class SimulatedCondition:
    """Stands in for ``threading.Condition``, of which all else that waits is made."""

    def __init__(self, scheduler: Scheduler, lock: SimulatedLock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock or SimulatedLock(scheduler, is_reentrant=True)
        self._waiting = deque[list[bool]]()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        is_notified = [False]
        self._waiting.append(is_notified)
        depth = self._lock.released()
        try:
            return self._scheduler.wait(lambda: is_notified[0], timeout)
        finally:
            self._lock.acquired(depth)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._scheduler.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._waiting.popleft()[0] = True

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimulatedQueue:
    """Stands in for ``queue.SimpleQueue``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items = deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        is_there = bool(self._items)
        if not is_there and block:
            is_there = self._scheduler.wait(lambda: bool(self._items), timeout)
        if not is_there:
            raise queue.Empty
        return self._items.popleft()


def threading_functions(scheduler: Scheduler) -> dict[str, Any]:
    """What stands in for the threads, locks and queues of Python, by its name.

    Threads that are not of this world get what they would get without it.
    """
    real = {name: getattr(threading, name) for name in ("Lock", "RLock", "Condition")}
    real_queue, start = queue.SimpleQueue, threading.Thread.start

    def start_thread(self: threading.Thread) -> None:
        if scheduler.task is None:
            start(self)
            return

        def run() -> None:
            try:
                self.run()
            except Exception:  # noqa: BLE001 - said on the standard error, as by any thread
                threading.excepthook(threading.ExceptHookArgs([*sys.exc_info(), self]))

        scheduler.pause()
        task = scheduler.spawn(run, self.name, scheduler.running.process)

        def join(timeout: float | None = None) -> None:
            scheduler.wait(lambda: task.is_done, timeout)

        # Of the thread itself: it is asked after the end of the world, too.
        vars(self).update(join=join, is_alive=lambda: not task.is_done)

    def lock() -> Any:
        if scheduler.task is None:
            return real["Lock"]()
        return SimulatedLock(scheduler, is_reentrant=False)

    def rlock() -> Any:
        if scheduler.task is None:
            return real["RLock"]()
        return SimulatedLock(scheduler, is_reentrant=True)

    def condition(lock: Any = None) -> Any:
        if scheduler.task is None or not isinstance(lock, SimulatedLock | None):
            return real["Condition"](lock)
        return SimulatedCondition(scheduler, lock)

    def simple_queue() -> Any:
        return real_queue() if scheduler.task is None else SimulatedQueue(scheduler)

    return {
        "threading.Lock": lock,
        "threading.RLock": rlock,
        "threading.Condition": condition,
        "threading.Thread.start": start_thread,
        "queue.SimpleQueue": simple_queue,
    }
