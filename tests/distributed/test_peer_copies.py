"""Copies at peers with real processes: eight ranks as four machines, in front of a mock of S3."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from dist_checkpointing import ObjectPath
from real_ranks import ranks, run_script

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).parent / "peer_copies_rank.py"
MACHINES = ("a", "b", "c", "d")


def run(
    scenario: str, place: ObjectPath, folder: Path, machines: tuple[str, ...] = MACHINES
) -> Any:
    """What each rank reports; nothing if they are killed."""
    endpoint = place.store.options.endpoint
    reports = folder / f"{scenario}-{'-'.join(machines)}"
    arguments = (scenario, place, endpoint, folder / "disks", ",".join(machines))
    world_size = 2 * len(machines)
    if scenario != "killed":
        return run_script(world_size, SCRIPT, *arguments, reports=reports, timeout_seconds=120)
    with ranks(world_size, [SCRIPT, *arguments, reports]) as started:
        outputs = [process.communicate(120)[0] for process in started]
    assert [process.returncode for process in started] == [-9] * world_size, outputs
    return None


def test_a_lost_machine_costs_no_read_of_the_store(tmp_path: Path, s3_place: ObjectPath) -> None:
    """The one with rank 0, and the last one, whose copies are on the first."""
    run("train", s3_place, tmp_path)
    shutil.copytree(tmp_path / "disks", tmp_path / "before")
    for lost in (MACHINES[0], MACHINES[-1]):
        shutil.rmtree(tmp_path / "disks")
        shutil.copytree(tmp_path / "before", tmp_path / "disks")
        shutil.rmtree(tmp_path / "disks" / lost)
        left = tuple(name for name in MACHINES if name != lost)
        assert run("load", s3_place, tmp_path, left) == [{"value": 20, "read": []}] * 6
        assert run("load", s3_place, tmp_path) == [{"value": 20, "read": []}] * 8


def test_a_step_that_no_store_has_survives_a_killed_machine(
    tmp_path: Path, s3_place: ObjectPath
) -> None:
    run("killed", s3_place, tmp_path)
    shutil.rmtree(tmp_path / "disks" / "b")
    found = run("load", s3_place, tmp_path, ("a", "c", "d"))
    assert [report["value"] for report in found] == [20] * 6
