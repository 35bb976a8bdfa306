"""Other libraries that save behind a training, where they are installed."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from async_contestants import AsyncContestant, Begun, Calls, Tensors
from bench_megatron import allow_cpu_only, megatron_is_installed


class TorchCheckpointing(AsyncContestant):
    """torch_checkpointing as it is, but for pinned memory and O_DIRECT, which others do not use."""

    name = "torch_checkpointing"
    family = "torch_checkpointing"
    copies_first = False
    shares_memory = True

    def __init__(self) -> None:
        self.detail = f"{version('torch_checkpointing')}, page cache"

    def open(self) -> Calls:
        library = import_module("torch_checkpointing")
        staging = import_module("torch_checkpointing.staging")
        storage = import_module("torch_checkpointing.storage.filesystem")
        saving = library.AsyncCheckpointSaverConfig(
            staging_config=staging.CheckpointStagerConfig(
                use_pinned_memory=False, use_non_blocking_copy=False
            )
        )
        manager = library.CheckpointManager(
            library.CheckpointManager.Config(
                save=saving,
                storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

        def begin(folder: Path, state: Any) -> Begun:
            written = manager.save(str(folder / "checkpoint"), state)
            captured = manager._staging_future  # noqa: SLF001 - it has no public name
            return Begun(captured.result, written.done, written.result)

        def load(folder: Path, targets: Tensors) -> None:
            found = manager.load(str(folder / "checkpoint"), into={"model": dict(targets)})
            for key, target in targets.items():
                if found["model"][key].data_ptr() != target.data_ptr():
                    target.copy_(found["model"][key])

        return Calls(lambda tensors: {"model": dict(tensors)}, begin, load, manager.close)


class Megatron(AsyncContestant):
    """megatron-core's asynchronous save; it always fsyncs.

    Its persistent worker wants a GPU (without one it dies, and the caller waits for ever): then it
    forks a process for every save.
    """

    name = "megatron-core"
    family = "megatron"

    def __init__(self) -> None:
        self.is_persistent = torch.cuda.is_available()
        how = "persistent worker" if self.is_persistent else "forks"
        self.detail = f"{version('megatron-core')}, {how}, always durable"

    def open(self) -> Calls:
        allow_cpu_only()
        library: Any = import_module("megatron.core.dist_checkpointing")
        queues = import_module("megatron.core.dist_checkpointing.strategies.async_utils")
        queue = queues.AsyncCallsQueue(persistent=self.is_persistent)
        make = library.ShardedTensor.from_rank_offsets

        def prepare(tensors: Tensors) -> Any:
            return {key: make(key, tensor) for key, tensor in tensors.items()}

        def begin(folder: Path, state: Any) -> Begun:
            queue.schedule_async_request(library.save(state, str(folder), async_sharded_save=True))

            def done() -> bool:
                queue.maybe_finalize_async_calls(blocking=False)
                return bool(queue.get_num_unfinalized_calls() == 0)

            return Begun(
                lambda: None, done, lambda: queue.maybe_finalize_async_calls(blocking=True)
            )

        def load(folder: Path, targets: Tensors) -> None:
            found = library.load(prepare(targets), str(folder))
            for key, target in targets.items():
                if found[key].data_ptr() != target.data_ptr():
                    target.copy_(found[key])

        return Calls(prepare, begin, load, queue.close)


def other_contestants() -> tuple[list[AsyncContestant], dict[str, str]]:
    """Those that are installed; and of the others, name -> why they are not here."""
    found: list[AsyncContestant] = []
    missing = {}
    if find_spec("torch_checkpointing") is not None:
        found.append(TorchCheckpointing())
    else:
        missing["torch_checkpointing"] = "not installed"
    if megatron_is_installed():
        found.append(Megatron())
    else:
        missing["megatron-core"] = "not installed"
    return found, missing
