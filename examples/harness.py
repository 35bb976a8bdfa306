"""What the examples share that start their own ranks: the ranks, and the place for their output."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its stubs

from tensor_parallel import Ranks, joined_ranks

PATIENCE_SECONDS = 120.0
"""Ranks from which nothing is heard for so long, not even their end, hang."""

_LOOK_SECONDS = 0.05

Tell = Callable[[str, Any], None]
"""Sends a word and a value to the process that started the ranks."""

Work = Callable[[Any, Ranks, Tell], None]
"""What a rank does: its job, its place among the ranks, and whom to tell."""

Message = tuple[int, str, Any]
"""The rank that told it, the word and the value."""


class LaunchError(Exception):
    """Ranks failed, hang, or died of a signal that nobody sent."""


class Launch:
    """New processes, one a rank. They import what they need and wait for ``begin``.

    They are spawned: each is a Python of its own that shares nothing with this one or each other.
    A single rank has no process group.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        # As torchrun does: the store is the launcher's, so that it outlives every rank.
        self._store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, size, self._store.port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def begin(self, work: Work, job: object) -> None:
        """Let all ranks do something; both are pickled."""
        for pipe in self._pipes:
            pipe.send((work, job))

    def heard(self, silence: Callable[[], None] = lambda: None) -> Iterator[Message]:
        """What the ranks tell, until all have ended.

        Args:
            silence: Called twenty times a second, whether there is something to hear or not.

        Raises:
            LaunchError: If nothing is heard for too long.
        """
        ranks = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        heard_at = time.monotonic()
        while ranks:
            heard = wait(list(ranks), _LOOK_SECONDS)
            heard_at = time.monotonic() if heard else heard_at
            for pipe in [pipe for pipe in ranks if pipe in heard]:
                try:
                    yield (ranks[pipe], *pipe.recv())
                except (EOFError, ConnectionResetError):
                    del ranks[pipe]
            silence()
            if time.monotonic() > heard_at + PATIENCE_SECONDS:
                raise LaunchError(f"ranks {sorted(ranks.values())} hang")

    def exit_codes(self) -> list[int]:
        """Of all ranks, once nothing more is heard of them."""
        for process in self._processes:
            process.join()
        return [process.exitcode or 0 for process in self._processes]

    def kill(self, ranks: Iterable[int] | None = None) -> None:
        """SIGKILL for some ranks, or for all."""
        for rank in range(len(self._processes)) if ranks is None else ranks:
            self._processes[rank].kill()

    def end(self) -> None:
        """End processes that were never needed, or that hang."""
        self.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.join()


def run_ranks(size: int, work: Work, job: object) -> list[Message]:
    """Do something on new ranks; what they told.

    Raises:
        LaunchError: If one of them fails.
    """
    launch = Launch(size)
    try:
        launch.begin(work, job)
        messages = list(launch.heard())
        errors = [f"rank {rank}: {error}" for rank, word, error in messages if word == "error"]
        if errors or any(launch.exit_codes()):
            raise LaunchError("; ".join(errors) or f"exit codes {launch.exit_codes()}")
        return messages
    finally:
        launch.end()


def _rank_main(rank: int, size: int, port: int, pipe: Connection) -> None:
    if size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    logging.getLogger("dist_checkpointing").addHandler(logging.NullHandler())  # no lines on stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's
    make_reproducible()
    try:
        work, job = pipe.recv()
    except EOFError:
        return
    try:
        with joined_ranks() as ranks:
            work(job, ranks, lambda word, value: pipe.send((word, value)))
    except Exception as error:  # noqa: BLE001 - the launcher says what it means
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def make_reproducible() -> None:
    """Fix the order of every sum: the same run then gives the same bits."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--folder``; see ``output_folder``."""
    parser.add_argument("--folder", type=Path, help="a new or empty folder for all that is written")


def output_folder(parser: argparse.ArgumentParser, given: Path | None, prefix: str = "") -> Path:
    """The folder that was asked for, or a new one in ``demo-output``; it exists and is empty.

    ``demo-output/latest`` is the last one without a prefix.
    """
    now = datetime.now().astimezone()
    folder = given or Path("demo-output") / f"{prefix}{now:%Y%m%d-%H%M%S}"
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    if given is None and not prefix:
        latest = folder.with_name("latest")
        latest.unlink(missing_ok=True)
        latest.symlink_to(folder.name)
    return folder


def wide_console() -> Console:
    """A console whose tables are wide enough where there is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 116, highlight=False)
