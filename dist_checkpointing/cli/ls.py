"""``dckpt ls``: what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dist_checkpointing.checkpoint import Checkpoint
from dist_checkpointing.cli.screen import bytes_as_text, out


def ls(
    checkpoint: Annotated[Path, typer.Argument(help="A committed checkpoint.")],
) -> None:
    """List the tensors of a checkpoint.

    Example: dckpt ls ckpt/1000
    """
    for key, tensor in Checkpoint.open(checkpoint).items():
        line = f"{key}  {tensor.dtype_name}{list(tensor.shape)}  {bytes_as_text(tensor.num_bytes)}"
        out.print(line, markup=False)
