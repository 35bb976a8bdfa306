"""Look into a checkpoint that Megatron wrote (or we did), in one plain process.

    python examples/read_megatron.py [--values] DIR

No process group, no Megatron and no GPU are needed, and no rank count has to be known. ``dckpt ls``
and ``dckpt show`` do the same and more; this is how a program does it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dist_checkpointing import Checkpoint
from dist_checkpointing.errors import CheckpointingException


def main() -> None:
    parser = argparse.ArgumentParser(description="Show what a checkpoint holds.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--values", action="store_true", help="read the first values, too")
    given = parser.parse_args()
    try:
        checkpoint = Checkpoint.open(given.folder)
        for key, tensor in sorted(checkpoint.items()):
            line = f"{key}: {tensor.dtype_name}{list(tensor.shape)}, {tensor.num_chunks} chunks"
            if given.values:
                first = tensor[
                    tuple(slice(0, 4 if axis == 0 else 1) for axis in range(len(tensor.shape)))
                ]
                line += f", {first.flatten().tolist()} ..."
            print(line)
        for key, cells in checkpoint.objects.items():
            print(f"{key}: object{list(cells.shape)}")
        for name, value in checkpoint.common.items():
            print(f"{name}: {type(value).__name__} {str(value)[:60]}")
    except CheckpointingException as error:
        raise SystemExit(f"{given.folder} cannot be read: {error}") from error


if __name__ == "__main__":
    main()
