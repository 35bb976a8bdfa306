"""Reads the tensors of a checkpoint folder by ``docs/spec.md`` alone: tensorstore and zarr.

It imports the standard library, numpy, numcodecs (zstd and zarr's codecs) and xxhash (the others
have no XXH3), and nothing of the library that it checks. torch_dist has another reader, torch DCP.
"""

import hashlib
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numcodecs
import numpy as np
import xxhash

COMMIT, ATTEMPT = "metadata.json", ".dckpt/attempt.json"
SEAL, INDEX = ".dckpt/seal.json", ".dckpt/index.json"


class DamagedError(Exception):
    """The checkpoint is not what was saved."""


class Part(NamedTuple):
    """A chunk or piece: its name, its box, the flat range of it, its shape as stored."""

    name: str
    offset: Sequence[int]
    shape: Sequence[int]
    flat: slice
    stored: Sequence[int]


def require(condition: object, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def dotted(*words: object) -> str:
    return ".".join(map(str, words))


def dtype_of(name: str) -> np.dtype[Any]:
    """What numpy does not know is read as integers of the same size."""
    bits = "u2" if name == "bfloat16" else "u1" if name.startswith("float8") else name
    return np.dtype(bits).newbyteorder("<")


def box_of(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def disk_name(key: str) -> str:
    name = quote(key, safe="").replace("~", "%7E")
    if name.startswith(".") or name in {COMMIT, "common.pt", "zarr.json"}:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > 200:
        name = f"{name[:183]}~{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    return name


def checked_json(data: bytes, digest: Callable[[bytes], str], kind: str) -> Any:
    body = b"{" + data[len('{"checksum":"",' + digest(b"")) :]
    require(data.startswith(b'{"checksum":"%s",' % digest(body).encode()), f"checksum of {kind}")
    content = json.loads(data)
    require(content["format"] == f"dist_checkpointing.{kind}", f"format of {kind}")
    return content


def grid_parts(shape: Sequence[int], chunk: Sequence[int], folder: str, c: str) -> Iterator[Part]:
    counts = [range(-(-n // step)) for n, step in zip(shape, chunk, strict=True)]
    for index in itertools.product(*counts):
        offset = [i * step for i, step in zip(index, chunk, strict=True)]
        own = [min(step, n - o) for step, n, o in zip(chunk, shape, offset, strict=True)]
        name = dotted(c, *index) if c else dotted(*index) or "0"
        yield Part(f"{folder}/{name}", offset, own, slice(None), chunk)


def piece_parts(folder: str, pieces: dict[str, Any]) -> Iterator[Part]:
    for offset, shape, (start, stop) in zip(*pieces.values(), strict=True):
        flat, stored, end = slice(None), shape, ""
        if start >= 0:
            flat, stored, end = slice(start, stop), [stop - start], f"-{start}"
        chunk = dotted("c", *[0] * len(stored))
        yield Part(f"{folder}/{dotted('piece', *offset)}{end}/{chunk}", offset, shape, flat, stored)


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


class Reader:
    """A checkpoint: its arrays by key, and where the values of parts and objects are by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.arrays = folder, dict[str, np.ndarray]()
        self.places: dict[str, tuple[str, int, int] | bytes] = {}
        self.unpack: Callable[[bytes], Any] = bytes
        content = {"common_backend": "torch", **json.loads(self.bytes_of(COMMIT))}
        names = (f"{n}_backend{v}" for n in ("sharded", "common") for v in ("", "_version"))
        config = {name: content.get(name, 1) for name in names}
        self.seal = self.read_seal(config)
        getattr(self, f"read_{config['sharded_backend']}{config['sharded_backend_version']}")()
        if self.seal and self.seal["tables"] and not self.seal["is_open"]:
            self.check_values()

    def bytes_of(self, name: str, begin: int = 0, size: int = -1) -> bytes:
        is_outside = name.startswith("/") or ".." in name.split("/") or not name.strip("./")
        require(not is_outside, f"{name!r} is no file of a checkpoint")
        with (self.folder / name).open("rb") as file:
            file.seek(begin)
            return file.read(size)

    def read_seal(self, config: dict[str, Any]) -> Any:
        """The seal, with which all files are compared; None if there is none."""
        there = [(self.folder / name).is_file() for name in (ATTEMPT, SEAL)]
        attempt = json.loads(self.bytes_of(ATTEMPT)) if there[0] else {"creates": ()}
        if not there[1] and SEAL not in attempt["creates"]:
            return None
        seal = checked_json(self.bytes_of(SEAL), xxhash.xxh3_128_hexdigest, "seal")
        require(seal["attempt"] == attempt["attempt"], f"{ATTEMPT} names another save")
        require(seal["config"] == config, f"{COMMIT} says {config}")
        rows = zip(seal["files"], seal["sizes"], seal["digests"], strict=True)
        for name, size, digest in () if seal["is_open"] else rows:
            data = self.bytes_of(name)
            require(len(data) == size, f"{name} has {len(data)} bytes, not {size}")
            require(digest in (None, xxhash.xxh3_128_hexdigest(data)), f"the digest of {name}")
        return seal

    def value(self, name: str) -> bytes:
        place = self.places[name] if self.places else (name, 0, -1)
        return place if isinstance(place, bytes) else self.bytes_of(*place)

    def assemble(self, key: str, dtype: str, shape: Sequence[int], parts: Iterator[Part]) -> None:
        whole = np.zeros(math.prod(shape), dtype_of(dtype))
        seen, numbers = np.zeros(len(whole), np.int64), np.arange(len(whole)).reshape(shape)
        for part in parts:
            inside = part.shape if part.flat == slice(None) else part.stored
            data, size = self.unpack(self.value(part.name)), math.prod(part.stored) * whole.itemsize
            require(len(data) == size, f"{part.name} has {len(data)} bytes, not {size}")
            values = np.frombuffer(data, whole.dtype).reshape(part.stored)
            at = numbers[box_of(part.offset, part.shape)].reshape(-1)[part.flat]
            whole[at] = values[box_of([0] * len(inside), inside)].reshape(-1)
            seen[at] += 1
        require((seen == 1).all(), f"the parts of {key} do not cover it once")
        self.arrays[key] = whole.reshape(shape)

    def check_values(self) -> None:
        sizes = {key: array.size for key, array in self.arrays.items()}
        left = sizes.copy()
        for table in self.seal["tables"]:
            names, rows = self.read_table(table)
            for key, _, ndim, is_object, offset, shape, flat, digest in rows:
                name, at = names[key[0]], offset[: ndim[0]]
                if not is_object[0] and name not in sizes:
                    continue  # it was removed
                if is_object[0]:
                    start = f"{disk_name(name)}/shard_{dotted(*at)}_"
                    values = self.value(next(n for n in self.places if n.startswith(start)))
                else:
                    run = self.arrays[name][box_of(at, shape[: ndim[0]])].reshape(-1)
                    run = run if flat[0] < 0 else run[slice(*flat)]
                    values = run.tobytes()
                    left[name] -= run.size
                require(xxhash.xxh3_64_intdigest(values) == digest[0], f"{name} at {at}")
        # A save without checksums keeps those of objects.
        require(left == sizes or not any(left.values()), f"checksums do not cover {left}")

    def read_table(self, table: str) -> tuple[list[str], Iterator[Any]]:
        data = self.bytes_of(table)
        magic, version, text, n, axes = struct.unpack_from("<8sIIQI", data)
        require((magic, version) == (b"DCKPTSUM", 1), f"the version of {table}")
        require(xxhash.xxh3_128_digest(data[:-16]) == data[-16:], f"the checksum of {table}")
        at, columns, widths = 28 + text, [], (1, 1, 1, 1, axes, axes, 2, 1)
        for kind, width in zip(("<u4",) * 4 + ("<i8",) * 3 + ("<u8",), widths, strict=True):
            columns.append(np.frombuffer(data, kind, n * width, at).reshape(n, width).tolist())
            at += n * width * int(kind[2])
        require(at == len(data) - 16, f"the length of {table}")
        return json.loads(data[28 : 28 + text]), zip(*columns, strict=True)

    def read_zarr2(self) -> None:
        index = checked_json(self.bytes_of(INDEX), xxhash.xxh3_64_hexdigest, "index")
        if index["codec"]:
            self.unpack = numcodecs.get_codec({"id": index["codec"]}).decode
        columns = [index[name] for name in ("keys", "dtypes", "global_shapes", "chunk_shapes")]
        for key, dtype, shape, chunk in zip(*columns, strict=True):
            if chunk is None:
                parts = piece_parts(disk_name(key), index["pieces"][key])
            else:
                parts = grid_parts(shape, chunk, disk_name(key), "c")
            self.assemble(key, dtype, shape, parts)

    def read_zarr1(self) -> None:
        for path in sorted(self.folder.rglob(".zarray")):
            key = path.parent.relative_to(self.folder).as_posix()
            is_known = not self.seal or f"{key}/.zarray" in self.seal["files"]
            if is_known and not key.endswith(".sync"):
                node = json.loads(path.read_bytes())
                require((node["compressor"], node["order"]) == (None, "C"), f"chunks of {key}")
                parts = grid_parts(node["shape"], node["chunks"], key, "")
                self.assemble(key, node["dtype"], node["shape"], parts)

    def read_tensorstore1(self) -> None:
        if (self.folder / "manifest.ocdbt").is_file():
            body = Body(self.bytes_of("manifest.ocdbt"), 0x0CDB3A2A)
            require(body.take(17)[16] == 0, "the kind of the manifest")
            body.column(2), body.take(1), body.take(4 * body.column(1)[0])
            files, (versions,) = body.files(""), body.column(1)
            body.column(versions)
            height = body.take(versions)[-1]
            file, offset, length = (body.column(versions)[-1] for _ in range(3))
            if length < 2**64 - 1:
                self.read_node(files[file], (offset, length), height, b"")
        self.read_zarr2()

    def read_node(self, file: tuple[str, str], extent: Any, height: int, prefix: bytes) -> None:
        (path, base), (begin, length) = file, extent
        body = Body(self.bytes_of(path, begin, length), 0x0CDB20DE)
        require(body.take(1)[0] == height, "the height of a node")
        files, (count,) = body.files(base), body.column(1)
        keys, prefixes = body.texts(count, min(1, height))
        require(keys == sorted(set(keys)), "the keys of a node")
        if height:
            columns = [body.column(count) for _ in range(6)][:3]
            for key, cut, number, *below in zip(keys, prefixes, *columns, strict=True):
                self.read_node(files[number], below, height - 1, prefix + key[:cut])
            return
        sizes, kinds = body.column(count), body.take(count)
        numbers, starts = (iter(body.column(sum(kinds))) for _ in range(2))
        for key, size, kind in zip(keys, sizes, kinds, strict=True):
            outside = (files[next(numbers)][0], next(starts), size) if kind else None
            self.places[(prefix + key).decode()] = outside or body.take(size)
        require(body.at == len(body.data), "the end of a node")


def read_checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """All tensors by key, compared with the seal and the checksums, if there are any.

    DamagedError says what is damaged; FileNotFoundError if nothing was committed.
    """
    (folder / COMMIT).stat()
    try:
        return Reader(folder).arrays
    except Exception as error:  # whatever a parser raises at what is not as it was written
        raise DamagedError(f"{folder} is damaged: {error!r}") from error
