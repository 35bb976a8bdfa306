"""The training loop around a CheckpointManager: resume, train, save behind the training."""

from __future__ import annotations

from collections.abc import Callable

from dist_checkpointing import CheckpointManager
from training_state import Text, TrainingState


def train_managed(
    state: TrainingState,
    text: Text,
    manager: CheckpointManager,
    *,
    until: int,
    save_every: int,
    on_resume: Callable[[int], None],
    on_step: Callable[[int, float], None],
) -> None:
    """Go on from the latest valid checkpoint, or begin if there is none.

    After ``manager.save_on_signal()`` a signal makes it save and return early.

    Args:
        state: as it is before the first step.
        text: to train on.
        manager: of the run; closed at the end.
        until: number of steps to reach.
        save_every: steps between two saves; the last step is saved in any case.
        on_resume: called with the step that was loaded.
        on_step: called with the number and the loss of each step.
    """
    saved = manager.latest_valid()
    if saved is not None:
        state.restore(manager.load(state.sharded_state_dict(), saved))
        on_resume(saved)
    with manager:
        while state.iteration < until and not manager.preempted():
            loss = state.train_step(text)
            on_step(state.iteration, loss)
            if state.iteration % save_every == 0:
                manager.async_save(state.iteration, state.sharded_state_dict())
                saved = state.iteration
        if state.iteration != saved:
            manager.save(state.iteration, state.sharded_state_dict())
