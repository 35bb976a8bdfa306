"""Looks through a pickle before anything unpickles it, and refuses what no checkpoint holds.

A pickle of a few bytes can allocate any amount of memory, run any function of the allow-list with
any arguments, or overflow the C stack by nesting. One walk over the opcodes adds up the memory that
unpickling would allocate, and builds nothing itself.
"""

from __future__ import annotations

import math
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from dist_checkpointing.threads import paused_collector

MOST_LEVELS = 256
"""Limit for containers inside each other, because every walk over a state dict is recursive."""

LEAST_BYTES = 96 << 20
BYTES_PER_BYTE = 48
"""A pickle of n bytes may allocate ``LEAST_BYTES + BYTES_PER_BYTE * n`` bytes. A copy of its value
in which nothing is shared may need as many more."""

VALUE_BYTES = 16
"""What a number, or a reference to a shared text, counts in its container."""

# Estimates of what objects need here or in an unpickler, whichever is more.
_CONTAINER_BYTES = {"list": 96, "dict": 96, "set": 256, "tuple": 160, "call": 160, "global": 192}
_ELEMENT_BYTES = 64  # in a copy of a container
_BIG_OBJECT_BYTES = 1024  # tensors and deques

_MOST_MARKS = 4 * MOST_LEVELS
_MOST_LITERAL_BYTES = 1 << 12
_MOST_INT_BYTES = 1 << 10


class BadPickle(ValueError):
    """A pickle is damaged, or would build what no checkpoint holds; see the message."""


@dataclass(slots=True, eq=False)
class Stub:
    """Stands for a value that the pickle would build, other than a short literal.

    Attributes:
        kind: "list", "dict", "set", "tuple", "text", "call", "global" or "storage".
        size: Bytes of a copy of it in which nothing is shared, without texts.
        name: Name of the class or function of a "call" or "global".
        items: Items of a "tuple", arguments of a "call", number of elements of a "storage".
        length: Number of elements of a container, or of bytes of a text.
        depth: Levels of containers in it.
        is_shared: Whether it was taken from the memo, and so must not change any more.
    """

    kind: str
    size: int = 0
    name: str = ""
    items: Sequence[Any] = ()
    length: int = 0
    depth: int = 0
    is_shared: bool = False


StorageCheck = Callable[[Any], int]
"""The id of a storage -> its number of elements; raises BadPickle if there is no such storage."""


def _no_storage(_: Any) -> int:
    raise BadPickle("it refers to something outside of it")


@dataclass(frozen=True, slots=True)
class Pickle:
    """A pickle that was checked: its value (a Stub unless a short literal), and the names of the
    classes and functions in it.
    """

    value: Any
    names: set[str]


def check_pickle(data: Any, storage: StorageCheck = _no_storage) -> Pickle:
    """Check a pickle, without building its value.

    This takes about 0.3 microseconds for each opcode.

    Raises:
        BadPickle: if it is damaged, or would build more than its size allows.
    """
    try:
        # Stubs form no cycles, and many of them exist at a time.
        with paused_collector():
            return _Walk(storage).run(data)
    except (KeyError, IndexError) as error:
        raise BadPickle("it is truncated, or no pickle of a state dict has its opcodes") from error


# The opcodes that picklers of state dicts write, see pickletools. All others are refused.
_WIDTHS = {
    **dict.fromkeys(b"()NQRabcestu}]\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94.", 0),
    **dict.fromkeys(b"hqCKU\x80\x8a\x8c", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"jrBJTX\x8b", 4),
    **dict.fromkeys(b"G\x8d\x8e\x95\x96", 8),
}
"""Bytes of the number behind an opcode."""

_MARKED = -1
_TAKES = {
    **dict.fromkeys(b"]}c\x8f", 0),
    **dict.fromkeys(b"Qab\x85.", 1),
    **dict.fromkeys(b"Rs\x81\x86\x93", 2),
    **dict.fromkeys(b"\x87", 3),
    **dict.fromkeys(b"etu\x90\x91", _MARKED),
}
"""Values that an opcode takes from the stack, or all above the last mark."""

_EMPTY = {0x5D: "list", 0x7D: "dict", 0x8F: "set"}
_MAKES = {0x91: "set", **dict.fromkeys(b"t\x85\x86\x87", "tuple")}
_FILLS = frozenset(b"abesu\x90")
# The empty tuple never changes, so one object serves for all.
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False, 0x29: Stub("tuple")}
_UNICODE = frozenset(b"X\x8c\x8d")


class _Walk:
    def __init__(self, storage: StorageCheck) -> None:
        self._storage = storage
        self._built = 0
        self._names: set[str] = set()

    def run(self, data: Any) -> Pickle:  # noqa: PLR0912, PLR0915 - one branch an opcode
        position, size = 0, len(data)
        most = LEAST_BYTES + BYTES_PER_BYTE * size
        stack: list[Any] = []
        below: list[list[Any]] = []
        memo: list[Any] = []
        items: list[Any] = []
        shared, widths = 0, _WIDTHS
        while True:
            opcode = data[position]
            position += 1
            if opcode == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif width := widths[opcode]:
                number = data[position]
                if width > 1:
                    number = int.from_bytes(data[position : position + width], "little")
                position += width
                if opcode in {0x68, 0x6A}:  # BINGET, LONG_BINGET
                    value = memo[number]
                    if type(value) is Stub:
                        value.is_shared = True
                        shared += value.size
                    stack.append(value)
                elif opcode in {0x4B, 0x4D}:  # BININT1, BININT2
                    stack.append(number)
                elif opcode in {0x71, 0x72}:  # BINPUT, LONG_BINPUT
                    if number == len(memo):
                        memo.append(stack[-1])
                    elif number > len(memo):
                        raise BadPickle(f"it gives number {number} to its value {len(memo)}")
                    else:
                        memo[number] = stack[-1]
                elif opcode == 0x4A:  # BININT
                    stack.append(number - (number >> 31 << 32))
                elif opcode == 0x47:  # BINFLOAT
                    stack.append(0.0)
                elif opcode != 0x80:  # texts, LONG1, LONG4 and FRAME; not PROTO
                    if number > size - position:
                        raise BadPickle(f"{number} bytes in a pickle of {size}")
                    if opcode == 0x95:
                        continue
                    start, position = position, position + number
                    if opcode in {0x8A, 0x8B}:
                        if number > _MOST_INT_BYTES:
                            raise BadPickle(f"a number of {number} bytes")
                        value = int.from_bytes(data[start:position], "little", signed=True)
                    elif number > _MOST_LITERAL_BYTES:
                        value = Stub("text", length=number)
                    else:
                        value = data[start:position]
                        # Errors in texts do not matter: the checks look at names and arguments.
                        if opcode in _UNICODE:
                            value = value.decode("utf-8", "replace")
                    stack.append(value)
            elif opcode == 0x28:  # MARK
                if len(below) == _MOST_MARKS:
                    raise BadPickle(f"it is nested more than {MOST_LEVELS} levels deep")
                below.append(stack)
                stack = []
            elif opcode in _CONSTANTS:
                stack.append(_CONSTANTS[opcode])
            else:
                takes = _TAKES[opcode]
                if takes == _MARKED:
                    items, stack = stack, below.pop()
                elif takes:
                    items = stack[-takes:]
                    if len(items) < takes:
                        raise IndexError
                    del stack[-takes:]
                if opcode in _EMPTY:
                    kind = _EMPTY[opcode]
                    self._built += _CONTAINER_BYTES[kind]
                    stack.append(Stub(kind, _CONTAINER_BYTES[kind]))
                elif opcode in _MAKES:
                    if takes == _MARKED:
                        self._built += _ELEMENT_BYTES * len(items)
                    stack.append(self._new(_MAKES[opcode], items))
                elif opcode in _FILLS:
                    self._fill(stack[-1], items)
                    if opcode == 0x62:  # BUILD
                        self._built += _check_state(stack[-1], items[0])
                elif opcode in {0x52, 0x81}:  # REDUCE, NEWOBJ
                    stack.append(self._call(*items))
                elif opcode == 0x63:  # GLOBAL
                    last = data.find(b"\n", data.find(b"\n", position) + 1)
                    names = data[position : max(last, 0)].decode("utf-8", "replace").split("\n")
                    stack.append(self._global(*names))
                    position = last + 1
                elif opcode == 0x93:  # STACK_GLOBAL
                    stack.append(self._global(*items))
                elif opcode == 0x51:  # BINPERSID
                    stored = self._storage(items[0])
                    stack.append(Stub("storage", _ELEMENT_BYTES, items=(stored,)))
                else:  # STOP
                    break
                if self._built > most:
                    raise BadPickle(f"to build it takes more than {most} bytes of memory")
        self._add_parts(Stub("tuple"), items)
        if shared > most:
            raise BadPickle(f"it unfolds to more than {most} bytes, because parts of it are shared")
        return Pickle(items[0], self._names)

    def _new(self, kind: str, items: Sequence[Any] = ()) -> Stub:
        own = _CONTAINER_BYTES[kind]
        self._built += own
        stub = Stub(kind, own, "", items if kind == "tuple" else ())
        if items:
            self._built += VALUE_BYTES * len(items)
            self._add_parts(stub, items)
        return stub

    def _add_parts(self, stub: Stub, items: Sequence[Any]) -> None:
        size, depth = stub.size + VALUE_BYTES * len(items), stub.depth
        for item in items:
            if type(item) is Stub:
                size += item.size
                if item.depth >= depth:
                    depth = item.depth + 1
        if depth > MOST_LEVELS:
            raise BadPickle(f"it is nested more than {MOST_LEVELS} levels deep")
        stub.size, stub.depth = size, depth
        stub.length += len(items)

    def _fill(self, target: Any, items: Sequence[Any]) -> None:
        if type(target) is not Stub or target.kind not in ("list", "dict", "set", "call"):
            raise BadPickle("it fills something that is not a container")
        if target.is_shared:
            raise BadPickle("it holds a container that holds itself")
        self._add_parts(target, items)

    def _call(self, called: Any, args: Any) -> Stub:
        if _kind(called) != "global":
            raise BadPickle("it calls something that is not a class or function")
        if _kind(args) != "tuple":
            raise BadPickle(f"it calls {called.name} without arguments")
        stub, name = self._new("call"), called.name
        allocated, copied = check_call(name, args.items)
        self._built += allocated
        stub.name, stub.items, stub.length = name, args.items, copied // _ELEMENT_BYTES
        if name in _MAKES_BYTES:
            stub.kind, stub.length = "text", copied
        stub.size += args.size
        stub.depth = args.depth + 1
        return stub

    def _global(self, *names: Any) -> Stub:
        if len(names) != 2 or not all(type(name) is str for name in names):
            raise BadPickle("the name of a class is not a text")
        module, name = names
        # Unpicklers translate the names of Python 2, so the checks need the translated ones.
        known = NAME_MAPPING.get((module, name)) or (IMPORT_MAPPING.get(module, module), name)
        self._names.add(".".join(known))
        self._built += _CONTAINER_BYTES["global"] + len(module) + len(name)
        return Stub("global", name=".".join(known))


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
_MAKES_BYTES = frozenset({"_codecs.encode", "builtins.bytes", "builtins.bytearray"})

Rule = Callable[[str, Sequence[Any]], int]


def check_call(name: str, args: Sequence[Any]) -> tuple[int, int]:
    """Bytes that a call allocates: in all, and to copy its arguments (literals and Stubs)."""
    copied = sum(map(_copied, args))
    return copied + _rule(name)(name, args), copied


@lru_cache(maxsize=1024)
def _rule(name: str) -> Rule:
    if name in _RULES:
        return _RULES[name]
    if name.startswith("torch.") and name.endswith(("Tensor", "Storage")):
        return _empty
    return _small if name.startswith(("numpy.", "torch.")) else _any


def _kind(value: Any) -> str:
    if isinstance(value, Stub):
        return value.kind
    return "text" if isinstance(value, str | bytes) else "literal"


def items_of(value: Any) -> Sequence[Any]:
    """The items of a tuple; none of anything else."""
    return value.items if isinstance(value, Stub) and value.kind == "tuple" else ()


def _copied(value: Any) -> int:
    """Bytes of a copy of a value, without what is in its elements."""
    if isinstance(value, Stub):
        return value.length if value.kind == "text" else _ELEMENT_BYTES * value.length
    return len(value) if isinstance(value, str | bytes) else 0


def _check_state(target: Stub, state: Any) -> int:
    """Bytes that an object allocates to copy its state."""
    items = items_of(state)
    if target.name in _ARRAYS:
        count = math.prod(_ints(target.name, *items[1:2]))
        if not items or count > max(_LEAST_ARRAY_ELEMENTS, sum(map(_copied, items))):
            raise BadPickle(f"an array of {count} elements has no data for them")
    elif target.name.startswith("torch."):
        if items and _kind(items[0]) == "storage":
            _view(target.name, items)  # of a tensor, in old files
        elif _kind(state) not in ("tuple", "dict"):
            raise BadPickle(f"a {_kind(state)} as the state of a {target.name}")
    return sum(map(_copied, items or [state]))


def _arguments(name: str, args: Sequence[Any], kinds: Sequence[str], each: int, base: int) -> int:
    """Accept arguments of some kinds: others, as a range, may unfold."""
    for arg in args:
        if _kind(arg) not in kinds:
            raise BadPickle(f"{name} of a {_kind(arg)}")
    return base + each * sum(map(_copied, args))


_CONTAINED = ("literal", "list", "dict", "set", "tuple")
_container = partial(_arguments, kinds=_CONTAINED, each=0, base=_CONTAINER_BYTES["set"])
_literal = partial(_arguments, kinds=("literal", "text"), each=_ELEMENT_BYTES, base=0)


def _any(*_: Any, base: int = 0) -> int:
    """Accept any arguments: they do not become memory."""
    return base


_small_object = partial(_any, base=_CONTAINER_BYTES["set"])


def _fraction(name: str, args: Sequence[Any]) -> int:
    # Picklers write "1/3". An exponent makes digits, and bytes may be read as a text.
    if any(isinstance(arg, Stub) or "e" in str(arg).lower() for arg in args):
        raise BadPickle(f"{name} with an exponent")
    return _literal(name, args)


def _bytes(name: str, args: Sequence[Any]) -> int:
    if args and _kind(args[0]) != "text":
        raise BadPickle(f"{name} of something that is not a text")
    if any(arg not in _ENCODINGS for arg in args[1:]):
        raise BadPickle(f"a call of {name} with another encoding than a pickler writes")
    return 0


def _dtype(name: str, args: Sequence[Any]) -> int:
    # numpy makes a field of each part between commas.
    first = args[0] if args else None
    if _kind(first) != "global" and (not isinstance(first, str | bytes) or "," in str(first)):
        raise BadPickle(f"a call of {name} without a plain type")
    return _CONTAINER_BYTES["set"]


def _empty(name: str, args: Sequence[Any]) -> int:
    if args:
        raise BadPickle(f"a call of {name}, which does not initialise its memory")
    return _BIG_OBJECT_BYTES


def _empty_array(name: str, args: Sequence[Any]) -> int:
    if not args or _kind(args[0]) != "global" or 0 not in _ints(name, *args[1:2]):
        raise BadPickle(f"a call of {name} that makes more than an empty array")
    return 0


def _scalar(name: str, args: Sequence[Any]) -> int:
    if len(args) < 2:
        raise BadPickle(f"a call of {name} without a value")
    return 0


def _view(name: str, args: Sequence[Any], *, is_copy: bool = False) -> int:
    """``(storage, offset, size, stride, ...)``: a tensor that is a view of a storage, or a copy."""
    if len(args) < 4 or _kind(args[0]) != "storage":
        raise BadPickle(f"a call of {name} without a storage")
    _ints(name, args[3])
    count, (stored,) = math.prod(_ints(name, args[2])), args[0].items
    if count > (
        _MOST_PACKED * stored if is_copy else max(LEAST_VIEW_ELEMENTS, VIEWS_PER_ELEMENT * stored)
    ):
        raise BadPickle(f"a tensor of {count} elements in a storage of {stored}")
    return _BIG_OBJECT_BYTES


def _subclass(name: str, args: Sequence[Any]) -> int:
    """``_rebuild_from_type_v2(function, type, args, state)``, which calls the function."""
    if len(args) < 3 or _kind(args[0]) != "global" or _kind(args[2]) != "tuple":
        raise BadPickle(f"a call of {name} without a function or its arguments")
    return check_call(args[0].name, args[2].items)[0]


def _unchecked(name: str, _: Sequence[Any]) -> int:
    raise BadPickle(f"{name}: the memory of the tensor that it makes cannot be checked")


def _ints(name: str, value: Any = None) -> Sequence[int]:
    """A shape, as a tuple or a torch.Size."""
    if _kind(value) == "call" and value.name == "torch.Size":
        value = value.items[0] if value.items else Stub("tuple")
    if _kind(value) != "tuple":
        raise BadPickle(f"a call of {name} without a shape")
    items = items_of(value)
    if len(items) > _MOST_AXES or not all(type(extent) is int for extent in items):
        raise BadPickle(f"a call of {name} with an invalid shape")
    return items


def _small(name: str, args: Sequence[Any]) -> int:
    """Any other function: its numbers, if they are a shape, must not need much memory."""
    parts = [items_of(arg)[:_MOST_AXES] or (arg,) for arg in args]
    count = math.prod(max(1, abs(n)) for part in parts for n in part if type(n) is int)
    if count > _MOST_COUNT:
        raise BadPickle(f"a call of {name} with numbers that multiply to {count}")
    return 8 * count


_ARRAYS = frozenset({f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")})
_RULES: dict[str, Rule] = {
    f"{module}.{name}": rule
    for module, names, rule in (
        ("builtins", "dict frozenset list set tuple", _container),
        ("builtins", "bool complex float int range str", _literal),
        ("builtins", "bytes bytearray", _bytes),
        ("builtins", "slice", _small_object),
        ("collections", "Counter OrderedDict", _container),
        ("collections", "deque", partial(_container, base=_BIG_OBJECT_BYTES)),
        ("collections", "defaultdict", _small_object),
        ("decimal", "Decimal", _literal),
        ("fractions", "Fraction", _fraction),
        ("pathlib", "Path PosixPath PurePath PurePosixPath", _literal),
        ("numpy", "ndarray", _empty),
        ("numpy", "dtype", _dtype),
        ("_codecs", "encode", _bytes),
        ("torch", "Size", _container),
        ("torch._tensor", "_rebuild_from_type_v2", _subclass),
        ("torch._utils", "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3", _view),
        ("torch._utils", "_rebuild_qtensor", partial(_view, is_copy=True)),
        ("torch._utils", "_rebuild_nested_tensor", _unchecked),
        ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor", _unchecked),
        ("torch._utils", "_rebuild_device_tensor_from_numpy", _unchecked),
        ("torch._utils", "_rebuild_meta_tensor_no_storage _rebuild_sparse_tensor", _small_object),
        ("torch._utils", "_rebuild_wrapper_subclass", _small_object),
    )
    for name in names.split()
}
for _array in _ARRAYS:
    _RULES[_array] = _empty_array
    _RULES[_array.replace("_reconstruct", "scalar")] = _scalar
