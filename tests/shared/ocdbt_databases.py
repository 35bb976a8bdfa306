"""Databases for tests: written by us, and opened by TensorStore."""

import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from dist_checkpointing.strategies.tensorstore import ocdbt_nodes
from dist_checkpointing.strategies.tensorstore.ocdbt_nodes import INLINE
from dist_checkpointing.strategies.tensorstore.ocdbt_tree import ABSENT, Tree, Values, encode_tree

NODES = "d/nodes"


def store(folder: Path, **settings: Any) -> Any:
    """The database as TensorStore opens it."""
    base = {"driver": "file", "path": f"{folder}/"}
    context = ts.Context({"file_io_sync": False})
    return ts.KvStore.open({"driver": "ocdbt", "base": base, **settings}, context=context).result()


def write(folder: Path, values: Mapping[bytes, bytes], num_files: int = 1) -> None:
    """A database of ours."""
    files = [f"data/f{number}" for number in range(num_files)]
    contents = [bytearray(b"gap") for _ in files]
    rows = []
    keys = sorted(values)
    for row, key in enumerate(keys):
        content = contents[row % num_files]
        rows.append((row % num_files, len(content), len(values[key])))
        content += values[key]
    extents = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / NODES).parent.mkdir(exist_ok=True)
    for name, content in zip(files, contents, strict=True):
        (folder / name).write_bytes(content)
    nodes, root = encode_tree(keys, files, extents, NODES, offset=3)
    (folder / NODES).write_bytes(b"gap" + b"".join(nodes))
    (folder / ocdbt_nodes.MANIFEST_NAME).write_bytes(ocdbt_nodes.encode_manifest(root))


def contents(folder: Path, found: Values) -> list[bytes | None]:
    """The values that were found."""
    values: list[bytes | None] = []
    for file, offset, length in found.extents.T.tolist():
        if file == ABSENT:
            values.append(None)
        elif file == INLINE:
            values.append(found.inline[offset])
        else:
            values.append((folder / found.files[file]).read_bytes()[offset : offset + length])
            assert len(values[-1] or b"") == length
    return values


def read(folder: Path) -> dict[bytes, bytes | None]:
    """Everything in a database, read by us."""
    keys, values = Tree(folder).all()
    return dict(zip(keys, contents(folder, values), strict=True))


def read_by_tensorstore(folder: Path) -> dict[bytes, bytes]:
    """Everything in a database, read by TensorStore."""
    opened = store(folder)
    keys = opened.list().result()
    reads = [opened.read(key) for key in keys]
    return {key: read.result().value for key, read in zip(keys, reads, strict=True)}


def height(folder: Path) -> int:
    """Height of the tree, by TensorStore."""
    base = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    found: int = ts.ocdbt.dump(base).result()["versions"][-1]["root_height"]
    return found


def strangers(keys: Sequence[bytes]) -> list[bytes]:
    """Keys that are not among some, but lie between them."""
    known = sorted(keys)
    near = [*(key + b"\0" for key in known), *(key[:-1] for key in known), b"", b"\xff" * 9]
    return [k for k in near if known[bisect.bisect_left(known, k) :][:1] != [k]]
