"""What one rank has read, broadcast to the others.

All ranks of a group take part in all messages in the same order, also in those that they neither
send nor want. A rank with an error goes on to the end, so that no other rank waits for it, and
raises the error then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dist_checkpointing.comm import Comm
from dist_checkpointing.format.geometry import split_flat_range
from dist_checkpointing.strategies.fully_parallel.sharing import ElementRun, Message, Sharing

Arrays = Callable[[int], torch.Tensor]
"""Row -> its memory on this rank."""


def pass_on(sharing: Sharing, arrays: Arrays, comm: Comm, report: Callable[[int], None]) -> None:
    """Fill every row that this rank wants and another rank has read. Collective."""
    with comm.agreed("preparing to pass on what was read"):
        packing = _Packing(sharing, arrays, comm.tensor_device, report)
    for number, message in enumerate(sharing.messages):
        is_own = message.source == comm.rank
        data = packing.packed(number) if is_own else packing.room(number)
        comm.broadcast_tensor(data, message.source)
        if not is_own:
            packing.unpack(number, data)
    with comm.agreed("passing on what was read"):
        if packing.error is not None:
            raise packing.error
        for row, other in sharing.copies:
            arrays(other).copy_(arrays(row))


class _Packing:
    """Packs and unpacks messages; remembers the first error instead of raising it.

    A message that is one run of memory is sent from, or received into, the array itself. All others
    go through one buffer, as large as the largest of them.
    """

    def __init__(
        self,
        sharing: Sharing,
        arrays: Arrays,
        device: torch.device,
        report: Callable[[int], None],
    ) -> None:
        self.error: Exception | None = None
        self._messages = sharing.messages
        self._arrays = arrays
        self._report = report
        self._runs = [self._own_run(message, device) for message in self._messages]
        pairs = zip(self._messages, self._runs, strict=True)
        longest = max((message.num_bytes for message, run in pairs if run is None), default=0)
        self._buffer = torch.empty(longest, dtype=torch.uint8, device=device)

    def packed(self, number: int) -> torch.Tensor:
        """The bytes of a message that this rank sends."""
        data = self.room(number)
        if self._runs[number] is None:
            try:
                for run in self._messages[number].runs:
                    for own, values in self._boxes(run, data):
                        values.copy_(own)
            except Exception as error:  # noqa: BLE001 - raised on all ranks at the end
                self.error = self.error or error
        return data

    def room(self, number: int) -> torch.Tensor:
        """Where a message from another rank goes."""
        run = self._runs[number]
        return self._buffer[: self._messages[number].num_bytes] if run is None else run

    def unpack(self, number: int, data: torch.Tensor) -> None:
        """Copy what has arrived to its destinations, unless it was received there."""
        wanted = [run for run in self._messages[number].runs if run.row >= 0]
        try:
            if self._runs[number] is None:
                for run in wanted:
                    for own, values in self._boxes(run, data):
                        own.copy_(values)
            self._report(sum(run.num_bytes for run in wanted))
        except Exception as error:  # noqa: BLE001 - as above
            self.error = self.error or error

    def _boxes(
        self, run: ElementRun, data: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The boxes of the own array that make up a run, and their values in a message."""
        array = self._arrays(run.row)
        values = data[run.start : run.start + run.num_bytes].view(array.dtype)
        if len(values) == array.numel():
            yield array, values.view(array.shape)
            return
        for box in split_flat_range(tuple(array.shape), run.first, run.last):
            yield array[box.slices()], values[: box.num_elements].view(box.shape)
            values = values[box.num_elements :]

    def _own_run(self, message: Message, device: torch.device) -> torch.Tensor | None:
        """The memory of this rank that is the whole message; None if there is none."""
        (run, *others) = message.runs
        if others or run.row < 0:
            return None
        own = self._arrays(run.row)
        is_plain = own.is_contiguous() and not own.is_conj() and not own.is_neg()
        if own.device.type != device.type or not is_plain:
            return None
        # A tensor of one element is contiguous whatever its strides are.
        flat = own.as_strided((own.numel(),), (1,))
        return flat[run.first : run.last].view(torch.uint8)
