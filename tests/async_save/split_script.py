"""A training on "machines" of two processes, each with a disk of its own: see test_tiers_split.py.

Usage: split_script.py FOLDER URL SAVE|DIE|LOAD STEPS REPORTS
"""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist

from dist_checkpointing import CheckpointManager, ShardedTensor
from dist_checkpointing.mapping import ShardedStateDict
from faults import store_waiting


def state(whole: torch.Tensor, step: int) -> ShardedStateDict:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = whole.chunk(size)[rank].clone()
    return {"rows": ShardedTensor.from_rank_offsets("rows", rows, (0, rank, size)), "step": step}


def main() -> None:
    folder, url, action, steps, reports = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    fast = Path(folder) / f"node{rank // 2}"
    faults = ExitStack()
    if action == "DIE":  # before anything is copied
        faults.enter_context(store_waiting(Event(), "/data/"))
    manager = CheckpointManager(url, fast=fast)
    loaded = None
    if action == "LOAD":
        found = manager.load(state(torch.full((8, 5), -1.0), 0))
        loaded = [found["step"], found["rows"].tolist()]
    for step in json.loads(steps):
        manager.async_save(step, state(torch.arange(40.0).reshape(8, 5) + step, step))
    manager.wait()
    (Path(reports) / f"{rank}.json").write_text(json.dumps(loaded))
    if action == "DIE":
        dist.barrier()
        os._exit(0)
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
