"""TrainerCheckpoints with the real Trainer: it goes on as if it had not stopped."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from damage import damage
from dist_checkpointing import CheckpointManager, Retention, load_tensors_metadata
from dist_checkpointing.interop import DataPosition
from real_ranks import run_script

transformers = pytest.importorskip(
    "transformers", reason="transformers is missing: make test-trainers"
)

# transformers and accelerate warn of themselves.
pytestmark = pytest.mark.filterwarnings("ignore")


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Vectors to predict the sum of."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.rand(6, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum()}


class Model(nn.Module):
    """A model that draws random numbers in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layers(x).squeeze(-1)
        return {"loss": (found - labels).square().mean(), "logits": found}


class Stop(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    """Ends a training early, as a time limit does."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        del args
        if state.global_step == self.step:
            control.should_training_stop = True
        return control


def train(
    folder: Path,
    *,
    stop: int | None = None,
    model_seed: int = 3,
    cut: Callable[[Any], Any] = lambda model: model,
    callbacks: Sequence[Any] = (),
    position: DataPosition | None = None,
    **given: Any,
) -> Any:
    """The Trainer after a training of 24 steps in 3 epochs, or less."""
    from dist_checkpointing.interop import hf_trainer

    given = {"per_device_train_batch_size": 5, **given}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        num_train_epochs=3,
        save_strategy="steps",
        save_steps=4,
        logging_steps=2,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        seed=3,
        data_seed=1,
        **given,
    )
    torch.manual_seed(model_seed)
    trainer = transformers.Trainer(
        cut(Model()),
        arguments,
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
        callbacks=[Stop(stop), *callbacks],
    )
    options: dict[str, Any] = {"retention": Retention(keep_last=2), "position": position}
    hf_trainer.TrainerCheckpoints(folder / "run", **options).train(trainer)
    return trainer


def outcome(trainer: Any) -> tuple[Any, Any]:
    logged = [
        (entry["step"], entry["loss"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    weights = {name: w.detach().numpy().tobytes() for name, w in trainer.model.named_parameters()}
    return logged, weights


@pytest.mark.parametrize(("stop", "accumulation"), [(6, 1), (8, 2), (13, 1)])
def test_it_goes_on_as_if_it_had_not_stopped(stop: int, accumulation: int, tmp_path: Path) -> None:
    """Within an epoch and at the end of one: 8 steps with one batch each, or 4 with two."""
    given: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    whole = train(tmp_path / "whole", **given)
    assert whole.state.global_step == 24 // accumulation
    train(tmp_path / "broken", stop=stop, **given)
    resumed = train(tmp_path / "broken", model_seed=4, **given)
    assert outcome(resumed) == outcome(whole)


@pytest.mark.parametrize(("stop", "accumulation"), [(6, 1), (8, 2), (13, 1)])
def test_it_goes_on_at_a_position(stop: int, accumulation: int, tmp_path: Path) -> None:
    """With the same data in the same order, random numbers, epochs in the log, and weights."""
    given: dict[str, Any] = {"gradient_accumulation_steps": accumulation}

    def position() -> DataPosition:
        return DataPosition(40, 5 * accumulation, seed=6)

    whole = train(tmp_path / "whole", position=position(), **given)
    assert whole.state.global_step == 24 // accumulation
    train(tmp_path / "broken", stop=stop, position=position(), **given)
    last = position()
    resumed = train(tmp_path / "broken", model_seed=4, position=last, **given)
    assert outcome(resumed) == outcome(whole)
    assert (last.epoch, last.samples) == (3, 120)
    logged = [[log["epoch"] for log in t.state.log_history] for t in (whole, resumed)]
    assert logged[0] == logged[1]
    assert not resumed.args.ignore_data_skip


def test_a_position_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"DataPosition\(dataset_size=40, batch_size=5\)"):
        train(tmp_path, position=DataPosition(40, 10))
    given: dict[str, Any] = {"per_device_train_batch_size": 3}
    with pytest.raises(ValueError, match="drop_last=True"):
        train(tmp_path, position=DataPosition(40, 3), **given)
    position = DataPosition(40, 3, drop_last=True)
    assert train(tmp_path, position=position, **given).state.global_step == 39
    assert position.epoch == 3
    with pytest.raises(ValueError, match="auto_find_batch_size"):
        train(tmp_path, position=DataPosition(40, 5), auto_find_batch_size=True)


class SaveEpochs(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    """Saves at the end of each epoch, with a step that is saved already."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        del args, state
        control.should_save = True
        return control


def test_nothing_else_is_written_and_old_ones_go(tmp_path: Path) -> None:
    trainer = train(tmp_path, callbacks=[SaveEpochs()])
    assert not list(tmp_path.glob("out/checkpoint-*"))
    assert CheckpointManager(tmp_path / "run").steps() == [20, 24]
    stored = load_tensors_metadata(tmp_path / "run" / "step-00000024")
    assert "model.layers.0.weight" in stored
    # The trainer is its own again.
    assert "_save_checkpoint" not in vars(trainer)
    trainer.save_model(tmp_path / "model")


def test_a_damaged_checkpoint_is_skipped_and_written_again(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    train(tmp_path / "broken", stop=13)
    damage(tmp_path / "broken" / "run" / "step-00000012")
    resumed = train(tmp_path / "broken", model_seed=4)
    assert outcome(resumed) == outcome(whole)


def test_the_best_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="load_best_model_at_end"):
        train(tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=4)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks(mode: str, tmp_path: Path) -> None:
    def run(folder: str, stop: object, name: str) -> list[Any]:
        script = Path(__file__).with_name("hf_trainer_rank.py")
        given = (mode, tmp_path / folder, stop)
        return run_script(2, script, *given, reports=tmp_path / name, timeout_seconds=200)

    whole = run("whole", "none", "1")
    assert whole[0]["step"] == 12
    run("broken", 6, "2")
    assert run("broken", "none", "3") == whole


def test_a_position_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Two ranks with one batch each, then one with two batches a step."""

    def run(world_size: int, folder: str, stop: object) -> list[Any]:
        script = Path(__file__).with_name("hf_trainer_rank.py")
        given = ("position", tmp_path / folder, stop)
        reports = tmp_path / f"{folder}-{world_size}"
        return run_script(world_size, script, *given, reports=reports, timeout_seconds=200)

    (whole,) = run(1, "whole", "none")
    assert whole["step"] == 12
    run(2, "run", 6)
    (resumed,) = run(1, "run", "none")
    assert resumed["step"] == 12
    # Ranks sum in another order.
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-4)
