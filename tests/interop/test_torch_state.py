"""TorchState in one process, against torch's own state dicts and trainings without a break."""

import copy
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel

import dist_checkpointing as dc
from dist_checkpointing.interop import TorchState, shard_state_dict
from dist_checkpointing.interop.torch_state import rng_state
from dist_checkpointing.testing import run_ranks
from states import bits


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.25), nn.LayerNorm(5), nn.Linear(5, 4))


def train(model: nn.Module, *steppers: Any, steps: int = 3) -> list[str]:
    """The losses of so many steps on random numbers, by their bits."""
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(7, 6)).square().mean() + random.random() + np.random.rand()  # noqa: NPY002
        for stepper in steppers:
            if isinstance(stepper, torch.optim.Optimizer):
                stepper.zero_grad()
        loss.backward()
        for stepper in steppers:
            stepper.step()
        losses.append(loss.item().hex())
    return losses


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made some steps."""
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "nadam": torch.optim.NAdam,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_goes_on_as_without_a_break(name: str, tmp_path: Path) -> None:
    model = model_of()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, scheduler)
    dc.save(TorchState(model, optimizer, scheduler=scheduler, step=3), tmp_path / "ckpt")
    saved = bits(optimizer.state_dict())
    expected = train(model, optimizer, scheduler)

    model = model_of(1)
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = CosineAnnealingLR(optimizer, 10)
    state = TorchState(model, optimizer, scheduler=scheduler)
    dc.load(state, tmp_path / "ckpt", verify=True)
    assert state.step == 3
    assert bits(optimizer.state_dict()) == saved
    assert train(model, optimizer, scheduler) == expected


def test_nothing_is_copied_and_what_is_there_is_filled_in_place(tmp_path: Path) -> None:
    model = model_of()
    optimizer = trained(model)
    state = TorchState(model, optimizer)
    own = [(p, p.data_ptr(), optimizer.state[p]["exp_avg"].data_ptr()) for p in model.parameters()]
    (taken,) = run_ranks(1, state.sharded_state_dict)
    assert taken["model"]["0.weight"].data.data_ptr() == own[0][1]
    assert taken["optimizer"]["state"]["0.weight"]["exp_avg"].data.data_ptr() == own[0][2]
    dc.save(state, tmp_path / "ckpt")
    expected = train(model, optimizer)
    dc.load(state, tmp_path / "ckpt")
    assert all(
        p.data_ptr() == at and optimizer.state[p]["exp_avg"].data_ptr() == its_state
        for p, at, its_state in own
    )
    assert train(model, optimizer) == expected


def test_state_from_before_the_first_step_takes_later_state_away(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    state = TorchState(model, optimizer)
    dc.save(state, tmp_path / "ckpt")
    expected = train(model, optimizer)
    dc.load(state, tmp_path / "ckpt")
    assert not optimizer.state_dict()["state"]
    assert train(model, optimizer) == expected


def test_optimizer_state_keeps_dtypes_values_and_nests_of_its_own(tmp_path: Path) -> None:
    """torch's own load_state_dict casts it to the dtype of the parameter."""
    model = nn.Linear(3, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    factors = {0: torch.rand(2, 2), 1: torch.rand(3, 3)}
    made = {"step": 7, "exp_avg": torch.rand(2, 3), "factors": factors, "flag": None}
    optimizer.state[model.weight] = copy.deepcopy(made)
    state = TorchState(model, optimizer)
    dc.save(state, tmp_path / "ckpt")
    optimizer.state[model.weight]["step"] = 9
    optimizer.state[model.weight]["factors"][0].zero_()
    dc.load(state, tmp_path / "ckpt")
    assert bits(dict(optimizer.state[model.weight])) == bits(made)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    dc.load(TorchState(model, fresh), tmp_path / "ckpt")
    assert bits(dict(fresh.state[model.weight])) == bits(made)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
    ]


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: bits(dict(optimizer.state[p])) for name, p in model.named_parameters()}


def test_another_grouping(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(two_groups(model), lr=0.5)
    scheduler = CosineAnnealingLR(optimizer, 10)
    train(model, optimizer, scheduler)
    dc.save(TorchState(model, optimizer, scheduler=scheduler), tmp_path / "two")
    saved, rate = state_by_name(model, optimizer), optimizer.param_groups[0]["lr"]

    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3)
    scheduler = CosineAnnealingLR(optimizer, 10)
    with caplog.at_level(logging.WARNING):
        dc.load(TorchState(model, optimizer, scheduler=scheduler), tmp_path / "two")
    assert state_by_name(model, optimizer) == saved
    (group,) = optimizer.param_groups
    assert (group["lr"], group["initial_lr"], group["weight_decay"]) == (rate, 0.5, 0.3)
    assert "weight_decay stays 0.3" in caplog.text
    assert (scheduler.base_lrs, scheduler.get_last_lr(), scheduler.last_epoch) == ([0.5], [rate], 3)
    train(model, optimizer, scheduler)

    dc.save(TorchState(model, optimizer), tmp_path / "one")
    saved, rate = state_by_name(model, optimizer), group["lr"]
    optimizer = torch.optim.AdamW(two_groups(model))
    dc.load(TorchState(model, optimizer), tmp_path / "one")
    assert state_by_name(model, optimizer) == saved
    assert [group["lr"] for group in optimizer.param_groups] == [rate, rate]


def test_frozen_and_new_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    optimizer = trained(model)
    dc.save(TorchState(model, optimizer), tmp_path / "all")
    saved = state_by_name(model, optimizer)

    model[0].requires_grad_(requires_grad=False)
    only = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    dc.load(TorchState(model, only), tmp_path / "all")
    found = state_by_name(model, only)
    assert found.pop("0.weight") == found.pop("0.bias") == bits({})
    assert found == {name: saved[name] for name in found}

    dc.save(TorchState(model, only), tmp_path / "frozen")
    model.requires_grad_()
    everything = torch.optim.AdamW(model.parameters())
    train(model, everything)
    dc.load(TorchState(model, everything), tmp_path / "frozen")
    assert "2 of 6 parameters start without optimizer state" in caplog.text
    assert (
        state_by_name(model, everything) == dict.fromkeys(("0.weight", "0.bias"), bits({})) | found
    )
    train(model, everything)


class Tied(nn.Module):
    """A model whose last layer has the weights of the first."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.embed(x) @ self.head.weight
        return result


def test_only_a_training_continues_with_the_random_numbers_of_the_save(tmp_path: Path) -> None:
    model = model_of()
    optimizer = trained(model)
    dc.save(TorchState(model, optimizer), tmp_path)
    at_save = bits(rng_state())
    other = model_of(1)
    here = bits(rng_state())
    dc.load(TorchState(other), tmp_path)
    assert bits(other.state_dict()) == bits(model.state_dict())
    assert bits(rng_state()) == here != at_save
    dc.load(TorchState(model, optimizer), tmp_path)
    assert bits(rng_state()) == at_save


class Reversed(Tied):
    """The first name of its tie is the other one."""

    def __init__(self) -> None:
        super().__init__()
        embed, head = self.embed, self.head
        del self.embed, self.head
        self.head, self.embed = head, embed


@pytest.mark.parametrize(("kind", "first"), [(Tied, "embed.weight"), (Reversed, "head.weight")])
def test_tied_weights_are_stored_once(kind: type[Tied], first: str, tmp_path: Path) -> None:
    model = Tied()
    optimizer = trained(model)
    dc.save(TorchState(model, optimizer), tmp_path / "ckpt")
    keys = [key for key in dc.load_tensors_metadata(tmp_path / "ckpt") if key.startswith("model.")]
    assert keys == ["model.embed.weight"]
    expected = train(model, optimizer)
    other = kind()
    assert next(iter(other.state_dict())) == first
    own = torch.optim.AdamW(other.parameters())
    dc.load(TorchState(other, own), tmp_path / "ckpt")
    assert other.head.weight is other.embed.weight
    assert train(other, own) == expected


def test_tied_weights_into_a_model_without_ties_and_back(tmp_path: Path) -> None:
    tied, apart = Tied(), Tied(is_tied=False)
    dc.save(TorchState(tied), tmp_path / "tied")
    dc.load(TorchState(apart), tmp_path / "tied")
    for layer in (apart.embed, apart.head):
        assert torch.equal(layer.weight, tied.embed.weight)
    assert apart.head.weight is not apart.embed.weight
    apart.head.weight.data.zero_()
    dc.save(TorchState(apart), tmp_path / "apart")
    dc.load(TorchState(tied), tmp_path / "apart")
    assert torch.equal(tied.head.weight, apart.embed.weight)


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = model_of()
    dc.save(TorchState(plain), tmp_path / "ckpt")
    inner: Any = model_of(1)
    inner[0] = checkpoint_wrapper(inner[0])
    inner[3] = torch.compile(inner[3], backend="eager")
    wrapped: Any = torch.compile(inner, backend="eager")
    dc.load(TorchState(wrapped), tmp_path / "ckpt")
    for own, expected in zip(inner.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, expected)
    dc.save(TorchState(wrapped), tmp_path / "wrapped")
    stored, expected_keys = (dc.load_tensors_metadata(tmp_path / n) for n in ("wrapped", "ckpt"))
    assert list(stored) == list(expected_keys)


class Loader:
    """A data loader that knows where it is."""

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self.generator = torch.Generator().manual_seed(position)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.generator.set_state(state["generator"])


def test_other_parts(tmp_path: Path) -> None:
    model = model_of()
    ema = AveragedModel(model, use_buffers=True)
    loader, scaler = Loader(5), torch.amp.GradScaler("cpu", init_scale=512.0)
    progress: dict[str, Any] = {"tokens": 2**40, "names": ["a", ("b", 2.5)]}
    dc.save(
        TorchState(model, ema=ema, loader=loader, scaler=scaler, progress=progress),
        tmp_path / "ckpt",
    )
    assert "ema.module.0.weight" in dc.load_tensors_metadata(tmp_path / "ckpt")
    other = AveragedModel(model_of(3), use_buffers=True)
    restored = Loader()
    scaler2 = torch.amp.GradScaler("cpu", init_scale=2.0)
    counts: dict[str, Any] = {"tokens": 0, "other": 1}
    dc.load(
        TorchState(model_of(4), ema=other, loader=restored, scaler=scaler2, progress=counts),
        tmp_path / "ckpt",
    )
    assert bits(other.state_dict()) == bits(ema.state_dict())
    assert bits(restored.state_dict()) == bits(loader.state_dict())
    assert scaler2.state_dict() == scaler.state_dict()
    assert counts == progress


def test_a_checkpoint_of_state_dicts(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = model_of()
    optimizer = trained(model)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dc.save(shard_state_dict(state), tmp_path / "ckpt")
    saved = state_by_name(model, optimizer)
    train(model, optimizer)
    dc.load(TorchState(model, optimizer), tmp_path / "ckpt")
    assert state_by_name(model, optimizer) == saved
    with pytest.raises(dc.StateMismatchError, match="'loader': not in the checkpoint"):
        dc.load(TorchState(model, loader=Loader()), tmp_path / "ckpt")


def test_what_differs_between_ranks_is_kept_for_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of()

    def save_own(comm: Any) -> None:
        own = {"loader": Loader(10 + comm.rank), "mean": {"x": torch.tensor([0.5, comm.rank])}}
        parts: Any = {**own, "same": Loader(3), "ones": {"w": torch.ones(3)}}
        dc.save(TorchState(model, **parts), tmp_path / "ckpt", comm=comm)

    def load_own(comm: Any) -> list[Any]:
        parts: Any = {"loader": Loader(), "mean": {"x": torch.zeros(2)}, "same": Loader()}
        dc.load(TorchState(model_of(), **parts), tmp_path / "ckpt", comm=comm)
        return [parts["loader"].position, parts["mean"]["x"].tolist(), parts["same"].position]

    run_ranks(3, save_own)
    assert "ones.w" in dc.load_tensors_metadata(tmp_path / "ckpt")
    assert run_ranks(3, load_own) == [[10 + rank, [0.5, rank], 3] for rank in range(3)]
    with caplog.at_level(logging.WARNING):
        assert run_ranks(2, load_own) == [[0, [0.0, 0.0], 3]] * 2
    assert "loader is not restored: it was saved per rank on 3 ranks" in caplog.text


def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    """Ranks with other parameters: each has its own, and all groups are kept."""

    def stage(rank: int, seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model: Any = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank, momentum=0.5)
        optimizer.state[model[f"layer{rank}"].weight] = {"count": rank, "at": torch.rand(2, 3)}
        return model, optimizer

    stages = [stage(rank, 5) for rank in range(2)]

    def work(comm: Any) -> Any:
        model, optimizer = stages[comm.rank]
        dc.save(TorchState(model, optimizer), tmp_path / "ckpt", comm=comm)
        other, own = stage(comm.rank, 9)
        own.param_groups[0]["lr"] = 5.0
        dc.load(TorchState(other, own), tmp_path / "ckpt", comm=comm)
        return bits([other.state_dict(), own.state_dict()])

    found = run_ranks(2, work)
    assert found == [bits([m.state_dict(), o.state_dict()]) for m, o in stages]


def test_several_optimizers(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = model_of()
        thin, thick = (group["params"] for group in two_groups(model))
        return model, [torch.optim.AdamW(thin), torch.optim.SGD(thick, lr=0.1, momentum=0.9)]

    model, optimizers = make()
    train(model, *optimizers)
    dc.save(TorchState(model, optimizers), tmp_path / "ckpt")
    expected = train(model, *optimizers)
    model, optimizers = make()
    dc.load(TorchState(model, optimizers), tmp_path / "ckpt")
    assert train(model, *optimizers) == expected


def test_manager_async_save_and_fingerprint(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    state = TorchState(model, optimizer)
    with dc.CheckpointManager(tmp_path / "run") as manager:
        for state.step in (1, 2):
            train(model, optimizer, steps=1)
            manager.async_save(state.step, state)
        saved = dc.fingerprint(state)
        expected = train(model, optimizer)
        state.step = 0
        manager.load(state)
    assert state.step == 2
    assert dc.fingerprint(state) == saved
    assert train(model, optimizer) == expected
    # All of it was read and compared, so it counts as verified.
    assert '"verified": true' in (tmp_path / "run" / "manager.json").read_text()
    dc.async_save(state, tmp_path / "other").result()
    assert dc.load_common_state_dict(tmp_path / "other")["step"] == 2


def test_mistakes(tmp_path: Path) -> None:
    model: Any = model_of()
    with pytest.raises(ValueError, match="'rng' is reserved"):
        TorchState(model, rng={})
    with pytest.raises(TypeError, match="lr must be a module, a dict, or have state_dict"):
        TorchState(model, lr=0.1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Module, not a OrderedDict"):
        TorchState(model.state_dict())
    wrong: Any
    for wrong, name in ((None, "NoneType"), (model, "Sequential"), ([model], "Sequential")):
        with pytest.raises(TypeError, match=f"optimizer must be an optimizer, .*found {name}"):
            TorchState(model, wrong)
    foreign = torch.optim.SGD(model_of().parameters(), lr=0.1)
    with pytest.raises(dc.InvalidShardingError, match="that the model does not have"):
        dc.save(TorchState(model, foreign), tmp_path / "ckpt")
    step: Any
    step = 0.5
    with pytest.raises(dc.RankFailedError, match="'float' object cannot be interpreted"):
        dc.save(TorchState(model, step=step), tmp_path / "ckpt")
    step = torch.tensor(7)
    dc.save(TorchState(model, step=step), tmp_path / "ckpt")
    assert dc.load_common_state_dict(tmp_path / "ckpt")["step"] == 7
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for state, words in (
        (TorchState(model, optimizer), "the checkpoint has no optimizer"),
        (TorchState(model, loader=Loader()), "'loader': not in the checkpoint"),
        (TorchState(nn.ModuleDict({"extra": nn.Linear(2, 2)})), r"model\.extra\.weight"),
    ):
        with pytest.raises(dc.StateMismatchError, match=words):
            dc.load(state, tmp_path / "ckpt")

    class Broken(Loader):
        def state_dict(self) -> dict[str, Any]:
            raise OSError("no state today")

    with pytest.raises(dc.RankFailedError, match="no state today"):
        dc.save(TorchState(model, loader=Broken()), tmp_path / "other")
    assert not (tmp_path / "other").exists()


class Own:
    """A class of a user's that save and load take."""

    def __init__(self, *, fails: bool = False) -> None:
        self.w, self.fails = torch.zeros(4), fails
        self.loaded: Any = None

    def sharded_state_dict(self, comm: Any) -> dict[str, Any]:
        shard = dc.ShardedTensor.from_rank_offsets("w", self.w, replica_id=comm.rank)
        return {"w": shard, "count": 3}

    def template_for(self, stored: Any, comm: Any) -> Any:
        assert stored.tensors == {"w": ((4,), torch.float32)}
        assert stored.common == {"count": 3}
        return self.sharded_state_dict(comm), self.restore

    def restore(self, loaded: Any) -> None:
        if self.fails:
            raise OSError("cannot be restored")
        self.loaded = loaded


def test_a_class_of_a_user(tmp_path: Path) -> None:
    own = [Own() for _ in range(2)]
    for one in own:
        one.w += 5
    run_ranks(2, lambda comm: dc.save(own[comm.rank], tmp_path / "ckpt", comm=comm))
    others = [Own(), Own()]
    run_ranks(2, lambda comm: dc.load(others[comm.rank], tmp_path / "ckpt", comm=comm))
    assert all(torch.equal(other.w, own[0].w) for other in others)
    assert [other.loaded["count"] for other in others] == [3, 3]

    def fails_on_rank_1(comm: Any) -> str:
        with pytest.raises(dc.RankFailedError) as caught:
            dc.load(Own(fails=comm.rank == 1), tmp_path / "ckpt", comm=comm)
        return str(caught.value)

    assert all("cannot be restored" in text for text in run_ranks(2, fails_on_rank_1))
