"""Both commit protocols, in every interleaving of a few processes that stop, die and go on.

A model with a fault shows what each step is for; docs/design/013-models.md lists them.
"""

import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import folder_commit
import pytest
import store_commit
from explorer import Explored, explore, shortest_way
from folder_commit import folder_model
from folder_traces import first_impossible, folder_trace
from run_record import record_model
from store_commit import store_model
from traces import first_departure, traced

from dist_checkpointing import CheckpointingException, ObjectPath
from dist_checkpointing.filesystem.location import read_bytes
from dist_checkpointing.format import StoreAttempt, data_folder
from dist_checkpointing.format.removal import remove_from_store
from faults import without_waiting
from store_saves import CONFIG, put

AB, ABC = ("A", "B"), ("A", "B", "C")


def minutes(*arguments: Any) -> Any:
    return pytest.param(*arguments, marks=pytest.mark.exhaustive)


def holds(seen: Explored, least_states: int, *ends: str) -> bool:
    """Whether nothing was wrong, enough was looked at, and all these ends were seen together."""
    assert seen.problem is None, shortest_way(seen)
    assert seen.states >= least_states
    return any({*ends} <= {*together} for together in seen.ends)


@pytest.mark.parametrize(
    ("saves", "options", "least_states"),
    [
        (AB, {"overwrite": False}, 2_000),
        (AB, {"overwrite": True}, 5_000),
        (AB, {"overwrite": True, "late": ("A",)}, 10_000),
        minutes(AB, {"overwrite": False, "has_removal": True}, 50_000),
        minutes(ABC, {"overwrite": False}, 40_000),
        minutes(ABC, {"overwrite": True}, 150_000),
    ],
)
def test_a_folder(saves: tuple[str, ...], options: dict[str, Any], least_states: int) -> None:
    seen = explore(folder_model(saves, **options))
    assert holds(seen, least_states, "committed", "dead")


@pytest.mark.parametrize(
    ("saves", "fault", "problem"),
    [
        (AB, "without_excl", "dir/b is A in the checkpoint of B"),
        (AB, "without_flock", "is None in the checkpoint of"),
        (AB, "commit_before_data", "is None in the checkpoint of"),
        (AB, "clear_before_end", "is None in the checkpoint of"),
        (AB, "reader_looks_once", "read a mixture"),
        minutes(ABC, "reader_forgets_commit", "read a mixture"),
        minutes(ABC, "without_second_look", "is None in the checkpoint of"),
    ],
)
def test_what_each_step_in_a_folder_is_for(
    saves: tuple[str, ...], fault: str, problem: str
) -> None:
    faults = folder_commit.Faults(**{fault: True})
    seen = explore(folder_model(saves, overwrite=True, late=("A",), faults=faults))
    assert seen.problem is not None
    assert problem in seen.problem
    assert shortest_way(seen).count("\n") == len(seen.trace)


@pytest.mark.parametrize(
    ("saves", "options", "least_states"),
    [
        (AB, {"overwrite": False}, 2_000),
        (AB, {"overwrite": True}, 3_000),
        (("A",), {"overwrite": True, "removals": ("R",)}, 1_000),
    ],
)
def test_a_store(saves: tuple[str, ...], options: dict[str, Any], least_states: int) -> None:
    seen = explore(store_model(saves, **options))
    assert holds(seen, least_states, "committed", "dead")


@pytest.mark.parametrize(
    ("saves", "removals", "fault", "problem"),
    [
        (AB, (), "commit_is_replaced", "came to light again"),
        (AB, (), "clears_before_ending", "has lost its data"),
        (AB, (), "lists_data_after_claim", "has lost its data"),
        (AB, (), "without_second_list", "has lost its data"),
        (("A",), ("R",), "without_fences", "has lost its data"),
        (("A",), ("R",), "removes_what_was_listed", "has lost its data"),
        minutes(AB, ("R",), "removes_last_commit_first", "came to light again"),
    ],
)
def test_what_each_step_in_a_store_is_for(
    saves: tuple[str, ...], removals: tuple[str, ...], fault: str, problem: str
) -> None:
    faults = store_commit.Faults(**{fault: True})
    seen = explore(store_model(saves, overwrite=True, removals=removals, faults=faults))
    assert seen.problem is not None
    assert problem in seen.problem


def save(location: ObjectPath, *, overwrite: bool) -> None:
    with suppress(CheckpointingException):
        attempt = StoreAttempt.begin(location, ["x.bin"], overwrite=overwrite)
        try:
            put(attempt.folder / "x.bin", attempt.id.encode())
            attempt.commit(CONFIG)
        except CheckpointingException:
            attempt.abandon()


def read(location: ObjectPath) -> None:
    data = data_folder(location)
    if data != location:
        with suppress(FileNotFoundError):
            read_bytes(data / "x.bin", 100)


def remove(location: ObjectPath) -> None:
    with suppress(CheckpointingException):
        remove_from_store(location)


def trace_of(seed: int, removals: tuple[str, ...]) -> list[tuple[str, str]]:
    """Three saves, a reader and perhaps a removal by the real code, in an order of its own."""
    location = ObjectPath.of(f"memory://{uuid.uuid4().hex}/run/1000")
    work: dict[str, Callable[[], object]] = {
        name: lambda: save(location, overwrite=seed % 2 == 1) for name in ABC
    }
    work |= {name: lambda: remove(location) for name in removals}
    work["reader"] = lambda: read(location)
    with without_waiting():
        save(location.parent / "900", overwrite=False)  # which puts its claim twice
        return traced(location, work, seed, kills=seed % 4)


def model_of(seed: int, removals: tuple[str, ...], **faults: bool) -> Any:
    planted = store_commit.Faults(**faults)
    return store_model(ABC, overwrite=seed % 2 == 1, removals=removals, faults=planted)


def check_traces(seeds: range) -> None:
    for seed in seeds:
        removals = ("R",) if seed % 3 == 0 else ()
        events = trace_of(seed, removals)
        assert len(events) > 5
        departure = first_departure(model_of(seed, removals), events)
        assert departure is None, f"seed {seed}: {departure}"


def test_what_the_code_asks_of_a_store_is_a_path_of_the_model() -> None:
    check_traces(range(40))


@pytest.mark.exhaustive
def test_many_paths() -> None:
    check_traces(range(40, 1000))


def test_the_code_does_not_follow_a_protocol_without_a_step() -> None:
    """Or the test before this would see nothing."""
    found = [
        first_departure(model_of(seed, (), without_second_list=True), trace_of(seed, ()))
        for seed in range(5)
    ]
    assert all(departure and "lists claims" in departure for departure in found)


def folder_departure(seed: int, **faults: bool) -> str | None:
    """Where three real saves into a folder leave the model; None if they do not."""
    overwrite = seed % 2 == 1
    events = folder_trace(seed, ABC, overwrite=overwrite, kill=(seed * 7) % 150)
    assert len(events) > 1
    planted = folder_commit.Faults(**faults)
    return first_impossible(folder_model(ABC, overwrite=overwrite, faults=planted), events)


@pytest.mark.parametrize("seeds", [range(6), minutes(range(6, 15))], ids=str)
def test_what_the_code_does_to_a_folder_is_a_path_of_the_model(seeds: range) -> None:
    for seed in seeds:
        departure = folder_departure(seed)
        assert departure is None, f"seed {seed}: {departure}"


def test_a_folder_is_not_saved_into_by_a_protocol_without_a_step() -> None:
    assert any(folder_departure(seed, commit_before_data=True) for seed in range(3))
    assert any(folder_departure(seed, clear_before_end=True) for seed in range(1, 12, 2))


@pytest.mark.parametrize(
    ("changes", "least_states"),
    [({"A": 2, "B": 1}, 30_000), minutes({"A": 2, "B": 2}, 200_000)],
)
def test_the_record_of_a_run_loses_no_change(changes: dict[str, int], least_states: int) -> None:
    seen = explore(record_model(changes))
    assert seen.problem is None, shortest_way(seen)
    assert seen.states >= least_states


@pytest.mark.parametrize(
    ("fault", "changes"),
    [
        ("the claim is moved", {"A": 1, "B": 1, "C": 1}),
        ("no second look", {"A": 2, "B": 1}),
        ("names after the version", {"A": 2, "B": 1}),
    ],
)
def test_what_each_step_of_the_record_is_for(fault: str, changes: dict[str, int]) -> None:
    seen = explore(record_model(changes, fault))
    assert seen.problem is not None
    assert "was written, and is lost" in seen.problem
