"""Train small adapters on a large frozen model: each checkpoint writes the adapters only.

    python examples/adapter_run.py [--folder DIR] [--mib 256]

Each checkpoint is whole: it holds the frozen weights too, as a second name of files that are there
already. At the end all but the last are deleted, and the last one is read and verified.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from dist_checkpointing import (
    CheckpointManager,
    Retention,
    ShardedTensor,
    load_plain_tensors,
    verify_checkpoint,
)
from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.tools.opening import count_files
from harness import add_folder, output_folder

WIDTH, RANK, STEPS = 1024, 5, 6


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoints of adapters on a frozen model.")
    parser.add_argument("--mib", type=int, default=256, help="size of the frozen weights")
    add_folder(parser)
    given = parser.parse_args()
    folder = output_folder(parser, given.folder, "adapters-")
    random = torch.Generator().manual_seed(0)
    shape = (WIDTH, WIDTH)
    frozen = {
        f"layers.{i}.weight": torch.randn(shape, generator=random)
        for i in range(max(1, given.mib // 4))
    }
    adapters = {f"adapters.{i}": torch.zeros(2, WIDTH, RANK) for i in range(len(frozen))}
    with CheckpointManager(folder, retention=Retention(keep_last=3), incremental=True) as manager:
        for step in range(1, STEPS + 1):
            for adapter in adapters.values():
                adapter.add_(torch.randn(adapter.shape, generator=random))
            tensors = {**frozen, **adapters}
            shards = {k: ShardedTensor.from_rank_offsets(k, t) for k, t in tensors.items()}
            manager.async_save(step, {"model": shards, "step": step}).result()
            print(f"step {step}: {_told(manager.folder(step))}")
        print(f"kept by retention: {manager.steps()}")
        for step in manager.steps()[:-1]:
            manager.delete(step)
    last = manager.folder(STEPS)
    verify_checkpoint(last)
    found = load_plain_tensors(last)
    assert all(torch.equal(found[key], tensor) for key, tensor in {**frozen, **adapters}.items())
    print(f"alone and verified: {_told(last)}")


def _told(folder: Path) -> str:
    files = count_files(folder)
    own = bytes_text(files.num_bytes - files.num_bytes_shared)
    return f"{bytes_text(files.num_bytes)}, {own} of its own"


if __name__ == "__main__":
    main()
