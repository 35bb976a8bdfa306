"""TorchComm over real processes; what the ranks do is in torch_comm_rank.py."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its stubs

from real_ranks import processes

pytestmark = pytest.mark.timeout(120)

WORLD_SIZE = 3
DEAD = None
SCRIPT = Path(__file__).parent / "torch_comm_rank.py"


def run(scenario: str, place: str, *, timeout_seconds: float = 90) -> list[Any]:
    """The report of each rank, or DEAD for one that died as it was told to."""
    commands = [[SCRIPT, scenario, rank, WORLD_SIZE, place] for rank in range(WORLD_SIZE)]
    reports: list[Any] = []
    with processes(commands, stderr=subprocess.PIPE) as started:
        for process in started:
            out, err = process.communicate(timeout=timeout_seconds)
            assert process.returncode in (0, 3, -signal.SIGKILL), err
            reports.append(json.loads(out.splitlines()[-1]) if process.returncode == 0 else DEAD)
    return reports


@pytest.fixture
def store() -> Any:
    """A store that outlives every rank, as torchrun's does."""
    return TCPStore("127.0.0.1", 0, WORLD_SIZE, is_master=True, wait_for_workers=False)


@pytest.fixture
def place(store: Any) -> str:
    return str(store.port)


def same_error(reports: list[Any], name: str = "error") -> Any:
    """The error of all living ranks, having checked that it is the same on all."""
    errors = [report[name] for report in reports if report is not DEAD]
    for error in errors:
        assert error["class"] == errors[0]["class"], errors
        assert error["text"] == errors[0]["text"], errors
    return errors[0]


def test_healthy_ranks(place: str) -> None:
    reports = run("healthy", place)
    for rank, report in enumerate(reports):
        assert (report["rank"], report["world_size"]) == (rank, 3)
        assert report["all_gather"] == [[[turn, r] for r in range(3)] for turn in range(3)]
        assert report["uneven"] == [100, 1001, 10002]
        assert report["broadcast"] == 7
        assert report["exchange"] == [0, 1, 4]
        assert report["to_rank0"] == ([] if rank else [0, 1, 4])
        long = [[100, ["0"]], [1001, ["1"]], [10002, ["2"]]]
        assert report["long_to_rank0"] == ([] if rank else long)
        assert report["from_rank0"] == "from 0"
        assert report["long_from_rank0"] == 100_000
        assert report["all_same"] == [True, False, False, False, True, True]
        assert report["calls"] == ([0] if rank == 0 else [])
        assert report["after"] == [0, 1, 2]
        assert report["finalized"] == list(range(rank))
        assert report["keys_left"] < 20

    shared = same_error(reports, "shared")
    assert shared["class"] == "CorruptCheckpointError"
    assert shared["ranks"] == [1, 2]
    assert "a.bin" in shared["text"]

    mixed = same_error(reports, "mixed")
    assert mixed["class"] == "RankFailedError"
    assert mixed["ranks"] == [1, 2]
    assert "template" in mixed["text"]
    assert "shards" in mixed["text"]

    for name in ("foreign", "told", "work"):
        foreign = same_error(reports, name)
        assert foreign["class"] == "RankFailedError"
        assert foreign["ranks"] == [2]
        assert "No space left on device é" in foreign["text"]
        assert "in produce" in foreign["text"]
        assert [report[name]["cause"] for report in reports] == ["NoneType", "NoneType", "OSError"]

    assert same_error(reports, "rank0")["class"] == "StateMismatchError"


def test_a_group_whose_ranks_have_other_numbers_in_the_world(tmp_path: Path) -> None:
    reports = run("subgroup", str(tmp_path / "store.port"))
    assert [report["world"] for report in reports] == [[0, 1, 2]] * 3
    assert [report["over gpus only"] for report in reports] == [[0, 1], [0, 1], [2]]
    assert [report["kind"] for report in reports] == ["SingleProcess", "TorchComm", "TorchComm"]
    # Rank 0 has no main replica; of three tensors of 24 bytes the two others share two and one.
    assert sorted(report["written"] for report in reports) == [0, 24, 48]
    assert [report["read"] for report in reports] == [[True] * 3] * 3
    assert [report["rank"] for report in reports[1:]] == [0, 1]
    assert [report["ranks"] for report in reports[1:]] == [[1, 2]] * 2
    assert [report["broadcast"] for report in reports[1:]] == [1, 1]
    error = same_error(reports[1:])
    assert error["ranks"] == [2]
    assert "rank 2" in error["text"]


def test_the_default_comm_lives_as_long_as_the_world(place: str) -> None:
    for report in run("defaults", place):
        assert report["class"] == "TorchComm"
        assert report["cached"]
        assert report["before"] == [0, 1, 2]
        assert report["alone"]
        assert report["remade"]
        assert report["after"] == [0, 1, 2]


@pytest.mark.exhaustive
def test_a_rank_0_that_dies_with_the_store_is_named_by_all(tmp_path: Path) -> None:
    for report in run("dead_host", str(tmp_path / "store.port"))[1:]:
        assert report["error"]["class"] == "RankFailedError", report
        assert report["error"]["ranks"] == [0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", ["killed", "stopped"])
def test_a_dead_rank_is_named_long_before_the_timeout(scenario: str, tmp_path: Path) -> None:
    reports = run(scenario, str(tmp_path / "store.port"), timeout_seconds=110)  # of 1800
    assert reports[2] is DEAD
    assert not any(report.pop("committed", False) for report in reports[:2])
    for name in reports[1]:
        error = same_error(reports, name)
        assert error["class"] == "RankFailedError"
        assert error["ranks"] == [2]
        assert "no sign of life" in error["text"]


@pytest.mark.parametrize("host", ["test", "rank 0"])
def test_the_last_agreement_of_a_program_holds_for_all(
    host: str, place: str, tmp_path: Path
) -> None:
    reports = run("done", place if host == "test" else str(tmp_path / "store.port"))
    assert [report["error"]["class"] for report in reports] == [None] * 3, reports


@pytest.mark.exhaustive
def test_the_others_fail_and_end_while_the_rank_that_holds_the_store_is_stopped(
    tmp_path: Path,
) -> None:
    place = tmp_path / "store.port"
    commands = [[SCRIPT, "stopped_host", rank, WORLD_SIZE, place] for rank in range(WORLD_SIZE)]
    reports = []
    with processes(commands, stderr=subprocess.PIPE, is_fresh=True) as started:
        for process in started[1:]:
            out, err = process.communicate(timeout=100)  # the timeout of the ranks is longer
            assert process.returncode == 0, err
            reports.append(json.loads(out.splitlines()[-1]))
    error = same_error(reports)
    assert error["class"] == "RankFailedError"
    assert error["ranks"] == [0]
    assert "does not answer" in error["text"]


def test_ranks_that_make_different_calls_are_told_so(tmp_path: Path) -> None:
    reports = run("different_calls", str(tmp_path / "store"))
    for number, words in enumerate(
        [("save (", "load (", "torch_comm_rank.py:"), ("'commit'", "all_gather ("), ("all_same (",)]
    ):
        errors = [report["errors"][number] for report in reports]
        assert {error["text"] for error in errors} == {errors[0]["text"]}
        assert errors[0]["class"] == "CheckpointingException"
        assert "ranks call different functions" in errors[0]["text"]
        assert "; ranks 0, 2" in errors[0]["text"]
        assert "; rank 1." in errors[0]["text"]
        for word in words:
            assert word in errors[0]["text"]
    assert [report["after"] for report in reports] == [[0, 1, 2]] * 3
    assert not any(report["committed"] for report in reports)


def test_a_timeout_that_is_none_is_refused(place: str) -> None:
    for report in run("nonsense_for_a_timeout", place):
        assert report.pop("kept") == 60  # as in init_process_group
        assert report.pop("group") == 12
        assert report.pop("torch's default") == 1800
        for given, text in report.items():
            assert "must be a number of seconds above 0" in text, given
            assert given.startswith("a") or "DIST_CHECKPOINTING_TIMEOUT_SECONDS" in text, given


def test_timeouts_threads_and_forks(tmp_path: Path) -> None:
    for rank, report in enumerate(run("chosen_timeouts+two_threads+forked", str(tmp_path / "s"))):
        chosen = {"variable": 33.5, "argument": 44, "kept": 44, "duplicate": 44, "group": 44}
        assert report["chosen_timeouts"] == chosen
        threads = report["two_threads"]
        assert threads["gathered"] == [0, 1, 2]
        if rank == 0:
            assert "two threads" in threads["refused"]["text"]
        made, used, alone = report["forked"]["child"]
        assert made["class"] == used["class"] == "CheckpointingException"
        assert "spawn" in made["text"]
        assert "spawn" in used["text"]
        assert alone["class"] is None
        assert report["forked"]["after"] == [0, 1, 2]


@pytest.mark.exhaustive
def test_a_late_rank_hears_that_it_was_given_up_and_may_go_on(place: str) -> None:
    reports = run("late", place)
    error = same_error(reports)
    assert error["class"] == "RankFailedError"
    assert error["ranks"] == [2]
    assert [report["next"] for report in reports] == [{"class": None, "value": [0, 1, 2]}] * 3
    assert [report["all_same"] for report in reports] == [[True, False, False]] * 3


def test_a_value_that_cannot_travel_fails_on_all_ranks_at_once(place: str) -> None:
    reports = run("unpicklable", place)
    error = same_error(reports)
    assert error["class"] == "RankFailedError"
    assert error["ranks"] == [1]
