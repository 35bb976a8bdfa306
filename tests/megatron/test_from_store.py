"""Megatron's own package reads what was downloaded from an object store, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_checkpointing import ObjectPath, ShardedObject, ShardedTensor, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.format import data_folder
from dist_checkpointing.testing import random_bits, run_ranks
from real_ranks import run_script

FOLDERS = [Path(folder) for folder in os.environ.get("MEGATRON_CORE", "").split(":") if folder]
SCRIPT = Path(__file__).with_name("store_rank.py")


@pytest.mark.skipif(not FOLDERS, reason="megatron-core is missing: make test-megatron installs it")
@pytest.mark.parametrize("megatron", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.timeout(300)
def test_a_downloaded_checkpoint(megatron: Path, s3_place: ObjectPath, tmp_path: Path) -> None:
    weight, moment = random_bits((8, 6), torch.bfloat16), random_bits((8, 6), torch.float32)

    def state(comm: Comm) -> dict[str, Any]:
        def rows(key: str, full: torch.Tensor) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(key, full.chunk(4)[comm.rank], (0, comm.rank, 4))

        own: dict[str, Any] = {
            "weight": rows("layer.weight", weight),
            "moment": rows("optimizer.moment", moment),
            "step": 7,
        }
        if comm.rank < 2:
            own["extra"] = ShardedObject("extra", {"rank": comm.rank}, (2,), (comm.rank,))
        return own

    run_ranks(4, lambda comm: save(state(comm), s3_place, "torch_dist", comm=comm))
    place, folder = data_folder(s3_place), tmp_path / "downloaded"
    assert isinstance(place, ObjectPath)
    for info in place.store.list_below(place.prefix):  # as aws s3 sync does
        path = folder / info.key.removeprefix(place.prefix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(place.store.get(info.key))
    reports = run_script(
        2, SCRIPT, megatron.absolute(), folder, reports=tmp_path / "reports", timeout_seconds=250
    )
    for rank, found in enumerate(reports):
        assert found["weight"] == weight.chunk(2, 1)[rank].view(torch.int16).tolist()
        assert found["moment"] == moment.chunk(2, 1)[rank].view(torch.int32).tolist()
        assert (found["extra"], found["step"]) == ({"rank": rank}, 7)
