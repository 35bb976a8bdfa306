"""Tensors between simulated ranks; between processes: tests/distributed/test_fully_parallel.py."""

import torch

from dist_checkpointing.comm import Comm, SingleProcess, group_comm
from dist_checkpointing.testing import run_ranks


def test_everybody_has_the_tensor_of_the_source() -> None:
    def one(comm: Comm) -> list[list[int]]:
        seen = []
        tensor = torch.zeros(3, dtype=torch.uint8)
        for source in range(comm.world_size):
            if comm.rank == source:
                tensor.fill_(10 + source)
            comm.broadcast_tensor(tensor, source)
            seen.append(tensor.tolist())
            tensor.zero_()  # the source goes on at once with memory of its own
        return seen

    assert run_ranks(3, one) == [[[10] * 3, [11] * 3, [12] * 3]] * 3


def test_alone() -> None:
    comm = SingleProcess()
    tensor = torch.arange(3, dtype=torch.uint8)
    comm.broadcast_tensor(tensor, 0)
    assert tensor.tolist() == [0, 1, 2]
    assert comm.tensor_device == torch.device("cpu")
    assert group_comm(comm, SingleProcess()) is comm
    assert group_comm(None, comm) is comm
