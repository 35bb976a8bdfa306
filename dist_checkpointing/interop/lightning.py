"""Lightning: a callback that saves and resumes a Trainer."""

from __future__ import annotations

from os import PathLike
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from dist_checkpointing.interop.data_position import DataPosition
from dist_checkpointing.interop.torch_state import TorchState, rng_state, set_rng_state
from dist_checkpointing.manager.checkpoint_manager import CheckpointManager


class RunCheckpoints(Checkpoint):  # type: ignore[misc]  # lightning may be missing
    """Saves behind the training of a Lightning Trainer, and resumes from the newest whole save.

    It needs nothing of the strategy: all ranks save what they hold, with single devices, DDP and
    ModelParallelStrategy (FSDP2, tensor parallelism). Model, optimizers, schedulers, GradScaler,
    random numbers, the loops and the state of the other callbacks are saved as a ``TorchState``.
    It stands for Lightning's own ModelCheckpoint, which is not added then.

    Args:
        root: folder of the run, see ``CheckpointManager``.
        every_n_steps: also save after so many steps of the optimizers; each epoch ends with a save.
        position: place of the training in its data. ``position.batches`` is the ``batch_sampler``
            of the loader, and the Trainer has ``use_distributed_sampler=False``.
        options: options of ``CheckpointManager``, such as ``retention``.

    With ``Trainer(callbacks=[RunCheckpoints("run")])``, ``fit`` continues where the last one ended.
    """

    def __init__(
        self,
        root: str | PathLike[str],
        *,
        every_n_steps: int | None = None,
        position: DataPosition | None = None,
        **options: Any,
    ) -> None:
        self._root, self._every, self._options = root, every_n_steps, options
        self._position = position
        self._rng: dict[str, Any] | None = None
        self._manager: Any = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the newest checkpoint: model and optimizers are set up, the loops have not begun."""
        self._manager = CheckpointManager(self._root, **self._options)
        schedulers = {
            f"scheduler{number}": config.scheduler
            for number, config in enumerate(trainer.lr_scheduler_configs)
        }
        self._state = TorchState(
            pl_module,
            trainer.optimizers,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            lightning=_Progress(trainer, self),
            data=self._position,
            **schedulers,
        )
        if self._manager.latest() is not None:
            self._manager.load(self._state)
            # Within an epoch a loader first begins its data, which draws random numbers.
            if self._position is not None and self._position.left < self._position.dataset_size:
                self._rng = rng_state()
        self._last_step = trainer.global_step

    def on_train_batch_start(self, *_: Any) -> None:
        if self._rng is not None:
            set_rng_state(self._rng)
            self._rng = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._position is not None and trainer.global_step > self._last_step:
            self._position.advance()
        self._last_step = trainer.global_step
        if self._every and trainer.global_step - self._state.step >= self._every:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > self._state.step:
            self._save(trainer)

    def on_fit_end(self, *_: Any) -> None:
        self._manager.close()

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        """Wait for the last save, if there is no other rank that might not come."""
        if self._manager is not None and trainer.world_size == 1:
            self._manager.close()

    def _save(self, trainer: Trainer) -> None:
        self._state.step = trainer.global_step
        self._manager.async_save(self._state.step, self._state)


class _Progress:
    """Where the loops of a Trainer are, and the state of its callbacks."""

    def __init__(self, trainer: Trainer, owner: Callback) -> None:
        self._loop = trainer.fit_loop
        self._callbacks = {
            callback.state_key: callback for callback in trainer.callbacks if callback is not owner
        }

    def state_dict(self) -> dict[str, Any]:
        callbacks = {key: callback.state_dict() for key, callback in self._callbacks.items()}
        return {"loops": self._loop.state_dict(), "callbacks": callbacks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.load_state_dict(state["loops"])
        for key, own in state["callbacks"].items():
            if own and key in self._callbacks:
                self._callbacks[key].load_state_dict(own)
