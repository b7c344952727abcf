"""Writes kernels for regions that read through views: loads find their elements by arithmetic on the output's indices.

A program takes a tile of rows and columns of the output: columns are its innermost dimensions in memory, rows the
others. Where a large input has its own neighbours along other dimensions (channels innermost, say), rows are those
dimensions instead and programs are numbered by what is left, so that both sides are moved in whole sectors. Only a
row's and a column's index is taken apart by division, not each element's.

Sizes and strides are read from the tensors at run time; numbers that the graph fixed (a shuffle's factor) are literals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from drk.assistant.synth.body import INLINE_LIMIT, KernelText, tidy
from drk.assistant.synth.cat_maps import is_join
from drk.assistant.synth.domain import Operand
from drk.assistant.synth.draft import fresh_name
from drk.assistant.synth.expression import expression, kind_of, scalar_text
from drk.assistant.synth.index_maps import Coordinate, Coordinates
from drk.assistant.synth.index_rules import is_view
from drk.assistant.synth.index_text import product_text
from drk.assistant.synth.launcher import function_source, kernel_source, memory_format, operand_layout_lines
from drk.assistant.synth.mapped_grid import Grid, grid_of
from drk.assistant.synth.mapped_region import traced
from drk.assistant.synth.mapped_sizes import Sizes, needed, size_text
from drk.assistant.synth.mapped_terms import Access
from drk.assistant.synth.mapped_trace import Place, Trace
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.regions import Region
from drk.gym.graph import Node, Ref, TensorMeta

_REPEATED = frozenset({"pow", "square", "hardswish", "softsign", "lerp"})
"""Operators whose text holds an operand twice."""
_SINGLE = "a dimension that had one element when this was written has more"
_SHORT = "a dimension ends before a slice of it does"


def write_mapped(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a mapped region; ``owned`` values are known to lie in memory as captured."""
    by_name = {node.name: node for node in (*region.nodes, *region.cuts)}
    fixed = frozenset(operand.value for operand in region.inputs if operand.fixed)
    outputs = [operand.value for operand in region.outputs]
    found, sizes = traced(region.nodes, outputs, metas, by_name, fixed, region.scalars)
    assert found is not None and sizes is not None, "the region was traced when it was built"
    writer = _Writer(region, dict(names), metas, found, sizes)
    return writer.kernel(name, owned, block)


@dataclass
class _Writer:
    region: Region
    names: dict[str, str]
    metas: Mapping[str, TensorMeta]
    found: Trace
    sizes: Sizes
    texts: dict[Place, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.operands = {item.value: item for item in (*self.region.inputs, *self.region.outputs)}
        self.taken = {*self.names.values()}

    # -- the whole

    def kernel(self, name: str, owned: frozenset[str], block: Block) -> KernelText:
        loads = [self._access(place, via) for place, via in self.found.loads.items()]
        stores = [self._output(operand) for operand in self.region.outputs]
        size_of = partial(size_text, sizes=self.sizes, names=self.names)
        guards = dict.fromkeys(
            atom for choices in self.found.joined.values() for item in choices[:-1] for atom in item.guards
        )
        guards |= dict.fromkeys(atom for item in loads for atom in sorted(item.guards))
        grid = grid_of(loads, stores, self.found.atoms, size_of, self.taken, tuple(guards))
        lines = [*grid.index_lines(), *(self._load(item, grid) for item in loads)]
        for node, coords in self.found.computed:
            lines += self._join(node, coords, grid) if is_join(node) else self._statement(node, coords)
        lines += [self._store(item, grid) for item in stores]
        inputs = tuple(operand.value for operand in self.region.inputs)
        outputs = tuple(operand.value for operand in self.region.outputs)
        pointers = [f"{self.names[value]}_ptr" for value in inputs]
        pointers += [f"out_{self.names[value]}_ptr" for value in outputs]
        constants = ["INDEX: tl.constexpr", "BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr"]
        formula = self._formula()
        words = ["One pass over the output; what is read is found through views:", *formula]
        source = kernel_source(f"{name}_kernel", [*pointers, *grid.parameters(), *constants], words, lines)
        values = [self.names[value] for value in inputs]
        values += [f"out_{self.names[value]}" for value in outputs]
        launch = [*self._layouts(owned), *self._allocations(), *grid.launch_lines(f"{name}_kernel", values, block)]
        launch.append("return " + ", ".join(f"out_{self.names[value]}" for value in outputs))
        doc = f"Launch ``{name}_kernel`` over the output."
        launcher = function_source(name, [self.names[value] for value in inputs], doc, launch, len(outputs))
        return KernelText(name, source, launcher, inputs, outputs, "; ".join(formula))

    # -- memory

    def _access(self, place: Place, via: str) -> Access:
        name, coords = place
        own = self.names[name if self.operands[name].fixed else via]
        self.texts[place] = fresh_name(own, self.taken) if own in self.texts.values() else own
        operand = self.operands[name]
        return Access(place, self.names[name], self.texts[place], operand, coords, self.found.guards[place])

    def _output(self, operand: Operand) -> Access:
        tensor = f"out_{self.names[operand.value]}"
        place = self.found.outputs[operand.value]
        return Access(place, tensor, tensor, operand, self.found.root)

    def _load(self, item: Access, grid: Grid) -> str:
        kind = kind_of(item.operand.meta.dtype)
        mask = grid.masks[item.label]
        masked = f", mask={mask}, other={'0.0' if kind == 'float' else '0'}" if mask else ""
        cast = ".to(tl.float32)" if kind == "float" else ""
        return f"{item.label} = tl.load({grid.addresses[item.label]}{masked}){cast}"

    def _store(self, item: Access, grid: Grid) -> str:
        value = self._token(item.place, kind_of(item.operand.meta.dtype))
        return f"tl.store({grid.addresses[item.label]}, {tidy(value)}, mask=mask)"

    def _refused(self) -> list[str]:
        """Refuse tensors with several elements where there was one at capture: only the first would be read.

        Refuse others that end before a slice of them does.
        """
        axes = [
            (f"{self.names[name]}.shape[{axis}]", coordinate, size)
            for name, coords in self.found.loads
            if not self.operands[name].fixed
            for axis, (coordinate, size) in enumerate(zip(coords, self.metas[name].shape, strict=True))
        ]
        single = [f"{text} != 1" for text, coordinate, size in axes if size == 1 and not coordinate.digits]
        ends = [(text, needed(item, self.found.atoms, self.sizes)) for text, item, _ in axes]
        short = [f"{text} < {end}" for text, end in ends if end]
        lines: list[str] = []
        for tests, words in ((single, _SINGLE), (short, _SHORT)):
            if tests:
                lines += [f"if {' or '.join(dict.fromkeys(tests))}:", f'    raise ValueError("{words}")']
        return lines

    def _layouts(self, owned: frozenset[str]) -> list[str]:
        """Make sure of the layouts that folded indices presume."""
        return [*self._refused(), *operand_layout_lines(self.region.inputs, self.names, owned)]

    def _allocations(self) -> list[str]:
        first = self.names[self.region.inputs[0].value]
        lines = []
        for output in self.region.outputs:
            name = f"out_{self.names[output.value]}"
            same = next((place[0] for place in self.found.loads if self._alike(place, output)), None)
            if same is not None:
                lines.append(f"{name} = torch.empty_like({self.names[same]})")
                continue
            shape = ", ".join(self._size(coordinate) for coordinate in self.found.root)
            shape = f"({shape}{',' if len(self.found.root) == 1 else ''})"
            dtype, layout = f"dtype=torch.{output.meta.dtype}", memory_format(output)
            if layout:
                lines.append(f"{name} = torch.empty({shape}, device={first}.device, {dtype}, {layout})")
            else:
                same_type = output.meta.dtype == self.region.inputs[0].meta.dtype
                lines.append(f"{name} = {first}.new_empty({shape if same_type else f'{shape}, {dtype}'})")
        return lines

    def _alike(self, place: Place, output: Operand) -> bool:
        """Whether what is read at ``place`` has the output's shape, type and layout."""
        name, coords = place
        operand = self.operands[name]
        return coords == self.found.root and operand.meta == output.meta and operand.order is not None

    def _size(self, coordinate: Coordinate) -> str:
        return product_text([size_text(digit.atom, self.sizes, self.names) for digit in coordinate.digits])

    # -- values

    def _statement(self, node: Node, coords: Coordinates) -> list[str]:
        place = (node.name, coords)
        text = tidy(expression(node, lambda value, kind: self._argument(place, value, kind), self.metas))
        kept = node.name in self.operands or self.found.uses[place] > 1 or self._repeated(place)
        if not kept and len(text) <= INLINE_LIMIT:
            self.texts[place] = f"({text})"
            return []
        name = self.names[node.name]
        self.texts[place] = fresh_name(name, self.taken) if name in self.texts.values() else name
        return [f"{self.texts[place]} = {text}"]

    def _join(self, node: Node, coords: Coordinates, grid: Grid) -> list[str]:
        """The statement that chooses between pieces."""
        place, kind = (node.name, coords), kind_of(node.meta.dtype)
        *others, last = self.found.joined[place]
        text = scalar_text(last.fill, kind) if last.place is None else self._token(last.place, kind)
        for item in reversed(others):
            guard = " & ".join(grid.guard(atom) for atom in item.guards)
            value = scalar_text(item.fill, kind) if item.place is None else self._token(item.place, kind)
            text = f"tl.where({guard}, {value}, {text})"
        name = self.names[node.name]
        self.texts[place] = fresh_name(name, self.taken) if name in self.texts.values() else name
        return [f"{self.texts[place]} = {tidy(text)}"]

    def _repeated(self, place: Place) -> bool:
        """Whether a reader's text holds the value more than once."""
        readers = [node for node in self.region.nodes if node.bare_op in _REPEATED]
        return any(self.found.operands.get(((node.name, coords), place[0])) == place
                   for node in readers for item, coords in self.found.computed if item is node)  # fmt: skip

    def _argument(self, place: Place, value: Any, kind: str) -> str:
        if isinstance(value, Ref) and value.name in self.region.scalars:
            value = self.region.scalars[value.name]
        if not isinstance(value, Ref):
            text = scalar_text(value, kind)
            return f"({text})" if text.startswith("-") else text
        return self._token(self.found.operands[place, value.name], kind)

    def _token(self, place: Place, kind: str) -> str:
        source, have = self.texts[place], kind_of(self.metas[place[0]].dtype)
        if have == kind:
            return source
        if kind == "bool":
            return f"({source} != 0)"
        return f"{source}.to(tl.{'float32' if kind == 'float' else 'int32'})"

    def _formula(self) -> list[str]:
        """One line ``name = ...`` per output, cut at 300 characters."""
        lines = []
        made = {node.name: node for node in (*self.region.nodes, *self.region.cuts)}
        for operand in self.region.outputs:
            text = _pretty(Ref(operand.value), made, self.names, self.region.scalars, 0)
            text = text if len(text) <= 300 else text[:297] + "..."
            lines.append(f"{self.names[operand.value]} = {text}")
        return lines


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}


def _pretty(
    value: Any, made: Mapping[str, Node], names: Mapping[str, str], scalars: Mapping[str, float], depth: int
) -> str:
    if not isinstance(value, Ref):
        return repr(value) if isinstance(value, bool | int | float) else "..."
    if value.name in scalars:
        return repr(scalars[value.name])
    if value.name not in made or depth > 24:
        return names[value.name]
    node = made[value.name]
    if is_join(node):
        pieces = node.args[0] if isinstance(node.args[0], tuple) else (node.args[0],)
        words = [_pretty(item, made, names, scalars, depth + 1) for item in pieces]
        return f"{node.bare_op}({', '.join(words)})"
    if is_view(node) and node.op != "getitem":
        inner = _pretty(node.args[0], made, names, scalars, depth + 1)
        return f"{'view' if node.bare_op == 'reshape' else node.bare_op}({inner})"
    if node.op == "getitem":
        return f"{_pretty(made[node.args[0].name].args[0], made, names, scalars, depth + 1)}[part {node.args[1]}]"
    parts = [_pretty(arg, made, names, scalars, depth + 1) for arg in node.args]
    if node.bare_op in _INFIX and len(parts) == 2:
        return f"({parts[0]} {_INFIX[node.bare_op]} {parts[1]})"
    if node.bare_op in {"to", "_to_copy", "contiguous"}:
        parts = parts[:1]
    return f"{node.bare_op}({', '.join(parts)})"
