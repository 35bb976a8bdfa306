"""Checks a pickle before anything unpickles it, and refuses what no checkpoint holds.

A pickle of a few bytes can cost any amount of time and memory: containers that share their parts
may unfold to any number of values, nesting may overflow the C stack, and a call may expand a
number. One walk over the opcodes counts what the pickle would build, and builds nothing itself.
"""

from __future__ import annotations

import decimal
import fractions
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dist_checkpointing.threads import paused_collector

MOST_LEVELS = 256
"""Limit for containers inside each other, because every walk over a state dict is recursive."""

LEAST_VALUES = 1 << 18
VALUES_PER_BYTE = 8
"""A pickle of n bytes may unfold to ``LEAST_VALUES + VALUES_PER_BYTE * n`` values; a shared part
counts each time."""

_MOST_LITERAL_BYTES = 1 << 12
_BYTES_PER_VALUE = 64
_MOST_INT_BYTES = 1 << 10
_MOST_OF_ONE_HASH = 1 << 10
_NUMBERS: dict[str, Callable[..., Any]] = {"builtins.complex": complex, "builtins.int": int}
_NUMBERS |= {"decimal.Decimal": decimal.Decimal, "fractions.Fraction": fractions.Fraction}
"""Calls that make numbers. A hostile pickle can make many different numbers with one hash."""


class BadPickle(ValueError):
    """A pickle is damaged, or would build what no checkpoint holds; see the message."""


class Stub:
    """Stands for a value that the pickle would build, other than a short literal.

    Attributes:
        kind: "list", "dict", "set", "tuple", "text", "call", "global" or "storage".
        name: Name of the class or function of a "call" or "global".
        items: Items of a "tuple", or arguments of a "call"; None if they are not kept.
        size: Number of values in it, itself included; a shared value counts each time.
        depth: Levels of containers in it.
        is_used: Whether it is a part of another value, and so must not change any more.
    """

    __slots__ = ("depth", "is_used", "items", "kind", "name", "size")

    def __init__(
        self, kind: str, name: str = "", items: Sequence[Any] | None = None, size: int = 1
    ) -> None:
        self.kind: str = kind
        self.name: str = name
        self.items: Sequence[Any] | None = items
        self.size: int = size
        self.depth: int = 0
        self.is_used: bool = False


CallCheck = Callable[[str, Sequence[Any]], None]
"""``(name, arguments)``: raises BadPickle for a call that must not be made."""

StateCheck = Callable[[Stub, Any], None]
"""``(object, state)``: raises BadPickle for a state that must not be set."""

StorageCheck = Callable[[Any], int]
"""The id of a storage -> its number of elements; raises BadPickle if there is no such storage."""


def _accept(*_: Any) -> None:
    """Accept every call: the caller builds nothing, so it costs nothing."""


def _no_storage(pid: Any) -> int:
    del pid
    raise BadPickle("it refers to something outside of it")


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks of a pickle other than that of its size."""

    call: CallCheck = _accept
    state: StateCheck = _accept
    storage: StorageCheck = _no_storage


@dataclass(frozen=True, slots=True)
class Pickle:
    """A pickle that was checked: where it ends, and its value, a Stub unless a short literal."""

    end: int
    value: Any


def check_pickle(data: Any, start: int = 0, checks: Checks | None = None) -> Pickle:
    """Check the pickle that begins at ``data[start]``, without building its value.

    This takes about 0.2 microseconds for each opcode, and about as much memory as the pickle.

    Raises:
        BadPickle: if it is damaged, or would build more than its size allows.
    """
    walk = _Walk(data, Checks() if checks is None else checks)
    try:
        # Stubs form no cycles, and many of them exist at a time.
        with paused_collector():
            return walk.run(start)
    except (IndexError, KeyError, struct.error) as error:
        raise BadPickle("it is cut off, or its opcodes contradict each other") from error


# Opcodes, see pickletools. Opcodes that no pickler of state dicts writes are refused.
_EMPTY = {0x5D: "list", 0x7D: "dict", 0x8F: "set"}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
# Opcode -> size of the length in front of a text.
_TEXTS = {0x58: 4, 0x8C: 1, 0x8D: 8, 0x55: 1, 0x54: 4, 0x43: 1, 0x42: 4, 0x8E: 8, 0x96: 8}
_UNICODE = frozenset({0x58, 0x8C, 0x8D})
_FLOAT = struct.Struct(">d")


# It never changes, so one object serves for all.
_EMPTY_TUPLE = Stub("tuple", items=())


class _Walk:
    """One walk over the opcodes."""

    def __init__(self, data: Any, checks: Checks) -> None:
        self._data = data
        self._checks = checks
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        # Hashing values and passing them to calls counts as work too.
        self._work = 0
        self._most = 0
        # The first number with each hash. As keys, n numbers with one hash cost n^2 steps.
        self._hashes: dict[int, Any] = {}
        self._clashes = 0

    def run(self, start: int) -> Pickle:  # noqa: PLR0912, PLR0915 - one branch an opcode
        data, size = self._data, len(self._data)
        self._most = LEAST_VALUES + VALUES_PER_BYTE * (size - start)
        stack, memo = self._stack, self._memo
        position = start
        while True:
            opcode = data[position]
            position += 1
            if opcode == 0x71:  # BINPUT
                memo[data[position]] = stack[-1]
                position += 1
            elif opcode == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif opcode in _TEXTS:
                value, position = self._text(opcode, position, size)
                stack.append(value)
            elif opcode == 0x68:  # BINGET
                stack.append(self._again(data[position]))
                position += 1
            elif opcode == 0x4B:  # BININT1
                stack.append(data[position])
                position += 1
            elif opcode == 0x72:  # LONG_BINPUT
                index = int.from_bytes(data[position : position + 4], "little")
                if index > size:
                    raise BadPickle(f"it numbers its values up to {index}")
                memo[index] = stack[-1]
                position += 4
            elif opcode == 0x6A:  # LONG_BINGET
                stack.append(self._again(int.from_bytes(data[position : position + 4], "little")))
                position += 4
            elif opcode == 0x28:  # MARK
                self._below.append(stack)
                stack = self._stack = []
            elif opcode in _CONSTANTS:
                stack.append(_CONSTANTS[opcode])
            elif opcode in _TUPLES:
                count = _TUPLES[opcode]
                items = stack[-count:]
                if len(items) < count:
                    raise BadPickle("its opcodes contradict each other")
                del stack[-count:]
                stack.append(self._tuple(items))
            elif opcode in {0x75, 0x65, 0x90}:  # SETITEMS, APPENDS, ADDITEMS
                items, stack = stack, self._pop_mark()
                self._fill(stack[-1], items, opcode)
            elif opcode in {0x73, 0x61}:  # SETITEM, APPEND
                count = 2 if opcode == 0x73 else 1
                items = stack[-count:]
                del stack[-count:]
                self._fill(stack[-1], items, opcode)
            elif opcode == 0x74:  # TUPLE
                items, stack = stack, self._pop_mark()
                stack.append(self._tuple(items))
            elif opcode == 0x91:  # FROZENSET
                items, stack = stack, self._pop_mark()
                stub = Stub("set")
                self._add_parts(stub, items)
                self._add_work(stub.size)
                stack.append(stub)
            elif opcode in _EMPTY:
                stack.append(Stub(_EMPTY[opcode]))
            elif opcode == 0x29:  # EMPTY_TUPLE
                stack.append(_EMPTY_TUPLE)
            elif opcode == 0x47:  # BINFLOAT
                stack.append(_FLOAT.unpack_from(data, position)[0])
                position += 8
            elif opcode == 0x4A:  # BININT
                stack.append(int.from_bytes(data[position : position + 4], "little", signed=True))
                position += 4
            elif opcode == 0x4D:  # BININT2
                stack.append(int.from_bytes(data[position : position + 2], "little"))
                position += 2
            elif opcode in {0x8A, 0x8B}:  # LONG1, LONG4
                value, position = self._long(opcode, position, size)
                stack.append(value)
            elif opcode in {0x52, 0x81, 0x92}:  # REDUCE, NEWOBJ, NEWOBJ_EX
                self._call(opcode)
            elif opcode == 0x62:  # BUILD
                self._build()
            elif opcode == 0x63:  # GLOBAL
                first = data.find(b"\n", position)
                last = data.find(b"\n", first + 1)
                if first < 0 or last < 0:
                    raise BadPickle("it is cut off")
                stack.append(self._global(data[position:first], data[first + 1 : last]))
                position = last + 1
            elif opcode == 0x93:  # STACK_GLOBAL
                name, module = stack.pop(), stack.pop()
                if type(name) is not str or type(module) is not str:
                    raise BadPickle("the name of a class is not a text")
                stack.append(self._global(module.encode(), name.encode()))
            elif opcode == 0x51:  # BINPERSID
                stack.append(self._storage(stack.pop()))
            elif opcode == 0x80:  # PROTO
                position += 1
            elif opcode == 0x95:  # FRAME
                length = int.from_bytes(data[position : position + 8], "little")
                position += 8
                if length > size - position:
                    raise BadPickle("it is cut off")
            elif opcode == 0x2E:  # STOP
                self._add_parts(Stub("tuple"), [stack[-1]])
                return Pickle(position, stack[-1])
            else:
                raise BadPickle(f"opcode 0x{opcode:02x} is in no pickle of a state dict")

    def _pop_mark(self) -> list[Any]:
        self._stack = self._below.pop()
        return self._stack

    def _again(self, index: int) -> Any:
        value = self._memo[index]
        if type(value) is Stub:
            value.is_used = True
        return value

    def _text(self, opcode: int, position: int, size: int) -> tuple[Any, int]:
        width = _TEXTS[opcode]
        data = self._data
        length = (
            data[position]
            if width == 1
            else int.from_bytes(data[position : position + width], "little")
        )
        begin = position + width
        end = begin + length
        if end > size:
            raise BadPickle(f"a text of {length} bytes in a pickle of {size}")
        if length > _MOST_LITERAL_BYTES:
            return Stub("text", size=1 + length // _BYTES_PER_VALUE), end
        value = data[begin:end]
        # The checks only look at texts in calls and names, so errors in other texts do not matter.
        return (value.decode("utf-8", "replace") if opcode in _UNICODE else value), end

    def _long(self, opcode: int, position: int, size: int) -> tuple[int, int]:
        width = 1 if opcode == 0x8A else 4
        length = int.from_bytes(self._data[position : position + width], "little")
        begin = position + width
        if length > _MOST_INT_BYTES or begin + length > size:
            raise BadPickle(f"a number of {length} bytes")
        value = int.from_bytes(self._data[begin : begin + length], "little", signed=True)
        if length > 8 and value.bit_length() > 64:
            self._note("builtins.int", [value])
        return value, begin + length

    def _note(self, name: str, arguments: Sequence[Any]) -> None:
        """Count the numbers that have the hash of another number."""
        with suppress(ValueError, TypeError, ArithmeticError):  # the unpickler will raise it
            number = _NUMBERS[name](*arguments)
            first = self._hashes.setdefault(hash(number), number)
            self._clashes += first is not number and first != number
        if self._clashes > _MOST_OF_ONE_HASH:
            raise BadPickle(f"more than {_MOST_OF_ONE_HASH} of its numbers share their hashes")

    def _add_parts(self, stub: Stub, items: Sequence[Any]) -> None:
        """Add the sizes of the items to a stub."""
        size, depth = stub.size, stub.depth
        for item in items:
            if type(item) is Stub:
                item.is_used = True
                size += item.size
                if item.depth >= depth:
                    depth = item.depth + 1
            else:
                size += 1
        if size > self._most:
            raise BadPickle(
                f"it unfolds to more than {self._most} values, because parts of it are shared"
            )
        if depth > MOST_LEVELS:
            raise BadPickle(f"it is nested more than {MOST_LEVELS} levels deep")
        stub.size, stub.depth = size, depth

    def _add_work(self, work: int) -> None:
        self._work += work
        if self._work > self._most:
            raise BadPickle(f"to build it takes more than {self._most} steps")

    def _tuple(self, items: Sequence[Any]) -> Stub:
        stub = Stub("tuple", items=items)
        self._add_parts(stub, items)
        return stub

    def _fill(self, target: Any, items: Sequence[Any], opcode: int) -> None:
        if type(target) is not Stub or target.kind in ("tuple", "text", "global", "storage"):
            raise BadPickle("it fills something that is not a container")
        if target.is_used:
            raise BadPickle("it holds a container that holds itself")
        if opcode in {0x75, 0x73}:
            hashed: Sequence[Any] = items[::2]
        else:
            hashed = items if opcode == 0x90 else ()
        for key in hashed:
            if type(key) is Stub:
                self._add_work(key.size)
        self._add_parts(target, items)

    def _call(self, opcode: int) -> None:
        stack = self._stack
        extra = [stack.pop()] if opcode == 0x92 else []
        args, called = stack.pop(), stack.pop()
        if type(called) is not Stub or called.kind != "global":
            raise BadPickle("it calls something that is not a class or function")
        if type(args) is not Stub or args.kind != "tuple" or args.items is None:
            raise BadPickle(f"it calls {called.name} without arguments")
        stub = Stub("call", called.name, args.items, args.size + 1)
        stub.depth = args.depth + 1
        if extra or args.size > 1:
            self._add_parts(stub, extra)
            self._add_work(stub.size)
        self._checks.call(called.name, args.items)
        if self._checks.call is not _accept and called.name in _NUMBERS:
            self._note(called.name, args.items)
        stack.append(stub)

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is not Stub or target.kind != "call":
            raise BadPickle("it sets the state of something that is not an object")
        if target.is_used:
            raise BadPickle("it holds an object that holds itself")
        self._add_parts(target, (state,))
        self._checks.state(target, state)

    def _global(self, module: bytes, name: bytes) -> Stub:
        pair = module.decode("utf-8", "replace"), name.decode("utf-8", "replace")
        # Unpicklers translate the names of Python 2, so the checks need the translated ones.
        known = NAME_MAPPING.get(pair) or (IMPORT_MAPPING.get(pair[0], pair[0]), pair[1])
        return Stub("global", ".".join(known))

    def _storage(self, pid: Any) -> Stub:
        return Stub("storage", items=(self._checks.storage(pid),))
