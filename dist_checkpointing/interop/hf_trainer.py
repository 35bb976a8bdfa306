"""The Trainer of transformers saves and resumes through a CheckpointManager."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dist_checkpointing.comm import default_comm
from dist_checkpointing.interop.data_position import DataPosition
from dist_checkpointing.interop.torch_state import TorchState, rng_state, set_rng_state
from dist_checkpointing.manager.checkpoint_manager import CheckpointManager
from dist_checkpointing.serialization.load_metadata import load_common_state_dict


class TrainerCheckpoints(TrainerCallback):  # type: ignore[misc]  # transformers may be missing
    """Trains with a Trainer of transformers, and saves and resumes in place of it.

    The Trainer decides when to save (``save_strategy``, ``save_steps``); what it would write then
    is one checkpoint of a CheckpointManager, written behind the training. ``train`` resumes from
    the newest whole one: model, optimizer, scheduler, GradScaler, random numbers, the Trainer's
    state and its place in the data.

    Args:
        root: folder of the run, see ``CheckpointManager``.
        position: place of the training in its data, in place of the Trainer's own. Its order holds
            on any number of ranks; its ``batch_size`` is that of a step on all ranks.
        options: options of ``CheckpointManager``, such as ``retention``.

    ``TrainerCheckpoints("run").train(trainer)`` takes the place of ``trainer.train()``.
    """

    def __init__(
        self, root: str | PathLike[str], *, position: DataPosition | None = None, **options: Any
    ) -> None:
        self._root, self._position, self._options = root, position, options
        self._progress: dict[str, Any] = {}
        self._resumed_step: int | None = None
        self._rng: dict[str, Any] | None = None

    def train(self, trainer: Trainer, **options: Any) -> Any:
        """Train from the newest checkpoint, or from the beginning if there is none. Collective.

        Args:
            trainer: Trainer; its model must not be loaded from one of its own checkpoints.
            options: options of ``Trainer.train``.

        Returns:
            What ``Trainer.train`` returns.

        Raises:
            ValueError: for ``load_best_model_at_end``, which needs the Trainer's own checkpoints,
                for DeepSpeed, and for a position that does not fit the data and batches.
            CheckpointingException: see ``CheckpointManager``.
        """
        if trainer.args.load_best_model_at_end:
            raise ValueError("load_best_model_at_end needs the checkpoints of the Trainer itself")
        if trainer.is_deepspeed_enabled:
            raise ValueError("DeepSpeed saves by itself; dckpt convert reads what it has saved")
        own: dict[str, Any] = {
            "_save_checkpoint": self._save,
            "_load_from_checkpoint": lambda *_: None,
        }
        skips_nothing = trainer.args.ignore_data_skip
        if self._position is not None:
            _require_fit(self._position, trainer)
            own["_get_train_sampler"] = lambda *_: self._position
            trainer.args.ignore_data_skip = True
        vars(trainer).update(own)
        self._trainer = trainer
        trainer.add_callback(self)
        try:
            with (
                CheckpointManager(self._root, **self._options) as self._manager,
                tempfile.TemporaryDirectory() as folder,
            ):
                # Of all it says, because the Trainer begins with it before the tensors are read.
                self._resumed_step = self._manager.latest_valid()
                if self._resumed_step is None:
                    return trainer.train(**options)
                # The Trainer takes its place in the data from this file, and nothing else.
                common = load_common_state_dict(self._manager.folder(self._resumed_step))
                state = common["trainer"]["state"]
                Path(folder, "trainer_state.json").write_text(state, encoding="utf-8")
                return trainer.train(resume_from_checkpoint=folder, **options)
        finally:
            trainer.remove_callback(self)
            trainer.args.ignore_data_skip = skips_nothing
            for name in own:
                del vars(trainer)[name]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, _: TrainerControl, **given: Any
    ) -> None:
        """Load the step that is resumed: everything is made, and nothing has been trained."""
        self._state = TorchState(
            given["model"],
            given["optimizer"],
            scheduler=given["lr_scheduler"],
            scaler=self._trainer.accelerator.scaler,
            trainer=self._progress,
            data=self._position,
        )
        if self._resumed_step is not None:
            self._manager.load(self._state, self._resumed_step)
            # Within an epoch the Trainer first begins its data, which draws random numbers.
            if state.epoch != int(state.epoch) and (self._position or not args.ignore_data_skip):
                self._rng = rng_state()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Restore the random numbers after data was skipped."""
        if self._rng is not None:
            set_rng_state(self._rng)
            self._rng = None

    def on_step_end(self, _: TrainingArguments, state: TrainerState, *__: Any, **___: Any) -> None:
        if self._position is not None:
            self._position.advance()
            state.epoch = self._position.samples / self._position.dataset_size

    def _save(self, *_: Any) -> None:
        trainer = self._trainer
        if trainer.state.global_step == self._state.step:
            return  # callbacks may ask for a second save of a step
        trainer.store_flos()
        # The ranks differ in who they are; the Trainer itself keeps what rank 0 knows.
        self._progress["state"] = default_comm().broadcast(json.dumps(asdict(trainer.state)))
        self._state.step = trainer.state.global_step
        self._manager.async_save(self._state.step, self._state)


def _require_fit(position: DataPosition, trainer: Trainer) -> None:
    args, size = trainer.args, len(trainer.train_dataset)
    batch = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
    if (position.dataset_size, position.batch_size) != (size, batch):
        raise ValueError(f"position must be DataPosition(dataset_size={size}, batch_size={batch})")
    if len(position) % batch:
        raise ValueError("the Trainer fills up a last batch with other samples: use drop_last=True")
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size changes the batch size that position has")
