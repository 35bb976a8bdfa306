"""Takes values out of a checkpoint's database, and gives their disk space back.

Deleting keys from a database frees nothing: it writes a new tree beside the old one. Space comes
back when a data file that nothing kept lies in is deleted, and a few kept values that alone hold up
a large file are written again elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dist_checkpointing.errors import CorruptCheckpointError, Finding
from dist_checkpointing.filesystem import local
from dist_checkpointing.format.index import Index
from dist_checkpointing.format.removal import PlannedRemoval
from dist_checkpointing.strategies.raw_chunks import Extent, read_extent
from dist_checkpointing.strategies.tensorstore import database, keys
from dist_checkpointing.strategies.tensorstore.locations import Survey, survey

_MOST_MOVED_BYTES = 64 * 2**20
_MOST_MOVED_SHARE = 8
"""A file is freed by moving the rest if that is at most an eighth of it."""


@dataclass(frozen=True, slots=True)
class _Split:
    """The database, taken apart.

    Attributes:
        dead: keys of values that no index names.
        moved: kept values that are written again.
        unused: data files, relative to the checkpoint, that are free then.
        shared: bytes of dead values in files that stay.
    """

    dead: tuple[str, ...]
    moved: Mapping[str, Extent]
    unused: tuple[str, ...]
    shared: Mapping[str, int]


def plan_removal(root: Path, gone: Iterable[str], kept: Index) -> PlannedRemoval:
    """What ``drop_all_but`` would do."""
    split = _split(root, kept, survey(root))
    moved_bytes = sum(extent.num_bytes for extent in split.moved.values())
    return PlannedRemoval(tuple(gone), split.unused, split.shared, moved_bytes)


def drop_all_but(root: Path, kept: Index) -> None:
    """Drop everything that ``kept`` does not name, also what a removal cut off has left.

    Raises:
        CorruptCheckpointError: if the database then does not hold what it should; nothing that it
            held has been deleted.
    """
    for name in local.names_in(root / database.NODES_NAME):
        if name.endswith(".__lock"):  # of a removal that was killed while it wrote
            local.remove(root / database.NODES_NAME / name, root)
    before = survey(root)
    if not before.values:
        return
    split = _split(root, kept, before)
    if split.dead or split.moved:
        moved = {key: read_extent(extent, key) for key, extent in split.moved.items()}
        database.change(root, split.dead, moved)
    after = survey(root)
    lost = before.values.keys() - set(split.dead) - after.values.keys()
    if lost:
        findings = [Finding("lost from the database", key, path=str(root)) for key in sorted(lost)]
        raise CorruptCheckpointError("the database does not hold what it should", findings)
    for name in split.unused:
        # A node of the tree may still lie in it.
        if name not in after.files:
            local.remove(root / name, root)
    for lane in _lanes(root):
        if not (lane / database.NODES_NAME).exists():
            local.remove(lane, root)  # nothing is left of this database


def _lanes(root: Path) -> list[Path]:
    """The databases that ranks have filled."""
    data = root / database.DATA_NAME
    sections = [data / name for name in local.names_in(data)]
    found = [section / name for section in sections for name in local.names_in(section)]
    return [lane for lane in found if lane.is_dir()]


def _split(root: Path, kept: Index, found: Survey) -> _Split:
    tensors = {local.disk_name(key) for key in kept}
    cells = {
        keys.object_key(key, cell, shape)
        for key, shape in kept.objects.items()
        for cell in itertools.product(*map(range, shape))
    }
    alive = {key for key in found.values if key.partition("/")[0] in tensors or key in cells}
    dead_bytes: dict[str, int] = {}
    staying: dict[str, dict[str, Extent]] = {}
    for key, value in found.values.items():
        if not isinstance(value, Extent):
            continue
        name = Path(value.path).relative_to(root).as_posix()
        if key in alive:
            staying.setdefault(name, {})[key] = value
        else:
            dead_bytes[name] = dead_bytes.get(name, 0) + value.num_bytes
    moved: dict[str, Extent] = {}
    room = _MOST_MOVED_BYTES
    for name, values in sorted(staying.items()):
        size = sum(extent.num_bytes for extent in values.values())
        if name in dead_bytes and size * _MOST_MOVED_SHARE <= dead_bytes[name] and size <= room:
            moved |= values
            room -= size
    in_use = {name for name, values in staying.items() if not moved.keys() >= values.keys()}
    nodes = [lane / database.NODES_NAME for lane in _lanes(root)]
    data = [folder / name for folder in nodes for name in local.names_in(folder)]
    unused = {path.relative_to(root).as_posix() for path in data} - in_use
    return _Split(
        tuple(key for key in found.values if key not in alive),
        moved,
        tuple(sorted(unused)),
        {name: size for name, size in dead_bytes.items() if name in in_use},
    )
