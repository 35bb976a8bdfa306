"""``dckpt map``: a page of how tensors are cut into chunks, and which rank wrote each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dist_checkpointing.checkpoint.handle import Checkpoint
from dist_checkpointing.filesystem import local
from dist_checkpointing.format.byte_sizes import bytes_text
from dist_checkpointing.tools.cli.screen import CheckpointFolder, out, print_json
from dist_checkpointing.tools.map import checkpoint_map
from dist_checkpointing.tools.map.page import render_page


def map_tensors(
    *,
    checkpoint: CheckpointFolder,
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
    if output.suffix.lower() != ".html":
        page = output.with_suffix(".html")
        raise ValueError(
            f"{str(output)!r} must end in .html: write {str(page)!r} and open it in a browser"
        )
    if output.exists() and not force:
        raise FileExistsError(f"{output} exists: name another file, or pass --force")
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder {output.absolute().parent} does not exist")
    chunks = checkpoint_map(Checkpoint.open(checkpoint), None if key is None else [key])
    data = render_page(chunks).encode()
    local.write_atomic(output, data, local.Durability.PAGE_CACHE)
    if as_json:
        print_json({"file": str(output), "bytes": len(data), "tensors": len(chunks.tensors)})
    else:
        out.print(f"{output}  {bytes_text(len(data))}", markup=False, soft_wrap=True)
