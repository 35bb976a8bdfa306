"""``dckpt map``: a page that shows how tensors are cut into chunks, and which rank wrote each."""

from __future__ import annotations

import colorsys
import html
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.format.checksums import StoredPart, read_tables
from dist_checkpointing.format.geometry import Box, Ints, boxes_of_part, ravel_offset
from dist_checkpointing.format.index import StoredTensor
from dist_checkpointing.tools.opening import open_named
from dist_checkpointing.tools.report import Report, print_json
from dist_checkpointing.tools.runs import CheckpointArgument

_DCP_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_FEW = ("#3b7dd8", "#e08a1e", "#2e9e78", "#c2569b", "#8a6fd1", "#c9b028", "#d1553f", "#4fb3d1")

Writers = tuple[int, ...]
"""The ranks that wrote a chunk, in order; empty if they were not recorded."""


def map_tensors(
    *,
    checkpoint: CheckpointArgument,
    key: Annotated[str | None, typer.Argument(help="Only this tensor, chunk by chunk.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="FILE.html.")],
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON about the file.")] = False,
) -> None:
    """Draw how tensors are cut into chunks, and which rank wrote each.

    Writes one page (.html) that works offline: all tensors by size, search,
    zoom by prefix, and every tensor to scale, chunk by chunk.

    Example: dckpt map ckpt/1000 -o map.html

    Example: dckpt map ckpt/1000 decoder.weight -o weight.html
    """
    _check_output(output, force=force)
    chunks = checkpoint_map(open_named(checkpoint), None if key is None else [key])
    page = render_page(chunks).encode(errors="backslashreplace")
    local_folder.write_atomic(output, page, local_folder.Durability.PAGE_CACHE)
    if as_json:
        print_json({"file": str(output), "bytes": len(page), "tensors": len(chunks.tensors)})
    else:
        report = Report()
        report.line(f"{output}  {bytes_text(len(page))}")
        report.print()


def _check_output(output: Path, *, force: bool) -> None:
    """Refuse a path that the page is not to be written to, before the work for it is done."""
    if output.suffix.lower() != ".html":
        page = output.with_suffix(".html")
        raise ValueError(
            f"{str(output)!r} must end in .html: write {str(page)!r} and open it in a browser"
        )
    if output.exists() and not force:
        raise FileExistsError(f"{output} exists: name another file, or pass --force")
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder {output.absolute().parent} does not exist")


# The contents of the page.


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor and how it is stored.

    Attributes:
        chunk_shape: Shape of a chunk; None if it is stored as pieces.
        pieces: Boxes of each piece; a flattened range has several.
        writers: Ranks that wrote each chunk, in C order, or each piece.
    """

    key: str
    dtype: str
    itemsize: int
    shape: Ints
    chunk_shape: Ints | None
    pieces: tuple[tuple[Box, ...], ...]
    writers: tuple[Writers, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return Box.whole(self.shape).num_elements * self.itemsize


@dataclass(frozen=True, slots=True)
class CheckpointMap:
    """What a page shows: the last two folders of the path, the backend, and tensors by key."""

    name: str
    backend: str
    tensors: tuple[MappedTensor, ...]


def checkpoint_map(checkpoint: Checkpoint, keys: Iterable[str] | None = None) -> CheckpointMap:
    """The map of some tensors, by default of all."""
    wanted = [checkpoint[key].key for key in (checkpoint if keys is None else keys)]
    index = checkpoint.index
    parts: dict[str, list[StoredPart]] = {key: [] for key in wanted}
    for part in (part for table in read_tables(checkpoint.folder) for part in table.parts()):
        if part.key in parts:
            parts[part.key].append(part)
    silent = [key for key in wanted if not parts[key]]
    by_file = _by_file_name(checkpoint, silent) if silent else {}
    tensors = []
    for key in sorted(wanted):
        stored = index[key]
        writers = by_file[key] if key in by_file else _by_checksums(stored, parts[key])
        tensors.append(
            MappedTensor(
                key,
                stored.dtype.name,
                stored.dtype.itemsize,
                stored.global_shape,
                stored.chunk_shape,
                tuple(_piece_boxes(stored)),
                tuple(writers),
            )
        )
    backend, version = checkpoint.backend
    path = checkpoint.path.absolute()
    return CheckpointMap(f"{path.parent.name}/{path.name}", f"{backend} {version}", tuple(tensors))


def _piece_boxes(stored: StoredTensor) -> Iterator[tuple[Box, ...]]:
    for box, flat in stored.pieces or ():
        yield tuple(boxes_of_part(box, flat))


def _by_checksums(stored: StoredTensor, parts: Sequence[StoredPart]) -> list[Writers]:
    if stored.pieces is not None:
        return _of_pieces(stored, parts)
    grid = stored.grid
    found: list[set[int]] = [set() for _ in itertools.product(*map(range, grid.counts))]
    for part in parts:
        for box in boxes_of_part(part.box, part.flat_range):
            for chunk, _ in grid.intersecting(box):
                found[ravel_offset(chunk, grid.counts)].add(_rank(part))
    return [tuple(sorted(ranks)) for ranks in found]


def _rank(part: StoredPart) -> int:
    assert part.rank is not None, "it is read from the file of a rank"
    return part.rank


def _of_pieces(stored: StoredTensor, parts: Sequence[StoredPart]) -> list[Writers]:
    assert stored.pieces is not None
    exact: dict[tuple[Box, tuple[int, int] | None], set[int]] = {}
    for part in parts:
        exact.setdefault((part.box, part.flat_range), set()).add(_rank(part))
    writers = []
    for box, flat in stored.pieces:
        ranks = exact.get((box, flat))
        if ranks is None:
            # The format may have cut the piece into smaller boxes.
            boxes = boxes_of_part(box, flat)
            ranks = {
                _rank(part)
                for part in parts
                if any(
                    a.intersect(b) is not None
                    for a in boxes
                    for b in boxes_of_part(part.box, part.flat_range)
                )
            }
        writers.append(tuple(sorted(ranks)))
    return writers


def _by_file_name(checkpoint: Checkpoint, keys: Sequence[str]) -> Mapping[str, list[Writers]]:
    """The writers according to the names of torch DCP's files: each rank writes its own files."""
    if checkpoint.backend[0] != "torch_dist":
        return {}
    # Imported here, because it imports torch.
    from dist_checkpointing.planning import MetadataIndex  # noqa: PLC0415

    chunks: list[MetadataIndex] = []
    counts = []
    for key in keys:
        stored = checkpoint.index[key]
        before = len(chunks)
        if stored.pieces is not None:
            rows = enumerate(stored.pieces)
            chunks += [MetadataIndex(key, box.offset, row) for row, (box, _) in rows]
        else:
            chunks += [MetadataIndex(key, chunk.box.offset) for chunk in checkpoint[key].chunks]
        counts.append(len(chunks) - before)
    files = iter(checkpoint.reads.files(checkpoint.index, chunks))
    return {
        key: [_rank_in(file) for file in itertools.islice(files, count)]
        for key, count in zip(keys, counts, strict=True)
    }


def _rank_in(file: str | None) -> Writers:
    match = None if file is None else _DCP_FILE.fullmatch(file)
    return () if match is None else (int(match[1]),)


# The page.


def render_page(chunks: CheckpointMap) -> str:
    """The HTML of the page. A pure function of the map."""
    parts = {
        "TITLE": html.escape(f"{chunks.name}: chunks"),
        "STYLE": _resource("page.css"),
        "DATA": _script_json(page_data(chunks)),
        # Not a module, because the page has no files to import.
        "SCRIPT": f'"use strict";\n(() => {{\n{_resource("page.js")}}})();',
    }
    text = _resource("page.html")
    for name, content in parts.items():
        before, _, after = text.partition(f"@{name}@")
        text = before + content + after
    return text


def page_data(chunks: CheckpointMap) -> dict[str, Any]:
    """The data for the script of the page; chunks in a row with the same writers are one entry."""
    numbers: dict[Writers, int] = {}
    tensors = [_tensor(tensor, numbers) for tensor in chunks.tensors]
    dtypes = sorted({tensor.dtype for tensor in chunks.tensors})
    return {
        "name": chunks.name,
        "backend": chunks.backend,
        "writers": [list(writers) for writers in numbers],
        "ranks": list(rank_colours(chunks.tensors).items()),
        "dtypes": list(zip(dtypes, palette(len(dtypes)), strict=True)),
        "tensors": tensors,
    }


def _tensor(tensor: MappedTensor, numbers: dict[Writers, int]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": tensor.key,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "itemsize": tensor.itemsize,
        "bytes": tensor.num_bytes,
        "writers": _runs([numbers.setdefault(w, len(numbers)) for w in tensor.writers]),
    }
    if tensor.chunk_shape is not None:
        return row | {"chunk": tensor.chunk_shape}
    pieces = [[(box.offset, box.shape) for box in piece] for piece in tensor.pieces]
    return row | {"pieces": pieces}


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    return [(number, len(list(run))) for number, run in itertools.groupby(numbers)]


def _script_json(content: Any) -> str:
    """JSON that cannot end the script element around it."""
    text = json.dumps(content, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath("map_web", name).read_text(encoding="utf-8")


def palette(count: int) -> list[str]:
    """``count`` colours: chosen ones if they are few, else from the colour circle."""
    if count <= len(_FEW):
        return list(_FEW[:count])
    colours = []
    for number in range(count):
        lightness = (0.46, 0.60, 0.53)[number % 3]
        rgb = colorsys.hls_to_rgb(number / count, lightness, 0.62)
        colours.append("#" + "".join(f"{round(255 * part):02x}" for part in rgb))
    return colours


def rank_colours(tensors: Iterable[MappedTensor]) -> dict[int, str]:
    """A colour for every rank that wrote a part of the tensors."""
    ranks = sorted({rank for t in tensors for writers in set(t.writers) for rank in writers})
    return dict(zip(ranks, palette(len(ranks)), strict=True))
