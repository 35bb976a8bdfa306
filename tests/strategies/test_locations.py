"""Where a database keeps its values, found in trees of any height."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dist_checkpointing.errors import CorruptCheckpointError
from dist_checkpointing.strategies.raw_chunks import Extent, read_extent
from dist_checkpointing.strategies.tensorstore.locations import Places, locate

ts: Any = pytest.importorskip("tensorstore")


def database(folder: Path, context: Any, **settings: Any) -> Any:
    base = {"driver": "file", "path": f"{folder}/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base, **settings}, context=context).result()


def value(place: Extent | bytes) -> bytes:
    return read_extent(place, "w") if isinstance(place, Extent) else place


def filled(folder: Path, node_bytes: int) -> dict[str, bytes]:
    """A database of two parts, and what is in it."""
    context = ts.Context()
    config = {"max_inline_value_bytes": 16, "max_decoded_node_bytes": node_bytes}
    values = {f"layers.{i}.w/c.{i % 3}": bytes([i % 251]) * (1 + i % 40) for i in range(700)}
    target = database(folder, context, config=config)
    for part in range(2):
        # A folder whose name has to be escaped on its way through the tree.
        store = database(folder / "data" / f"a b%20:{part}", context, config=config)
        with ts.Transaction() as transaction:
            for key in list(values)[part::2]:
                store.with_transaction(transaction).write(key, values[key])
        with ts.Transaction() as transaction:
            store.experimental_copy_range_to(target.with_transaction(transaction)).result()
    assert (_height(folder) >= 2) == (node_bytes == 512)
    return values


@pytest.mark.parametrize("node_bytes", [512, 2**23], ids=["tall", "flat"])
def test_every_key_is_found_where_its_value_is(tmp_path: Path, node_bytes: int) -> None:
    values = filled(tmp_path, node_bytes)
    found = locate(tmp_path, [*values, "layers.0.w/c.9", "zzz"])
    assert {key: value(place) for key, place in found.items()} == values
    assert {type(place) for place in found.values()} == {Extent, bytes}
    assert list(locate(tmp_path, ["layers.77.w/c.2"])) == ["layers.77.w/c.2"]


@pytest.mark.parametrize("node_bytes", [512, 2**23], ids=["tall", "flat"])
def test_what_is_kept_is_what_is_there(
    tmp_path: Path, node_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked in any order, for one key or many; and each node is decoded once, when it is needed."""
    values = filled(tmp_path, node_bytes)
    decoded: list[object] = []
    dump = ts.ocdbt.dump

    def noting(base: object, node: str | None = None) -> Any:
        decoded.append(node)
        return dump(base, node)

    monkeypatch.setattr(ts.ocdbt, "dump", noting)
    places = Places(tmp_path)
    first = next(iter(values))
    assert list(places.of([first, "zzz"])) == [first]
    nodes_for_one = len(decoded)
    for key in list(values)[::-7]:
        assert value(places.of([key])[key]) == values[key]
    found = places.of(values)
    assert {key: value(place) for key, place in found.items()} == values
    assert len(decoded) == len(set(decoded))
    assert (len(decoded) > nodes_for_one) == (node_bytes == 512)
    # A change is seen: it makes another tree.
    database(tmp_path, ts.Context()).write(first, b"changed").result()
    assert places.of([first]) == {first: b"changed"}


def _height(folder: Path) -> int:
    base = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    version = ts.ocdbt.dump(base).result()["versions"][-1]
    height: int = version["root_height"]
    return height


def test_an_empty_database_has_nothing(tmp_path: Path) -> None:
    store = database(tmp_path, ts.Context())
    store.write("key", b"value").result()
    store.delete_range(ts.KvStore.KeyRange("", "")).result()
    assert locate(tmp_path, ["key"]) == {}


@pytest.mark.parametrize("place", ["..%2Fother/:d/x", ":%2Fetc/passwd", "data/:..%2F..%2Fx"])
def test_a_value_outside_of_the_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    # TensorStore does not make such a database, so its answer is forged.
    manifest = {"versions": [{"root": {"location": "btreenode::d%2Fnode:0:5"}}]}
    entries = [{"key": b"key", "indirect_value": f"value:{place}:0:5"}]

    def dump(base: object, node: str | None = None) -> Any:
        del base
        content = manifest if node is None else {"height": 0, "entries": entries}
        future = ts.Promise.new()
        future[0].set_result(content)
        return future[1]

    monkeypatch.setattr(ts.ocdbt, "dump", dump)
    with pytest.raises(CorruptCheckpointError, match="a value lies at"):
        locate(tmp_path, ["key"])


def test_a_folder_without_a_database_is_corrupt(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.ocdbt"):
        locate(tmp_path, ["key"])
