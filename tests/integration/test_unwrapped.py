"""Tensors that nobody wrapped: an error that says how to, instead of a checkpoint without them."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.interop import shard_state_dict
from dist_checkpointing.testing import run_ranks
from dist_checkpointing.validation import save_errors
from simulated_groups import fake_rank, the_one_error
from states import shard

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*device.*:UserWarning",  # said of a fake group, which has none
    "ignore:.*[Nn]ested.*prototype:UserWarning",
    "ignore:.*beta state:UserWarning",
)


@pytest.fixture(scope="module")
def states() -> list[dict[str, Any]]:
    """The state dict of each of two ranks, as fully_shard makes it: DTensors cut along axis 0."""
    states = []
    for rank in range(2):
        with fake_rank(2, rank):
            mesh = init_device_mesh("cpu", (2,))
            whole = torch.arange(12.0).reshape(6, 2)
            weight = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            states.append({"layers": [{"weight": weight}], "step": 3})
    return states


PLACES: dict[str, Callable[[Any], Any]] = {
    "as a parameter": torch.nn.Parameter,
    "in a list": lambda tensor: [1, (tensor,)],
    "in a namespace": lambda tensor: argparse.Namespace(inner={"x": tensor}),
    "in a sharded object": lambda tensor: dc.ShardedObject("key", {"x": tensor}, (1,), (0,)),
    "in a sharded tensor": lambda tensor: dc.ShardedTensor.from_rank_offsets("key", tensor),
    "in the content metadata": lambda tensor: tensor,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_dtensor_that_is_not_wrapped_is_an_error_at_save(
    tmp_path: Path, states: list[dict[str, Any]], place: str
) -> None:
    def save_rank(comm: Comm) -> None:
        state = {"m": {"w": PLACES[place](states[comm.rank]["layers"][0]["weight"])}}
        if place == "in the content metadata":
            dc.save({}, tmp_path / "c", content_metadata={"stored": [state]}, comm=comm)
        dc.save(state, tmp_path / "c", comm=comm)

    error = the_one_error(2, save_rank, dc.InvalidShardingError)
    assert error.findings[0].ranks == (0, 1)
    where = "content_metadata" if "content" in place else "state_dict['m']['w']"
    for words in ("'key'" if "sharded" in place else where, "DTensor", "shard_state_dict"):
        assert words in str(error)
    assert not (tmp_path / "c").exists()


def test_a_dtensor_in_a_template_is_an_error_and_wrapped_it_is_loaded(
    tmp_path: Path, states: list[dict[str, Any]]
) -> None:
    sharded = run_ranks(2, lambda comm: shard_state_dict(states[comm.rank], comm=comm))
    run_ranks(2, lambda comm: dc.save(sharded[comm.rank], tmp_path, comm=comm))
    error = the_one_error(2, lambda comm: dc.load(states[comm.rank], tmp_path, comm=comm))
    assert type(error) is dc.InvalidShardingError
    assert "state_dict['layers'][0]['weight']" in str(error)
    assert "interop.shard_state_dict" in str(error)
    loaded = run_ranks(2, lambda comm: dc.load(sharded[comm.rank], tmp_path, comm=comm))
    assert loaded[1]["layers"][0]["weight"].tolist() == [[6, 7], [8, 9], [10, 11]]


class OfTorch(torch.Tensor):
    """Looks like the ShardedTensor of torch, which needs a process group."""

    def local_shards(self) -> list[Any]:
        return []


def test_a_sharded_tensor_of_torch_is_an_error(tmp_path: Path) -> None:
    state = {"w": torch.ones(2).as_subclass(OfTorch)}
    dc.save({"step": 1}, tmp_path / "c")
    for use, name in ((dc.save, "d"), (dc.load, "c")):
        with pytest.raises(dc.InvalidShardingError, match="shard_state_dict"):
            use(state, tmp_path / name)


def test_a_template_that_is_not_wrapped_is_an_error_that_says_how_to(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    dc.save(shard_state_dict({"m": model.state_dict(), "step": 5}), tmp_path)
    for template in ({"m": model.state_dict(), "step": 0}, model.state_dict()):
        with pytest.raises(dc.StateMismatchError) as raised:
            dc.load(template, tmp_path)
        assert len(raised.value.findings) == 2
        for words in ("['weight']", "['bias']", "interop.shard_state_dict", "from_rank_offsets"):
            assert words in str(raised.value)


UNFILLED: dict[str, tuple[dict[Any, Any], dict[Any, Any], str]] = {
    "saved as a sharded leaf in a list": (
        {"l": [1, shard("s", torch.ones(2))]},
        {"l": [1, torch.ones(2)]},
        "['l'][1]",
    ),
    "a list that is too short": ({"l": [1]}, {"l": [1, torch.ones(2)]}, "['l'][1]"),
    "another type of key": ({1: torch.ones(2)}, {"1": torch.ones(2)}, "['1']"),
    "below a list with sharded leaves": (
        {"l": [{"x": 1}, shard("s", torch.ones(2))]},
        {"l": [{"y": torch.ones(2)}, shard("s", torch.ones(2))]},
        "['l'][0]['y']",
    ),
}


@pytest.mark.parametrize("name", UNFILLED)
def test_a_tensor_that_would_not_be_filled_is_named(tmp_path: Path, name: str) -> None:
    saved, template, place = UNFILLED[name]
    dc.save(saved, tmp_path)
    with pytest.raises(dc.StateMismatchError, match="not wrapped") as raised:
        dc.load(template, tmp_path)
    assert [finding.key for finding in raised.value.findings] == [f"state_dict{place}"]


@pytest.mark.parametrize(
    "template",
    [{"b": 2, "c": {"d": [3, None]}}, {"b": dc.LocalNonpersistentObject(torch.ones(2))}],
    ids=["numbers", "local"],
)
def test_what_need_not_be_there_is_no_error(tmp_path: Path, template: dict[str, Any]) -> None:
    dc.save({"a": 1}, tmp_path)
    assert dc.load(template, tmp_path)["a"] == 1


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.up = torch.nn.Linear(3, 4)
        self.down = torch.nn.Linear(3, 4)
        self.down.weight = self.up.weight


def test_plain_tensors_are_filled_in_place_on_all_ranks(tmp_path: Path) -> None:
    saved, wide = Tied(), torch.arange(6.0).reshape(2, 3)
    state = {
        "model": saved.state_dict(),
        "nest": [{"wide": wide}, (torch.tensor(3), 4), (shard("s", wide), torch.ones(2))],
        "none": None,
    }
    dc.save(state, tmp_path)

    def load_rank(comm: Comm) -> None:
        model, count, one = Tied(), torch.tensor(0), torch.zeros(2, requires_grad=True)
        memory = torch.zeros(3, 4)
        columns = memory[:, :2].T
        template: dict[str, Any] = {
            "model": model.state_dict(),
            "nest": [{"wide": columns}, (count, 0), (shard("s", torch.empty(2, 3)), one)],
            "none": 0,
        }
        loaded = dc.load(template, tmp_path, comm=comm)
        for own, other in zip(model.parameters(), saved.parameters(), strict=True):
            assert torch.equal(own, other)
        assert memory.T.tolist() == [*wide.tolist(), [0] * 3, [0] * 3]
        assert (count.item(), one.tolist()) == (3, [1, 1])
        first, (second, four), (_, last) = loaded["nest"]
        assert loaded["model"]["up.weight"] is template["model"]["up.weight"]
        assert (first["wide"] is columns, second is count, last is one) == (True, True, True)
        assert (four, loaded["none"]) == (4, None)

    run_ranks(2, load_rank)


def test_plain_tensors_of_another_kind_are_named_with_all_else(tmp_path: Path) -> None:
    tensors = [torch.ones(2), torch.ones(2), torch.ones(2)]
    dc.save({"l": tensors, "s": shard("s", torch.ones(2))}, tmp_path)
    given = [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2).to_sparse()]
    template = {"l": [*given], "s": shard("s", torch.zeros(5)), "new": torch.zeros(1)}
    with pytest.raises(dc.StateMismatchError) as raised:
        dc.load(template, tmp_path)
    found = {finding.key: finding.problem for finding in raised.value.findings}
    assert [*found] == ["s", *(f"state_dict['l'][{n}]" for n in range(3)), "state_dict['new']"]
    for key, word in zip(found, ("shape", "shape", "dtype", "cannot fill", "filled"), strict=True):
        assert word in found[key]
    assert not given[0].any()
    wanted = [torch.ones(2), given[1], torch.ones(2, device="meta")]
    loaded = dc.load({"l": wanted}, tmp_path, cast="widen")
    assert given[1].tolist() == loaded["l"][2].tolist() == [1, 1]


def test_flags_that_tolerate_unknown_keys_only_log_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dc.save({"a": 1}, tmp_path)
    for strict in ("log_unexpected", "log_all", "ignore_all"):
        caplog.clear()
        assert dc.load({"b": torch.ones(2)}, tmp_path, strict=strict) == {"a": 1}
        assert "state_dict['b']" in caplog.text
    with pytest.raises(dc.StateMismatchError, match="not be filled"):
        dc.load({"b": torch.ones(2)}, tmp_path, strict="raise_all")


def test_a_tensor_that_one_rank_would_not_fill_is_the_error_of_all(tmp_path: Path) -> None:
    dc.save({"a": torch.ones(2), "s": shard("s", torch.ones(2))}, tmp_path)
    given = torch.full((2,), 7.0)

    def load_rank(comm: Comm) -> None:
        more = {"b": torch.ones(2)} if comm.rank else {}
        dc.load({"s": shard("s", given), **more}, tmp_path, comm=comm)

    error = the_one_error(2, load_rank, dc.StateMismatchError)
    assert error.findings[0].ranks == (1,)
    assert given.tolist() == [7, 7]


def test_large_tensors_in_the_common_state_are_a_warning_with_the_lines_that_wrap_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_errors, "LARGE_BYTES", 4096)
    tensor = torch.zeros(1024)
    dc.save({"m": {"a": tensor, "the same": [tensor]}}, tmp_path / "small")
    assert caplog.text == ""
    run_ranks(
        2,
        lambda comm: dc.save(
            {"m": {"a": tensor, "b": torch.ones(8, 1024)}}, tmp_path / "c", comm=comm
        ),
    )
    (message,) = [record.getMessage() for record in caplog.records]
    assert "36.0 KiB" in message
    assert "state_dict['m']['b']" in message
    lines = [line.strip() for line in message.splitlines() if line.startswith("    ")]
    assert lines[0] == "from dist_checkpointing.interop import shard_state_dict"
    assert lines[1].startswith("save(shard_state_dict(")
    assert dc.load_common_state_dict(tmp_path / "c")["m"]["b"].sum() == 8192


WITHOUT_VALUES: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta device"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "nested",
    ),
}


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_data_that_cannot_be_stored_is_a_finding_before_anything_is_written(
    tmp_path: Path, kind: str
) -> None:
    make, words = WITHOUT_VALUES[kind]
    leaf = shard("w", torch.ones((3,) if kind == "meta" else (3, 3)))
    leaf.data = make()

    def save_rank(comm: Comm) -> None:
        state = {"m": [leaf if comm.rank == 1 else shard("v", torch.ones(2))]}
        dc.save(state, tmp_path / "c", comm=comm)

    error = the_one_error(2, save_rank, dc.InvalidShardingError)
    (finding,) = error.findings
    assert (finding.key, finding.ranks) == ("w", (1,))
    assert finding.remedy
    assert words in str(error)
    assert "state_dict['m'][0]" in str(error)
    assert not (tmp_path / "c").exists()


def test_meta_tensors_in_the_common_state_are_refused_and_sparse_ones_come_back(
    tmp_path: Path,
) -> None:
    meta = {"m": {"w": torch.empty(3, device="meta")}}
    with pytest.raises(dc.InvalidShardingError, match="meta device") as raised:
        dc.save(meta, tmp_path / "c")
    assert raised.value.findings[0].key == "state_dict['m']['w']"
    assert not (tmp_path / "c").exists()
    state = {"rows": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr()}
    run_ranks(2, lambda comm: dc.save(state, tmp_path, comm=comm))
    loaded = dc.load_common_state_dict(tmp_path)
    for name, tensor in state.items():
        assert loaded[name].layout is tensor.layout
        assert torch.equal(loaded[name].to_dense(), torch.eye(3))
