"""A world of machines: its disks, its store, its processes, and what happens to them.

The code of the library runs in it unchanged, because what stands in for the operating system and
the store stands in for functions of Python that are public. Outside of it are C code that opens
files by their names (TensorStore), and what ranks say to each other by torch.distributed: here they
are threads, and talk by ``ThreadComm``.
"""

from __future__ import annotations

import builtins
import errno
import functools
import gc
import importlib
import itertools
import os
import pkgutil
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from dist_checkpointing.comm import Comm, ThreadComm
from dist_checkpointing.testing.simulation.disk import Disk
from dist_checkpointing.testing.simulation.scheduler import (
    Killed,
    Process,
    Scheduler,
    SimulatedLock,
    threading_functions,
)
from dist_checkpointing.testing.simulation.store import SimulatedStore
from dist_checkpointing.testing.simulation.system_calls import SystemCalls

T = TypeVar("T")
SHARED: Final = "/sim/shared"
"""A folder that all machines have, on a network file system."""
OWN: Final = "/sim/own"
"""A folder that each machine has for itself."""
MEMORY: Final = "/sim/memory"
"""A folder in the memory of each machine."""
_LIBRARY: Final = "dist_checkpointing."
_worlds = itertools.count()
_LOOKS: Final = frozenset({"stat", "open", "list", "get", "head", "flock"})
"""Operations that change nothing."""
_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())


@dataclass(slots=True)
class Machine:
    """Attributes:
    name: Its host name.
    disk: Its own disk, at ``OWN``.
    memory: A file system at ``MEMORY``, which is empty when the machine was started.
    boots: How often it was started.
    clock_error: Seconds by which its clock is wrong.
    """

    name: str
    disk: Disk
    memory: Disk
    boots: int = 1
    clock_error: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at one operation of the processes of a launch.

    Attributes:
        at: Number of the operation, from 0; of those that ``operation`` names.
        kind: ``"kill"`` the process, ``"kill machine"``, ``"kill all"``, cut the ``"power"`` of the
            machine, ``"freeze"`` the process for ``seconds``, or the name of an error: ``"EIO"``.
        seconds: See ``kind``.
        operation: Name of operations, or a part of the paths that they change; empty for all.
    """

    at: int
    kind: str
    seconds: float = 0.0
    operation: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """A line of the log."""

    seconds: float
    process: str
    name: str
    path: str
    outcome: str = ""


@dataclass(eq=False)
class Launch:
    """Ranks that were started together.

    Attributes:
        processes: One a rank.
        results: What each rank has returned or raised; nothing for one that was killed.
    """

    processes: list[Process]
    results: dict[int, Any] = field(default_factory=dict)

    def end(self) -> None:
        for process in self.processes:
            process.die()


class World:
    """Everything that a history needs, of which nothing is real.

    Args:
        seed: Decides all that is not determined.
        machines: How many there are.
        late_seconds: How late a machine may see what another one has done in ``SHARED``.
        changes: See ``Scheduler``.
        stalls: See ``Scheduler``.
        shorts: How likely a write writes less than it should.
        keeps_log: Whether ``log`` is filled.

    Attributes:
        log: Every operation, in order.
        faults: What is to happen to the operations that come; see ``arm``.

    Example:
        >>> world = World(seed=7)
        >>> def training(comm):
        ...     save({"step": 1}, f"{SHARED}/run/1", comm=comm)
        >>> results = world.run(lambda: world.launch(4, training).results)
    """

    def __init__(
        self,
        seed: int,
        *,
        machines: int = 1,
        late_seconds: float = 0.0,
        changes: float = 0.1,
        stalls: float = 0.0,
        shorts: float = 0.0,
        keeps_log: bool = False,
    ) -> None:
        self.scheduler: Scheduler = Scheduler(seed, changes, stalls)
        dice = self.scheduler.random
        self.shared: Disk = Disk(1 << 20, dice, late_seconds)
        self.machines: dict[str, Machine] = {
            f"node{number}": Machine(
                f"node{number}",
                Disk((1 << 20) + 1 + number, dice),
                Disk((1 << 19) + number, dice),
            )
            for number in range(machines)
        }
        self.store: SimulatedStore = SimulatedStore(self)
        self.shorts = shorts
        self.log: list[Operation] = []
        self.faults: list[Fault] = []
        self.counted: Counter[Fault] = Counter()
        self._keeps_log = keeps_log
        self._targets: Launch | None = None
        self._pids = itertools.count(10**6 + 1000 * next(_worlds))
        self._running: dict[int, Process] = {}
        self.network: Process = Process("network", "network", 1)
        self._calls = SystemCalls(self)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Let threads of this world meet it instead of the operating system in the body."""
        _import_library()
        was_enabled = gc.isenabled()
        gc.disable()  # it would run finalizers at any time
        random_state = random.getstate()
        random.seed(self.scheduler.random.random())
        unraisable, sys.unraisablehook = sys.unraisablehook, _without_killed(sys.unraisablehook)
        functions = {
            **self._calls.functions(),
            **threading_functions(self.scheduler),
            **self.store.functions(),
        }
        replaced: list[tuple[Any, str, Any]] = [
            (*_owner_of(name), call) for name, call in functions.items()
        ]
        locks, kept = _globals(len(sys.modules))
        for owner, name, lock in locks:
            own: Any = SimulatedLock(self.scheduler, is_reentrant=isinstance(lock, _RLOCK))
            # No process waits for the lock of another one.
            is_of_all = isinstance(owner, functools.cached_property)
            replaced.append((owner, name, nullcontext() if is_of_all else own))
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
        for owner, name, call in replaced:
            setattr(owner, name, call)
        try:
            yield
        finally:
            gc.collect(0)  # what killed processes have left, all of it young, closes its files here
            for owner, name, call in before:
                setattr(owner, name, call)
            self._calls.close_all()
            for disk in self._disks():
                disk.close()
            for value, content in kept:
                if value != content:
                    value.clear()
                    value.update(content)
            sys.unraisablehook = unraisable
            random.setstate(random_state)
            if was_enabled:
                gc.enable()

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work``, which starts processes and waits for them; see ``Scheduler.run``.

        It is called once: nothing is left of the world afterwards but its log.
        """
        with self._installed():
            return self.scheduler.run(work, Process("driver", "driver", 2))

    def start(
        self,
        ranks: int,
        work: Callable[[Comm], object],
        *,
        name: str = "",
        machines: Sequence[str] = (),
        timeout_seconds: float = 300.0,
    ) -> Launch:
        """Start ranks, dealt to machines in order; they run when the caller waits."""
        chosen = machines or [*self.machines]
        per_machine = -(-ranks // len(chosen))
        rendezvous = ThreadComm.Rendezvous(ranks, timeout_seconds)
        processes = [
            self._process(f"{name}{rank}", chosen[rank // per_machine]) for rank in range(ranks)
        ]
        launch = Launch(processes)
        for rank, process in enumerate(processes):
            process.on_death.append(partial(rendezvous.leave, rank))
            run = partial(self._run_rank, launch, rank, rendezvous, work)
            self.scheduler.spawn(run, "rank", process)
        return launch

    def launch(
        self,
        ranks: int,
        work: Callable[[Comm], object],
        *,
        faults: Iterable[Fault] = (),
        **options: Any,
    ) -> Launch:
        """Start ranks and wait until each has returned, was killed or is frozen."""
        launch = self.start(ranks, work, **options)
        self.arm(faults, launch)
        self.wait_for(launch)
        return launch

    def wait_for(
        self,
        launch: Launch,
        results: Collection[int] | None = None,
        seconds: float | None = None,
    ) -> bool:
        """Wait until each rank has a result, is dead or is frozen; whether that was in time."""
        done = launch.results if results is None else results
        return self.scheduler.wait(
            lambda: all(
                rank in done or process.is_dead or process.frozen_until > self.scheduler.now
                for rank, process in enumerate(launch.processes)
            ),
            seconds,
        )

    def _run_rank(
        self,
        launch: Launch,
        rank: int,
        rendezvous: ThreadComm.Rendezvous,
        work: Callable[[Comm], object],
    ) -> None:
        process = launch.processes[rank]
        try:
            launch.results[rank] = work(ThreadComm(rendezvous, rank))
        except Exception as error:  # noqa: BLE001 - it is the result
            launch.results[rank] = error
        process.die()

    def _process(self, name: str, machine: str) -> Process:
        process = Process(name, machine, next(self._pids))
        self._running[process.pid] = process
        process.on_death.append(lambda: self._calls.release_locks(process.pid))
        process.on_death.append(lambda: self._running.pop(process.pid, None))
        return process

    def before(self, operation: str, path: str) -> None:
        """An operation is about to be done: others may go on before, or a fault may happen."""
        self.scheduler.pause()
        if self._keeps_log:
            self.note(operation, path)
        process = self.scheduler.running.process
        if self._targets is not None and process in self._targets.processes:
            for fault in self.faults:
                if fault.operation in ("", operation) or (
                    fault.operation in path and operation not in _LOOKS
                ):
                    self.counted[fault] += 1
                    if fault.at == self.counted[fault] - 1:
                        self._happen(fault, process, operation, path)

    def arm(self, faults: Iterable[Fault], launch: Launch | None = None) -> None:
        """Count the operations of a launch anew, and let these faults happen at theirs."""
        self.faults, self._targets = [*faults], launch
        self.counted.clear()

    def _happen(self, fault: Fault, process: Process, operation: str, path: str) -> None:
        self.note(operation, path, fault.kind)
        if fault.kind == "freeze":
            process.frozen_until = self.scheduler.now + fault.seconds
            self.scheduler.pause()
        elif fault.kind == "power":
            self.lose_power([process.machine])
            raise Killed
        elif fault.kind.startswith("kill"):
            dead = {"kill": [process], "kill all": [*self._running.values()]}.get(fault.kind)
            if dead is None:
                dead = [p for p in self._running.values() if p.machine == process.machine]
            for other in dead:
                other.die()
            raise Killed
        elif operation not in ("stat", "flock"):
            code = getattr(errno, fault.kind)
            raise OSError(code, os.strerror(code), path)

    def note(self, operation: str, path: str, outcome: str = "") -> None:
        """Add a line to the log."""
        if self._keeps_log:
            name = self.scheduler.running.process.name
            self.log.append(Operation(self.scheduler.now, name, operation, path, outcome))

    def lose_power(self, machines: Iterable[str] | None = None) -> None:
        """Cut machines, by default all, from their power, and start them again."""
        cut = set(self.machines if machines is None else machines)
        for process in [*self._running.values()]:
            if process.machine in cut:
                process.die()
        self.shared.lose_power(cut)
        for name in sorted(cut):
            machine = self.machines[name]
            machine.disk.lose_power([name])
            machine.memory.close()
            machine.memory = Disk(machine.memory.device, self.scheduler.random)
            machine.boots += 1

    def is_short(self) -> bool:
        """Whether a write writes less than it should."""
        return self.shorts > 0 and self.scheduler.random.random() < self.shorts

    def clock_error(self, machine: str) -> float:
        return self.machines[machine].clock_error if machine in self.machines else 0.0

    def is_running(self, pid: int, machine: str) -> bool:
        return pid in self._running and self._running[pid].machine == machine

    def disk_of(self, machine: str, parts: Sequence[str]) -> tuple[Disk, list[str]]:
        """The disk that a path below ``/sim`` is on, and the path on it."""
        if parts and parts[0] in ("own", "memory") and machine in self.machines:
            found = self.machines[machine]
            return found.disk if parts[0] == "own" else found.memory, [*parts[1:]]
        if parts and parts[0] == "shared":
            return self.shared, [*parts[1:]]
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/".join(parts))

    def proc_file(self, path: str) -> str | None:
        """A file below ``/proc`` as a process of the world finds it; None for the real one."""
        process = self.scheduler.running.process
        if path == "/proc/sys/kernel/random/boot_id":
            machine = self.machines.get(process.machine)
            return f"{process.machine}-{0 if machine is None else machine.boots}\n"
        if path == "/proc/self/mountinfo":
            machines = self.machines.values()
            mounts = [(self.shared, "nfs4"), *((machine.disk, "ext4") for machine in machines)]
            mounts += ((machine.memory, "tmpfs") for machine in machines)
            return "".join(
                f"1 1 {os.major(disk.device)}:{os.minor(disk.device)} / /sim rw - {kind} x rw\n"
                for disk, kind in mounts
            )
        pid, _, rest = path.removeprefix("/proc/").partition("/")
        if pid.isdigit() and rest == "stat" and int(pid) >= 10**6:
            if not self.is_running(int(pid), process.machine):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return f"{pid} (python) S {' '.join(['0'] * 18)} {pid} 0\n"
        return None

    def _disks(self) -> list[Disk]:
        machines = self.machines.values()
        return [self.shared, *(m.disk for m in machines), *(m.memory for m in machines)]


@functools.cache
def _import_library() -> None:
    """Import what saves and loads import on first use.

    In a world, its locks would be real ones, which stop the whole world, and what draws random
    numbers when it is imported would draw those of the world.
    """
    import dist_checkpointing  # noqa: PLC0415 - the whole of it, for its path

    others = tuple(f"{_LIBRARY}{room}" for room in ("interop", "testing", "tools"))
    for found in pkgutil.walk_packages(dist_checkpointing.__path__, _LIBRARY):
        if not found.name.startswith((*others, f"{_LIBRARY}__main__")):
            importlib.import_module(found.name)


@functools.cache
def _globals(num_modules: int) -> tuple[list[tuple[Any, str, Any]], list[tuple[Any, Any]]]:
    """What the library has for a whole process, once so many modules are there.

    Its locks, with their owners and names: a real one would stop the whole world. And sets and
    dicts with what is in them when the first world begins. Caches stay: they are of a process id.
    """
    del num_modules
    modules = [module for name, module in sys.modules.items() if name.startswith(_LIBRARY)]
    found: list[tuple[Any, str, Any]] = [
        (module, *item) for module in modules for item in vars(module).items()
    ]
    locks = [item for item in found if isinstance(item[2], (_LOCK, _RLOCK))]
    locks += [  # Python 3.11 has one for each of these, which all objects share
        (attribute, "lock", attribute.lock)
        for kind in {value for _, _, value in found if isinstance(value, type)}
        for attribute in vars(kind).values()
        if isinstance(attribute, functools.cached_property) and hasattr(attribute, "lock")
    ]
    return locks, [(value, value.copy()) for _, _, value in found if type(value) in (set, dict)]


def _owner_of(name: str) -> tuple[Any, str]:
    module, _, last = name.rpartition(".")
    if module == "builtins":
        return builtins, last
    if module == "threading.Thread":
        return threading.Thread, last
    return importlib.import_module(module), last


def _without_killed(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """An error in a finalizer of a killed process is none."""

    def call(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, Killed):
            hook(unraisable)

    return call
