"""Reads boxes from the database at the root of a checkpoint, straight into the destination."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from dist_checkpointing import dtypes
from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.geometry import Box, Window
from dist_checkpointing.index import Index, StoredTensor
from dist_checkpointing.planning import LoadItemType, LoadPlan, LoadPlanner, MetadataIndex, ReadItem
from dist_checkpointing.storage import StorageReader, done
from dist_checkpointing.strategies.safe_pickle import deserialize
from dist_checkpointing.strategies.tensorstore import database, keys

_SMALL_BYTES = 2**20
_MOST_SMALL_READS = 1024

Array = npt.NDArray[Any]


class _Queue:
    """Reads under way, held to a number and to the memory that they need."""

    def __init__(self, most_bytes: int, most_reads: int = _MOST_SMALL_READS) -> None:
        self._most_bytes, self._most_reads = most_bytes, most_reads
        self._bytes = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def add(self, num_bytes: int, finish: Callable[[], None]) -> None:
        """Take in a read that was started; ``finish`` waits for it and uses the result."""
        self._waiting.append((num_bytes, finish))
        self._bytes += num_bytes
        while self._waiting and (
            self._bytes > self._most_bytes or len(self._waiting) > self._most_reads
        ):
            self._finish_oldest()

    def drain(self) -> None:
        """Finish all of them."""
        while self._waiting:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        num_bytes, finish = self._waiting.popleft()
        self._bytes -= num_bytes
        finish()


class TensorStoreReader(StorageReader):
    """Reads what TensorStoreWriter wrote."""

    def set_up_storage_reader(self, metadata: Index, *, rank: int, world_size: int) -> None:
        del rank, world_size
        self._index = metadata
        self._context = database.make_context(self.options, self.checkpoint_dir)
        self._maps_files = self.options.maps_files(self.checkpoint_dir)
        self._arrays: dict[str, Any] = {}
        if not (metadata or metadata.objects):
            return  # nothing was saved, so no database was made
        if not (self.checkpoint_dir / database.MANIFEST_NAME).is_file():
            path = str(self.checkpoint_dir / database.MANIFEST_NAME)
            raise CorruptCheckpointError("the database is gone", [Finding("missing", path=path)])
        self._store = database.open_store(self.checkpoint_dir, self._context)

    def location(self, chunk: MetadataIndex) -> str:
        return f"{self.checkpoint_dir} (OCDBT), {self._chunk_key(chunk)}"

    def _part(self, chunk: MetadataIndex) -> tuple[StoredTensor, Box, tuple[int, int] | None]:
        tensor = self._index[chunk.fqn]
        assert chunk.offset is not None
        if tensor.pieces is None:
            return tensor, tensor.grid.box(tensor.grid.index_at(chunk.offset)), None
        assert chunk.index is not None
        return tensor, *tensor.pieces[chunk.index]

    def _chunk_key(self, chunk: MetadataIndex) -> str:
        return keys.chunk_key(*self._part(chunk))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        queue = _Queue(self.options.buffer_bytes)
        for item, finish, num_bytes in self._started(plan.items, planner):
            queue.add(num_bytes, self._named(item, finish))
        queue.drain()
        return done(None)

    def _started(
        self, items: Iterable[ReadItem], planner: LoadPlanner
    ) -> Iterable[tuple[ReadItem, Callable[[], None], int]]:
        """Start one read after the other: (item, how to finish it, bytes it needs meanwhile)."""
        small: dict[str, Any] = {}
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                yield item, *self._start_object(item, planner)
                continue
            tensor, box, flat = self._part(item.storage_index)
            stored = box.num_elements if flat is None else flat[1] - flat[0]
            if tensor.chunk_shape is not None:
                stored = math.prod(tensor.chunk_shape)
            if stored * tensor.dtype.itemsize < _SMALL_BYTES:
                key = keys.chunk_key(tensor, box, flat)
                if key not in small:
                    small = {key: self._store.read(key)}  # items of one chunk follow each other
                yield (
                    item,
                    self._finish_small(item, tensor, stored, small[key], planner),
                    (stored * tensor.dtype.itemsize),
                )
            else:
                yield item, *self._start_large(item, tensor, box, flat, planner)

    def _start_object(self, item: ReadItem, planner: LoadPlanner) -> tuple[Callable[[], None], int]:
        chunk = item.storage_index
        assert chunk.offset is not None
        key = keys.object_key(chunk.fqn, chunk.offset, self._index.objects[chunk.fqn])
        read = self._store.read(key)

        def finish() -> None:
            result = read.result()
            if result.state != "value" or not result.value:
                raise self._corrupt(chunk, "a sharded object is missing")
            where = f"{self.checkpoint_dir} (OCDBT), {key}"
            planner.apply_bytes(item, deserialize(result.value, where, trusted=self.trusted))

        return finish, 0

    def _finish_small(
        self, item: ReadItem, tensor: StoredTensor, stored: int, read: Any, planner: LoadPlanner
    ) -> Callable[[], None]:
        def finish() -> None:
            result = read.result()
            expected = stored * tensor.dtype.itemsize
            # A lost data file shows up as a value of no bytes, and not as an error.
            if result.state != "value" or len(result.value) != expected:
                found = f"{len(result.value)} bytes" if result.state == "value" else result.state
                raise self._corrupt(
                    item.storage_index,
                    "a chunk is missing or has the wrong size",
                    expected=f"{expected} bytes",
                    found=found,
                )
            part = _window(np.frombuffer(result.value, dtype=tensor.dtype.numpy), item.storage)
            destination = planner.acquire_tensor(item)
            target = dtypes.fillable(destination, tensor.dtype.torch)
            if target is not None:
                target[...] = part
                planner.apply_tensor(item, destination)
            else:
                planner.apply_tensor(item, dtypes.as_tensor(part.copy(), tensor.dtype.torch))

        return finish

    def _start_large(
        self,
        item: ReadItem,
        tensor: StoredTensor,
        box: Box,
        flat: tuple[int, int] | None,
        planner: LoadPlanner,
    ) -> tuple[Callable[[], None], int]:
        destination = planner.acquire_tensor(item)
        target = dtypes.fillable(destination, tensor.dtype.torch)
        in_place = target is not None
        if target is None:
            target = np.empty(item.lengths, dtype=tensor.dtype.numpy)
        array = self._array(tensor, box, flat)
        copy: Callable[[], None] | None = None
        if flat is None:
            # The array has the axes of the tensor, and counts from its start or the piece's.
            origin = box.offset if tensor.pieces is None else (0,) * len(box.offset)
            offset = tuple(a + b for a, b in zip(origin, item.storage.box.offset, strict=True))
            source = array[Box(offset, item.lengths).slices()]
            write = ts.array(target).write(source).commit
        else:
            write, copy = _read_flat(array, item.storage, target)
        # Chunks pass through memory of their own unless the file is mapped.
        needed = (
            0 if self._maps_files and copy is None else box.num_elements * tensor.dtype.itemsize
        )
        if not in_place:
            needed += target.nbytes

        def finish() -> None:
            write.result()
            if copy is not None:
                copy()
            tensor_read = destination if in_place else dtypes.as_tensor(target, tensor.dtype.torch)
            planner.apply_tensor(item, tensor_read)

        return finish, needed

    def _array(self, tensor: StoredTensor, box: Box, flat: tuple[int, int] | None) -> Any:
        path = keys.array_path(tensor, box, flat)
        array = self._arrays.get(path)
        if array is None:
            array = ts.open(
                {
                    "driver": "zarr3",
                    "kvstore": database.spec(self.checkpoint_dir, path),
                    "metadata": keys.array_node(tensor, box, flat),
                    "fill_missing_data_reads": False,
                },
                open=True,
                assume_metadata=True,
                context=self._context,
            ).result()
            self._arrays = {path: array}  # items of one array follow each other
        return array

    def _named(self, item: ReadItem, finish: Callable[[], None]) -> Callable[[], None]:
        """``finish``, with the key and place in the message if TensorStore finds data lost."""

        def run() -> None:
            try:
                finish()
            except ValueError as error:
                raise self._corrupt(item.storage_index, f"cannot be read: {error}") from error
            if item.type is LoadItemType.TENSOR:
                tensor = self._index[item.storage_index.fqn]
                self.report(item.dest.box.num_elements * tensor.dtype.itemsize)

        return run

    def _corrupt(
        self, chunk: MetadataIndex, problem: str, **details: Any
    ) -> CorruptCheckpointError:
        is_object = chunk.fqn in self._index.objects
        where = str(self.checkpoint_dir) if is_object else self.location(chunk)
        finding = Finding(problem, chunk.fqn, path=where, **details)
        return CorruptCheckpointError("the checkpoint is damaged", [finding])


def _window(values: Array, window: Window) -> Array:
    array = values[window.start : window.start + window.array_size].reshape(window.shape)
    return array if window.box.shape == window.shape else array[window.box.slices()]


def _read_flat(array: Any, window: Window, target: Array) -> tuple[Any, Callable[[], None] | None]:
    """Start to read a box that lies inside a 1-D array as in an n-dimensional one.

    Returns:
        What to wait for, and what to do then.
    """
    run = window.contiguous_range()
    if run is not None and target.flags.c_contiguous:
        return ts.array(target.reshape(-1)).write(array[run[0] : run[1]]).commit, None
    staged = np.empty(window.array_size, dtype=target.dtype)
    stop = window.start + window.array_size
    write = ts.array(staged).write(array[window.start : stop]).commit

    def copy() -> None:
        target[...] = _window(staged, replace(window, start=0))

    return write, copy
