"""Save and load over real processes and gloo; what a rank does is in save_load_rank.py."""

import json
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its stubs

import dist_checkpointing as dc
from real_ranks import processes, run_script, torchrun

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


WORLD_SIZE = 3


def reports_of(
    scenario: str, folder: Path, backend: tuple[str, int], victim: int
) -> list[dict[str, Any] | None]:
    """What each rank saw; None for one that was killed."""
    # Held here, like torchrun's, so that the death of rank 0 does not take it along.
    store = TCPStore("127.0.0.1", 0, WORLD_SIZE, is_master=True, wait_for_workers=False)
    (folder / "reports").mkdir(parents=True)
    command = [SCRIPT, scenario, folder, folder / "reports", *backend]
    commands = [[*command, rank, WORLD_SIZE, store.port, victim] for rank in range(WORLD_SIZE)]
    with processes(commands) as started:
        outputs = [process.communicate(timeout=60)[0] for process in started]
        codes = [process.returncode for process in started]
    expected = [0] * WORLD_SIZE
    if scenario.startswith("killed"):
        expected[victim] = -signal.SIGKILL
    assert codes == expected, "\n".join(outputs)[-5000:]
    paths = [folder / "reports" / f"{rank}.json" for rank in range(WORLD_SIZE)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def assert_holds_everything(folder: Path) -> None:
    tensors = dc.load_plain_tensors(folder)
    assert tensors.keys() == {*RANK["GLOBAL"], "step"}
    for key in RANK["GLOBAL"]:
        assert tensors[key].equal(RANK["whole"](key)), key


def test_a_full_disk_on_one_rank(tmp_path: Path) -> None:
    """All ranks raise the same error; the old checkpoint is whole, and the folder is free."""
    reports = reports_of("full-disk", tmp_path, ("zarr", 2), victim=1)
    assert all(report is not None for report in reports)
    texts = {report["text"] for report in reports if report}
    assert len(texts) == 1
    assert "No space left on device" in texts.pop()
    for report in reports:
        assert report is not None
        assert (report["class"], report["ranks"]) == ("RankFailedError", [1])
        assert not report["committed"]
    assert_holds_everything(tmp_path / "first")
    assert_holds_everything(tmp_path / "second")  # the ranks tried again, and all was well


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "victim"), [(("zarr", 1), 1), (("zarr", 2), 0)])
def test_a_rank_is_killed_while_it_writes(
    tmp_path: Path, backend: tuple[str, int], victim: int
) -> None:
    """The survivors name it and go on; nothing is committed, and nothing is lost."""
    reports = reports_of("killed", tmp_path, backend, victim)
    for rank, report in enumerate(reports):
        if rank == victim:
            assert report is None
            continue
        assert report is not None
        assert (report["class"], report["ranks"]) == ("RankFailedError", [victim]), report
        assert "writing" in report["text"]
        assert not report["committed"]
    assert len({report["text"] for report in reports if report}) == 1
    assert_holds_everything(tmp_path / "first")

    second = tmp_path / "second"
    assert not dc.check_is_distributed_checkpoint(second)
    with pytest.raises(dc.CheckpointNotFoundError, match="not a distributed checkpoint"):
        dc.load_plain_tensors(second)
    # What the dead left behind is no hindrance, and does not show in the next checkpoint.
    state = RANK["state"](0, 1)
    del state["columns"]
    dc.save(state, second, backend)
    tensors = dc.load_plain_tensors(second)
    assert tensors.keys() == {*RANK["GLOBAL"], "step"} - {"columns"}
    for key in RANK["GLOBAL"].keys() - {"columns"}:
        assert tensors[key].equal(RANK["whole"](key)), key
    assert not (second / "columns").exists()
