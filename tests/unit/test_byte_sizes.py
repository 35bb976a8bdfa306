import pytest

from dist_checkpointing.byte_sizes import bytes_text, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**30, "5.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_as_people_read_them(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("2GiB", 2**31),
        ("1.5 kB", 1500),
        ("5GB", 5 * 10**9),
        ("3tib", 3 * 2**40),
        ("256M", 2**28),
    ],
)
def test_as_people_type_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "2 GiB x", "1e3", "5XB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)
