"""A reader of torch DCP that reads ``.metadata`` once."""

from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata


class CachedMetadataFileSystemReader(FileSystemReader):
    """A FileSystemReader that keeps what it has read of ``.metadata``."""

    _kept: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._kept is None:
            self._kept = super().read_metadata(*args, **kwargs)
        return self._kept
