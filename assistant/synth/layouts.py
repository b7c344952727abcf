"""Convolutions prepared for fusion: their bias moved behind them, their tensors laid out with channels innermost.

The library adds a convolution's bias in a pass of its own; written as an addition it joins the kernel that follows,
through views too (:mod:`drk.assistant.synth.mapped_region`).
Tensor cores want channels innermost, and the library transposes row-major tensors before and after each convolution;
in the channels-last form of a graph this is done once on the way in, values stay in that layout from one convolution to
the next, and the last kernel writes the row-major result that the module promises.

Left out: 1-D convolutions' layout (PyTorch has no such format for them); which form is faster, which the search
measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from drk.assistant.synth.cat_maps import is_join, padding
from drk.assistant.synth.depthwise_layout import innermost_channels
from drk.assistant.synth.draft import contiguous_meta, plain_name
from drk.assistant.synth.expression import FLOATS, is_pointwise
from drk.assistant.synth.frames import is_channels_last
from drk.assistant.synth.index_rules import is_view, moves_data
from drk.assistant.synth.regions import reduced_dims
from drk.assistant.synth.token_layout import with_permuted_tokens
from drk.assistant.synth.windows import window_of
from drk.gym.graph import Graph, Node, Pack, Ref, Symbol, TensorMeta

CONVOLUTIONS = frozenset(
    {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"}
)
_KEEPS_LAYOUT = frozenset(
    {
        "max_pool2d", "max_pool3d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
        "upsample_nearest2d", "upsample_bilinear2d", "batch_norm",
    }
)  # fmt: skip
"""Torch operators whose result is channels-last where their input is."""

_WRITTEN_OUT = frozenset(
    {
        "group_norm", "instance_norm", "layer_norm", "_native_batch_norm_legit_no_training",
        "_native_batch_norm_legit_functional", "_native_batch_norm_legit", "softmax", "_softmax", "log_softmax",
        "_log_softmax", "logsumexp", "var", "std", "max", "min", "linalg_vector_norm", "norm", "prelu", "glu",
    }
)  # fmt: skip
"""Operators that become reductions and elementwise ones."""
LARGE = 2**20
"""Elements of a result from which on a kernel of its own adds a bias faster than the library does."""


def is_convolution(node: Node) -> bool:
    """Whether ``node`` is one of ATen's convolutions of a batch, with a single floating-point result.

    PyTorch takes single images and signals too; those stay its operators, whose first dimension is no batch.
    """
    if not node.op.startswith("aten.") or node.bare_op not in CONVOLUTIONS or len(node.metas) != 1:
        return False
    meta, digits = node.metas[0], [int(letter) for letter in node.bare_op if letter.isdigit()]
    return meta is not None and meta.dtype in FLOATS and (not digits or len(meta.shape) == digits[0] + 2)


def without_conv_bias(graph: Graph) -> Graph:
    """Return the graph with biases of convolutions as additions, where kernels follow or the result is large."""
    users, metas = graph.users(), graph.metas()
    by_name = {node.name: node for node in graph.nodes}
    nodes: list[Node] = []
    for node in graph.nodes:
        bias = node.args[2] if is_convolution(node) and len(node.args) > 2 else None
        fuses = any(_takes_bias(name, by_name, users, metas) for name in users[node.name])
        if not isinstance(bias, Ref) or (not fuses and node.meta.numel < LARGE):
            nodes.append(node)
            continue
        names = {key: f"{node.name}_{key}" for key in ("product", "bias")}
        if any(name in metas or name in by_name for name in names.values()):
            nodes.append(node)
            continue
        channels = metas[bias.name].shape[0]
        shape = (channels,) + (1,) * (len(node.meta.shape) - 2)
        column = contiguous_meta(shape, metas[bias.name].dtype)
        product = replace(node, name=names["product"], args=(*node.args[:2], None, *node.args[3:]))
        view = replace(
            node, name=names["bias"], op="aten.reshape.default", args=(bias, shape), kwargs={}, metas=(column,)
        )
        total = replace(node, op="aten.add.Tensor", args=(Ref(product.name), Ref(view.name)), kwargs={})
        nodes += [product, view, total]
    return replace(graph, nodes=tuple(nodes))


def _takes_bias(
    reader: str, by_name: Mapping[str, Node], users: Mapping[str, tuple[str, ...]], metas: Mapping[str, TensorMeta]
) -> bool:
    """Whether a kernel will read what ``reader`` reads, or what it shows of that if it is a view."""
    node = by_name.get(reader)
    if node is None:
        return False
    if is_join(node):
        return True
    if is_view(node):
        shown = (_takes_bias(name, by_name, users, metas) for name in users[reader])
        return moves_data(node, metas) or any(shown)
    name = node.bare_op
    if name == "batch_norm":
        return node.args[5] is not True
    if name in _WRITTEN_OUT:
        return True
    if name.startswith("adaptive_"):
        return {*node.args[1]} == {1}
    window = window_of(node, metas)
    if window is not None:
        return window.weight is None
    return is_pointwise(node, metas) or reduced_dims(node, metas) is not None


def adds_large_bias(nodes: Sequence[Node], metas: Mapping[str, TensorMeta]) -> bool:
    """Whether ``nodes`` are the addition of a vector to something large, which is worth a kernel of its own."""
    (node, *others) = nodes
    sizes = sorted(metas[name].numel for name in node.inputs())
    return not others and node.bare_op == "add" and len(sizes) == 2 and sizes[0] < sizes[1] and sizes[1] >= LARGE


def only_products(graph: Graph) -> bool:
    """Whether all convolutions are matrix products over channels of row-major float32 images.

    The library multiplies those as they lie; channels-last they would be copied on the way in and out, which costs as
    much as the product does.
    """
    metas = graph.metas()
    found = [node for node in graph.nodes if is_convolution(node)]
    return bool(found) and all(_is_product(node, metas) for node in found)


def _is_product(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether a convolution has windows of one element, next to each other, and one group."""
    if not node.op.startswith("aten.conv") or "transpose" in node.op or not isinstance(node.args[1], Ref):
        return False
    given: list[Any] = [*node.args[2:], *(None, 1, 0, 1, 1)[len(node.args) - 2 :]]
    _bias, stride, padding, _dilation, groups = given
    source = metas.get(node.args[0].name) if isinstance(node.args[0], Ref) else None
    if source is None or is_channels_last(source) or node.meta.dtype != "float32" or node.bare_op == "convolution":
        return False
    numbers = [(stride, 1), (padding, 0), (groups, 1)]
    plain = all({*(item if isinstance(item, tuple) else (item,))} == {wanted} for item, wanted in numbers)
    return plain and {*metas[node.args[1].name].shape[2:]} == {1}


def channels_last(graph: Graph) -> Graph:
    """Return the graph with 2-D and 3-D convolutions in channels-last layout; without any, the graph itself."""
    if not any(_wants_layout(node) for node in graph.nodes):
        return graph
    graph = with_permuted_tokens(graph)
    return _Layout(graph, graph.metas()).run()


def _wants_layout(node: Node) -> bool:
    return is_convolution(node) and len(node.meta.shape) in (4, 5)


def _lays_out(node: Node) -> bool:
    return _wants_layout(node) or node.bare_op in _KEEPS_LAYOUT


def _moves_alike(node: Node) -> bool:
    """Whether ``node`` joins or moves elements of tensors of its own rank: kernels do so in any layout."""
    if len(node.metas) != 1 or node.metas[0] is None or len(node.metas[0].shape) not in (4, 5):
        return False
    return (is_join(node) and node.bare_op != "stack") or padding(node) is not None or node.bare_op in {"roll", "flip"}


def _does_not_mind(node: Node) -> bool:
    return _lays_out(node) or innermost_channels(node)


def _last(meta: TensorMeta) -> TensorMeta:
    """The same tensor with channels innermost in memory."""
    rank = len(meta.shape)
    order = (0, *range(2, rank), 1)
    moved = contiguous_meta(tuple(meta.shape[axis] for axis in order), meta.dtype)
    strides = dict(zip(order, moved.strides, strict=True))
    return replace(meta, strides=tuple(strides[axis] for axis in range(rank)))


@dataclass
class _Layout:
    graph: Graph
    metas: dict[str, TensorMeta]
    nodes: list[Node] = field(default_factory=list)
    copies: dict[tuple[str, bool], str] = field(default_factory=dict)

    def run(self) -> Graph:
        followed = self._followed()
        for node in self.graph.nodes:
            if _wants_layout(node):
                args = tuple(
                    self._copy(arg, node, last=True) if index < 2 else arg for index, arg in enumerate(node.args)
                )
                self._append(replace(node, args=args, metas=(_last(node.meta),)))
            elif innermost_channels(node) and self._is_last(node.args[0]):
                self._append(replace(node, metas=(contiguous_meta(node.meta.shape, node.meta.dtype),)))
            elif self._keeps(node):
                self._append(replace(node, metas=(_last(node.meta),)))
            elif is_pointwise(node, self.metas) or _moves_alike(node):
                inner = any(name in self.metas and is_channels_last(self.metas[name]) for name in node.inputs())
                laid_out = inner and len(node.meta.shape) in (4, 5) and node.name in followed
                self._append(replace(node, metas=(_last(node.meta),)) if laid_out else node)
            elif reduced_dims(node, self.metas) is not None:
                self._append(node)
            else:
                args = tuple(self._copy(arg, node, last=False) for arg in node.args)
                self._append(self._as_it_lies(replace(node, args=args)))
        output = self._output(self.graph.output)
        return replace(self.graph, nodes=tuple(self.nodes), output=output)

    def _followed(self) -> set[str]:
        """Names of values whose readers do not mind: convolutions, operators that keep the layout, reductions.

        Elementwise readers are asked in turn who reads them.
        """
        users = self.graph.users()
        good: set[str] = set()
        by_name = {node.name: node for node in self.graph.nodes}
        for node in reversed(self.graph.nodes):
            readers = [by_name.get(name) for name in users[node.name]]
            ends = [
                r is not None and (_does_not_mind(r) or r.name in good or reduced_dims(r, self.metas) is not None)
                for r in readers
            ]
            if ends and all(ends):
                good.add(node.name)
        return good

    def _keeps(self, node: Node) -> bool:
        first = node.args[0] if node.args else None
        if node.bare_op not in _KEEPS_LAYOUT or not isinstance(first, Ref) or len(node.metas) != 1:
            return False
        return node.metas[0] is not None and first.name in self.metas and is_channels_last(self.metas[first.name])

    def _is_last(self, value: Any) -> bool:
        return isinstance(value, Ref) and value.name in self.metas and is_channels_last(self.metas[value.name])

    def _as_it_lies(self, node: Node) -> Node:
        """A view of what has become row-major is so, too."""
        source = node.args[0] if node.args else None
        if node.bare_op != "reshape" or not isinstance(source, Ref) or not self.metas[source.name].contiguous:
            return node
        return replace(node, metas=(contiguous_meta(node.meta.shape, node.meta.dtype),))

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        if len(node.metas) == 1 and node.metas[0] is not None:
            self.metas[node.name] = node.metas[0]

    def _copy(self, value: Any, origin: Node, *, last: bool) -> Any:
        """``value`` in channels-last or row-major layout: itself where it already is, else a node that converts it."""
        if isinstance(value, tuple):
            return tuple(self._copy(item, origin, last=last) for item in value)
        meta = self.metas.get(value.name) if isinstance(value, Ref) else None
        if meta is None or len(meta.shape) not in (4, 5) or is_channels_last(meta) == last:
            return value
        wanted = _last(meta) if last else contiguous_meta(meta.shape, meta.dtype)
        if wanted.strides == meta.strides or (last and is_channels_last(wanted) is False):
            return value
        key = (value.name, last)
        if key not in self.copies:
            name = f"{plain_name(value.name)}_{'channels_last' if last else 'row_major'}"
            name = name if name not in self.metas else f"{value.name}_laid_out_{len(self.copies)}"
            form = ("channels_last" if len(meta.shape) == 4 else "channels_last_3d") if last else "contiguous_format"
            kwargs = {"memory_format": Symbol("memory_format", form)}
            made = replace(
                origin, name=name, op="aten.contiguous.default", args=(value,), kwargs=kwargs, metas=(wanted,)
            )
            self._append(made)
            self.copies[key] = name
        return Ref(self.copies[key])

    def _output(self, value: Any) -> Any:
        """The module's results in the layout they had."""
        if isinstance(value, Pack):
            return replace(value, items=tuple(self._output(item) for item in value.items))
        if not isinstance(value, Ref) or value.name not in self.metas:
            return value
        made = next((node for node in self.nodes if node.name == value.name), None)
        before = self.graph.metas()[value.name]
        if made is None or is_channels_last(before):
            return value
        return self._copy(value, made, last=False)
