"""What a save would write, and a checkpoint that it may share files with already holds.

A part of a plan is the same as one of the base if its key, box, dtype and 128-bit digest are. Each
rank reads the digests of the keys that it writes, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dist_checkpointing.errors import CorruptCheckpointError
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.format.checksums import (
    ChecksumColumns,
    Digest,
    Uint64s,
    bytes_of,
    columns_of,
    digest_of,
    digest_of_array,
    read_digests,
    upper_name,
)
from dist_checkpointing.format.geometry import row_bytes
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.leftovers import CONFIG_FNAME, is_in_attempt
from dist_checkpointing.format.seal import Seal, check_files, read_seal
from dist_checkpointing.mapping import tensor_memory
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.planning.shard_table import Bools, Int64s, ShardTable
from dist_checkpointing.storage.interface import StorageReader
from dist_checkpointing.storage.options import StorageOptions
from dist_checkpointing.storage.staging import HostBlocks
from dist_checkpointing.strategies.safe_pickle import serialize
from dist_checkpointing.threads import in_threads

logger: logging.Logger = logging.getLogger(__name__)
_LARGE_BYTES = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class BaseParts:
    """The base of a save, and how its parts fit the rows of a plan of one rank.

    Whether it has the key of each row with the same dtype, and a part with the same box; and the
    digest of that, ``[rows, 2]``, upper half and checksum.
    """

    folder: Path
    seal: Seal
    index: Index
    same_dtype: Bools
    same_box: Bools
    digests: Uint64s

    def is_in_place(self) -> bool:
        """Whether the base is still the same save, committed: no file of another one was shared."""
        try:
            return is_in_attempt(self.folder, self.seal.attempt) and local_folder.is_file(
                self.folder / CONFIG_FNAME
            )
        except OSError:
            return False


def open_base(reader: StorageReader, table: ShardTable) -> BaseParts | None:
    """What a base has of the key, box and dtype of rows; None if it has no digests.

    Raises:
        CorruptCheckpointError: if the base is damaged.
        OSError: if it cannot be read.
    """
    folder = reader.checkpoint_dir
    seal = read_seal(folder)
    used = sorted({table.names[number] for number in np.unique(table.keys).tolist()})
    tables = [] if seal is None or seal.is_open else seal.tables_with(used)
    if seal is None or any(upper_name(name) not in seal.files for name in tables):
        logger.info("nothing is shared with %s, which has no 128-bit digests", folder)
        return None
    describing = [name for name in reader.describing_names(used) if name in seal.files]
    found = check_files(seal, folder, [*describing, *tables, *map(upper_name, tables)])
    if found:
        raise CorruptCheckpointError("the base is damaged", found)
    index = reader.read_metadata()
    same_dtype = _has_same_dtype(table, index)
    same_box = np.zeros(len(table), dtype=np.bool_)
    digests = np.zeros((len(table), 2), dtype=np.uint64)
    own = _places(table)
    row_of = dict(zip(own, range(len(own)), strict=True))
    for name in tables:
        stored, uppers = read_digests(folder, name)
        for position, place in enumerate(_places(stored)):
            row = row_of.get(place)
            if row is not None:
                same_box[row] = same_dtype[row]
                digests[row] = uppers[position], stored.digests[position]
    return BaseParts(folder, seal, index, same_dtype, same_box, digests)


def _places(table: ShardTable | ChecksumColumns) -> list[tuple[str, bytes]]:
    """Key and box of each row, in a form that can be compared."""
    ndim = table.ndim.astype(np.int64)
    columns = [ndim, table.is_object.astype(np.int64), *table.flat.T]
    boxes = row_bytes(columns, (table.offsets, table.shapes), ndim)
    pairs = zip(table.keys.tolist(), boxes, strict=True)
    return [(table.names[key], bytes(box)) for key, box in pairs]


def _has_same_dtype(table: ShardTable, index: Index) -> Bools:
    numbers, types = index.dtypes_of(table.names)
    stored = [None if (dtype := types[at]) is None else dtype.name for at in numbers.tolist()]
    cells = [name if name in index.objects else None for name in table.names]
    own = [table.names[number] for number in table.dtypes.tolist()]
    return np.array(
        [
            cells[key] is not None if is_object else stored[key] == dtype
            for key, dtype, is_object in zip(
                table.keys.tolist(), own, table.is_object.tolist(), strict=True
            )
        ],
        dtype=np.bool_,
    )


class PlanDigests:
    """Digests of rows of a plan, made from the data that the planner has.

    Attributes:
        known: ``[rows]``, which are known.
        columns: ``[rows, 2]``, upper halves and checksums of those.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, options: StorageOptions) -> None:
        self.known: Bools = np.zeros(len(plan.table), dtype=np.bool_)
        self.columns: npt.NDArray[np.uint64] = np.zeros((len(plan.table), 2), dtype=np.uint64)
        self._table, self._options = plan.table, options
        self._plan, self._planner = plan, planner

    @cached_property
    def _data_of(self) -> Callable[[int], torch.Tensor | object]:
        return self._planner.data_of(self._plan)

    def add(self, rows: Int64s) -> None:
        if not len(rows):
            return
        is_large = self._table.num_bytes[rows] >= _LARGE_BYTES
        small, large = rows[~is_large].tolist(), rows[is_large].tolist()
        digests: dict[int, bytes] = {}
        waiting: list[int] = []
        # Many small parts are work for the interpreter: threads would only take turns.
        made = [*map(self._digest, small), *in_threads(self._digest, large, self._options.threads)]
        for row, digest in zip([*small, *large], made, strict=True):
            if digest is None:
                waiting.append(row)
            else:
                digests[row] = digest
        digests.update(self._digests_of_copies(waiting))
        order = np.array(list(digests), dtype=np.int64)
        self.columns[order] = columns_of(list(digests.values()))
        self.known[order] = True

    def digest(self, row: int) -> bytes | None:
        """The digest of a row, if it is known."""
        return self.columns[row].astype(">u8").tobytes() if self.known[row] else None

    def begins_with(self, row: int, head: bytes) -> bool:
        """Whether a tensor begins with these bytes."""
        data = self._data_of(row)
        assert isinstance(data, torch.Tensor)
        values = data.detach().contiguous().reshape(-1)[: len(head) // data.dtype.itemsize]
        return bytes_of(tensor_memory.as_numpy(values.cpu().resolve_conj().resolve_neg())) == head

    def _digest(self, row: int) -> bytes | None:
        """The digest of a row; None if its values must be copied from elsewhere first."""
        data = self._data_of(row)
        if self._table.is_object[row]:
            value = serialize(data, f"the ShardedObject {self._table.key(row)!r}")
            return digest_of(value, len(value))
        assert isinstance(data, torch.Tensor)
        array = tensor_memory.fillable(data.detach().contiguous(), data.dtype)
        return None if array is None else digest_of_array(array)

    def _digests_of_copies(self, rows: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """The digests of tensors on GPUs, and of those whose memory holds other values."""

        def tensors() -> Iterator[torch.Tensor]:
            for row in rows:
                data = self._data_of(row)
                assert isinstance(data, torch.Tensor)
                yield data

        copies = HostBlocks(self._options.buffer_bytes, lambda: None).of(tensors())
        for number, blocks in groupby(copies, key=itemgetter(0)):
            digest = Digest()
            for _, block in blocks:
                values = block.detach().resolve_conj().resolve_neg().contiguous()
                digest.update(bytes_of(tensor_memory.as_numpy(values)))
            yield rows[number], digest.digest()
