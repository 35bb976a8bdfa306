"""async_save: what is saved is the state at the call, and what goes wrong is told to every rank."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_checkpointing as dc
from dist_checkpointing.comm import Comm, SingleProcess
from dist_checkpointing.planning import DefaultSavePlanner, SavePlan, SavePlanner, WriteItem
from dist_checkpointing.strategies import SaveShardedStrategy, StrategyAction, get_default_strategy
from dist_checkpointing.testing import run_ranks
from states import BACKENDS, cell, full_at_step, parts_at_step

ROWS = 8


class State:
    """What one rank of a training holds, and changes in place."""

    def __init__(self, comm: Comm, step: int) -> None:
        leaves = parts_at_step(step, comm)
        self.tensors = [leaf.data for leaf in leaves.values()]
        self.counter = torch.tensor([step])
        self.objects = [step]
        self.dict: dict[str, Any] = {
            **leaves,
            "rng": cell("rng", self.objects, comm),
            "step": step,
            "counter": self.counter,
            "nest": {"list": self.objects},
        }

    def ruin(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(-1)
        self.counter.fill_(-1)
        self.objects[0] = -1
        self.dict.clear()


def assert_holds(folder: Path, step: int) -> None:
    found = dc.load_plain_tensors(folder)
    for key, expected in full_at_step(step).items():
        assert found[key].dtype is expected.dtype
        assert torch.equal(found[key], expected), key
    assert found["step"] == step
    assert found["counter"].item() == step
    assert found["nest"] == {"list": [step]}


class Gate(DefaultSavePlanner):
    """Lets nothing be copied before the gate is open."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate

    def get_data(self, item: WriteItem) -> Any:
        assert self.gate.wait(30)
        return super().get_data(item)


def kind(backend: tuple[str, int]) -> Any:
    return type(get_default_strategy(StrategyAction.SAVE_SHARDED, *backend))


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [
        (BACKENDS[0], 1),
        (BACKENDS[0], 4),
        (BACKENDS[1], 2),
        (BACKENDS[2], 2),
        (BACKENDS[3], 4),
        (BACKENDS[3], 1),
    ],
)
def test_changes_after_the_call_are_not_saved(
    tmp_path: Path, backend: tuple[str, int], world_size: int
) -> None:
    def one(comm: Comm) -> None:
        with dc.AsyncSaver(comm=comm) as saver:
            for step in (1, 2, 3):
                state = State(comm, step)
                handle = saver.save(state.dict, tmp_path / str(step), backend, step=step)
                assert handle.captured.is_set()
                state.ruin()
                if step == 2:
                    handle.result(30)
                    assert dc.check_is_distributed_checkpoint(handle.checkpoint_dir)
                    assert handle.done()

    run_ranks(world_size, one)
    for step in (1, 2, 3):
        assert_holds(tmp_path / str(step), step)


@pytest.mark.parametrize("backend", BACKENDS)
def test_background_capture(tmp_path: Path, backend: tuple[str, int]) -> None:
    """The call returns before anything is copied; the fence holds the optimizer's step back."""
    gates = [threading.Event() for _ in range(2)]

    def one(comm: Comm) -> None:
        state = State(comm, 1)
        parameter = torch.nn.Parameter(state.tensors[0])
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        parameter.grad = torch.ones_like(parameter)
        planner = Gate(gates[comm.rank])
        handle = dc.async_save(
            state.dict, tmp_path / "c", kind(backend)(planner=planner), capture="background",
            comm=comm,
        )  # fmt: skip
        assert not handle.captured.is_set()
        assert not handle.done()
        handle.fence(optimizer)
        threading.Timer(0.1, gates[comm.rank].set).start()
        optimizer.step()
        assert handle.captured.is_set()
        state.ruin()
        handle.result(30)
        optimizer.step()  # the fence is gone

    run_ranks(2, one)
    assert_holds(tmp_path / "c", 1)


@pytest.mark.parametrize(("changed", "rank"), [("rows", 1), ("state_dict['counter']", 0)])
def test_a_change_that_comes_too_early_fails_the_save(
    tmp_path: Path, changed: str, rank: int
) -> None:
    """Of a tensor, and of the common state, of which that of rank 0 is saved."""
    gate = threading.Event()

    def one(comm: Comm) -> str:
        state = State(comm, 1)
        strategy = kind(BACKENDS[0])(planner=Gate(gate))
        handle = dc.async_save(
            state.dict, tmp_path / "c", strategy, capture="background", comm=comm
        )
        if changed != "rows":
            state.counter.add_(1)
        elif comm.rank == rank:
            state.tensors[0].add_(1)
        comm.all_gather(None)
        gate.set()
        with pytest.raises(dc.CheckpointingException, match="changed while it was being") as raised:
            handle.result(30)
        assert [(f.key, f.ranks) for f in raised.value.findings] == [(changed, (rank,))]
        return str(raised.value)

    assert len({*run_ranks(2, one)}) == 1
    assert not dc.check_is_distributed_checkpoint(tmp_path / "c")


def test_an_io_error_reaches_every_rank_and_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dist_checkpointing.strategies import ZarrV3Writer

    write_data = ZarrV3Writer.write_data
    broken = [True]

    def fail(self: ZarrV3Writer, plan: SavePlan, planner: SavePlanner) -> Any:
        if broken[0] and self.checkpoint_dir.name == "2" and self.rank == 1:
            raise OSError(28, "No space left on device")
        return write_data(self, plan, planner)

    monkeypatch.setattr(ZarrV3Writer, "write_data", fail)

    def one(comm: Comm) -> list[str]:
        saver = dc.AsyncSaver(comm=comm)
        saver.save(State(comm, 1).dict, tmp_path / "1", "zarr").result(30)
        handle = saver.save(State(comm, 2).dict, tmp_path / "2", "zarr")
        seen = []
        with pytest.raises(dc.RankFailedError, match="No space left") as raised:
            handle.result(30)
        seen.append(str(raised.value))
        assert "write_data" in str(raised.value), "no traceback"
        assert raised.value.ranks == (1,)
        saver.save(State(comm, 2).dict, tmp_path / "other", "zarr").result(30)
        saver.save(State(comm, 2).dict, tmp_path / "2", "zarr")
        with pytest.raises(dc.RankFailedError, match="No space left") as raised:
            saver.save(State(comm, 3).dict, tmp_path / "3", "zarr")
        seen.append(str(raised.value))
        comm.all_gather(None)
        broken[0] = False
        comm.all_gather(None)
        saver.save(State(comm, 2).dict, tmp_path / "2", "zarr")
        saver.close()
        return seen

    seen = run_ranks(2, one)
    assert seen[0][0] == seen[1][0]
    assert_holds(tmp_path / "1", 1)
    assert_holds(tmp_path / "2", 2)
    assert not (tmp_path / "3").exists()


def test_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same copies are written once more; nothing of the failed try is left."""
    from dist_checkpointing.strategies import TensorStoreWriter

    finish = TensorStoreWriter.finish
    left = [2]

    def fail(self: Any, *args: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(5, "Input/output error")
        finish(self, *args)

    monkeypatch.setattr(TensorStoreWriter, "finish", fail)

    def one(comm: Comm) -> None:
        with dc.AsyncSaver(comm=comm, retries=2) as saver:
            state = State(comm, 1)
            saver.save(state.dict, tmp_path / "c")
            state.ruin()

    run_ranks(2, one)
    assert left == [0]
    assert_holds(tmp_path / "c", 1)


def test_shared_buffers_are_refused(tmp_path: Path) -> None:
    gate = threading.Event()
    buffers = dc.StagingBuffers()
    first, second = dc.AsyncSaver(buffers=buffers), dc.AsyncSaver(buffers=buffers)
    (comm,) = run_ranks(1, lambda comm: comm)
    handle = first.save(
        State(comm, 1).dict, tmp_path / "1", kind(BACKENDS[0])(planner=Gate(gate)),
        capture="background",
    )  # fmt: skip
    with pytest.raises(dc.CheckpointingException, match="two saves at once"):
        second.save(State(comm, 2).dict, tmp_path / "2")
    gate.set()
    handle.result(30)
    assert not dc.check_is_distributed_checkpoint(tmp_path / "2")
    second.save(State(comm, 2).dict, tmp_path / "2").result(30)
    assert_holds(tmp_path / "1", 1)
    assert_holds(tmp_path / "2", 2)


def test_buffers_are_used_again_and_hold_only_what_this_rank_writes(tmp_path: Path) -> None:
    def one(comm: Comm) -> int:
        buffers = dc.StagingBuffers()
        with dc.AsyncSaver(comm=comm, buffers=buffers) as saver:
            pointers = set()
            for step in (1, 2, 3):
                saver.save(State(comm, step).dict, tmp_path / str(step))
                saver.wait()
                pointers.add(buffers._memory.data_ptr())
            assert len(pointers) == 1
        return buffers.num_bytes

    first, second = run_ranks(2, one)
    rows, strided = ROWS * 6 * 4 // 2, ROWS * 6 * 2 // 2
    assert rows + strided <= second <= rows + strided + 2 * 64
    assert first > second  # it writes the replicated tensors too


def test_a_saver_saves_states_of_any_size(tmp_path: Path) -> None:
    with dc.AsyncSaver(comm=SingleProcess()) as saver:
        for step, size in enumerate((10, 1000, 100)):
            tensor = torch.full((size,), step)
            saver.save({"w": dc.ShardedTensor.from_rank_offsets("w", tensor)}, tmp_path / str(step))
            tensor.fill_(-1)
    for step, size in enumerate((10, 1000, 100)):
        assert dc.load_plain_tensors(tmp_path / str(step))["w"].tolist() == [step] * size


def test_steps_that_differ_between_ranks(tmp_path: Path) -> None:
    def one(comm: Comm) -> None:
        handle = dc.async_save(State(comm, 1).dict, tmp_path / "c", comm=comm, step=comm.rank)
        with pytest.raises(dc.CheckpointingException, match="not of one save"):
            handle.result(30)

    run_ranks(2, one)
    assert not dc.check_is_distributed_checkpoint(tmp_path / "c")


def test_waiting_tells_and_callbacks_come_once(tmp_path: Path) -> None:
    state = {"w": dc.ShardedTensor.from_rank_offsets("w", torch.arange(6.0))}
    may_go, was_called = threading.Event(), threading.Event()
    called: list[tuple[dc.SaveHandle, bool]] = []

    def callback(own: dc.SaveHandle) -> None:
        called.append((own, own.done()))
        was_called.set()

    class Slow(SaveShardedStrategy):
        def save(self, *_: Any) -> None:
            assert may_go.wait(30)
            raise OSError("the disk is full")

    handle = dc.async_save(state, tmp_path / "a", Slow("slow", 1), comm=SingleProcess())
    handle.add_done_callback(callback)
    assert not handle.wait(0.01)
    with pytest.raises(TimeoutError):
        handle.exception(0.01)
    assert not called
    may_go.set()
    assert handle.wait(30)
    error = handle.exception()
    assert isinstance(error, dc.RankFailedError)
    assert "the disk is full" in str(error)
    assert was_called.wait(30)
    assert called == [(handle, True)]
    handle.add_done_callback(callback)
    assert called == [(handle, True)] * 2
    with pytest.raises(dc.RankFailedError):
        handle.result()


def test_a_bar_and_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    phases: list[str] = []

    def one(comm: Comm) -> None:
        state = State(comm, 1).dict
        dc.async_save(state, tmp_path / "c", comm=comm, progress="bar").result(30)
        dc.load(state, tmp_path / "c", comm=comm, progress="bar")
        tell = None if comm.rank else lambda progress: phases.append(progress.phase)
        handle = dc.async_save(state, tmp_path / "p", comm=comm, progress=tell)
        handle.result(30)
        assert handle.progress.phase == "committing"

    run_ranks(2, one)
    assert [*dict.fromkeys(phases)] == ["planning", "copying", "writing", "committing"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ━")[0].strip() for line in lines] == [
        "asynchronous save: copying",
        "asynchronous save: writing",
        "load: reading",
    ]
    with pytest.raises(TypeError, match="progress must be 'bar' or a function"):
        dc.save({}, tmp_path / "d", comm=SingleProcess(), progress="bars")  # type: ignore[arg-type]
    assert not (tmp_path / "d").exists()


def test_unknown_keywords(tmp_path: Path) -> None:
    """A mistyped option is refused, and no rank waits for another one."""

    def one(comm: Comm) -> None:
        wrong: dict[str, Any] = {"over_write": True} if comm.rank == 1 else {}
        if comm.rank == 1:
            with pytest.raises(TypeError, match=r"async_save\(\) got .* argument 'over_write'"):
                dc.async_save({}, tmp_path / "c", comm=comm, **wrong)
        with dc.AsyncSaver(comm=comm) as saver:
            if comm.rank == 1:
                with pytest.raises(TypeError, match=r"AsyncSaver.save\(\) got .* 'over_write'"):
                    saver.save({}, tmp_path / "c", **wrong)
            saver.save(State(comm, 1).dict, tmp_path / "c").result(30)

    run_ranks(2, one)
    assert_holds(tmp_path / "c", 1)


def test_an_unknown_choice(tmp_path: Path) -> None:
    options: dict[str, Any] = {"capture": "fork"}
    with pytest.raises(ValueError, match="'fork'"):
        dc.async_save({}, tmp_path / "c", **options)
