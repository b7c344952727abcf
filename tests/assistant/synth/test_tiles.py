"""Tile choice."""

from drk.assistant.synth.tiles import FP32_TILES, HALF_TILES, ranked_tiles


def test_large_products_get_the_largest_unspilled_tile():
    best = ranked_tiles(4096, 4096, 4096, half=False, pair=False, multiprocessors=132)[0]
    assert (best.block_m, best.block_n) == (128, 128)


def test_few_rows_get_short_tiles():
    best = ranked_tiles(32, 4096, 4096, half=False, pair=False, multiprocessors=132)[0]
    assert best.block_m <= 64


def test_ranking_is_a_permutation():
    for half, table in ((False, FP32_TILES), (True, HALF_TILES)):
        ranked = ranked_tiles(1000, 1000, 1000, half=half, pair=False, multiprocessors=132)
        assert sorted(map(str, ranked)) == sorted(map(str, table))
