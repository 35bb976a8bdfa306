"""What conversions cost: speed, and peak memory against the budget. Prints a table.

    python benchmarks/convert.py [--gib 2] [--memory 640MiB] [--folder DIR]

Every conversion runs in a process of its own, so that its peak is its own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dist_checkpointing import ShardedTensor, save
from dist_checkpointing.filesystem import local
from dist_checkpointing.format.byte_sizes import parse_bytes

FORMATS = ("tensorstore", "zarr", "zarr:1", "torch_dist", "safetensors", "torch")


def write_source(folder: Path, gib: float) -> int:
    """A checkpoint with large and small tensors; its bytes."""
    most = int(gib * 2**30)
    state = {}
    # All the same memory: what is saved is what counts.
    large = torch.randn(4096, 8192)
    small = torch.randn(64, 64)
    count = max(1, most // large.nbytes)
    for number in range(count):
        state[f"layer.{number}.weight"] = ShardedTensor.from_rank_offsets(
            f"layer.{number}.weight", large
        )
    for number in range(1000):
        state[f"layer.{number}.bias"] = ShardedTensor.from_rank_offsets(
            f"layer.{number}.bias", small
        )
    save(state, folder, "tensorstore")
    return count * large.nbytes + 1000 * small.nbytes


_CHILD = """
import atexit, re, sys
from dist_checkpointing.tools.cli.app import main

def tell() -> None:
    # Not getrusage, which also counts the process that this one was forked from.
    with open("/proc/self/status") as status:
        print(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1], file=sys.stderr)

atexit.register(tell)
main()
"""


def measure(source: Path, target: Path, to: str, memory: int, *more: str) -> tuple[float, int]:
    """Convert in a process of its own: seconds, and its peak memory in bytes."""
    arguments = ("convert", source, target, "--to", to, "--memory", memory, *more)
    began = time.perf_counter()
    run = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _CHILD, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
    )
    return time.perf_counter() - began, int(run.stderr.split()[-1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--memory", type=parse_bytes, default=parse_bytes("640MiB"))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="convert-", dir=options.folder))
    try:
        num_bytes = write_source(folder / "source", options.gib)
        print(f"{num_bytes / 1e9:.2f} GB, budget {options.memory / 2**20:.0f} MiB")
        print(f"{'from':12} {'to':12} {'seconds':>8} {'GB/s':>6} {'peak MiB':>9}")
        ways: list[tuple[str, str, str]] = [("source", to, "") for to in FORMATS]
        ways += [(source, to, "") for source in FORMATS[1:] for to in ("tensorstore", "torch")]
        ways += [("torch_dist", to, "axis=1,parts=8") for to in ("tensorstore", "zarr:1")]
        for source, to, reshard in ways:
            kept = source == "source"
            target = folder / (to if kept else "other")
            more = ["--reshard", reshard] if reshard else []
            seconds, peak = measure(folder / source, target, to, options.memory, *more)
            over = "  OVER BUDGET" if peak > options.memory else ""
            print(
                f"{source:12} {to:12} {seconds:8.2f} {num_bytes / 1e9 / seconds:6.2f} "
                f"{peak / 2**20:9.0f}  {' '.join(more)}{over}",
                flush=True,
            )
            if not kept:
                local.remove(target, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
