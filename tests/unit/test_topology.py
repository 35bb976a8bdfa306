from dist_checkpointing.format import Box, Index, StoredTensor, Window, dtypes
from dist_checkpointing.tools.plan import MEGATRON_RULES, bytes_read, cut_keys, parse_rule


def index_of(**shapes: tuple[int, ...]) -> Index:
    return Index.of(
        StoredTensor(key.replace("__", "."), dtypes.from_name("float32"), shape, shape)
        for key, shape in shapes.items()
    )


def test_layers_of_megatron_are_cut_as_it_cuts_them() -> None:
    prefix = "optimizer__exp_avg__decoder__layers__"
    index = index_of(
        **{
            "embedding__word_embeddings__weight": (64, 8),
            f"{prefix}self_attention__linear_qkv__weight": (12, 24, 8),
            f"{prefix}self_attention__linear_qkv__bias": (12, 24),
            f"{prefix}self_attention__linear_qkv__layer_norm_weight": (12, 8),
            f"{prefix}self_attention__linear_proj__weight": (12, 8, 8),
            f"{prefix}self_attention__linear_proj__bias": (12, 8),
            "mlp__linear_fc1__weight": (32, 8),
            "mlp__experts__linear_fc2__weight7": (8, 32),
            "output_layer__weight": (64, 8),
            "router__weight": (4, 8),
            "my_output_layer_scale": (4,),
        }
    )
    axes = [cut.axis for cut in cut_keys(index, 4, MEGATRON_RULES)]
    assert axes == [0, 1, 1, None, 2, None, 0, 1, 0, None, None]


def test_an_equals_sign_in_a_pattern_is_part_of_it() -> None:
    assert parse_rule("a=b=1").pattern.pattern == "a=b"


def test_bytes_of_windows() -> None:
    rows = Window(0, (8, 1024), Box((2, 0), (3, 1024)))
    columns = Window(0, (8, 1024), Box((0, 0), (8, 512)))
    far = Window(0, (8, 2**16), Box((0, 0), (8, 16)))

    def read(window: Window, *, is_mapped: bool) -> tuple[int, int]:
        return bytes_read(window, 4, None, is_mapped=is_mapped)

    assert read(rows, is_mapped=True) == read(rows, is_mapped=False) == (3 * 4096, 0)
    # The gaps are smaller than what a page fault reads: all from the first to the last element.
    assert read(columns, is_mapped=True) == (7 * 4096 + 2048, 0)
    # The gaps are larger than those that are read over.
    assert read(far, is_mapped=True) == (8 * 64, 0)
    assert read(columns, is_mapped=False) == (7 * 4096 + 2048, 7 * 4096 + 2048)
    assert read(far, is_mapped=False) == (8 * 64, 64)
