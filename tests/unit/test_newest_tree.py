"""Where a database keeps values is remembered until the database changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_checkpointing.errors import CorruptCheckpointError
from dist_checkpointing.strategies.tensorstore.reader import NewestTree
from ocdbt_databases import contents, store, write

VALUES = {b"layers.%d.w/c.0" % i: bytes([i % 251]) * (1 + i % 40) for i in range(700)}


@pytest.mark.parametrize("keeps_nodes", [True, False])
def test_a_change_is_seen(tmp_path: Path, keeps_nodes: bool) -> None:
    write(tmp_path, VALUES)
    newest = NewestTree(tmp_path)
    wanted = [*VALUES, b"zzz"]
    for _ in range(2):
        found = newest(keeps_nodes=keeps_nodes).find(wanted)
        assert contents(tmp_path, found) == [*VALUES.values(), None]
    store(tmp_path).write(wanted[0], b"changed").result()
    found = newest(keeps_nodes=keeps_nodes).find(wanted[:2])
    assert contents(tmp_path, found) == [b"changed", VALUES[wanted[1]]]
    (tmp_path / "manifest.ocdbt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.ocdbt"):
        newest(keeps_nodes=keeps_nodes).find(wanted)
