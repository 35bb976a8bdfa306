"""Checks of a load on all ranks, and what an error of it must say."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Final

import xxhash

from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointingException, CorruptCheckpointError, Finding
from dist_checkpointing.mapping import ShardedBase, StateDict
from dist_checkpointing.mapping.state_dict_parts import Partition
from dist_checkpointing.planning.coverage import check_coverage, main_rows
from dist_checkpointing.planning.load_plan import TensorColumns
from dist_checkpointing.planning.shard_table import describe
from dist_checkpointing.planning.table_exchange import exchange_tables

logger: logging.Logger = logging.getLogger(__name__)

_MOST_NAMED: Final = 4
_MOST_SENT: Final = 256


def require_same_save(is_same: bool, checkpoint_dir: str | PathLike[str]) -> None:
    """Refuse what was read if another save began meanwhile."""
    if is_same:
        return
    finding = Finding(
        "another save into this folder began after the load",
        path=str(checkpoint_dir),
        remedy="What was read may be of both: load again, and save each step into its own folder.",
    )
    message = "the checkpoint was overwritten while it was read"
    raise CorruptCheckpointError(message, [finding])


def check_access(parts: Partition, comm: Comm) -> None:
    """Check that the templates of all ranks ask for each tensor exactly once. Collective."""
    leaves: list[ShardedBase] = [*parts.tensors.values(), *parts.objects.values()]
    exchanged = exchange_tables(
        comm, "describing the template", lambda: ({"shards": describe(leaves, comm.rank)}, None)
    )
    with comm.agreed("checking the template"):
        catalog = exchanged.catalog("shards")
        check_coverage(catalog, main_rows(catalog))


@dataclass(frozen=True, slots=True)
class AskedNames:
    """What a rank asks for, as few words: the keys up to their first dots.

    Attributes:
        names: The names, sorted; None if there are too many to send.
    """

    names: tuple[str, ...] | None

    @classmethod
    def of(cls, keys: Iterable[str]) -> AskedNames:
        found = sorted({_first_name(key) for key in keys})
        return cls(tuple(found) if len(found) <= _MOST_SENT else None)

    def number(self) -> int:
        """Equal for equal names, see ``Comm.exchange``."""
        return xxhash.xxh3_64_intdigest(repr(self.names).encode()) >> 2


def rebuilt(
    rebuild: Callable[[], StateDict],
    asked_keys: Iterable[str],
    stored_keys: Callable[[], Iterable[str]],
    comm: Comm,
) -> StateDict:
    """The result of ``rebuild``; rank 0 warns of tensors that no rank asks for. Collective."""
    state_dict: StateDict = {}

    def produce() -> AskedNames:
        nonlocal state_dict
        state_dict = rebuild()
        return AskedNames.of(asked_keys)

    asked = comm.exchange("rebuilding the state dict", produce, AskedNames.number)
    if comm.rank == 0:
        _warn_of_unasked(asked, stored_keys)
    return state_dict


def _warn_of_unasked(asked: Sequence[AskedNames], stored_keys: Callable[[], Iterable[str]]) -> None:
    """Warn that a load leaves tensors unread, unless it asks for none, or for too many names."""
    names: set[str] = set()
    for of_rank in asked:
        if of_rank.names is None:
            return
        names.update(of_rank.names)
    if not names:
        return
    stored = Counter(map(_first_name, stored_keys()))
    unasked = Counter({name: count for name, count in stored.items() if name not in names})
    if not unasked:
        return
    few = ", ".join(f"{name} ({count})" for name, count in unasked.most_common(_MOST_NAMED))
    logger.warning(
        "%d of the %d stored tensors are not loaded, because no rank asks for their names: %s%s. "
        "If this is meant, pass strict='raise_unexpected'; strict='raise_all' makes it an error",
        unasked.total(),
        stored.total(),
        few,
        ", ..." if len(unasked) > _MOST_NAMED else "",
    )


def _first_name(key: str) -> str:
    return key.partition(".")[0]


@contextmanager
def noting_filled(wanted: TensorColumns) -> Iterator[None]:
    """Note on an error of the body which given tensors it may have filled."""
    try:
        yield
    except CheckpointingException as error:
        pairs = zip(wanted.keys, wanted.data, strict=True)
        given = sorted({key for key, data in pairs if data is not None})
        if given:
            error.add_note(
                f"The given tensors of {len(given)} keys may be partly filled: "
                f"{', '.join(given[:20])}{', ...' if len(given) > 20 else ''}"
            )
        raise
