"""TorchState with state that the loading side does not have yet, or groups in another way."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import dist_checkpointing as dc
from dist_checkpointing.interop import TorchState
from states import bits


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.25), nn.Linear(5, 4))


def lbfgs_steps(model: nn.Module, optimizer: Any, count: int) -> list[str]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(7, 6)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return [optimizer.step(closure).item().hex() for _ in range(count)]


@pytest.mark.parametrize(
    ("own_steps", "saved_steps"), [(0, 1), (0, 5), (1, 2), (2, 2), (7, 1), (7, 5)]
)
def test_lists_in_optimizer_state_may_be_of_another_length(
    own_steps: int, saved_steps: int, tmp_path: Path
) -> None:
    def make(seed: int) -> tuple[nn.Module, Any]:
        model = model_of(seed)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1, history_size=4)

    model, optimizer = make(0)
    lbfgs_steps(model, optimizer, saved_steps)
    dc.save(TorchState(model, optimizer), tmp_path / "ckpt")
    saved = copy.deepcopy(optimizer.state_dict())
    expected = lbfgs_steps(model, optimizer, 4)
    model, optimizer = make(1)
    lbfgs_steps(model, optimizer, own_steps)
    dc.load(TorchState(model, optimizer), tmp_path / "ckpt", verify=True)
    assert bits(optimizer.state_dict()) == bits(saved)
    assert lbfgs_steps(model, optimizer, 4) == expected


class Holder:
    """An object whose state is whatever it was given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        ({"shadow": {"w": ONES}, "n": 1}, {"shadow": {}, "n": 0}),
        ({"shadow": {"w": ONES, 1: ONES}}, {"shadow": {"w": torch.zeros(3)}}),
        ({"shadow": ONES}, {"shadow": None}),
        ({"shadow": ONES}, {}),
        ({"losses": [ONES, 7, (ONES, None)], "rest": [[], {}]}, {"losses": []}),
        ({"losses": [ONES]}, {"losses": [ONES, ONES]}),
        ({"losses": torch.ones(5)}, {"losses": torch.zeros(2)}),
        ({"losses": ONES.double()}, {"losses": ONES}),
        ({"losses": 3}, {"losses": ONES}),
        ({}, {"losses": ONES}),
    ],
)
def test_an_object_gets_the_state_that_was_saved(saved: Any, own: Any, tmp_path: Path) -> None:
    parts: Any = {"other": Holder(saved), "plain": dict(saved)}
    dc.save(TorchState(nn.Linear(1, 1), **parts), tmp_path / "ckpt")
    other, plain = Holder(copy.deepcopy(own)), copy.deepcopy(own)
    found: Any = {"other": other, "plain": plain}
    dc.load(TorchState(nn.Linear(1, 1), **found), tmp_path / "ckpt", verify=True)
    assert bits(other.state) == bits(plain) == bits(saved)


def test_an_optimizer_may_be_one_of_the_others(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = model_of(seed)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make(0)
    model(torch.rand(2, 6)).sum().backward()
    optimizer.step()
    dc.save(TorchState(nn.Linear(1, 1), critic=model, rates=optimizer), tmp_path / "ckpt")
    other, rates = make(1)
    dc.load(TorchState(nn.Linear(1, 1), critic=other, rates=rates), tmp_path / "ckpt")
    assert bits(rates.state_dict()) == bits(optimizer.state_dict())


class Extra(nn.Linear):
    """A module with state beside its parameters."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (torch.arange(5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)),
        (torch.arange(5, dtype=torch.uint8), None),
        (None, torch.arange(5, dtype=torch.uint8)),
        ({"scale": ONES, "history": [ONES, 2]}, {}),
        ({"scale": ONES}, {"scale": torch.zeros(3), "more": ONES}),
    ],
)
def test_extra_state_may_have_other_tensors(saved: Any, own: Any, tmp_path: Path) -> None:
    dc.save(TorchState(nn.Sequential(Extra(saved))), tmp_path / "ckpt")
    other = Extra(own)
    dc.load(TorchState(nn.Sequential(other)), tmp_path / "ckpt")
    assert bits(other.extra) == bits(saved)
    dc.save(TorchState(nn.Sequential(nn.Linear(2, 2))), tmp_path / "without")
    with pytest.raises(dc.StateMismatchError, match=r"'model\.0\._extra_state': not in the checkp"):
        dc.load(TorchState(nn.Sequential(Extra(ONES))), tmp_path / "without")


def two_groups(model: nn.Module, *, is_reversed: bool) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.1},
        {"params": [p for p in model.parameters() if p.ndim > 1], "lr": 0.01},
    ]
    return groups[::-1] if is_reversed else groups


def cyclic(optimizer: Any) -> Any:
    low = [group["lr"] / 10 for group in optimizer.param_groups]
    high = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.CyclicLR(optimizer, low, high, step_size_up=2, cycle_momentum=False)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cyclic": cyclic,
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(
        o, patience=0, min_lr=[group["lr"] / 4 for group in o.param_groups], factor=0.5
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 6)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.LambdaLR(o, lambda step: 0.9**step)]
    ),
}


@pytest.mark.parametrize(
    ("name", "num_optimizers"), [(name, 1 + n % 2) for n, name in enumerate(SCHEDULERS)]
)
def test_rates_follow_the_parameters_into_another_order_of_groups(
    name: str, num_optimizers: int, tmp_path: Path
) -> None:
    def make(*, is_reversed: bool) -> tuple[Any, Any, Any]:
        model = model_of(0)
        before = nn.Linear(2, 2)
        optimizers: list[Any] = [
            torch.optim.SGD([{"params": [p]} for p in before.parameters()], lr=1.0),
            torch.optim.SGD(two_groups(model, is_reversed=is_reversed)),
        ][-num_optimizers:]
        scheduler = SCHEDULERS[name](optimizers[-1])
        both = nn.ModuleList([before, model] if num_optimizers == 2 else [model])
        return optimizers[-1], scheduler, TorchState(both, optimizers, scheduler=scheduler)

    def train(optimizer: Any, scheduler: Any) -> list[Any]:
        rates = []
        for loss in range(4):
            optimizer.step()
            is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([float(loss)] if is_plateau else []))
            rates.append({g["params"][0].ndim: g["lr"] for g in optimizer.param_groups})
        return rates

    optimizer, scheduler, state = make(is_reversed=False)
    train(optimizer, scheduler)
    dc.save(state, tmp_path / "ckpt")
    saved = copy.deepcopy(scheduler.state_dict())
    expected = train(optimizer, scheduler)
    optimizer, scheduler, state = make(is_reversed=True)
    dc.load(state, tmp_path / "ckpt")
    assert train(optimizer, scheduler) == expected
    _, scheduler, state = make(is_reversed=False)
    dc.load(state, tmp_path / "ckpt")
    assert scheduler.state_dict() == saved


def test_rates_in_tensors_and_in_numbers(tmp_path: Path) -> None:
    def make(rate: Any) -> Any:
        model = model_of(0)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
        scheduler = lr_scheduler.StepLR(optimizer, 2)
        return optimizer, TorchState(model, optimizer, scheduler=scheduler)

    _, state = make(0.5)
    dc.save(state, tmp_path / "ckpt")
    optimizer, state = make(torch.tensor(0.25))
    dc.load(state, tmp_path / "ckpt")
    assert bits(optimizer.param_groups[0]["lr"]) == bits(torch.tensor(0.5))


def test_an_error_says_that_the_model_was_restored(tmp_path: Path) -> None:
    dc.save(TorchState(nn.Linear(1, 1), part=Holder({"a": 1})), tmp_path / "ckpt")

    class Refusing(Holder):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError(f"no such key: {[*state]}")

    with pytest.raises(dc.RankFailedError, match="no such key") as caught:
        dc.load(TorchState(nn.Linear(1, 1), part=Refusing({})), tmp_path / "ckpt")
    assert "part.load_state_dict failed when the model and the optimizer were restored" in str(
        caught.value
    )


def test_another_optimizer_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(0)
    dc.save(TorchState(model, torch.optim.SGD(model.parameters())), tmp_path / "ckpt")
    dc.load(TorchState(model, torch.optim.SGD(model.parameters())), tmp_path / "ckpt")
    assert not caplog.text
    dc.load(TorchState(model, torch.optim.Adam(model.parameters())), tmp_path / "ckpt")
    assert "Adam has no dampening, momentum, nesterov, but the optimizer that" in caplog.text
