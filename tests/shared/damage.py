"""Files of a checkpoint, and what happens to them."""

from __future__ import annotations

from pathlib import Path


def files_in(folder: Path) -> dict[str, bytes]:
    """Content of each file, by its path in the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def flip(path: Path, position: int | None = None, bits: int = 1) -> None:
    """Change bits of one byte, by default of the one in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= bits
    path.write_bytes(content)


def damage(folder: Path) -> None:
    """Change the byte in the middle of the largest file of values."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".dckpt" not in path.parts)
    values = (path for path in files if path.suffix not in (".json", ".pt"))
    flip(max(values, key=lambda path: path.stat().st_size))
