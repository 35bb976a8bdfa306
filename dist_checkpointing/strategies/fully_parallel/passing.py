"""What one rank has read, handed to the others with collectives.

All ranks of a group go through all messages in the same order, also those that have nothing to do
with one. A rank on which something fails in between goes on, so that nobody waits for it, and says
so at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.strategies.fully_parallel.sharing import Block, Message, Sharing

ExchangeAlgorithm = Literal["broadcast", "gather_object", "gather_rounds"]


def pass_on(
    sharing: Sharing,
    arrays: Mapping[int, torch.Tensor],
    comm: Comm,
    algorithm: ExchangeAlgorithm,
    report: Callable[[int], None],
) -> None:
    """Fill every array that this rank wants and another has read. Collective.

    Args:
        sharing: who has read what.
        arrays: unit -> the array of its part on this rank, for all units that it wants.
        comm: the group.
        algorithm: how messages travel.
        report: called with the number of bytes that have arrived since the last call.
    """
    with comm.agreed("preparing to pass on what was read"):
        hands = _Hands(sharing, arrays, comm, report)
    _ALGORITHMS[algorithm](sharing.messages, hands, comm)
    comm.agree("passing on what was read", hands.error)


class _Hands:
    """Packs and unpacks messages; remembers the first error instead of raising it.

    A message that is one run of memory is sent from, or received into, the array itself. All others
    go through one buffer, as large as the largest of them.
    """

    def __init__(
        self,
        sharing: Sharing,
        arrays: Mapping[int, torch.Tensor],
        comm: Comm,
        report: Callable[[int], None],
    ) -> None:
        self.error: Exception | None = None
        self._units = sharing.units
        self._arrays = arrays
        self._device = comm.tensor_device
        self._report = report
        longest = max(
            (m.num_bytes for m in sharing.messages if self._own_run(m) is None), default=0
        )
        self._buffer = torch.empty(longest, dtype=torch.uint8, device=self._device)

    def packed(self, message: Message) -> torch.Tensor:
        """The bytes of a message that this rank sends."""
        run = self._own_run(message)
        if run is not None:
            return run
        try:
            for block in message.blocks:
                self._place(block, self._buffer).copy_(self._own(block))
        except Exception as error:  # noqa: BLE001 - the others hear of it when all is through
            self.error = self.error or error
        return self._buffer[: message.num_bytes]

    def room(self, message: Message) -> torch.Tensor:
        """Where a message from another rank shall go."""
        run = self._own_run(message)
        return self._buffer[: message.num_bytes] if run is None else run

    def unpack(self, message: Message, data: torch.Tensor) -> None:
        """Put what has arrived in its place, if it is not there yet."""
        try:
            run = self._own_run(message)
            if run is None:
                for block in message.blocks:
                    if block.unit in self._arrays:
                        self._own(block).copy_(self._place(block, data))
            elif data.data_ptr() != run.data_ptr():
                run.copy_(data[: message.num_bytes])
            wanted = [block.num_bytes for block in message.blocks if block.unit in self._arrays]
            self._report(sum(wanted))
        except Exception as error:  # noqa: BLE001 - as above
            self.error = self.error or error

    def _own(self, block: Block) -> torch.Tensor:
        return self._arrays[block.unit][block.box.slices()]

    def _place(self, block: Block, data: torch.Tensor) -> torch.Tensor:
        """A block of a message, in the bytes of the message."""
        raw = data[block.start : block.start + block.num_bytes]
        return raw.view(self._units[block.unit].dtype.torch).view(block.box.shape)

    def _own_run(self, message: Message) -> torch.Tensor | None:
        """The memory of this rank that is the message, if there is such."""
        (block, *others) = message.blocks
        if others or block.unit not in self._arrays:
            return None
        own = self._own(block)
        if own.device.type != self._device.type or own.is_conj() or own.is_neg():
            return None
        return own.reshape(-1).view(torch.uint8) if own.is_contiguous() else None


def _broadcast(messages: Sequence[Message], hands: _Hands, comm: Comm) -> None:
    """One at a time, from its source to all."""
    for message in messages:
        if message.source == comm.rank:
            comm.broadcast_tensor(hands.packed(message), message.source)
        else:
            room = hands.room(message)
            comm.broadcast_tensor(room, message.source)
            hands.unpack(message, room)


def _gather_rounds(messages: Sequence[Message], hands: _Hands, comm: Comm) -> None:
    """One of each source at a time, all as long as the longest."""
    for turn in _turns(messages, comm.world_size):
        longest = max(message.num_bytes for message in turn.values())
        own = torch.zeros(longest, dtype=torch.uint8, device=comm.tensor_device)
        if comm.rank in turn:
            own[: turn[comm.rank].num_bytes] = hands.packed(turn[comm.rank])
        gathered = comm.all_gather_tensor(own)
        for source, message in turn.items():
            if source != comm.rank:
                hands.unpack(message, gathered[source])


def _gather_object(messages: Sequence[Message], hands: _Hands, comm: Comm) -> None:
    """One of each source at a time, as bytes."""
    for turn in _turns(messages, comm.world_size):
        own = None
        if comm.rank in turn:
            own = hands.packed(turn[comm.rank]).cpu().numpy().tobytes()
        gathered = comm.all_gather(own)
        for source, message in turn.items():
            given = gathered[source]
            if source != comm.rank and given is not None:
                hands.unpack(message, torch.frombuffer(bytearray(given), dtype=torch.uint8))


_ALGORITHMS: Mapping[str, Callable[[Sequence[Message], _Hands, Comm], None]] = {
    "broadcast": _broadcast,
    "gather_object": _gather_object,
    "gather_rounds": _gather_rounds,
}
EXCHANGE_ALGORITHMS = tuple(_ALGORITHMS)


def _turns(messages: Sequence[Message], world_size: int) -> list[dict[int, Message]]:
    """The messages, with at most one of each source at a time."""
    of_source: list[list[Message]] = [[] for _ in range(world_size)]
    for message in messages:
        of_source[message.source].append(message)
    longest = max(map(len, of_source), default=0)
    return [
        {source: own[turn] for source, own in enumerate(of_source) if turn < len(own)}
        for turn in range(longest)
    ]
