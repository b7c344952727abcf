"""Torch code for the operators that no kernel takes: readable calls where the meaning is plain, ``torch.ops`` else.

Readable calls are also the quicker ones: ``torch.ops`` takes the host two to four times as long to start an operator.

Sizes in ``view``, ``reshape`` and ``expand`` that were those of an input's dimensions are written as ``x.shape[i]``, so
that the module also runs with other batch sizes than the captured one.

Left out: operators with out-variants or random state beyond what ``torch.ops`` does by itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from drk.assistant.synth.size_constants import CUT, LEAST, SizeConstants
from drk.gym.graph import Node, Ref, Symbol, TensorMeta

_FUNCTIONS: Mapping[str, str] = {
    "aten.linear.default": "F.linear",
    "aten.conv1d.default": "F.conv1d",
    "aten.conv2d.default": "F.conv2d",
    "aten.conv3d.default": "F.conv3d",
    "aten.conv_transpose1d.default": "F.conv_transpose1d",
    "aten.conv_transpose2d.input": "F.conv_transpose2d",
    "aten.conv_transpose3d.input": "F.conv_transpose3d",
    "aten.matmul.default": "torch.matmul",
    "aten.mm.default": "torch.mm",
    "aten.bmm.default": "torch.bmm",
    "aten.addmm.default": "torch.addmm",
    "aten.scaled_dot_product_attention.default": "F.scaled_dot_product_attention",
    "aten.embedding.default": "torch.embedding",
    "aten.cat.default": "torch.cat",
    "aten.stack.default": "torch.stack",
    "aten.where.self": "torch.where",
    **{f"aten.arange.{overload}": "torch.arange" for overload in ("default", "start", "start_step")},
    **{f"aten.{name}.default": f"torch.{name}" for name in ("eye", "full", "full_like", "ones", "ones_like", "zeros",
                                                            "zeros_like")},
}  # fmt: skip
# fmt: off
_METHODS = frozenset((
    "abs", "add", "amax", "amin", "chunk", "clone", "contiguous", "cos", "cumsum", "div", "exp", "expand", "expand_as",
    "flatten", "flip", "gather", "index_select", "log", "masked_fill", "mean", "mul", "neg", "new_ones", "new_zeros",
    "permute", "relu", "repeat", "reshape", "rsqrt", "select", "sigmoid", "sin", "softmax", "split", "sqrt", "squeeze",
    "sub", "sum", "t", "tanh", "transpose", "tril", "triu", "unbind", "unsqueeze", "view",
))
# fmt: on
_SIZE_POSITIONS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("ones", "zeros", "empty", "full"), (0,)),
    **dict.fromkeys(("expand", "new_zeros", "new_ones", "new_full", "new_empty"), (1,)),
    "arange": (0, 1),
    "eye": (0, 1),
    "linspace": (2,),
    "triu_indices": (0, 1),
    "repeat": (1,),
    "affine_grid_generator": (1,),
    "tile": (1,),
    "slice": (2, 3),
}
"""Which arguments of operators that make, expand or cut tensors are sizes."""
_NO_SIZES = SizeConstants()
_NOT_PINNED = ("pin_memory", False)
_END = str(2**63 - 1)
"""How a graph writes that a slice goes to the end."""
_PLAIN_OVERLOADS = frozenset({"default", "Tensor", "int", "Scalar", "dim_IntList", "dim", "Dimname", "using_ints"})
_NUMBER = re.compile(r"-?\d.*|True|False", re.ASCII)
_RESULTS = ("values", "indices")
"""Overloads that stand for one result of an operator with two."""
_KEYWORD_ONLY: Mapping[str, tuple[str, ...]] = {
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
}


def torch_call(
    node: Node,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    device: str,
    sizes: SizeConstants = _NO_SIZES,
) -> str:
    """Return a Python expression that computes ``node`` with torch; ``device`` replaces captured devices."""
    if node.op == "getitem":
        return f"{_text(node.args[0], names, device)}[{node.args[1]!r}]"
    if node.op == CUT:
        cuts = [sizes.text(size, names) for size in node.meta.shape]
        return f"{names[node.args[0].name]}[{', '.join(f':{cut}' if cut else ':' for cut in cuts)}]"
    args = [_text(arg, names, device) for arg in _sized(node, _dynamic(node, names, metas, sizes), names, sizes)]
    if node.bare_op == "batch_norm":
        x, weight, bias, mean, variance, training, momentum, eps = args[:8]
        return f"F.batch_norm({', '.join((x, mean, variance, weight, bias, training, momentum, eps))})"
    given = {key: value for key, value in node.kwargs.items() if value is not None and (key, value) != _NOT_PINNED}
    keywords = [f"{key}={_text(value, names, device)}" for key, value in given.items()]
    if node.bare_op in _KEYWORD_ONLY:
        args = [f"{key}={arg}" for key, arg in zip(_KEYWORD_ONLY[node.bare_op], args, strict=False)]
        return f"{_FUNCTIONS[node.op]}({', '.join([*args, *keywords])})"
    if node.op == "aten.slice.Tensor" and len(args) > 1:
        return _slice(node, args)
    overload = node.op.split(".")[-1]
    if overload in _RESULTS:
        return _one_result(node, args, keywords)
    method = node.bare_op in _METHODS and overload in _PLAIN_OVERLOADS and isinstance(node.args[0], Ref)
    if node.op in _FUNCTIONS:
        return f"{_FUNCTIONS[node.op]}({', '.join([*args, *keywords])})"
    if method and node.op.startswith("aten."):
        # The captured strides may not be those of the emitted module, where layouts differ.
        name = "reshape" if node.bare_op == "view" else node.bare_op
        return f"{args[0]}.{name}({', '.join([*args[1:], *keywords])})"
    args = [_as_tensor(arg, text, metas, device) for arg, text in zip(node.args, args, strict=True)]
    return f"torch.ops.{node.op}({', '.join([*args, *keywords])})"


def _as_tensor(value: Any, text: str, metas: Mapping[str, TensorMeta], device: str) -> str:
    """``text``, or a tensor of the number that it is: an overload of ``torch.ops`` takes nothing else in its place."""
    meta = metas.get(value.name) if isinstance(value, Ref) else None
    if meta is None or meta.shape or not _NUMBER.fullmatch(text):
        return text
    return f"torch.full((), {text}, dtype=torch.{meta.dtype}, device={device})"


def _one_result(node: Node, args: list[str], keywords: list[str]) -> str:
    """Operators that torch has with all their results only."""
    name, result = node.bare_op, _RESULTS.index(node.op.split(".")[-1])
    if name in {"topk", "sort"}:
        source, count, largest = args
        inner = f"{count}, " if name == "topk" else ""
        options = f"largest={largest}" if name == "topk" else f"descending={largest}, stable=True"
        return f"torch.{name}({source}, {inner}dim=-1, {options})[{result}]"
    if name in {"cummax", "cummin"}:
        return f"torch.{name}({', '.join(args)})[{result}]"
    overload = "padding_idx" if name == "embedding_bag" else "default"
    return f"torch.ops.aten.{name}.{overload}({', '.join([*args, *keywords])})[{result}]"


def _slice(node: Node, args: list[str]) -> str:
    """``x[:, 1:3]`` for a cut along one dimension; ``args`` are tensor, dimension, start, end and step as text."""
    start, end, step = (text for text, _ in zip([*args[2:], "", "", ""], range(3), strict=False))
    start, end = "" if start in ("None", "0") else start, "" if end in ("None", _END) else end
    cut = f"{start}:{end}" + (f":{step}" if step not in ("", "1") else "")
    return f"{args[0]}[{', '.join([':'] * (node.args[1] % len(node.meta.shape)) + [cut])}]"


def _text(value: Any, names: Mapping[str, str], device: str) -> str:
    if isinstance(value, Ref):
        return names[value.name]
    if isinstance(value, Symbol):
        return device if value.kind == "device" else f"torch.{value.name}"
    if isinstance(value, tuple):
        return f"[{', '.join(_text(item, names, device) for item in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, _Code):
        return value
    return repr(value)


class _Code(str):
    """Source text that stands for itself."""

    __slots__ = ()


def _sized(node: Node, args: tuple[Any, ...], names: Mapping[str, str], sizes: SizeConstants) -> tuple[Any, ...]:
    """The arguments with sizes of the inputs as expressions, for operators that make or expand tensors or scale."""
    positions = _SIZE_POSITIONS.get(node.bare_op)
    if positions is not None:
        return tuple(_as_sizes(arg, names, sizes) if i in positions else arg for i, arg in enumerate(args))
    if sizes.scales(node):
        text = sizes.text(args[1], names, scalar=True)
        return args if text is None else (args[0], _Code(text), *args[2:])
    return args


def kept_sizes(node: Node, metas: Mapping[str, TensorMeta], sizes: SizeConstants) -> frozenset[int]:
    """Sizes of the inputs that ``node`` depends on in a way that the graph does not tell.

    What makes or resizes to such a size may have meant one dimension or another; a slice that begins or ends at a
    simple fraction of a dimension may have computed it, and a pooling to such a fraction too.
    """
    if node.bare_op in _MAKING:
        made = [arg for place in _SIZE_POSITIONS[node.bare_op] for arg in node.args[place : place + 1]]
        numbers = {item for arg in made for item in (arg if isinstance(arg, tuple) else (arg,)) if type(item) is int}
        return frozenset(item for item in numbers if item >= LEAST and not sizes.explains(item))
    if node.op == "aten.slice.Tensor" and len(node.args) > 2 and node.args[0].name in metas:
        size = metas[node.args[0].name].shape[node.args[1]]
        ends = [item for item in node.args[2:4] if type(item) is int and LEAST_PART <= item < size]
        return frozenset(size for item in ends for parts in _FRACTIONS if item * parts % size == 0)
    given = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], tuple) else ()
    if node.bare_op.startswith("upsample_"):
        return frozenset(item for item in given if type(item) is int and item >= LEAST)
    if node.bare_op.startswith("adaptive_") and isinstance(node.args[0], Ref) and node.args[0].name in metas:
        before = metas[node.args[0].name].shape[-len(given) :] if given else ()
        pairs = zip(before, given, strict=True)
        return frozenset(size for size, item in pairs if item >= LEAST_PART and size in {item * n for n in range(1, 9)})
    return frozenset()


def rooted_sizes(node: Node) -> frozenset[int]:
    """Sizes whose root ``node`` may scale by, as attention does by that of its heads' width."""
    number = node.args[1] if node.bare_op in {"mul", "div"} and len(node.args) > 1 else None
    if type(number) is not float or not 0.0 < number < math.inf:
        return frozenset()
    size = round(number**-2 if number < 1.0 else number**2)
    roots = {size**0.5, size**-0.5, 1.0 / size**0.5} if size >= LEAST_PART else set()
    return frozenset({size} if number in roots else ())


_MAKING = frozenset(_SIZE_POSITIONS) - {"expand", "slice", "repeat", "tile"}
_FRACTIONS = range(2, 9)
LEAST_PART = 16
"""Smaller places at which slices begin or end are taken as the numbers that they are."""


def _as_sizes(value: Any, names: Mapping[str, str], sizes: SizeConstants) -> Any:
    if isinstance(value, tuple):
        return tuple(_as_sizes(item, names, sizes) for item in value)
    text = sizes.text(value, names)
    return value if text is None else _Code(text)


def _dynamic(
    node: Node, names: Mapping[str, str], metas: Mapping[str, TensorMeta], given: SizeConstants
) -> tuple[Any, ...]:
    """The node's arguments with sizes expressed through the input's shape where they match."""
    if node.bare_op not in {"view", "reshape", "expand", "_unsafe_view"} or not isinstance(node.args[0], Ref):
        return node.args
    source = node.args[0].name
    if source not in metas or not isinstance(node.args[1], tuple):
        return node.args
    before, after = metas[source].shape, node.meta.shape
    if names[source].startswith("self.") and node.bare_op != "expand":
        return (node.args[0], after, *node.args[2:])  # a weight: its sizes are declared
    if node.bare_op == "expand":
        return node.args
    sizes = _reshaped(before, after, names[source])
    if sizes[:1] == (-1,):  # what was put together is taken apart: into a size of an input perhaps
        sizes = tuple(_as_sizes(item, names, given) if type(item) is int and item > 0 else item for item in sizes)
    return (node.args[0], sizes, *node.args[2:])


def _reshaped(before: tuple[int, ...], after: tuple[int, ...], name: str) -> tuple[Any, ...]:
    """Match dimensions from both ends; equal ones and products of several become expressions of ``name.shape``.

    Where several dimensions become others in between, the first of those is left open: ``(batch, features)`` that
    become ``(batch * heads, width)`` have more rows where there are more in the batch, not wider heads.
    """
    result: list[Any] = list(after)
    source = target = 0
    for target, size in enumerate(after):
        while source < len(before) and before[source] == 1 and size != 1:
            source += 1
        if source >= len(before):
            break
        width = _merged(before, source, size)
        if size == 1 and not width:
            continue
        if not width:
            break
        result[target] = _Code(" * ".join(f"{name}.shape[{axis}]" for axis in range(source, source + width)))
        source += width
    back = 1
    while back <= min(len(before) - source, len(after) - target) and before[-back] == after[-back]:
        if isinstance(result[-back], _Code):
            break
        result[-back] = _Code(f"{name}.shape[{len(before) - back}]")
        back += 1
    between = [size for size in before[source : len(before) - back + 1] if size != 1]
    opened = all(item == 1 for item in result[:target]) or len(between) > 1
    if between and opened and not isinstance(result[target], _Code) and 0 not in after:
        result[target] = -1
    return tuple(result)


def _merged(before: tuple[int, ...], start: int, size: int) -> int:
    """How many of ``before``'s dimensions from ``start`` multiply to ``size`` (0: none do)."""
    product = 1
    for width, factor in enumerate(before[start:], start=1):
        product *= factor
        if product == size:
            return width
        if product > size:
            break
    return 0
