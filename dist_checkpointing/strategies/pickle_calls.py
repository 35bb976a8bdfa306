"""The arguments with which a pickle may call classes and functions on the allow-list.

Some of these make gigabytes, or work for hours, with a small number as argument. So only arguments
that a pickler writes are allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from dist_checkpointing.strategies.pickle_guard import BadPickle, Stub

MOST_EXPONENT = 100_000
"""Limit for the exponent of a Decimal or Fraction, positive or negative."""

LEAST_VIEW_ELEMENTS = 1 << 24
VIEWS_PER_ELEMENT = 64
"""A tensor that repeats elements of its storage (``expand``) may have ``LEAST_VIEW_ELEMENTS``, or
``VIEWS_PER_ELEMENT`` times as many as the storage."""

_MOST_AXES = 64
_MOST_PACKED = 4  # quantized elements in a byte
_MOST_COUNT = 1 << 24
_LEAST_ARRAY_ELEMENTS = 1 << 16
_BYTES_PER_VALUE = 64
_ENCODINGS = frozenset({"latin1", "latin-1", "ascii", "utf-8", "utf8"})

Rule = Callable[[str, Sequence[Any]], None]


def check_call(name: str, args: Sequence[Any]) -> None:
    """Refuse a call that may build something far larger than its arguments: literals, and Stubs."""
    rule = _RULES.get(name)
    if rule is not None:
        rule(name, args)
    elif name.startswith("torch.") and name.endswith(("Tensor", "Storage")):
        _empty(name, args)
    elif name.partition(".")[0] in ("builtins", "collections", "numpy", "torch"):
        _small(name, args)


def check_state(target: Stub, state: Any) -> None:
    """Refuse a state that makes an array or a tensor far larger than its bytes."""
    kind = state.kind if isinstance(state, Stub) else ""
    items: Sequence[Any] = (state.items or ()) if kind == "tuple" else ()
    if target.name.startswith("torch."):
        if items and isinstance(items[0], Stub) and items[0].kind == "storage":
            _view(target.name, items)  # of a tensor, in old files
        elif kind == "list":
            raise BadPickle(f"a list as the state of a {target.name}")
    elif target.name.endswith(".multiarray._reconstruct"):
        shape = _ints(target.name, items[1]) if len(items) > 1 else ()
        count = math.prod(shape)
        if not items or count > max(_LEAST_ARRAY_ELEMENTS, _BYTES_PER_VALUE * state.size):
            raise BadPickle(f"an array of {count} elements has no data for them")


def _is_result(value: Any) -> bool:
    # Protocol 2 has no bytes: its pickles encode a text instead.
    is_bytes = isinstance(value, Stub) and value.name == "_codecs.encode"
    return isinstance(value, Stub) and value.kind in ("call", "global", "storage") and not is_bytes


def _plain(name: str, args: Sequence[Any]) -> None:
    """Allow only literals and containers: the result of a call, such as a range, may unfold."""
    if any(map(_is_result, args)):
        raise BadPickle(f"{name} of the result of another call")


def _bytes(name: str, args: Sequence[Any]) -> None:
    _plain(name, args)
    if args and (not isinstance(args[0], str | bytes | Stub)):
        raise BadPickle(f"{name}({args[0]!r})")


def _range(name: str, args: Sequence[Any]) -> None:
    if not all(type(arg) is int for arg in args):
        raise BadPickle(f"{name} of something that is not a number")


def _number_text(name: str, args: Sequence[Any]) -> None:
    """Check the arguments of a Decimal or Fraction."""
    _plain(name, args)
    for arg in args:
        # Unpicklers may read bytes in an old pickle as a text.
        if isinstance(arg, str | bytes):
            _check_exponent(name, arg if isinstance(arg, str) else arg.decode("utf-8", "replace"))
        elif isinstance(arg, Stub):
            raise BadPickle(f"{name} of a {arg.kind}")


def _check_exponent(name: str, text: str) -> None:
    if "e" not in text.lower():
        return
    try:
        exponent = Decimal(text.strip().replace("_", "")).as_tuple().exponent
    except (InvalidOperation, ValueError):
        return  # infinity, a word, or not a number
    if isinstance(exponent, int) and abs(exponent) > MOST_EXPONENT:
        raise BadPickle(f"{name} with an exponent of {exponent}")


def _empty(name: str, args: Sequence[Any]) -> None:
    if args:
        raise BadPickle(f"a call of {name}, which does not initialise its memory")


def _empty_array(name: str, args: Sequence[Any]) -> None:
    shape = _ints(name, args[1]) if len(args) > 1 else ()
    if not args or not isinstance(args[0], Stub) or math.prod(shape) != 0:
        raise BadPickle(f"a call of {name} that makes more than an empty array")


def _scalar(name: str, args: Sequence[Any]) -> None:
    if len(args) < 2:
        raise BadPickle(f"a call of {name} without a value")


def _encode(name: str, args: Sequence[Any]) -> None:
    if len(args) > 1 and args[1] not in _ENCODINGS:
        raise BadPickle(f"a call of {name} with the encoding {args[1]!r}")


def _view(name: str, args: Sequence[Any]) -> None:
    """``(storage, offset, size, stride, ...)``: a tensor that is a view of a storage."""
    count = _elements(name, args)
    own = args[0].items[0]
    if count > max(LEAST_VIEW_ELEMENTS, VIEWS_PER_ELEMENT * own):
        raise BadPickle(f"a tensor of {count} elements in a storage of {own}")


def _copy(name: str, args: Sequence[Any]) -> None:
    """The same for a kind of tensor that gets its own memory."""
    count = _elements(name, args)
    if count > _MOST_PACKED * args[0].items[0]:
        raise BadPickle(f"a tensor of {count} elements in a storage of {args[0].items[0]}")


def _elements(name: str, args: Sequence[Any]) -> int:
    storage = args[0] if args else None
    if len(args) < 4 or not isinstance(storage, Stub) or storage.kind != "storage":
        raise BadPickle(f"a call of {name} without a storage")
    _ints(name, args[3])
    return math.prod(_ints(name, args[2]))


def _subclass(name: str, args: Sequence[Any]) -> None:
    """``_rebuild_from_type_v2(function, type, args, state)``, which calls the function."""
    if len(args) < 3 or not isinstance(args[0], Stub) or args[0].kind != "global":
        raise BadPickle(f"a call of {name} without a function")
    inner = args[2]
    if not isinstance(inner, Stub) or inner.items is None or inner.kind != "tuple":
        raise BadPickle(f"a call of {name} without arguments")
    check_call(args[0].name, inner.items)


def _ragged(name: str, args: Sequence[Any]) -> None:
    del args
    raise BadPickle(f"{name}: a nested tensor's parts cannot be checked against its memory")


def _without_memory(name: str, args: Sequence[Any]) -> None:
    """Accept any arguments: they do not become memory."""


def _ints(name: str, value: Any) -> Sequence[int]:
    """A shape, as a tuple or a torch.Size."""
    if isinstance(value, Stub) and value.kind == "call" and value.name == "torch.Size":
        value = value.items[0] if value.items else Stub("tuple", items=())
    if not isinstance(value, Stub) or value.kind != "tuple" or value.items is None:
        raise BadPickle(f"a call of {name} without a shape")
    if len(value.items) > _MOST_AXES or not all(type(extent) is int for extent in value.items):
        raise BadPickle(f"a call of {name} with an invalid shape")
    return value.items


def _small(name: str, args: Sequence[Any]) -> None:
    """Any other function: its numbers, if they are a shape, must not need much memory."""
    count = math.prod(max(1, abs(number)) for arg in args for number in _numbers(arg))
    if count > _MOST_COUNT:
        raise BadPickle(f"a call of {name} with numbers that multiply to {count}")


def _numbers(value: Any) -> Sequence[int]:
    if type(value) is int:
        return (value,)
    if isinstance(value, Stub) and value.kind == "tuple" and value.items is not None:
        return [number for number in value.items[:_MOST_AXES] if type(number) is int]
    return ()


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "builtins.bool", "builtins.complex", "builtins.dict", "builtins.float",
            "builtins.frozenset", "builtins.int", "builtins.list", "builtins.set", "builtins.str",
            "builtins.tuple", "collections.Counter", "collections.OrderedDict",
            "collections.deque", "torch.Size",
        ),
        _plain,
    ),
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.range": _range,
    "builtins.slice": _without_memory,
    "collections.defaultdict": _without_memory,
    "decimal.Decimal": _number_text,
    "fractions.Fraction": _number_text,
    "numpy.ndarray": _empty,
    "numpy.dtype": _without_memory,
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
    "torch._utils._rebuild_meta_tensor_no_storage": _without_memory,
    "torch._utils._rebuild_wrapper_subclass": _without_memory,
    "torch._utils._rebuild_sparse_tensor": _without_memory,
    "torch._tensor._rebuild_from_type_v2": _subclass,
}  # fmt: skip
