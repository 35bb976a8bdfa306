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
    _ALGORITHMS[algorithm](hands, comm)
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
        self.messages = sharing.messages
        self._units = sharing.units
        self._arrays = arrays
        self._report = report
        self._runs = [self._own_run(message, comm.tensor_device) for message in self.messages]
        pairs = zip(self.messages, self._runs, strict=True)
        longest = max((message.num_bytes for message, run in pairs if run is None), default=0)
        self._buffer = torch.empty(longest, dtype=torch.uint8, device=comm.tensor_device)

    def packed(self, number: int) -> torch.Tensor:
        """The bytes of a message that this rank sends."""
        run, message = self._runs[number], self.messages[number]
        if run is not None:
            return run
        try:
            for block in message.blocks:
                self._place(block, self._buffer).copy_(self._own(block))
        except Exception as error:  # noqa: BLE001 - the others hear of it when all is through
            self.error = self.error or error
        return self._buffer[: message.num_bytes]

    def room(self, number: int) -> torch.Tensor:
        """Where a message from another rank goes."""
        run = self._runs[number]
        return self._buffer[: self.messages[number].num_bytes] if run is None else run

    def unpack(self, number: int, data: torch.Tensor) -> None:
        """Put what has arrived in its place, if it is not there yet."""
        run = self._runs[number]
        wanted = [block for block in self.messages[number].blocks if block.unit in self._arrays]
        try:
            if run is None:
                for block in wanted:
                    self._own(block).copy_(self._place(block, data))
            elif data.data_ptr() != run.data_ptr():
                run.copy_(data[: len(run)])
            self._report(sum(block.num_bytes for block in wanted))
        except Exception as error:  # noqa: BLE001 - as above
            self.error = self.error or error

    def _own(self, block: Block) -> torch.Tensor:
        return self._arrays[block.unit][block.box.slices()]

    def _place(self, block: Block, data: torch.Tensor) -> torch.Tensor:
        """A block of a message, in the bytes of the message."""
        raw = data[block.start : block.start + block.num_bytes]
        return raw.view(self._units[block.unit].dtype.torch).view(block.box.shape)

    def _own_run(self, message: Message, device: torch.device) -> torch.Tensor | None:
        """The memory of this rank that is the message, if there is such."""
        (block, *others) = message.blocks
        if others or block.unit not in self._arrays:
            return None
        own = self._own(block)
        is_plain = own.is_contiguous() and not own.is_conj() and not own.is_neg()
        if own.device.type != device.type or not is_plain:
            return None
        # One element calls itself contiguous whatever its strides are.
        return own.as_strided((own.numel(),), (1,)).view(torch.uint8)


def _broadcast(hands: _Hands, comm: Comm) -> None:
    """One at a time, from its source to all."""
    for number, message in enumerate(hands.messages):
        if message.source == comm.rank:
            comm.broadcast_tensor(hands.packed(number), message.source)
        else:
            room = hands.room(number)
            comm.broadcast_tensor(room, message.source)
            hands.unpack(number, room)


def _gather_rounds(hands: _Hands, comm: Comm) -> None:
    """One of each source at a time, all as long as the longest."""
    for turn in _turns(hands.messages, comm.world_size):
        longest = max(hands.messages[number].num_bytes for number in turn.values())
        own = torch.zeros(longest, dtype=torch.uint8, device=comm.tensor_device)
        if comm.rank in turn:
            given = hands.packed(turn[comm.rank])
            own[: len(given)] = given
        gathered = comm.all_gather_tensor(own)
        for source, number in turn.items():
            if source != comm.rank:
                hands.unpack(number, gathered[source])


def _gather_object(hands: _Hands, comm: Comm) -> None:
    """One of each source at a time, as bytes."""
    for turn in _turns(hands.messages, comm.world_size):
        own = None
        if comm.rank in turn:
            own = bytearray(hands.packed(turn[comm.rank]).cpu().numpy())
        gathered = comm.all_gather(own)
        for source, number in turn.items():
            given = gathered[source]
            if source != comm.rank:
                assert given is not None
                hands.unpack(number, torch.frombuffer(given, dtype=torch.uint8))


_ALGORITHMS: Mapping[str, Callable[[_Hands, Comm], None]] = {
    "broadcast": _broadcast,
    "gather_object": _gather_object,
    "gather_rounds": _gather_rounds,
}
EXCHANGE_ALGORITHMS = tuple(_ALGORITHMS)


def _turns(messages: Sequence[Message], world_size: int) -> list[dict[int, int]]:
    """Source -> number of its message, with at most one of each source at a time."""
    of_source: list[list[int]] = [[] for _ in range(world_size)]
    for number, message in enumerate(messages):
        of_source[message.source].append(number)
    longest = max(map(len, of_source), default=0)
    return [
        {source: own[turn] for source, own in enumerate(of_source) if turn < len(own)}
        for turn in range(longest)
    ]
