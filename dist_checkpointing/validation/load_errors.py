"""Whether a template fits a checkpoint: keys, shapes, dtypes. All findings come at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import chain
from os import PathLike
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
import xxhash
from torch.autograd.graph import increment_version

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    Finding,
    RankFailedError,
    StateMismatchError,
    hint,
)
from dist_checkpointing.format.geometry import Ints
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import ShardedBase, ShardedTensor, tensor_memory
from dist_checkpointing.mapping.nested_dicts import DictKey, Path, Position, path_text, value_at
from dist_checkpointing.mapping.objects_and_factories import shallow_copy
from dist_checkpointing.mapping.state_dict_parts import STATE_REMEDY, StateDictParts
from dist_checkpointing.planning.coverage import check_coverage
from dist_checkpointing.planning.load_plan import WantedTable
from dist_checkpointing.planning.replica_check import digest_of_values
from dist_checkpointing.planning.shard_table import describe
from dist_checkpointing.planning.table_exchange import exchange_tables
from dist_checkpointing.validation.save_errors import ValuePath, walk

logger: logging.Logger = logging.getLogger(__name__)
Cast = Literal["error", "widen", "any"]
_MOST_HINTS: Final = 20
_MOST_NAMED: Final = 4
_MOST_SENT: Final = 256


class StrictHandling(Enum):
    """How ``load`` treats keys that only the template or only the checkpoint has.

    An "unexpected" key is in the template of this rank and not in the checkpoint. A "missing" key
    is in the checkpoint and in the template of no rank.

    Example:
        >>> save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, "ckpt/7")
        >>> template = {"v": ShardedTensor.from_rank_offsets("v", torch.empty(2))}
        >>> state, missing, unexpected = load(template, "ckpt/7", strict=StrictHandling.RETURN_ALL)
        >>> missing, unexpected
        ({'w'}, {'v'})
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(value: StrictHandling) -> bool:
        """Whether unexpected keys are handled before the backend sees them."""
        return value != StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(value: StrictHandling) -> bool:
        """Whether the keys of all ranks are needed."""
        return value in (
            StrictHandling.IGNORE_ALL,
            StrictHandling.RAISE_ALL,
            StrictHandling.RETURN_ALL,
            StrictHandling.LOG_ALL,
        )

    @staticmethod
    def requires_returning_mismatch_keys(value: StrictHandling) -> bool:
        """Whether ``load`` also returns the sets of missing and unexpected keys."""
        return value in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


def parse_strict_flag(strict: StrictHandling | str) -> StrictHandling:
    """The flag, given as such or by its name in lower case.

    Raises:
        ValueError: for any other value.

    Example:
        >>> parse_strict_flag("raise_all")
        <StrictHandling.RAISE_ALL: 'raise_all'>
    """
    try:
        return StrictHandling(strict)
    except ValueError:
        names = ", ".join(member.value for member in StrictHandling)
        given: object = strict  # whatever it is
        near = "; 'raise_all' is the strictest" if given is True else ""
        near = "; 'ignore_all' is the mildest" if given is False else near
        raise ValueError(
            f"Invalid strict flag: strict={strict!r}; expected one of {names}{near}"
        ) from None


_DEMANDING: Final = (
    StrictHandling.ASSUME_OK_UNEXPECTED,
    StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.RAISE_ALL,
)

_FILLED: Final = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
_WRAP_REMEDY: Final = (
    "Wrap it: ShardedTensor.from_rank_offsets(key, tensor, (axis, part, number of parts)), or the "
    "whole state dict with dist_checkpointing.interop.shard_state_dict."
)


def _stored_shapes(index: Index, keys: Iterable[str]) -> dict[str, tuple[Ints, torch.dtype]]:
    """Key -> global shape and dtype of those of the tensors that are stored."""
    asked = tuple(dict.fromkeys(keys))
    numbers, types = index.dtypes_of(asked)
    as_torch = [None if dtype is None else dtype.torch for dtype in types]
    shapes, rows = index.global_shape_column, index.rows_of(asked).tolist()
    return {
        key: (tuple(shapes[row]), dtype)
        for key, number, row in zip(asked, numbers.tolist(), rows, strict=True)
        if (dtype := as_torch[number]) is not None
    }


def _are_stored_alike(wanted: WantedTable, index: Index) -> bool:
    """Whether all tensors are stored, with just their global shapes and dtypes."""
    if (index.rows_of(wanted.keys) < 0).any():
        return False
    shapes, _ = index.shapes_of(wanted.keys)
    numbers, types = index.dtypes_of(wanted.keys)
    number = {None if dtype is None else dtype.torch: i for i, dtype in enumerate(types)}
    return (
        list(map(len, shapes)) == list(map(len, wanted.global_shapes))
        and [*chain.from_iterable(shapes)] == [*chain.from_iterable(wanted.global_shapes)]
        and [number.get(dtype, -1) for dtype in wanted.data_dtypes] == numbers.tolist()
    )


def handle_strictly(
    parts: StateDictParts, stored_keys: set[str], flag: StrictHandling, comm: Comm
) -> tuple[set[str], set[str]]:
    """Report keys that only one side has, as the flag says: (missing, unexpected)."""
    own = {leaf.key for leaf in (*parts.tensors.values(), *parts.objects.values())}
    unexpected = own - stored_keys
    missing: set[str] = set()
    if StrictHandling.requires_global_app_metadata(flag):
        missing = stored_keys.difference(*comm.all_gather(own))
    if flag in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL):
        with comm.agreed("comparing keys"):
            hints = _hinted(sorted(unexpected), stored_keys)
            absent = "asked for, but not in the checkpoint"
            findings = [Finding(f"{absent}{near}", key) for key, near in hints]
            unasked = "in the checkpoint, but asked for by no rank"
            findings += [Finding(unasked, key) for key in sorted(missing)]
            StateMismatchError.raise_if(findings, mismatch_text(missing, unexpected))
    if flag in (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL) and (missing or unexpected):
        logger.warning("%s", mismatch_text(missing, unexpected))
    return set() if flag is StrictHandling.IGNORE_ALL else missing, unexpected


def _hinted(keys: Iterable[str], stored_keys: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each key with what is stored under nearly the same name; of few keys, as that is slow."""
    known = [*stored_keys]
    for number, key in enumerate(keys):
        yield key, hint(key, known) if number < _MOST_HINTS else ""


def mismatch_text(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    text = ""
    if missing:
        text += (
            "Some keys found in the checkpoint are missing in the provided sharded state dict. "
            f"Missing keys (for all ranks): {set(missing)}. "
        )
    if unexpected:
        text += (
            "Unexpected keys (not found in the checkpoint) encountered in the provided sharded "
            f"state dict. Unexpected keys (for this rank): {set(unexpected)}. "
        )
    return text.strip()


def compare(
    wanted: WantedTable,
    index: Index,
    cast: Cast,
    *,
    planner_knows_keys: bool,
    stored_keys: Callable[[], Iterable[str]],
    common: object,
    misfits: Sequence[Finding],
) -> bool:
    """Check every wanted tensor against what is stored: whether all are stored with just their
    global shapes and dtypes. StateMismatchError with all keys, shapes and dtypes that do not fit.

    A user's planner with ``planner_knows_keys`` may find a key under another name, and says so if
    not. ``stored_keys`` gives the keys of all stored tensors; ``index`` may hold only some.
    ``common`` is the common state of the checkpoint, where a tensor is that was saved unwrapped;
    ``misfits`` are raised with the others.
    """
    # What has an address is not on the meta device, and contiguous.
    without = np.flatnonzero(wanted.addresses < 0).tolist()
    others = [data for row in without if (data := wanted.data[row]) is not None]
    can_be_filled = not any(data.is_meta or tensor_memory.overlaps_itself(data) for data in others)
    if can_be_filled and not misfits and _are_stored_alike(wanted, index):
        return True
    stored = _stored_shapes(index, wanted.keys)
    findings: list[Finding] = []
    missing: dict[str, Path] = {}
    for path, leaf in zip(wanted.leaves, wanted.tensors, strict=True):
        found = stored.get(leaf.key)
        if found is not None:
            findings += _misfits(leaf, *found, cast)
        elif not planner_knows_keys:
            missing.setdefault(leaf.key, path)
    for key, near in _hinted(missing, stored_keys()) if missing else ():
        at = path_text(missing[key])
        problem = f"not in the checkpoint (asked for at {at}){near}"
        remedy = "Remove it from the template, or pass strict=."
        if _is_there(common, missing[key]):
            problem = f"it was saved without being wrapped, so it is in the common state at {at}"
            remedy = "Load it by load({}, path); wrap the state dict when you save it again."
        findings.append(Finding(problem, key, remedy=remedy))
    findings += misfits
    message = "the template does not fit the checkpoint"
    sides = "(expected: by the template; found: in the checkpoint)"
    StateMismatchError.raise_if(findings, f"{message} {sides}")
    return False


def _misfits(leaf: ShardedTensor, shape: Ints, dtype: torch.dtype, cast: Cast) -> Iterator[Finding]:
    """Why what is stored cannot fill a tensor."""
    key, data, own = leaf.key, leaf.data, tuple(leaf.global_shape)
    if shape != own and not (leaf.allow_shape_mismatch and len(shape) == len(own)):
        remedy = (
            "Give it the stored shape, or pass allow_shape_mismatch=True to "
            "ShardedTensor.from_rank_offsets; a recipe with Resize cuts or pads it."
        )
        yield Finding("global shape differs", key, own, shape, remedy=remedy)
    own_dtype = leaf.dtype if data is None else data.dtype
    is_lost = cast == "error" or (
        cast == "widen" and not tensor_memory.is_lossless(dtype, own_dtype)
    )
    if dtype is not own_dtype and is_lost:
        remedy = "cast='any' converts." if cast == "widen" else "cast='widen' or 'any' converts."
        yield Finding("dtype differs", key, own_dtype, dtype, remedy=remedy)
    if data is not None and data.is_meta:
        remedy = "Materialize it, or pass data=None."
        yield Finding("the tensor to fill is on the meta device", key, remedy=remedy)
    elif data is not None and tensor_memory.overlaps_itself(data):
        yield overlap_finding(key, data)


def overlap_finding(key: str, data: torch.Tensor) -> Finding:
    """What is wrong with a tensor to fill for which ``overlaps_itself`` holds."""
    return Finding(
        "elements of the tensor to fill share memory, as after expand()",
        key,
        found=f"strides {tuple(data.stride())} of shape {tuple(data.shape)}",
        remedy="Give it separate memory, such as clone().",
    )


def with_memory(leaf: ShardedTensor) -> ShardedTensor:
    """A copy of the leaf that has memory to fill."""
    copied = shallow_copy(leaf)
    copied.init_data("cpu")
    return copied


def clear_partly_stored(leaves: Sequence[ShardedTensor], index: Index) -> None:
    """Set tensors to zero of which not every element is stored."""
    stored = _stored_shapes(index, (leaf.key for leaf in leaves))
    for leaf in leaves:
        shape, found = tuple(leaf.global_shape), stored.get(leaf.key)
        is_other = found is not None and shape != found[0]
        if leaf.data is not None and (is_other or leaf.sticks_out):
            leaf.data.detach().zero_()


class StagedTensor(NamedTuple):
    """A tensor of a template, and the values that are copied into it once all is read.

    A tensor that is not wrapped has a path, and the value of the common state there.
    """

    key: str
    given: torch.Tensor
    value: torch.Tensor
    path: Path = ()

    @property
    def is_kept(self) -> bool:
        """Whether the tensor holds the values bit by bit."""
        tensors = (self.given.detach(), self.value.detach().to(self.given.dtype))
        return len({digest_of_values(tensor.reshape(-1)) for tensor in tensors}) == 1


def plain_tensors(
    parts: StateDictParts, stored: Mapping[Any, Any], cast: Cast, flag: StrictHandling
) -> tuple[list[StagedTensor], list[Finding]]:
    """The plain tensors of a template that the common state of the checkpoint, ``stored``, fills;
    and why it cannot fill others. A tensor, or a module or optimizer, that has no value there is
    only a warning if the flag tolerates unexpected keys.
    """
    given: dict[Path, Any]
    given = {f.path: f.value for f in walk(parts.common) if isinstance(f.value, _FILLED)}
    wanted = [path for path in given if all(isinstance(step, DictKey | Position) for step in path)]
    if not wanted:
        return [], []
    result = parts.rebuild(stored, {}, {})
    plain: list[StagedTensor] = []
    findings: list[Finding] = []
    absent: list[Finding] = []
    for path in wanted:
        tensor, key = given[path], path_text(path)
        is_there, is_tensor = _is_there(result, path), isinstance(tensor, torch.Tensor)
        value = value_at(result, path) if is_there else None
        if not is_there or not (is_tensor or value is None or isinstance(value, _FILLED)):
            absent.append(_unfilled(key, tensor))
            continue
        if value is None or not is_tensor:
            continue  # as stored: there was no tensor when this was saved
        if not isinstance(value, torch.Tensor) or value.layout is not tensor.layout:
            found = getattr(value, "layout", type(value).__name__)
            problem = "what is stored here cannot fill this tensor of the template"
            findings.append(Finding(problem, key, tensor.layout, found, remedy="Put None there."))
            continue
        leaf = ShardedTensor.from_rank_offsets(key, tensor)
        if tensor.is_meta:  # it has no memory: the state dict gets what is stored
            leaf = leaf.without_data()
        else:
            plain.append(StagedTensor(key, tensor, value, path))
        findings += _misfits(leaf, tuple(value.shape), value.dtype, cast)
    if flag in _DEMANDING:
        findings += absent
    elif absent:
        message = "tensors of the template would not be filled"
        logger.warning("%s", StateMismatchError(message, absent))
    return plain, findings


def _unfilled(key: str, given: Any) -> Finding:
    if not isinstance(given, torch.Tensor):
        found, problem = type(given).__name__, "this is not a state dict: it would not be filled"
        return Finding(problem, key, found=found, remedy=STATE_REMEDY)
    problem = (
        "this tensor of the template is not wrapped, and the common state of the checkpoint has no "
        "value for it: it would not be filled"
    )
    found = f"{given.dtype} of shape {tuple(given.shape)}"
    return Finding(problem, key, found=found, remedy=_WRAP_REMEDY)


def set_apart(
    wanted: WantedTable,
    plain: Sequence[StagedTensor],
    keeps_values: Callable[[ShardedTensor], bool],
) -> dict[int, StagedTensor]:
    """The tensors that share memory with other ones to fill, with new memory, by position.

    Those that keep values of the template are left out.
    """
    tensors = [*wanted.data, *(part.given for part in plain)]
    spans = np.full((2, len(tensors)), -1, dtype=np.int64)
    spans[:, : len(wanted)] = wanted.addresses, wanted.num_bytes
    for row in np.flatnonzero(spans[0] < 0).tolist():
        spans[:, row] = tensor_memory.memory_of(tensors[row])
    apart = {}
    for row in tensor_memory.sharing_memory(tensors, *spans):
        if row < len(wanted) and not keeps_values(leaf := wanted.tensors[row]):
            assert leaf.data is not None
            apart[row] = StagedTensor(leaf.key, leaf.data, leaf.data.detach().to("cpu", copy=True))
    return apart


def fill_staged(staged: Sequence[StagedTensor]) -> None:
    """Copy values into tensors. StateMismatchError if one does not hold them afterwards, because
    other values are stored for another one, with which it shares memory.
    """
    for part in staged:
        with torch.inference_mode(part.given.is_inference()):
            part.given.detach().copy_(part.value.detach())
    given = [part.given for part in staged]
    spans = np.array([*map(tensor_memory.memory_of, given)], dtype=np.int64).reshape(-1, 2)
    problem = "another tensor of the template, for which other values are stored, has its memory"
    findings = [
        Finding(problem, staged[row].key, remedy="Give each leaf separate memory.")
        for row in tensor_memory.sharing_memory(given, *spans.T)
        if not staged[row].is_kept
    ]
    StateMismatchError.raise_if(findings, "tensors of the template share memory")


def _is_there(tree: Any, path: ValuePath) -> bool:
    for key, kind in path:
        if not isinstance(tree, dict if kind == "key" else list | tuple):
            return False
        if key not in (tree if kind == "key" else range(len(tree))):
            return False
        tree = tree[key]
        if tree is None and kind == "position":  # it replaces a sharded leaf
            return False
    return True


def require_same_save(is_same: bool, checkpoint_dir: str | PathLike[str]) -> None:
    if is_same:
        return
    finding = Finding(
        "another save into this folder began after the load",
        path=str(checkpoint_dir),
        remedy="What was read may be of both: load again, and save each step into a new folder.",
    )
    raise CorruptCheckpointError("the checkpoint was overwritten while it was read", [finding])


def check_access(parts: StateDictParts, comm: Comm) -> None:
    """Check that the templates of all ranks ask for each tensor exactly once. Collective."""
    leaves: list[ShardedBase] = [*parts.tensors.values(), *parts.objects.values()]
    exchanged = exchange_tables(
        comm, "describing the template", lambda: ({"tensors": describe(leaves, comm.rank)}, None)
    )
    with comm.agreed("checking the template"):
        check_coverage(exchanged.catalog("tensors"))


def first_names(keys: Iterable[str]) -> tuple[str, ...] | None:
    """The keys up to their first dots, which are few; None if they are too many to send."""
    names = sorted({key.partition(".")[0] for key in keys})
    return tuple(names) if len(names) <= _MOST_SENT else None


def hash_of_names(names: tuple[str, ...] | None) -> int:
    """Equal for equal names, see ``Comm.exchange``."""
    return xxhash.xxh3_64_intdigest(repr(names).encode()) >> 2


def warn_of_unasked(
    asked: Sequence[tuple[str, ...] | None], stored_keys: Callable[[], Iterable[str]]
) -> None:
    """Warn that a load leaves tensors unread, by the ``first_names`` of what each rank asks for,
    unless it asks for none, or for too many names.
    """
    if None in asked or not any(asked):
        return
    names = set().union(*(own for own in asked if own is not None))
    keys = [*stored_keys()]
    unasked = Counter(name for key in keys if (name := key.partition(".")[0]) not in names)
    if not unasked:
        return
    few = ", ".join(f"{name} ({count})" for name, count in unasked.most_common(_MOST_NAMED))
    logger.warning(
        "%d of the %d stored tensors are not loaded, because no rank asks for their names: %s%s. "
        "If this is meant, pass strict='raise_unexpected'; strict='raise_all' makes it an error",
        unasked.total(),
        len(keys),
        few,
        ", ..." if len(unasked) > _MOST_NAMED else "",
    )


@contextmanager
def filling(wanted: WantedTable, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Let the body fill given tensors; if it fails when it ``has_begun``, note on the error which.

    Their versions are raised, so that a backward pass which needs their old values is an error. Not
    those of views that autograd made, such as chunks of a parameter: they could not be used again.
    """
    bases = [(data, data._base) for data in wanted.data if data is not None]  # noqa: SLF001
    increment_version([data for data, base in bases if base is None or not base.requires_grad])
    try:
        yield
    except CheckpointingException as error:
        pairs = zip(wanted.keys, wanted.data, strict=True)
        given = sorted({key for key, data in pairs if data is not None})
        # An I/O error may come in the middle of the first read, before anything is reported.
        if given and (has_begun() or isinstance(error, RankFailedError)):
            more = f" and {len(given) - 20} more" if len(given) > 20 else ""
            error.add_note(f"These tensors may be partly filled: {', '.join(given[:20])}{more}")
        raise
