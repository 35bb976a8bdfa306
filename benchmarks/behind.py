"""Saves behind a training: how long it stands still, and what a save costs it.

Each time is taken beside a memcpy of the same state into memory that was used before, just before
the save: what the machine does at that moment hits both.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    async_save as dcp_async_save,
)
from torch.serialization import set_crc32_options

from contestants import (
    CHECKED,
    PLAIN,
    TENSORSTORE,
    allow_cpu_only,
    megatron_is_installed,
    strategies,
    take_over,
)
from dist_checkpointing import AsyncSaver, PlanCache, ShardedTensor, load, save
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.storage import StorageOptions
from probes import watched
from runner import SkippedError, Stage, Way
from state import State, Work, by_key
from world import World

Tensors = Mapping[str, torch.Tensor]

_MEMCPY_CALLS = 3
_TRAINING_SECONDS = 0.6
_TRAINING_SIZE = 384


@dataclass(frozen=True, slots=True)
class Begun:
    """A save that goes on behind its caller.

    Attributes:
        wait_captured: Returns when the state may be changed.
        done: Whether ``finish`` would return at once.
        finish: Returns when the checkpoint is there; raises what went wrong.
    """

    wait_captured: Callable[[], object]
    done: Callable[[], bool]
    finish: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Calls:
    """A contestant ready to save; only ``begin`` blocks the training.

    Attributes:
        prepare: Tensors as the state dict that it saves; not timed.
        begin: Save what was prepared into a folder that exists and is empty.
        load: Fill tensors from it, in place; not timed.
        close: Give everything back.
    """

    prepare: Callable[[Tensors], Any]
    begin: Callable[[Path, Any], Begun]
    load: Callable[[Path, Tensors], object]
    close: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to save behind a training.

    Attributes:
        name: Name in tables and goals.
        family: "ours", "sync" or the name of a peer.
        open: Everything that a training would keep from save to save.
        detail: Its settings.
        shares_memory: It keeps its copy in /dev/shm.
    """

    name: str
    family: str
    open: Callable[[], Calls]
    detail: str = ""
    shares_memory: bool = False


def _our_state(tensors: Tensors) -> dict[str, Any]:
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}


def _our_load(strategy: Any) -> Callable[[Path, Tensors], object]:
    return lambda folder, targets: load(_our_state(targets), folder, strategy, comm=SingleProcess())


def _ours(capture: Any, options: StorageOptions) -> Calls:
    strategy, load_strategy = strategies(TENSORSTORE, options)
    saver = AsyncSaver(comm=SingleProcess())

    def begin(folder: Path, state: Any) -> Begun:
        handle = saver.save(state, folder, strategy, capture=capture)
        return Begun(handle.captured.wait, handle.done, handle.result)

    return Calls(_our_state, begin, _our_load(load_strategy), saver.close)


def _synchronous() -> Calls:
    """Our ``save``: what the part in the background is compared with."""
    strategy, load_strategy = strategies(TENSORSTORE, PLAIN)
    cache = PlanCache()

    def begin(folder: Path, state: Any) -> Begun:
        save(state, folder, strategy, comm=SingleProcess(), plan_cache=cache)
        return Begun(lambda: None, lambda: True, lambda: None)

    return Calls(_our_state, begin, _our_load(load_strategy), lambda: None)


class _WriterWithoutCrc32(FileSystemWriter):
    """Goes to the process that writes, where the option has to be set."""

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        set_crc32_options(False)
        logging.getLogger().setLevel(logging.WARNING)  # that process tells about every save
        return super().write_data(*arguments, **options)


def _dcp(*, in_process: bool, staged: bool) -> Calls:
    kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
    # Its helper process meets this one over TCP.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    stager = DefaultStager(StagingOptions(False, in_process, staged, False))

    def begin(folder: Path, state: Any) -> Begun:
        answer = dcp_async_save(
            state,
            storage_writer=_WriterWithoutCrc32(folder, sync_files=False),
            async_checkpointer_type=kind,
            async_stager=stager,
            no_dist=True,
        )
        if isinstance(answer, Future):
            return Begun(lambda: None, answer.done, answer.result)
        uploaded = answer.upload_completion
        return Begun(answer.staging_completion.result, uploaded.done, uploaded.result)

    def fill(folder: Path, targets: Tensors) -> None:
        dcp_load(dict(targets), storage_reader=FileSystemReader(folder), no_dist=True)

    return Calls(dict, begin, fill, stager.close)


def _torch_checkpointing() -> Calls:
    """As it is, but for pinned memory and O_DIRECT, which the others do not use."""
    library = import_module("torch_checkpointing")
    staging = import_module("torch_checkpointing.staging")
    storage = import_module("torch_checkpointing.storage.filesystem")
    stager = staging.CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    manager = library.CheckpointManager(
        library.CheckpointManager.Config(
            save=library.AsyncCheckpointSaverConfig(staging_config=stager),
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )

    def begin(folder: Path, state: Any) -> Begun:
        written = manager.save(str(folder / "checkpoint"), state)
        captured = manager._staging_future  # noqa: SLF001 - it has no public name
        return Begun(captured.result, written.done, written.result)

    def fill(folder: Path, targets: Tensors) -> None:
        found = manager.load(str(folder / "checkpoint"), into={"model": dict(targets)})
        take_over(dict(targets), found["model"])

    return Calls(lambda tensors: {"model": dict(tensors)}, begin, fill, manager.close)


def _megatron() -> Calls:
    """Its persistent worker wants a GPU; without one it forks a process for every save."""
    allow_cpu_only()
    library: Any = import_module("megatron.core.dist_checkpointing")
    queues = import_module("megatron.core.dist_checkpointing.strategies.async_utils")
    queue = queues.AsyncCallsQueue(persistent=torch.cuda.is_available())
    make = library.ShardedTensor.from_rank_offsets

    def prepare(tensors: Tensors) -> Any:
        return {key: make(key, tensor) for key, tensor in tensors.items()}

    def begin(folder: Path, state: Any) -> Begun:
        queue.schedule_async_request(library.save(state, str(folder), async_sharded_save=True))

        def done() -> bool:
            queue.maybe_finalize_async_calls(blocking=False)
            return bool(queue.get_num_unfinalized_calls() == 0)

        return Begun(lambda: None, done, lambda: queue.maybe_finalize_async_calls(blocking=True))

    def fill(folder: Path, targets: Tensors) -> None:
        take_over(dict(targets), library.load(prepare(targets), str(folder)))

    return Calls(prepare, begin, fill, queue.close)


def _our(capture: str, options: StorageOptions = PLAIN) -> Contestant:
    name = f"ours, {capture}" + (" + checksum" if options is CHECKED else "")
    return Contestant(name, "ours", partial(_ours, capture, options))


def _their(*, in_process: bool, staged: bool) -> Contestant:
    name = f"DCP, {'process' if in_process else 'thread'}" + (", async staging" if staged else "")
    how = partial(_dcp, in_process=in_process, staged=staged)
    return Contestant(name, "dcp", how, "1 thread, no crc32", shares_memory=in_process)


def _contestants() -> list[Contestant]:
    found = [
        Contestant("ours, synchronous save", "sync", _synchronous),
        _our("copy"),
        _our("background"),
        _our("copy", CHECKED),
    ]
    found += [_their(in_process=p, staged=s) for p in (False, True) for s in (False, True)]
    if find_spec("torch_checkpointing") is not None:
        how = "without pinned memory and O_DIRECT"
        found.append(
            Contestant(
                "torch_checkpointing", "torch_checkpointing", _torch_checkpointing, how, True
            )
        )
    if megatron_is_installed():
        found.append(Contestant("megatron-core", "megatron", _megatron, "always durable"))
    return found


def open_behind(stage: Stage) -> list[Way]:
    """The ways of the case: one state of tensors of 16 MiB, and memory to copy it to."""
    state = State(max(1, stage.settings.async_mib // 16), (2048, 2048))
    state = state.at_most(4, 64) if stage.settings.tiny else state
    bench = _Bench(Work.alone(state), Work.alone(state.at_most(4, 8)), Training(), stage)
    return [BehindWay(contestant, bench) for contestant in _contestants()]


@dataclass(slots=True)
class _Bench:
    """What all ways share."""

    work: Work
    tiny: Work
    training: Training
    stage: Stage
    number: int = 0

    def new_folder(self) -> Path:
        self.number += 1
        folder = self.stage.folder / f"behind-{self.number}"
        folder.mkdir()
        return folder

    def clear(self) -> None:
        for left in self.stage.folder.glob("behind-*"):
            shutil.rmtree(left, ignore_errors=True)

    def memcpy(self) -> float:
        times = []
        for _ in range(_MEMCPY_CALLS):
            begin = time.perf_counter()
            for source, target in zip(self.work.saved, self.work.target, strict=True):
                target.data.copy_(source.data)
            times.append(time.perf_counter() - begin)
        return median(times)  # the save has one try, too


class BehindWay(Way):
    """A contestant; its memory, plans and helper processes are kept from save to save."""

    def __init__(self, contestant: Contestant, bench: _Bench) -> None:
        self.name, self.family = contestant.name, contestant.family
        self.detail = contestant.detail
        self._contestant = contestant
        self._bench = bench
        self._world: World = bench.stage.world
        self._calls: Calls | None = None
        self._state: Any = None

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()

    def warm_up(self) -> Mapping[str, float]:
        return self._guarded(self._first_saves)

    def round(self) -> Mapping[str, float]:
        values = self._guarded(self._alone)
        return values if self.family == "sync" else {**values, **self._guarded(self._in_training)}

    def _guarded(self, step: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        kept: list[Mapping[str, float]] = []
        try:
            gc.collect()
            self._world.timed(lambda: kept.append(step()))
        finally:
            self._bench.clear()
        return kept[0]

    def _first_saves(self) -> Mapping[str, float]:
        """Imports; then the first save in full size: memory, and that it saved what it captured."""
        work = self._bench.work
        if self._contestant.shares_memory and _shared_memory_bytes() < 3 * work.state.num_bytes:
            # A process that touches more of it than there is dies of SIGBUS.
            raise SkippedError("too little shared memory")
        self._calls = calls = self._contestant.open()
        tiny = calls.prepare(by_key(self._bench.tiny.saved))
        calls.begin(self._bench.new_folder(), tiny).finish()
        self._state, folder = calls.prepare(by_key(work.saved)), self._bench.new_folder()
        with watched(helpers=True) as watch:
            begin = time.perf_counter()
            begun = calls.begin(folder, self._state)
            blocked = time.perf_counter() - begin
            begun.wait_captured()
            for tensor in work.saved:
                tensor.data.fill_(0)
            begun.finish()
        for tensor in work.saved:
            tensor.fill()
        work.clear_target()
        calls.load(folder, by_key(work.target))
        if not work.target_is_right:
            raise RuntimeError("what it saved is not what it captured")
        beyond = watch.peak_mib - work.state.num_bytes / 2**20
        return {"first blocked ms": 1000 * blocked, "beyond a copy MiB": beyond}

    def _alone(self) -> Mapping[str, float]:
        assert self._calls is not None
        folder, memcpy = self._bench.new_folder(), self._bench.memcpy()
        begin = time.perf_counter()
        begun = self._calls.begin(folder, self._state)
        blocked = time.perf_counter() - begin
        begun.wait_captured()
        captured = time.perf_counter() - begin
        begun.finish()
        total = time.perf_counter() - begin
        behind = total if self.family == "sync" else total - captured
        return {
            "blocked ms": 1000 * blocked,
            "blocked / memcpy": blocked / memcpy,
            "captured / memcpy": captured / memcpy,
            "captured s": captured,
            "behind s": behind,
            "in all s": total,
        }

    def _in_training(self) -> Mapping[str, float]:
        assert self._calls is not None
        folder, training = self._bench.new_folder(), self._bench.training
        with training.one_thread():
            speed = training.speed(_TRAINING_SECONDS)
            begin = time.perf_counter()
            begun = self._calls.begin(folder, self._state)
            blocked = time.perf_counter() - begin
            steps, during = training.until(begun.done)
            begun.finish()
        return {
            "step speed": steps / during / speed if during else 1.0,
            "training lost s": blocked + during - steps / speed,
        }


def _shared_memory_bytes() -> int:
    """How much of /dev/shm is free; 0 where there is none."""
    place = Path("/dev/shm")  # noqa: S108 - where torch puts shared tensors
    return shutil.disk_usage(place).free if place.exists() else 0


class Training:
    """Matrix products of one thread, a few milliseconds a step: no state that is saved."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        size = _TRAINING_SIZE
        self._weight = torch.randn(size, size, generator=generator) / size**0.5
        self._x = torch.randn(size, size, generator=generator)

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Let torch use one thread, and warm up."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._step()
            yield
        finally:
            torch.set_num_threads(before)

    def speed(self, seconds: float) -> float:
        """Steps a second when nothing else goes on."""
        end = time.perf_counter() + seconds
        steps, taken = self.until(lambda: time.perf_counter() >= end)
        return steps / taken

    def until(self, done: Callable[[], bool]) -> tuple[int, float]:
        """Train until something is done: number of steps, seconds."""
        begin, steps = time.perf_counter(), 0
        while not done():
            self._step()
            steps += 1
        return steps, time.perf_counter() - begin

    def _step(self) -> None:
        self._x = torch.nn.functional.normalize(self._weight @ self._x)
