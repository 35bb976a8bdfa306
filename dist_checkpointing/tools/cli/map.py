"""``dckpt map``: a page that shows how tensors are cut into chunks, and which rank wrote each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.tools.cli.screen import (
    CheckpointArgument,
    check_page,
    out,
    print_json,
    write_page,
)
from dist_checkpointing.tools.inspect.opening import open_named
from dist_checkpointing.tools.map import checkpoint_map
from dist_checkpointing.tools.map.page import render_page


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
    check_page(output, force=force)
    chunks = checkpoint_map(open_named(checkpoint), None if key is None else [key])
    size = write_page(output, render_page(chunks))
    if as_json:
        print_json({"file": str(output), "bytes": size, "tensors": len(chunks.tensors)})
    else:
        out.print(f"{output}  {bytes_text(size)}", markup=False, soft_wrap=True)
