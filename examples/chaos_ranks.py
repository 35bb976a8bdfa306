"""The ranks that ``chaos.py`` starts and kills: each life of a training has new processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its stubs

from dist_checkpointing import CheckpointManager, Retention
from dist_checkpointing.comm import Comm, SingleProcess, TorchComm
from managed_training import train_managed
from tensor_parallel import Ranks, joined_ranks
from tensor_parallel_gpt import GPTConfig
from training_state import Text, TrainingState

Whom = Literal["rank", "all", "worker"]
Worker = Literal["thread", "process"]
Since = Literal["meeting", "first step"]

SMALL = GPTConfig(width=64, num_layers=2, num_heads=4, mlp_width=128, context_length=64)
"""The model of the demo with fewer and smaller layers: 13 ms a step on one core."""

DEAD_AFTER_SECONDS: Mapping[Worker, float] = {"thread": 3.0, "process": 6.0}
"""How long ranks wait for one another before they say that one is gone; workers start slowly."""

PATIENCE_SECONDS = 60.0
"""Ranks from which nothing is heard for so long, not even their end, hang."""

_LOOK_SECONDS = 0.05


class ChaosError(Exception):
    """What must not happen has happened."""


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks of a life do.

    Attributes:
        folder: of the run: its checkpoints.
        backend: they are saved with.
        steps: number of steps to reach.
        save_every: steps between two saves.
        worker: who writes, see ``AsyncSaver``.
    """

    folder: Path
    backend: str
    steps: int
    save_every: int
    worker: Worker


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill -9.

    Attributes:
        whom: one rank, all ranks at once, or only the process that writes for one rank.
        rank: which; of no meaning for all ranks.
        since: when the clock starts: when all ranks have met, which is when they begin to look for
            a checkpoint, or when they have trained a step.
        seconds: after that.
    """

    whom: Whom
    rank: int
    since: Since
    seconds: float


@dataclass(slots=True)
class Story:
    """What happened in a life.

    Attributes:
        exit_codes: of all ranks.
        resumed: the step that was loaded; None if the training began.
        skipped: (step, why) of the checkpoints that were passed over.
        losses: (step, loss as hexadecimal) in the order they came.
        errors: rank -> what it ended with by itself.
        killed: who was killed indeed; None if everything was over by then.
    """

    exit_codes: list[int] = field(default_factory=list)
    resumed: int | None = None
    skipped: list[tuple[int, str]] = field(default_factory=list)
    losses: list[tuple[int, str]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    killed: Whom | None = None

    @property
    def has_finished(self) -> bool:
        return set(self.exit_codes) == {0}


class Life:
    """New processes, one a rank. They import what they need and wait for ``begin``.

    They are spawned: each is a Python of its own that shares nothing with this one or each other.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
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

    def run(self, job: Job, kill: Kill | None, after_kill: Callable[[], None]) -> Story:
        """Train until all ranks have ended, by themselves or by the kill.

        Args:
            job: what to do.
            kill: whom to kill and when, if the training is not done by then.
            after_kill: called while the survivors find out.

        Raises:
            ChaosError: if a rank that was not killed hangs, or dies of a signal.
        """
        story, ready = Story(), 0
        open_pipes = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        for pipe in self._pipes:
            pipe.send(job)
        kill_at, heard_at = None, time.monotonic()
        while open_pipes:
            heard = wait(list(open_pipes), _LOOK_SECONDS)
            for pipe in [pipe for pipe in open_pipes if pipe in heard]:
                try:
                    what, content = pipe.recv()
                except (EOFError, ConnectionResetError):
                    del open_pipes[pipe]
                    continue
                ready += what == "ready"
                _note(story, open_pipes[pipe], what, content)
            now = time.monotonic()
            heard_at = now if heard else heard_at
            if kill_at is None and kill is not None:
                have_met = ready == len(self._pipes)
                if have_met if kill.since == "meeting" else story.losses:
                    kill_at = now + kill.seconds
            if kill is not None and kill_at is not None and now >= kill_at and self._strike(kill):
                story.killed = kill.whom
                kill, heard_at = None, now
                after_kill()
            if now > heard_at + PATIENCE_SECONDS:
                raise ChaosError(f"ranks {sorted(open_pipes.values())} hang")
        story.exit_codes = [_exit_code(process) for process in self._processes]
        if story.killed != "worker" and -signal.SIGKILL not in story.exit_codes:
            story.killed = None  # they had ended before
        died = [code for code in story.exit_codes if code < 0 and code != -signal.SIGKILL]
        if died:
            raise ChaosError(f"a rank died of a signal that nobody sent: {died}")
        return story

    def _strike(self, kill: Kill) -> bool:
        """Kill; False if there is no such process yet."""
        if kill.whom == "worker":
            pid = _writer_of(self._processes[kill.rank].pid)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
            return pid is not None
        ranks = range(len(self._processes)) if kill.whom == "all" else [kill.rank]
        for rank in ranks:
            self._processes[rank].kill()
        return True

    def end(self) -> None:
        """End processes that were never needed, or that hang."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()


def _writer_of(pid: int | None) -> int | None:
    """The process that writes for a rank, found from outside."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in path.read_text().split():
                if b"writer_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        except OSError:
            continue  # it has just ended
    return None


def _exit_code(process: Any) -> int:
    process.join()
    code: int = process.exitcode
    return code


def _note(story: Story, rank: int, what: str, content: Any) -> None:
    if what == "resumed":
        story.resumed = content
    elif what == "skipped":
        story.skipped.append(content)
    elif what == "loss":
        story.losses.append(content)
    elif what == "error":
        story.errors[rank] = content


def _rank_main(rank: int, size: int, port: int, pipe: Connection) -> None:
    # As torchrun does; the store is the launcher's, so that it outlives every rank.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    logging.getLogger("dist_checkpointing").addHandler(logging.NullHandler())  # no lines on stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    text = Text()
    try:
        job: Job = pipe.recv()
    except EOFError:
        return
    try:
        with joined_ranks() as ranks:
            _train(job, ranks, text, pipe)
    except Exception as error:  # noqa: BLE001 - the launcher says what it means
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def _train(job: Job, ranks: Ranks, text: Text, pipe: Connection) -> None:
    comm: Comm = SingleProcess()
    if ranks.size > 1:
        comm = TorchComm(torch.distributed.new_group(), DEAD_AFTER_SECONDS[job.worker])
    manager = CheckpointManager(
        job.folder,
        job.backend,
        comm=comm,
        retention=Retention(keep_last=3, keep_every=50),
        worker=job.worker,
    )
    is_speaker = ranks.rank == 0
    if is_speaker:
        logging.getLogger("dist_checkpointing").addHandler(_Skipped(pipe))
    pipe.send(("ready", None))

    def tell(what: str, content: object) -> None:
        if is_speaker:
            pipe.send((what, content))

    train_managed(
        TrainingState(SMALL, ranks),
        text,
        manager,
        until=job.steps,
        save_every=job.save_every,
        on_resume=lambda step: tell("resumed", step),
        on_step=lambda step, loss: tell("loss", (step, loss.hex())),
    )


class _Skipped(logging.Handler):
    """What the manager logs about checkpoints that it passes over."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        if "is skipped" in record.msg and isinstance(record.args, Sequence):
            step, error = record.args
            self._pipe.send(("skipped", (step, str(error).splitlines()[0])))
