"""A training of one process that ends in some way with a save in flight.

Usage: ending_script.py FOLDER SAVER ENDING
"""

import signal
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import torch

from dist_checkpointing import AsyncSaver, ShardedTensor, async_save
from dist_checkpointing.planning import SavePlan, SavePlanner
from dist_checkpointing.serialization.async_save import Finalize
from dist_checkpointing.storage import WriteResults
from dist_checkpointing.strategies import Zarr3SaveShardedStrategy, ZarrV3Writer


class StallingWriter(ZarrV3Writer):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[WriteResults]:
        folder = self.checkpoint_dir.parent
        (folder / "writing").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        return super().write_data(plan, planner)


class Stalling(Zarr3SaveShardedStrategy):
    def make_writer(self, checkpoint_dir: Path) -> ZarrV3Writer:
        writer = StallingWriter(checkpoint_dir)
        writer.options = self.options
        return writer


def main() -> None:
    folder, saver, ending = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    # A job in the background ignores Ctrl-C, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((1 << 16,), 7.0)), "step": 7}
    finalize: Finalize = "caller" if ending == "forgotten" else "background"
    explicit = AsyncSaver(finalize=finalize) if saver == "explicit" else None
    handle = async_save(state, folder / "c", Stalling(), saver=explicit)
    while not (folder / "writing").exists():
        time.sleep(0.01)
    (folder / "go").touch()
    if ending == "raise":
        raise ValueError("loss is nan")
    if ending == "interrupt":
        # The test presses Ctrl-C. Where another thread gets the signal, a long sleep goes on.
        for _ in range(6000):
            time.sleep(0.01)
    if ending == "forgotten":
        while not handle.done():
            time.sleep(0.01)


if __name__ == "__main__":
    main()
