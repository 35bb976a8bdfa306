"""Ours and torch DCP: ways to save behind a training, each kept for all saves of a run."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.serialization import set_crc32_options

from bench_ours import Variant, make_strategies
from dist_checkpointing import AsyncSaver, PlanCache, ShardedTensor, load, save
from dist_checkpointing.comm import SingleProcess

Tensors = Mapping[str, torch.Tensor]

_BACKEND = ("tensorstore", 1)


@dataclass(frozen=True, slots=True)
class Begun:
    """A save that goes on behind its caller.

    Attributes:
        wait_captured: returns when the state may be changed.
        done: whether ``finish`` would return at once.
        finish: returns when the checkpoint is there; raises what went wrong.
    """

    wait_captured: Callable[[], object]
    done: Callable[[], bool]
    finish: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Calls:
    """A contestant ready to save; only ``begin`` blocks the training.

    Attributes:
        prepare: tensors as the state dict that it saves; not timed.
        begin: save what was prepared into a folder that exists and is empty.
        load: fill tensors from it, in place; not timed.
        close: give everything back.
    """

    prepare: Callable[[Tensors], Any]
    begin: Callable[[Path, Any], Begun]
    load: Callable[[Path, Tensors], object]
    close: Callable[[], object]


class AsyncContestant(ABC):
    """A way to save behind a training.

    Attributes:
        name: in tables and JSON.
        family: for colours.
        detail: its settings.
        copies_first: the state may be changed as soon as ``begin`` returns.
        in_training: takes part where a training goes on meanwhile.
        shares_memory: keeps its copy in /dev/shm.
    """

    name: str
    family: str
    detail: str = ""
    copies_first: bool = True
    in_training: bool = True
    shares_memory: bool = False

    @abstractmethod
    def open(self) -> Calls:
        """Everything that a training would keep from save to save."""


class Ours(AsyncContestant):
    """The default backend behind an AsyncSaver.

    Args:
        capture: see ``async_save``.
        variant: with or without checksums.
        worker: who writes; see ``AsyncSaver``.
    """

    family = "ours"

    def __init__(
        self,
        capture: Literal["copy", "background"],
        variant: Variant = Variant.PLAIN,
        worker: Literal["thread", "process"] = "thread",
    ) -> None:
        self.capture = capture
        self.variant = variant
        self.worker = worker
        self.name = our_name(capture, variant, worker)
        self.detail = f"tensorstore 1{variant.value}, written by a {worker}"
        self.copies_first = capture == "copy"

    def open(self) -> Calls:
        strategy, load_strategy = make_strategies(_BACKEND, self.variant, durable=False)
        saver = AsyncSaver(comm=SingleProcess(), worker=self.worker)

        def begin(folder: Path, state: Any) -> Begun:
            handle = saver.save(state, folder, strategy, capture=self.capture)
            return Begun(handle.captured.wait, handle.done, handle.result)

        return Calls(_our_state, begin, _our_load(load_strategy), saver.close)


class Synchronous(AsyncContestant):
    """Our ``save``: what the background part is compared with."""

    name = "ours, synchronous save"
    family = "sync"
    detail = "tensorstore 1, no checksums"
    in_training = False

    def open(self) -> Calls:
        strategy, load_strategy = make_strategies(_BACKEND, Variant.PLAIN, durable=False)
        cache = PlanCache()

        def begin(folder: Path, state: Any) -> Begun:
            save(state, folder, strategy, comm=SingleProcess(), plan_cache=cache)
            return Begun(lambda: None, lambda: True, lambda: None)

        return Calls(_our_state, begin, _our_load(load_strategy), lambda: None)


class Dcp(AsyncContestant):
    """torch.distributed.checkpoint.async_save with a DefaultStager that is kept.

    Args:
        where: who writes.
        background: stage in a thread too (``use_async_staging``).
    """

    family = "dcp"

    def __init__(self, where: Literal["thread", "process"], *, background: bool) -> None:
        self.where = where
        self.background = background
        self.name = dcp_name(where, background=background)
        self.detail = "1 writer thread, no crc32"
        self.copies_first = not background
        self.shares_memory = where == "process"

    def open(self) -> Calls:
        in_process = self.where == "process"
        kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
        # Its helper process meets this one over TCP.
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        stager = DefaultStager(StagingOptions(False, in_process, self.background, False))

        def begin(folder: Path, state: Any) -> Begun:
            writer = _WriterWithoutCrc32(folder, sync_files=False)
            answer = dcp_async_save(
                state,
                storage_writer=writer,
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


class _WriterWithoutCrc32(FileSystemWriter):
    """Goes to the process that writes, where the option has to be set."""

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        set_crc32_options(False)
        logging.getLogger().setLevel(logging.WARNING)  # that process tells about every save
        return super().write_data(*arguments, **options)


def our_name(capture: str, variant: Variant = Variant.PLAIN, worker: str = "thread") -> str:
    return f"ours, {capture}{variant.value}" + (", process" if worker == "process" else "")


def dcp_name(where: str, *, background: bool) -> str:
    return f"DCP, {where}" + (", async staging" if background else "")


def our_contestants() -> list[AsyncContestant]:
    """Both ways to capture, and those that a training is slowed by in another way."""
    return [
        Synchronous(),
        Ours("copy"),
        Ours("background"),
        Ours("copy", Variant.CHECKSUM),
        Ours("copy", worker="process"),
        Ours("background", worker="process"),
    ]


def dcp_contestants() -> list[AsyncContestant]:
    return [
        Dcp(where, background=background)
        for where in ("thread", "process")
        for background in (False, True)
    ]


def _our_state(tensors: Tensors) -> dict[str, Any]:
    make = ShardedTensor.from_rank_offsets
    return {key: make(key, tensor) for key, tensor in tensors.items()}


def _our_load(strategy: Any) -> Callable[[Path, Tensors], object]:
    return lambda folder, targets: load(_our_state(targets), folder, strategy, comm=SingleProcess())
