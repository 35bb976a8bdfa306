"""Whatever we write TensorStore opens, lists, reads and extends; whatever it wrote we read."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from hypothesis import given, strategies as st

from dist_checkpointing.errors import CorruptCheckpointError
from dist_checkpointing.strategies.tensorstore import ocdbt_nodes, ocdbt_tree
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import (
    INLINE,
    MOST_U64,
    Body,
    Malformed,
    encoded,
)
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


def test_a_tree_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """A base path of a node holds for all paths in it."""
    values = {b"key%d" % i: b"value %d" % i for i in range(300)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt_tree, "NODE_BYTES", 500)
        write(tmp_path / "part", values)
    record = (tmp_path / "part" / ocdbt_nodes.MANIFEST_NAME).read_bytes()
    root = ocdbt_nodes.decode_manifest(record)
    assert root is not None
    assert root.height > 1
    body = ocdbt_nodes.opened(ocdbt_nodes.MANIFEST, record)
    # No base path, and the path; then a base path of five bytes.
    old, new = b"\x01\x07\x00d/nodes", b"\x01\x0c\x05part/d/nodes"
    assert body.count(old) == 1
    forged = ocdbt_nodes.sealed(ocdbt_nodes.MANIFEST, body.replace(old, new), compressed=False)
    (tmp_path / ocdbt_nodes.MANIFEST_NAME).write_bytes(forged)
    assert read_by_tensorstore(tmp_path) == values
    assert read(tmp_path) == values
    find_each(tmp_path, values)


@pytest.mark.parametrize("keeps_nodes", [True, False])
def test_only_what_is_asked_for_is_kept_of_a_leaf(tmp_path: Path, keeps_nodes: bool) -> None:
    opened = store(tmp_path, config={"max_inline_value_bytes": 2**20})
    for number in range(200):
        opened.write(b"%03d" % number, b"%03d" % number * 9).result()
    tree = Tree(tmp_path, keeps_nodes=keeps_nodes)
    tree.num_keys = 1 << 30  # so that it looks for each key alone
    found = tree.find([b"007", b"absent", b"150"])
    assert sorted(found.inline) == [b"007" * 9, b"150" * 9]


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


@pytest.mark.parametrize("keeps_nodes", [True, False])
def test_a_change_is_seen(tmp_path: Path, keeps_nodes: bool) -> None:
    values = {b"layers.%d.w/c.0" % i: bytes([i % 251]) * (1 + i % 40) for i in range(700)}
    write(tmp_path, values)
    newest = NewestTree(tmp_path)
    wanted = [*values, b"zzz"]
    for _ in range(2):
        found = newest(keeps_nodes=keeps_nodes).find(wanted)
        assert contents(tmp_path, found) == [*values.values(), None]
    store(tmp_path).write(wanted[0], b"changed").result()
    found = newest(keeps_nodes=keeps_nodes).find(wanted[:2])
    assert contents(tmp_path, found) == [b"changed", values[wanted[1]]]
    (tmp_path / "manifest.ocdbt").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.ocdbt"):
        newest(keeps_nodes=keeps_nodes).find(wanted)


# Integers of variable length and shared beginnings, against the plainest way to tell them.


NUMBERS = st.one_of(
    st.integers(0, 200), st.integers(0, MOST_U64), st.integers(0, 63).map(lambda n: 1 << n)
)


def plain(number: int) -> bytes:
    digits = []
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def shared(one: bytes, two: bytes) -> int:
    unequal = (place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    return next(unequal, min(len(one), len(two)))


@given(st.lists(NUMBERS, max_size=50), st.binary(max_size=30), st.data())
def test_integers_there_and_back(numbers: list[int], after: bytes, data: st.DataObject) -> None:
    whole = encoded(numbers)
    assert whole == b"".join(map(plain, numbers))
    body = Body(whole + after)
    assert body.varints(len(numbers), MOST_U64).tolist() == [numbers]
    assert body.take(len(after)) == after
    body.finish()
    single = Body(whole)
    assert [single.varint(MOST_U64) for _ in numbers] == numbers
    if numbers:  # a column that is cut off is malformed
        part = whole[: data.draw(st.integers(0, len(whole) - 1))]
        with pytest.raises(Malformed):
            Body(part).varints(len(numbers), MOST_U64)
        body = Body(part)
        with pytest.raises(Malformed):
            [body.varint(MOST_U64) for _ in numbers]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x80\x80\x00", 0),  # longer than needed
        (b"\xff" * 9 + b"\x01", MOST_U64),
        (b"\xff" * 9 + b"\x02", None),
        (b"\xff" * 10 + b"\x00", None),
        (b"\x80" * 10 + b"\x00", None),
        (b"", None),
    ],
)
def test_the_longest_integers(data: bytes, value: int | None) -> None:
    for count in (1, 3):
        column = b"\x05" * (count - 1) + data + b"\x07"
        if value is None and data:
            with pytest.raises(Malformed):
                Body(column).varints(count, MOST_U64)
            with pytest.raises(Malformed):
                Body(data).varint(MOST_U64)
        elif value is not None:
            expected = [[5] * (count - 1) + [value]]
            assert Body(column).varints(count, MOST_U64).tolist() == expected
            assert Body(data).varint(MOST_U64) == value


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(Malformed, match="above 7"):
        Body(b"\x08").varint(7)
    with pytest.raises(Malformed, match="above 7"):
        Body(b"\x01\x08").varints(2, 7)
    with pytest.raises(Malformed, match="runs over the end"):
        Body(b"\x01" * 9).varints(1 << 60, MOST_U64)
    with pytest.raises(Malformed, match="run over the end"):
        Body(b"\x01" * 9).take(1 << 60)
