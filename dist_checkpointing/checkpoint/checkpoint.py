"""``Checkpoint.open``: a checkpoint as a read-only mapping, and how a notebook shows it.

Nothing here imports torch: a checkpoint of an indexed backend is listed without it, and whatever
needs a strategy or a value loads ``reads`` on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, Final

from dist_checkpointing.byte_sizes import bytes_text
from dist_checkpointing.checkpoint.slicing import ObjectHandle, TensorHandle
from dist_checkpointing.errors import CorruptCheckpointError, Finding, hint
from dist_checkpointing.filesystem import location
from dist_checkpointing.filesystem.location import as_location
from dist_checkpointing.filesystem.object_store import Location
from dist_checkpointing.format.commit import (
    CONTENT_METADATA_KEY,
    CheckpointingConfig,
    check_is_distributed_checkpoint,
    data_folder,
    read_config,
)
from dist_checkpointing.format.geometry import Box, Ints
from dist_checkpointing.format.index import Index, large_objects, read_index
from dist_checkpointing.format.leftovers import ATTEMPT_NAME, CONFIG_FNAME, number_of_save

if TYPE_CHECKING:
    import torch

    from dist_checkpointing.checkpoint.partial_reads import PartialReads
    from dist_checkpointing.format.index import StoredTensor


class Checkpoint(Mapping[str, TensorHandle]):
    """A committed checkpoint of any backend, also of Megatron and torch DCP; see ``open``.

    Attributes:
        path: Where it is.
        folder: Folder of its files: on a disk ``path``, in an object store below it.
        trusted: Whether anything is unpickled.

    Example:
        >>> import torch
        >>> from dist_checkpointing import ShardedTensor, Checkpoint, save
        >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)), "step": 100}
        >>> save(state, "ckpt")
        >>> opened = Checkpoint.open("ckpt")
        >>> opened["w"][2:4]
        tensor([2., 3.])
        >>> opened.common
        {'step': 100}
    """

    def __init__(
        self,
        path: Location,
        config: CheckpointingConfig,
        save_number: int,
        *,
        trusted: bool,
        stamp: object = None,
        folder: Location | None = None,
    ) -> None:
        self.path = path
        # Absolute, so that a handle outlives a change of the working directory.
        self._root = path.absolute()
        self.folder = self._root if folder is None else folder.absolute()
        self._is_in_place = self.folder == self._root
        self.trusted = trusted
        self._config = config
        self._save_number = save_number
        self._stamp = stamp

    @classmethod
    def open(cls, path: str | PathLike[str], *, trusted: bool = False) -> Checkpoint:
        """Open a checkpoint to look into it. Not collective; reads a few bytes.

        Args:
            path: folder or URL of a committed checkpoint.
            trusted: unpickle anything in common state and objects. Lets the checkpoint run any
                code.

        Raises:
            CheckpointNotFoundError: nothing is committed there.
            CorruptCheckpointError: what says how to read it is damaged.
        """
        root = as_location(path)
        folder = data_folder(root)
        # First: a save that begins in between must not go for the one whose config is read.
        stamp, save_number = _stamp(folder), number_of_save(folder)
        config = read_config(folder)
        return cls(root, config, save_number, trusted=trusted, stamp=stamp, folder=folder)

    @property
    def backend(self) -> tuple[str, int]:
        """Name and version of the backend of the tensors."""
        return self._config.sharded_backend, self._config.sharded_backend_version

    @property
    def common_backend(self) -> tuple[str, int]:
        """Name and version of the backend of the common state."""
        return self._config.common_backend, self._config.common_backend_version

    @property
    def is_committed(self) -> bool:
        """Whether what was opened is still there: not deleted, not overwritten by another save."""
        if self._stamp is not None and self._stamp == _stamp(self.folder):
            return True
        return (
            data_folder(self._root) == self.folder
            and check_is_distributed_checkpoint(self.folder)
            and number_of_save(self.folder) == self._save_number
        )

    @cached_property
    def index(self) -> Index:
        """What is stored, as columns.

        Raises:
            CheckpointingException: if that cannot be found out.
        """
        with self.reading():
            index = read_index(self.folder)
            return self.reads.index() if index is None else index

    @cached_property
    def reads(self) -> PartialReads:
        """How values are read."""
        # Not at the top: it imports torch.
        from dist_checkpointing.checkpoint.partial_reads import PartialReads  # noqa: PLC0415

        return PartialReads(self.folder, self._config, trusted=self.trusted)

    @cached_property
    def objects(self) -> Mapping[str, ObjectHandle]:
        """The sharded objects by key."""
        index = self.index
        if index.objects:
            claims = large_objects(index.objects)
            if claims:
                self.reads.require_stored(claims, index)
        grids = index.objects or self.reads.object_grids(index)
        return {key: ObjectHandle(self, key, shape) for key, shape in sorted(grids.items())}

    @cached_property
    def common(self) -> dict[str, Any]:
        """The common state; unpickled with an allow-list of plain types unless ``trusted``."""
        with self.reading():
            return self.reads.common()

    @property
    def metadata(self) -> dict[str, Any] | None:
        """The ``content_metadata`` that was passed to ``save``; None if there was none."""
        return self.common.get(CONTENT_METADATA_KEY)

    def fingerprint(self, key: str) -> str:
        """The fingerprint of a tensor, see ``dist_checkpointing.fingerprint``: 32 hex digits.

        As the save has kept it; if it kept none, the tensor is read.

        Raises:
            KeyError: if there is no such tensor.
            CheckpointingException: if it cannot be read, or the checkpoint has been overwritten.

        Example:
            >>> import torch
            >>> from dist_checkpointing import Checkpoint, ShardedTensor, fingerprint, save
            >>> state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0))}
            >>> save(state, "ckpt", fingerprints=True)
            >>> Checkpoint.open("ckpt").fingerprint("w") == fingerprint(state)["w"]
            True
        """
        return self.fingerprints([key])[key]

    def fingerprints(
        self,
        keys: Iterable[str] | None = None,
        *,
        stored: bool = True,
        report: Callable[[int], None] = lambda _: None,
    ) -> dict[str, str]:
        """The fingerprints of several tensors by key; see ``fingerprint``.

        Args:
            keys: Keys of the tensors; by default all.
            stored: Take what the save has kept. Otherwise everything is read.
            report: Called with the number of bytes that were read since the last call.
        """
        wanted = [*self.index] if keys is None else [self[key].key for key in keys]
        known = self.index.fingerprints if stored else {}
        missing = [key for key in wanted if key not in known]
        found: dict[str, str] = {}
        if missing:
            # Not at the top: it imports torch.
            from dist_checkpointing.storage.fingerprints import (  # noqa: PLC0415
                fingerprints_by_reading,
            )

            found = fingerprints_by_reading(self.index, missing, self.read, report)
        return {key: found[key] if key in found else known[key] for key in wanted}

    def read(self, wanted: Iterable[tuple[str, Box]]) -> list[torch.Tensor]:
        """Read boxes of any tensors at once, which is faster than one after the other.

        Args:
            wanted: keys and boxes, in elements of the global tensors.

        Returns:
            One new CPU tensor for each.

        Raises:
            KeyError: if there is no such tensor.
            IndexError: if a box does not lie in its tensor.
            CheckpointingException: if one cannot be read, or the checkpoint has been overwritten.
        """
        rows = [(self[key].stored, box) for key, box in wanted]
        for stored, box in rows:
            _require_inside(stored.global_shape, stored.key, box)
        with self.reading():
            return self.reads.boxes(self.index, rows)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Make sure that what the body reads is of the checkpoint that was opened.

        Raises:
            CorruptCheckpointError: if it was deleted or overwritten.
        """
        try:
            yield
        except Exception:
            # That it was deleted says more than that a file is gone.
            self.require_unchanged()
            raise
        self.require_same()

    def require_same(self) -> None:
        """Like ``require_unchanged``, after something was read."""
        # The files of a save that has a folder of its own are never written again.
        if self._is_in_place:
            self.require_unchanged()

    def require_unchanged(self) -> None:
        """Make sure that what has been read is of the checkpoint that was opened.

        Raises:
            CorruptCheckpointError: if it was deleted or overwritten.
        """
        if not self.is_committed:
            finding = Finding(
                "deleted or overwritten", path=str(self.path), remedy="Open it again."
            )
            message = "it changed: this is not the checkpoint that was opened"
            raise CorruptCheckpointError(message, [finding])

    def __getitem__(self, key: str) -> TensorHandle:
        index = self.index
        if key not in index:
            raise KeyError(f"{self.path} holds no tensor {key!r}{hint(str(key), index)}")
        return TensorHandle(self, index[key])

    def __contains__(self, key: object) -> bool:
        return key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.index)

    def __len__(self) -> int:
        return len(self.index)

    def _ipython_key_completions_(self) -> list[str]:
        return [*self]

    def _repr_html_(self) -> str:
        # Not at the top: only notebooks ask for it.

        return html_of(self)

    def __repr__(self) -> str:
        name, version = self.backend
        return f"<Checkpoint {str(self.path)!r}: {name} {version}, {len(self)} tensors>"


def _stamp(folder: Location) -> object:
    """Equal as long as what commits a checkpoint, and names its save, are the same files; or None.

    It costs a tenth of reading them.
    """
    return location.marks_of(folder, (CONFIG_FNAME, ATTEMPT_NAME), opens=True)


def _require_inside(shape: Ints, key: str, box: Box) -> None:
    fits = (
        len(box.offset) == len(box.shape) == len(shape) and min((*box.offset, *box.shape, 0)) == 0
    )
    if not fits or not Box.whole(shape).contains(box):
        raise IndexError(f"{key!r}: {box!r} does not lie in a tensor of shape {shape}")


_MOST_SHOWN: Final = 2000
_MOST_LEVELS: Final = 20

_OPEN_TENSORS: Final = 20
"""A group with no more tensors than this is shown open."""

_STYLE: Final = """<style>
.dckpt{font-size:13px;line-height:1.5}.dckpt details,.dckpt p{margin:0 0 0 1.2em;padding:0}
.dckpt summary{cursor:pointer;margin-left:-1.2em}.dckpt small{opacity:.65;margin-left:.6em}
.dckpt input{margin:.3em 0;width:20em;max-width:90%}
</style>"""
# A tensor is hidden unless its key holds the text; a group, unless it holds a tensor that is shown.
_SEARCH: Final = """
const box = this.parentNode, text = this.value.toLowerCase();
for (const one of box.querySelectorAll('p[data-key]'))
  one.hidden = !one.dataset.key.toLowerCase().includes(text);
for (const group of box.querySelectorAll('details')) {
  group.hidden = !group.querySelector('p[data-key]:not([hidden])');
  if (text) group.open = true;
}"""


@dataclass(slots=True)
class _Group:
    """The tensors whose keys begin alike."""

    count: int = 0
    num_bytes: int = 0
    groups: dict[str, _Group] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def add(self, stored: StoredTensor) -> None:
        *path, name = stored.key.split(".", _MOST_LEVELS)
        group = self
        for part in path:
            group.count, group.num_bytes = group.count + 1, group.num_bytes + stored.num_bytes
            group = group.groups.setdefault(part, _Group())
        group.count, group.num_bytes = group.count + 1, group.num_bytes + stored.num_bytes
        group.tensors[name] = stored

    @property
    def text(self) -> str:
        tensors = f"{self.count:,} tensor{'' if self.count == 1 else 's'}"
        return f"{tensors}, {bytes_text(self.num_bytes)}"

    def lines(self) -> Iterator[str]:
        for name, group in self.groups.items():
            state = " open" if group.count <= _OPEN_TENSORS else ""
            yield f"<details{state}><summary>{escape(name)}<small>{group.text}</small></summary>"
            yield from group.lines()
            yield "</details>"
        for name, stored in self.tensors.items():
            what = f"{stored.dtype.name}{list(stored.global_shape)}, {bytes_text(stored.num_bytes)}"
            key = escape(stored.key)
            yield f'<p data-key="{key}" title="{key}">{escape(name)}<small>{what}</small></p>'


def html_of(checkpoint: Checkpoint) -> str:
    """The checkpoint as a fragment of HTML; large ones in part."""
    index, tree, shown = checkpoint.index, _Group(), _Group()
    for number, key in enumerate(index):
        stored = index[key]
        tree.add(stored)
        if number < _MOST_SHOWN:
            shown.add(stored)
    name, version = checkpoint.backend
    search = f'<input type="search" placeholder="Search keys" oninput="{escape(_SEARCH)}">'
    hidden = tree.count - shown.count
    more = f"<p>and {hidden:,} tensors more, which are not shown</p>" if hidden else ""
    head = (
        f"<b>{escape(str(checkpoint.path))}</b><small>{escape(name)} {version}, {tree.text}</small>"
    )
    lines = "".join(shown.lines())
    return f'<div class="dckpt">{_STYLE}{head}<br>{search}{lines}{more}</div>'
