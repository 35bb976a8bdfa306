"""The position of a training run in its data, for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dist_checkpointing.comm import Comm, default_comm
from dist_checkpointing.errors import Finding, StateMismatchError

_GOLDEN: Final = 0x9E3779B97F4A7C15


class DataPosition:
    """How far a training run is in a dataset with random access, and the next batches.

    The order of all samples of an epoch is computed from the seed and the number of the epoch; no
    permutation is stored or sent. A global batch is the next ``batch_size`` samples of that order,
    divided among the ranks, so it holds the same samples on any number of ranks. The state counts
    what ``advance`` was called for, not what workers of a DataLoader have fetched.

    All of the state is three numbers, the same on all ranks. Save it with
    ``TorchState(model, optimizer, data=position)``, or as ``position.state_dict()`` in any state
    dict. Load it before a loader is iterated. A global batch of another size also continues with
    exactly the next sample.

    Iterating a position yields the samples of the rest of the epoch one by one, in the global
    order: a ``sampler`` for one process, and for libraries that divide batches themselves.

    Args:
        dataset_size: Number of samples of the dataset.
        batch_size: Number of samples of an optimizer step, on all ranks together.
        seed: Seed of the order, from 0 to 2**64 - 1; None for the order of the dataset.
            ``load_state_dict`` replaces it by that of the run.
        drop_last: Leave out the last samples of an epoch if they are fewer than ``batch_size``
            (other ones in each epoch); by default they are a smaller batch.

    Attributes:
        samples: Number of samples that the training has passed in all epochs, with dropped ones.
        loads: Number of calls of ``load_state_dict``.

    Raises:
        ValueError: for a number out of range.

    Example:
        >>> position = DataPosition(dataset_size=10, batch_size=4, seed=1)
        >>> list(position.batches(rank=0, world_size=2))
        [[5, 4], [2, 6], [1]]
        >>> position.advance()  # one global batch was trained on
        >>> list(position.batches(rank=0, world_size=1))
        [[2, 6, 0, 8], [1, 3]]
        >>> position.state_dict()
        {'seed': 1, 'dataset_size': 10, 'samples': 4}
    """

    def __init__(
        self,
        dataset_size: int,
        batch_size: int,
        seed: int | None = 0,
        *,
        drop_last: bool = False,
    ) -> None:
        most = dataset_size if drop_last else math.inf
        if not (0 < dataset_size < 2**62 and 0 < batch_size <= most):
            raise ValueError(
                f"no batch of {batch_size} samples can be made of a dataset of {dataset_size}"
            )
        if seed is not None and not 0 <= seed < 2**64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, not {seed}")
        self.dataset_size: int = dataset_size
        self.batch_size: int = batch_size
        self.drop_last: bool = drop_last
        self.seed: int | None = seed
        self.samples: int = 0
        self.loads: int = 0

    @property
    def epoch(self) -> int:
        """Number of epochs that are complete."""
        return self.samples // self.dataset_size

    def __len__(self) -> int:
        """Number of samples that a whole epoch trains on."""
        return self.dataset_size - self.drop_last * (self.dataset_size % self.batch_size)

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches(0, 1):
            yield from batch

    def advance(self) -> None:
        """Go on by a global batch. Call it on each rank after each step of the optimizer."""
        self._move(self.samples + min(self.batch_size, self.left))

    def batches(
        self, rank: int | None = None, world_size: int | None = None, *, accumulation: int = 1
    ) -> RankBatches:
        """The part of one rank in the batches of an epoch, from this position on.

        It is a ``batch_sampler`` for ``DataLoader`` and ``StatefulDataLoader``. A rank gets a
        contiguous part of a global batch, at most one sample longer than that of another rank.
        Each iteration begins after the last batch that ``advance`` was called for.

        Args:
            rank: Number of this rank among the data-parallel ranks. By default rank and
                ``world_size`` are those of torch.distributed, or of a single process.
            world_size: Number of data-parallel ranks.
            accumulation: Number of batches into which a rank divides its part of a global batch,
                for gradient accumulation.

        Raises:
            ValueError: if there is no such rank, or for an accumulation below 1. On iteration, if
                a batch has fewer samples than there are ranks times ``accumulation``.
            RuntimeError: on iteration, if a whole epoch was iterated without ``advance``, or the
                position was loaded since the iteration began.
        """
        if rank is None or world_size is None:
            comm = default_comm()
            rank, world_size = comm.rank, comm.world_size
        if not (0 <= rank < world_size and accumulation > 0):
            raise ValueError(f"rank {rank} of {world_size} with accumulation {accumulation}")
        parts = range(rank * accumulation, (rank + 1) * accumulation)
        return RankBatches(self, parts, world_size * accumulation)

    def state_dict(self) -> dict[str, Any]:
        """Seed, size of the dataset, and samples passed: the same on all ranks."""
        return {"seed": self.seed, "dataset_size": self.dataset_size, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            StateMismatchError: if it is none, or that of a dataset of another size.
        """
        if state.keys() != self.state_dict().keys():
            finding = Finding("no position", expected=[*self.state_dict()], found=[*state])
            raise StateMismatchError("the position in the data cannot be restored", [finding])
        if state["dataset_size"] != self.dataset_size:
            finding = Finding(
                "the dataset has another number of samples, and so another order",
                expected=state["dataset_size"],
                found=self.dataset_size,
                remedy="Train on the dataset of the run, or leave the position out of the load: "
                "then the new dataset begins from its start.",
            )
            raise StateMismatchError("the position in the data cannot be restored", [finding])
        self.seed = state["seed"]
        self.loads += 1
        self._move(state["samples"])

    @property
    def left(self) -> int:
        """Number of samples of this epoch that are not passed, at least 1."""
        return self.dataset_size - self.samples % self.dataset_size

    def _move(self, samples: int) -> None:
        self.samples = samples
        if self.drop_last and self.left < self.batch_size:
            self.samples += self.left


class RankBatches:
    """The batches of one rank, made by ``DataPosition.batches``; ``len`` is that of an epoch."""

    def __init__(self, position: DataPosition, parts: range, number_of_parts: int) -> None:
        self._position, self._parts, self._number_of_parts = position, parts, number_of_parts
        self._ended: tuple[int, int] | None = None

    def __len__(self) -> int:
        return -(-len(self._position) // self._position.batch_size) * len(self._parts)

    def __iter__(self) -> Iterator[list[int]]:
        position = self._position
        begin = (position.samples, position.loads)
        if self._ended == begin:
            raise RuntimeError(
                "an epoch was iterated to its end, and the position has not moved: call "
                "position.advance() after each step of the optimizer"
            )
        size, batch_size = position.dataset_size, position.batch_size
        epoch, left = position.epoch, position.left
        lasts = () if position.drop_last else (left % batch_size, size % batch_size)
        smallest = min(filter(None, (batch_size, *lasts)))
        if smallest < self._number_of_parts:
            raise ValueError(
                f"a batch of {smallest} samples cannot be divided among {self._number_of_parts} "
                "ranks (times accumulation): take another batch_size, or drop_last=True if it is "
                "the last batch of an epoch"
            )
        end = size - left % batch_size if position.drop_last else size
        for first in range(size - left, end, batch_size):
            number = min(batch_size, end - first)
            for part in self._parts:
                if begin[1] != position.loads:
                    raise RuntimeError("the position was loaded: begin a new iteration")
                cuts = [first + number * i // self._number_of_parts for i in (part, part + 1)]
                yield _order(size, position.seed, epoch, *cuts).tolist()
        self._ended = begin

    # A StatefulDataLoader skips what it had fetched, unless its sampler has a state.
    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position has it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: an iteration begins at the position."""


class FilePositions:
    """How far a training run is in each file of an iterable dataset, for any number of ranks.

    Files are divided among the ranks. On other ranks they are divided anew, and each is read on
    after the last sample that was trained on; the order of samples is another one then. Ranks may
    reach the end of their files at different steps.

    Args:
        number_of_files: Number of files, which are known by their number from 0 on.
        comm: The data-parallel ranks; by default those of torch.distributed.

    Attributes:
        epoch: Number of epochs that are complete.

    Example:
        >>> positions = FilePositions(3)
        >>> positions.advance([0, 0, 1])  # file of each sample of a batch
        >>> positions.files()
        [(0, 2), (1, 1), (2, 0)]
    """

    def __init__(self, number_of_files: int, comm: Comm | None = None) -> None:
        self._counts = np.zeros(number_of_files, np.int64)
        self._comm = default_comm() if comm is None else comm
        self.epoch: int = 0

    def files(self) -> list[tuple[int, int]]:
        """Files of this rank, and how many samples to skip in each; make the dataset with it."""
        own = range(self._comm.rank, len(self._counts), self._comm.world_size)
        return [(file, int(self._counts[file])) for file in own]

    def advance(self, files: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Count samples of this rank, after a step of the optimizer: the file of each of them."""
        np.add.at(self._counts, np.asarray(files, np.int64), 1)

    def next_epoch(self) -> None:
        """Begin all files again. Call it on all ranks when all have reached the end."""
        self._counts[:] = 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and samples trained on in each file, on all ranks. Collective."""
        counts = np.max(self._comm.all_gather(self._counts), axis=0)
        return {"epoch": self.epoch, "samples": counts.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to saved positions.

        Raises:
            StateMismatchError: for another number of files.
        """
        if len(state["samples"]) != len(self._counts):
            expected, found = len(state["samples"]), len(self._counts)
            finding = Finding("the number of files is another", expected=expected, found=found)
            raise StateMismatchError("the position in the data cannot be restored", [finding])
        self._counts[:] = state["samples"]
        self.epoch = state["epoch"]


def _order(size: int, seed: int | None, epoch: int, first: int, last: int) -> npt.NDArray[np.int64]:
    """Samples ``first`` to ``last`` of an epoch, in a random order of ``range(size)``.

    A Feistel network on numbers below ``a * b``, slightly more than ``size``, encrypts each place;
    what is not below ``size`` is encrypted again ("cycle walking"): Black and Rogaway, Ciphers with
    Arbitrary Finite Domains, CT-RSA 2002. Its round function is the finalizer of SplitMix64:
    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014. It shuffles;
    it keeps no secret.
    """
    places: npt.NDArray[Any] = np.arange(first, last, dtype=np.uint64)
    if seed is None:
        return places.astype(np.int64)
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    key = _mixed(np.array([seed], np.uint64)) + np.array([epoch], np.uint64)
    keys = _mixed(_mixed(key) + np.arange(1, 9, dtype=np.uint64) * _GOLDEN)

    def encrypted(x: npt.NDArray[Any]) -> Any:
        left, right = x % a, x // a
        for number, key in enumerate(keys):
            modulus = b if number % 2 else a
            left, right = right, (left + _mixed(right + key) % modulus) % modulus
        return left + right * a

    places = encrypted(places)
    while (outside := places >= size).any():
        places[outside] = encrypted(places[outside])
    return places.astype(np.int64)


def _mixed(x: npt.NDArray[Any]) -> Any:
    """The finalizer of SplitMix64, on each number."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
