"""One training run of the small GPT: from the start or from a checkpoint, on any number of ranks.

    torchrun --nproc-per-node 2 examples/train_gpt.py --until 80 --save-at 40 --checkpoint DIR
    torchrun --nproc-per-node 4 examples/train_gpt.py --until 80 --resume DIR
    python examples/train_gpt.py --until 80 --resume DIR
    torchrun --nproc-per-node 2 examples/train_gpt.py --until 800 --run DIR --save-every 20

The third one has no process group at all. The two lines that matter are ``save(...)`` and
``load(...)`` in ``training_runs.py``: neither says how many ranks there are or were. The last one
is a run of many checkpoints, saved behind the training: kill it in any way, start it again on as
many ranks as you like, and it resumes (``managed_training.py`` has the loop, ``chaos.py`` does the
killing).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dist_checkpointing import CheckpointManager, Retention
from harness import make_reproducible
from managed_training import train_managed
from tensor_parallel import Ranks, joined_ranks
from tensor_parallel_gpt import GPTConfig
from training_runs import BACKEND_HELP, Job, backend_argument, say, train
from training_state import Text, TrainingState


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One training run of a small GPT.")
    parser.add_argument("--until", type=int, default=80, help="number of steps to reach")
    parser.add_argument("--save-at", type=int, help="step after which to save")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to")
    parser.add_argument("--resume", type=Path, help="checkpoint to start from")
    parser.add_argument("--run", type=Path, help="folder of a run that saves and resumes by itself")
    parser.add_argument("--save-every", type=int, default=20, help="steps, with --run")
    parser.add_argument("--backend", type=backend_argument, help=BACKEND_HELP)
    arguments = parser.parse_args()
    if (arguments.save_at is None) != (arguments.checkpoint is None):
        parser.error("--save-at and --checkpoint need each other")
    if arguments.run is not None and (arguments.save_at is not None or arguments.resume):
        parser.error("a --run saves and resumes by itself")
    if arguments.save_every < 1:
        parser.error("--save-every must be at least 1")
    return arguments


def main() -> None:
    given = _arguments()
    make_reproducible()
    with joined_ranks() as ranks:
        if given.run is not None:
            _train_managed(given, ranks)
        else:
            job = Job(given.until, given.save_at, given.checkpoint, given.resume, given.backend)
            train(job, ranks)


def _train_managed(given: argparse.Namespace, ranks: Ranks) -> None:
    state = TrainingState(GPTConfig(), ranks)
    manager = CheckpointManager(given.run, given.backend, retention=Retention(keep_last=3))
    manager.save_on_signal()

    def tell(step: int, loss: float) -> None:
        if step % 10 == 0:
            say(ranks, f"step {step:4d}  loss {loss:.4f}")

    train_managed(
        state,
        Text(),
        manager,
        until=given.until,
        save_every=given.save_every,
        on_resume=lambda step: say(ranks, f"resumed after step {step}"),
        on_step=tell,
    )
    say(ranks, f"ended after step {state.iteration}; checkpoints of steps {manager.steps()}")


if __name__ == "__main__":
    main()
