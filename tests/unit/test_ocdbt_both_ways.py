"""Whatever we write TensorStore opens, lists, reads and extends; whatever it wrote we read."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from hypothesis import given, strategies as st

from dist_checkpointing.strategies.tensorstore import ocdbt_nodes, ocdbt_tree
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import INLINE, Body, Malformed
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import Tree
from dist_checkpointing.strategies.tensorstore.reader import NewestTree
from ocdbt_databases import contents, read, read_by_tensorstore, store, strangers, write
from tiers import examples

NAMES = st.one_of(
    st.binary(max_size=12),
    st.text("ab./é", max_size=30).map(str.encode),
    st.integers(0, 400).map(lambda i: b"model.layers.%d.self_attention.weight/c.0" % i),
)
VALUES = st.dictionaries(NAMES, st.binary(max_size=40), max_size=60)
FEW = examples(20)


def find_each(folder: Path, values: Mapping[bytes, bytes]) -> None:
    """One by one, in any order, by a tree that remembers its nodes and one that does not."""
    for keeps_nodes in (True, False):
        tree = Tree(folder, keeps_nodes=keeps_nodes)
        for key in sorted(values, key=hash):
            tree.num_keys = 1 << 30  # so that it looks for this key alone
            assert contents(folder, tree.find([key])) == [values[key]]
        unknown = strangers(list(values))
        assert contents(folder, tree.find(unknown)) == [None] * len(unknown)
    asked = [*values, *strangers(list(values)), *values]
    assert contents(folder, Tree(folder).find(asked)) == [values.get(key) for key in asked]


@FEW
@given(VALUES, VALUES, st.sampled_from([40, 200, 2**18]), st.integers(1, 3), st.data())
def test_tensorstore_reads_and_extends_what_we_wrote(
    values: dict[bytes, bytes],
    added: dict[bytes, bytes],
    node_bytes: int,
    num_files: int,
    data: st.DataObject,
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        # The writer of the manifest and that of the tree.
        patch.setattr(ocdbt_nodes, "NODE_BYTES", node_bytes)
        patch.setattr(ocdbt_tree, "NODE_BYTES", node_bytes)
        folder = Path(name)
        write(folder, values, num_files)
        assert read_by_tensorstore(folder) == values
        assert read(folder) == values
        find_each(folder, values)
        removed = data.draw(st.sets(st.sampled_from(sorted(values)))) if values else set()
        with ts.Transaction() as transaction:
            opened = store(folder).with_transaction(transaction)
            for key, value in [*added.items(), *((key, None) for key in removed)]:
                opened.write(key, value)
        expected = {k: v for k, v in (values | added).items() if k not in removed}
        assert read_by_tensorstore(folder) == expected
        assert read(folder) == expected
        find_each(folder, expected)


CONFIGS = st.fixed_dictionaries(
    {
        "max_inline_value_bytes": st.sampled_from([0, 8, 100]),
        "max_decoded_node_bytes": st.sampled_from([1, 200, 2**23]),
        "version_tree_arity_log2": st.sampled_from([1, 2, 4]),
        "compression": st.sampled_from([None, {"id": "zstd"}, {"id": "zstd", "level": 9}]),
    }
)
COMMITS = st.lists(
    st.dictionaries(NAMES, st.one_of(st.none(), st.binary(max_size=200)), min_size=1, max_size=20),
    min_size=1,
    max_size=8,
)


@FEW
@given(CONFIGS, COMMITS)
def test_we_read_what_tensorstore_wrote(
    config: dict[str, Any], commits: list[dict[bytes, bytes | None]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefixes = {"value_data_prefix": "values/", "btree_node_data_prefix": "nodes/a"}
        opened = store(folder, config=config, **prefixes)
        expected: dict[bytes, bytes] = {}
        for commit in commits:
            with ts.Transaction() as transaction:
                for key, value in commit.items():
                    opened.with_transaction(transaction).write(key, value)
            expected |= {key: value for key, value in commit.items() if value is not None}
            expected = {k: v for k, v in expected.items() if commit.get(k, v) is not None}
            assert read(folder) == expected
        find_each(folder, expected)


def test_many_versions(tmp_path: Path) -> None:
    """So many that the manifest refers to nodes of versions, several high."""
    opened = store(tmp_path, config={"version_tree_arity_log2": 1})
    for number in range(40):
        opened.write("key", str(number)).result()
        assert read(tmp_path) == {b"key": str(number).encode()}
    base = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    assert len(ts.ocdbt.dump(base).result()["version_tree_nodes"]) > 2


@FEW
@given(VALUES.filter(bool), VALUES)
def test_copies_by_reference(one: dict[bytes, bytes], two: dict[bytes, bytes]) -> None:
    """Below base paths, which TensorStore then writes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = ts.Context()

        def opened(place: Path) -> Any:
            base = {"driver": "file", "path": f"{place}/"}
            config = {"max_inline_value_bytes": 3}
            spec = {"driver": "ocdbt", "base": base, "config": config}
            return ts.KvStore.open(spec, context=context).result()

        target = opened(folder)
        for part, values in (("parts/a b", one), ("parts/c%20", two)):
            with ts.Transaction() as transaction:
                for key, value in values.items():
                    opened(folder / part).with_transaction(transaction).write(key, value)
            with ts.Transaction() as transaction:
                within = target.with_transaction(transaction)
                opened(folder / part).experimental_copy_range_to(within).result()
        assert read(folder) == one | two
        find_each(folder, one | two)


def test_long_keys_and_large_values(tmp_path: Path) -> None:
    values = {b"k" * 65535: b"", b"k" * 65534: b"v" * 2**20, b"": b"empty"}
    write(tmp_path / "ours", values)
    assert read_by_tensorstore(tmp_path / "ours") == values
    opened = store(tmp_path / "theirs", config={"max_inline_value_bytes": 2**20})
    for key, value in values.items():
        opened.write(key, value).result()
    assert read(tmp_path / "theirs") == values
    _, found = Tree(tmp_path / "theirs").all()
    assert set(found.extents[0].tolist()) == {INLINE}


def test_a_change_is_seen(tmp_path: Path) -> None:
    values = {b"layers.%d.w/c.0" % i: bytes([i]) for i in range(70)}
    write(tmp_path, values)
    newest = NewestTree(tmp_path)
    wanted = [*values, b"zzz"]
    for _ in range(2):
        found = newest(keeps_nodes=True).find(wanted)
        assert contents(tmp_path, found) == [*values.values(), None]
    store(tmp_path).write(wanted[0], b"changed").result()
    found = newest(keeps_nodes=True).find(wanted[:2])
    assert contents(tmp_path, found) == [b"changed", values[wanted[1]]]


def test_a_column_above_its_limit_is_refused() -> None:
    with pytest.raises(Malformed, match="above 7"):
        Body(b"\x01\x08").varints(2, 7)
