"""Damaged and hostile databases: only an error of ours, and never much memory or time."""

import os
import shutil
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, strategies as st
from numcodecs import zstd

from dist_checkpointing.errors import CorruptCheckpointError
from dist_checkpointing.strategies.tensorstore import ocdbt_nodes, ocdbt_tree
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import (
    MANIFEST_NAME,
    NodeRef,
    encode_node,
    encoded,
    files_table,
    shared_lengths,
)
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import Tree
from ocdbt_databases import NODES, read, write
from tiers import examples

VALUES = {b"model.layers.%d.weight/c.0" % i: b"%d" % i for i in range(8)}
WANTED = [b"", b"model.layers.7.weight/c.0", b"zz"]
WAYS: list[Callable[[Tree], object]] = [lambda tree: tree.all(), lambda tree: tree.find(WANTED)]
MOST_BYTES = 200 << 20


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt_tree, "NODE_BYTES", 300)
        write(folder, VALUES)
    assert ocdbt_nodes.decode_manifest((folder / MANIFEST_NAME).read_bytes()).height == 1  # type: ignore[union-attr]
    return folder


def refused(folder: Path) -> str:
    """Every way to read it ends in our error, and takes little memory."""
    tracemalloc.start()
    texts = []
    for ask in WAYS:
        with pytest.raises(CorruptCheckpointError) as raised:
            ask(Tree(folder))
        (finding,) = raised.value.findings
        assert finding.path is not None
        texts.append(str(raised.value))
    assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    tracemalloc.stop()
    return texts[0]


@pytest.mark.parametrize("name", [MANIFEST_NAME, NODES])
def test_every_flipped_bit_and_every_cut_is_found(small: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(small, folder)
    whole = (folder / name).read_bytes()
    start = 3 if name == NODES else 0  # a gap, which is nobody's
    for place in range(start, len(whole)):
        # All bits of what stands before the body, and one of each other byte.
        for bit in range(8) if place < start + 32 else [place % 8]:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            (folder / name).write_bytes(damaged)
            with pytest.raises(CorruptCheckpointError):
                read(folder)
    for length in range(len(whole)):
        rest = bytes(len(whole) - length) if length % 2 else b""
        (folder / name).write_bytes(whole[:length] + rest)
        with pytest.raises(CorruptCheckpointError):
            read(folder)
    (folder / name).unlink()
    with pytest.raises(CorruptCheckpointError, match="missing"):
        read(folder)


@examples(100)
@given(st.data())
def test_a_wrong_body_below_a_right_checksum(small: Path, data: st.DataObject) -> None:
    """Whoever makes up a record can also compute its checksum."""
    root = ocdbt_nodes.decode_manifest((small / MANIFEST_NAME).read_bytes())
    assert root is not None
    nodes = (small / NODES).read_bytes()
    leaf_bytes = int.from_bytes(nodes[7:15], "little")
    record = nodes[3 : 3 + leaf_bytes]
    name = data.draw(st.sampled_from(["manifest", "leaf", "root"]))
    if name == "manifest":
        magic, record = ocdbt_nodes.MANIFEST, (small / MANIFEST_NAME).read_bytes()
    else:
        magic = ocdbt_nodes.NODE
        record = record if name == "leaf" else nodes[root.offset :]
    body = bytearray(ocdbt_nodes.opened(magic, record))
    varints = st.integers(0, 2**64 - 1).map(lambda number: encoded([number]))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        stop = place + data.draw(st.integers(0, 5))
        body[place:stop] = data.draw(st.binary(max_size=11) | varints)
        body = body or bytearray(1)
    forged = ocdbt_nodes.sealed(magic, bytes(body), compressed=data.draw(st.booleans()))
    folder = small.parent / "forged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(small, folder)
    if name == "manifest":
        (folder / MANIFEST_NAME).write_bytes(forged)
    else:
        leaf = len(nodes)
        (folder / NODES).write_bytes(nodes + forged)
        numbers = (int(name == "root"), leaf, len(forged), len(VALUES), 1, 1)
        forged_root = NodeRef(NODES, "", *numbers)
        (folder / MANIFEST_NAME).write_bytes(ocdbt_nodes.encode_manifest(forged_root))
    for ask in WAYS:
        with suppress(CorruptCheckpointError):
            ask(Tree(folder))


# Made up from the ground.


def put(folder: Path, *bodies: bytes, height: int = 0, num_keys: int = 1, path: str = "n") -> None:
    """Nodes with these bodies, the last of which is the root."""
    nodes = [ocdbt_nodes.sealed(ocdbt_nodes.NODE, body, compressed=False) for body in bodies]
    put_nodes(folder, nodes, height, num_keys, path)


def put_nodes(
    folder: Path, nodes: list[bytes], height: int, num_keys: int, path: str = "n"
) -> None:
    (folder / "n").write_bytes(b"".join(nodes))
    place = (sum(map(len, nodes[:-1])), len(nodes[-1]))
    root = NodeRef(path, "", height, *place, num_keys, 1, 1)
    (folder / MANIFEST_NAME).write_bytes(ocdbt_nodes.encode_manifest(root))


def leaf(
    *, table: bytes = files_table(["v"]), count: int = 1, keys: bytes = b"\x01k", rest: bytes
) -> bytes:
    return b"\0" + table + encoded([count]) + keys + rest


OUTSIDE = b"\x05\x01\x00\x00"  # length, kind, file, offset


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (leaf(rest=b"\x05\x01\x01\x00"), "file 1 of 1"),
        (leaf(rest=b"\x05\x01\x00\x00", table=files_table([])), "file 0 of 0"),
        (leaf(rest=b"\x05\x01\x00\x00", table=files_table([""])), "without a path"),
        (leaf(rest=b"\x05\x02"), "kind 2"),
        (leaf(rest=OUTSIDE + b"?"), "1 bytes are left"),
        (leaf(rest=b"\x05\x01\x00" + b"\xff" * 8 + b"\x7f"), "behind the end"),
        (leaf(rest=encoded([1 << 21]) + b"\x00" + bytes(1 << 21)), "in the tree"),
        (leaf(rest=encoded([1 << 20]) + b"\x00"), "run over the end"),
        (leaf(rest=OUTSIDE, count=0), "no entries"),
        (leaf(rest=OUTSIDE, count=1 << 40), "above"),
        (leaf(rest=OUTSIDE, count=1 << 20), "run"),
        (leaf(rest=OUTSIDE, table=encoded([1 << 40])), "above"),
        (leaf(rest=OUTSIDE, table=encoded([1 << 20]) + bytes(99)), "runs over"),
        (leaf(rest=b"", count=2, keys=b"\x00\x01\x01ab"), "run"),
        (leaf(rest=b"\x00\x00\x00\x00", count=2, keys=b"\x00\x01\x01ba"), "do not rise"),
        (leaf(rest=b"\x00\x00\x00\x00", count=2, keys=b"\x00\x01\x01aa"), "do not rise"),
        (leaf(rest=b"\x00\x00\x00\x00", count=2, keys=b"\x02\x01\x01ab"), "more than there is"),
        (b"\x01" + leaf(rest=OUTSIDE)[1:], "height is 1 and not 0"),
        *(
            (leaf(rest=OUTSIDE, table=files_table([path])), "path")
            for path in ("../v", "a/../../v", "/etc/passwd", "a//v", "./v", "v\0", "v.__lock", "v/")
        ),
        (leaf(rest=OUTSIDE, table=b"\x01\x02\x00\xff\xfe"), "UTF-8"),
        (leaf(rest=OUTSIDE, table=b"\x01\x02\x03ab"), "base paths"),
        (leaf(rest=OUTSIDE, table=b"\x01\x05\x03../v/"), "path"),
    ],
)
def test_hostile_leaves(tmp_path: Path, body: bytes, match: str) -> None:
    put(tmp_path, body)
    assert match in refused(tmp_path)


def test_records_that_are_not_what_they_say(tmp_path: Path) -> None:
    def sealed(rest: bytes) -> bytes:
        length = 12 + len(rest) + 4
        data = ocdbt_nodes.NODE.to_bytes(4, "big") + length.to_bytes(8, "little") + rest
        return data + int(google_crc32c.value(data)).to_bytes(4, "little")

    body = leaf(rest=OUTSIDE)
    frame = zstd.compress(body)
    bomb = zstd.compress(bytes(1 << 27))
    # A frame that does not say how large its content is: a window of 1 KiB, blocks of one byte each
    # that stand for 128 KiB of zeros.
    block = (1 << 17 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    last = (1 << 17 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    unsaid = b"\x28\xb5\x2f\xfd\x00\x38" + block * (1 << 16) + last
    said = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + (1 << 50).to_bytes(8, "little") + last
    for rest, match in [
        (b"\x01\x00" + body, "version 1"),
        (b"\x00\x02" + body, "method 2"),
        (b"\x00\x01" + body, "no zstd frame"),
        (b"\x00\x01" + frame[:-1], "truncated"),
        (b"\x00\x01" + frame + b"\0", "more than a zstd frame"),
        (b"\x00\x01" + frame + frame, "more than a zstd frame"),
        (b"\x00\x01" + bomb, "larger"),
        (b"\x00\x01" + unsaid, "larger"),
        (b"\x00\x01" + said, "larger"),
        (b"", "integer has no end"),
    ]:
        put_nodes(tmp_path, [sealed(rest)], 0, 1)
        assert match in refused(tmp_path), rest[:20]
    (tmp_path / "v").write_bytes(b"value")
    put_nodes(tmp_path, [sealed(b"\x00\x01" + frame)], 0, 1)
    assert read(tmp_path) == {b"k": b"value"}


def interior(
    height: int, keys: list[bytes], prefixes: list[int], at: list[tuple[int, int]], held: list[int]
) -> bytes:
    rows = [(0, *place, count, 1, 1) for place, count in zip(at, held, strict=True)]
    return encode_node(keys, shared_lengths(keys), 0, ["n"], np.array(rows).T, height, prefixes)


def one_leaf(keys: list[bytes], cut: int = 0) -> bytes:
    extents = np.zeros((3, len(keys)), dtype=np.int64)
    return encode_node(keys, shared_lengths(keys), cut, ["v"], extents)


def test_as_deep_as_can_be_and_a_node_that_is_its_own_child(tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(b"")
    nodes = [one_leaf([b"key"])]
    for height in range(1, 256):
        at = (sum(map(len, nodes[:-1])), len(nodes[-1]))
        nodes.append(interior(height, [b""], [0], [at], [1]))
    put_nodes(tmp_path, nodes, 255, 1)
    assert read(tmp_path) == {b"key": b""}
    length = len(interior(1, [b""], [0], [(0, 1)], [1]))
    put_nodes(tmp_path, [interior(1, [b""], [0], [(0, length)], [1])], 1, 1)
    assert "height is 1 and not 0" in refused(tmp_path)


def test_nodes_that_are_reached_many_times(tmp_path: Path) -> None:
    """Each level names the one below twice, under two prefixes: 2^40 leaves in a few files."""
    nodes = [one_leaf([b"key"])]
    held = 1
    for height in range(1, 41):
        at = (sum(map(len, nodes[:-1])), len(nodes[-1]))
        nodes.append(interior(height, [b"a", b"b"], [1, 1], [at, at], [held, held]))
        held *= 2
    put_nodes(tmp_path, nodes, 40, held)
    with pytest.raises(CorruptCheckpointError, match="larger in memory than on disk"):
        Tree(tmp_path).all()
    # To look for one key takes one way down.
    tree = Tree(tmp_path, keeps_nodes=True)
    assert tree.find([b"ab" * 20 + b"key"]).extents[0].tolist() == [0]


@pytest.mark.parametrize(
    ("keys", "prefixes", "held", "match"),
    [
        ([b"a", b"c"], [0, 0], [2, 2], "are not those"),  # the second leaf begins below its bound
        ([b"a", b"ab"], [0, 0], [2, 2], "are not those"),
        ([b"a", b"b"], [0, 0], [2, 3], "the number of keys below it is 2 and not 3"),
        ([b"a", b"b"], [0, 2], [2, 2], "share more than its lower bound"),
        ([b"b", b"a"], [0, 0], [2, 2], "do not rise"),
    ],
)
def test_nodes_that_do_not_fit_together(
    tmp_path: Path, keys: list[bytes], prefixes: list[int], held: list[int], match: str
) -> None:
    leaves = [one_leaf([b"aa", b"ab"]), one_leaf([b"ba", b"bb"])]
    at = [(0, len(leaves[0])), (len(leaves[0]), len(leaves[1]))]
    root = interior(1, keys, prefixes, at, held)
    put_nodes(tmp_path, [*leaves, root], 1, sum(held))
    with pytest.raises(CorruptCheckpointError, match=match):
        Tree(tmp_path).all()


def test_long_names_by_few_bytes(tmp_path: Path) -> None:
    """Names share nearly all with the one before: a million long ones in a small node."""
    count = 1 << 16
    shared = encoded([65_000]) * (count - 1)
    rests = encoded([65_000]) + b"\x01" * (count - 1)
    columns = encoded([count]) + shared + rests + bytes(count) + b"n" * (65_000 + count)
    put(tmp_path, b"\0" + columns)
    assert "take more than" in refused(tmp_path)
    put(tmp_path, b"\0" + files_table(["v"]) + columns)
    assert "take more than" in refused(tmp_path)


def put_a_pipe(folder: Path) -> None:
    (folder / "n").unlink()
    os.mkfifo(folder / "n")


@pytest.mark.parametrize(
    "forge",
    [
        lambda folder: (folder / "n").unlink(),
        lambda folder: (folder / "n").write_bytes(b""),
        lambda folder: ((folder / "n").unlink(), (folder / "n").mkdir()),
        put_a_pipe,
    ],
    ids=["gone", "empty", "a folder", "a pipe"],
)
def test_a_lost_file_of_nodes(tmp_path: Path, forge: Callable[[Path], object]) -> None:
    put(tmp_path, leaf(rest=OUTSIDE))
    forge(tmp_path)
    assert "its file" in refused(tmp_path)


def test_hostile_manifests(tmp_path: Path) -> None:
    write(tmp_path, VALUES)
    path = tmp_path / MANIFEST_NAME
    body = ocdbt_nodes.opened(ocdbt_nodes.MANIFEST, path.read_bytes())
    table = files_table([NODES])
    assert body.count(table) == 1
    config, versions = body.split(table)
    empty = config + files_table([""]) + b"\x01\x01\x00\x00" + b"\xff" * 9 + b"\x01"
    two = bytes(4) + encoded([3, 3, 5, 5, 1, 1, 1, 1, 1, 1]) + bytes(16) + b"\x00"
    for forged, match in [
        (config + files_table(["../d"]) + versions, "path"),
        (config + table + encoded([1 << 30]) + versions[1:], "above 16"),
        (config + table + b"\x00", "no version"),
        (config + table + b"\x01\x00" + versions[2:], "not in order"),
        (config + table + b"\x02\x02\x01" + two, "not in order"),
        (config + table + b"\x02\x10\x11" + two, "not in order"),
        (config + table + versions[:2] + b"\x00\x05" + versions[4:], "file 5 of 1"),
        (config + files_table([]) + versions, "file 0 of 0"),
        (config + files_table([""]) + versions, "nowhere"),
        (body[:16] + b"\x01" + body[17:], "settings"),
        (empty + b"\xff" * 9 + b"\x01" + b"\x01\x00\x00" + bytes(8) + b"\x00", "empty tree"),
    ]:
        path.write_bytes(ocdbt_nodes.sealed(ocdbt_nodes.MANIFEST, forged, compressed=False))
        assert match in refused(tmp_path), forged
    path.unlink()
    assert "missing" in refused(tmp_path)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "far too large" in refused(tmp_path)
