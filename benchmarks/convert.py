"""What conversions cost: speed, and peak memory against the budget. Prints a table.

    python benchmarks/convert.py [--gib 2] [--memory 640MiB] [--folder DIR]

Every conversion runs in a process of its own, so that its peak is its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dist_checkpointing import ShardedTensor, save
from dist_checkpointing.cli.sizes import parse_bytes

FORMATS = ("tensorstore", "zarr", "zarr:1", "torch_dist", "safetensors", "torch")

_CONVERT = """
import json, resource, sys, time
from dist_checkpointing.conversion import ConvertOptions, Rules, convert
source, target, to, memory, reshard = sys.argv[1:]
rules = Rules.parse(reshard=[reshard] if reshard else [])
began = time.perf_counter()
convert(source, target, to, rules=rules, options=ConvertOptions(memory_bytes=int(memory)))
print(json.dumps({
    "seconds": time.perf_counter() - began,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


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


def measure(
    source: Path, target: Path, to: str, memory: int, reshard: str = ""
) -> dict[str, float]:
    """Convert in a process of its own: seconds, and its peak memory in bytes."""
    command = [sys.executable, "-c", _CONVERT, source, target, to, str(memory), reshard]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE)  # noqa: S603
    result: dict[str, float] = json.loads(run.stdout)
    return result


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
        ways = [("source", to, "") for to in FORMATS]
        ways += [(source, to, "") for source in FORMATS[1:] for to in ("tensorstore", "safetensors")]
        ways += [("source", "zarr:1", "axis=1,parts=8"), ("torch_dist", "tensorstore", "axis=1,parts=8")]
        for source, to, reshard in ways:
            target = folder / (to if source == "source" and not reshard else "other")
            began = time.perf_counter()
            result = measure(folder / source, target, to, options.memory, reshard)
            del began
            note = f"  --reshard {reshard}" if reshard else ""
            over = "  OVER BUDGET" if result["peak_bytes"] > options.memory else ""
            print(
                f"{source:12} {to:12} {result['seconds']:8.2f} "
                f"{num_bytes / 1e9 / result['seconds']:6.2f} "
                f"{result['peak_bytes'] / 2**20:9.0f}{note}{over}",
                flush=True,
            )
            if target.name == "other":
                shutil.rmtree(target)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
