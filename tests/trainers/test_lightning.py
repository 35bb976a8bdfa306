"""The callback with the real Lightning."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_checkpointing import CheckpointManager
from dist_checkpointing.interop import DataPosition
from real_ranks import run_script

lightning = pytest.importorskip("lightning", reason="lightning is missing: make test-trainers")

from dist_checkpointing.interop import lightning as ours  # noqa: E402
from lightning_models import fit  # noqa: E402 - it imports lightning

# Lightning warns of small machines, and torch of Lightning.
pytestmark = pytest.mark.filterwarnings("ignore")


def outcome(trainer: Any) -> tuple[list[str], dict[str, bytes], int]:
    module = trainer.lightning_module
    weights = {name: w.detach().numpy().tobytes() for name, w in module.named_parameters()}
    return module.losses, weights, trainer.global_step


def test_a_fit_goes_on_after_an_epoch(tmp_path: Path) -> None:
    losses, weights, step = outcome(fit(3, callbacks=[ours.RunCheckpoints(tmp_path / "whole")]))
    assert step == 18
    fit(1, callbacks=[ours.RunCheckpoints(tmp_path / "run")])
    resumed = fit(3, seed=9, callbacks=[ours.RunCheckpoints(tmp_path / "run")])
    assert resumed.current_epoch == 3
    assert outcome(resumed) == (losses[6:], weights, step)
    assert CheckpointManager(tmp_path / "run").steps() == [6, 12, 18]


def test_a_fit_that_fails_is_started_again(tmp_path: Path) -> None:
    from lightning.pytorch import Callback

    class Fails(Callback):  # type: ignore[misc]  # lightning may be missing
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 6:  # right after the save of the first epoch began
                raise OSError("the data is gone")

    expected = outcome(fit(2, callbacks=[ours.RunCheckpoints(tmp_path / "whole")]))
    with pytest.raises(OSError, match="the data is gone"):
        fit(2, callbacks=[ours.RunCheckpoints(tmp_path / "run"), Fails()])
    assert CheckpointManager(tmp_path / "run").steps() == [6]
    losses, *rest = outcome(fit(2, seed=9, callbacks=[ours.RunCheckpoints(tmp_path / "run")]))
    assert [expected[0][6:], *expected[1:]] == [losses, *rest]


def test_saves_within_an_epoch(tmp_path: Path) -> None:
    own = ours.RunCheckpoints(tmp_path / "run", every_n_steps=4)
    fit(1, callbacks=[own], max_steps=5)
    manager = CheckpointManager(tmp_path / "run")
    assert manager.steps() == [4, 5]
    manager.delete(5)  # step 4 is within an epoch, as after a crash
    manager.close()
    resumed = fit(1, seed=9, callbacks=[ours.RunCheckpoints(tmp_path / "run")])
    assert resumed.global_step == 6
    assert len(resumed.lightning_module.losses) == 2


@pytest.mark.parametrize(("stop", "accumulation"), [(2, 1), (3, 1), (4, 1), (2, 2)])
def test_a_position_goes_on_within_an_epoch(stop: int, accumulation: int, tmp_path: Path) -> None:
    """With the same data: three steps of 10 samples an epoch."""

    def run(folder: str, **options: Any) -> tuple[Any, DataPosition]:
        position = DataPosition(30, 10, seed=5)
        own = ours.RunCheckpoints(tmp_path / folder, every_n_steps=1, position=position)
        options = {"accumulate_grad_batches": accumulation, **options}
        return fit(3, callbacks=[own], position=position, **options), position

    whole, position = run("whole")
    losses, weights, step = outcome(whole)
    assert (step, position.samples, len(losses)) == (9, 90, 9 * accumulation)
    run("run", max_steps=stop)
    resumed, position = run("run", seed=9)
    assert outcome(resumed) == (losses[stop * accumulation :], weights, step)
    assert position.samples == 90


def test_callbacks_get_their_state_back(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    def stopping() -> Any:
        return EarlyStopping("loss", patience=50)

    first, second = stopping(), stopping()
    fit(2, callbacks=[first, ours.RunCheckpoints(tmp_path / "run")])
    fit(2, callbacks=[second, ours.RunCheckpoints(tmp_path / "run")])
    assert torch.equal(second.best_score, first.best_score)
    assert second.wait_count == first.wait_count


def test_fabric(tmp_path: Path) -> None:
    from lightning.fabric import Fabric

    from dist_checkpointing import load, save
    from dist_checkpointing.interop import TorchState

    fabric = Fabric(accelerator="cpu", devices=1)

    def make(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        prepared: tuple[Any, Any] = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        return prepared

    def train(model: Any, optimizer: Any) -> list[str]:
        losses = []
        for _ in range(3):
            loss = model(torch.rand(5, 4)).square().mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(float(loss.detach()).hex())
        return losses

    model, optimizer = make(0)
    train(model, optimizer)
    save(TorchState(model.module, optimizer, step=3), tmp_path / "state")
    expected = train(model, optimizer)

    other, other_optimizer = make(2)
    load(TorchState(other.module, other_optimizer), tmp_path / "state")
    assert train(other, other_optimizer) == expected


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks(mode: str, tmp_path: Path) -> None:
    def run(folder: str, epochs: int, name: str) -> list[Any]:
        script = Path(__file__).with_name("lightning_rank.py")
        given = (mode, tmp_path / folder, epochs)
        return run_script(2, script, *given, reports=tmp_path / name, timeout_seconds=200)

    whole = run("whole", 3, "1")
    run("run", 1, "2")
    resumed = run("run", 3, "3")
    for own, expected in zip(resumed, whole, strict=True):
        assert own["digests"] == expected["digests"]
        assert own["losses"] == expected["losses"][-len(own["losses"]) :]
        assert own["step"] == expected["step"] == 9


def test_a_position_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    def run(world_size: int, folder: str, steps: int) -> list[float]:
        """The loss of each step, of all ranks."""
        script = Path(__file__).with_name("lightning_rank.py")
        given = ("position", tmp_path / folder, steps)
        reports = tmp_path / f"{folder}-{world_size}"
        ranks = run_script(world_size, script, *given, reports=reports, timeout_seconds=200)
        losses = zip(*(rank["losses"] for rank in ranks), strict=True)
        return [sum(map(float.fromhex, parts)) / world_size for parts in losses]

    whole = run(1, "whole", 9)
    assert run(2, "run", 4) + run(1, "run", 9) == pytest.approx(whole, rel=1e-4)
