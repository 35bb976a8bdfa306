"""What a save refuses about a state dict: no data, unwrapped distributed tensors, layouts, keys
that clash, and common state that differs between ranks, since only that of rank 0 is saved.
"""

from __future__ import annotations

import argparse
import collections
import copy
import hashlib
import io
import logging
import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import Finding, InvalidShardingError, ranks_text
from dist_checkpointing.format.index import Index
from dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from dist_checkpointing.mapping.nested_dicts import (
    DictKey,
    Path,
    Position,
    flatten,
    is_container,
    path_text,
)
from dist_checkpointing.planning.shard_table import ShardTable
from dist_checkpointing.threads import paused_collector

logger: logging.Logger = logging.getLogger(__name__)

LARGE_BYTES: Final = 64 << 20
"""``save`` warns about more than this of tensors in the common state."""

_MOST_NAMED: Final = 20
_PLAIN_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)


class Attribute(NamedTuple):
    name: str

    def __str__(self) -> str:
        return f".{self.name}"


ValuePath = tuple[Any, ...]
"""A path in which some steps may be Attributes."""

_NUMBERS_AND_TEXTS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})


class Found(NamedTuple):
    """A value in a nest; its container, or for the outermost value its path; and what makes the
    last step of its path, from ``argument``.
    """

    value: Any
    parent: Found | ValuePath
    step: Callable[[Any], Any] | None = None
    argument: Any = None

    @property
    def path(self) -> ValuePath:
        """Path of the value; only computed on request, because few values are ever named."""
        steps: list[Any] = []
        found: Found | ValuePath = self
        while isinstance(found, Found):
            if found.step is not None:
                steps.append(found.step(found.argument))
            found = found.parent
        return (*found, *reversed(steps))


def walk(tree: object, path: ValuePath = ()) -> Iterator[Found]:
    """Every value in a nest but numbers and texts; every container once.

    Not only dicts, lists and tuples are opened, but also sets (members have the path of the set),
    deques and namespaces.
    """
    seen: set[int] = set()
    waiting = [Found(tree, path)]
    while waiting:
        found = waiting.pop()
        below = _children(found)
        if below is not None:
            if id(found.value) in seen:
                continue
            seen.add(id(found.value))
            waiting += reversed(below)
        yield found


def _children(found: Found) -> list[Found] | None:
    value = found.value
    step: Callable[[Any], Any] | None
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        step, pairs = DictKey, value.items()
    elif is_container(value) or isinstance(value, collections.deque):
        step, pairs = Position, enumerate(value)
    elif type(value) in (set, frozenset):
        step, pairs = None, enumerate(value)
    elif type(value) in (argparse.Namespace, types.SimpleNamespace):
        step, pairs = Attribute, vars(value).items()
    else:
        return None
    known = _NUMBERS_AND_TEXTS
    return [Found(child, found, step, key) for key, child in pairs if type(child) not in known]


def is_distributed_tensor(value: object) -> bool:
    """Whether this is a tensor that knows its own sharding: a DTensor or torch's ShardedTensor."""
    # By attributes, so that looking at plain tensors does not import torch.distributed.
    if type(value) in _PLAIN_TENSORS or not isinstance(value, torch.Tensor):
        return False
    return any(
        hasattr(value, name) for name in ("device_mesh", "local_shards", "__create_chunk_list__")
    )


def refuse_distributed(
    common: Iterable[Found],
    tensors: Mapping[Path, ShardedTensor],
    objects: Mapping[Path, ShardedObject],
) -> None:
    """Refuse tensors that know their own sharding where that would be ignored: among the values of
    the common state, as data of ShardedTensors, and in objects. InvalidShardingError with all.
    """
    nests = [(common, None), *((walk(leaf.data, path), leaf.key) for path, leaf in objects.items())]
    findings = []
    for values, key in nests:
        for found in values:
            if is_distributed_tensor(found.value):
                at = path_text(found.path)
                where = "" if key is None else f" inside a ShardedObject at {at}"
                findings.append(_unwrapped(found.value, at if key is None else key, where))
    kinds = set(map(type, map(attrgetter("data"), tensors.values())))
    if not kinds.issubset({*_PLAIN_TENSORS, type(None)}):
        what = " but is the data of the ShardedTensor "
        findings += [
            _unwrapped(leaf.data, leaf.key, f"{what}{path_text(path)}")
            for path, leaf in tensors.items()
            if is_distributed_tensor(leaf.data)
        ]
    _refuse("the state dict holds sharded tensors that are not wrapped", findings)


def _refuse(message: str, findings: Sequence[Finding]) -> None:
    InvalidShardingError.raise_if(findings, message)


def _unwrapped(value: object, key: str, where: str = "") -> Finding:
    kind = type(value)
    return Finding(
        f"this {kind.__name__} is not wrapped{where}, so its sharding would be ignored",
        key,
        found=f"{kind.__module__}.{kind.__qualname__}",
        remedy="Pass the state dict through dist_checkpointing.interop.shard_state_dict: "
        "save(shard_state_dict(state), path), load(shard_state_dict(state), path).",
    )


def check_data(tensors: Mapping[Path, ShardedTensor], *, is_stored: bool = True) -> None:
    """Refuse main replicas without data; and data that is not dense or not in memory, unless the
    planner stores something else: InvalidShardingError with all of them.
    """
    wrong = [
        (number, leaf.key, *found)
        for number, leaf in enumerate(tensors.values())
        for found in _without_data(leaf, is_stored=is_stored)
    ]
    # Paths are made when they are asked for, and most states have all data.
    paths = [*tensors] if wrong else []
    findings = [
        Finding(f"the data at {path_text(paths[number])} is {problem}", key, remedy=remedy)
        for number, key, problem, remedy in wrong
    ]
    _refuse("the data of some shards cannot be stored", findings)


def _without_data(leaf: ShardedTensor, *, is_stored: bool) -> Sequence[tuple[str, str]]:
    if leaf.data is not None:
        return without_values(leaf.data) if is_stored else ()
    remedy = "A leaf without data can only be loaded."
    return [("None", remedy)] if is_main_replica(leaf.replica_id) else ()


def refuse_shared_keys(index: Index, objects: ShardTable) -> None:
    """Refuse keys that are tensors on some ranks and objects on others."""
    keys = np.array(objects.key_column)
    findings = [
        Finding(
            "is a ShardedTensor on some ranks and a ShardedObject on others",
            key,
            ranks=tuple(objects.ranks_of(keys == key).tolist()),
            remedy="Rename one of them.",
        )
        for key in sorted({*objects.key_column})
        if key in index
    ]
    _refuse("keys of the state dict clash", findings)


def without_values(tensor: torch.Tensor) -> list[tuple[str, str]]:
    """Why a tensor has no dense values to write, with a remedy; empty if it has."""
    if tensor.is_meta:
        return [("on the meta device", "Materialize it, for example with to_empty() and a load.")]
    if tensor.is_nested:
        return [("a nested tensor", "Save its values and its offsets, or a padded tensor.")]
    if tensor.layout is not torch.strided:
        remedy = "Save its indices and values, or to_dense()."
        return [(f"a tensor of layout {tensor.layout}", remedy)]
    return []


def warn_of_large_tensors(common: Iterable[Found]) -> None:
    """Log a warning if the tensors in the common state are so large that they should be sharded."""
    tensors = {
        id(found.value): found
        for found in common
        if isinstance(found.value, torch.Tensor) and found.value.layout is torch.strided
    }
    num_bytes = sum(found.value.nbytes for found in tensors.values())
    if num_bytes <= LARGE_BYTES:
        return
    largest = max(tensors.values(), key=lambda found: int(found.value.nbytes))
    logger.warning(
        "the common state holds %s of tensors; the largest is %s (%s). Rank 0 writes all of it, "
        "and every rank reads all of it. Wrap tensors that are sharded or large:\n"
        "    from dist_checkpointing.interop import shard_state_dict\n"
        "    save(shard_state_dict(state_dict), path)\n"
        "    load(shard_state_dict(state_dict), path)",
        bytes_text(num_bytes),
        path_text(largest.path),
        bytes_text(largest.value.nbytes),
    )


class _Leaf(NamedTuple):
    """What ranks send each other about a value: its digest; and for a tensor with axes, which may
    be a part of a larger one, its dtype and shape as text.
    """

    digest: bytes
    text: str


CommonDigests = Mapping[str, _Leaf]


def common_digests(common: CommonStateDict) -> CommonDigests:
    """What the values of a rank's common state are, by path, without the values."""
    leaves, _ = flatten(common)
    return {path_text(path): _described(leaf) for path, leaf in leaves.items()}


def number_of_digests(digests: CommonDigests) -> int:
    """A number of 62 bits, the same on ranks with the same values."""
    text = repr(sorted((path, leaf.digest) for path, leaf in digests.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 2


def compare_common_state(digests: Callable[[], CommonDigests], comm: Comm) -> None:
    """Compare the common state of all ranks, whose numbers differ, with that of rank 0, which is
    saved. Collective. Rank 0 logs one warning about all values that differ.

    InvalidShardingError on every rank, if a tensor of any rank is not the same on rank 0, and so
    would be lost. A tensor without axes counts as a number.
    """
    step = "comparing the common state"
    reference = comm.from_rank0(step, digests)

    @paused_collector()
    def differences() -> dict[str, str]:
        own = digests()
        message = "the ranks hold different tensors in the common state"
        InvalidShardingError.raise_if(_lost_tensors(reference, own), message)
        return _differences(reference, own)

    different = comm.to_rank0(step, differences)
    if comm.rank == 0:
        logger.warning("%s", _warning(different))


def _lost_tensors(reference: Mapping[str, _Leaf], own: Mapping[str, _Leaf]) -> list[Finding]:
    """The tensors of this rank that would be lost, because rank 0 has others or none."""
    nothing = _Leaf(b"", "nothing")
    return [
        Finding(
            "this tensor is not wrapped, and only rank 0's would be saved",
            path,
            expected=f"as on rank 0: {reference.get(path, nothing).text or 'no tensor'}",
            found=f"another {leaf.text}",
            remedy="A part of a whole: ShardedTensor.from_rank_offsets(key, tensor, (axis, "
            "part, number of parts)). A value that each rank has for itself, such as the state "
            "of a random number generator: ShardedObject(key, value, (world_size,), (rank,)).",
        )
        for path, leaf in own.items()
        if leaf.text and reference.get(path) != leaf
    ]


def _differences(reference: Mapping[str, _Leaf], own: Mapping[str, _Leaf]) -> dict[str, str]:
    """Path -> how its value differs on this rank, as text that ends before the rank's number."""
    found = dict.fromkeys(reference.keys() - own.keys(), "missing on")
    found |= dict.fromkeys(own.keys() - reference.keys(), "missing on rank 0, so not saved; is on")
    both = reference.keys() & own.keys()
    differing = (path for path in both if reference[path].digest != own[path].digest)
    return found | dict.fromkeys(differing, "another value on")


def _warning(different: list[dict[str, str]]) -> str:
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, of_rank in enumerate(different):
        for path, what in of_rank.items():
            ranks.setdefault((path, what), []).append(rank)
    lines = [
        f"  - {path}: {what} {ranks_text(on, _MOST_NAMED)}"
        for (path, what), on in sorted(ranks.items())
    ]
    hidden = len(lines) - _MOST_NAMED
    if hidden > 0:
        lines[_MOST_NAMED:] = [f"  - and {hidden} more"]
    head = "the ranks hold different values in the common state, of which only rank 0's are saved:"
    remedy = (
        "Wrap what each rank has for itself: ShardedObject(key, value, (world_size,), (rank,))."
    )
    return "\n".join([head, *lines, remedy])


def _described(leaf: object) -> _Leaf:
    if isinstance(leaf, torch.Tensor) and leaf.ndim:
        return _Leaf(_digest(leaf), f"{leaf.dtype} of shape {list(leaf.shape)}")
    return _Leaf(_digest(leaf), "")


class _DigestingPickler(pickle.Pickler):
    """Pickles tensors by value: their own pickles also depend on their place in memory."""

    def reducer_override(self, obj: Any) -> Any:
        return (bytes, (_digest(obj),)) if isinstance(obj, torch.Tensor) else NotImplemented


def _pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    _DigestingPickler(buffer).dump(value)
    return buffer.getvalue()


def _digest(leaf: object) -> bytes:
    """Equal for equal leaves, unlike a pickle, which depends on which objects are identical."""
    try:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
            bits = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            content = f"{leaf.dtype}{tuple(leaf.shape)}".encode() + bits.numpy().tobytes()
        elif isinstance(leaf, bool | int | float | complex | str | bytes | None):
            content = repr(leaf).encode()
        elif isinstance(leaf, torch.Tensor):
            content = _pickled(leaf.__reduce_ex__(2))  # type: ignore[no-untyped-call]
        else:
            content = _pickled(copy.deepcopy(leaf))
    except Exception as error:  # noqa: BLE001 - saving it will fail with a better message
        content = repr(error).encode()
    return hashlib.blake2b(content, digest_size=16).digest()
