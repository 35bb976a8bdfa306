"""A training of one process that ends in some way with a save in flight.

Usage: ending_script.py FOLDER WORKER ENDING
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dist_checkpointing import AsyncSaver, ShardedTensor, async_save

sys.path.insert(0, str(Path(__file__).parent))
from process_backends import Odd  # type: ignore[import-not-found]


def main() -> None:
    folder, worker, ending = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    # A job in the background ignores Ctrl-C, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((1 << 16,), 7.0)), "step": 7}
    strategy = Odd("stall")
    if worker == "kept":
        handle = async_save(state, folder / "c", strategy)
    else:
        choice: Any = worker
        saver = AsyncSaver(
            worker=choice, finalize="caller" if ending == "forgotten" else "background"
        )
        handle = saver.save(state, folder / "c", strategy)
    pid = folder / "c" / "pid"
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    (folder / "writing").write_text(pid.read_text())
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
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
