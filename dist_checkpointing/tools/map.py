"""``dckpt map``: a page that shows how tensors are cut into chunks, and which rank wrote each."""

from __future__ import annotations

import colorsys
import html
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.checkpoint import Checkpoint
from dist_checkpointing.filesystem import local_folder
from dist_checkpointing.format.checksums import StoredPart, read_tables
from dist_checkpointing.format.geometry import boxes_of_part, ravel_offset
from dist_checkpointing.format.index import StoredTensor
from dist_checkpointing.tools.opening import CheckpointArgument, open_named
from dist_checkpointing.tools.report import AsJson, Report

_DCP_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_FEW = ("#3b7dd8", "#e08a1e", "#2e9e78", "#c2569b", "#8a6fd1", "#c9b028", "#d1553f", "#4fb3d1")

Writers = tuple[int, ...]
"""The ranks that wrote a chunk, in order; empty if they were not recorded."""


def map_tensors(
    *,
    checkpoint: CheckpointArgument,
    key: Annotated[str | None, Argument(help="Only this tensor, chunk by chunk.")] = None,
    output: Annotated[Path, Option("--output", "-o", help="FILE.html.")],
    force: Annotated[bool, Option("--force", "-f", help="Replace the file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw how tensors are stored in chunks, and which rank wrote each.

    Writes one page (.html) that works offline: all tensors by size, search,
    zoom by prefix, and every tensor to scale, chunk by chunk.

    Example: dckpt map ckpt/1000 -o map.html

    Example: dckpt map ckpt/1000 decoder.weight -o weight.html
    """
    if output.exists() and not force:
        raise FileExistsError(f"{output} exists: name another file, or pass --force")
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder {output.absolute().parent} does not exist")
    data = page_data(open_named(checkpoint), key)
    page = render_page(data).encode(errors="backslashreplace")
    local_folder.write_atomic(output, page, local_folder.Durability.PAGE_CACHE)
    document = {"file": str(output), "bytes": len(page), "tensors": len(data["tensors"])}
    Report(f"{output}  {bytes_text(len(page))}", None).finish(document, as_json=as_json)


# The contents of the page.


def page_data(checkpoint: Checkpoint, key: str | None = None) -> dict[str, Any]:
    """What a page shows of all tensors, or of one: the data for its script, of plain types.

    ``writers`` of a tensor say which ranks wrote its chunks in C order, or its pieces: runs of
    chunks with the same writers, as the number of a row of ``writers`` of the page, and a count.
    """
    wanted = sorted(checkpoint) if key is None else [checkpoint[key].key]
    writers_of = _writers(checkpoint, wanted)
    numbers: dict[Writers, int] = {}
    tensors: list[dict[str, Any]] = []
    for name in wanted:
        stored = checkpoint.index[name]
        row = [numbers.setdefault(writers, len(numbers)) for writers in writers_of[name]]
        content: dict[str, Any] = {
            "key": name,
            "shape": stored.global_shape,
            "dtype": stored.dtype.name,
            "itemsize": stored.dtype.itemsize,
            "bytes": stored.num_bytes,
            "writers": [(number, len(list(run))) for number, run in itertools.groupby(row)],
        }
        if stored.pieces is None:
            content["chunk"] = stored.chunk_shape
        else:
            content["pieces"] = [
                [(part.offset, part.shape) for part in boxes_of_part(box, flat)]
                for box, flat in stored.pieces
            ]
        tensors.append(content)
    path, (backend, version) = checkpoint.path.absolute(), checkpoint.backend
    ranks = sorted({rank for writers in numbers for rank in writers})
    dtypes = sorted({content["dtype"] for content in tensors})
    return {
        "name": f"{path.parent.name}/{path.name}",
        "backend": f"{backend} {version}",
        "writers": list(numbers),
        "ranks": list(zip(ranks, palette(len(ranks)), strict=True)),
        "dtypes": list(zip(dtypes, palette(len(dtypes)), strict=True)),
        "tensors": tensors,
    }


def _writers(checkpoint: Checkpoint, keys: Sequence[str]) -> dict[str, list[Writers]]:
    parts: dict[str, list[StoredPart]] = {key: [] for key in keys}
    for part in itertools.chain.from_iterable(t.parts() for t in read_tables(checkpoint.folder)):
        if part.key in parts:
            parts[part.key].append(part)
    by_file = _by_file_name(checkpoint, [key for key in keys if not parts[key]])
    return {
        key: by_file[key] if key in by_file else _by_checksums(checkpoint.index[key], parts[key])
        for key in keys
    }


def _by_checksums(stored: StoredTensor, parts: Sequence[StoredPart]) -> list[Writers]:
    found: list[set[int]] = [set() for _ in range(stored.num_parts)]
    if stored.pieces is None:
        for part in parts:
            for box in boxes_of_part(part.box, part.flat_range):
                for chunk, _ in stored.grid.intersecting(box):
                    found[ravel_offset(chunk, stored.grid.counts)].add(_rank(part))
    else:
        exact: dict[object, set[int]] = {}
        for part in parts:
            exact.setdefault((part.box, part.flat_range), set()).add(_rank(part))
        for number, (box, flat) in enumerate(stored.pieces):
            found[number] = exact.get((box, flat)) or {
                # The format may have cut the piece into smaller boxes.
                _rank(part)
                for part in parts
                for ours in boxes_of_part(box, flat)
                for theirs in boxes_of_part(part.box, part.flat_range)
                if ours.intersect(theirs) is not None
            }
    return [tuple(sorted(ranks)) for ranks in found]


def _rank(part: StoredPart) -> int:
    assert part.rank is not None, "it is read from the file of a rank"
    return part.rank


def _by_file_name(checkpoint: Checkpoint, keys: Sequence[str]) -> Mapping[str, list[Writers]]:
    """The writers according to the names of torch DCP's files: each rank writes its own files."""
    if not keys or checkpoint.backend[0] != "torch_dist":
        return {}
    # Imported here, because it imports torch.
    from dist_checkpointing.planning import MetadataIndex  # noqa: PLC0415

    chunks: dict[str, list[MetadataIndex]] = {}
    for key in keys:
        stored = checkpoint.index[key]
        chunks[key] = [
            MetadataIndex(key, box.offset, None if stored.pieces is None else number)
            for number, (box, _) in enumerate(stored.parts())
        ]
    files = iter(checkpoint.reads.files(checkpoint.index, [*itertools.chain(*chunks.values())]))
    found: dict[str, list[Writers]] = {}
    for key, parts in chunks.items():
        matches = [_DCP_FILE.fullmatch(file or "") for file in itertools.islice(files, len(parts))]
        found[key] = [() if match is None else (int(match[1]),) for match in matches]
    return found


# The page.


def render_page(data: dict[str, Any]) -> str:
    parts = {
        "TITLE": html.escape(f"{data['name']}: chunks"),
        "STYLE": _resource("page.css"),
        "DATA": _script_json(data),
        # Not a module, because the page has no files to import.
        "SCRIPT": f'"use strict";\n(() => {{\n{_resource("page.js")}}})();',
    }
    return re.sub(r"@([A-Z]+)@", lambda place: parts[place[1]], _resource("page.html"))


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
        colours.append("#" + bytes(round(255 * part) for part in rgb).hex())
    return colours
