"""Files of a checkpoint that machines send each other: copies at peers, and what a load needs."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import torch
import xxhash

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointExistsError, CheckpointNotFoundError, Finding
from dist_checkpointing.filesystem import file_writer
from dist_checkpointing.filesystem.location import blocks, fsync_folder, write
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import is_committed
from dist_checkpointing.format.geometry import may_overlap
from dist_checkpointing.format.leftovers import ATTEMPT_NAME, CONFIG_FNAME, attempt_of
from dist_checkpointing.format.seal import SEAL_NAME, Seal, SealedFile
from dist_checkpointing.manager.disks import FastDisks, rows_held
from dist_checkpointing.mapping import ShardedStateDict
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning.items import MetadataIndex
from dist_checkpointing.planning.resharding import plan_load
from dist_checkpointing.threads import in_threads, run_in_background

logger: logging.Logger = logging.getLogger(__name__)
T = TypeVar("T")
_BLOCK_BYTES: Final = 1 << 24
_THREADS: Final = 4
_MOST_SHOWN: Final = 10


class Transfer(NamedTuple):
    """A file that rank ``source`` sends to rank ``target``."""

    file: SealedFile
    source: int
    target: int


def send_files(comm: Comm, folder: Path, transfers: Sequence[Transfer]) -> set[Transfer]:
    """Send files of a folder to the same folder of other machines; those that did not arrive.

    Collective, with the same transfers on all ranks. Each rank sends one file at a time and
    receives one, in blocks. A file is there as a whole, with the digest of the seal if it has one,
    or not at all.
    """
    failed: set[Transfer] = set()
    waiting = [*transfers]
    while waiting:
        free: dict[int, Transfer] = {}
        targets: dict[int, Transfer] = {}
        later: list[Transfer] = []
        for transfer in waiting:
            if transfer.source in free or transfer.target in targets:
                later.append(transfer)
            else:
                free[transfer.source] = targets[transfer.target] = transfer
        longest = max(transfer.file.num_bytes for transfer in free.values())
        sent, received = free.get(comm.rank), targets.get(comm.rank)
        failed |= _send_round(comm, folder, sent, received, longest)
        waiting = later
    return failed


class _Outgoing:
    """A file that is read block by block; zeros are sent for what cannot be read."""

    def __init__(self, folder: Path, transfer: Transfer) -> None:
        self.transfer, self.problem = transfer, ""
        self._path = folder / transfer.file.name

    def block(self, start: int) -> torch.Tensor:
        """The block that begins at ``start``; empty behind the end."""
        size = max(0, min(_BLOCK_BYTES, self.transfer.file.num_bytes - start))
        data = torch.empty(size, dtype=torch.uint8)
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(start)
                if size and file.readinto(data.numpy().data) != size:
                    self.problem = "the file is shorter than it was"
        except OSError as error:
            self.problem = str(error)
        return data.zero_() if self.problem else data


class _Incoming:
    """A file that is written block by block, under another name until it is whole."""

    def __init__(self, folder: Path, transfer: Transfer) -> None:
        self.transfer, self.problem = transfer, ""
        self._path = folder / transfer.file.name
        self._temporary = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}.tmp")
        self._digest = xxhash.xxh3_128()

    def block_bytes(self, start: int) -> int:
        """The size of the block that begins at ``start``."""
        return max(0, min(_BLOCK_BYTES, self.transfer.file.num_bytes - start))

    def write(self, block: torch.Tensor) -> None:
        """Write the next block."""
        data = block.numpy().data
        if self.transfer.file.digest is not None:
            self._digest.update(data)
        try:
            if not self.problem:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._temporary.open("ab") as file:
                    file.write(data)
                    file.flush()
                    if file.tell() == self.transfer.file.num_bytes:
                        os.fsync(file.fileno())
        except OSError as error:
            self.problem = str(error)

    def end(self) -> None:
        """Compare all of it with the digest of the seal, if it has one."""
        if self.transfer.file.digest not in (None, self._digest.hexdigest()):
            self.problem = self.problem or "it is not what was saved"

    def accept(self, *, is_whole: bool) -> None:
        """Give the file its name, or delete it."""
        if is_whole:
            self._temporary.replace(self._path)
            fsync_folder(self._path.parent)
        else:
            self._temporary.unlink(missing_ok=True)


def _started(work: Callable[[], T]) -> Future[T]:
    return run_in_background(work, "peer-block")


def _send_round(
    comm: Comm, folder: Path, sent: Transfer | None, received: Transfer | None, longest: int
) -> set[Transfer]:
    """Send one file and receive another; what did not arrive on any rank."""
    outgoing = None if sent is None else _Outgoing(folder, sent)
    incoming = None if received is None else _Incoming(folder, received)
    # The next block is read, and the last one written, while this one travels.
    reading = _started(partial(outgoing.block, 0)) if outgoing is not None else None
    writing: Future[None] | None = None
    for start in range(0, max(longest, 1), _BLOCK_BYTES):
        block, target, num_bytes, source = torch.empty(0, dtype=torch.uint8), None, 0, None
        if outgoing is not None and reading is not None:
            block = reading.result()
            reading = _started(partial(outgoing.block, start + _BLOCK_BYTES))
            target = outgoing.transfer.target if len(block) else None
        if incoming is not None:
            num_bytes = incoming.block_bytes(start)
            source = incoming.transfer.source if num_bytes else None
        data = comm.shift(block, target, source, num_bytes)
        if writing is not None:
            writing.result()
        if incoming is not None and (num_bytes or not start):
            writing = _started(partial(incoming.write, data))
    if writing is not None:
        writing.result()
    if incoming is not None:
        incoming.end()
    ends = (end for end in (outgoing, incoming) if end is not None and end.problem)
    problems = {end.transfer: end.problem for end in ends}
    all_problems = dict(pair for found in comm.all_gather(problems) for pair in found.items())
    with comm.agreed("naming the files that other machines have sent"):
        if incoming is not None:
            incoming.accept(is_whole=incoming.transfer not in all_problems)
    if comm.rank == 0:
        for transfer, problem in all_problems.items():
            logger.warning(
                "%s of %s was not sent from rank %d to rank %d: %s",
                *(transfer.file.name, folder.name, transfer.source, transfer.target, problem),
            )
    return {*all_problems}


def copies_to_peers(
    files: Sequence[SealedFile], disks: FastDisks, held: Sequence[Collection[int]], copies: int
) -> list[Transfer]:
    """Each disk's part for the next machines of the ring, and what is small for all of them.

    ``held`` are the rows of ``files`` that the disk of each leader has.
    """
    transfers: dict[tuple[int, int], Transfer] = {}
    count = len(disks.leaders)
    for number, leader in enumerate(disks.leaders):
        ring = [(number + distance) % count for distance in range(1, count)]
        others = [peer for peer in ring if disks.machines[peer] != disks.machines[number]]
        nearest = others[:copies]
        for row in sorted(held[leader], key=lambda row: (files[row].name != ATTEMPT_NAME, row)):
            for peer in ring if files[row].digest else nearest:
                target = disks.leaders[peer]
                if row not in held[target]:
                    transfers.setdefault((row, target), Transfer(files[row], leader, target))
    return [*transfers.values()]


def fetch_for_load(
    comm: Comm,
    disks: FastDisks,
    folder: Path,
    seal: Seal,
    others: Sequence[Path],
    stored: Location | None,
    wanted: ShardedStateDict,
    *,
    damaged: Collection[str],
    distrusted: Collection[str],
) -> None:
    """Fetch what the ranks of each disk need to load a step, and what it has not. Collective.

    It comes from other machines, or else from ``others``, further folders of this machine that may
    have it, or from ``stored``, where the same save is in the last place. What is ``damaged`` on
    this rank's disk is fetched again, and if it is ``distrusted`` not from other machines.
    ``folder`` is then a checkpoint with all that the ``wanted`` state dict asks for.

    Raises:
        CheckpointingException: if a file is nowhere, or a disk cannot be written; on all ranks.
    """
    files, what = [*seal.files.values()], f"fetching {folder.name} from other machines"
    bad = {row for row, file in enumerate(files) if file.name in damaged}
    distrusts = {row for row in bad if files[row].name in distrusted and (stored or others)}

    def fetch(needed: set[int]) -> None:
        def share() -> tuple[set[int], set[int], set[int]]:
            held = rows_held(folder, seal) - bad if disks.leads else set[int]()
            return needed, held, bad & distrusts

        shares = comm.exchange(what, share)
        transfers: list[Transfer] = []
        nowhere: set[int] = set()
        for target in disks.leaders:
            group = [r for r, leader in enumerate(disks.leader_of_rank) if leader == target]
            missing = set[int]().union(*(shares[r][0] for r in group)) - shares[target][1]
            for row in sorted(missing, key=lambda row: (files[row].name != ATTEMPT_NAME, row)):
                sources = [leader for leader in disks.leaders if row in shares[leader][1]]
                if sources and row not in shares[target][2]:
                    source = sources[row % len(sources)]
                    transfers.append(Transfer(files[row], source, target))
                elif target == comm.rank:
                    nowhere.add(row)
        failed = send_files(comm, folder, transfers)
        arrived = {transfer.file.name for transfer in transfers if transfer.target == comm.rank}
        lost = {transfer.file.name for transfer in failed if transfer.target == comm.rank}
        bad.difference_update(r for r, file in enumerate(files) if file.name in arrived - lost)
        rest = sorted(lost.union(files[row].name for row in nowhere))
        with comm.agreed(what):
            here = [(path, rows_held(path, seal)) for path in others] if rest else []
            origins: dict[str, Any] = {
                file.name: next((path for path, rows in here if row in rows), stored)
                for row, file in enumerate(files)
            }
            if nowhere_else := [n for n in rest if origins[n] is None]:
                findings = [Finding("no machine has this file", path=name) for name in nowhere_else]
                raise CheckpointNotFoundError(f"{folder.name} is not whole", findings[:_MOST_SHOWN])
            for name in rest:
                (folder / name).unlink(missing_ok=True)  # it is damaged
            in_threads(lambda name: copy_file(origins[name] / name, folder / name), rest, _THREADS)
            bad.difference_update(r for r, file in enumerate(files) if file.name in rest)

    def refuse_other() -> None:
        if attempt_of(folder) not in (None, seal.attempt):
            raise CheckpointExistsError(f"another save of this step is on the disk: {folder}")

    with comm.agreed(what):
        refuse_other()
    fetch({row for row, file in enumerate(files) if file.digest is not None})
    with comm.agreed(what):
        if disks.leads and not is_committed(folder):
            write(folder / SEAL_NAME, seal.to_json())
            write(folder / CONFIG_FNAME, json.dumps(dict(seal.config)).encode())
    needed: set[int] = set()
    with comm.agreed(what):
        names = {*_files_of(Checkpoint.open(folder), wanted)}
        needed = {row for row, file in enumerate(files) if file.name in names}
    fetch(needed)


def copy_file(source: Location, target: Location) -> None:
    """Copy a file, durably but for its name."""
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
    file = file_writer.create(target.parent, target.name)
    try:
        for block in blocks(source, file.block_bytes):
            file.write([block], len(block), stays=True)
    except BaseException:
        file.give_up()
        raise
    file.close(is_durable=True)


def _files_of(checkpoint: Checkpoint, wanted: Any) -> Iterable[str]:
    """The files of what is stored of the wanted tensors and objects, as far as these fit."""
    index, parts = checkpoint.index, StateDictParts.of(wanted)
    cells = [
        MetadataIndex(leaf.key, tuple(leaf.global_offset))
        for leaf in parts.objects.values()
        if index.objects.get(leaf.key) == tuple(leaf.global_shape)
    ]
    leaves = [
        leaf.without_data()
        for leaf in parts.tensors.values()
        if leaf.key in index and tuple(index[leaf.key].global_shape) == tuple(leaf.global_shape)
    ]
    plan, _ = plan_load(index, leaves)
    chunks = dict.fromkeys(item.storage_index for item in plan.items())
    for leaf in leaves:  # a load that verifies reads all pieces in which there may be something
        for number, part in enumerate(index[leaf.key].pieces or ()):
            if may_overlap(part, (leaf.box, leaf.flat_range)):
                chunks[MetadataIndex(leaf.key, part[0].offset, number)] = None
    return filter(None, checkpoint.reads.files(index, [*chunks, *cells]))
