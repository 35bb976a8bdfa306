"""Kill incremental saves, and delete their base, at every moment; for test_incremental_kills.py.

Usage: incremental_kills.py FOLDER SEED SECONDS

A moment is a call that opens, links, renames or removes a file of the checkpoints. In each round a
forked process saves with a base, and at a random moment of that

- ``save``: it is killed;
- ``delete``: the base is removed, and the save goes on (if it has not looked at the base yet, it
  says that there is none);
- ``both``: the removal of the base is cut off at a moment of its own, and the save is killed later,
  or goes on.

Then another process looks: what is committed is right, nothing else was lost, a new save into the
folder works, and it is right without its base. Rounds go over all backends. The last line of the
output counts what happened, as JSON.
"""

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import dist_checkpointing as dc
from dist_checkpointing.format import remove_checkpoint
from dist_checkpointing.storage import Durability, StorageOptions
from dist_checkpointing.strategies import (
    TensorStoreSaveShardedStrategy,
    Zarr3SaveShardedStrategy,
    ZarrSaveShardedStrategy,
)

# What survives a killed process need not be on the disk. Small files, so that there are several.
OPTIONS = StorageOptions(threads=2, durability=Durability.PAGE_CACHE, data_file_bytes=20_000)
STRATEGIES = (TensorStoreSaveShardedStrategy, Zarr3SaveShardedStrategy, ZarrSaveShardedStrategy)
EVENTS = frozenset({"open", "os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir"})
MOST_MOMENTS = 80


class CutOff(BaseException):
    """A removal ends here."""


def values(step: int) -> dict[str, torch.Tensor]:
    """Half of the tensors change with the step."""
    return {
        f"layer{i}.w": torch.arange(2000.0) + i + (1000.0 * step if i % 2 else 0.0)
        for i in range(6)
    }


def state(step: int) -> dict[str, Any]:
    shard = dc.ShardedTensor.from_rank_offsets
    return {**{key: shard(key, tensor) for key, tensor in values(step).items()}, "step": step}


class Moments:
    """Counts the calls that concern a folder, and does something at one of them.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._left = 0
        self._act: Callable[[], None] | None = None
        self._thread: int | None = None
        sys.addaudithook(self._hear)

    def at(self, number: int, act: Callable[[], None], *, own_thread: bool = False) -> None:
        """Call ``act`` at so many moments from now, of all threads or of this one."""
        self._thread = threading.get_ident() if own_thread else None
        self._left, self._act = number, act

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._act is None or event not in EVENTS or not self._is_ours(arguments):
            return
        if self._thread not in (None, threading.get_ident()):
            return
        self._left -= 1
        if self._left <= 0:
            act, self._act = self._act, None
            act()

    def _is_ours(self, arguments: tuple[Any, ...]) -> bool:
        # What is reached through a descriptor of a folder has a name without folders.
        names = [os.fspath(a) for a in arguments if isinstance(a, str | os.PathLike)]
        return any(str(name).startswith(self._folder) or "/" not in str(name) for name in names)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def delete(base: Path) -> None:
    """Another process may do so at any time."""
    with suppress(CutOff):
        remove_checkpoint(base)


def cut_off() -> None:
    raise CutOff


def work(root: Path, strategy: Any, what: str, numbers: tuple[int, int, int]) -> None:
    """An incremental save, and what comes between."""
    moments = Moments(root)
    first, second, third = numbers

    def delete_half() -> None:
        # Other threads go on saving meanwhile.
        moments.at(second, cut_off, own_thread=True)
        delete(root / "1")
        if third % 2:
            moments.at(third, kill)
        else:
            moments.at(0, lambda: None)

    acts = {"save": kill, "delete": lambda: delete(root / "1"), "both": delete_half}
    moments.at(first, acts[what])
    try:
        dc.save(state(2), root / "2", strategy(options=OPTIONS), base=root / "1")
    except dc.CheckpointNotFoundError:
        # The base was gone before the save had looked at it, and had touched anything.
        assert not dc.check_is_distributed_checkpoint(root / "1")
        assert not (root / "2").exists()


def assert_right(folder: Path, step: int) -> None:
    dc.verify_checkpoint(folder)
    found = dc.load_plain_tensors(folder)
    assert found["step"] == step
    for key, tensor in values(step).items():
        assert torch.equal(found[key], tensor), f"{folder}: {key}"


def look(root: Path, strategy: Any, what: str) -> None:
    has_base = dc.check_is_distributed_checkpoint(root / "1")
    assert has_base or what != "save", "the base was lost"
    if has_base:
        assert_right(root / "1", 1)
    if dc.check_is_distributed_checkpoint(root / "2"):
        assert_right(root / "2", 2)
    base = root / "1" if has_base else None
    dc.save(state(3), root / "2", strategy(options=OPTIONS), base=base, overwrite=True)
    if has_base:
        remove_checkpoint(root / "1")
    assert_right(root / "2", 3)
    shared = [path for path in (root / "2").rglob("*") if path.is_file()]
    assert all(path.stat().st_nlink == 1 for path in shared), "something of the base is left"


def in_fork(act: Callable[[], object]) -> int:
    """Exit code of ``act`` in a process of its own; negative if that was killed."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            torch.set_num_threads(1)
            act()
            code = 0
        except BaseException:  # noqa: BLE001 - it must not run on in what it was forked from
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    folder, seed, seconds = Path(sys.argv[1]), *map(int, sys.argv[2:])
    moments = random.Random(seed)
    deadline = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    for strategy in STRATEGIES:
        in_fork(lambda: dc.save(state(1), folder / strategy.__name__, strategy(options=OPTIONS)))  # noqa: B023
    number = 0
    while time.monotonic() < deadline:
        strategy, what = STRATEGIES[number % 3], ("save", "delete", "both")[number // 3 % 3]
        first, second, third = (moments.randrange(1, most) for most in (MOST_MOMENTS, 30, 30))
        numbers = (first, second, third)
        root = folder / "round"
        root.mkdir()
        shutil.copytree(folder / strategy.__name__, root / "1")
        told = f"round {number}: {strategy.__name__}, {what} at {numbers}"
        code = in_fork(lambda: work(root, strategy, what, numbers))  # noqa: B023
        assert code in (0, -signal.SIGKILL), f"{told}: {code}"
        counts[f"{what}: {'killed' if code else 'survived'}"] += 1
        code = in_fork(lambda: look(root, strategy, what))  # noqa: B023
        assert code == 0, f"{told}: {code} in the look"
        shutil.rmtree(root)
        number += 1
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main()
