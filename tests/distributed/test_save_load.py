"""Save and load over real processes and gloo; what a rank does is in save_load_rank.py."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

import dist_checkpointing as dc
from real_ranks import run_script, torchrun

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).parent / "save_load_rank.py"
RANK = runpy.run_path(str(SCRIPT))

Checkpoints = Callable[[int], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """World size -> a folder with a checkpoint of each backend, saved by that many processes."""
    folders: dict[int, Path] = {}

    def folder(world_size: int) -> Path:
        if world_size not in folders:
            folders[world_size] = tmp_path_factory.mktemp(f"saved-by-{world_size}")
            reports = folders[world_size] / "reports"
            # Once as a user starts ranks.
            start = torchrun if world_size == 2 else run_script
            arguments = ("save", folders[world_size])
            start(world_size, SCRIPT, *arguments, reports=reports, timeout_seconds=60)
        return folders[world_size]

    return folder


@pytest.mark.parametrize(("save_world", "load_world"), [(2, 4), (3, 2)])
def test_other_numbers_of_processes(
    saved: Checkpoints, tmp_path: Path, save_world: int, load_world: int
) -> None:
    arguments = ("load", saved(save_world))
    reports = tmp_path / "reports"
    wrong = run_script(load_world, SCRIPT, *arguments, reports=reports, timeout_seconds=60)
    assert wrong == [[]] * load_world


@pytest.mark.parametrize("save_world", [2, 3])
def test_one_plain_process(saved: Checkpoints, save_world: int) -> None:
    """Without any process group."""
    folder = saved(save_world)
    assert RANK["load_all"](folder, 0, 1) == []
    for backend, version in RANK["BACKENDS"]:
        tensors = dc.load_plain_tensors(folder / f"{backend}-{version}")
        assert tensors.keys() == {*RANK["GLOBAL"], "step"}
        for key in RANK["GLOBAL"]:
            assert tensors[key].equal(RANK["whole"](key)), (backend, version, key)
