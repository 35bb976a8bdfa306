"""Tensors removed from a checkpoint in an object store: as from one on a disk, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm
from dist_checkpointing.errors import CheckpointExistsError, UnsupportedFormatError
from dist_checkpointing.filesystem import ObjectPath
from dist_checkpointing.format import StoreAttempt
from dist_checkpointing.manager import Retention
from dist_checkpointing.testing import run_ranks
from faults import kill_points, store_down, store_requests
from samples import Run
from store_saves import PERIOD
from stores import copied_up, data_url, new_url

BACKENDS = ("tensorstore", "zarr")
# Large ones with files of their own, and small ones that share files.
SIZES = {"model.w": 2**16, "model.b": 8, "optimizer.w": 2**16, "optimizer.b": 8, "opt": 4}


def values() -> dict[str, torch.Tensor]:
    return {
        key: torch.arange(size, dtype=torch.float32) + number
        for number, (key, size) in enumerate(SIZES.items())
    }


def state(comm: Comm) -> dict[str, Any]:
    own: dict[str, Any] = {
        key: dc.ShardedTensor.from_rank_offsets(key, full.chunk(2)[comm.rank], (0, comm.rank, 2))
        for key, full in values().items()
    }
    own["rng"] = dc.ShardedObject("optimizer.rng", {"rank": comm.rank}, (2,), (comm.rank,))
    return {**own, "step": 3}


def saved(backend: str, place: Any = None) -> Any:
    place = new_url() if place is None else place
    run_ranks(2, lambda comm: dc.save(state(comm), place, backend, comm=comm))
    return place


def require(place: Any, *, is_removed: bool) -> None:
    """All that must be there has the bits that were saved, and the rest is gone."""
    dc.verify_checkpoint(place)
    opened = dc.Checkpoint.open(place)
    kept = {k: v for k, v in values().items() if not (is_removed and k.startswith("optimizer."))}
    assert set(opened) == set(kept)
    for key, value in kept.items():
        assert torch.equal(opened[key][...], value), key
    assert [opened.objects["optimizer.rng"][cell] for cell in range(2)] == [
        {"rank": 0},
        {"rank": 1},
    ]
    assert opened.common["step"] == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_goes_as_on_a_disk(backend: str, dckpt: Run, tmp_path: Any) -> None:
    url, folder = saved(backend), saved(backend, tmp_path / "c")
    plans = [dckpt("rm-prefix", p, "optimizer.", "-n", "--json").json for p in (url, folder)]
    assert plans[0]["keys"] == plans[1]["keys"] == ["optimizer.b", "optimizer.w"]
    assert len(plans[0]["files"]) == len(plans[1]["files"]) > 0
    assert plans[0]["num_bytes"] == plans[1]["num_bytes"]
    require(url, is_removed=False)
    done = dckpt("rm-prefix", url, "optimizer.", "--yes", "--json").json
    assert done["removed"]
    assert done["bytes_freed"] > 2**18 - 2**15
    require(url, is_removed=True)
    again = dckpt("rm-prefix", url, "optimizer.", "--yes")
    assert again.code == 2
    assert "no tensor in" in again.err


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_store_copies_the_values_by_itself(backend: str, s3_place: ObjectPath) -> None:
    saved(backend, s3_place)
    before = data_url(s3_place)
    fetched: list[int] = []

    def noting(name: str, _: str, go: Any) -> Any:
        answer = go()
        fetched.append(answer.meta["size"] if name.startswith("get") else 0)
        return answer

    with store_requests(noting):
        dc.remove_sharded_tensors(s3_place, "optimizer.")
    assert sum(fetched) < 2**16  # far less than the 256 KiB that stay
    assert data_url(s3_place) != before
    require(s3_place, is_removed=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_removal_that_is_killed_at_any_request(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process lives on, so its claim is watched for three of these.
    defaults: dict[str, Any] = vars(StoreAttempt)["begin"].__func__.__kwdefaults__
    monkeypatch.setitem(defaults, "period", PERIOD)
    at: dict[str, Any] = {}

    def prepare() -> None:
        at["url"] = saved(backend)

    seen = set()
    for point in kill_points(lambda: dc.remove_sharded_tensors(at["url"], "optimizer."), prepare):
        is_removed = "optimizer.w" not in dc.Checkpoint.open(at["url"])
        seen.add(is_removed)
        require(at["url"], is_removed=is_removed)
        dc.remove_sharded_tensors(at["url"], "optimizer.")
        require(at["url"], is_removed=True)
        place = ObjectPath.of(at["url"])
        if not is_removed:
            assert len(place.store.list_folder((place / "data").prefix)[0]) == 1, point
    assert seen == {False, True}


def test_a_store_that_fails_leaves_the_checkpoint() -> None:
    url = saved("tensorstore")
    with (
        store_down(at=lambda name, _: name == "copy"),
        pytest.raises(Exception, match="server is on fire"),
    ):
        dc.remove_sharded_tensors(url, "optimizer.")
    require(url, is_removed=False)
    dc.remove_sharded_tensors(url, "optimizer.")
    require(url, is_removed=True)


def test_a_removal_stays_away_from_a_save_and_from_what_is_not_ours(tmp_path: Any) -> None:
    url = saved("tensorstore")
    attempt = StoreAttempt.begin(ObjectPath.of(url), ["x"], overwrite=True, period=PERIOD)
    with pytest.raises(CheckpointExistsError, match="in use"):
        dc.remove_sharded_tensors(url, "optimizer.")
    attempt.abandon()
    require(url, is_removed=False)
    of_dcp = saved("torch_dist")
    with pytest.raises(UnsupportedFormatError, match="dckpt convert"):
        dc.remove_sharded_tensors(of_dcp, "optimizer.")
    require(of_dcp, is_removed=False)
    # Its commit has no claim, as if it had been written by hand.
    copied = copied_up(saved("tensorstore", tmp_path / "c"), new_url())
    dc.remove_sharded_tensors(copied, "optimizer.")
    require(copied, is_removed=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_manager_drops_the_optimizer_of_older_steps(backend: str) -> None:
    root = new_url()

    def train(comm: Comm) -> None:
        kept = Retention(keep_last=3, drop_optimizer_after=1, optimizer_prefix="optimizer.")
        with dc.CheckpointManager(root, backend, comm=comm, retention=kept) as manager:
            for step in (1, 2, 3, 4):
                manager.save(step, state(comm))

    run_ranks(2, train)
    for step in (2, 3):
        require(f"{root}/step-{step:08d}", is_removed=True)
    require(f"{root}/step-00000004", is_removed=False)
    place = ObjectPath.of(root)
    record = json.loads(place.store.get((place / "manager.json").key))
    assert {step: known["stripped"] for step, known in record["steps"].items()} == {
        "2": True,
        "3": True,
        "4": False,
    }
