"""Readable names for what the emitted module holds: values, parameters and kernels.

Parameters are named by the end of their path (``norm.weight`` is ``norm_weight``), inputs by the user's argument,
what leaves a submodule by its name (``gate_proj``), kernels by what they compute (``rms_norm``,
``linear_silu_mul``). Names are unique within one module and never those of the device functions, of Python or of the
emitted code itself.

Left out: guessing a formula's usual name beyond a few norms and softmax.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

from drk.assistant.synth.device_math import FUNCTIONS
from drk.assistant.synth.launch import NAMES
from drk.assistant.synth.regions import REDUCTIONS, Product, Region
from drk.gym.graph import Graph

_RESERVED = {
    *FUNCTIONS, *NAMES,
    *keyword.kwlist, *dir(builtins), "self", "torch", "triton", "tl", "mask", "row_mask", "col_mask",
    "index", "rows", "cols", "n_rows", "n_cols", "n_inner", "inner", "start", "tile", "grid", "device", "pid",
    "first_row", "first_col", "index_type", "block_m", "block_n", "num_warps", "tiles_m", "tiles_n", "width", "first",
    "height", "n_elements", "n_bags", "n_ids",
    "pieces", "piece", "slots", "slot_mask", "counts", "n_pieces", "piece_size", "wanted", "inside",
    "batch", "inner_batches", "outer_batches", "carry", "step", "batches", "head", "scores", "higher",
    "shift", "weights", "rescale", "total", "result", "top", "n_head", "n_width", "matrix_rows", "out_ptr", "out_ptrs",
    "outer_row", "inner_row", "inner_rows", "row_tiles", "outer_col", "inner_col", "inner_cols", "col_tiles", "n_tiles",
    "piece_tiles", "first_tile", "starts", "ends", "seen", "combine_m",
    "program", "n_programs", "n_blocks", "ctx",
    "position", "channel", "channels", "n_positions", "group", "channel_mask", "sums", "zeros", "taken", "valid", "row",
    "n_windows", "n_across", "n_images", "n_channels", "n_places", "largest", "programs", "block_c", "block_p",
    "block", "tile_m", "tile_n", "left", "left_ptrs", "left_rows", "right_cols", "config",
}  # fmt: skip

_NUMBERED = re.compile(
    r"(at|axis|axis_size|col|col_size|count|first|groups|in|inside|k|longest|out|outer|part|place|ratio|result|row|"
    r"row_size|share|size|tap)(_\d+)*"
)
"""What kernels and launchers call by a number (``row_1``): a user's own ``row`` must not become such a name."""


def is_kept(name: str) -> bool:
    """Whether who first wishes for this identifier gets it as it is."""
    return name not in _RESERVED and not _NUMBERED.fullmatch(name) and name == name.strip("_")


class NameTable:
    """Hands out unique identifiers."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*_RESERVED, *taken}

    def claim(self, wish: str) -> str:
        """Return ``wish`` as an identifier nobody has, with a number appended if need be."""
        name = re.sub(r"\W+", "_", wish).strip("_") or "value"
        name = f"v{name}" if name[0].isdigit() else name
        name = f"{name}_value" if _NUMBERED.fullmatch(name) else name
        unique, count = name, 1
        while unique in self._taken:
            unique, count = f"{name}_{count}", count + 1
        self._taken.add(unique)
        return unique


def value_names(graph: Graph) -> dict[str, str]:
    """Map every value of ``graph`` to a unique Python name."""
    table = NameTable()
    names: dict[str, str] = {}
    for parameter in graph.signature:
        names[f"argument {parameter.name}"] = table.claim(parameter.name)
    for item in graph.placeholders:
        if item.kind == "input" and f"argument {item.path}" in names:
            names[item.name] = names[f"argument {item.path}"]
        elif item.kind == "input":
            names[item.name] = table.claim(item.path)
        else:
            names[item.name] = table.claim("_".join(item.path.split(".")[-2:]))
    users, modules = graph.users(), {node.name: node.module for node in graph.nodes}
    for node in graph.nodes:
        leaf = node.module.split(".")[-1]
        leaves_module = any(modules.get(user, "") != node.module for user in users[node.name])
        named = leaves_module and re.match(r"^[a-z]\w*$", leaf)
        names[node.name] = table.claim(leaf if named else node.name)
    return names


_WORDS = {"expand_as": "scale", "index": "gather", "index_select": "gather"}
_SKIP = {
    "view", "flip", "contiguous", "to", "_to_copy", "neg", "pow", "sub", "square", "getitem", "reshape", "_unsafe_view",
    "flatten", "unflatten", "unsqueeze", "squeeze", "permute", "transpose", "t", "expand", "slice", "select", "clone",
    "split_with_sizes", "unbind",
}  # fmt: skip


def kernel_words(region: Region) -> str:
    """What a region computes, as words joined by underscores (at most four)."""
    if region.attention is not None:
        return "attention"
    words = [_product_word(item) for item in region.products[:1]]
    ops = [node.bare_op for node in region.nodes]
    rest = [op for node, op in zip(region.nodes, ops, strict=True) if node not in [p.node for p in region.products]]
    present = set(ops)
    if {"amax", "exp", "sum", "div"} <= present:
        rest = _fold_words(rest, {"amax", "exp", "sum", "div", "sub"}, "softmax")
    elif {"amax", "exp", "sum", "log"} <= present:
        guard = {"abs", "eq", "masked_fill"} if {"abs", "eq", "masked_fill"} <= present else set[str]()
        name = "log_softmax" if "add" not in ops else "logsumexp"
        rest = _fold_words(rest, {"amax", "exp", "sum", "log", "sub"} | guard, name)
    elif {"var", "rsqrt"} <= present or {"var", "sqrt"} <= present:
        rest = _fold_words(rest, {"mean", "var", "rsqrt", "sqrt", "sub", "mul", "add", "div"}, _norm_word(region))
    elif "rsqrt" in present and not present & REDUCTIONS and not region.products:
        rest = _fold_words(rest, {"rsqrt", "sub", "mul", "add"}, "batch_norm")
    elif {"mean", "rsqrt"} <= present:
        rest = _fold_words(rest, {"mean", "pow", "square", "rsqrt", "mul", "add"}, "rms_norm")
    picked = {item.node.bare_op for item in region.gathers}
    rest = [*(word for word in rest if word in picked), *(word for word in rest if word not in picked)]
    rest = [_WORDS.get(word, word) for word in rest]
    words += [word for word in dict.fromkeys(rest) if word not in _SKIP]
    return "_".join(words[:4]) or "pointwise"


def _product_word(product: Product) -> str:
    if product.of_pixels:
        return "conv"
    return "linear" if product.node.bare_op in {"linear", "addmm"} else "matmul"


def _norm_word(region: Region) -> str:
    """Which norm a mean and a variance belong to, by the module they come from."""
    types = " ".join(node.module_type for node in region.nodes)
    kinds = ("group_norm", "GroupNorm"), ("instance_norm", "InstanceNorm"), ("batch_norm", "BatchNorm")
    return next((word for word, kind in kinds if kind in types), "layer_norm")


def _fold_words(ops: list[str], parts: set[str], name: str) -> list[str]:
    """Replace the operators of a pattern by its name; one trailing add (a residual) keeps its word."""
    kept = [op for op in ops if op not in parts]
    return [name, *kept]
