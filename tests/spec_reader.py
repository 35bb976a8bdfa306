"""Reads the tensors of a checkpoint folder by ``docs/spec.md`` alone: format 1.0, four backends.

It imports the standard library, numpy, numcodecs (zstd and zarr's codecs) and xxhash (nothing else
of these has XXH3), and nothing of the library that it checks.
"""

import hashlib
import io
import itertools
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numcodecs
import numpy as np
import xxhash

Array = np.ndarray[Any, np.dtype[Any]]
SEAL, ATTEMPT, COMMIT = ".dckpt/seal.json", ".dckpt/attempt.json", "metadata.json"
# Whatever a parser raises at what is not as it was written.
_WRONG = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RuntimeError)
_WRONG_FILE = (OSError, EOFError, struct.error, pickle.UnpicklingError, zipfile.BadZipFile)


class DamagedError(Exception):
    """The checkpoint is not what was saved."""


class Part(NamedTuple):
    """A chunk or piece: its name, its box, the flat range of it, its shape as stored."""

    name: str
    offset: Sequence[int]
    shape: Sequence[int]
    flat: slice
    stored: Sequence[int]


Tensor = tuple[np.dtype[Any], Sequence[int], list[Part]]
Opened = tuple[dict[str, Tensor], Callable[[str], Any], Callable[[str], bytes]]
"""The tensors; the bytes of a part by its name, and of an object by how its name begins."""


def require(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def path_of(folder: Path, name: str) -> Path:
    outside = name.startswith("/") or ".." in name.split("/") or not name.strip("./")
    require(not outside, f"{name!r} is no file of a checkpoint")
    return folder / name


def dotted(*words: object) -> str:
    return ".".join(map(str, words))


def dtype_of(name: str) -> np.dtype[Any]:
    """What numpy does not know is read as integers of the same size."""
    bits = "u2" if name == "bfloat16" else "u1" if name.startswith("float8") else name
    return np.dtype(bits).newbyteorder("<")


def checked_json(data: bytes, digest: Callable[[bytes], str], digits: int, kind: str) -> Any:
    body = b"{" + data[len('{"checksum":"",') + digits :]
    start = f'{{"checksum":"{digest(body)}",'
    require(data.startswith(start.encode()), f"the checksum of the {kind}")
    content = json.loads(data)
    require(content["format"] == f"dist_checkpointing.{kind}", f"the format of the {kind}")
    return content


def read_seal(folder: Path, config: dict[str, Any]) -> Any:
    """The seal, after all files have been compared with it; None if there is none."""
    path = folder / ATTEMPT
    attempt = json.loads(path.read_bytes()) if path.is_file() else {"creates": ()}
    if not (folder / SEAL).is_file() and SEAL not in attempt["creates"]:
        return None
    seal = checked_json((folder / SEAL).read_bytes(), xxhash.xxh3_128_hexdigest, 32, "seal")
    require(seal["attempt"] == attempt["attempt"], f"{ATTEMPT} names another save")
    require(seal["config"] == config, f"{COMMIT} says {config}")
    rows = zip(seal["files"], seal["sizes"], seal["digests"], strict=True)
    for name, size, digest in () if seal["is_open"] else rows:
        data = path_of(folder, name).read_bytes()
        require(len(data) == size, f"{name} has {len(data)} bytes, not {size}")
        require(digest in (None, xxhash.xxh3_128_hexdigest(data)), f"the digest of {name}")
    return seal


def read_table(data: bytes) -> Iterator[tuple[Any, ...]]:
    """Key, whether it is an object, offset, shape, flat range and checksum of each row."""
    magic, version, text, n, axes = struct.unpack_from("<8sIIQI", data)
    require((magic, version) == (b"DCKPTSUM", 1), "the version of a table of checksums")
    require(xxhash.xxh3_128_digest(data[:-16]) == data[-16:], "the checksum of a table")
    at, columns = 28 + text, []
    for kind, width in (*[("<u4", 1)] * 4, ("<i8", axes), ("<i8", axes), ("<i8", 2), ("<u8", 1)):
        columns.append(np.frombuffer(data, kind, n * width, at).reshape(n, width).tolist())
        at += n * width * int(kind[2])
    require(at == len(data) - 16, "the length of a table")
    names = json.loads(data[28 : 28 + text])
    for key, _, ndim, is_object, offset, shape, flat, digest in zip(*columns, strict=True):
        box = offset[: ndim[0]], shape[: ndim[0]]
        yield names[key[0]], is_object[0], *box, slice(*flat), digest[0]


def box_of(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def check_values(rows: Iterator[Any], arrays: dict[str, Array], opened: Opened) -> None:
    left = {key: array.size for key, array in arrays.items()}
    for key, is_object, offset, shape, flat, digest in rows:
        if is_object:
            values = opened[2](f"{key}/shard_{dotted(*offset)}_")
        else:
            run = arrays[key][box_of(offset, shape)].reshape(-1)
            run = run[flat] if flat.start >= 0 else run
            values = run.tobytes()
            left[key] -= run.size
        require(xxhash.xxh3_64_intdigest(values) == digest, f"{key} at {offset} has changed")
    require(not any(left.values()), f"checksums do not cover {left}")


def assembled(key: str, tensor: Tensor, fetch: Callable[[str], Any]) -> Array:
    dtype, shape, parts = tensor
    whole, seen = np.zeros(math.prod(shape), dtype), np.zeros(math.prod(shape), np.int64)
    numbers = np.arange(len(whole)).reshape(shape)
    for part in parts:
        data, inside = fetch(part.name), part.shape if part.flat == slice(None) else part.stored
        size = math.prod(part.stored) * dtype.itemsize
        require(len(data) == size, f"{part.name} has {len(data)} bytes, not {size}")
        values = np.frombuffer(data, dtype).reshape(part.stored)
        places = numbers[box_of(part.offset, part.shape)].reshape(-1)[part.flat]
        whole[places] = values[box_of([0] * len(inside), inside)].reshape(-1)
        seen[places] += 1
    require((seen == 1).all(), f"the parts of {key} do not cover it once")
    return whole.reshape(shape)


def disk_name(key: str) -> str:
    name = quote(key, safe="").replace("~", "%7E")
    if name.startswith(".") or name in {COMMIT, "common.pt", "zarr.json"}:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > 200:
        name = f"{name[:183]}~{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    return name


def grid_parts(shape: Sequence[int], chunk: Sequence[int], folder: str, c: str) -> list[Part]:
    parts = []
    for index in itertools.product(*(range(-(-n // s)) for n, s in zip(shape, chunk, strict=True))):
        offset = [i * s for i, s in zip(index, chunk, strict=True)]
        own = [min(s, n - o) for s, n, o in zip(chunk, shape, offset, strict=True)]
        name = dotted(c, *index) if c else dotted(*index) or "0"
        parts.append(Part(f"{folder}/{name}", offset, own, slice(None), chunk))
    return parts


def read_index(folder: Path) -> tuple[dict[str, Tensor], str | None]:
    data = (folder / ".dckpt/index.json").read_bytes()
    index = checked_json(data, xxhash.xxh3_64_hexdigest, 16, "index")
    columns = [index[name] for name in ("keys", "dtypes", "global_shapes", "chunk_shapes")]
    tensors = {}
    for key, dtype, shape, chunk in zip(*columns, strict=True):
        name, parts = disk_name(key), []
        pieces = () if chunk else zip(*index["pieces"].get(key, {}).values(), strict=True)
        for offset, own, (start, stop) in pieces:
            flat, stored, end = slice(None), own, ""
            if start >= 0:
                flat, stored, end = slice(start, stop), [stop - start], f"-{start}"
            array = f"{name}/{dotted('piece', *offset)}{end}"
            file = f"{array}/{dotted('c', *[0] * len(stored))}"
            parts.append(Part(file, offset, own, flat, stored))
        parts += [] if chunk is None else grid_parts(shape, chunk, name, "c")
        tensors[key] = dtype_of(dtype), shape, parts
    return tensors, index["codec"]


def open_zarr2(folder: Path, _: Any) -> Opened:
    tensors, codec = read_index(folder)
    decode = numcodecs.get_codec({"id": codec}).decode if codec else bytes
    return tensors, lambda name: decode((folder / name).read_bytes()), str.encode


def open_zarr1(folder: Path, seal: Any) -> Opened:
    tensors = {}
    for path in sorted(folder.rglob(".zarray")):
        key = path.parent.relative_to(folder).as_posix()
        if key.endswith(".sync") or (seal and f"{key}/.zarray" not in seal["files"]):
            continue
        node = json.loads(path.read_bytes())
        require((node["compressor"], node["order"]) == (None, "C"), f"the chunks of {key}")
        parts = grid_parts(node["shape"], node["chunks"], key, "")
        tensors[key] = dtype_of(node["dtype"]), node["shape"], parts
    return tensors, lambda name: (folder / name).read_bytes(), str.encode


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class Body:
    """The body of an OCDBT record, taken from the front."""

    def __init__(self, record: bytes, magic: int) -> None:
        require(record[:4] == magic.to_bytes(4, "big"), "the magic number of a record")
        require(int.from_bytes(record[4:12], "little") == len(record), "the length of a record")
        require(crc32c(record[:-4]) == int.from_bytes(record[-4:], "little"), "a CRC-32C")
        self.data, self.at = record[12:-4], 0
        version, method = self.column(2)
        require(version == 0 and method <= 1, "the version or compression of a record")
        self.data, self.at = self.data[self.at :], 0
        self.data = bytes(numcodecs.zstd.decompress(self.data)) if method else self.data

    def take(self, count: int) -> bytes:
        self.at += count
        require(self.at <= len(self.data), "a record is too short")
        return self.data[self.at - count : self.at]

    def column(self, count: int) -> list[int]:
        values = []
        for _ in range(count):
            digits = [self.take(1)[0]]
            while digits[-1] > 0x7F:
                digits.append(self.take(1)[0])
            values.append(sum((d & 0x7F) << 7 * place for place, d in enumerate(digits)))
        return values

    def texts(self, count: int, more: int) -> tuple[list[bytes], list[int]]:
        """Texts that share bytes with the one before, and one more column of numbers if wanted."""
        shared, added = [0, *self.column(count - 1)], self.column(count)
        column, texts = self.column(count * more), [b""]
        for keep, size in zip(shared, added, strict=True):
            texts.append(texts[-1][:keep] + self.take(size))
        return texts[1:], column

    def files(self, folder: str) -> list[tuple[str, str]]:
        """The paths of a file table, and the folders that paths in nodes there are relative to."""
        (count,) = self.column(1)
        paths, bases = self.texts(count, 1) if count else ([], [])
        pairs = zip(paths, bases, strict=True)
        return [(folder + path.decode(), folder + path[:base].decode()) for path, base in pairs]


Tree = dict[bytes, bytes | tuple[str, int, int]]
"""The value of each key, or its file, first byte and length."""


def read_tree(root: Path) -> Tree:
    body, tree = Body((root / "manifest.ocdbt").read_bytes(), 0x0CDB3A2A), Tree()
    require(body.take(17)[16] == 0, "the kind of the manifest")
    body.column(2), body.take(1)
    body.take(4 * body.column(1)[0])
    files, (versions,) = body.files(""), body.column(1)
    body.column(versions)
    height = body.take(versions)[-1]
    file, offset, length = (body.column(versions)[-1] for _ in range(3))
    if length < 2**64 - 1:
        read_node(root, (files[file], offset, length), height, b"", tree)
    return tree


def read_node(root: Path, place: tuple[Any, int, int], height: int, prefix: bytes, t: Tree) -> None:
    (path, base), offset, length = place
    record = path_of(root, path).read_bytes()[offset : offset + length]
    body = Body(record, 0x0CDB20DE)
    require(body.take(1)[0] == height, "the height of a node")
    files, (count,) = body.files(base), body.column(1)
    keys, prefixes = body.texts(count, min(1, height))
    require(keys == sorted(set(keys)), "the keys of a node")
    if height:
        columns = [body.column(count) for _ in range(6)][:3]
        for key, cut, number, *extent in zip(keys, prefixes, *columns, strict=True):
            read_node(root, (files[number], *extent), height - 1, prefix + key[:cut], t)
        return
    sizes, kinds = body.column(count), body.take(count)
    numbers, starts = (iter(body.column(sum(kinds))) for _ in range(2))
    for key, size, kind in zip(keys, sizes, kinds, strict=True):
        outside = (files[next(numbers)][0], next(starts), size) if kind else None
        t[prefix + key] = outside or body.take(size)
    require(body.at == len(body.data), "the end of a node")


def open_tensorstore(folder: Path, _: Any) -> Opened:
    tree = read_tree(folder) if (folder / "manifest.ocdbt").is_file() else {}

    def fetch(name: str) -> bytes:
        value = tree[name.encode()]
        if isinstance(value, bytes):
            return value
        with path_of(folder, value[0]).open("rb") as file:
            file.seek(value[1])
            return file.read(value[2])

    def object_bytes(start: str) -> bytes:
        key, _, cell = start.rpartition("/")
        start = f"{disk_name(key)}/{cell}"
        return fetch(next(name for name in map(bytes.decode, tree) if name.startswith(start)))

    return read_index(folder)[0], fetch, object_bytes


class Stub:
    """Stands for any object of a pickle: its class is not imported."""

    state: Any = None

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Names(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        plain = {"Size": tuple, "OrderedDict": dict}.get(name)
        return plain or (name if module == "torch" else type(name, (Stub,), {}))


def open_torch_dist(folder: Path, _: Any) -> Opened:
    content = Names(io.BytesIO((folder / ".metadata").read_bytes())).load().state
    places, tensors = {}, {}
    for at, info in content["storage_data"].items():
        name = dotted(at.state["fqn"], *(at.state.get("offset") or ()))
        places[name] = [info.state[f] for f in ("relative_path", "offset", "length")]
    for key, entry in content["state_dict_metadata"].items():
        if entry.state is None or "chunks" not in entry.state:
            continue
        properties, size = entry.state["properties"].state, entry.state["size"]
        dtype = dtype_of(properties["dtype"] if isinstance(properties, dict) else properties[0])
        special = content.get("mcore_data", {}).get(key, {})
        shape, parts = special.get("nd_reformulated_orig_global_shape", size), []
        own = [n // c for n, c in zip(shape, size, strict=False)]
        for offset, stored in (
            (c.state["offsets"], c.state["sizes"]) for c in entry.state["chunks"]
        ):
            box, flat = (offset, stored), slice(None)
            if special:
                box = [i * n for i, n in zip(offset, own, strict=False)], own
                flat, stored = slice(offset[-1], offset[-1] + stored[-1]), [stored[-1]]
            if 0 not in stored:
                parts.append(Part(dotted(key, *offset), *box, flat, stored))
        tensors[key] = dtype, shape, parts

    def record(start: str) -> bytes:
        name = start if start in places else next(n for n in places if n.startswith(start))
        file, begin, length = places[name]
        return path_of(folder, file).read_bytes()[begin : begin + length]

    def fetch(name: str) -> bytes:
        data = record(name)
        archive = zipfile.ZipFile(io.BytesIO(data)).infolist()
        (entry,) = [e for e in archive if e.filename.endswith("/data/0")]
        begin = entry.header_offset
        magic, *_, name_size, extra = struct.unpack_from("<4s5H3I2H", data, begin)
        require((magic, entry.compress_type) == (b"PK\x03\x04", 0), "an entry of a record")
        begin += 30 + name_size + extra
        return data[begin : begin + entry.file_size]

    return tensors, fetch, record


BACKENDS = {
    ("tensorstore", 1): open_tensorstore,
    ("zarr", 2): open_zarr2,
    ("zarr", 1): open_zarr1,
    ("torch_dist", 1): open_torch_dist,
}


def read_checkpoint(folder: Path) -> dict[str, Array]:
    """All tensors by key, compared with the seal and the checksums, if there are any.

    DamagedError says what is damaged; FileNotFoundError if nothing was committed.
    """
    text = (folder / COMMIT).read_bytes()
    try:
        names = ("sharded_backend", "common_backend")
        content = {"common_backend": "torch", **json.loads(text)}
        config = {f"{n}{v}": content.get(f"{n}{v}", 1) for n in names for v in ("", "_version")}
        seal = read_seal(folder, config)
        backend = BACKENDS[config["sharded_backend"], config["sharded_backend_version"]]
        opened = backend(folder, seal)
        arrays = {key: assembled(key, tensor, opened[1]) for key, tensor in opened[0].items()}
        if seal and seal["tables"] and not seal["is_open"]:
            tables = (read_table((folder / name).read_bytes()) for name in seal["tables"])
            check_values(itertools.chain.from_iterable(tables), arrays, opened)
    except (*_WRONG, *_WRONG_FILE) as error:
        raise DamagedError(f"{folder} is damaged: {error!r}") from error
    return arrays
