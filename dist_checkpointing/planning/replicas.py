"""Whether the copies that ranks hold of the same part of a global tensor are equal."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

import numpy as np
import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import Finding, InvalidShardingError, ranks_text
from dist_checkpointing.format import dtypes
from dist_checkpointing.format.geometry import unravel
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.planning.agreed_cache import AgreedCache
from dist_checkpointing.planning.compared_values import (
    SAMPLES,
    OwnValues,
    digest_of_values,
    flat_values,
    host_bytes,
    looked_at,
    owned_values,
    piece_digests,
    piece_step,
    text_of,
)
from dist_checkpointing.planning.copies import Copies, copies_of, with_crossings
from dist_checkpointing.planning.describe import describe
from dist_checkpointing.planning.exchange import exchange_tables
from dist_checkpointing.planning.plan_save import plan_inputs
from dist_checkpointing.planning.shard_table import ShardTable

logger: logging.Logger = logging.getLogger(__name__)

_KEPT_AS: Final = "replicas"
_DIGEST: Final = np.dtype([("unit", "<i4"), ("digest", "V16")])
_MOST_NAMED: Final = 16

OnReplicaMismatch = Literal["raise", "warn"]


class ReplicaCheck(Enum):
    """How much of the replicas a save compares before it writes.

    Attributes:
        OFF: Nothing.
        SAMPLE: Another sixteenth at each save, so that sixteen saves look at everything.
        ALL: Everything.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ReplicaCheck, ShardedTensor, save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}
        >>> save(state, "ckpt", replicas=ReplicaCheck.ALL)
    """

    OFF = "off"
    SAMPLE = "sample"
    ALL = "all"


class _Kept:
    """What a process keeps for its ranks between saves."""

    def __init__(self) -> None:
        self.copies: AgreedCache[Copies] = AgreedCache()
        self.num_samples = 0


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What a rank tells of its copies while the save is planned.

    The number of the copies that it knows of, that of the sample (None if everything is looked at),
    and the digests of those that it speaks for, packed.
    """

    copies: int
    sample: int | None
    digests: bytes


Groups = list[tuple[bytes, list[int]]]
"""Digest and ranks of those whose copies of a unit agree with each other, the largest first."""


class ReplicaComparison:
    """Compares the copies that ranks hold of the same parts: ``bring``, exchange, ``conclude``.

    Each rank digests its copies of parts that several ranks hold. Of each part the lowest rank
    tells its digest, 16 bytes, and the others compare. Copies that are cut differently from the
    main replicas are compared box by box; those that consist of too many boxes are counted.
    """

    def __init__(
        self,
        shards: Sequence[ShardedTensor],
        check: ReplicaCheck,
        on_mismatch: OnReplicaMismatch,
        comm: Comm,
    ) -> None:
        self._is_off = check is ReplicaCheck.OFF or comm.world_size == 1
        self._held = [s for s in shards if s.data is not None] if not self._is_off else []
        self._is_sampled, self._on_mismatch = check is ReplicaCheck.SAMPLE, on_mismatch
        self._comm = comm
        self._kept: _Kept = comm.kept.setdefault(_KEPT_AS, _Kept())
        self._sample: int | None = None
        self._own: list[tuple[OwnValues, bytes]] = []

    def bring(self) -> ReplicaFacts | None:
        """What this rank can tell before it hears of others; None at the first save of a state."""
        if self._is_off:
            return None
        number = self._kept.copies.number_of(self._description())
        copies = self._kept.copies.value
        if number is None or copies is None:
            return None
        self._sample = self._kept.num_samples % SAMPLES if self._is_sampled else None
        return ReplicaFacts(number, self._sample, self._digests(copies))

    def conclude(self, brought: Sequence[ReplicaFacts | None]) -> None:
        """Compare what ``bring`` gave on each rank. Collective.

        Raises:
            InvalidShardingError: naming each part whose copies differ, which ranks agree, and the
                first element that differs.
        """
        if self._is_off:
            return
        comm, kept = self._comm, self._kept
        if any(own is None for own in brought):
            brought = comm.exchange("comparing replicas", self.bring)
        facts = [own for own in brought if own is not None]
        if len(facts) == comm.world_size and len({(f.copies, f.sample) for f in facts}) == 1:
            assert kept.copies.value is not None
            copies, spoken = kept.copies.value, [own.digests for own in facts]
        else:
            copies = self._copies()
            if self._is_sampled:
                self._sample = comm.broadcast(kept.num_samples) % SAMPLES
            spoken = comm.exchange("comparing replicas", lambda: self._digests(copies))
        kept.num_samples += self._is_sampled
        told = dict(_unpacked(b"".join(spoken)))
        others = [(own.unit, digest) for own, digest in self._own if told[own.unit] != digest]
        different: list[dict[int, bytes]] = []
        if not comm.all_same(None if others else 0):
            different = [dict(_unpacked(data)) for data in comm.all_gather(_packed(others))]
        if comm.rank == 0 and copies.num_apart:
            logger.info("%d parts of replicas are cut differently: not compared", copies.num_apart)
        if not different:
            return
        groups = dict(_differences(copies, told, different))
        firsts = self._first_differences(copies, groups)
        findings = [
            _finding(copies, unit, own, firsts.get(unit, "")) for unit, own in groups.items()
        ]
        error = InvalidShardingError("replicas hold different values", findings)
        if self._on_mismatch == "raise":
            raise error
        if comm.rank == 0:
            logger.warning("%s", error)

    def _description(self) -> tuple[Any, ...]:
        return (self._comm.rank, self._comm.world_size, *plan_inputs(self._held))

    def _copies(self) -> Copies:
        """The copies of the ranks; those of the last save, while nothing but values has changed."""
        comm, cache = self._comm, self._kept.copies
        with comm.agreed("describing the shards"):
            description = self._description()
        if comm.all_same(cache.number_of(description)):
            assert cache.value is not None
            return cache.value
        own: list[ShardTable] = []

        def describe_own() -> tuple[dict[str, ShardTable], None]:
            own.append(describe(self._held, comm.rank))
            return {"shards": own[0]}, None

        exchanged = exchange_tables(comm, "describing the shards", describe_own)
        with comm.agreed("looking for replicas"):
            copies = with_crossings(copies_of(exchanged.catalog("shards"), own[0]))
            number = xxhash.xxh3_64_intdigest(b"".join(exchanged.digests)) >> 2
            cache.keep(description, copies, number)
        return copies

    def _digests(self, copies: Copies) -> bytes:
        """Digest what this rank compares, and pack that for which it speaks."""
        speakers, rank = copies.speakers(), self._comm.rank
        self._own = []
        spoken: dict[int, bytes] = {}
        for own in owned_values(copies, self._held, rank):
            _, values = looked_at(flat_values(own), own.unit, self._sample)
            if len(values):
                digest = digest_of_values(values)
                self._own.append((own, digest))
                if speakers[own.unit] == rank:
                    spoken.setdefault(own.unit, digest)
        return _packed(spoken.items())

    def _first_differences(self, copies: Copies, differences: dict[int, Groups]) -> dict[int, str]:
        """In words, where two copies of a unit differ first. Collective."""
        comm, step = self._comm, "looking for the first difference"
        named = list(differences.items())[:_MOST_NAMED]
        pairs = {unit: groups[:2] for unit, groups in named if len(groups) > 1}
        values = {
            own.unit: looked_at(flat_values(own), own.unit, self._sample)
            for own, digest in self._own
            if any(of == digest and r[0] == comm.rank for of, r in pairs.get(own.unit, ()))
        }
        pieces = comm.exchange(
            step, lambda: {unit: piece_digests(part) for unit, (_, part) in values.items()}
        )
        numbers = {
            unit: _first(pieces[one[0]][unit], pieces[other[0]][unit])
            for unit, ((_, one), (_, other)) in pairs.items()
        }

        def tell() -> dict[int, tuple[int, bytes]]:
            told = {}
            for unit, (begin, part) in values.items():
                size = piece_step(part)
                start = numbers[unit] * size
                told[unit] = begin + start, bytes(host_bytes(part[start : start + size]))
            return told

        told = comm.exchange(step, tell)
        words = {}
        for unit, ((_, (one, *_)), (_, (other, *_))) in pairs.items():
            (begin, left), (_, right) = told[one][unit], told[other][unit]
            row, box, flat = copies.place(unit)
            dtype = dtypes.from_name(copies.parts.dtype(row))
            at = _first(left, right) // dtype.itemsize
            span = slice(at * dtype.itemsize, (at + 1) * dtype.itemsize)
            inside = unravel(begin + at + (0 if flat is None else flat[0]), box.shape)
            place = tuple(a + b for a, b in zip(box.offset, inside, strict=True))
            found = [text_of(raw[span], dtype.torch) for raw in (left, right)]
            if found[0] == found[1]:  # two that are no numbers
                found = [raw[span].hex() for raw in (left, right)]
            words[unit] = f"first at {place}: {found[0]} on rank {one}, {found[1]} on rank {other}"
        return words


def _first(one: Sequence[object], other: Sequence[object]) -> int:
    """Position at which two sequences differ first."""
    rows = enumerate(zip(one, other, strict=True))
    return next(number for number, (a, b) in rows if a != b)


def _packed(rows: Any) -> bytes:
    return np.array([*rows], dtype=_DIGEST).tobytes()


def _unpacked(data: bytes) -> Iterator[tuple[int, bytes]]:
    rows = np.frombuffer(data, dtype=_DIGEST)
    return zip(rows["unit"].tolist(), map(bytes, rows["digest"]), strict=True)


def _differences(
    copies: Copies, told: dict[int, bytes], different: Sequence[dict[int, bytes]]
) -> Iterator[tuple[int, Groups]]:
    """The units whose copies differ, and which ranks agree; the same on all ranks."""
    for unit in sorted({unit for of_rank in different for unit in of_rank}):
        agreeing: dict[bytes, list[int]] = {}
        for rank in copies.compared(unit):
            agreeing.setdefault(different[rank].get(unit, told[unit]), []).append(rank)
        yield unit, sorted(agreeing.items(), key=lambda group: (-len(group[1]), group[1]))


def _finding(copies: Copies, unit: int, groups: Groups, first: str) -> Finding:
    """What to say of a unit whose copies differ; the same on all ranks."""
    row, box, flat = copies.place(unit)
    where = str(box) + ("" if flat is None else f", {flat[0]}:{flat[1]}")
    most, *rest = [ranks for _, ranks in groups]
    rest = rest or [most]  # a rank that holds several copies
    return Finding(
        f"the copies of {where} are not the same" + (first and f", {first}"),
        copies.parts.key(row),
        expected=f"as on {ranks_text(most, _MOST_NAMED)}",
        found="; ".join(f"other values on {ranks_text(ranks, _MOST_NAMED)}" for ranks in rest),
        ranks=tuple(rank for ranks in rest for rank in ranks)[:_MOST_NAMED],
        remedy="Load the last checkpoint on all ranks, and look at the machine of these ranks.",
    )
