"""Page-locked memory between GPUs and files: one block is copied while another is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from dist_checkpointing.format.geometry import Box, split_rows

ALIGNMENT_BYTES = 64
_MOST_BLOCK_BYTES = 2**24
"""Of a larger block neither a copy from a GPU nor a write gets faster."""
_MOST_TENSORS = 1024

Launched = list[tuple[int, torch.Tensor]]


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the values must be copied to be written, by a device that can do so by itself."""
    return tensor.is_cuda


def padded(num_bytes: int) -> int:
    """The bytes that so many take in aligned memory."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _TwoBlocks:
    """Two blocks of memory, page-locked where there is a GPU, allocated when first used."""

    def __init__(self, most_bytes: int) -> None:
        half = min(most_bytes // 2, _MOST_BLOCK_BYTES) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.block_bytes = max(ALIGNMENT_BYTES, half)
        self._blocks: list[torch.Tensor] = []

    def view(self, block: int, start: int, like: torch.Tensor) -> torch.Tensor:
        """Memory in a block for a contiguous tensor."""
        if not self._blocks:
            pinned = torch.cuda.is_available()
            memory = torch.empty(2 * self.block_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._blocks = [memory[: self.block_bytes], memory[self.block_bytes :]]
        part = self._blocks[block][start : start + like.nbytes]
        return part.view(like.dtype).view(like.shape)


class HostBlocks:
    """Gives the values of tensors on GPUs, a block of rows at a time; used by one thread.

    Args:
        most_bytes: of memory for the copies.
        release: is called before memory of a block that was given is used again.
    """

    def __init__(self, most_bytes: int, release: Callable[[], None]) -> None:
        self._memory = _TwoBlocks(most_bytes)
        self._release = release

    def of(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """The number of each tensor and its values, in one block or several of them.

        Blocks of a tensor on a GPU are contiguous; other tensors are given as they are.
        """
        waiting: tuple[CopyStreams, Launched] | None = None
        for number, batch in enumerate(self._batches(tensors)):
            self._release()
            launched = self._launch(batch, number % 2)
            if waiting is not None:
                waiting[0].synchronize()
                yield from waiting[1]
            waiting = launched
        if waiting is not None:
            waiting[0].synchronize()
            yield from waiting[1]

    def _batches(self, tensors: Iterable[torch.Tensor]) -> Iterator[Launched]:
        """Blocks that fit into half of the memory together, as they are on their devices."""
        batch: Launched = []
        size = 0
        for number, tensor in enumerate(tensors):
            blocks = [tensor]
            if is_on_gpu(tensor):
                most = self._memory.block_bytes // tensor.dtype.itemsize
                boxes = split_rows(Box.whole(tuple(tensor.shape)), most)
                blocks = [tensor.detach()[box.slices()] for box in boxes]
            for block in blocks:
                num_bytes = padded(block.nbytes) if is_on_gpu(block) else 0
                if batch and (
                    size + num_bytes > self._memory.block_bytes or len(batch) == _MOST_TENSORS
                ):
                    yield batch
                    batch, size = [], 0
                batch.append((number, block))
                size += num_bytes
        if batch:
            yield batch

    def _launch(self, batch: Launched, block: int) -> tuple[CopyStreams, Launched]:
        streams, start, copies = CopyStreams({}), 0, []
        for number, source in batch:
            if not is_on_gpu(source):
                copies.append((number, source))
                continue
            copied = self._memory.view(block, start, source)
            streams.copy(source, copied)
            copies.append((number, copied))
            start += padded(source.nbytes)
        return streams, copies


class DeviceBlocks:
    """Fills tensors on GPUs, a block at a time; used by one thread.

    Args:
        most_bytes: of memory for the blocks.
    """

    def __init__(self, most_bytes: int) -> None:
        self._memory = _TwoBlocks(most_bytes)
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self.block_bytes: int = self._memory.block_bytes

    def fill(
        self,
        targets: Iterable[tuple[torch.Tensor, Callable[[torch.Tensor], None]]],
        stored: torch.dtype,
    ) -> None:
        """Fill tensors; the next one is read while one is copied.

        Args:
            targets: with no more elements than a block has room for, each with what reads its
                values into a contiguous tensor on the CPU.
            stored: dtype of what is read.
        """
        try:
            for number, (target, read) in enumerate(targets):
                self._wait(number % 2)
                like = torch.empty(target.shape, dtype=stored, device="meta")
                block = self._memory.view(number % 2, 0, like)
                read(block)
                self._copied[number % 2] = _copy_to(target, block)
        finally:
            self._wait(0)
            self._wait(1)

    def _wait(self, block: int) -> None:
        event, self._copied[block] = self._copied[block], None
        if event is not None:
            event.synchronize()


def _copy_to(target: torch.Tensor, block: torch.Tensor) -> torch.cuda.Event | None:
    """Begin to copy; the event that follows, or None if the copy is complete."""
    target.copy_(block, non_blocking=target.is_cuda)
    if not target.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(target.device))
    return event


class CopyStreams:
    """Copies to the CPU, those from a GPU on a stream of their own."""

    def __init__(self, launched: Mapping[torch.device, torch.cuda.Event]) -> None:
        self._launched = launched
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        source = source.detach()
        if source.device.type != "cuda":
            target.copy_(source)
            return
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
            event = self._launched.get(source.device)
            if event is None:
                stream.wait_stream(torch.cuda.current_stream(source.device))
            else:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        # A view that the planner made must not be freed, and used again, before it is copied.
        source.record_stream(stream)

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
