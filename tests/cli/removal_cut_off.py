"""Removes tensors again and again, each time killed (SIGKILL) one step later than before.

Usage: python removal_cut_off.py CHECKPOINT PREFIX COPIES. Leaves one copy of the checkpoint for
each step, as the kill left it, in ``COPIES/<step>``.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.serialization import remove_sharded_tensors

_CHANGES = {"os.remove", "os.rename", "os.rmdir", "shutil.rmtree", "fcntl.flock"}


def main(checkpoint: Path, prefix: str, copies: Path) -> None:
    # A killed process loses nothing that it has given to the system, and waiting takes long.
    vars(os)["fsync"] = lambda _: None
    step = 0
    while True:
        step += 1
        copy = copies / str(step)
        shutil.copytree(checkpoint, copy)
        child = os.fork()
        if child == 0:
            _remove(copy, prefix, step)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0
            return


def _remove(folder: Path, prefix: str, last_step: int) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        writes = event == "open" and "x" in str(arguments[1])
        if not writes and event not in _CHANGES:
            return
        seen += 1
        if seen == last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    remove_sharded_tensors(folder, prefix, comm=SingleProcess())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
