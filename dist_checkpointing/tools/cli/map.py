"""``dckpt map``: a picture of how tensors are cut into chunks, and who wrote them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from dist_checkpointing.checkpoint.handle import Checkpoint
from dist_checkpointing.filesystem import local
from dist_checkpointing.format.byte_sizes import bytes_text
from dist_checkpointing.tools.cli.screen import out, print_json
from dist_checkpointing.tools.map import CheckpointMap, checkpoint_map


def map_tensors(
    *,
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
    key: Annotated[str | None, typer.Argument(help="Only this tensor, chunk by chunk.")] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="FILE.html, FILE.svg or FILE.png.")
    ],
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace the file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON about the file.")] = False,
) -> None:
    """Draw how tensors are cut into chunks, and which rank wrote each.

    A page (.html) explores: search, zoom by prefix, every tensor chunk by
    chunk; one file that works offline. Pictures (.svg, .png) show all
    tensors by size, or one tensor to scale.

    Example: dckpt map ckpt/1000 -o map.html

    Example: dckpt map ckpt/1000 decoder.weight -o weight.svg
    """
    render = _RENDERERS.get(output.suffix.lower())
    if render is None:
        raise ValueError(f"{str(output)!r} must end in .html, .svg or .png")
    if output.exists() and not force:
        raise FileExistsError(f"{output} exists: name another file, or pass --force")
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder {output.absolute().parent} does not exist")
    chunks = checkpoint_map(Checkpoint.open(checkpoint), None if key is None else [key])
    data = render(chunks, is_single=key is not None)
    local.write_atomic(output, data, local.Durability.PAGE_CACHE)
    if as_json:
        print_json({"file": str(output), "bytes": len(data), "tensors": len(chunks.tensors)})
    else:
        out.print(f"{output}  {bytes_text(len(data))}", markup=False, soft_wrap=True)


# Each is imported when it is asked for, so that a page needs no matplotlib, and none needs torch.


def _html(chunks: CheckpointMap, *, is_single: bool) -> bytes:
    del is_single  # a page shows one tensor alone if there is only one
    from dist_checkpointing.tools.map.page import render_page  # noqa: PLC0415

    return render_page(chunks).encode()


def _svg(chunks: CheckpointMap, *, is_single: bool) -> bytes:
    from dist_checkpointing.tools.map.chunk_grid import grid_picture  # noqa: PLC0415
    from dist_checkpointing.tools.map.svg import render_svg  # noqa: PLC0415
    from dist_checkpointing.tools.map.treemap import overview  # noqa: PLC0415

    return render_svg(grid_picture(chunks) if is_single else overview(chunks)).encode()


def _png(chunks: CheckpointMap, *, is_single: bool) -> bytes:
    from dist_checkpointing.tools.map.chunk_grid import grid_picture  # noqa: PLC0415
    from dist_checkpointing.tools.map.png import render_png  # noqa: PLC0415
    from dist_checkpointing.tools.map.treemap import overview  # noqa: PLC0415

    try:
        return render_png(grid_picture(chunks) if is_single else overview(chunks))
    except ModuleNotFoundError as error:
        raise ValueError(
            "a PNG needs matplotlib: pip install 'dist_checkpointing[demo]', or draw an .svg"
        ) from error


_RENDERERS: dict[str, Callable[..., bytes]] = {".html": _html, ".svg": _svg, ".png": _png}
