"""Lightning: a callback that saves and resumes a Trainer, and a CheckpointIO for its own ways."""

from __future__ import annotations

import shutil
from os import PathLike
from typing import Any, Final

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from dist_checkpointing.comm import SingleProcess
from dist_checkpointing.filesystem.location import as_local_folder
from dist_checkpointing.format.commit import read_config
from dist_checkpointing.interop.torch_state import TorchState
from dist_checkpointing.manager.checkpoint_manager import CheckpointManager
from dist_checkpointing.mapping import ShardedTensor
from dist_checkpointing.mapping.nested_dicts import flatten, put_at, unflatten
from dist_checkpointing.serialization.load import load
from dist_checkpointing.serialization.load_metadata import load_tensors_metadata
from dist_checkpointing.serialization.save import save

_TENSOR: Final = "__tensor__"


class RunCheckpoints(Checkpoint):  # type: ignore[misc]  # lightning may be missing
    """Saves behind the training of a Lightning Trainer, and resumes from the newest whole save.

    It needs nothing of the strategy: all ranks save what they hold, with single devices, DDP and
    ModelParallelStrategy (FSDP2, tensor parallelism). Model, optimizers, schedulers, GradScaler,
    random numbers, the loops and the state of the other callbacks are saved as a ``TorchState``.
    It stands for Lightning's own ModelCheckpoint, which is not added then.

    Args:
        root: folder of the run, see ``CheckpointManager``.
        every_n_steps: also save after so many steps of the optimizers; each epoch ends with a save.
        options: options of ``CheckpointManager``, such as ``retention``.

    With ``Trainer(callbacks=[RunCheckpoints("run")])``, ``fit`` goes on where the last one ended.
    """

    def __init__(
        self, root: str | PathLike[str], *, every_n_steps: int | None = None, **options: Any
    ) -> None:
        self._root, self._every, self._options = root, every_n_steps, options
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
            **schedulers,
        )
        if self._manager.latest() is not None:
            self._manager.load(self._state)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
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


class DistCheckpointIO(CheckpointIO):  # type: ignore[misc]  # lightning may be missing
    """A Lightning CheckpointIO: what Lightning saves on rank 0 becomes a checkpoint folder.

    For ``Trainer(plugins=[DistCheckpointIO()])`` and ``Fabric(plugins=[...])``, with strategies
    that gather everything on rank 0 (single devices, DDP). Saving over a path replaces it.

    Args:
        trusted: save and load anything that pickles, see ``save``.
    """

    def __init__(self, *, trusted: bool = False) -> None:
        self._trusted = trusted

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Save a nest of dicts and lists with plain tensors. Not collective."""
        if storage_options is not None:
            raise ValueError("DistCheckpointIO has no storage_options")
        leaves, skeleton = flatten(checkpoint)
        tensors: dict[str, Any] = {}
        for place, leaf in leaves.items():
            if isinstance(leaf, torch.Tensor):
                key = ".".join(str(step[0]) for step in place)
                tensors[key] = ShardedTensor.from_rank_offsets(key, leaf.detach())
                leaves[place] = {_TENSOR: key}
        state = {"tensors": tensors, "checkpoint": unflatten(skeleton, leaves)}
        save(state, path, comm=SingleProcess(), overwrite=True, trusted=self._trusted)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What was saved, with tensors on the CPU unless ``map_location`` is a device."""
        del weights_only  # that is what trusted=False is
        template = {"tensors": load_tensors_metadata(path)}
        loaded = load(template, path, comm=SingleProcess(), trusted=self._trusted)
        checkpoint: dict[str, Any] = loaded["checkpoint"]
        for place, key in flatten(checkpoint)[0].items():
            if place[-1][0] == _TENSOR:
                tensor = loaded["tensors"][key]
                tensor = tensor if map_location is None else tensor.to(map_location)
                put_at(checkpoint, place[:-1], tensor)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint; a folder that is none is left alone."""
        folder = as_local_folder(path)
        read_config(folder)
        shutil.rmtree(folder)
