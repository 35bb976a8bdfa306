"""Pickles of a few hundred bytes that ask for any time and memory, or end the process."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

_START: Final = b"\x80\x02"
_DOUBLINGS: Final = 60


def archive(content: bytes, *, storages: tuple[bytes, ...] = (), method: int = 0) -> bytes:
    """The file that ``torch.save`` would write with this ``data.pkl``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/byteorder", b"little")
        for number, values in enumerate(storages):
            file.writestr(f"archive/data/{number}", values)
        file.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def _dict_of(value: bytes) -> bytes:
    """A pickle of ``{"x": value}``."""
    return _START + b"}" + _text("x") + value + b"s."


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _name(path: str) -> bytes:
    module, _, name = path.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def _call(path: str, *args: bytes) -> bytes:
    return _name(path) + _tuple(*args) + b"R"


def _range(stop: int) -> bytes:
    return _call("__builtin__.xrange", _number(0), _number(stop))


def _doubled(empty: Callable[[Any], Any]) -> bytes:
    value = empty([1])
    for _ in range(_DOUBLINGS):
        value = empty([value, value])
    return pickle.dumps({"x": value}, 2)


def _dict_doubled() -> bytes:
    value: dict[str, Any] = {"a": 1}
    for _ in range(_DOUBLINGS):
        value = {"a": value, "b": value}
    return pickle.dumps(value, 2)


def _key_doubled() -> bytes:
    key: tuple[Any, ...] = (1,)
    for _ in range(_DOUBLINGS):
        key = (key, key)
    # Python itself would hash it for ever.
    doubled = pickle.dumps(key, 2)[2:-1]
    return _START + b"}" + doubled + b"K\x01s."


def _filled_afterwards() -> bytes:
    """Lists that are empty while they are counted, and filled from the top down."""
    lists = b"".join(b"]q" + bytes([number]) for number in range(_DOUBLINGS))
    fills = b"".join(
        b"h" + bytes([number]) + b"(" + (b"h" + bytes([number + 1])) * 2 + b"e"
        for number in range(_DOUBLINGS - 1)
    )
    return _START + b"}" + _text("x") + b"(" + lists + fills + b"ts."


def _tensor(count: int, storage_count: int, stride: int = 1, cls: str = "FloatStorage") -> bytes:
    storage = (
        _tuple(
            _text("storage"), _name(f"torch.{cls}"), _text("0"), _text("cpu"),
            _number(storage_count),
        )
        + b"Q"
    )  # fmt: skip
    return _call(
        "torch._utils._rebuild_tensor_v2",
        storage,
        _number(0),
        _tuple(_number(count)),
        _tuple(_number(stride)),
        b"\x89",
        _call("collections.OrderedDict"),
    )


def _quantized() -> bytes:
    storage = (
        _tuple(_text("storage"), _name("torch.QInt8Storage"), _text("0"), _text("cpu"), _number(4))
        + b"Q"
    )
    scheme = _tuple(_name("torch.per_tensor_affine"), b"G" + struct.pack(">d", 0.5), _number(0))
    return _call(
        "torch._utils._rebuild_qtensor", storage, _number(0), _tuple(_number(1 << 33)),
        _tuple(_number(0)), scheme, b"\x89", _call("collections.OrderedDict"),
    )  # fmt: skip


def _array_of_nothing() -> bytes:
    """2**60 elements of zero bytes each."""
    made = _call(
        "numpy.core.multiarray._reconstruct",
        _name("numpy.ndarray"), _tuple(_number(0)),
        _call("_codecs.encode", _text("b"), _text("latin1")),
    )  # fmt: skip
    dtype = _call("numpy.dtype", _text("V0"), b"\x89", b"\x88")
    state = _tuple(
        _number(1), _tuple(_number(1 << 60)), dtype, b"\x89",
        _call("_codecs.encode", _text(""), _text("latin1")),
    )  # fmt: skip
    return made + state + b"b"


def _array_with_fields_outside() -> bytes:
    """A structured array whose field lies a gigabyte behind it."""
    void = _call("numpy.dtype", _text("V8"), b"\x89", b"\x88")
    double = _call("numpy.dtype", _text("f8"), b"\x89", b"\x88")
    fields = b"}" + _text("a") + _tuple(double, _number(1 << 30)) + b"s"
    state = _tuple(
        _number(3),
        _text("|"),
        b"N",
        _tuple(_text("a")),
        fields,
        _number(8),
        _number(1),
        _number(16),
    )
    made = _call(
        "numpy.core.multiarray._reconstruct",
        _name("numpy.ndarray"), _tuple(_number(0)),
        _call("_codecs.encode", _text("b"), _text("latin1")),
    )  # fmt: skip
    content = _call("_codecs.encode", _text("12345678"), _text("latin1"))
    array_state = _tuple(_number(1), _tuple(_number(1)), void + state + b"b", b"\x89", content)
    return made + array_state + b"b"


def _repeated(path: str, argument: bytes, count: int) -> bytes:
    """A tuple of so many results of one call."""
    prepared = _name(path) + b"q\x00" + argument + b"q\x01"
    return _dict_of(b"(" + prepared + b"h\x00h\x01\x85R" * count + b"t")


DEEP: Final = b")" + b"\x85" * 200_000
"""A tuple nested 200,000 levels deep."""

PICKLES: Final[dict[str, bytes]] = {
    "lists that share": _doubled(list),
    "tuples that share": _doubled(tuple),
    "dicts that share": _dict_doubled(),
    "a key that shares": _key_doubled(),
    "a set of what shares": _dict_of(_call("__builtin__.set", b"](" + _key_doubled()[3:-4] + b"e")),
    "filled afterwards": _filled_afterwards(),
    "a list in itself": _dict_of(b"]q\x00h\x00a"),
    "a namespace in itself": _dict_of(
        _call("argparse.Namespace") + b"q\x00}" + _text("x") + b"h\x00sb"
    ),
    "a deep key": _START + b"}" + DEEP + b"K\x01s.",
    "a deep value": _dict_of(DEEP),
    "deep lists": _dict_of(b"]" * 5_000 + b"a" * 4_999),
    "a list of a range": _dict_of(_call("__builtin__.list", _range(1 << 40))),
    "a set of a range": _dict_of(_call("__builtin__.set", _range(1 << 40))),
    "a tuple of a range": _dict_of(_call("__builtin__.tuple", _range(1 << 40))),
    "a Counter of a range": _dict_of(_call("collections.Counter", _range(1 << 40))),
    "a deque of a range": _dict_of(_call("collections.deque", _range(1 << 40), _number(1))),
    "bytes of a range": _dict_of(_call("__builtin__.bytearray", _range(1 << 40))),
    "a Size of a range": _dict_of(_call("torch.Size", _range(1 << 40))),
    "a tensor of a range": _dict_of(_call("torch.FloatTensor", _range(1 << 40))),
    "lists of a text": _repeated("__builtin__.list", _text("x" * 5_000), 500),
    "copies of a list": _repeated("__builtin__.set", b"](" + b"K\x01" * 5_000 + b"e", 3_000),
    "copies of bytes": _repeated("__builtin__.bytearray", _text("x" * 100_000), 3_000),
    "copies of a state": _dict_of(
        b"(}(" + b"".join(_text(str(i)) + b"N" for i in range(5_000)) + b"uq\x00"
        + _name("argparse.Namespace") + b"q\x01" + b"h\x01)Rh\x00b" * 3_000 + b"t"
    ),
    "many deques": _dict_of(
        b"(" + _name("collections.deque") + b"q\x00" + b"h\x00)R" * 300_000 + b"t"
    ),
    "a range as arguments": _dict_of(_name("__builtin__.list") + _range(1 << 40) + b"R"),
    "arguments of a call": _dict_of(
        _name("__builtin__.bytearray")
        + _call("torch.Size", _tuple(_number((1 << 31) - 1)))
        + b"R"
    ),
    "a large Fraction": _dict_of(_call("fractions.Fraction", _text("1E999999999"))),
    "a small Fraction": _dict_of(_call("fractions.Fraction", _text("1E-999999999"))),
    "a Fraction in other digits": _dict_of(_call("fractions.Fraction", _text("1E٩٩٩٩٩٩٩٩٩"))),
    "an int of a Decimal": _dict_of(
        _call("__builtin__.int", _call("decimal.Decimal", _text("1E999999999")))
    ),
    "a Fraction of a Decimal": _dict_of(
        _call("fractions.Fraction", _call("decimal.Decimal", _text("1E999999")))
    ),
    "a large bytearray": _dict_of(_call("__builtin__.bytearray", _number((1 << 31) - 1))),
    "large bytes": _dict_of(_call("__builtin__.bytes", _number((1 << 31) - 1))),
    "a large FloatTensor": _dict_of(_call("torch.FloatTensor", _number(1 << 31))),
    "a large new FloatTensor": _dict_of(
        _name("torch.FloatTensor") + _tuple(_number(1 << 31)) + b"\x81"
    ),
    "a large UntypedStorage": _dict_of(_call("torch.storage.UntypedStorage", _number(1 << 33))),
    "a large array": _dict_of(_call("numpy.ndarray", _tuple(_number(1 << 33)))),
    "an array of nothing": _dict_of(_array_of_nothing()),
    "an array with fields outside": _dict_of(_array_with_fields_outside()),
    "a scalar without a value": _dict_of(
        _call("numpy.core.multiarray.scalar", _call("numpy.dtype", _text("V2147483647")))
    ),
    "a storage that is too short": _dict_of(_tensor(1 << 31, 1 << 31)),
    "a tensor that is expanded": _dict_of(_tensor(1 << 60, 4, stride=0)),
    "a state that is a range": _dict_of(_tensor(4, 4) + _range(1 << 33) + b"b"),
    "copies of an expanded tensor": _dict_of(
        b"(" + _name("torch._utils._rebuild_device_tensor_from_cpu_tensor") + b"q\x00"
        + _tuple(
            _tensor(1 << 24, 4, stride=0), _name("torch.complex128"), _text("cpu"), b"\x89"
        )
        + b"q\x01" + b"h\x00h\x01R" * 50 + b"t"
    ),
    "a tensor that is quantized": _dict_of(_quantized()),
    "a codec": _dict_of(_call("_codecs.encode", _text("x"), _text("idna"))),
    "a text that is cut off": _dict_of(b"X" + struct.pack("<I", (1 << 31) - 1)),
    "nothing": b"",
    "only a stop": b".",
}  # fmt: skip
"""Name -> ``data.pkl`` of a file of ``torch.save``."""


@lru_cache
def torch_files() -> dict[str, bytes]:
    """Name -> content of a file that ``torch.load`` takes for one of its own."""
    files = {name: archive(content, storages=(b"\0" * 16,)) for name, content in PICKLES.items()}
    zeros = _dict_of(_text("\0" * (1 << 27)))
    files["a bomb in a zip"] = archive(zeros, method=zipfile.ZIP_DEFLATED)
    files["two data.pkl"] = _with_two_pickles()
    files["not a file of torch"] = b"\x80\x02K\x01."
    return files


def _with_two_pickles() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({"x": 1}, 2))
        file.writestr("archive/DATA.PKL", _dict_of(_call("__builtin__.list", _range(1 << 40))))
    return buffer.getvalue()


DCP_PICKLES: Final[dict[str, bytes]] = {
    "a large memo": b"Nr\x00\x00\x00\x40.",
    "a number of 2 GB": b"\x80\x04\x8b\xff\xff\xff\x7f" + b"\x01" * 64 + b".",
    "a bytearray of 4 GB": b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00.",
    "a frame of 4 GB": b"\x80\x04\x95\x00\x00\x00\x00\x01\x00\x00\x00N.",
    "a deep tuple": _START + DEEP + b".",
    "a deep set": b"\x80\x04\x8f(" + DEEP + b"\x90.",
    "a set of what shares": b"\x80\x04\x8f(" + _key_doubled()[3:-4] + b"\x90.",
    "a frozenset of what shares": b"\x80\x04(" + _key_doubled()[3:-4] + b"\x91.",
    "a key that shares": _key_doubled(),
    "sizes of bytes": _repeated("torch.Size", b"B\x88\x13\x00\x00" + bytes(5_000), 500),
    "many marks": _START + b"(" * 100_000,
    "a memo with gaps": b"\x80\x02Nr\x02\x00\x00\x00.",
    "two ways to number values": b"\x80\x04Nq\x01\x94.",
    "an extension": b"\x80\x02\x82\x01.",
    "a buffer": b"\x80\x05\x97.",
}
"""Name -> ``.metadata`` of a checkpoint of torch DCP."""
