"""torch DCP over real processes and gloo; what a rank does is in dcp_rank.py."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from dist_checkpointing import load_common_state_dict, load_plain_tensors
from dist_checkpointing.interop import DCPReader
from real_ranks import run_script

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).parent / "dcp_rank.py"
RANK = runpy.run_path(str(SCRIPT))


def launch(world_size: int, scenario: str, checkpoints: Path, reports: Path) -> list[Any]:
    return run_script(
        world_size, SCRIPT, scenario, checkpoints, reports=reports, timeout_seconds=180
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of four ranks, who have read them again themselves."""
    folder = tmp_path_factory.mktemp("saved")
    assert launch(4, "save", folder, folder / "reports") == [[]] * 4
    return folder


def test_two_ranks_with_other_placements(saved: Path, tmp_path: Path) -> None:
    assert launch(2, "load", saved, tmp_path / "reports") == [[]] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_one_plain_process(saved: Path) -> None:
    for name in RANK["FOLDERS"]:
        tensors = load_plain_tensors(saved / name)
        found = {"model": {key: torch.zeros_like(RANK["whole"](key)) for key in RANK["SHAPES"]}}
        dcp_load(found, storage_reader=DCPReader(saved / name))
        for key in RANK["SHAPES"]:
            expected = RANK["whole"](key)
            assert torch.equal(tensors[f"model.{key}"], expected), (name, key)
            assert torch.equal(found["model"][key], expected), (name, key)
    for name, version in RANK["BACKENDS"]:  # where one rank alone had a value
        common = load_common_state_dict(saved / f"{name}-{version}")
        assert (common["last"], common["step"]) == (3, 17), name
    # What torch's own storage wrote; it notes other offsets for one of them than its data has.
    tensors = load_plain_tensors(saved / "files")
    for key in RANK["SHAPES"].keys() - {"fsdp over tp"}:
        assert torch.equal(tensors[f"model.{key}"], RANK["whole"](key)), key
