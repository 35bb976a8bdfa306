"""What conversions cost: speed, and peak memory against the budget."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from dist_checkpointing import ShardedTensor, save
from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.filesystem import local_folder
from runner import Stage, Way

BUDGET_MIB = 640
FORMATS = ("tensorstore", "zarr", "zarr:1", "torch_dist", "safetensors", "torch")
SOURCE = "source"
Route = tuple[str, str, str]

ROUTES: tuple[Route, ...] = (
    *((SOURCE, to, "") for to in FORMATS),
    *((start, to, "") for start in FORMATS[1:] for to in ("tensorstore", "torch")),
    *(("torch_dist", to, "axis=1,parts=8") for to in ("tensorstore", "zarr:1")),
)
"""From, to, and what is asked of ``--reshard``."""

_CHILD = """
import atexit, re, sys
from dist_checkpointing.tools.app import main

def tell() -> None:
    # Not getrusage, which also counts the process that this one was forked from.
    with open("/proc/self/status") as status:
        print(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1], file=sys.stderr)

atexit.register(tell)
main()
"""


def name_of(route: Route) -> str:
    """The name of a way."""
    start, to, reshard = route
    return f"{start} -> {to}" + (f", {reshard}" if reshard else "")


class ConversionWay(Way):
    """One conversion, in a process of its own, so that its peak is its own."""

    family = "ours"

    def __init__(self, route: Route, stage: Stage) -> None:
        self.name = name_of(route)
        self._route = route
        self._stage = stage

    def round(self) -> Mapping[str, float]:
        start, to, reshard = self._route
        folder, peaks = self._stage.folder, list[float]()
        target = folder / (to.replace(":", "-") if start == SOURCE else "other")
        local_folder.remove(target, folder)
        options = ["--to", to, "--memory", str(BUDGET_MIB << 20)]
        options += ["--reshard", reshard] if reshard else []
        source = folder / start.replace(":", "-")
        command = [sys.executable, "-c", _CHILD, "convert", str(source), str(target), *options]

        def convert() -> None:
            done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
            if done.returncode != 0:
                raise RuntimeError(done.stderr[-500:])
            peaks.append(int(done.stderr.split()[-1]) / 1024)

        seconds = self._stage.world.timed(convert)
        return {"convert s": seconds, "peak MiB": peaks[0]}


def open_conversions(stage: Stage) -> list[Way]:
    """A checkpoint with large and small tensors, from and to every format."""
    is_tiny = stage.settings.tiny
    # All the same memory: what is saved is what counts.
    large, small = torch.randn(64 if is_tiny else 4096, 8192), torch.randn(64, 64)
    make = ShardedTensor.from_rank_offsets
    state = {f"layer.{n}.weight": make(f"layer.{n}.weight", large) for n in range(16)}
    state |= {
        f"layer.{n}.bias": make(f"layer.{n}.bias", small) for n in range(10 if is_tiny else 1000)
    }
    save(state, Path(stage.folder) / SOURCE, "tensorstore", comm=SingleProcess())
    routes = ROUTES[:1] if is_tiny else ROUTES
    return [ConversionWay(route, stage) for route in routes]
