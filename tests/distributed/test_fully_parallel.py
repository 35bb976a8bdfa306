"""Four gloo processes that hold replicas: who writes and reads how much, and that it is right."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from dist_checkpointing import load_plain_tensors
from real_ranks import run_script

pytestmark = pytest.mark.timeout(150)

SCRIPT = Path(__file__).parent / "fully_parallel_rank.py"
RANK = runpy.run_path(str(SCRIPT))
UNIQUE = RANK["unique_bytes"]()

Run = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The checkpoints, and what each rank reports."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    reports = tmp_path_factory.mktemp("reports")
    return checkpoints, run_script(4, SCRIPT, checkpoints, reports=reports, timeout_seconds=90)


CASES = pytest.mark.parametrize("case", RANK["CASES"])


@pytest.mark.parametrize("case", ["replicas", "pairs"])
def test_all_write_alike(run: Run, case: str) -> None:
    written = [report["written"][case] for report in run[1]]
    assert sum(written) == UNIQUE
    assert max(written) <= 1.05 * sum(written) / 4


def test_a_rank_in_no_group_writes_its_own(run: Run) -> None:
    written = [report["written"]["partial"] for report in run[1]]
    assert sum(written) == UNIQUE
    assert written[3] == 0  # which is nothing: no main replica is there
    assert max(written) <= 1.05 * sum(written) / 3


@CASES
def test_checkpoints_are_whole(run: Run, case: str) -> None:
    tensors = load_plain_tensors(run[0] / case)
    assert tensors.keys() == RANK["SHAPES"].keys()
    for key in tensors:
        assert tensors[key].equal(RANK["whole"](key)), key


@pytest.mark.parametrize(
    ("case", "algorithm"), [(c, a) for c, (_, used) in RANK["CASES"].items() for a in used]
)
def test_every_byte_is_read_once(run: Run, case: str, algorithm: str) -> None:
    read = [report["read"][f"{case}-{algorithm}"] for report in run[1]]
    if case == "partial":
        assert read.pop() == UNIQUE  # rank 3 shares with nobody
    assert sum(read) == UNIQUE
    assert max(read) <= 1.05 * sum(read) / len(read)


def test_what_is_loaded_is_right(run: Run) -> None:
    assert [report["wrong"] for report in run[1]] == [[]] * 4


def test_one_broken_disk_is_heard_of_by_all(run: Run) -> None:
    texts = {report["failure"]["text"] for report in run[1]}
    assert len(texts) == 1
    assert "broken disk" in texts.pop()
    assert all(report["failure"]["ranks"] == [3] for report in run[1])


def test_groups_of_all_kinds(run: Run) -> None:
    three = [0, 2, 3]
    assert [report["over gpus only"] for report in run[1]] == [three, [1], three, three]
    assert [report["outside"] for report in run[1]] == ["TorchComm"] * 3 + ["SingleProcess"]
