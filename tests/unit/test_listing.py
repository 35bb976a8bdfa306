import pytest

from dist_checkpointing.checkpoint.key_tree import as_tree
from dist_checkpointing.format import Box, Index, Pieces, StoredTensor, dtypes
from dist_checkpointing.tools.ls import Entry, name_filter, sharding_text, subtotals, tensor_entries
from dist_checkpointing.tools.report import shape_text

FLOAT = dtypes.from_name("float32")
KEYS = ["model.layers.0.w", "model.layers.10.w", "optimizer.w", "a[0]/b"]


@pytest.mark.parametrize(
    ("pattern", "regex", "wanted"),
    [
        (None, False, KEYS),
        ("layers.1", False, ["model.layers.10.w"]),
        ("model.*", False, KEYS[:2]),
        ("*.w", False, KEYS[:3]),
        ("layers.*", False, []),
        ("model.layers.?.w", False, KEYS[:1]),
        ("optimizer.w", False, ["optimizer.w"]),
        (r"layers\.\d+", True, KEYS[:2]),
        ("^w", True, []),
        ("w$", True, KEYS[:3]),
        ("a[[]0]/b", False, ["a[0]/b"]),
    ],
)
def test_patterns(pattern: str | None, wanted: list[str], *, regex: bool) -> None:
    assert list(filter(name_filter(pattern, regex=regex), KEYS)) == wanted


def test_a_regular_expression_that_does_not_compile() -> None:
    with pytest.raises(ValueError, match=r"'\(' does not compile: missing \)"):
        name_filter("(", regex=True)


@pytest.mark.parametrize(
    ("shape", "chunk", "text"),
    [
        ((4096, 4096), (512, 4096), "8x1 of 512x4096"),
        ((7,), (3,), "3 of 3"),
        ((5, 2), (5, 2), "1 chunk"),
        ((), (), "1 chunk"),
        ((0, 5), (1, 5), "empty"),
    ],
)
def test_sharding(shape: tuple[int, ...], chunk: tuple[int, ...], text: str) -> None:
    assert sharding_text(shape, chunk) == text


def index() -> Index:
    pieces = Pieces.of(1, [(Box((0,), (3,)), None), (Box((3,), (4,)), None)])
    return Index.of(
        [
            StoredTensor("m.a", FLOAT, (4, 6), (2, 6)),
            StoredTensor("m.b", FLOAT, (7,), None, pieces),
            StoredTensor("o/s", dtypes.from_name("bfloat16"), (), ()),
        ]
    )


def test_entries() -> None:
    entries = list(tensor_entries(index(), lambda _: True))
    assert entries == [
        Entry("m.a", (4, 6), "float32", 96, (2, 6)),
        Entry("m.b", (7,), "float32", 28, 2),
        Entry("o/s", (), "bfloat16", 2, ()),
    ]
    texts = [sharding_text(entry.shape or (), entry.parts) for entry in entries]
    assert texts == ["2x1 of 2x6", "2 pieces", "1 chunk"]
    assert [shape_text(entry.shape) for entry in entries] == ["4x6", "7", "scalar"]
    assert subtotals(entries) == [("  m", "2 tensors", "124 B"), ("  o", "1 tensor", "2 B")]


def test_a_tree_sums_up_and_loses_nothing() -> None:
    keys = ["a.b", "a.b.c", "a/b", "a..b", "", ".", "x" * 5, ".".join("y" * 500)]
    entries = [Entry(key, (), "float32", 4, "1 chunk") for key in keys]
    root = as_tree(entries)
    assert (root.num_entries, root.num_bytes) == (len(keys), 4 * len(keys))

    found = []
    waiting = [root]
    while waiting:
        branch = waiting.pop()
        waiting += branch.below.values()
        found += [branch.entry] if branch.entry else []
        assert branch.num_entries == sum(b.num_entries for b in branch.below.values()) + bool(
            branch.entry
        )
    assert sorted(entry.key for entry in found) == sorted(keys)
