"""Whether all ranks hold the same common state, because only that of rank 0 is saved."""

from __future__ import annotations

import copy
import hashlib
import io
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import Finding, InvalidShardingError, ranks_text
from dist_checkpointing.mapping import CommonStateDict
from dist_checkpointing.mapping.nested_dicts import flatten, path_text
from dist_checkpointing.threads import paused_collector

logger: logging.Logger = logging.getLogger(__name__)
_MOST_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class _Leaf:
    """What ranks know of a value of each other: its digest, and dtype and shape of a tensor that
    may be a part of a larger one; "" for other values.
    """

    digest: bytes
    text: str


class CommonDigests:
    """What the values of a rank's common state are, by path, without the values; ``preprocess``
    gives what is compared between ranks.
    """

    def __init__(
        self,
        common: CommonStateDict,
        preprocess: Callable[[CommonStateDict], CommonStateDict] | None,
    ) -> None:
        leaves, _ = flatten(common if preprocess is None else preprocess(dict(common)))
        self.leaves = {path_text(path): _described(leaf) for path, leaf in leaves.items()}

    @property
    def number(self) -> int:
        """A number of 62 bits, the same on ranks with the same values."""
        text = repr(sorted((path, leaf.digest) for path, leaf in self.leaves.items())).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 2


def compare_common_state(digests: Callable[[], CommonDigests], comm: Comm) -> None:
    """Compare the common state of all ranks, whose numbers differ, with that of rank 0, which is
    saved. Collective. Rank 0 logs one warning about all values that differ.

    InvalidShardingError on every rank, if a tensor of any rank is not the same on rank 0, and so
    would be lost. A tensor without axes counts as a number.
    """
    step = "comparing the common state"
    reference = comm.from_rank0(step, lambda: digests().leaves)

    @paused_collector()
    def differences() -> dict[str, str]:
        own = digests().leaves
        if findings := _lost_tensors(reference, own):
            message = "the ranks hold different tensors in the common state"
            raise InvalidShardingError(message, findings)
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
