"""Run every example, small enough for a CPU and a minute, and print a line for each.

python examples/run_all.py [NAME ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=2"

# Each line is what follows `python`, in a folder of its own; {here} is that of the examples.
EXAMPLES: Mapping[str, Sequence[str]] = {
    "adapter_run": ["{here}/adapter_run.py --mib 16 --folder run"],
    "read_megatron": [
        "{here}/train_gpt.py --until 4 --save-at 2 --checkpoint saved",
        "{here}/read_megatron.py --values saved",
    ],
    "train_gpt": [
        TORCHRUN + " {here}/train_gpt.py --until 8 --save-at 4 --checkpoint saved",
        "{here}/train_gpt.py --until 8 --resume saved",
    ],
    "torch_training": [
        TORCHRUN + " {here}/torch_training.py run --steps 7",
        "{here}/torch_training.py run --steps 12",
    ],
    "fsdp2_roundtrip": ["{here}/fsdp2_roundtrip.py"],
    "reshard_gpt": ["{here}/reshard_gpt.py --steps 4 --folder run"],
    "chaos": ["{here}/chaos.py --kills 1 --steps 12 --folder run"],
    "elastic_training": ["{here}/elastic_training.py --steps 24 --folder run"],
    "accelerate_training": [
        "{here}/accelerate_training.py run --steps 8",
        "{here}/accelerate_training.py run --steps 12",
    ],
    "hf_training": ["{here}/hf_training.py run --steps 8", "{here}/hf_training.py run --steps 16"],
    "lightning_training": [
        "{here}/lightning_training.py run --epochs 2",
        "{here}/lightning_training.py run --epochs 4",
    ],
}

NEEDS = {
    "accelerate_training": "accelerate",
    "chaos": "matplotlib",
    "elastic_training": "matplotlib",
    "hf_training": "transformers",
    "lightning_training": "lightning",
    "reshard_gpt": "matplotlib",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the examples, and say how each went.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXAMPLES)}")
    names = parser.parse_args().names or list(EXAMPLES)
    unknown = set(names) - EXAMPLES.keys()
    if unknown:
        parser.error(f"there is no example {', '.join(sorted(unknown))}")
    failed = [name for name in names if not _succeeds(name)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _succeeds(name: str) -> bool:
    needed = NEEDS.get(name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        print(f"{name:20} skipped: {needed} is missing", flush=True)
        return True
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for line in EXAMPLES[name]:
            words = [word.format(here=HERE.resolve()) for word in line.split()]
            done = subprocess.run(  # noqa: S603 - the lines above
                [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
            )
            if done.returncode:
                print(f"{name:20} FAILED: python {line}\n{done.stdout}{done.stderr}", flush=True)
                return False
    print(f"{name:20} {time.monotonic() - begun:5.1f} s", flush=True)
    return True


if __name__ == "__main__":
    main()
