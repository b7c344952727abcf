"""Tile choice."""

from drk.assistant.synth.tiles import FP32_TILES, HALF_TILES, ranked_tiles


def _first(rows, cols, inner, half=False):
    return ranked_tiles(rows, cols, inner, half=half, pair=False, multiprocessors=132)[0]


def test_large_products_get_the_largest_unspilled_tile():
    best = ranked_tiles(4096, 4096, 4096, half=False, pair=False, multiprocessors=132)[0]
    assert (best.block_m, best.block_n) == (128, 128)


def test_few_rows_get_short_tiles():
    best = ranked_tiles(32, 4096, 4096, half=False, pair=False, multiprocessors=132)[0]
    assert best.block_m <= 64


def test_few_columns_get_narrow_tiles():
    assert _first(16384, 10, 4096).block_n == 16
    assert _first(196608, 48, 256, half=True).block_n == 64


def test_ranking_is_a_permutation():
    for half, table in ((False, FP32_TILES), (True, HALF_TILES)):
        ranked = ranked_tiles(1000, 1000, 1000, half=half, pair=False, multiprocessors=132)
        assert sorted(map(str, ranked)) == sorted(map(str, table))


def test_few_tiles_with_a_long_inner_dimension_are_split_so_that_each_multiprocessor_has_one():
    square = _first(256, 256, 2**19)
    assert square.parts * (256 // square.block_m) * (256 // square.block_n) in range(66, 133)
    assert _first(16, 8192, 8192).parts > 1
    assert _first(64, 64, 200_000, half=True).parts > 32


def test_products_that_fill_the_device_or_are_short_are_not_split():
    assert _first(4096, 4096, 4096).parts == 1
    assert _first(256, 256, 256).parts == 1
