"""convert: from a checkpoint or a file of tensors into another, within a budget of memory."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from dist_checkpointing.errors import (
    CheckpointingException,
    Finding,
    RankFailedError,
    StrategyNotFoundError,
    hint,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_local_folder, as_location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.planning.recipe import Derivation, Recipe
from dist_checkpointing.storage.progress import Meter, ProgressOption
from dist_checkpointing.strategies.registry import StrategyAction, available_strategies
from dist_checkpointing.tools.convert.backend_target import convert_to_backend, lazy_strategy
from dist_checkpointing.tools.convert.copying import Copier, stopping
from dist_checkpointing.tools.convert.destination import (
    check_apart,
    check_checkpoint_place,
    written_beside,
)
from dist_checkpointing.tools.convert.file_targets import (
    DEFAULT_SHARD_BYTES,
    check_safetensors,
    loadable,
    texts_for_safetensors,
    write_safetensors,
    write_torch_file,
)
from dist_checkpointing.tools.convert.memory import DEFAULT_MEMORY_BYTES, Budget, budget_of
from dist_checkpointing.tools.convert.model_files import MODEL_FILES_KEY, files_to_write
from dist_checkpointing.tools.convert.opening import open_source
from dist_checkpointing.tools.convert.plan import ConversionPlan, plan_conversion
from dist_checkpointing.tools.convert.proof import prove
from dist_checkpointing.tools.convert.recipe_source import RecipeSource
from dist_checkpointing.tools.convert.rules import Rules
from dist_checkpointing.tools.convert.safetensors_files import (
    INDEX_SUFFIX,
    SUFFIX,
    SafetensorsSource,
)
from dist_checkpointing.tools.convert.sources import Source
from dist_checkpointing.tools.convert.torch_file import TorchFileSource
from dist_checkpointing.tools.convert.verification import PartChecks

SAFETENSORS = "safetensors"
TORCH = "torch"


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
    backend = None if to in (SAFETENSORS, TORCH) else parse_backend(to)
    if backend is None and rules.reshards:
        finding = Finding("only checkpoints are cut into parts", found=to)
        raise CheckpointingException(f"reshard makes no sense for {to}", [finding])
    place = as_location(destination) if backend is not None else as_local_folder(destination)
    opened = open_source(source, trusted=options.trusted, most_bytes=options.memory_bytes // 2)
    made = None
    try:
        if recipe is not None:
            opened = RecipeSource(opened, recipe)
            made = opened.made
        job = _Job(opened, place, to, backend, rules, options, progress)
        job.check()
        if not options.dry_run:
            job.run()
        return Conversion(
            source=opened.kind,
            target=to if backend is None else f"{backend[0]} {backend[1]}",
            plan=job.plan,
            left_out=tuple(job.left_out),
            verified_bytes=0 if job.checks is None else job.checks.num_bytes,
            not_verified=job.not_verified,
            num_proven=job.num_proven,
            made=made,
            seconds=time.perf_counter() - began,
        )
    finally:
        opened.close()


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
    found = [(n, v) for n, v in known if text in (n, f"{n}:{v}")]
    if not found:
        near = hint(text, [*targets(), *(name for name, _ in known)])
        finding = Finding(f"no such target{near}", expected=", ".join(targets()), found=text)
        raise StrategyNotFoundError(f"cannot convert to {text!r}", [finding])
    return max(found, key=lambda backend: backend[1])


@dataclass(slots=True, eq=False)
class _Job:
    source: Source
    destination: Location
    to: str
    backend: tuple[str, int] | None
    rules: Rules
    options: ConvertOptions
    progress: ProgressOption | None
    left_out: list[str] = field(default_factory=list)
    common: dict[Any, Any] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    plan: ConversionPlan = field(init=False)
    budget: Budget = field(init=False)
    checks: PartChecks | None = None
    not_verified: str | None = None
    num_proven: int = 0

    @property
    def as_folder(self) -> bool:
        """Whether safetensors files go into a folder."""
        return self.to == SAFETENSORS and not self.destination.name.endswith(SUFFIX)

    def check(self) -> None:
        """Find out all that can be wrong before a byte is written."""
        self.plan = plan_conversion(self.source.index, self.source.objects, self.rules)
        check_apart(self.source.files(), self.destination)
        if self.backend is not None:
            check_checkpoint_place(self.destination, overwrite=self.options.overwrite)
        elif self.to == SAFETENSORS:
            check_safetensors(self.plan)
            self._choose_texts()
        else:
            self._choose_for_torch()
        location.check_room(self.destination.absolute().parent, self.plan.num_bytes)
        if self.backend is not None:
            # Imports what will be used, so that its memory counts before the rest is divided.
            lazy_strategy(self.backend, Budget(1, 1, 1, 1))
        # Before memory is divided, like the imports.
        self._find_checksums()
        self.budget = budget_of(self.options.memory_bytes, self.options.threads)
        self.source.limit_mapped(self.budget.mapped_bytes)
        if self.checks is not None:
            self.checks.most_bytes = self.budget.box_bytes
            self.source.verify_with(self.checks)

    def _find_checksums(self) -> None:
        if not self.options.verify:
            self.not_verified = "verification was turned off"
            return
        self.checks = self.source.checksums({tensor.source.key for tensor in self.plan.tensors})
        if self.checks is None and self.plan.tensors:
            self.not_verified = "the source keeps no checksums"

    def _choose_texts(self) -> None:
        if self.rules.tensors_only:
            return
        common = self.source.common
        self.common = texts_for_safetensors(common)
        self.files = files_to_write(common) if self.as_folder else {}
        kept = {*self.common, *([MODEL_FILES_KEY] if self.files else [])}
        lost = [name for name in common if name not in kept]
        if lost:
            self.left_out.append(f"common state that is no text ({_few(lost)})")
        if self.plan.objects:
            self.left_out.append(f"objects ({_few(o.key for o in self.plan.objects)})")

    def _choose_for_torch(self) -> None:
        if self.rules.tensors_only:
            return
        self.common, lost = loadable(self.source.common)
        if lost:
            self.left_out.append(f"common state that torch.load would refuse ({_few(lost)})")
        cells = {
            planned.key: {
                cell: self.source.object_cell(planned.source_key, cell)
                for cell in itertools.product(*map(range, planned.shape))
            }
            for planned in self.plan.objects
        }
        self.objects, lost = loadable(cells)
        if lost:
            self.left_out.append(f"objects that torch.load would refuse ({_few(lost)})")

    def run(self) -> None:
        """Convert."""
        stop = threading.Event()
        try:
            with stopping(stop):
                if self.backend is not None:
                    self.num_proven = convert_to_backend(
                        self.source,
                        self.plan,
                        self.destination,
                        self.backend,
                        self.budget,
                        overwrite=self.options.overwrite,
                        tensors_only=self.rules.tensors_only,
                        trusted=self.options.trusted,
                        progress=self.progress,
                        stop=stop,
                    )
                else:
                    self._write_files(stop)
        except RankFailedError as error:
            # There is one rank, so its name and its traceback say nothing to the caller.
            findings = [Finding(f.problem, f.key, path=f.path) for f in error.findings]
            message = f"cannot write {self.destination}: nothing of it is left"
            raise CheckpointingException(message, findings) from error
        except OSError as error:
            if isinstance(error, CheckpointingException):
                raise
            remedy = "Free some space." if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
            finding = Finding(str(error), remedy=remedy)
            message = f"cannot write {self.destination}: nothing of it is left"
            raise CheckpointingException(message, [finding]) from error

    def _write_files(self, stop: threading.Event) -> None:
        meter = Meter("convert", 0, self.progress)
        beside = written_beside(
            Path(self.destination), overwrite=self.options.overwrite, replaceable=self._is_alike
        )
        with beside as path, meter.phase("writing"):
            meter.expect(self.plan.num_bytes)
            copier = Copier(self.source, self.budget, stop, meter.add)
            if self.to == SAFETENSORS:
                write_safetensors(
                    self.plan,
                    path,
                    copier,
                    as_folder=self.as_folder,
                    shard_bytes=self.options.shard_bytes,
                    texts=self.common,
                )
                for name, data in self.files.items():
                    (path / name).write_bytes(data)
            else:
                write_torch_file(self.plan, path, copier, common=self.common, objects=self.objects)
            self.source.check_unchanged()
            self._prove(path)

    def _prove(self, path: Path) -> None:
        """Compare what was written with the fingerprints of the source, if it has any."""
        written: Source
        if not self.source.index.fingerprints:
            return
        if self.to == TORCH:
            # It holds nothing but what torch.load takes without trust.
            written = TorchFileSource(path, trusted=True, most_bytes=self.budget.mapped_bytes)
        elif find_spec("safetensors") is not None:
            written = SafetensorsSource(path)
        else:
            return  # the package that reads them is an extra
        written.limit_mapped(self.budget.mapped_bytes)
        self.num_proven = prove(self.plan, self.source, written, self.budget.box_bytes)

    def _is_alike(self, path: Path) -> bool:
        """Whether the destination holds the same kind of files as would be written there."""
        if not self.as_folder:
            return path.is_file()
        if not path.is_dir():
            return False
        names = [entry.name for entry in path.iterdir() if entry.name not in self.files]
        return all(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def _few(names: Iterable[object]) -> str:
    """The first of some names, as text."""
    listed = list(map(str, names))
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
