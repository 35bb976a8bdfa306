"""What reading all of a checkpoint has shown, and how that is collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from dist_checkpointing.checkpoint.handle import Checkpoint
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
    StateMismatchError,
    UnsupportedFormatError,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.checksums import StoredPart, checksum_files, read_table
from dist_checkpointing.format.index import Index, large_tensors
from dist_checkpointing.format.leftovers import noted_removal
from dist_checkpointing.format.seal import Seal, check_config, check_files, unnamed_files
from dist_checkpointing.strategies.verification import (
    cause_of,
    in_words,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Examination:
    """What reading all of a checkpoint has shown.

    Attributes:
        findings: Everything that is damaged, with key, place and file.
        refused: Objects and common state that were not read, because they hold more than plain data
            types.
        remarks: What is strange, and may be intended.
        num_tensors: Number of tensors that were looked at.
        num_parts: Number of chunks and pieces that were read.
        num_bytes: Size of the values that were read.
        num_bytes_compared: Size of those values whose checksum was compared.
        num_objects: Number of cells of sharded objects that were read.
        is_sealed: Whether a seal says which files there should be, and what they hold.
    """

    findings: tuple[Finding, ...] = ()
    refused: tuple[Finding, ...] = ()
    remarks: tuple[Finding, ...] = ()
    num_tensors: int = 0
    num_parts: int = 0
    num_bytes: int = 0
    num_bytes_compared: int = 0
    num_objects: int = 0
    is_sealed: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.findings


class Notes:
    """What has been noticed so far."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.refused: list[Finding] = []
        self.remarks: list[Finding] = []
        self.num_objects = 0
        self.lacks_checksums = False
        self.cells: list[StoredPart] = []

    @contextmanager
    def noting(self, key: str | None = None) -> Iterator[None]:
        """Note what is damaged in the body, and go on."""
        try:
            yield
        except (CorruptCheckpointError, StateMismatchError) as error:
            self.findings += _findings(error, key)
        except RankFailedError as error:
            # Of this process alone: what it met says nothing about the checkpoint.
            raise cause_of(error) from None

    @contextmanager
    def unpickling(self, key: str | None = None) -> Iterator[None]:
        """Note, too, what the body does not unpickle."""
        try:
            with self.noting(key):
                yield
        except UnsupportedFormatError as error:
            self.refused += _findings(error, key)

    def found(self, look: Callable[[], T]) -> T | None:
        """What there is; None, and a note, if that is damaged."""
        found: list[T] = []
        with self.noting():
            found.append(look())
        return found[0] if found else None

    def look_at_files(
        self, folder: Location, seal: Seal | None, rank: int, world_size: int
    ) -> None:
        """Compare the files with what the seal says of them."""
        if seal is None:
            return
        if seal.is_open:
            problem = "tensors are being removed, or a removal was cut off: files are not compared"
            remedy = "Remove them once more."
            self.remarks.append(Finding(problem, path=str(folder), remedy=remedy))
            return
        findings = check_files(seal, folder, sorted(seal.files)[rank::world_size])
        if rank == 0:
            findings += check_config(seal, folder)
            inside, beside = unnamed_files(seal, folder)
            problem = "the seal does not name this file: no save of this checkpoint made it"
            findings += [Finding(problem, path=str(folder / name)) for name in inside]
            self.remarks += [
                Finding("this file is not part of the checkpoint", path=str(folder / name))
                for name in beside
            ]
        # What was found out by reading says more than that the file is another one.
        said = [str(finding.path) for finding in self.findings]
        self.findings += [
            finding for finding in findings if not any(str(finding.path) in path for path in said)
        ]

    def look_at_state(self, checkpoint: Checkpoint) -> None:
        """Read the common state and every cell of every sharded object."""
        with self.unpickling():
            _ = checkpoint.common
        for key, handle in (self.found(lambda: checkpoint.objects) or {}).items():
            for cell in handle:
                with self.unpickling(key):
                    _ = handle[cell]
                    self.num_objects += 1

    def plausible(self, checkpoint: Checkpoint, index: Index, keys: list[str]) -> list[str]:
        """The tensors that the files can hold; the others are damaged, and are not looked at."""
        try:
            checkpoint.reads.require_stored(large_tensors(index, keys), index)
        except CorruptCheckpointError as error:
            self.findings += _findings(error)
            lost = {finding.key for finding in error.findings}
            return [key for key in keys if key not in lost]
        return keys

    def checksums(self, folder: Location, index: Index) -> dict[str, list[StoredPart]]:
        """The parts that have a checksum, by key."""
        parts: dict[str, list[StoredPart]] = {}
        for path in checksum_files(folder):
            try:
                table = read_table(path)
            except CorruptCheckpointError as error:
                self.findings += error.findings
                self.lacks_checksums = True
                continue
            said = table.parts
            self.cells += table.objects
            for part in said:
                # A tensor that is not there any more has no shape to lie in.
                if part.key not in index or part.lies_in(index[part.key].global_shape):
                    parts.setdefault(part.key, []).append(part)
                else:
                    problem = "a checksum of what is no part of the tensor"
                    self.findings.append(Finding(problem, part.key, path=str(path)))
        return parts

    def look_for_lost(
        self, checkpoint: Checkpoint, index: Index, digests: Mapping[str, object]
    ) -> None:
        """Tensors that only the checksums name, in a format without an index."""
        if checkpoint.backend != ("zarr", 1):
            return
        going = noted_removal(checkpoint.folder)
        for key in sorted(set(digests) - set(index)):
            folder = checkpoint.folder / key
            if key in going:
                self.remarks.append(
                    Finding("its removal was cut off", key, remedy="Remove it once more.")
                )
            elif location.is_folder(folder):
                self.findings.append(
                    Finding("its metadata is gone, its chunks are there", key, path=str(folder))
                )
            else:
                self.remarks.append(
                    Finding("has checksums and no files: removed on purpose, or lost", key)
                )

    def look_at_what_others_read(self, checkpoint: Checkpoint) -> None:
        """Our readers have the index; zarr-python and xarray need the consolidated metadata."""
        if checkpoint.backend != ("zarr", 2):
            return
        # Not at the top: the package zarr may be missing.
        from dist_checkpointing.strategies.zarr.v3 import rebuild_index  # noqa: PLC0415

        try:
            rebuild_index(checkpoint.folder)
        except (CorruptCheckpointError, UnsupportedFormatError) as error:
            self.findings += (
                replace(f, problem=f"zarr-python cannot open it, our own readers can: {f.problem}")
                for f in error.findings
            )


def said_once(findings: Sequence[Finding], num_tensors: int) -> tuple[Finding, ...]:
    """The findings; what keeps every single tensor from being read becomes one."""
    alike: dict[tuple[str, str | None], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.problem, finding.path), []).append(finding)
    found: list[Finding] = []
    for same in alike.values():
        keys = {finding.key for finding in same if finding.key is not None}
        if len(keys) >= max(2, num_tensors):
            what = f"nothing: {len(keys)} tensors and objects cannot be read"
            found.append(replace(same[0], key=None, expected=None, found=what))
        else:
            found += same
    return tuple(found)


def _findings(error: Exception, key: str | None = None) -> tuple[Finding, ...]:
    if not isinstance(error, CheckpointingException) or not error.findings:
        return (Finding(f"{type(error).__name__}: {error}", key),)
    return tuple(replace(found, key=found.key or key) for found in in_words(error))
