"""The training loop of the GPT example around a CheckpointManager."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dist_checkpointing import CheckpointManager
from dist_checkpointing.comm import SingleProcess
from managed_training import train_managed
from tensor_parallel import Ranks
from tensor_parallel_gpt import GPTConfig
from training_state import Text, TrainingState

TINY = GPTConfig(width=16, num_layers=1, num_heads=2, mlp_width=16, context_length=8)
STEPS, SAVE_EVERY = 9, 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The order of every sum is then fixed."""
    before, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def text() -> Text:
    return Text()


class Run:
    """One process's worth of a training: what it resumed from, and its losses."""

    def __init__(
        self, root: Path, text: Text, until: int = STEPS, terminate_at: int | None = None
    ) -> None:
        self.root = root
        self.resumed: int | None = None
        self.losses: dict[int, float] = {}
        self._terminate_at = terminate_at
        self.manager = CheckpointManager(root, comm=SingleProcess())
        self.manager.save_on_signal()
        train_managed(
            TrainingState(TINY, Ranks()),
            text,
            self.manager,
            until=until,
            save_every=SAVE_EVERY,
            on_resume=self._on_resume,
            on_step=self._on_step,
        )

    def _on_resume(self, step: int) -> None:
        self.resumed = step

    def _on_step(self, step: int, loss: float) -> None:
        self.losses[step] = loss
        if step == self._terminate_at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def undisturbed(text: Text, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A training that nobody disturbed."""
    torch.set_num_threads(1)
    return Run(tmp_path_factory.mktemp("undisturbed"), text)


def test_every_step_is_trained_once_and_the_last_one_is_saved(undisturbed: Run, text: Text) -> None:
    assert undisturbed.resumed is None
    assert list(undisturbed.losses) == list(range(1, STEPS + 1))
    assert undisturbed.manager.steps() == [2, 4, 6, 8, STEPS]
    again = Run(undisturbed.root, text)
    assert (again.resumed, again.losses) == (STEPS, {})


@pytest.mark.parametrize("stopped_at", [4, 5])
def test_a_resumed_training_has_the_same_losses(
    tmp_path: Path, text: Text, undisturbed: Run, stopped_at: int
) -> None:
    first = Run(tmp_path, text, until=stopped_at)
    second = Run(tmp_path, text)
    assert second.resumed == stopped_at
    assert first.losses | second.losses == undisturbed.losses


def test_who_is_asked_to_end_saves_first(tmp_path: Path, text: Text, undisturbed: Run) -> None:
    first = Run(tmp_path, text, terminate_at=3)
    assert list(first.losses) == [1, 2, 3]
    second = Run(tmp_path, text)
    assert second.resumed == 3
    assert first.losses | second.losses == undisturbed.losses
