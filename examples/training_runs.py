"""One training run of the small GPT that saves or resumes once, and what it reports."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dist_checkpointing import ShardedTensor, load, save
from dist_checkpointing.mapping import ShardedTensorFactory
from dist_checkpointing.strategies.base import StrategyAction
from dist_checkpointing.strategies.registry import available_strategies
from oracle import global_digests
from tensor_parallel import Ranks
from tensor_parallel_gpt import GPTConfig
from training_state import Text, TrainingState

Backend = str | tuple[str, int] | None

BACKEND_HELP = "NAME (its newest version) or NAME:VERSION to save with; else the default"


@dataclass(frozen=True, slots=True)
class Job:
    """What a run does.

    Attributes:
        until: Number of steps to reach.
        save_at: Step after which to save.
        checkpoint: Folder to save to, or its URL.
        resume: Checkpoint to start from.
        backend: What to save with.
        again: Folder to save to right after resuming, with the checkpoint as a base.
    """

    until: int
    save_at: int | None = None
    checkpoint: Path | str | None = None
    resume: Path | str | None = None
    backend: Backend = None
    again: Path | None = None


@dataclass(slots=True)
class Run:
    """What a run reports.

    Attributes:
        tensor_parallel: Number of ranks.
        losses: Step -> loss in nats a byte, exact.
        digests: What -> SHA-256 of the global tensor, at saving or right after loading.
        shards: Key -> rank, offset and shape of every rank's part.
        iteration: The step at which digests and shards were taken.
    """

    tensor_parallel: int
    losses: dict[int, float] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    shards: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    iteration: int = 0


def train(job: Job, ranks: Ranks) -> Run:
    """Train, on all ranks together; rank 0 prints how it goes."""
    state, text, run = TrainingState(GPTConfig(), ranks), Text(), Run(ranks.size)
    if job.resume is not None:
        state.restore(load(state.sharded_state_dict(), str(job.resume), progress="bar"))
        _note(run, state)
        say(ranks, f"resumed after step {state.iteration} with tensor parallelism {ranks.size}")
        if job.again is not None:
            base = str(job.resume) if shares_files(job.backend) else None
            kept = keeps_fingerprints(job.backend)
            target = str(job.again)
            save(state.sharded_state_dict(), target, job.backend, base=base, fingerprints=kept)
    while state.iteration < job.until:
        loss = state.train_step(text)
        run.losses[state.iteration] = loss
        if state.iteration % 10 == 0:
            say(ranks, f"step {state.iteration:4d}  loss {loss:.4f}")
        if state.iteration == job.save_at:
            begin = time.perf_counter()
            save(
                state.sharded_state_dict(),
                str(job.checkpoint),
                job.backend,
                progress="bar",
                fingerprints=keeps_fingerprints(job.backend),
            )
            say(ranks, f"saved to {job.checkpoint} in {time.perf_counter() - begin:.2f} s")
            _note(run, state)
    return run


def shares_files(backend: Backend) -> bool:
    """Whether checkpoints of a backend can share what is the same."""
    return "torch_dist" not in (backend, *(backend if isinstance(backend, tuple) else ()))


def keeps_fingerprints(backend: Backend) -> bool:
    """Whether checkpoints of a backend have a place for fingerprints."""
    return shares_files(backend) and backend != ("zarr", 1)


def say(ranks: Ranks, text: str) -> None:
    """Print a line, on one of the ranks."""
    if ranks.rank == 0:
        print(text, flush=True)


def backend_argument(text: str) -> Backend:
    """What ``save`` takes, of the option ``--backend``."""
    known = available_strategies(StrategyAction.SAVE_SHARDED)
    for name, version in known:
        if text in (name, f"{name}:{version}"):
            return name if text == name else (name, version)
    choices = ", ".join(f"{name}:{version}" for name, version in known)
    raise argparse.ArgumentTypeError(f"{text!r} is not one of {choices}")


def _note(run: Run, state: TrainingState) -> None:
    """What the ranks hold: digests of the global tensors, and who has which part of which."""
    run.iteration = state.iteration
    run.digests = global_digests(state)
    own = []
    for leaf in state.model.sharded_state_dict().values():
        built = leaf.build().values() if isinstance(leaf, ShardedTensorFactory) else [leaf]
        own += [
            {
                "key": tensor.key,
                "rank": state.ranks.rank,
                "offset": tensor.global_offset,
                "shape": (1,) * tensor.prepend_axis_num + tensor.local_shape,
            }
            for tensor in built
            if isinstance(tensor, ShardedTensor)
        ]
    tables: list[Any] = [own] * state.ranks.size
    if state.ranks.size > 1:
        dist.all_gather_object(tables, own)
    shards: dict[str, list[dict[str, Any]]] = {}
    for shard in (shard for table in tables for shard in table):
        shards.setdefault(shard.pop("key"), []).append(shard)
    run.shards = shards
