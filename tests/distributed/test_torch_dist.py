"""torch DCP and ("torch_dist", 1) over real processes; what a rank does: torch_dist_rank.py."""

import runpy
from pathlib import Path

import pytest
import torch

from dist_checkpointing import load_common_state_dict, load_plain_tensors, load_sharded_metadata
from real_ranks import run_script

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).parent / "torch_dist_rank.py"
RANK = runpy.run_path(str(SCRIPT))


def launch(world_size: int, steps: str, checkpoints: Path, reports: Path) -> None:
    """Run scenarios on so many ranks, none of which may find anything wrong."""
    wrong = run_script(world_size, SCRIPT, steps, checkpoints, reports=reports, timeout_seconds=60)
    assert wrong == [[]] * world_size


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One by us, one of DTensors by DCP, and one of our shards by DCP, saved by three ranks."""
    folder = tmp_path_factory.mktemp("saved-by-3")
    steps = "we_save=ours,dcp_saves=dcp,dcp_saves_ours=mixed"
    launch(3, steps, folder, folder / "reports")
    return folder


def assert_whole(folder: Path, prefix: str = "") -> None:
    tensors = load_plain_tensors(folder)
    for key, full in RANK["FULL"].items():
        found = tensors[f"{prefix}{key}"]
        assert found.dtype == full.dtype
        assert torch.equal(found.view(torch.uint8), full.view(torch.uint8)), key


def test_two_ranks_load_each_others_checkpoints(checkpoints: Path, tmp_path: Path) -> None:
    steps = "dcp_loads=ours,we_load=ours,we_load_dcp=dcp,dcp_loads=mixed,we_load=mixed"
    launch(2, steps, checkpoints, tmp_path / "reports")


def test_one_plain_process_loads_all_of_them(checkpoints: Path) -> None:
    assert_whole(checkpoints / "ours")
    assert_whole(checkpoints / "dcp", "model.")
    assert_whole(checkpoints / "mixed")
    common = load_common_state_dict(checkpoints / "dcp")
    assert common == {"step": 3, "optim": {"lr": [0.1, 0.2]}}
    objects = {f"rng/shard_{rank}_3" for rank in range(3)}
    listed = load_sharded_metadata(checkpoints / "ours")
    assert listed.keys() == RANK["FULL"].keys() | objects
