"""A whole backend of a third party: each chunk or piece of a tensor is a .npy file of raw bits."""

import io
from concurrent.futures import Future
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from dist_checkpointing.filesystem import file_writer, local_folder
from dist_checkpointing.format import Index, file_names
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from dist_checkpointing.storage import (
    Durability,
    StorageReader,
    StorageWriter,
    WriteResult,
    done,
)
from dist_checkpointing.strategies import PlannedLoadStrategy, PlannedSaveStrategy

# numpy parses headers as Python, which CPython before 3.11.4 may do in one thread at a time only.
_ONE_PARSER = Lock()


def npy_path(folder: Path, key: str, offset: object, flat: tuple[int, int] | None) -> Path:
    return folder / file_names.disk_name(key) / f"{offset}-{flat}.npy"


class NpyWriter(StorageWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for item in plan.items:
            data, index = planner.get_data(item), item.index
            assert isinstance(data, torch.Tensor)
            flat = item.tensor_data.flat_range if item.tensor_data else None
            path = npy_path(self.checkpoint_dir, index.fqn, index.offset, flat)
            path.parent.mkdir(exist_ok=True)
            np.save(
                buffer := io.BytesIO(), tensor_memory.as_numpy(data.cpu()).view(f"V{data.itemsize}")
            )
            file_writer.put(path.parent, path.name, buffer.getvalue(), Durability.FSYNC)
            local_folder.fsync_folder(path.parent)
            results.append(WriteResult(index, data.nbytes))
        local_folder.fsync_folder(self.checkpoint_dir)
        return done(results)


class NpyReader(StorageReader):
    def set_up_storage_reader(self, metadata: Index, **_: int) -> None:
        self.index = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            where, window = item.storage_index, item.storage
            tensor = self.index[where.fqn]
            flat = tensor.pieces[where.index or 0][1] if tensor.pieces else None
            with _ONE_PARSER:
                values = np.load(npy_path(self.checkpoint_dir, where.fqn, where.offset, flat))
            if flat is not None:
                values = values[window.start :][: window.array_size].reshape(window.shape)
            part = values[(*window.box.slices(), ...)].view(tensor.dtype.numpy)
            planner.apply_tensor(item, tensor_memory.as_tensor(part, tensor.dtype.torch))
        return done(None)


class NpySaveStrategy(PlannedSaveStrategy):
    writer_type, writes = NpyWriter, ("npy", 1)


class NpyLoadStrategy(PlannedLoadStrategy):
    reader_type, reads = NpyReader, frozenset({("npy", 1)})
