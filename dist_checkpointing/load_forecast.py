"""What a load would cost, worked out from the index and the plan alone: nothing is read for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dist_checkpointing.checkpoint import Checkpoint
from dist_checkpointing.errors import Finding, StateMismatchError, UnsupportedFormatError
from dist_checkpointing.geometry import Window, ravel_offset
from dist_checkpointing.index import Index
from dist_checkpointing.options import StorageOptions
from dist_checkpointing.planning import MetadataIndex, ReadItem
from dist_checkpointing.planning.reads import WantedShard, plan_load
from dist_checkpointing.storage import ChunkPlace, StorageReader
from dist_checkpointing.strategies.base import PlannedLoadStrategy
from dist_checkpointing.template import StoredTensors, compare
from dist_checkpointing.wanted_parts import RankWants, unknown_objects

_PAGE_BYTES = 4096
_SCRATCH_BYTES = 2**22
"""Small neighbours are read together into a buffer of at most this size."""


@dataclass(frozen=True, slots=True)
class RankCost:
    """What a load costs some ranks, each of them.

    Attributes:
        ranks: that want the same.
        num_tensors: shards to fill.
        wanted_bytes: of all shards.
        read_bytes: that storage has to deliver for them; see ``bytes_read``.
        num_reads: boxes to copy.
        files: that are opened.
        peak_bytes: memory for the shards and for what is read on the way to them.
    """

    ranks: tuple[int, ...]
    num_tensors: int
    wanted_bytes: int
    read_bytes: int
    num_reads: int
    files: frozenset[str]
    peak_bytes: int

    @property
    def amplification(self) -> float:
        """Bytes read for each byte wanted."""
        return self.read_bytes / self.wanted_bytes if self.wanted_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """A load that was not done.

    Attributes:
        costs: of all ranks, those that want the same together.
        findings: why it would fail; nothing if it would not.
        unasked: keys that no rank wants.
    """

    costs: tuple[RankCost, ...]
    findings: tuple[Finding, ...]
    unasked: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks load."""
        return sum(len(cost.ranks) for cost in self.costs)

    @property
    def wanted_bytes(self) -> int:
        """Of all ranks."""
        return sum(cost.wanted_bytes * len(cost.ranks) for cost in self.costs)

    @property
    def read_bytes(self) -> int:
        """Of all ranks, each for itself."""
        return sum(cost.read_bytes * len(cost.ranks) for cost in self.costs)

    @property
    def shared_read_bytes(self) -> int:
        """Of all ranks, if those that want the same read it once and pass it on."""
        return sum(cost.read_bytes for cost in self.costs)

    @property
    def files(self) -> frozenset[str]:
        """That any rank opens."""
        return frozenset().union(*(cost.files for cost in self.costs))


def forecast_of(checkpoint: Checkpoint, wants: Sequence[RankWants]) -> Forecast:
    """The forecast for an open checkpoint.

    Raises:
        UnsupportedFormatError: if its strategy does not tell where things are.
    """
    strategy = checkpoint.reads.sharded
    if not isinstance(strategy, PlannedLoadStrategy):
        finding = Finding("its strategy makes no plans", found=str(strategy))
        raise UnsupportedFormatError("a load of this checkpoint cannot be planned", [finding])
    reader = strategy.make_reader(checkpoint.path)
    index = checkpoint.reads.index_for(reader, checkpoint.index)
    reader.set_up_storage_reader(index, rank=0, world_size=1)
    found = forecast(index, reader, wants, strategy.options)
    lost = unknown_objects(wants, checkpoint.objects) if any(w.objects for w in wants) else []
    return replace(found, findings=(*found.findings, *lost))


def forecast(
    index: Index, reader: StorageReader, wants: Sequence[RankWants], options: StorageOptions
) -> Forecast:
    """Plan the load of every rank and add up what it takes.

    Args:
        index: of the checkpoint.
        reader: that is set up for it; asked only where chunks are.
        wants: of all ranks.
        options: of the load.
    """
    stored = StoredTensors(index)
    findings: dict[tuple[str, str | None], Finding] = {}
    costs = []
    maps_files = options.maps_files(reader.checkpoint_dir)
    places: dict[MetadataIndex, ChunkPlace | None] = {}
    asked: set[str] = set()
    for want in wants:
        asked |= {leaf.key for leaf in want.tensors.values()}
        misfits: list[Finding] = []
        try:
            compare(want.tensors, stored, "error", planner_knows_keys=False)
        except StateMismatchError as error:
            misfits += error.findings
        unfit = {finding.key for finding in misfits if finding.problem != "dtype differs"}
        fitting = [leaf for leaf in want.tensors.values() if leaf.key not in unfit]
        shards = [
            WantedShard(leaf.key, leaf.box, leaf.flat_range, number)
            for number, leaf in enumerate(fitting)
        ]
        items, uncovered = plan_load(index, shards)
        for finding in (*misfits, *uncovered):
            known = findings.setdefault((finding.problem, finding.key), finding)
            ranks = tuple(sorted({*known.ranks, *want.ranks}))
            findings[finding.problem, finding.key] = replace(known, ranks=ranks)
        new = list(dict.fromkeys(i.storage_index for i in items if i.storage_index not in places))
        places.update(zip(new, reader.places(new), strict=True))
        wanted_bytes = sum(
            _num_elements(shard) * leaf.dtype.itemsize
            for shard, leaf in zip(shards, fitting, strict=True)
        )
        costs.append(
            _cost(want, items, index, places, wanted_bytes, options, maps_files=maps_files)
        )
    result = Forecast(
        tuple(costs), tuple(findings.values()), tuple(key for key in index if key not in asked)
    )
    lost = _missing_files(result.files, reader.checkpoint_dir)
    return replace(result, findings=(*result.findings, *lost))


def _num_elements(shard: WantedShard) -> int:
    if shard.flat_range is not None:
        return shard.flat_range[1] - shard.flat_range[0]
    return shard.box.num_elements


def _cost(
    want: RankWants,
    items: Sequence[ReadItem],
    index: Index,
    places: Mapping[MetadataIndex, ChunkPlace | None],
    wanted_bytes: int,
    options: StorageOptions,
    *,
    maps_files: bool,
) -> RankCost:
    read_bytes = 0
    whole_chunks: dict[MetadataIndex, int] = {}
    buffers: list[int] = []
    files = set()
    for item in items:
        itemsize = index[item.storage_index.fqn].dtype.itemsize
        place = places[item.storage_index]
        if place is not None and place.file is not None:
            files.add(place.file)
        if place is not None and place.is_read_whole:
            whole_chunks[item.storage_index] = place.num_bytes + item.storage.array_size * itemsize
            continue
        read_bytes += bytes_read(item.storage, itemsize, maps_files=maps_files)
        if item.storage.contiguous_range() is None and not maps_files:
            buffers.append(_span(item.storage) * itemsize)
    for chunk in whole_chunks:
        place = places[chunk]
        read_bytes += 0 if place is None else place.num_bytes
    at_once = sorted([*whole_chunks.values()], reverse=True)[: options.threads]
    copied = min(options.buffer_bytes, sum(sorted(buffers, reverse=True)[: options.threads]))
    scratch = min(_SCRATCH_BYTES, wanted_bytes)
    return RankCost(
        want.ranks,
        len(want.tensors),
        wanted_bytes,
        read_bytes,
        len(items),
        frozenset(files),
        wanted_bytes + max(sum(at_once), copied, scratch),
    )


def bytes_read(window: Window, itemsize: int, *, maps_files: bool) -> int:
    """Bytes that have to come from storage for a window of a chunk that can be read in part.

    A window that is one run is read as it is. Of others a mapped file delivers whole pages of 4 KiB
    (the read-ahead of the system not counted), and a file that is read into buffers delivers
    everything from the first element to the last.

    Args:
        window: in elements of the chunk.
        itemsize: bytes of an element.
        maps_files: whether files are mapped.
    """
    wanted = window.box.num_elements * itemsize
    if window.contiguous_range() is not None:
        return wanted
    span = _span(window) * itemsize
    run = 1
    skipped = 0
    for extent, full in zip(reversed(window.box.shape), reversed(window.shape), strict=True):
        skipped = run * (full - extent)
        run *= extent
        if extent != full:
            break
    if not maps_files or skipped * itemsize < _PAGE_BYTES:
        return span
    runs = window.box.num_elements // run
    # A run begins anywhere in a page, and so touches one more than it fills.
    return min(span, wanted + runs * _PAGE_BYTES)


def _span(window: Window) -> int:
    last = tuple(stop - 1 for stop in window.box.stop)
    first = ravel_offset(window.box.offset, window.shape)
    return ravel_offset(last, window.shape) - first + 1


def _missing_files(files: frozenset[str], folder: Path) -> list[Finding]:
    return [
        Finding("a file that would be read is missing", path=str(folder / name))
        for name in sorted(files)
        if not (folder / name).is_file()
    ]
