"""Names of files in a checkpoint: keys as file names, reserved names; patterns of keys, and keys of
optimizers.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterable, Sequence
from functools import lru_cache
from urllib.parse import quote

from dist_checkpointing.errors import Finding, InvalidShardingError

_MAX_NAME_BYTES = 200
_MAX_COMPONENT_BYTES = 255
_PLAIN_NAME = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9._-]{{,{_MAX_NAME_BYTES - 1}}}")
_PLAIN_BYTES = (string.ascii_letters + string.digits + "._-").encode()
_TAKEN_NAMES = frozenset({"metadata.json", "common.pt", "zarr.json"})
_OWN_NAMES = frozenset({".dckpt", ".dckpt.lock"})
# Of the surrogates, Python itself puts those from DC80 to DCFF into names that are not UTF-8.
_NO_FILE_NAME = re.compile(
    r"\A/|(\A|/)\.\.(/|\Z)|[\0\ud800-\udc7f\udd00-\udfff]|[^/]{256}|(?s:.){4096}|\A[./]*\Z"
)


def disk_name(key: str) -> str:
    """The folder name of a key: one path component, the same on every file system.

    The name is UTF-8, percent-encoded outside ``[A-Za-z0-9._-]``. A leading dot is encoded too, and
    the first letter of names that a checkpoint uses itself. A name over 200 bytes is cut and ends
    in ``~`` and 16 hex digits; the index maps it back to the key.
    """
    if _PLAIN_NAME.fullmatch(key) and key not in _TAKEN_NAMES:
        return key
    name = quote(key, safe="").replace("~", "%7E")
    if name.startswith(".") or name in _TAKEN_NAMES:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) <= _MAX_NAME_BYTES:
        return name
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return f"{name[: _MAX_NAME_BYTES - 17]}~{digest}"


def disk_names(keys: Sequence[str]) -> list[str]:
    """The folder name of each of many keys; most of them need no change."""
    lines = "\n" + "\n".join(keys)
    if (
        not lines.isascii()
        or "\n." in lines
        or not _TAKEN_NAMES.isdisjoint(keys)
        or not all(keys)
        or max(map(len, keys), default=0) > _MAX_NAME_BYTES
        or len(lines.encode().translate(None, _PLAIN_BYTES)) > len(keys)
    ):
        return list(map(disk_name, keys))
    return list(keys)


@lru_cache(maxsize=1024)
def require_file_name(name: str) -> str:
    """The name that a file of a checkpoint gives for another one: ``name``, relative, with ``/``.

    Raises:
        ValueError: if it leads out of the checkpoint, or cannot be a name on any file system.
    """
    if _NO_FILE_NAME.search(name):
        raise ValueError(f"{name[:100]!r} is no file of a checkpoint")
    return name


def check_raw_key(key: str) -> None:
    """Check that a key can be used as a relative path as it is.

    Raises:
        InvalidShardingError: if it would leave the folder or clash with other files.
    """
    parts = key.split("/")
    problem = None
    if any(part in ("", ".", "..") for part in parts) or "\0" in key:
        problem = "as a path this key has an empty, '.' or '..' component"
    elif any(len(part.encode()) > _MAX_COMPONENT_BYTES for part in parts):
        problem = f"a component of this key is longer than {_MAX_COMPONENT_BYTES} bytes"
    elif parts[0] in _TAKEN_NAMES | _OWN_NAMES:
        problem = "the checkpoint itself uses this name"
    elif any(part.endswith(".sync") for part in parts):
        problem = "readers think that folders that end in .sync are Megatron's locks"
    if problem is not None:
        finding = Finding(problem, key, remedy="Rename the key, or use a backend that encodes it.")
        raise InvalidShardingError("a key cannot be a file name", [finding])


_SPECIAL = frozenset(r"\[](){}*+?^$|")
PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}")
NUMBER = "i"
"""Name of the placeholder that stands for a number."""
EVERY_KEY = "{key*}"
WHOLE_KEY = "a pattern must match the whole key, where {name*} or .* stands for any text"
"""What to say where a pattern matches nothing."""


def key_pattern(text: str) -> re.Pattern[str]:
    """A pattern of whole keys (``fullmatch``); ValueError if it is no regular expression.

    It is a key (if dots are its only special characters), or a regular expression. In both, ``{i}``
    stands for a number, any other ``{name}`` for a text without a dot, and ``{name*}`` for any.
    """
    is_exact = not _SPECIAL.intersection(PLACEHOLDER.sub("", text))
    expression, begin, seen = "", 0, set[str]()
    for found in (*PLACEHOLDER.finditer(text), None):
        plain = text[begin : found.start() if found else None]
        expression += re.escape(plain) if is_exact else plain
        if found is not None:
            name, begin = found[1], found.end()
            kind = "[0-9]+" if name == NUMBER else ".+" if found[2] else "[^.]+"
            expression += f"(?P={name})" if name in seen else f"(?P<{name}>{kind})"
            seen.add(name)
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        problem = f"{text!r} is not a regular expression: {error}; .* stands for any text"
        raise ValueError(problem) from error


_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optim(?:izer)?s?(?:[^a-z]|$)")
"""Megatron numbers chained optimizers. "optimal" and "optimism" do not match."""


def is_of_optimizer(key: str) -> bool:
    """Whether a key belongs to an optimizer: ``optim.exp_avg``, ``chained_0.optimizer.0``.

    ``dckpt stats``, retention and the tensorstore backend use this.
    """
    return _OPTIMIZER.match(key) is not None


def optimizer_prefixes(keys: Iterable[str]) -> list[str]:
    """The prefixes of the keys of optimizers, with which no other key begins."""
    known = list(keys)
    found = {match.group() for match in map(_OPTIMIZER.match, known) if match is not None}
    # A key that is only the word is a prefix of other words too: "optim" of "optimal".
    return sorted(
        prefix
        for prefix in found
        if all(is_of_optimizer(key) for key in known if key.startswith(prefix))
    )
