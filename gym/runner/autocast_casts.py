"""Writes the casts that autocast makes into a captured graph (inside the sandboxed Reference Runner).

Tracers stand above autocast: the graph shows ``linear`` with fp32 operands and a bf16 result. Whoever compiles it needs
the casts. Operators of autocast's two lists are known by name; where a result's dtype shows that the policy applied,
their floating operands are cast to it by ``aten._to_copy`` nodes, one for each value and dtype.

Left out: operators that promote to the widest operand (ordinary promotion does that), and lists of operands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from typing import Any

import torch

# fmt: off
LOWERED = frozenset((
    "linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "einsum", "prelu",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
    "scaled_dot_product_attention",
))
RAISED = frozenset((
    "layer_norm", "group_norm", "softmax", "log_softmax", "softmin", "exp", "expm1", "log", "log10", "log2", "log1p",
    "pow", "rsqrt", "reciprocal", "sum", "prod", "cumsum", "cumprod", "norm", "nll_loss", "mse_loss", "l1_loss",
    "smooth_l1_loss", "cross_entropy_loss", "kl_div", "cosine_similarity", "softplus", "acos", "asin", "cosh", "sinh",
    "tan", "erfinv", "renorm", "dist", "cdist",
))
# fmt: on
"""Operators (bare names) that autocast runs in the lower dtype, and in fp32."""
FLOATING = frozenset(("float32", "float16", "bfloat16"))


@contextlib.contextmanager
def autocast_everywhere(dtype: torch.dtype) -> Iterator[None]:
    """Turn autocast on for the CPU and for CUDA tensors, also fake ones where there is no CUDA device."""
    raw: Any = torch._C  # the public names take one device for the other where devices are mapped
    kinds = ("cpu", "cuda")
    before = [(kind, raw.is_autocast_enabled(kind), raw.get_autocast_dtype(kind)) for kind in kinds]

    def put(states: list[tuple[str, bool, torch.dtype]]) -> None:
        for kind, enabled, wanted in states:
            raw.set_autocast_enabled(kind, enabled)
            raw.set_autocast_dtype(kind, wanted)

    put([(kind, True, dtype) for kind in kinds])
    try:
        yield
    finally:
        put(before)


def write_casts(graph: dict[str, Any], autocast: str, only: Container[str] | None = None) -> dict[str, Any]:
    """Return the graph's JSON with casts before the operators that autocast (a torch dtype name) changes.

    ``only`` names the nodes that were written under autocast, where not all were.
    """
    metas = {item["name"]: item["meta"] for item in graph["placeholders"] if item["meta"]}
    taken = {item["name"] for item in (*graph["placeholders"], *graph["nodes"])}
    nodes: list[dict[str, Any]] = []
    made: dict[tuple[str, str], str] = {}
    for node in graph["nodes"]:
        wanted = _wanted(node, autocast) if only is None or node["name"] in only else ""
        if wanted:
            for name in _references([node["args"], node["kwargs"]]):
                meta = metas.get(name)
                if meta is None or meta["dtype"] not in FLOATING or meta["dtype"] == wanted:
                    continue
                if (name, wanted) not in made:
                    cast = _cast(node, name, meta, wanted)
                    while cast["name"] in taken:
                        cast["name"] += "_"
                    taken.add(cast["name"])
                    made[name, wanted] = cast["name"]
                    nodes.append(cast)
                    metas[cast["name"]] = cast["meta"][0]
                node = {  # noqa: PLW2901 - the node with its operand replaced
                    **node,
                    "args": _replaced(node["args"], name, made[name, wanted]),
                    "kwargs": _replaced(node["kwargs"], name, made[name, wanted]),
                }
        nodes.append(node)
        if len(node["meta"]) == 1 and node["meta"][0]:
            metas[node["name"]] = node["meta"][0]
    return {**graph, "nodes": nodes}


def _wanted(node: dict[str, Any], autocast: str) -> str:
    """Return the dtype that the operator's operands are cast to, or an empty text."""
    bare = node["op"].split(".")[1] if "." in node["op"] else node["op"]
    dtype = (node["meta"][0] or {}).get("dtype", "") if node["meta"] else ""
    if bare in LOWERED and dtype == autocast:
        return autocast
    return "float32" if bare in RAISED and dtype == "float32" else ""


def _cast(node: dict[str, Any], name: str, meta: dict[str, Any], wanted: str) -> dict[str, Any]:
    return {
        **node,
        "name": f"{name}_{wanted}",
        "op": "aten._to_copy.default",
        "args": [{"ref": name}],
        "kwargs": {"dtype": {"dtype": wanted}},
        "meta": [{**meta, "dtype": wanted}],
    }


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        if set(value) == {"ref"}:
            return [value["ref"]]
        return [name for item in value.values() for name in _references(item)]
    return [name for item in value for name in _references(item)] if isinstance(value, list) else []


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        if set(value) == {"ref"}:
            return {"ref": new} if value["ref"] == old else value
        return {key: _replaced(item, old, new) for key, item in value.items()}
    return [_replaced(item, old, new) for item in value] if isinstance(value, list) else value
