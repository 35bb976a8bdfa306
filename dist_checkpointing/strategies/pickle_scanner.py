"""Looks through a pickle before anything unpickles it, and refuses what no checkpoint holds.

A pickle of a few bytes can allocate any amount of memory, run any function of the allow-list with
any arguments, or overflow the C stack by nesting. One walk over the opcodes adds up the memory that
unpickling would allocate, and builds nothing itself.
"""

from __future__ import annotations

import math
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dist_checkpointing.threads import paused_collector

MOST_LEVELS = 256
"""Limit for containers inside each other, because every walk over a state dict is recursive."""

LEAST_BYTES = 96 << 20
BYTES_PER_BYTE = 48
"""A pickle of n bytes may allocate ``LEAST_BYTES + BYTES_PER_BYTE * n`` bytes. Its value may need
as many when each shared part of it is copied."""

VALUE_BYTES = 16
"""What a number, or a reference to a shared text, counts in its container."""

# Estimates of what objects need here or in an unpickler, whichever is more.
_CONTAINER_BYTES = {"list": 96, "dict": 96, "set": 256, "tuple": 160, "call": 160}
_KEEP_ITEMS = frozenset({"tuple", "storage"})
_ELEMENT_BYTES = 64  # in a copy of a container
_BIG_OBJECT_BYTES = 1024  # tensors and deques
_GLOBAL_BYTES = 192

_MOST_MARKS = 4 * MOST_LEVELS
_MOST_LITERAL_BYTES = 1 << 12
_MOST_INT_BYTES = 1 << 10


class BadPickle(ValueError):
    """A pickle is damaged, or would build what no checkpoint holds; see the message."""


class Stub:
    """Stands for a value that the pickle would build, other than a short literal.

    Attributes:
        kind: "list", "dict", "set", "tuple", "text", "call", "global" or "storage".
        name: Name of the class or function of a "call" or "global".
        items: Items of a "tuple", or arguments of a "call"; None if they are not kept.
        length: Number of elements of a container, or of bytes of a text.
        size: Bytes of a copy of it in which nothing is shared, without texts.
        depth: Levels of containers in it.
        is_used: Whether it is a part of another value, and so must not change any more.
    """

    __slots__ = ("depth", "is_used", "items", "kind", "length", "name", "size")

    def __init__(
        self, kind: str, name: str = "", items: Sequence[Any] | None = None, length: int = 0
    ) -> None:
        self.kind: str = kind
        self.name: str = name
        self.items: Sequence[Any] | None = items
        self.length: int = length
        self.size: int = _CONTAINER_BYTES.get(kind, _ELEMENT_BYTES)
        self.depth: int = 0
        self.is_used: bool = False


StorageCheck = Callable[[Any], int]
"""The id of a storage -> its number of elements; raises BadPickle if there is no such storage."""


def _no_storage(pid: Any) -> int:
    del pid
    raise BadPickle("it refers to something outside of it")


@dataclass(frozen=True, slots=True)
class Pickle:
    """A pickle that was checked: where it ends, and its value, a Stub unless a short literal."""

    end: int
    value: Any


def check_pickle(data: Any, start: int = 0, storage: StorageCheck = _no_storage) -> Pickle:
    """Check the pickle that begins at ``data[start]``, without building its value.

    This takes about 0.2 microseconds for each opcode.

    Raises:
        BadPickle: if it is damaged, or would allocate more than its size allows.
    """
    try:
        # Stubs form no cycles, and many of them exist at a time.
        with paused_collector():
            return _Walk(data, storage).run(start)
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

    def __init__(self, data: Any, storage: StorageCheck) -> None:
        self._data = data
        self._storage = storage
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: list[Any] = []
        self._allocated = 0
        self._most = 0

    def run(self, start: int) -> Pickle:  # noqa: PLR0912, PLR0915 - one branch an opcode
        data, size = self._data, len(self._data)
        self._most = LEAST_BYTES + BYTES_PER_BYTE * (size - start)
        stack, memo = self._stack, self._memo
        position = start
        memoized = False
        while True:
            opcode = data[position]
            position += 1
            if opcode == 0x94:  # MEMOIZE
                memo.append(stack[-1])
                memoized = True
            elif opcode in {0x68, 0x6A}:  # BINGET, LONG_BINGET
                width = 1 if opcode == 0x68 else 4
                value = memo[int.from_bytes(data[position : position + width], "little")]
                if type(value) is Stub:
                    value.is_used = True
                stack.append(value)
                position += width
            elif opcode in {0x71, 0x72}:  # BINPUT, LONG_BINPUT
                width = 1 if opcode == 0x71 else 4
                index = int.from_bytes(data[position : position + width], "little")
                position += width
                if index == len(memo):
                    memo.append(stack[-1])
                else:
                    self._put(index)
            elif opcode == 0x4B:  # BININT1
                stack.append(data[position])
                position += 1
            elif opcode in _TEXTS:
                value, position = self._text(opcode, position, size)
                stack.append(value)
            elif opcode in _TUPLES:
                count = _TUPLES[opcode]
                items = stack[-count:]
                if len(items) < count:
                    raise BadPickle("its opcodes contradict each other")
                del stack[-count:]
                stack.append(self._new("tuple", items))
            elif opcode in {0x52, 0x81, 0x92}:  # REDUCE, NEWOBJ, NEWOBJ_EX
                self._call(opcode)
            elif opcode == 0x28:  # MARK
                if len(self._below) == _MOST_MARKS:
                    raise BadPickle(f"it is nested more than {MOST_LEVELS} levels deep")
                self._below.append(stack)
                stack = self._stack = []
            elif opcode in {0x75, 0x65, 0x90}:  # SETITEMS, APPENDS, ADDITEMS
                items, stack = stack, self._pop_mark()
                self._fill(stack[-1], items)
            elif opcode == 0x62:  # BUILD
                self._build()
            elif opcode == 0x29:  # EMPTY_TUPLE
                stack.append(_EMPTY_TUPLE)
            elif opcode in _EMPTY:
                stack.append(self._new(_EMPTY[opcode], ()))
            elif opcode in _CONSTANTS:
                stack.append(_CONSTANTS[opcode])
            elif opcode in {0x73, 0x61}:  # SETITEM, APPEND
                count = 2 if opcode == 0x73 else 1
                items = stack[-count:]
                del stack[-count:]
                self._fill(stack[-1], items)
            elif opcode == 0x74:  # TUPLE
                items, stack = stack, self._pop_mark()
                stack.append(self._new("tuple", items))
            elif opcode == 0x91:  # FROZENSET
                items, stack = stack, self._pop_mark()
                self._allocate(_ELEMENT_BYTES * len(items))
                stack.append(self._new("set", items))
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
                stack.append(self._new("storage", (self._storage(stack.pop()),)))
            elif opcode == 0x80:  # PROTO
                position += 1
            elif opcode == 0x95:  # FRAME
                length = int.from_bytes(data[position : position + 8], "little")
                position += 8
                if length > size - position:
                    raise BadPickle("it is cut off")
            elif opcode == 0x2E:  # STOP
                self._add_parts(Stub("tuple"), [stack[-1]])
                if memoized and memo[0] is _UNUSED:
                    raise BadPickle("it numbers its values in two ways")
                return Pickle(position, stack[-1])
            else:
                raise BadPickle(f"opcode 0x{opcode:02x} is in no pickle of a state dict")

    def _allocate(self, count: int) -> None:
        self._allocated += count
        if self._allocated > self._most:
            raise BadPickle(f"to build it takes more than {self._most} bytes of memory")

    def _pop_mark(self) -> list[Any]:
        self._stack = self._below.pop()
        return self._stack

    def _put(self, index: int) -> None:
        """Number the last value out of order."""
        memo = self._memo
        if index < len(memo) and memo[index] is not _UNUSED:
            memo[index] = self._stack[-1]
        elif index == 1 and not memo:  # Python 2 counts from 1
            memo += [_UNUSED, self._stack[-1]]
        else:
            raise BadPickle(f"it gives number {index} to its value {len(memo)}")

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
            return Stub("text", length=length), end
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
        return value, begin + length

    def _new(self, kind: str, items: Sequence[Any]) -> Stub:
        stub = Stub(kind, items=items if kind in _KEEP_ITEMS else None)
        if items:
            self._allocate(stub.size + VALUE_BYTES * len(items))
            self._add_parts(stub, items)
        else:
            self._allocate(stub.size)
        return stub

    def _add_parts(self, stub: Stub, items: Sequence[Any]) -> None:
        """Add the sizes of the items to a stub."""
        size, depth = stub.size + VALUE_BYTES * len(items), stub.depth
        for item in items:
            if type(item) is Stub:
                item.is_used = True
                size += item.size
                if item.depth >= depth:
                    depth = item.depth + 1
        if size > self._most:
            raise BadPickle(
                f"it unfolds to more than {self._most} bytes, because parts of it are shared"
            )
        if depth > MOST_LEVELS:
            raise BadPickle(f"it is nested more than {MOST_LEVELS} levels deep")
        stub.size, stub.depth = size, depth
        stub.length += len(items)

    def _fill(self, target: Any, items: Sequence[Any]) -> None:
        if type(target) is not Stub or target.kind not in ("list", "dict", "set", "call"):
            raise BadPickle("it fills something that is not a container")
        if target.is_used:
            raise BadPickle("it holds a container that holds itself")
        self._add_parts(target, items)

    def _call(self, opcode: int) -> None:
        stack = self._stack
        extra = [stack.pop()] if opcode == 0x92 else []
        args, called = stack.pop(), stack.pop()
        if type(called) is not Stub or called.kind != "global":
            raise BadPickle("it calls something that is not a class or function")
        if type(args) is not Stub or args.kind != "tuple" or args.items is None:
            raise BadPickle(f"it calls {called.name} without arguments")
        stub = Stub("text" if called.name in _MAKES_BYTES else "call", called.name, args.items)
        allocated, copied = check_call(called.name, args.items)
        self._allocate(stub.size + allocated)
        stub.size += args.size
        stub.depth = args.depth + 1
        if extra:
            self._add_parts(stub, extra)
        stub.length = copied if stub.kind == "text" else copied // _ELEMENT_BYTES
        stack.append(stub)

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is not Stub or target.kind != "call":
            raise BadPickle("it sets the state of something that is not an object")
        if target.is_used:
            raise BadPickle("it holds an object that holds itself")
        self._add_parts(target, (state,))
        self._allocate(_check_state(target, state))

    def _global(self, module: bytes, name: bytes) -> Stub:
        self._allocate(_GLOBAL_BYTES)
        pair = module.decode("utf-8", "replace"), name.decode("utf-8", "replace")
        # Unpicklers translate the names of Python 2, so the checks need the translated ones.
        known = NAME_MAPPING.get(pair) or (IMPORT_MAPPING.get(pair[0], pair[0]), pair[1])
        return Stub("global", ".".join(known))


_UNUSED = object()
# Calls. Some make gigabytes of a small number, so they may only have arguments that a pickler
# writes. A rule returns how many bytes a call allocates beyond a small object.
LEAST_VIEW_ELEMENTS = 1 << 24
VIEWS_PER_ELEMENT = 64
"""A tensor that repeats elements of its storage (``expand``) may have ``LEAST_VIEW_ELEMENTS``, or
``VIEWS_PER_ELEMENT`` times as many as the storage."""

_MOST_AXES = 64
_MOST_PACKED = 4  # quantized elements in a byte
_MOST_COUNT = 1 << 24
_LEAST_ARRAY_ELEMENTS = 1 << 16
_ENCODINGS = frozenset({"latin1", "latin-1", "ascii", "utf-8", "utf8"})
_ARRAYS = frozenset({f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")})
_MAKES_BYTES = frozenset({"_codecs.encode", "builtins.bytes", "builtins.bytearray"})

Rule = Callable[[str, Sequence[Any]], int]


@lru_cache(maxsize=1024)
def _check_empty_call(name: str) -> int:
    """The bytes of a call without arguments, as most are: of a class, whose state follows."""
    rule = _rule(name)
    return 0 if rule is None else rule(name, ())


def check_call(name: str, args: Sequence[Any]) -> tuple[int, int]:
    """Bytes that a call allocates: in all, and to copy its arguments (literals and Stubs)."""
    if not args:
        return _check_empty_call(name), 0
    copied = 0
    for arg in args:
        copied += _copied(arg)
    rule = _rule(name)
    return copied if rule is None else copied + rule(name, args), copied


@lru_cache(maxsize=1024)
def _rule(name: str) -> Rule | None:
    if name in _RULES:
        return _RULES[name]
    if name.startswith("torch.") and name.endswith(("Tensor", "Storage")):
        return _empty
    is_known = name.partition(".")[0] in ("builtins", "collections", "numpy", "torch")
    return _small if is_known else None


def _length(value: Any) -> int:
    kind = type(value)
    if kind is Stub:
        return int(value.length)
    return len(value) if kind is str or kind is bytes else 0


def _copied(value: Any) -> int:
    """Bytes of a copy of a value, without what is in its elements."""
    if type(value) is Stub and value.kind != "text":
        return _ELEMENT_BYTES * value.length
    return _length(value)


def _check_state(target: Stub, state: Any) -> int:
    """Bytes that an object allocates to copy its state."""
    kind = state.kind if isinstance(state, Stub) else ""
    if kind == "dict" and target.name not in _ARRAYS:
        return _ELEMENT_BYTES * int(state.length)
    items: Sequence[Any] = (state.items or ()) if kind == "tuple" else ()
    if target.name.startswith("torch."):
        if items and isinstance(items[0], Stub) and items[0].kind == "storage":
            _view(target.name, items)  # of a tensor, in old files
        elif kind == "list":
            raise BadPickle(f"a list as the state of a {target.name}")
    elif target.name in _ARRAYS:
        shape = _ints(target.name, items[1]) if len(items) > 1 else ()
        count = math.prod(shape)
        if not items or count > max(_LEAST_ARRAY_ELEMENTS, sum(map(_length, items))):
            raise BadPickle(f"an array of {count} elements has no data for them")
    return sum(map(_copied, items)) if items else _copied(state)


def _container(name: str, args: Sequence[Any]) -> int:
    """Allow only literals and containers: a text or the result of a call may unfold."""
    for arg in args:
        if isinstance(arg, str | bytes) or (
            isinstance(arg, Stub) and arg.kind not in ("list", "dict", "set", "tuple")
        ):
            raise BadPickle(f"{name} of a text, or of the result of another call")
    return _BIG_OBJECT_BYTES if name == "collections.deque" else _CONTAINER_BYTES["set"]


def _literal(name: str, args: Sequence[Any]) -> int:
    if any(isinstance(arg, Stub) for arg in args):
        raise BadPickle(f"{name} of something that is not a literal")
    return 4 * sum(map(_length, args))


def _fraction(name: str, args: Sequence[Any]) -> int:
    # Picklers write "1/3". An exponent makes digits, and bytes may be read as a text.
    if any(isinstance(arg, str | bytes) and "e" in str(arg).lower() for arg in args):
        raise BadPickle(f"{name} with an exponent")
    return _literal(name, args)


def _bytes(name: str, args: Sequence[Any]) -> int:
    if args and not isinstance(args[0], str | bytes) and getattr(args[0], "kind", "") != "text":
        raise BadPickle(f"{name} of something that is not a text")
    return 0


def _range(name: str, args: Sequence[Any]) -> int:
    if not all(type(arg) is int for arg in args):
        raise BadPickle(f"{name} of something that is not a number")
    return 0


def _path(name: str, args: Sequence[Any]) -> int:
    del name
    return _ELEMENT_BYTES * sum(map(_length, args))


def _dtype(name: str, args: Sequence[Any]) -> int:
    # numpy makes a field of each part between commas.
    first = args[0] if args else None
    is_text = isinstance(first, str | bytes) and "," not in str(first)
    if not is_text and not (isinstance(first, Stub) and first.kind == "global"):
        raise BadPickle(f"a call of {name} without a plain type")
    return _CONTAINER_BYTES["set"]


def _empty(name: str, args: Sequence[Any]) -> int:
    if args:
        raise BadPickle(f"a call of {name}, which does not initialise its memory")
    return _BIG_OBJECT_BYTES


def _empty_array(name: str, args: Sequence[Any]) -> int:
    shape = _ints(name, args[1]) if len(args) > 1 else ()
    if not args or not isinstance(args[0], Stub) or math.prod(shape) != 0:
        raise BadPickle(f"a call of {name} that makes more than an empty array")
    return 0


def _scalar(name: str, args: Sequence[Any]) -> int:
    if len(args) < 2:
        raise BadPickle(f"a call of {name} without a value")
    return 0


def _encode(name: str, args: Sequence[Any]) -> int:
    if len(args) > 1 and args[1] not in _ENCODINGS:
        raise BadPickle(f"a call of {name} with the encoding {args[1]!r}")
    return 0


def _view(name: str, args: Sequence[Any]) -> int:
    """``(storage, offset, size, stride, ...)``: a tensor that is a view of a storage."""
    count, own = _elements(name, args)
    if count > max(LEAST_VIEW_ELEMENTS, VIEWS_PER_ELEMENT * own):
        raise BadPickle(f"a tensor of {count} elements in a storage of {own}")
    return _BIG_OBJECT_BYTES


def _copy(name: str, args: Sequence[Any]) -> int:
    """The same for a kind of tensor that gets its own memory."""
    count, own = _elements(name, args)
    if count > _MOST_PACKED * own:
        raise BadPickle(f"a tensor of {count} elements in a storage of {own}")
    return _BIG_OBJECT_BYTES


def _elements(name: str, args: Sequence[Any]) -> tuple[int, int]:
    storage = args[0] if args else None
    if len(args) < 4 or not isinstance(storage, Stub) or storage.kind != "storage":
        raise BadPickle(f"a call of {name} without a storage")
    assert storage.items is not None
    _ints(name, args[3])
    return math.prod(_ints(name, args[2])), storage.items[0]


def _subclass(name: str, args: Sequence[Any]) -> int:
    """``_rebuild_from_type_v2(function, type, args, state)``, which calls the function."""
    if len(args) < 3 or not isinstance(args[0], Stub) or args[0].kind != "global":
        raise BadPickle(f"a call of {name} without a function")
    inner = args[2]
    if not isinstance(inner, Stub) or inner.items is None or inner.kind != "tuple":
        raise BadPickle(f"a call of {name} without arguments")
    return check_call(args[0].name, inner.items)[0]


def _ragged(name: str, args: Sequence[Any]) -> int:
    del args
    raise BadPickle(f"{name}: a nested tensor's parts cannot be checked against its memory")


def _small_object(name: str, args: Sequence[Any]) -> int:
    """Accept any arguments: they do not become memory."""
    del name, args
    return _CONTAINER_BYTES["set"]


def _ints(name: str, value: Any) -> Sequence[int]:
    """A shape, as a tuple or a torch.Size."""
    if isinstance(value, Stub) and value.kind == "call" and value.name == "torch.Size":
        value = value.items[0] if value.items else _EMPTY_TUPLE
    if not isinstance(value, Stub) or value.kind != "tuple" or value.items is None:
        raise BadPickle(f"a call of {name} without a shape")
    if len(value.items) > _MOST_AXES or not all(type(extent) is int for extent in value.items):
        raise BadPickle(f"a call of {name} with an invalid shape")
    return value.items


def _small(name: str, args: Sequence[Any]) -> int:
    """Any other function: its numbers, if they are a shape, must not need much memory."""
    count = math.prod(max(1, abs(number)) for arg in args for number in _numbers(arg))
    if count > _MOST_COUNT:
        raise BadPickle(f"a call of {name} with numbers that multiply to {count}")
    return 8 * count


def _numbers(value: Any) -> Sequence[int]:
    if type(value) is int:
        return (value,)
    if isinstance(value, Stub) and value.kind == "tuple" and value.items is not None:
        return [number for number in value.items[:_MOST_AXES] if type(number) is int]
    return ()


_RULES: dict[str, Rule] = {
    **{f"builtins.{name}": _container for name in ("dict", "frozenset", "list", "set", "tuple")},
    **{f"collections.{name}": _container for name in ("Counter", "OrderedDict", "deque")},
    "torch.Size": _container,
    **{f"builtins.{name}": _literal for name in ("bool", "complex", "float", "int", "str")},
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.range": _range,
    "builtins.slice": _small_object,
    "collections.defaultdict": _small_object,
    "decimal.Decimal": _literal,
    "fractions.Fraction": _fraction,
    **{f"pathlib.{name}": _path for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")},
    "numpy.ndarray": _empty,
    "numpy.dtype": _dtype,
    **{
        f"numpy.{core}.multiarray.{own}": rule
        for core in ("core", "_core")
        for own, rule in (("_reconstruct", _empty_array), ("scalar", _scalar))
    },
    "_codecs.encode": _encode,
    "torch._utils._rebuild_tensor": _view,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _view,
    "torch._utils._rebuild_qtensor": _copy,
    "torch._utils._rebuild_nested_tensor": _ragged,
    "torch._utils._rebuild_meta_tensor_no_storage": _small_object,
    "torch._utils._rebuild_wrapper_subclass": _small_object,
    "torch._utils._rebuild_sparse_tensor": _small_object,
    "torch._tensor._rebuild_from_type_v2": _subclass,
}
