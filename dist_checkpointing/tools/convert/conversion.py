"""convert: from a checkpoint or files of tensors into another, within a budget of memory."""

from __future__ import annotations

import errno
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any

from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
    StrategyNotFoundError,
    hint,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_local_folder, as_location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.removal import remove_checkpoint
from dist_checkpointing.planning.chunking import RowBlockLayout
from dist_checkpointing.planning.recipe import Derivation, Recipe
from dist_checkpointing.serialization.save import save_with_hooks
from dist_checkpointing.serialization.save_folder import SaveHooks
from dist_checkpointing.storage.fingerprints import fingerprints_by_reading
from dist_checkpointing.storage.progress import Meter, ProgressOption
from dist_checkpointing.strategies import safetensors_folder, torch_file
from dist_checkpointing.strategies.registry import StrategyAction, available_strategies
from dist_checkpointing.strategies.tensor_files import TensorFiles, TensorRow
from dist_checkpointing.tools.convert.plan import (
    DEFAULT_MEMORY_BYTES,
    Budget,
    ConversionPlan,
    Rules,
    budget_of,
    plan_conversion,
)
from dist_checkpointing.tools.convert.source import Source
from dist_checkpointing.tools.convert.write import (
    LazyPlanner,
    check_apart,
    check_checkpoint_place,
    cleared_on_failure,
    copy_into_files,
    lazy_strategy,
    leaves_of,
    written_beside,
)
from dist_checkpointing.tools.opening import OpenedFiles, open_source

SAFETENSORS = "safetensors"
TORCH = "torch"
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """How a conversion is done.

    Attributes:
        memory_bytes: memory that the whole process may take.
        threads: number of threads that read and write; by default that of StorageOptions.
        shard_bytes: size of the values in one file of a safetensors folder, at most.
        overwrite: replace what is at the destination, if it is of the kind that is written.
        trusted: unpickle anything in the source. Lets it run any code.
        verify: compare the tensors that are read with the checksums of the source, if it has any.
        dry_run: plan only, write nothing.
    """

    memory_bytes: int = DEFAULT_MEMORY_BYTES
    threads: int | None = None
    shard_bytes: int = DEFAULT_SHARD_BYTES
    overwrite: bool = False
    trusted: bool = False
    verify: bool = True
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversion:
    """What was done, or would be.

    Attributes:
        source: what was converted, in words.
        target: into what, in words.
        plan: tensors and objects, and what changes.
        left_out: what the target cannot hold, in words.
        verified_bytes: bytes of the source that were compared with its checksums.
        not_verified: what was not verified, and why, in words; None if all tensors were (or would
            be).
        num_proven: number of tensors whose fingerprint in the destination is that of the source.
        made: what the recipe made of the source; ``str()`` of it says what comes from where.
        seconds: time that it took.
    """

    source: str
    target: str
    plan: ConversionPlan
    left_out: tuple[str, ...]
    verified_bytes: int
    not_verified: str | None
    num_proven: int
    made: Derivation | None
    seconds: float


def convert(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    to: str = "tensorstore",
    *,
    rules: Rules | None = None,
    recipe: Recipe | None = None,
    options: ConvertOptions | None = None,
    progress: ProgressOption | None = None,
) -> Conversion:
    """Convert tensors from one format into another, bit by bit unless a cast is asked for.

    Streams: what is in memory at a time stays within the budget, whatever the size. Nothing is at
    the destination until all of it is; a conversion that was killed is begun again by the next one.
    Tensors are compared with the checksums of the source, so that damage does not get new ones.
    The configuration and tokenizer files of a Hugging Face folder become common state, and come
    back into the next such folder.
    If the source has fingerprints and the destination can keep them, they are computed again from
    what is written, and must be the same wherever the dtype is.

    Args:
        source: a committed checkpoint of any backend (also of Megatron and torch DCP), safetensors
            files (one, or a Hugging Face folder), a file of torch.save, or a folder of a DeepSpeed
            ZeRO checkpoint.
        destination: a folder, or a URL for a checkpoint; a file for ``torch``, and for
            ``safetensors`` if its name says so.
        to: ``backend`` or ``backend:version``, ``safetensors`` or ``torch``.
        rules: which keys, by what names, dtypes and cuts.
        recipe: what to make of the tensors first; the rules apply to the result.
        options: memory, threads and the like.
        progress: called with a Progress, from any thread.

    Raises:
        CheckpointNotFoundError: ``source`` holds nothing that is read.
        CheckpointExistsError: ``destination`` is taken. Nothing was touched.
        CorruptCheckpointError: the source is damaged. Nothing new is at the destination.
        StateMismatchError: the recipe does not fit the source; it names the rule.
        CheckpointingException: anything else. Nothing new is at the destination.

    Example:
        >>> import torch
        >>> from dist_checkpointing import Checkpoint, ShardedTensor, save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "step": 100}
        >>> from dist_checkpointing.tools.convert import Rules, convert
        >>> save(state, "ckpt")
        >>> convert("ckpt", "other", "zarr", rules=Rules.parse(rename=["^w$=weight"])).target
        'zarr 2'
        >>> list(Checkpoint.open("other"))
        ['weight']
    """
    options, rules = options or ConvertOptions(), rules or Rules()
    began = time.perf_counter()
    kind = {SAFETENSORS: _ToSafetensors, TORCH: _ToTorch}.get(to, _ToCheckpoint)
    target = to
    if kind is _ToCheckpoint:
        name, version = parse_backend(to)
        target = f"{name} {version}"
    elif rules.reshards:
        finding = Finding("only checkpoints are cut into parts", found=to)
        raise CheckpointingException(f"reshard makes no sense for {to}", [finding])
    place = as_location(destination) if kind is _ToCheckpoint else as_local_folder(destination)
    opened = open_source(source, trusted=options.trusted, most_bytes=options.memory_bytes // 2)
    job: _Job = kind(Source(opened, recipe), place, to, rules, options, progress)
    job.check()
    if not options.dry_run:
        job.run()
    return Conversion(
        source=job.source.kind,
        target=target,
        plan=job.plan,
        left_out=tuple(job.left_out),
        verified_bytes=0 if job.source.checks is None else job.source.checks.num_bytes,
        not_verified=job.not_verified,
        num_proven=job.num_proven,
        made=job.source.made,
        seconds=time.perf_counter() - began,
    )


def targets() -> list[str]:
    """What ``to`` may be."""
    backends = [f"{n}:{v}" for n, v in available_strategies(StrategyAction.SAVE_SHARDED)]
    return [*backends, SAFETENSORS, TORCH]


def parse_backend(text: str) -> tuple[str, int]:
    """A backend and its version; the newest if none is named.

    Raises:
        StrategyNotFoundError: if no such backend is registered.
    """
    known = available_strategies(StrategyAction.SAVE_SHARDED)
    versions = [(v, n) for n, v in known if text in (n, f"{n}:{v}")]
    if not versions:
        near = hint(text, [*targets(), *(name for name, _ in known)])
        finding = Finding(f"no such target{near}", expected=", ".join(targets()), found=text)
        raise StrategyNotFoundError(f"cannot convert to {text!r}", [finding])
    return max(versions)[::-1]


@dataclass(eq=False)
class _Job(ABC):
    """One conversion; each subclass writes into one kind of target."""

    source: Source
    destination: Location
    to: str
    rules: Rules
    options: ConvertOptions
    progress: ProgressOption | None
    left_out: list[str] = field(default_factory=list)
    common: dict[Any, Any] = field(default_factory=dict)
    plan: ConversionPlan = field(init=False)
    budget: Budget = field(init=False)
    not_verified: str | None = None
    num_proven: int = 0

    def check(self) -> None:
        """Find out all that can be wrong before a byte is written."""
        source = self.source
        objects = {key: handle.shape for key, handle in source.objects.items()}
        self.plan = plan_conversion(source.index, objects, self.rules)
        check_apart(source.paths, self.destination)
        self.check_target()
        location.check_room(self.destination.absolute().parent, self.plan.num_bytes)
        # Before memory is divided, so that the checksums count.
        if self.options.verify:
            source.find_checksums({tensor.source.key for tensor in self.plan.tensors})
            if source.checks is None and self.plan.tensors:
                self.not_verified = "the source keeps no checksums"
        else:
            self.not_verified = "verification was turned off"
        self.budget = budget_of(self.options.memory_bytes, self.options.threads)
        self.limit_mapped(source)
        if source.checks is not None:
            source.checks.most_bytes = self.budget.box_bytes

    def limit_mapped(self, source: Source) -> None:
        """Let mapped files count as memory in use for no longer than the budget allows."""
        if isinstance(source.opened, OpenedFiles):
            source.opened.files.most_bytes = self.budget.mapped_bytes

    @abstractmethod
    def check_target(self) -> None:
        """Find out whether the target can hold what is planned, and is free."""

    @abstractmethod
    def write(self, stop: threading.Event) -> None:
        """Write it, and prove that it is what the source holds."""

    def run(self) -> None:
        """Convert; Ctrl-C lets all threads end soon."""
        stop = threading.Event()
        try:
            with _stopping(stop):
                self.write(stop)
        except (RankFailedError, OSError) as error:
            if isinstance(error, RankFailedError):
                # There is one rank, so its name and its traceback say nothing to the caller.
                findings = [Finding(f.problem, f.key, path=f.path) for f in error.findings]
            elif isinstance(error, CheckpointingException):
                raise
            else:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                findings = [Finding(str(error), remedy="Free some space." if is_full else None)]
            message = f"cannot write {self.destination}: nothing of it is left"
            raise CheckpointingException(message, findings) from error

    def prove(self, written: Checkpoint) -> None:
        """Compare what was written with the fingerprints of the source.

        Those of tensors with another dtype differ. A format that keeps none is read again.

        Raises:
            CorruptCheckpointError: if any has another fingerprint.
        """
        kept = self.source.index.fingerprints
        expected = {
            tensor.key: kept[tensor.source.key]
            for tensor in self.plan.tensors
            if tensor.dtype == tensor.source.dtype and tensor.source.key in kept
        }
        target = Source(written)
        self.limit_mapped(target)
        found: Mapping[str, str] = target.index.fingerprints or fingerprints_by_reading(
            target.index, expected, target.read, most_bytes=self.budget.box_bytes
        )
        findings = [
            Finding("was not converted bit by bit", key, expected=text, found=found.get(key))
            for key, text in expected.items()
            if found.get(key) != text
        ]
        if findings:
            message = "what was written has other fingerprints than the source"
            raise CorruptCheckpointError(message, findings)
        self.num_proven = len(expected)


class _ToCheckpoint(_Job):
    """Into a checkpoint of any backend: an ordinary save whose data is lazy."""

    def check_target(self) -> None:
        check_checkpoint_place(self.destination, overwrite=self.options.overwrite)
        # Imports what will be used, so that its memory counts before the rest is divided.
        lazy_strategy(parse_backend(self.to), Budget(1, 1, 1, 1))

    def write(self, stop: threading.Event) -> None:
        source, plan = self.source, self.plan
        planner = LazyPlanner(source, plan, self.budget, stop)
        strategy = lazy_strategy(parse_backend(self.to), self.budget, planner)
        writer = strategy.make_writer(self.destination)
        # Cut here as the backend would anyway, but along what is stored.
        most_bytes = self.budget.box_bytes
        if isinstance(writer.layout, RowBlockLayout):
            most_bytes = min(most_bytes, writer.layout.max_chunk_bytes)
        # A dict that holds nothing but sharded leaves leaves no trace in the common state.
        leaves = dict(enumerate(leaves_of(plan, source, most_bytes)))
        common = {} if self.rules.tensors_only else source.opened.common
        free_key = next(name for name in map(str, range(len(common) + 1)) if name not in common)
        has_fingerprints = bool(source.index.fingerprints)
        with cleared_on_failure(self.destination):
            save_with_hooks(
                SaveHooks(before_claim=lambda _: source.opened.require_unchanged()),
                {**common, free_key: leaves} if leaves else dict(common),
                self.destination,
                comm=SingleProcess(),
                sharded_strategy=strategy,
                overwrite=self.options.overwrite,
                progress=self.progress,
                trusted=self.options.trusted,
                fingerprints=has_fingerprints and writer.keeps_fingerprints,
            )
        if has_fingerprints:
            try:
                self.prove(Checkpoint.open(self.destination))
            except BaseException:
                remove_checkpoint(self.destination)
                raise


class _ToFiles(_Job):
    """Into files of another format, which are created with room for the values."""

    @property
    def rows(self) -> list[TensorRow]:
        """What is created."""
        return [(tensor.key, tensor.dtype, tensor.shape) for tensor in self.plan.tensors]

    @abstractmethod
    def create(self, path: Path) -> dict[Path, dict[str, int]]:
        """Create the files; at which byte of which the values of each tensor begin."""

    @abstractmethod
    def reopen(self, path: Path) -> TensorFiles[Any] | None:
        """What was written; None if it cannot be read here."""

    def is_alike(self, path: Path) -> bool:
        """Whether the destination holds the same kind of files as would be written there."""
        return path.is_file()

    def write(self, stop: threading.Event) -> None:
        meter = Meter("convert", 0, self.progress)
        beside = written_beside(
            Path(self.destination), overwrite=self.options.overwrite, replaceable=self.is_alike
        )
        with beside as path, meter.phase("writing"):
            meter.expect(self.plan.num_bytes)
            tensors = {tensor.key: tensor for tensor in self.plan.tensors}
            starts = self.create(path)
            copy_into_files(tensors, starts, self.source, self.budget, stop, meter.add)
            self.source.opened.require_unchanged()
            if self.source.index.fingerprints and (files := self.reopen(path)) is not None:
                self.prove(OpenedFiles(files, trusted=True))


class _ToSafetensors(_ToFiles):
    model_files: Mapping[str, bytes] = {}

    @property
    def as_folder(self) -> bool:
        """Whether the files go into a folder."""
        return not self.destination.name.endswith(safetensors_folder.SUFFIX)

    def check_target(self) -> None:
        safetensors_folder.require_storable(self.rows)
        if self.rules.tensors_only:
            return
        common = self.source.opened.common
        self.common = safetensors_folder.texts_of(common)
        if self.as_folder:
            self.model_files = safetensors_folder.model_files_of(common)
        kept = {*self.common, *([safetensors_folder.MODEL_FILES_KEY] if self.model_files else [])}
        if lost := [name for name in common if name not in kept]:
            self.left_out.append(f"common state that is no text ({_few(lost)})")
        if self.plan.objects:
            self.left_out.append(f"objects ({_few(o.key for o in self.plan.objects)})")

    def create(self, path: Path) -> dict[Path, dict[str, int]]:
        most_bytes = self.options.shard_bytes if self.as_folder else None
        created = safetensors_folder.create(path, self.rows, self.common, most_bytes)
        for name, data in self.model_files.items():
            (path / name).write_bytes(data)
        return created

    def reopen(self, path: Path) -> TensorFiles[Any] | None:
        # The package that reads them is an extra.
        return safetensors_folder.SafetensorsFiles(path) if find_spec("safetensors") else None

    def is_alike(self, path: Path) -> bool:
        if not self.as_folder:
            return path.is_file()
        suffixes = (safetensors_folder.SUFFIX, safetensors_folder.INDEX_SUFFIX)
        return path.is_dir() and all(
            entry.name in self.model_files or entry.name.endswith(suffixes)
            for entry in path.iterdir()
        )


class _ToTorch(_ToFiles):
    objects: Mapping[str, Any] = {}

    def check_target(self) -> None:
        if self.rules.tensors_only:
            return
        handles = {o.key: self.source.objects[o.source_key] for o in self.plan.objects}
        cells = {key: dict(handle) for key, handle in handles.items()}
        common = self.source.opened.common
        self.common, self.objects = torch_file.loadable(common), torch_file.loadable(cells)
        for what, given, kept in (
            ("common state", common, self.common),
            ("objects", cells, self.objects),
        ):
            if lost := [name for name in given if name not in kept]:
                self.left_out.append(f"{what} that torch.load would refuse ({_few(lost)})")

    def create(self, path: Path) -> dict[Path, dict[str, int]]:
        return {path: torch_file.create(path, self.rows, self.common, self.objects)}

    def reopen(self, path: Path) -> TensorFiles[Any]:
        # It holds nothing but what torch.load reads without trust.
        return torch_file.TorchFile(path, trusted=True, most_bytes=self.budget.mapped_bytes)


@contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """Set the event at Ctrl-C, so that threads end soon and not after all their work."""
    previous: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        stop.set()
        previous(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _few(names: Iterable[object]) -> str:
    """The first of some names, as text."""
    listed = list(map(str, names))
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
