"""The index file: what is written is read back, and nothing else gets in."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import xxhash
from hypothesis import given, strategies as st

import dist_checkpointing as dc
from damage import sealed
from dist_checkpointing.format import (
    FORMAT,
    FORMAT_MINOR,
    INDEX_NAME,
    Box,
    Index,
    Pieces,
    StoredTensor,
)
from dist_checkpointing.mapping import DTYPES
from dist_checkpointing.planning import table_exchange
from dist_checkpointing.planning.table_exchange import SharedIndex
from states import shard
from tiers import examples

SHAPES = st.lists(st.integers(0, 2**15), max_size=4).map(tuple) | st.sampled_from(
    [(2**48, 2**12), (2**60,)]
)


@st.composite
def tables(draw: st.DrawFn, shape: tuple[int, ...]) -> Pieces:
    """Pieces in any order, some twice, some overlapping: an index may be damaged."""
    parts: list[tuple[Box, tuple[int, int] | None]] = []
    for _ in range(draw(st.integers(1, 3))):
        offset = tuple(draw(st.integers(0, extent)) for extent in shape)
        ends = zip(offset, shape, strict=True)
        box = Box(offset, tuple(draw(st.integers(0, extent - start)) for start, extent in ends))
        for _ in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, box.num_elements))
            flat = (start, draw(st.integers(start, box.num_elements)))
            parts.append((box, draw(st.sampled_from([None, flat]))))
    return Pieces.of(len(shape), draw(st.permutations(parts)))


@st.composite
def tensors(draw: st.DrawFn, key: str) -> StoredTensor:
    shape: tuple[int, ...] = draw(SHAPES)
    dtype = draw(st.sampled_from(DTYPES))
    if draw(st.booleans()):
        chunk = tuple(draw(st.integers(1, max(extent, 1))) for extent in shape)
        return StoredTensor(key, dtype, shape, chunk)
    return StoredTensor(key, dtype, shape, None, draw(tables(shape)))


@st.composite
def indices(draw: st.DrawFn) -> Index:
    keys = draw(st.lists(st.text(max_size=4), unique=True, max_size=6))
    grids = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    objects = draw(st.dictionaries(st.text(max_size=3), grids, max_size=3))
    index = Index.of([draw(tensors(key)) for key in keys], objects)
    return Index(**{**index.__getstate__(), "codec": draw(st.sampled_from([None, "zstd"]))})


def seen(index: Index) -> dict[str, Any]:
    """All there is to know of an index, as plain values, but for its objects."""
    return {
        t.key: (t.dtype, t.global_shape, t.chunk_shape, None if t.pieces is None else [*t.pieces])
        for t in index.values()
    }


@examples(30)
@given(indices())
def test_the_file_is_plain_json_of_its_columns_and_is_read_back(index: Index) -> None:
    """Byte for byte what ``json`` writes of lists, which is what older versions wrote."""
    content = {
        "format": FORMAT,
        "format_minor": FORMAT_MINOR,
        "keys": [*index],
        "dtypes": [t.dtype.name for t in index.values()],
        "global_shapes": [t.global_shape for t in index.values()],
        "chunk_shapes": [t.chunk_shape for t in index.values()],
        "pieces": {
            t.key: {
                "offsets": [box.offset for box, _ in t.pieces],
                "shapes": [box.shape for box, _ in t.pieces],
                "flat": [flat or (-1, -1) for _, flat in t.pieces],
            }
            for t in index.values()
            if t.pieces is not None
        },
        "objects": dict(index.objects),
        "codec": index.codec,
    }
    assert index.to_json() == sealed(content)
    again = Index.from_json(index.to_json())
    assert seen(again) == seen(index)
    assert (again.objects, again.codec) == (index.objects, index.codec)
    assert again.rows_of([*index, "absent"]).tolist() == [*range(len(index)), -1]


@examples(30)
@given(indices(), st.sets(st.text(max_size=3)), st.data())
def test_of_a_shared_index_each_rank_unpacks_what_it_asks_for(
    index: Index, asked: set[str], data: st.DataObject
) -> None:
    if len(index):
        asked |= data.draw(st.sets(st.sampled_from(sorted(index))))
    with patch.object(table_exchange, "_KEYS_A_BLOCK", 2):
        shared: SharedIndex = pickle.loads(pickle.dumps(SharedIndex.of(index, 2)))
    assert shared.whole is None
    assert sorted(shared.keys()) == sorted(index)
    everything, part = shared.index(None), shared.index(asked)
    assert (seen(everything), everything.objects) == (seen(index), index.objects)
    assert seen(part) == {key: value for key, value in seen(index).items() if key in asked}
    assert part.objects == {key: grid for key, grid in index.objects.items() if key in asked}
    assert part.codec == everything.codec == index.codec


def test_a_later_minor_version_is_read() -> None:
    content = json.loads(Index.of([StoredTensor("w", DTYPES[0], (3,), (2,))]).to_json())
    content |= {"format_minor": FORMAT_MINOR + 1, "something_new": [1, 2]}
    assert list(Index.from_json(sealed(content))) == ["w"]


# --- hostile files ------------------------------------------------------------------------------


INT64 = next(dtype for dtype in DTYPES if dtype.name == "int64")
CUT, GRID = 0, 1
COLUMNS = ("keys", "dtypes", "global_shapes", "chunk_shapes")


def good() -> dict[str, Any]:
    """The content of an index with a chunk grid, pieces, flattened pieces and an object."""
    pieces = Pieces.of(
        1, [(Box((0,), (2,)), None), (Box((2,), (4,)), (0, 1)), (Box((2,), (4,)), (1, 4))]
    )
    index = Index.of(
        [
            StoredTensor("cut", INT64, (6,), None, pieces),
            StoredTensor("grid", INT64, (4, 6), (2, 6)),
        ],
        {"rng": (2,)},
    )
    content: dict[str, Any] = json.loads(index.to_json())
    assert content["format"] == FORMAT
    return content


Spoil = Callable[[dict[str, Any]], object]

SPOILT: dict[str, Spoil] = {
    "no keys": lambda c: c.pop("keys"),
    "no objects": lambda c: c.pop("objects"),
    "a key twice": lambda c: [c[column].append(c[column][GRID]) for column in COLUMNS],
    "one key more": lambda c: c["keys"].append("more"),
    "one chunk shape more": lambda c: c["chunk_shapes"].append([1]),
    "dtypes are lists": lambda c: c.update(dtypes=[["int8"], ["int8"]]),
    "an extent that is true": lambda c: c["global_shapes"].__setitem__(GRID, [True, 6]),
    "more elements than 64 bits": lambda c: c["global_shapes"].__setitem__(GRID, [2**62, 2**62]),
    "a chunk with other axes": lambda c: c["chunk_shapes"].__setitem__(GRID, [2]),
    "chunks and pieces": lambda c: c["chunk_shapes"].__setitem__(CUT, [6]),
    "pieces are no dict": lambda c: c["pieces"].update(cut=[[0], [2]]),
    "pieces without shapes": lambda c: c["pieces"]["cut"].pop("shapes"),
    "one offset more": lambda c: c["pieces"]["cut"]["offsets"].append([0]),
    "one flat range less": lambda c: c["pieces"]["cut"]["flat"].pop(),
    "ragged offsets": lambda c: c["pieces"]["cut"]["offsets"].__setitem__(0, [0, 0]),
    "pieces with other axes": lambda c: c["pieces"]["cut"].update(
        offsets=[[0, 0]], shapes=[[2, 2]], flat=[[-1, -1]]
    ),
    "a piece outside": lambda c: c["pieces"]["cut"]["offsets"].__setitem__(0, [5]),
    "a flat range outside": lambda c: c["pieces"]["cut"]["flat"].__setitem__(2, [1, 9]),
    "a flat range backwards": lambda c: c["pieces"]["cut"]["flat"].__setitem__(2, [4, 1]),
    "half a flat range": lambda c: c["pieces"]["cut"]["flat"].__setitem__(2, [1, -1]),
    "a key that cannot be a name": lambda c: c["keys"].__setitem__(0, "\ud800"),
    "an object that cannot have a name": lambda c: c["objects"].update({"\ud800": [1]}),
    "an object of negative extent": lambda c: c["objects"].update(rng=[-1]),
    "an object whose shape is text": lambda c: c["objects"].update(rng="2"),
}


def test_keys_that_look_like_tables_of_pieces() -> None:
    pieces = Pieces.of(1, [(Box((0,), (6,)), None)])
    keys = ['{"offsets":[[0]],"shapes":[[6]]}', '{"offsets":', '\\{"offsets":', "}", ""]
    index = Index.of([StoredTensor(key, INT64, (6,), None, pieces) for key in keys])
    found = Index.from_json(index.to_json())
    assert [*found.pieces] == keys
    assert [[*found.pieces[key]] for key in keys] == [[*pieces]] * len(keys)


@pytest.mark.parametrize(
    "flat",
    [
        b"[[0,1]2,[3,4]]",
        b"[[0,1],[3,4],]",
        b"[[0,1],[3]]",
        b"[[0,1],[,4]]",
        b"[[0,1],[3,4",
        b"[[0,1],[03,4]]",
        b"[[0,1],[3,1e0]]",
        b"[[0,1],[3,9223372036854775808]]",
        b"[0,1,3,4]",
        b"[[[0,1],[3,4]]]",
    ],
)
def test_pieces_whose_text_is_spoilt_are_refused(flat: bytes) -> None:
    box = Box((0,), (4,))
    pieces = Pieces.of(1, [(box, (0, 1)), (box, (3, 4))])
    text = Index.of([StoredTensor("w", INT64, (4,), None, pieces)]).to_json()
    body = b"{" + text[text.index(b",") + 1 :].replace(b"[[0,1],[3,4]]", flat)
    with pytest.raises(dc.CorruptCheckpointError):
        Index.from_json(b'{"checksum":"%016x",' % xxhash.xxh3_64_intdigest(body) + body[1:])


def test_a_table_of_pieces_for_a_shape_is_refused() -> None:
    content = good()
    content["more"] = content["pieces"]["cut"]
    with pytest.raises(dc.CorruptCheckpointError, match="pieces by key"):
        Index.from_json(sealed(content))


HOSTILE_LOADS: dict[str, Spoil] = {
    "pieces that overlap": lambda c: c["pieces"]["cut"]["offsets"].__setitem__(1, [0]),
    "a piece twice, another lost": lambda c: c["pieces"]["cut"].update(
        {name: [column[0], column[0]] for name, column in c["pieces"]["cut"].items()}
    ),
    "a larger tensor": lambda c: c["global_shapes"].__setitem__(GRID, [8, 6]),
    "other chunks": lambda c: c["chunk_shapes"].__setitem__(GRID, [1, 6]),
    "another dtype": lambda c: c["dtypes"].__setitem__(GRID, "int32"),
    "a key that is not stored": lambda c: c["keys"].__setitem__(GRID, "../x"),
    "a codec nobody knows": lambda c: c.update(codec="snappy"),
    **SPOILT,
}
VERIFIED = {
    "a piece twice, another lost": [
        "'cut': the stored pieces do not make it up once: 2 shards hold this part",
        "'cut': the stored pieces do not make it up once: no shard holds this part",
    ],
    "a larger tensor": ["'grid': there are no checksums for all of it", "index.json"],
}
"""What a look through the whole checkpoint says of some."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real checkpoint whose index is ``good()``, but for the object."""
    folder, full = tmp_path_factory.mktemp("index") / "c", torch.arange(24).reshape(4, 6)
    last = [
        dc.ShardedTensor(
            "cut", full[0, a:b], full.dtype, (4,), (6,), (2,), None, flattened_range=flat
        )
        for a, b, flat in ((2, 3, slice(0, 1)), (3, 6, slice(1, 4)))
    ]
    first = dc.ShardedTensor("cut", full[0, :2], full.dtype, (2,), (6,), (0,), None)
    rows = [shard("grid", full[i : i + 2], (0, i // 2, 2)) for i in (0, 2)]
    dc.save({"cut": [first, *last], "grid": rows}, folder, ("zarr", 2))
    content = json.loads((folder / INDEX_NAME).read_bytes())
    assert {**content, "checksum": 0, "objects": 0} == {**good(), "checksum": 0, "objects": 0}
    return folder


@pytest.mark.parametrize("name", HOSTILE_LOADS)
def test_a_spoilt_index_never_yields_tensors(tmp_path: Path, checkpoint: Path, name: str) -> None:
    """The same in a real checkpoint: an error before any tensor is returned."""
    folder = tmp_path / "c"
    shutil.copytree(checkpoint, folder)
    content = good()
    (folder / INDEX_NAME).write_bytes(sealed(content))
    assert dc.load_plain_tensors(folder)["cut"].tolist() == [0, 1, 2, 3, 4, 5]
    HOSTILE_LOADS[name](content)
    (folder / INDEX_NAME).write_bytes(sealed(content))
    for read in (dc.load_plain_tensors, dc.verify_checkpoint):
        with pytest.raises(dc.CheckpointingException) as raised:
            read(folder)
    for words in VERIFIED.get(name, ()):
        assert words in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} == {"c"}
