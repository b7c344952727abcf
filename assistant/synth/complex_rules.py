"""Products of complex numbers that real tensors are seen as, on the real ones: rotary embeddings as Llama has them.

``view_as_real(view_as_complex(x) * rotation)`` reads pairs, turns them and writes pairs. Triton knows no complex
numbers; as two products, a difference and a sum of the pairs' halves, put side by side, it is elementwise and joins the
casts and reshapes around it. The rotation may be any complex tensor: ``view_as_real`` of it is a view.

Left out: complex128, conjugates, other arithmetic of complex numbers, and code that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.draft import Draft, contiguous_meta
from drk.assistant.synth.reduction_rules import Rule
from drk.gym.graph import Node, Ref, TensorMeta


def _real_product(node: Node, draft: Draft) -> Ref | None:
    made_by = {item.name: item for item in draft.nodes}
    product = made_by.get(node.args[0].name)
    if product is None or product.bare_op != "mul" or node.meta.dtype != "float32" or not draft.by_channel:
        return None
    factors = [arg for arg in product.args if isinstance(arg, Ref)]
    if len(factors) != 2 or any(draft.metas[arg.name].dtype not in {"complex64", "float32"} for arg in factors):
        return None
    (a, b), (c, d) = (_halves(arg, node, draft, made_by) for arg in factors)
    meta = contiguous_meta(node.meta.shape[:-1], "float32")

    def combined(hint: str, op: str, x: Ref, y: Ref) -> Ref:
        return draft.append(replace(node, op=f"aten.{op}.Tensor", args=(x, y), kwargs={}, metas=(meta,)), hint)

    real = combined("real", "mul", a, c)
    if b is not None and d is not None:
        real = combined("real_part", "sub", real, combined("imaginary_squared", "mul", b, d))
    turned = [combined("crossed", "mul", x, y) for x, y in ((a, d), (b, c)) if x is not None and y is not None]
    imaginary = turned[0] if len(turned) == 1 else combined("imaginary_part", "add", *turned)
    pair = replace(
        node,
        op="aten.stack.default",
        args=((real, imaginary), -1),
        kwargs={},
        metas=(contiguous_meta(node.meta.shape, "float32"),),
    )
    return draft.append(pair, "pairs")


def _halves(value: Ref, node: Node, draft: Draft, made_by: Mapping[str, Node]) -> tuple[Ref, Ref | None]:
    """Real and imaginary part of a factor; a real one has none of the latter."""
    meta = draft.metas[value.name]
    if meta.dtype == "float32":
        return value, None
    maker = made_by.get(value.name)
    if maker is not None and maker.bare_op == "view_as_complex":
        pairs: Ref = maker.args[0]
    else:
        strides = (*(2 * stride for stride in meta.strides), 1)
        seen = replace(
            node,
            op="aten.view_as_real.default",
            args=(value,),
            kwargs={},
            metas=(TensorMeta((*meta.shape, 2), "float32", strides),),
        )
        pairs = draft.append(seen, "pairs_of_factor")
    whole = draft.metas[pairs.name]
    half = TensorMeta(whole.shape[:-1], whole.dtype, whole.strides[:-1])
    real, imaginary = (
        draft.append(
            replace(node, op="aten.select.int", args=(pairs, len(half.shape), index), kwargs={}, metas=(half,)), hint
        )
        for index, hint in enumerate(("real_half", "imaginary_half"))
    )
    return real, imaginary


COMPLEX_RULES: Mapping[str, Rule] = {"view_as_real": _real_product}
"""Rules by operator."""
