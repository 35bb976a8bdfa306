"""Files of a checkpoint, and what happens to them."""

import json
from pathlib import Path
from typing import Any

import torch
import xxhash


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


def place_of(folder: Path, values: torch.Tensor) -> tuple[Path, int]:
    """The file with these values in a row, and where in it they begin."""
    wanted = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if (start := path.read_bytes().find(wanted)) >= 0:
            return path, start
    raise AssertionError("the values are nowhere")


def sealed(content: dict[str, Any]) -> bytes:
    """The bytes of an index file with this content. A forger knows checksums too."""
    open_content = {name: value for name, value in content.items() if name != "checksum"}
    body = json.dumps(open_content, separators=(",", ":")).encode()
    return b'{"checksum":"%016x",' % xxhash.xxh3_64_intdigest(body) + body[1:]
