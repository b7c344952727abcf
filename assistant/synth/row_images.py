"""1-D convolutions as 2-D ones: a signal (N, C, L) is an image (N, C, 1, L) of one row.

The library transposes the tensors of a 1-D convolution before and after it, since tensor cores want channels innermost,
and PyTorch has no memory format for that in three dimensions. As images of one row signals can stay channels-last from
one convolution to the next (:mod:`drk.assistant.synth.layouts`), and the kernels between convert on the way: on an H200
this saves a quarter to a third of a convolution's time. The products and the order of their sums stay the library's.

What lies between convolutions is written on images too: elementwise operators, norms of channels, cuts and
concatenations, pooling, reductions. Other operators receive the signal again, by a view.

Left out: graphs whose 1-D convolutions all see one element or are depthwise, which need no layout; convolutions of
single signals without a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drk.assistant.synth.draft import contiguous_meta, fresh_name, plain_name
from drk.assistant.synth.expression import FLOATS, is_pointwise
from drk.assistant.synth.regions import reduced_dims
from drk.gym.graph import Graph, Node, Pack, Ref, TensorMeta

_CONVOLUTIONS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "aten.conv1d.default": ("aten.conv2d.default", (1, 0, 1)),
    "aten.conv1d.padding": ("aten.conv2d.padding", (1, 0, 1)),
    "aten.conv_transpose1d.default": ("aten.conv_transpose2d.input", (1, 0, 0)),
}
"""The 2-D operator of each, and what its row has for the numbers behind the bias: stride, padding and the third."""
_NORMS = frozenset({"batch_norm", "instance_norm", "group_norm", "dropout", "prelu"})
"""Operators that take images as they take signals, all other arguments alike."""
_BY_DIMENSION: Mapping[str, int] = {
    "chunk": 2, "split": 2, "split_with_sizes": 2, "slice": 1, "narrow": 1, "cat": 1, "glu": 1, "softmax": 1,
    "log_softmax": 1,
}  # fmt: skip
"""Where operators have the dimension that they go along."""
_DEFAULT_DIMENSION: Mapping[str, int] = {"glu": -1}
_POOLS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "aten.max_pool1d.default": ("aten.max_pool2d.default", (1, 1, 0, 1)),
    "aten.avg_pool1d.default": ("aten.avg_pool2d.default", (1, 1, 0)),
    "aten.adaptive_avg_pool1d.default": ("aten.adaptive_avg_pool2d.default", (1,)),
}
"""The 2-D operator of each, and what the row has for its leading arguments: window, stride, padding, dilation."""


def rows_as_images(graph: Graph) -> Graph:
    """Return the graph with 1-D convolutions as 2-D ones, or the graph itself where none gains by it."""
    metas = graph.metas()
    if not any(_gains(node, metas) for node in graph.nodes):
        return graph
    return _Images(graph, metas).run()


def _gains(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether the library would transpose the convolution's tensors."""
    if not _convolves_signals(node, metas):
        return False
    weight, result = metas[node.args[1].name].shape, node.meta.shape
    return weight[1] > 1 and weight[2] > 1 and result[2] > 1


def _convolves_signals(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    if node.op not in _CONVOLUTIONS or node.kwargs or len(node.metas) != 1 or node.metas[0] is None:
        return False
    if not all(isinstance(item, Ref) and item.name in metas for item in node.args[:2]):
        return False
    shapes = [metas[item.name].shape for item in node.args[:2]]
    return node.meta.dtype in FLOATS and all(len(shape) == 3 for shape in (*shapes, node.meta.shape))


def _image(meta: TensorMeta) -> TensorMeta:
    """Metadata of the image of a signal."""
    if meta.contiguous:
        return contiguous_meta((*meta.shape[:2], 1, meta.shape[2]), meta.dtype)
    outer, middle, inner = meta.strides
    return replace(meta, shape=(*meta.shape[:2], 1, meta.shape[2]), strides=(outer, middle, middle, inner))


@dataclass
class _Images:
    graph: Graph
    metas: dict[str, TensorMeta]
    nodes: list[Node] = field(default_factory=list)
    images: dict[str, str] = field(default_factory=dict)
    """Images by the name of the signal; operators with several results by their own."""
    shown: set[str] = field(default_factory=set)
    """Names of convolutions' results and what was made of them, of which there is an image."""
    signals: set[str] = field(default_factory=set)
    """Of these the ones that exist as signals too."""
    taken: set[str] = field(default_factory=set)

    def run(self) -> Graph:
        self.taken = set(self.graph.names())
        for node in self.graph.nodes:
            made = self._imaged(node)
            if made is None:
                kwargs = {key: self._plain(value, node) for key, value in node.kwargs.items()}
                self._append(replace(node, args=self._plain(node.args, node), kwargs=kwargs))
                continue
            self._append(made)
            if made.name != node.name:
                self.images[node.name] = made.name
                self.shown.add(node.name)
        last = self.graph.nodes[-1]
        output = self._plain(self.graph.output, last)
        for name in self.graph.mutations.values():
            self._plain(Ref(name), last)
        return replace(self.graph, nodes=tuple(self.nodes), output=output)

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        if len(node.metas) == 1 and node.metas[0] is not None:
            self.metas[node.name] = node.metas[0]

    # -- what becomes an image

    def _imaged(self, node: Node) -> Node | None:
        """The node that makes an image (or, under the same name, reduces one) instead of ``node``; None: as it is."""
        if _convolves_signals(node, self.metas):
            return self._convolution(node)
        if not any(name in self.shown for name in node.inputs()):
            return None
        if node.op == "getitem":
            return self._part(node)
        if reduced_dims(node, self.metas) is not None:
            return self._reduced(node)
        rule = self._rule(node)
        return None if rule is None or any(meta is None or len(meta.shape) != 3 for meta in node.metas) else rule(node)

    def _rule(self, node: Node) -> Callable[[Node], Node | None] | None:
        if not node.op.startswith("aten.") or (node.kwargs and node.bare_op in _BY_DIMENSION):
            return None
        if node.op in _POOLS:
            return self._pooled
        if node.bare_op in _BY_DIMENSION:
            return self._along_dimension
        if node.bare_op in _NORMS:
            return self._same_arguments
        plain = node.bare_op not in {"contiguous", "expand_as"} and is_pointwise(node, self.metas)
        return self._elementwise if plain else None

    def _convolution(self, node: Node) -> Node:
        op, rows = _CONVOLUTIONS[node.op]
        x, weight, *rest = node.args
        numbers = [_of_two(value, row) for value, row in zip(rest[1:4], rows, strict=False)]
        numbers += [_of_two(value, 1) if place == 5 else value for place, value in enumerate(rest[4:], start=4)]
        args = (self._image_of(x, node), self._image_of(weight, node), *rest[:1], *numbers)
        return self._named(replace(node, op=op, args=args, metas=(_image(node.meta),)))

    def _same_arguments(self, node: Node) -> Node:
        args = (self._image_of(node.args[0], node), *node.args[1:])
        return self._named(replace(node, args=args, metas=(_image(node.meta),)))

    def _elementwise(self, node: Node) -> Node | None:
        shapes = [self.metas[name].shape for name in node.inputs()]
        if any(len(shape) > 3 for shape in shapes):
            return None
        args, kwargs = self._operand(node.args, node), {k: self._operand(v, node) for k, v in node.kwargs.items()}
        return self._named(replace(node, args=args, kwargs=kwargs, metas=(_image(node.meta),)))

    def _along_dimension(self, node: Node) -> Node | None:
        place = _BY_DIMENSION[node.bare_op]
        given = len(node.args) > place
        dim = node.args[place] if given else _DEFAULT_DIMENSION.get(node.bare_op, 0)
        if not isinstance(dim, int):
            return None
        dim %= 3
        args = (*node.args[:place], dim + (dim == 2), *node.args[place + 1 :])
        if isinstance(node.args[0], tuple):
            pieces = [item for item in node.args[0] if isinstance(item, Ref) and len(self.metas[item.name].shape) == 3]
            if len(pieces) < len(node.args[0]):
                return None
        first = self._operand(node.args[0], node)
        metas = tuple(None if meta is None else _image(meta) for meta in node.metas)
        return self._named(replace(node, args=(first, *args[1:]), metas=metas))

    def _pooled(self, node: Node) -> Node | None:
        op, rows = _POOLS[node.op]
        x, *rest = node.args
        numbers = [value if value == () else _of_two(value, row) for value, row in zip(rest, rows, strict=False)]
        args = (self._image_of(x, node), *numbers, *rest[len(rows) :])
        return self._named(replace(node, op=op, args=args, metas=(_image(node.meta),)))

    def _reduced(self, node: Node) -> Node | None:
        """A reduction along the length goes along the row too; the others only where they keep dimensions."""
        found = reduced_dims(node, self.metas)
        assert found is not None, "asked before"
        dims, keep = found
        if node.bare_op in {"prod", "argmax", "argmin"} or not (keep or dims[-1] == 2):
            return None
        wanted = (*dims[:-1], 2, 3) if dims[-1] == 2 else dims
        ending: tuple[Any, ...] = (keep,)
        kwargs: dict[str, Any] = {}
        if node.bare_op == "var":
            ending, kwargs = (), {"correction": node.kwargs["correction"], "keepdim": keep}
        made = replace(node, args=(self._image_of(node.args[0], node), wanted, *ending), kwargs=kwargs)
        return self._named(replace(made, metas=(_image(node.meta),))) if keep else made

    def _part(self, node: Node) -> Node | None:
        source, index = node.args
        if source.name not in self.images or node.metas[0] is None:
            return None
        return self._named(replace(node, args=(Ref(self.images[source.name]), index), metas=(_image(node.meta),)))

    def _named(self, node: Node) -> Node:
        return replace(node, name=fresh_name(f"{node.name}_image", self.taken))

    # -- views between signals and images

    def _operand(self, value: Any, origin: Node) -> Any:
        """An elementwise operator's argument, broadcast against images."""
        if isinstance(value, tuple):
            return tuple(self._operand(item, origin) for item in value)
        if not isinstance(value, Ref) or len(self.metas[value.name].shape) < 2:
            return value
        return self._image_of(value, origin)

    def _image_of(self, value: Ref, origin: Node) -> Ref:
        """The image of a signal, or of (channels, length) that is broadcast to signals."""
        if value.name not in self.images:
            meta = self.metas[value.name]
            batched = meta if len(meta.shape) == 3 else replace(
                meta, shape=(1, *meta.shape), strides=(meta.shape[0] * meta.strides[0], *meta.strides)
            )  # fmt: skip
            image = _image(batched)
            if len(meta.shape) == 2:
                image = replace(image, shape=image.shape[1:], strides=image.strides[1:])
            args = (value, len(meta.shape) - 1)
            name = fresh_name(f"{plain_name(value.name)}_image", self.taken)
            self._append(_view(origin, name, "aten.unsqueeze.default", args, image))
            self.images[value.name] = name
        return Ref(self.images[value.name])

    def _plain(self, value: Any, origin: Node) -> Any:
        """``value`` with signals for other operators; they are made where there are only images of them."""
        if isinstance(value, tuple):
            return tuple(self._plain(item, origin) for item in value)
        if isinstance(value, Pack):
            return replace(value, items=self._plain(value.items, origin))
        if isinstance(value, Ref) and value.name in self.shown and value.name not in self.signals:
            image = Ref(self.images[value.name])
            self._append(_view(origin, value.name, "aten.squeeze.dim", (image, 2), self.metas[value.name]))
            self.signals.add(value.name)
        return value


def _view(origin: Node, name: str, op: str, args: tuple[Any, ...], meta: TensorMeta) -> Node:
    """A view that stands before ``origin`` and belongs to no module."""
    return replace(origin, name=name, op=op, args=args, kwargs={}, metas=(meta,), module="", module_type="")


def _of_two(value: Any, row: int) -> Any:
    """A number for each dimension of an image: ``row`` for its row."""
    if isinstance(value, str):
        return value
    return (row, *(value if isinstance(value, tuple) else (value,)))
