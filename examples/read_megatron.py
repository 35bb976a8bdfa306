"""Look into a checkpoint that Megatron wrote (or we did), in one plain process.

    python examples/read_megatron.py [--values] DIR

No process group, no Megatron and no GPU are needed, and no rank count has to be known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from checkpoint_contents import Contents, read_contents, shape_text
from dist_checkpointing import load_plain_tensors
from dist_checkpointing.errors import CheckpointingException
from dist_checkpointing.format.byte_sizes import bytes_text


def main() -> None:
    parser = argparse.ArgumentParser(description="Show what a checkpoint holds.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--values", action="store_true", help="load the tensors, show the first")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    console = Console(width=None if sys.stdout.isatty() else 116)
    try:
        contents = read_contents(folder)
        loaded = load_plain_tensors(str(folder)) if arguments.values else None
    except CheckpointingException as error:
        raise SystemExit(f"{folder} cannot be read: {error}") from error
    console.print(tensor_table(contents, loaded))
    if contents.objects:
        console.print(object_table(contents))
    console.print(common_table(contents.common))


def tensor_table(contents: Contents, loaded: Mapping[str, Any] | None) -> Table:
    """Keys, dtypes, shapes, chunks and, if they are loaded, a look at the values."""
    total = sum(row.num_bytes for row in contents.tensors)
    table = Table(title=f"{len(contents.tensors)} tensors, {bytes_text(total)}")
    table.add_column("key", overflow="fold")
    for name in ("dtype", "global shape", "chunks"):
        table.add_column(name, no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    if loaded is not None:
        table.add_column("first values", overflow="fold")
    for row in contents.tensors:
        table.add_row(
            escape(row.key),
            row.dtype,
            shape_text(row.global_shape),
            row.chunks,
            bytes_text(row.num_bytes),
            *([] if loaded is None else [_first_values(loaded[row.key])]),
        )
    return table


def object_table(contents: Contents) -> Table:
    """Names of the sharded objects: key, position in its grid, grid."""
    table = Table(title=f"{len(contents.objects)} sharded objects")
    table.add_column("name", overflow="fold")
    for name in contents.objects:
        table.add_row(escape(name))
    return table


def common_table(common: Mapping[str, Any]) -> Table:
    """The state that is not sharded."""
    table = Table(title="common state")
    table.add_column("entry", overflow="fold")
    table.add_column("type")
    table.add_column("value", overflow="ellipsis", no_wrap=True, max_width=60)
    for name, value in common.items():
        table.add_row(escape(str(name)), type(value).__name__, escape(repr(value)))
    return table


def _first_values(tensor: torch.Tensor) -> str:
    values = tensor.flatten()[:4]
    if values.dtype.is_floating_point:
        shown = [f"{value:.4g}" for value in values.float().tolist()]
    else:
        shown = [str(value) for value in values.tolist()]
    return ", ".join(shown) + (", ..." if tensor.numel() > len(values) else "")


if __name__ == "__main__":
    main()
