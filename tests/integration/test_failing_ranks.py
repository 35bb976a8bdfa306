"""One rank fails, at any step: all raise the same, and no checkpoint that was good is worse off."""

import errno
import functools
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from damage import files_in
from dist_checkpointing import save
from dist_checkpointing.comm import Comm, ThreadComm
from dist_checkpointing.filesystem import LOCK_NAME
from dist_checkpointing.planning import DefaultLoadPlanner, DefaultSavePlanner
from dist_checkpointing.strategies import (
    TorchCommonSaveStrategy,
    Zarr3LoadShardedStrategy,
    Zarr3SaveShardedStrategy,
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
)
from dist_checkpointing.testing import run_ranks
from faults import failing, full_disk, path_of
from simulated_groups import the_one_error
from states import BACKEND, at_step, between, save_on, shard

FORMAT = pytest.mark.parametrize("version", [1, 2], ids=["zarr1", "zarr2"])
SAVERS: dict[int, Any] = {1: ZarrSaveShardedStrategy, 2: Zarr3SaveShardedStrategy}
LOADERS: dict[int, Any] = {1: ZarrLoadShardedStrategy, 2: Zarr3LoadShardedStrategy}
RANKS = 3


def state(rank: int, name: str = "w", factor: float = 1.0) -> dict[str, Any]:
    """Tensors (one on a grid, one uneven), an object, and common state."""
    even = torch.arange(6.0).reshape(2, 3) * factor + 10 * rank
    uneven = torch.arange(9.0) * factor
    return {
        "even": shard(f"{name}.even", even, (0, rank, RANKS)),
        "uneven": between(f"{name}.uneven", uneven, *((0, 1), (1, 4), (4, 9))[rank]),
        "object": dc.ShardedObject(f"{name}.object", [rank, factor], (RANKS,), (rank,)),
        "step": factor,
    }


def save_state(folder: Path, version: int, **options: Any) -> None:
    save_on(RANKS, lambda comm: state(comm.rank, **options), folder, ("zarr", version))


def check_state(folder: Path, **options: Any) -> None:
    """The checkpoint holds exactly ``state(..., **options)``."""
    expected = [state(rank, **options) for rank in range(RANKS)]
    metadata = dc.load_sharded_metadata(folder)
    name = options.get("name", "w")
    keys = {f"{name}.even", f"{name}.uneven"}
    assert set(metadata) == keys | {f"{name}.object/shard_{rank}_3" for rank in range(RANKS)}

    def load_rank(comm: Comm) -> None:
        template = state(comm.rank, options.get("name", "w"), -1.0)
        loaded: Any = dc.load(template, folder, comm=comm)
        for part in ("even", "uneven"):
            assert torch.equal(loaded[part], expected[comm.rank][part].data)
        assert loaded["object"] == expected[comm.rank]["object"].data
        assert loaded["step"] == expected[comm.rank]["step"]

    run_ranks(RANKS, load_rank)


@dataclass
class Fault:
    """Raises at one step of one rank."""

    step: str
    rank: int
    error: Callable[[], BaseException] = lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def at(self, step: str, rank: int) -> None:
        if (step, rank) == (self.step, self.rank):
            raise self.error()


def failing_kind(kind: Any, methods: str, fault: Fault, rank: int) -> Any:
    """A subclass whose methods may fail before and after their work."""

    def failing_method(name: str) -> Callable[..., Any]:
        real = getattr(kind, name)

        @functools.wraps(real)
        def call(*arguments: Any, **options: Any) -> Any:
            fault.at(name, rank)
            result = real(*arguments, **options)
            fault.at(f"{name}, after", rank)
            return result

        return call

    return type("Failing", (kind,), {name: failing_method(name) for name in methods.split()})


PLANNING = "build_local_plan build_global_plan finalize_plan get_data"
WRITING = """set_up_storage_writer prepare_local_plan prepare_global_plan write_data finish
    created_names"""
COMMON = "save_common save_sharded_objects"


def failing_saver(fault: Fault, version: int, rank: int) -> Any:
    planner = failing_kind(DefaultSavePlanner, PLANNING, fault, rank)()
    strategy = SAVERS[version](planner=planner)
    strategy.writer_type = failing_kind(strategy.writer_type, WRITING, fault, rank)
    strategy.make_writer = strategy.writer_type
    return strategy


def save_with(fault: Fault, folder: Path, version: int, comm: Comm, **options: Any) -> None:
    """Save ``state(..., name="failed")`` with strategies that fail as told."""
    strategy = failing_saver(fault, version, comm.rank)
    common = failing_kind(TorchCommonSaveStrategy, COMMON, fault, comm.rank)()
    wanted = state(comm.rank, "failed")

    def build(key: str, data: Any, *_: Any) -> Any:
        fault.at("building a factory", comm.rank)
        return shard(key, data, replica_id=comm.rank)

    wanted["factory"] = dc.ShardedTensorFactory("failed.factory", torch.ones(2), build, lambda x: x)
    save(wanted, folder, strategy, common, comm=comm, **options)


BEFORE_CLAIM = [
    ("building a factory", 1),
    ("build_local_plan", 1),
    ("build_local_plan", 2),
    ("build_global_plan", 0),
    ("build_global_plan", 2),
    ("finalize_plan", 1),
    ("created_names", 0),
]
AFTER_CLAIM = [
    ("save_common", 0),
    ("save_common, after", 0),
    ("save_sharded_objects", 1),
    ("save_sharded_objects, after", 0),
    ("set_up_storage_writer", 2),
    ("prepare_local_plan", 1),
    ("prepare_global_plan", 0),
    ("write_data", 2),
    ("get_data", 1),
    ("write_data, after", 1),
    ("write_data, after", 0),
    ("finish", 0),
    ("finish, after", 0),
]


def each_step(steps: list[tuple[str, int]]) -> pytest.MarkDecorator:
    """Each step once, with the formats by turns."""
    rows = [(step, rank, 1 + number % 2) for number, (step, rank) in enumerate(steps)]
    ids = [f"{step} on rank {rank}" for step, rank in steps]
    return pytest.mark.parametrize(("step", "rank", "version"), rows, ids=ids)


@each_step(BEFORE_CLAIM + AFTER_CLAIM)
def test_all_ranks_raise_the_same_and_an_old_checkpoint_is_left_or_none(
    tmp_path: Path, version: int, step: str, rank: int
) -> None:
    """In a new folder, and in one with a checkpoint; both are free for the next save."""
    fault, new, old = Fault(step, rank), tmp_path / "new", tmp_path / "old"
    error = the_one_error(RANKS, lambda comm: save_with(fault, new, version, comm))
    assert type(error) is dc.RankFailedError
    assert error.ranks == (rank,)
    assert f"failed on rank {rank} of {RANKS}" in str(error)
    assert "No space left on device" in str(error)
    assert f"Traceback on rank {rank}" in str(error)
    assert "fault.at(" in str(error)
    with pytest.raises(dc.CheckpointNotFoundError):
        dc.load({}, new)
    assert {*files_in(new)} <= {".dckpt/attempt.json"}, "what was written is removed"

    version = 3 - version
    save_state(old, version)
    (old / "notes.txt").write_text("mine")
    before = files_in(old)
    the_one_error(RANKS, lambda comm: save_with(fault, old, version, comm, overwrite=True))
    if (step, rank) in BEFORE_CLAIM:
        assert files_in(old) == before
        check_state(old)
        return
    assert not dc.check_is_distributed_checkpoint(old)
    assert {*files_in(old)} <= {".dckpt/attempt.json", "notes.txt"}
    for folder in (new, old):
        save_state(folder, version, name="second", factor=3.0)
        check_state(folder, name="second", factor=3.0)
        assert not [name for name in files_in(folder) if "failed" in name]
    assert (old / "notes.txt").read_text() == "mine"


@BACKEND
def test_a_disk_that_runs_full_in_the_middle(tmp_path: Path, backend: Any) -> None:
    big = 1 << 17

    def is_next(file: int, *_: object) -> bool:
        return "next" in path_of(file).parts

    def save_rank(comm: Comm) -> None:
        part = shard("w", torch.full((big,), float(comm.rank)), (0, comm.rank, 2))
        dc.save({"w": part, "step": 1}, tmp_path / "next", backend, comm=comm)

    previous = {"w": shard("w", torch.ones(3))}
    dc.save(previous, tmp_path / "previous", backend)
    (tmp_path / "next").mkdir()
    written = f"what this rank writes ({4 * big} bytes of tensors)"
    rest = f"did not fit into {tmp_path / 'next'}, with 16 bytes free. Delete old checkpoints, or"
    for code in (errno.ENOSPC, errno.EDQUOT):
        writes = failing("os.writev", "os.write", "os.pwrite", code=code, nth=2, at=is_next)
        with full_disk(), writes:
            error = the_one_error(2, save_rank, dc.RankFailedError)
        assert f"{os.strerror(code)}: {written} {rest}" in str(error)
        assert set(files_in(tmp_path / "next")) <= {".dckpt/attempt.json"}
    loaded = dc.load({"w": shard("w", torch.zeros(3))}, tmp_path / "previous")
    assert torch.equal(loaded["w"], torch.ones(3))
    with full_disk(), failing("os.replace", code=errno.ENOSPC, at=lambda _, to: "next" in str(to)):
        error = the_one_error(2, save_rank, dc.RankFailedError)
    assert f"the record of this save {rest}" in str(error)
    run_ranks(2, save_rank)
    assert dc.load({}, tmp_path / "next")["step"] == 1


def test_all_failing_ranks_are_named(tmp_path: Path) -> None:
    def save_rank(comm: Comm) -> None:
        fault = Fault("write_data", comm.rank or -1)
        save_with(fault, tmp_path / "c", 2, comm)

    error = the_one_error(RANKS, save_rank, dc.RankFailedError)
    assert error.ranks == (1, 2)
    assert "failed on rank 1, 2 of 3" in str(error)


def test_a_failure_while_the_folder_is_claimed_is_raised_on_all_ranks(tmp_path: Path) -> None:
    with failing("os.mkdir", code=errno.EACCES, at=lambda path, *_: Path(path) == tmp_path / "c"):
        error = the_one_error(RANKS, lambda comm: save(state(comm.rank), tmp_path / "c", comm=comm))
    assert type(error) is dc.RankFailedError
    assert "Permission denied" in str(error)
    assert not (tmp_path / "c").exists()


@FORMAT
def test_an_interrupt_is_not_swallowed_and_leaves_no_checkpoint(
    tmp_path: Path, version: int
) -> None:
    fault = Fault("get_data", 0, KeyboardInterrupt)

    def save_alone(**options: Any) -> None:
        strategy = failing_saver(fault, version, 0)
        leaf = shard("w.uneven", torch.ones(2))
        save({"w": leaf}, tmp_path, strategy, **options)

    with pytest.raises(KeyboardInterrupt):
        save_alone()
    assert not dc.check_is_distributed_checkpoint(tmp_path)
    fault.rank = -1
    save_alone()
    assert dc.load_plain_tensors(tmp_path)["w.uneven"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "name",
    [
        *("../victim", "/victim", "a/../../victim", ".", "", "./", "a/..", LOCK_NAME, ".dckpt"),
        *("a\0b", "\ud800", "n" * 5000),
    ],
)
def test_a_leftover_attempt_that_names_more_than_its_own_files_deletes_nothing(
    tmp_path: Path, name: str
) -> None:
    """The file may come from anywhere: it must not make a save delete what is not a save's."""
    folder, victim = tmp_path / "in" / "c", tmp_path / "in" / "victim"
    victim.parent.mkdir()
    victim.write_text("mine")
    (folder / ".dckpt").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    creates = [str(victim) if name == "/victim" else name]
    (folder / ".dckpt" / "attempt.json").write_text(
        json.dumps({"attempt": "x", "creates": creates})
    )
    with pytest.raises(dc.CorruptCheckpointError, match=r"attempt(.|\n)*cannot be cleared away"):
        save({"step": 1}, folder)
    assert not (folder / LOCK_NAME).exists()
    assert victim.read_text() == "mine"
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", '{"creates": 5}', "\0" * 9, "[" * 9**6]
)
def test_a_leftover_attempt_that_says_nothing_is_no_hindrance(tmp_path: Path, content: str) -> None:
    """Cut off while it was written, it had created nothing yet."""
    (tmp_path / ".dckpt").mkdir()
    (tmp_path / ".dckpt" / "attempt.json").write_text(content)
    (tmp_path / "notes.txt").write_text("mine")
    save_state(tmp_path, 2)
    check_state(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@FORMAT
def test_after_a_failed_save_was_cleared_away_its_names_are_free_for_others(
    tmp_path: Path, version: int
) -> None:
    """What somebody puts there afterwards is theirs, and is neither taken over nor deleted."""
    fault = Fault("finish", 0)
    the_one_error(RANKS, lambda comm: save_with(fault, tmp_path, version, comm))
    (tmp_path / "failed.even").mkdir()
    (tmp_path / "failed.even" / "thesis.txt").write_text("mine")
    save_state(tmp_path, version)
    assert (tmp_path / "failed.even" / "thesis.txt").read_text() == "mine"


# Loading.


LOAD_PLANNING = "build_local_plan finalize_plan acquire_tensor apply_tensor"
READING = "read_metadata set_up_storage_reader prepare_local_plan prepare_global_plan read_data"


def failing_loader(fault: Fault, version: int, rank: int) -> Any:
    planner = failing_kind(DefaultLoadPlanner, LOAD_PLANNING, fault, rank)()
    strategy = LOADERS[version](planner=planner)
    strategy.make_reader = failing_kind(strategy.reader_type, READING, fault, rank)
    return strategy


LOAD_STEPS = [
    ("merging a factory", 1),
    ("read_metadata", 0),
    ("build_local_plan", 1),
    ("finalize_plan", 2),
    ("set_up_storage_reader", 1),
    ("prepare_local_plan", 2),
    ("prepare_global_plan", 0),
    ("read_data", 2),
    ("acquire_tensor", 1),
    ("apply_tensor", 0),
]


@each_step(LOAD_STEPS)
def test_a_load_that_fails_on_one_rank_fails_on_all_and_harms_nothing(
    tmp_path: Path, version: int, step: str, rank: int
) -> None:
    save_state(tmp_path, version)
    before = files_in(tmp_path)
    fault = Fault(step, rank, lambda: OSError(errno.EIO, os.strerror(errno.EIO)))

    def load_rank(comm: Comm) -> None:
        strategy = failing_loader(fault, version, comm.rank)
        template = state(comm.rank, factor=-1.0)
        even = template["even"]

        def merge(loaded: Any) -> Any:
            fault.at("merging a factory", comm.rank)
            return loaded

        template["even"] = dc.ShardedTensorFactory("f", even.data, lambda *_: even, merge)
        dc.load(template, tmp_path, strategy, comm=comm)

    error = the_one_error(RANKS, load_rank, dc.RankFailedError)
    assert error.ranks == (rank,)
    assert "Input/output error" in str(error)
    assert files_in(tmp_path) == before
    check_state(tmp_path)


@FORMAT
def test_after_a_failed_read_the_error_names_the_tensors_that_may_be_partly_filled(
    tmp_path: Path, version: int
) -> None:
    save_state(tmp_path, version)
    fault = Fault("acquire_tensor", 1)

    def load_rank(comm: Comm) -> list[str]:
        template = state(comm.rank)
        template["uneven"].data = None
        strategy = failing_loader(fault, version, comm.rank)
        with pytest.raises(dc.RankFailedError) as raised:
            dc.load(template, tmp_path, strategy, comm=comm)
        return raised.value.__notes__

    for notes in run_ranks(RANKS, load_rank):
        assert "w.even" in notes[0]
        assert "w.uneven" not in notes[0]


BROUGHT = "'planning the save', passing values"
PLANNED, CLAIMED = "'planning the save'", "claiming the folder"
WRITTEN, COMMITTED = "'writing', passing values", "'committing'"


def noted_waits(monkeypatch: pytest.MonkeyPatch, body: Callable[[Comm], object]) -> list[str]:
    """Where rank 0 waits for the other ranks in ``body``."""
    waits: list[str] = []
    meet = ThreadComm.Rendezvous.meet

    def noting(self: ThreadComm.Rendezvous, comm: ThreadComm, label: str, value: Any) -> list[Any]:
        if comm.rank == 0:
            waits.append(label)
        return meet(self, comm, label, value)

    with monkeypatch.context() as patched:
        patched.setattr(ThreadComm.Rendezvous, "meet", noting)
        run_ranks(RANKS, body)
    return waits


def test_ranks_wait_for_each_other_no_more_often_than_they_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these is a wait for the slowest of thousands of ranks.

    Planned and claimed are one round trip: what ranks say of their plans goes to rank 0, which
    claims the folder and answers.
    """
    caches = [dc.PlanCache() for _ in range(RANKS)]

    def with_zarr1(comm: Comm) -> None:
        save(state(comm.rank), tmp_path / "zarr1", ("zarr", 1), comm=comm)

    def behind(comm: Comm) -> None:
        dc.async_save(state(comm.rank), tmp_path / "behind", comm=comm).result()

    def loaded(comm: Comm) -> None:
        dc.load(state(comm.rank), tmp_path / "behind", comm=comm)

    def cached(comm: Comm) -> None:
        folder = tmp_path / "cached"
        save(state(comm.rank), folder, comm=comm, plan_cache=caches[comm.rank], overwrite=True)

    waits = [BROUGHT, PLANNED, CLAIMED, WRITTEN, COMMITTED]
    for body in (with_zarr1, cached, cached):
        assert noted_waits(monkeypatch, body) == waits
    # One rank has forgotten the plan that the others would use again.
    caches[1] = dc.PlanCache()
    assert noted_waits(monkeypatch, cached) == [BROUGHT, *waits]
    before = noted_waits(monkeypatch, behind)
    assert before[:4] == ["broadcasting a value", *waits[:3]]
    # From here on there is a thread beside the caller's.
    rest = ["'copying the state'", "'claiming the folder'", *waits[3:]]
    assert sorted(before[4:]) == sorted(rest)
    assert noted_waits(monkeypatch, loaded) == [
        *("'opening the checkpoint'", "comparing a number"),
        *("'reading the index'", "reading the index"),
        *("'comparing template and checkpoint'", "'planning the load'", "'reading'"),
        "'rebuilding the state dict', passing values",
    ]


def test_a_file_system_that_cannot_say_what_is_open_costs_no_descriptor(tmp_path: Path) -> None:
    save(at_step(1), tmp_path / "c")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for nth in range(1, 20):
        with (
            failing("os.fstat", code=errno.ESTALE, nth=nth, times=1) as calls,
            suppress(dc.CheckpointingException, OSError),
        ):
            dc.load(at_step(0), tmp_path / "c")
        if len(calls) < nth:
            break
    assert nth > 4
    assert len(list(Path("/proc/self/fd").iterdir())) == before
