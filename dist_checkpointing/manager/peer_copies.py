"""Files of a checkpoint that machines send each other: copies at peers, and what a load needs."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import uuid
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import xxhash

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException, CorruptCheckpointError
from dist_checkpointing.filesystem import location
from dist_checkpointing.format.commit import is_committed
from dist_checkpointing.format.leftovers import ATTEMPT_NAME, CONFIG_FNAME
from dist_checkpointing.format.seal import SEAL_NAME, Seal, SealedFile, read_seal
from dist_checkpointing.manager.disks import FastDisks, rows_held
from dist_checkpointing.manager.run_folder import RunFolder
from dist_checkpointing.mapping.state_dict_parts import StateDictParts
from dist_checkpointing.planning.resharding import plan_load

logger: logging.Logger = logging.getLogger(__name__)
_BLOCK_BYTES: Final = 1 << 24


class Transfer(NamedTuple):
    """A file that rank ``source`` sends to rank ``target``."""

    file: SealedFile
    source: int
    target: int


def send_files(comm: Comm, folder: Path, transfers: Sequence[Transfer]) -> int:
    """Send files of a folder to the same folder of other machines; how many did not arrive.

    Collective, with the same transfers on all ranks. Each rank sends one file at a time and
    receives one, in blocks. A file is there as a whole, with the digest of the seal if it has one,
    or not at all.
    """
    num_failed, waiting = 0, [*transfers]
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
        num_failed += _send_round(
            comm, folder, free.get(comm.rank), targets.get(comm.rank), longest
        )
        waiting = later
    return num_failed


class _Outgoing:
    """A file that is read block by block; zeros are sent for what cannot be read."""

    def __init__(self, folder: Path, transfer: Transfer) -> None:
        self.transfer, self.problem = transfer, ""
        self._path = folder / transfer.file.name

    def block(self, start: int) -> torch.Tensor:
        """The block that begins at ``start``; empty behind the end."""
        size = max(0, min(_BLOCK_BYTES, self.transfer.file.num_bytes - start))
        data = torch.zeros(size, dtype=torch.uint8)
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(start)
                if size and file.readinto(data.numpy().data) != size:
                    self.problem = "the file is shorter than it was"
        except OSError as error:
            self.problem = str(error)
        return data


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
            location.fsync_folder(self._path.parent)
        else:
            self._temporary.unlink(missing_ok=True)


def _send_round(
    comm: Comm, folder: Path, sent: Transfer | None, received: Transfer | None, longest: int
) -> int:
    """Send one file and receive another; the number of files that did not arrive, on all ranks."""
    outgoing = None if sent is None else _Outgoing(folder, sent)
    incoming = None if received is None else _Incoming(folder, received)
    for start in range(0, max(longest, 1), _BLOCK_BYTES):
        block, target, num_bytes, source = torch.empty(0, dtype=torch.uint8), None, 0, None
        if outgoing is not None:
            block = outgoing.block(start)
            target = outgoing.transfer.target if len(block) else None
        if incoming is not None:
            num_bytes = incoming.block_bytes(start)
            source = incoming.transfer.source if num_bytes else None
        data = comm.shift(block, target, source, num_bytes)
        if incoming is not None and (num_bytes or not start):
            incoming.write(data)
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
    return len(all_problems)


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


class PeerCopies:
    """Copies what each machine has saved to others, in a thread of each rank.

    Making one is collective, as are ``copy`` (behind the training) and ``finish``. ``waiting`` are
    the steps that are not copied yet, which retention must leave; it is replaced, never changed.
    """

    def __init__(self, comm: Comm, near: RunFolder, disks: FastDisks, copies: int) -> None:
        self._comm, self._near, self._disks, self._copies = comm.duplicate(), near, disks, copies
        self.waiting: tuple[int, ...] = ()
        self._changed = threading.Lock()
        self._steps: queue.Queue[int | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="peer-copies", daemon=True)
        self._thread.start()

    def copy(self, step: int) -> None:
        """Copy a step, after those before it."""
        with self._changed:
            self.waiting = (*self.waiting, step)
        self._steps.put(step)

    def finish(self) -> None:
        """Wait for all copies, and end the thread."""
        self._steps.put(None)
        self._thread.join()
        self._comm.close()

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._copy(step)
            except (OSError, CheckpointingException) as error:
                logger.warning("step %d has no copies at peers: %s", step, error)
            finally:
                with self._changed:
                    self.waiting = self.waiting[1:]

    def _copy(self, step: int) -> None:
        folder, what = self._near.folder(step), f"copying step {step} to peers"

        def look() -> tuple[str, set[int]] | None:
            try:
                seal = read_seal(folder) if is_committed(folder) else None
            except CorruptCheckpointError:
                return None
            rows = rows_held(folder, seal) if seal and self._disks.leads else set[int]()
            return None if seal is None else (seal.attempt, rows)

        held = self._comm.exchange(what, look)
        if any(part is None or part[0] != (held[0] or ("",))[0] for part in held):
            logger.warning("step %d has no copies at peers: not every disk has noted it", step)
            return
        seal = read_seal(folder)
        assert seal is not None
        rows = [part[1] for part in held if part is not None]
        files = [*seal.files.values()]
        send_files(self._comm, folder, copies_to_peers(files, self._disks, rows, self._copies))


def fetch_for_load(
    comm: Comm, disks: FastDisks, near: RunFolder, step: int, seal: Seal, where: Any, wanted: Any
) -> None:
    """Fetch from the other machines what this one needs to load a step, and has not. Collective.

    ``where()`` is the place that a rank reads then; ``wanted`` is the state dict that it loads.
    What no machine has is left to the store.
    """
    folder, files = near.folder(step), [*seal.files.values()]
    what = f"fetching step {step} from other machines"

    def fetch(needed: set[int]) -> None:
        shares = comm.exchange(
            what, lambda: (needed, rows_held(folder, seal) if disks.leads else set[int]())
        )
        transfers = []
        for target in disks.leaders:
            group = [r for r, leader in enumerate(disks.leader_of_rank) if leader == target]
            missing = set[int]().union(*(shares[r][0] for r in group)) - shares[target][1]
            for row in sorted(missing, key=lambda row: (files[row].name != ATTEMPT_NAME, row)):
                sources = [leader for leader in disks.leaders if row in shares[leader][1]]
                if sources:
                    source = sources[row % len(sources)]
                    transfers.append(Transfer(files[row], source, target))
        send_files(comm, folder, transfers)

    fetch({row for row, file in enumerate(files) if file.digest is not None})
    record = comm.from_rank0(what, near.record)
    with comm.agreed(what):
        if disks.leads and rows_held(folder, seal) and not is_committed(folder):
            location.write(folder / SEAL_NAME, seal.to_json())
            location.write(folder / CONFIG_FNAME, json.dumps(dict(seal.config)).encode())
            near.catch_up_with(record)
    needed: set[int] = set()
    with comm.agreed(what):
        names = {*_files_of(Checkpoint.open(where()), wanted)}
        needed = {row for row, file in enumerate(files) if file.name in names}
    fetch(needed)


def _files_of(checkpoint: Checkpoint, wanted: Any) -> Iterable[str]:
    """The files of what is stored of the wanted tensors, as far as these fit."""
    index = checkpoint.index
    leaves = [
        leaf.without_data()
        for leaf in StateDictParts.of(wanted).tensors.values()
        if leaf.key in index and tuple(index[leaf.key].global_shape) == tuple(leaf.global_shape)
    ]
    plan, _ = plan_load(index, leaves)
    chunks = [*dict.fromkeys(item.storage_index for item in plan.items())]
    return filter(None, checkpoint.reads.files(index, chunks))
