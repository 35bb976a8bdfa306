"""One training run of the small GPT: from the start or from a checkpoint, on any number of ranks.

    torchrun --nproc-per-node 2 examples/train_gpt.py --until 80 --save-at 40 --checkpoint DIR
    torchrun --nproc-per-node 4 examples/train_gpt.py --until 80 --resume DIR
    python examples/train_gpt.py --until 80 --resume DIR
    torchrun --nproc-per-node 2 examples/train_gpt.py --until 800 --run DIR --save-every 20

The third one has no process group at all. The two lines that matter are ``save(...)`` and
``load(...)``: neither says how many ranks there are or were. The last one is a run of many
checkpoints, saved behind the training: kill it in any way, start it again on as many ranks as you
like, and it goes on (``managed_training.py`` has the loop, ``chaos.py`` does the killing).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from backend_option import HELP, parse_backend
from dist_checkpointing import CheckpointManager, Retention, ShardedTensor, load, save
from dist_checkpointing.mapping import ShardedTensorFactory
from managed_training import train_managed
from oracle import global_digests
from progress_bar import ProgressBar
from tensor_parallel import Ranks, joined_ranks
from tensor_parallel_gpt import GPTConfig
from training_state import Text, TrainingState


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One training run of a small GPT.")
    parser.add_argument("--until", type=int, default=80, help="number of steps to reach")
    parser.add_argument("--save-at", type=int, help="step after which to save")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to")
    parser.add_argument("--resume", type=Path, help="checkpoint to start from")
    parser.add_argument("--run", type=Path, help="folder of a run that saves and resumes by itself")
    parser.add_argument("--save-every", type=int, default=20, help="steps, with --run")
    parser.add_argument("--backend", type=parse_backend, help=HELP)
    parser.add_argument("--report", type=Path, help="JSON file for losses, digests and cuts")
    arguments = parser.parse_args()
    if (arguments.save_at is None) != (arguments.checkpoint is None):
        parser.error("--save-at and --checkpoint need each other")
    if arguments.run is not None and (arguments.save_at is not None or arguments.resume):
        parser.error("a --run saves and resumes by itself")
    if arguments.save_every < 1:
        parser.error("--save-every must be at least 1")
    return arguments


def main() -> None:
    arguments = _arguments()
    # The order of every sum is then fixed: the same run gives the same bits.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    with joined_ranks() as ranks:
        train = _train if arguments.run is None else _train_managed
        report = train(arguments, ranks)
    if arguments.report is not None and ranks.rank == 0:
        arguments.report.write_text(json.dumps(report, indent=1))


def _train(arguments: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    state, text = TrainingState(GPTConfig(), ranks), Text()
    losses: dict[int, str] = {}
    report: dict[str, Any] = {"tensor_parallel": ranks.size, "losses": losses}
    if arguments.resume is not None:
        start = time.perf_counter()
        template = state.sharded_state_dict()
        with ProgressBar(visible=ranks.rank == 0) as bar:
            state.restore(load(template, str(arguments.resume), progress=bar))
        report["seconds"] = time.perf_counter() - start
        report |= _facts(state)
        _say(ranks, f"resumed after step {state.iteration} with tensor parallelism {ranks.size}")
    while state.iteration < arguments.until:
        loss = state.train_step(text)
        losses[state.iteration] = loss.hex()
        if state.iteration % 10 == 0:
            _say(ranks, f"step {state.iteration:4d}  loss {loss:.4f}")
        if state.iteration == arguments.save_at:
            start = time.perf_counter()
            folder = str(arguments.checkpoint)
            with ProgressBar(visible=ranks.rank == 0) as bar:
                save(state.sharded_state_dict(), folder, arguments.backend, progress=bar)
            report["seconds"] = time.perf_counter() - start
            report |= _facts(state)
            _say(ranks, f"saved to {arguments.checkpoint}")
    return report


def _train_managed(arguments: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    state = TrainingState(GPTConfig(), ranks)
    losses: dict[int, str] = {}
    manager = CheckpointManager(arguments.run, arguments.backend, retention=Retention(keep_last=3))
    manager.save_on_signal()

    def note(step: int, loss: float) -> None:
        losses[step] = loss.hex()
        if step % 10 == 0:
            _say(ranks, f"step {step:4d}  loss {loss:.4f}")

    train_managed(
        state,
        Text(),
        manager,
        until=arguments.until,
        save_every=arguments.save_every,
        on_resume=lambda step: _say(ranks, f"resumed after step {step}"),
        on_step=note,
    )
    _say(ranks, f"ended after step {state.iteration}; checkpoints of steps {manager.steps()}")
    return {"tensor_parallel": ranks.size, "losses": losses, "seconds": 0.0} | _facts(state)


def _facts(state: TrainingState) -> dict[str, Any]:
    """What the ranks hold: digests of the global tensors, and who has which part of which."""
    return {
        "iteration": state.iteration,
        "digests": global_digests(state),
        "shards": _shards_of_all_ranks(state),
    }


def _shards_of_all_ranks(state: TrainingState) -> dict[str, list[dict[str, Any]]]:
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
    return shards


def _say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
