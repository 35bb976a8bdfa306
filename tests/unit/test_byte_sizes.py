import pytest

from dist_checkpointing.byte_sizes import bytes_text, parse_bytes


def test_as_people_read_them() -> None:
    counts = (0, 1023, 1024, 1536, 5 * 2**30, 2**50)
    texts = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "1024.0 TiB"]
    assert [bytes_text(count) for count in counts] == texts


def test_as_people_type_them() -> None:
    texts = ("1", "2GiB", "1.5 kB", "5GB", "3tib", "256M")
    sizes = [1, 2**31, 1500, 5 * 10**9, 3 * 2**40, 2**28]
    assert [parse_bytes(text) for text in texts] == sizes


@pytest.mark.parametrize("text", ["", "0", "-1", "2 GiB x", "1e3", "5XB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)
