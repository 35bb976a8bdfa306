"""DataPosition: the same order of samples on any number of ranks, each of them once."""

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_checkpointing import StateMismatchError, load, load_common_state_dict, save
from dist_checkpointing.comm import Comm
from dist_checkpointing.interop import DataPosition, FilePositions, TorchState
from dist_checkpointing.testing import run_ranks
from real_ranks import run_script

SCRIPT = Path(__file__).with_name("data_position_rank.py")


class Numbers(torch.utils.data.Dataset[int]):
    """Each sample is its own number."""

    def __getitem__(self, index: int) -> int:
        return index


def global_batches(position: DataPosition) -> Iterator[list[int]]:
    """What a training on one rank sees, without end."""
    while True:
        for batch in position.batches(0, 1):
            yield batch
            position.advance()


def resized(random: random.Random, position: DataPosition) -> DataPosition:
    """The position of a program that starts again."""
    again = DataPosition(
        position.dataset_size,
        position.batch_size,
        seed=random.randrange(9),
        drop_last=position.drop_last,
    )
    again.load_state_dict(position.state_dict())
    return again


def play(seed: int) -> None:
    """A run of three epochs that starts again on other ranks, at times from an older save."""
    choose = random.Random(seed)
    drop_last = choose.random() < 0.3
    batch_size = choose.choice((1, 5, 8, 12, 16, 24, 30))
    size = choose.randint(batch_size if drop_last else 1, 5 * batch_size)
    smallest = min(filter(None, (batch_size, 0 if drop_last else size % batch_size)))
    first = DataPosition(size, batch_size, seed=choose.getrandbits(64), drop_last=drop_last)
    position, saved, steps_saved = resized(choose, first), first.state_dict(), 0
    trained: list[list[int]] = []
    while position.epoch < 3:
        world_size = choose.randint(1, min(8, smallest))
        accumulation = choose.randint(1, min(3, smallest // world_size))
        ranks = [
            iter(position.batches(rank, world_size, accumulation=accumulation))
            for rank in range(world_size)
        ]
        for _ in range(choose.randint(0, 12)):
            parts = [part for rank in ranks for part in islice(rank, accumulation)]
            if not parts:
                break
            trained.append([sample for part in parts for sample in part])
            position.advance()
        for rank in ranks:  # what a worker has fetched ahead is not trained on
            next(rank, None)
        if choose.random() < 0.6:
            saved, steps_saved = position.state_dict(), len(trained)
        else:
            position.load_state_dict(saved)
            del trained[steps_saved:]
        position = resized(choose, position)
    assert trained == [*islice(global_batches(first), len(trained))]
    samples = [sample for batch in trained for sample in batch]
    assert len(samples) == 3 * len(position)
    assert len(position) == size - (size % batch_size if drop_last else 0)
    for epoch in range(3):
        own = samples[epoch * len(position) : (epoch + 1) * len(position)]
        assert len(set(own)) == len(position)
        assert set(own) <= set(range(size))


FAR = [pytest.param(start, marks=pytest.mark.exhaustive) for start in (300, 650)]


@pytest.mark.parametrize("start", [0, *FAR])
def test_each_sample_once_and_in_the_same_order_in_random_histories(start: int) -> None:
    """1,000 histories in all, and 300 in the quick tier."""
    for seed in range(start, start + (350 if start else 300)):
        play(seed)


def test_the_order_stays_that_of_earlier_versions() -> None:
    assert [*DataPosition(12, 4, seed=3)] == [8, 9, 6, 4, 11, 0, 2, 3, 10, 1, 7, 5]
    far = DataPosition(10**15, 10**3, seed=2**64 - 1)
    far.load_state_dict(far.state_dict() | {"samples": 7 * 10**15 + 10**14})
    assert [*islice(far, 3)] == [243036285971638, 276559642754786, 372587158374122]
    assert [*DataPosition(7, 3, seed=None)] == [*range(7)]


def test_every_order_of_few_samples_comes_as_often() -> None:
    orders = Counter(tuple(DataPosition(4, 4, seed=seed)) for seed in range(4800))
    assert len(orders) == 24
    assert min(orders.values()) > 145
    assert max(orders.values()) < 255


def test_epochs_and_seeds_have_orders_without_relation() -> None:
    position = DataPosition(20_000, 20_000, seed=1)
    orders = [[*position]]
    position.advance()
    orders += [[*position], [*DataPosition(20_000, 20_000, seed=2)], [*range(20_000)]]
    related = np.corrcoef(orders) - np.eye(4)
    assert abs(related).max() < 0.03


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "workers",
    [{}, {"num_workers": 2, "prefetch_factor": 3}, {"num_workers": 1, "persistent_workers": True}],
)
def test_workers_that_fetch_ahead(workers: dict[str, Any], drop_last: bool) -> None:
    def start() -> tuple[DataPosition, list[Any]]:
        position = DataPosition(22, 6, seed=4, drop_last=drop_last)
        batches = [position.batches(rank, 2) for rank in range(2)]
        numbers = Numbers()
        return position, [
            torch.utils.data.DataLoader(numbers, batch_sampler=own, **workers) for own in batches
        ]

    expected = global_batches(DataPosition(22, 6, seed=4, drop_last=drop_last))
    position, loaders = start()
    assert len(loaders[0]) == (3 if drop_last else 4)
    found: list[list[int]] = []
    for steps in (2, 1, 5, 4):  # within an epoch, and over the end of one
        goal = len(found) + steps
        while len(found) < goal:
            for parts in zip(*loaders, strict=True):
                found.append(torch.cat(parts).tolist())
                position.advance()
                if len(found) == goal:
                    break
        saved = position.state_dict()
        position, loaders = start()
        position.load_state_dict(saved)
    assert found == [*islice(expected, 12)]


def test_it_is_three_numbers_of_the_common_state(tmp_path: Path) -> None:
    def state(samples: int) -> TorchState:
        position = DataPosition(10, 4, seed=2)
        for _ in range(samples):
            position.advance()
        return TorchState(torch.nn.Linear(2, 1), data=position)

    run_ranks(3, lambda comm: save(state(2), tmp_path / "run", comm=comm))
    common = load_common_state_dict(tmp_path / "run")
    assert common["data"] == {"seed": 2, "dataset_size": 10, "samples": 8}
    position = DataPosition(10, 4, seed=7)
    load(TorchState(torch.nn.Linear(2, 1), data=position), tmp_path / "run")
    assert (position.seed, position.epoch, position.samples) == (2, 0, 8)
    save({"data": position.state_dict()}, tmp_path / "plain")
    assert load({}, tmp_path / "plain")["data"] == common["data"]


def test_a_global_batch_of_another_size_goes_on_with_the_next_sample() -> None:
    whole = [*DataPosition(20, 6, seed=1)]
    position = DataPosition(20, 6, seed=1)
    position.advance()
    other = DataPosition(20, 9, drop_last=True)
    other.load_state_dict(position.state_dict())
    assert [*other.batches(0, 1)] == [whole[6:15]]
    other.advance()
    assert (other.epoch, other.samples) == (1, 20)  # 5 samples are dropped
    # 4 samples are left of the epoch, fewer than the batch: they are dropped at once.
    short = DataPosition(20, 8, drop_last=True)
    short.load_state_dict({"seed": 1, "dataset_size": 20, "samples": 16})
    assert (short.epoch, len([*short.batches(0, 1)])) == (1, 2)


def test_mistakes() -> None:
    position = DataPosition(10, 4)
    batches = position.batches(0, 2)
    assert len(batches) == len([*batches]) == 3
    with pytest.raises(RuntimeError, match=r"position\.advance\(\)"):
        next(iter(batches))
    position.advance()
    under_way = iter(batches)
    next(under_way)
    position.load_state_dict(position.state_dict())
    with pytest.raises(RuntimeError, match="begin a new iteration"):
        next(under_way)
    with pytest.raises(ValueError, match="batch of 2 samples cannot be divided among 3"):
        next(iter(position.batches(0, 3)))
    with pytest.raises(ValueError, match="batch of 4 samples cannot be divided among 6"):
        next(iter(DataPosition(10, 4, drop_last=True).batches(0, 2, accumulation=3)))
    with pytest.raises(ValueError, match="rank 2 of 2"):
        position.batches(2, 2)
    for wrong in ((0, 4), (3, 0)):
        with pytest.raises(ValueError, match="no batch of"):
            DataPosition(*wrong)
    with pytest.raises(ValueError, match=r"no batch of 4 samples .* dataset of 3"):
        DataPosition(3, 4, drop_last=True)
    with pytest.raises(ValueError, match="seed"):
        DataPosition(3, 4, seed=-1)
    with pytest.raises(StateMismatchError, match=r"expected 11; found 10\. Train on the dataset"):
        position.load_state_dict(position.state_dict() | {"dataset_size": 11})
    with pytest.raises(StateMismatchError, match="no position"):
        position.load_state_dict({"_num_yielded": 3})


class Draws(torch.utils.data.Dataset[tuple[int, int]]):
    """A dataset with a state of its own, which differs between ranks."""

    def __init__(self, rank: int) -> None:
        self.drawn = 100 * rank

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.drawn += 1
        return index, self.drawn

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_beside_a_stateful_loader(
    num_workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The place goes to other ranks; the state of the loader itself only to the same ones."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def run(world_size: int, steps: int, *, resumes: bool) -> list[list[tuple[int, int]]]:
        def rank_run(comm: Comm) -> list[tuple[int, int]]:
            position = DataPosition(24, 6, seed=1)
            batches = position.batches(comm.rank, comm.world_size)
            loader = stateful.StatefulDataLoader(
                Draws(comm.rank), batch_sampler=batches, num_workers=num_workers
            )
            state = TorchState(torch.nn.Linear(2, 1), data=position, loader=loader)
            if resumes:
                load(state, tmp_path / "run", comm=comm)
            trained: list[tuple[int, int]] = []
            for indices, drawn in islice(loader, steps):
                trained += zip(indices.tolist(), drawn.tolist(), strict=True)
                position.advance()
            save(state, tmp_path / "run", overwrite=True, comm=comm)
            return trained

        return run_ranks(world_size, rank_run)

    order = [*DataPosition(24, 6, seed=1)]
    parts = [run(2, 1, resumes=False), run(2, 2, resumes=True)]
    assert not caplog.records
    assert [drawn for _, drawn in parts[1][1]] == [*range(104, 110)]
    parts.append(run(1, 1, resumes=True))
    (record,) = [record for record in caplog.records if "loader" in record.getMessage()]
    assert "it was saved per rank on 2 ranks" in record.getMessage()
    first, second, third = ([[i for i, _ in own] for own in part] for part in parts)
    assert [*first[0], *first[1]] == order[:6]
    assert [*second[0][:3], *second[1][:3], *second[0][3:], *second[1][3:]] == order[6:18]
    assert third == [order[18:]]


@pytest.mark.parametrize("seed", range(3))
def test_files_of_iterable_datasets(seed: int) -> None:
    choose = random.Random(seed)
    lengths = [choose.randint(0, 9) for _ in range(9)]
    seen: Counter[tuple[int, int]] = Counter()
    saved = FilePositions(len(lengths)).state_dict()

    def run(comm: Comm) -> tuple[list[tuple[int, int]], dict[str, Any]]:
        positions = FilePositions(len(lengths), comm)
        positions.load_state_dict(saved)
        ahead = [
            (file, number)
            for file, skipped in positions.files()
            for number in range(skipped, lengths[file])
        ]
        trained = ahead[: 3 + comm.rank]
        positions.advance([file for file, _ in trained[:2]])
        positions.advance(np.array([file for file, _ in trained[2:]]))
        return trained, positions.state_dict()

    while sum(seen.values()) < sum(lengths):
        ranks = run_ranks(choose.randint(1, 4), run)
        saved = ranks[0][1]
        assert all(state == saved for _, state in ranks)
        seen.update(sample for trained, _ in ranks for sample in trained)
    assert saved == {"epoch": 0, "samples": lengths}
    assert set(seen.values()) == {1}


def test_epochs_and_mistakes_of_files() -> None:
    positions = FilePositions(4)
    with pytest.raises(StateMismatchError, match="number of files"):
        positions.load_state_dict({"epoch": 0, "samples": [1]})
    positions.advance([3])
    positions.next_epoch()
    assert positions.state_dict() == {"epoch": 1, "samples": [0] * 4}


def test_a_training_on_four_then_two_then_three_ranks(tmp_path: Path) -> None:
    def run(world_size: int, folder: str, stop: int) -> dict[int, tuple[list[int], float]]:
        """Samples and loss of each step."""
        reports = tmp_path / f"{folder}-{world_size}"
        given = (tmp_path / folder, stop)
        ranks = run_script(world_size, SCRIPT, *given, reports=reports, timeout_seconds=120)
        return {
            parts[0][0]: ([n for _, own, _ in parts for n in own], sum(loss for *_, loss in parts))
            for parts in zip(*ranks, strict=True)
        }

    whole = run(1, "whole", 12)
    samples = [sample for step in whole for sample in whole[step][0]]
    for epoch in (samples[:52], samples[52:104]):
        assert sorted(epoch) == [*range(52)]
    # Each is lost after its last save, at step 3 and at step 6.
    on_four, on_two, on_three = run(4, "run", 5), run(2, "run", 8), run(3, "run", 12)
    assert [min(steps) for steps in (on_four, on_two, on_three)] == [1, 4, 7]
    for steps in (on_four, on_two, on_three):
        for step, (samples, loss) in steps.items():
            assert samples == whole[step][0]
            assert loss == pytest.approx(whole[step][1], rel=1e-4)
