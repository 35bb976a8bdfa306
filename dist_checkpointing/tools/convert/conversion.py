"""convert: from a checkpoint or files of tensors into another, within a budget of memory."""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.comm import Comm, SingleProcess
from dist_checkpointing.errors import (
    CheckpointExistsError,
    CheckpointingException,
    Finding,
    RankFailedError,
)
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.index import size_of_files
from dist_checkpointing.planning.recipe import Derivation, Recipe, require_recipe
from dist_checkpointing.storage.progress import ProgressOption
from dist_checkpointing.strategies.base import SaveShardedStrategy
from dist_checkpointing.strategies.verification import cause_of
from dist_checkpointing.tools.convert.plan import ConversionPlan, ConvertOptions, plan_conversion
from dist_checkpointing.tools.convert.source import Source
from dist_checkpointing.tools.convert.write import Target
from dist_checkpointing.tools.values import budget_of

logger: logging.Logger = logging.getLogger(__name__)

_LEAST_GROWN_BYTES = 2**28
_MOST_GROWTH = 64
"""Files of tensors become at most so many bytes, and so many times larger, unless that is asked."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversion:
    """What was done, or would be; texts are in words.

    Attributes:
        left_out: what the target cannot hold.
        verified_bytes: bytes of the source that were compared with its checksums.
        not_verified: what was not verified, and why; None if all tensors were, or would be.
        num_proven: number of tensors whose fingerprint in the destination is that of the source.
        made: what the recipe makes of the source; ``str()`` of it says what comes from where.
    """

    source: str
    target: str
    plan: ConversionPlan
    left_out: tuple[str, ...]
    verified_bytes: int
    not_verified: str | None
    num_proven: int
    made: Derivation
    seconds: float


def convert(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    to: str | tuple[str, int] | SaveShardedStrategy = "tensorstore",
    *,
    recipe: Recipe | None = None,
    options: ConvertOptions | None = None,
    progress: ProgressOption | None = None,
    comm: Comm | None = None,
) -> Conversion:
    """Convert tensors from one format into another, bit by bit unless the recipe casts them.

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
        destination: a folder, or a URL for a checkpoint; a file for ``torch_file``, and for
            ``safetensors`` if its name says so.
        to: what saves it: ``"backend"``, ``"backend:version"``, ``(backend, version)`` or a
            strategy with options of its own.
        recipe: what to make of the tensors; by default they stay as they are. Rules that match
            nothing are logged.
        options: how tensors are cut, whether casts may change values, memory and the like.
        progress: called with a Progress, from any thread.
        comm: the ranks that share the work, each with ``options`` of its own; all of them call
            this. By default, this process alone.

    Raises:
        CheckpointNotFoundError: ``source`` holds nothing that is read.
        CheckpointExistsError: ``destination`` is taken. Nothing was touched.
        CorruptCheckpointError: the source is damaged. Nothing new is at the destination.
        StrategyNotFoundError: nothing provides ``to``.
        StateMismatchError: the recipe does not fit the source; it names the rule.
        TypeError: ``recipe`` is no Recipe.
        CheckpointingException: anything else. Nothing new is at the destination.

    Example:
        >>> import torch
        >>> from dist_checkpointing import Checkpoint, ShardedTensor, save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "step": 100}
        >>> from dist_checkpointing.planning import Recipe, Rename
        >>> from dist_checkpointing.tools.convert import convert
        >>> save(state, "ckpt")
        >>> convert("ckpt", "other", "zarr", recipe=Recipe(Rename("w", to="weight"))).target
        'zarr 2'
        >>> list(Checkpoint.open("other"))
        ['weight']
    """
    began, options = time.perf_counter(), options or ConvertOptions()
    if isinstance(to, str) and (form := re.fullmatch(r"(.+):(\d+)", to)):
        to = form[1], int(form[2])
    comm, recipe = comm or SingleProcess(), Recipe() if recipe is None else recipe
    require_recipe(recipe)
    # All that can be wrong is found out before a byte is written.
    with comm.agreed("planning the conversion"):
        place = as_location(destination)
        opened = Checkpoint.open(source, trusted=options.trusted)
        stored = Source(opened, recipe)
        objects = {key: handle.shape for key, handle in stored.objects.items()}
        plan = plan_conversion(stored.made, objects, options)
        if location.overlap(opened.path, place):
            problem, remedy = "source and destination overlap", "Convert into another place."
            finding = Finding(problem, path=str(place), remedy=remedy)
            raise CheckpointExistsError("cannot convert a checkpoint into itself", [finding])
        # Before memory is divided, so that the checksums count.
        not_verified: str | None = "verification was turned off"
        if options.verify:
            has_checksums = stored.find_checksums()
            is_verified = has_checksums or not plan.tensors
            not_verified = None if is_verified else "the source keeps no checksums"
        target = Target(stored, plan, place, to, options)
        if not (options.overwrite or options.dry_run):
            _require_expected_size(opened.folder, plan.num_bytes)
        location.check_room(place.absolute().parent, plan.num_bytes)
        budget = budget_of(options.memory_bytes, options.threads)
        stored.limit(budget)
    for finding in () if comm.rank else stored.made.unused:
        logger.warning("%s", finding)
    num_proven = 0
    if not options.dry_run:
        with _writing(place, comm):
            num_proven = target.write(budget, progress, comm)
    return Conversion(
        source=" ".join(map(str, opened.backend)),
        target=target.backend,
        plan=plan,
        left_out=tuple(target.left_out),
        num_proven=num_proven,
        verified_bytes=sum(comm.all_gather(stored.checks.num_bytes)),
        not_verified=not_verified,
        made=stored.made,
        seconds=time.perf_counter() - began,
    )


def _require_expected_size(path: Location, num_bytes: int) -> None:
    """Refuse to write in full what repeats a few stored values, as after ``expand``."""
    stored = location.size_of(path) or size_of_files(path)[0]
    if num_bytes > _LEAST_GROWN_BYTES + _MOST_GROWTH * stored:
        problem = f"tensors of {bytes_text(num_bytes)} are views of {bytes_text(stored)}"
        remedy = "--dry-run names them, --force (overwrite=True) writes them in full."
        finding = Finding(problem, remedy=remedy)
        raise CheckpointingException("far more would be written than is stored", [finding])


@contextmanager
def _writing(destination: Location, comm: Comm) -> Iterator[None]:
    """Say in few words what cannot be written."""
    try:
        yield
    except (RankFailedError, OSError) as error:
        # The name of the only rank and its traceback say nothing to the caller.
        cause = cause_of(error) if comm.world_size == 1 else error
        if isinstance(cause, CheckpointingException):
            raise cause from None
        is_full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        finding = Finding(str(cause), remedy="Free some space." if is_full else None)
        message = f"cannot write {destination}: nothing of it is left"
        raise CheckpointingException(message, [finding]) from error
