"""Finds and opens what a user names: a checkpoint, a step of a run, or files of tensors.

A run is of this library or of Megatron; ``RUN@1000`` and ``RUN@latest`` name steps of it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Final

from typer import Argument, Option

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    Finding,
    counted,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.locks import LOCK_NAME, Holder, holder_of
from dist_checkpointing.filesystem.object_store import Location, ObjectPath
from dist_checkpointing.filesystem.object_store_locks import CLAIMS, last_known_holder
from dist_checkpointing.format import leftovers
from dist_checkpointing.format.commit import is_committed, read_commit, read_config
from dist_checkpointing.format.run_steps import LATEST, is_run, located, step_folders
from dist_checkpointing.format.seal import read_seal

CheckpointArgument = Annotated[
    Path,
    Argument(
        parser=as_location,
        help="Folder or URL of a checkpoint; RUN@1000 or RUN@latest is a step of a run.",
    ),
]
Trusted = Annotated[
    bool, Option("--trusted", help="Unpickle anything: lets the files run any code.")
]
Memory = Annotated[str, Option(metavar="SIZE", help="Memory limit of the whole process.")]

Uses = Mapping[str, location.FileUse]
"""The files of a folder, by relative name."""

_FOREIGN: Final[Sequence[tuple[str, tuple[str, ...], str]]] = (
    (
        "an Orbax checkpoint (JAX)",
        ("_CHECKPOINT_METADATA", "_METADATA", "[0-9]*/_CHECKPOINT_METADATA"),
        "It is not read here: export it with Orbax, for example to safetensors.",
    ),
    (
        "Megatron's older format (torch)",
        ("mp_rank_*/*.pt",),
        "Each of its .pt files opens by itself; dist checkpoints need --ckpt-format torch_dist.",
    ),
    (
        "an unfinished save of torch DCP: .metadata, which it writes last, is missing",
        ("__*_*.distcp",),
        "Load an older checkpoint.",
    ),
    (
        "a Hugging Face model of pickled files",
        ("pytorch_model*.bin", "pytorch_model*.bin.index.json", "adapter_model.bin"),
        "Each of its .bin files opens by itself.",
    ),
    ("a Hugging Face folder without weights", ("config.json", "tokenizer.json"), ""),
    (
        "a zarr or TensorStore database without a checkpoint",
        ("zarr.json", ".zgroup", ".zarray", "manifest.ocdbt"),
        "",
    ),
    ("a folder of torch.save files", ("*.pt", "*.pth", "*.ckpt"), "Each opens by itself."),
)
"""What other folders are: in words, the files by which they are known, and what to do."""


@dataclass(frozen=True, slots=True)
class Files:
    """The number of files, and their bytes.

    Attributes:
        num_bytes_on_disk: Bytes of their disk blocks, which are fewer for files with holes.
        num_bytes_shared: Bytes of those that have a name elsewhere, as in other checkpoints.
    """

    num_files: int = 0
    num_bytes: int = 0
    num_bytes_on_disk: int = 0
    num_bytes_shared: int = 0

    @classmethod
    def of(cls, uses: Collection[location.FileUse]) -> Files:
        return cls(
            len(uses),
            sum(use.num_bytes for use in uses),
            sum(use.num_bytes_stored for use in uses),
            sum(use.num_bytes for use in uses if use.inode is not None),
        )

    def own_text(self) -> str:
        """How much of it is shared with nothing else; empty if nothing is shared."""
        if not self.num_bytes_shared:
            return ""
        part, whole = map(bytes_text, (self.num_bytes - self.num_bytes_shared, self.num_bytes))
        return f"{part} of {whole}, the rest is shared with other checkpoints"


def count_files(folder: Location) -> Files:
    return Files.of(location.use_below(folder).values())


class StepState(Enum):
    WHOLE = "whole"  # all files have the sizes that the save has sealed
    COMMITTED = "committed"  # no seal says what the files should be
    SAVING = "being saved"
    UNFINISHED = "unfinished"
    DAMAGED = "damaged"
    FOREIGN = "no checkpoint"

    @property
    def is_checkpoint(self) -> bool:
        return self in (StepState.WHOLE, StepState.COMMITTED, StepState.DAMAGED)


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step of a run.

    Attributes:
        name: Number of the step as text; "release" for a model that Megatron has converted.
        saved_at: Time of the commit (seconds since 1970), or of the begin of the save.
        begun_at: When the save began, as far as that was noted.
        inodes: Device, inode and bytes of its files.
    """

    name: str
    folder: Location
    state: StepState
    saved_at: float
    files: Files
    begun_at: float | None
    inodes: frozenset[tuple[int, int, int]]


def look_at(name: str, folder: Location, uses: Uses | None = None) -> RunStep:
    """One step, in which these files are; without them they are listed."""
    uses = location.use_below(folder) if uses is None else uses
    begun_at = max(
        (use.modified for path, use in uses.items() if path.endswith(leftovers.ATTEMPT_NAME)),
        default=None,
    )
    times = [use.modified for use in uses.values()]
    if isinstance(folder, Path):
        times.append(folder.stat().st_mtime)
    commit = uses.get(leftovers.CONFIG_FNAME) or uses.get(leftovers.DCP_METADATA_NAME)
    saved_at = begun_at or max(times, default=time.time()) if commit is None else commit.modified
    inodes = ((*use.inode, use.num_bytes) for use in uses.values() if use.inode is not None)
    files, state = Files.of(uses.values()), state_of(folder, uses)
    return RunStep(name, folder, state, saved_at, files, begun_at, frozenset(inodes))


def state_of(folder: Location, uses: Uses) -> StepState:
    try:
        if leftovers.CONFIG_FNAME in uses or is_committed(folder):
            commit = read_commit(folder)
            if commit is None:
                read_config(folder)
            data = "" if commit is None else f"{commit.data}/"
            seal = read_seal(folder / data)
            if seal is None or seal.is_open:
                return StepState.COMMITTED
            sizes = {name: use.num_bytes for name, use in uses.items()}
            sealed = seal.files.items()
            is_whole = all(sizes.get(data + name) == file.num_bytes for name, file in sealed)
            return StepState.WHOLE if is_whole else StepState.DAMAGED
    except CorruptCheckpointError:
        return StepState.DAMAGED
    if (LOCK_NAME in uses or isinstance(folder, ObjectPath)) and holder_at(folder) is not None:
        return StepState.SAVING
    is_begun = leftovers.attempt_of(folder) is not None or bool(location.names_in(folder / CLAIMS))
    return StepState.UNFINISHED if is_begun else StepState.FOREIGN


def holder_at(folder: Location) -> Holder | None:
    """Who is saving into a folder; None if nobody seems to, or if that cannot be read."""
    if isinstance(folder, Path):
        return holder_of(folder)
    with suppress(CorruptCheckpointError):
        return last_known_holder(folder)
    return None


# Opening.


def open_named(path: Location, *, trusted: bool = False) -> Checkpoint:
    """Open a checkpoint, a step of a run, or what another program has saved."""
    place = located(path)
    with explaining(place):
        return Checkpoint.open(place, trusted=trusted)


@contextmanager
def explaining(path: Location) -> Iterator[None]:
    """Say what there is if the body finds no checkpoint at a path."""
    try:
        yield
    except CheckpointNotFoundError as error:
        problem, remedy = _what_it_is(path)
        if not problem:
            raise
        finding = Finding(problem, path=str(path), remedy=remedy or None)
        message = f"{path} is not a distributed checkpoint"
        raise CheckpointNotFoundError(message, [finding]) from error


def _what_it_is(path: Location) -> tuple[str, str]:
    """What a path is instead of a checkpoint, and what to do; empty if nobody knows."""
    if isinstance(path, Path) and not path.is_dir():
        return "", ""
    if isinstance(path, Path) and (path / leftovers.ATTEMPT_NAME).exists():
        holder = holder_of(path)
        now = f"it is being saved now, by process {holder.pid} on {holder.host}" if holder else ""
        return now, f"dckpt ls {path} --follow tells when it is done."
    if is_run(path):
        number = len(step_folders(path))
        remedy = f"dckpt ls {path} lists them; name one, such as {path}@{LATEST}."
        return f"it is a run with {counted(number, 'step')}", remedy if number else ""
    if not isinstance(path, Path):
        return "", ""
    folders_inside = sorted(inside for inside in path.iterdir() if inside.is_dir())
    for what, holds in (("checkpoints", is_committed), ("runs", is_run)):
        names = [inside.name for inside in folders_inside if holds(inside)]
        if names:
            return f"it holds {what}: {', '.join(names[:8])}", "Name one of them."
    found = (row for row in _FOREIGN if any(any(path.glob(pattern)) for pattern in row[1]))
    what, _, remedy = next(found, ("", (), ""))
    return f"it is {what}" if what else "", remedy
