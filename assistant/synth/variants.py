"""The variants of a graph that the builtin proposer compiles, most promising first.

Each variant is a set of planner rules, a tile for the matrix products and a block for the other kernels. Their order is
a preference: float32 products go to tf32x3 kernels first, narrower ones to the library first, then other tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from drk.assistant.synth.cell_rules import CELL_RULES
from drk.assistant.synth.contraction_rules import CONTRACTIONS
from drk.assistant.synth.depthwise_layout import row_major_first, swapped
from drk.assistant.synth.distance_rules import DISTANCE_RULES
from drk.assistant.synth.layouts import is_convolution, only_products
from drk.assistant.synth.pixel_region import sees_one_pixel
from drk.assistant.synth.pointwise import BLOCKS, Block
from drk.assistant.synth.product_rules import PRODUCT_RULES
from drk.assistant.synth.regions import Rules, product_of
from drk.assistant.synth.rewrites import rewrite
from drk.assistant.synth.scatters import ADDING
from drk.assistant.synth.windows import window_of
from drk.assistant.synth.written_attention import is_library_attention, mask_of
from drk.gym.graph import Graph, Node


@dataclass(frozen=True)
class Variant:
    """One way to compile a graph: rules for fusion, the n-th most promising tile for products, a block for the rest."""

    rules: Rules
    note: str = ""
    tile_rank: int = 0
    block: Block = BLOCKS[0]
    channels_last: bool = False
    exact_shapes: bool = False


def variants(graph: Graph) -> list[Variant]:
    """All variants of a graph, most promising first; several may come to the same code."""
    found = _variants(graph)
    if any(node.bare_op in ADDING for node in graph.nodes):
        rules = replace(found[0].rules, atomics=False)
        found.insert(1, replace(found[0], rules=rules, note=f"{found[0].note}; sums in the order of sorted integers"))
    attention = [node for node in graph.nodes if is_library_attention(node)]
    if not attention:
        return found
    rules = replace(found[0].rules, written_attention=True)
    note = "The library's attention as a kernel of its own"
    written = [replace(found[0], rules=rules, note=note)]
    written += [replace(written[0], note=f"{note}, {word} tile", tile_rank=i + 1) for i, word in enumerate(_TILES)]
    place = 3 if attention[0].meta.dtype != "float32" and mask_of(attention[0]) is None else 1  # 3: flash attention
    return [*found[:place], *written, *found[place:]]


_TILES = ("second", "third")


def _variants(graph: Graph) -> list[Variant]:
    metas = graph.metas()
    full = Rules()
    single = replace(full, shared_left=False)
    library = replace(full, matmul=False)
    products = _products(graph)
    half = not any(node.meta.dtype == "float32" for node in products)
    fused = [
        Variant(full, "Every product with its epilogue in one kernel"),
        Variant(single, "One kernel per product, with its epilogue"),
        Variant(full, "Every product with its epilogue in one kernel, second tile", 1, BLOCKS[1]),
        Variant(single, "One kernel per product, with its epilogue, second tile", 1, BLOCKS[1]),
        Variant(full, "Every product with its epilogue in one kernel, third tile", 2, BLOCKS[2]),
        Variant(single, "One kernel per product, with its epilogue, third tile", 2, BLOCKS[2]),
    ]
    has_product = bool(products)
    split = "Products by the library, everything between them fused" if has_product else "Neighbouring operators fused"
    plain = [
        Variant(library, split),
        Variant(library, f"{split}, larger blocks", 0, BLOCKS[1]),
        Variant(library, f"{split}, more warps", 0, BLOCKS[3]),
    ]
    if any(is_convolution(node) for node in graph.nodes):
        depthwise = any((w := window_of(node, metas)) is not None and w.weight is not None for node in graph.nodes)
        pixels = [sees_one_pixel(node, metas) for node in graph.nodes if is_convolution(node)]
        found = _convolution_variants(library, full if has_product else None)
        by_pixels = _pixel_variants(full if has_product else library, pixels) if any(pixels) else []
        found = [*found[:2], *by_pixels, *found[2:]]
        found = swapped(found) if row_major_first(graph) or only_products(graph) else found
        by_library = [replace(item, rules=replace(item.rules, depthwise=False)) for item in found[:2]]
        by_library = [replace(item, note=f"{item.note}, depthwise ones too") for item in by_library]
        return [*found[:2], *by_library, *found[2:]] if depthwise else found
    if not has_product:
        return [*plain, Variant(library, f"{split}, largest blocks", 0, BLOCKS[2])]
    if half:
        return [plain[0], *fused, *plain[1:]]
    return [*fused[:2], plain[0], *fused[2:], *plain[1:]]


def _products(graph: Graph) -> list[Node]:
    """Matrix products of the graph, those among them that contractions and distances are written as."""
    if any(node.bare_op in {*CONTRACTIONS, *DISTANCE_RULES, *CELL_RULES, *PRODUCT_RULES} for node in graph.nodes):
        graph = rewrite(graph, by_channel=True)
    metas = graph.metas()
    return [node for node in graph.nodes if product_of(node, metas) is not None]


def _pixel_variants(rules: Rules, pixels: Sequence[bool]) -> list[Variant]:
    """Convolutions that see one pixel (true in ``pixels``) as products: in both layouts where others need one."""
    rules = replace(rules, pixels=True)
    note = "Convolutions of single pixels with their epilogue in one kernel"
    plain = [Variant(rules, note), Variant(rules, f"{note}, second tile", 1, BLOCKS[1])]
    if all(pixels):
        return plain
    last = f"{note}, other ones by the library, channels last"
    return [Variant(rules, last, channels_last=True), plain[0]]


def _convolution_variants(library: Rules, full: Rules | None) -> list[Variant]:
    """Both layouts of the convolutions; ``full`` are the rules with products where the graph has some."""
    note = "Convolutions by the library, everything around them fused"
    last = f"{note}, channels last"
    found = [
        Variant(library, last, channels_last=True),
        Variant(library, note),
        Variant(library, f"{last}, larger blocks", 0, BLOCKS[1], channels_last=True),
        Variant(library, f"{last}, largest blocks", 0, BLOCKS[2], channels_last=True),
        Variant(library, f"{note}, larger blocks", 0, BLOCKS[1]),
        Variant(library, f"{note}, more warps", 0, BLOCKS[3]),
    ]
    if full is None:
        return found
    products = "Convolutions by the library, every product with its epilogue in one kernel"
    return [Variant(full, f"{products}, channels last", channels_last=True), Variant(full, products), *found]
