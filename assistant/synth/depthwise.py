"""Writes kernels for depthwise convolutions with their neighbours (regions of :mod:`~.pooling_region`).

A program takes a tile of positions and channels, a lane one or more results of a channel that stand below one another
(:mod:`~.depthwise_form` chooses how many, and which way lanes run). Window and results are unrolled: an element is
loaded once and multiplied into every result whose window it is in. Elements outside the tensor are zero, as torch pads.
Tensors are read and written by their own strides, so that no layout has to be made; only a channels-last walk has the
taps transposed first, for lanes to read theirs side by side.

Left out: convolutions with several results per channel, transposed ones, shared memory; large windows are not unrolled
and share nothing. In tensors of more than 2**31 elements a window must still span fewer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drk.assistant.synth.body import Body, KernelText, tidy
from drk.assistant.synth.depthwise_form import Form, choose_form
from drk.assistant.synth.domain import Operand
from drk.assistant.synth.expression import kind_of
from drk.assistant.synth.launcher import call_lines, function_source, kernel_source, memory_format, result_line
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.regions import Region, leading_names
from drk.assistant.synth.windows import Window
from drk.gym.graph import Node, Ref, TensorMeta

INNER_LOOP = 32
"""Longest innermost loop over a window that is unrolled where the window is not."""

_KEEP_ZERO = frozenset({"contiguous", "to", "_to_copy", "relu", "neg", "abs"})
"""Operators that leave the zeros of masked loads zero."""


def write_depthwise(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],  # noqa: ARG001 - strides say how tensors lie
    block: Block,
) -> KernelText:
    """Return kernel and launcher of the region of a depthwise convolution."""
    window = region.window
    assert window is not None
    assert window.weight is not None
    before = leading_names(region.nodes, window.source)
    early = replace(
        region, nodes=tuple(n for n in region.nodes if n.name in before), inputs=region.pooled, outputs=(), window=None
    )
    after = [node for node in region.nodes if node.name not in before and node is not window.node]
    writer = _Writer(
        choose_form(region, window, block),
        region,
        names,
        Body(region, names, metas, two_dimensional=False),
        Body(early, names, metas, two_dimensional=False),
    )
    outputs = tuple(operand.value for operand in region.outputs)
    weights = [item for item in (window.weight, window.bias) if item is not None]
    inputs = tuple(dict.fromkeys([*(item.value for item in (*region.pooled, *region.inputs)), *weights]))
    formula = writer.late.formula(outputs)
    title = "Sums over windows, several results a lane:" if writer.form.rows > 1 else "Sums over windows:"
    arguments = writer.arguments()
    kernel = kernel_source(f"{name}_kernel", [*arguments, *_CONSTANTS], [title, *formula], writer.kernel_lines(after))
    launch = writer.launch_lines(name, list(arguments.values()))
    doc = f"Launch ``{name}_kernel`` over tiles of positions and channels."
    launcher = function_source(name, [names[value] for value in inputs], doc, launch, len(outputs))
    return KernelText(name, kernel, launcher, inputs, outputs, "; ".join(formula))


_CONSTANTS = ("INDEX: tl.constexpr", "BLOCK_P: tl.constexpr", "BLOCK_C: tl.constexpr")


def _plus(terms: Sequence[str]) -> str:
    return " + ".join(terms)


def _times(text: str, factor: int) -> str:
    return text if factor == 1 else f"{text} * {factor}"


@dataclass(frozen=True)
class _Writer:
    """Texts of one kernel; ``early`` is what stands before the window, ``late`` what stands behind it."""

    form: Form
    region: Region
    names: Mapping[str, str]
    late: Body
    early: Body

    @property
    def window(self) -> Window:
        return self.form.window

    @property
    def result(self) -> str:
        """Name of the convolution's own result."""
        return self.names[self.window.node.name]

    # -- arguments

    def arguments(self) -> dict[str, str]:
        """Kernel parameters with the launcher's expressions."""
        names, form = self.names, self.form
        found = {f"{names[item.value]}_ptr": names[item.value] for item in self.region.pooled}
        found[f"{self._taps}_ptr"] = self._taps
        if self.window.bias is not None:
            found[f"{names[self.window.bias]}_ptr"] = names[self.window.bias]
        found |= {f"{names[item.value]}_ptr": names[item.value] for item in self.region.inputs}
        found |= {f"out_{names[item.value]}_ptr": f"out_{names[item.value]}" for item in self.region.outputs}
        sizes = ["channels", *(f"size_{dim}" for dim in form.dims if self._checked(dim))]
        sizes += [f"result_{dim}" for dim in form.dims if dim != form.dims[0] or dim == form.walked]
        sizes += [f"groups_{form.walked}"] if form.walked is not None and form.walked != form.dims[0] else []
        found |= {size: size for size in (*sizes, "n_positions", "position_tiles", "channel_tiles")}
        natural = tuple(range(form.rank))
        for prefix, operands, order in (
            ("", self.region.pooled, natural),
            ("", self.region.inputs, self.region.order),
            ("out_", self.region.outputs, self.region.order),
        ):
            for item in operands:
                name = f"{prefix}{names[item.value]}"
                for dim, axis in self._moves(item, order).items():
                    found[f"stride_{name}_{dim}"] = f"{name}.stride({axis})"
        return found

    @property
    def _taps(self) -> str:
        """Name of the weights as the kernel reads them."""
        assert self.window.weight is not None
        name = self.names[self.window.weight]
        return f"{name}_taps" if self.form.by_channel else name

    @property
    def _tile(self) -> str:
        return "(BLOCK_P, BLOCK_C)" if self.form.by_channel else "(BLOCK_C, BLOCK_P)"

    def _checked(self, dim: int) -> bool:
        """Whether elements may lie outside the tensor along a dimension."""
        return bool(self.form.padding(dim)) or dim == self.form.walked

    def _moves(self, operand: Operand, order: Sequence[int]) -> dict[int, int]:
        """The operand's axis for each dimension of the result (or of what is read) along which it varies."""
        found = zip(order, operand.varies, operand.axes, strict=True)
        return {dim: axis for dim, moves, axis in sorted(found) if moves and axis is not None}

    # -- kernel

    def kernel_lines(self, after: Sequence[Node]) -> list[str]:
        """The kernel's statements; ``after`` are the nodes behind the window."""
        return [*self._place_lines(), *self._sum_lines(), *self._result_lines(after)]

    def _place_lines(self) -> list[str]:
        """Where a lane's results are: ``batch``, ``channel``, ``at_2`` and so on."""
        form = self.form
        order = ("channel_tiles", "position_tiles") if form.by_channel else ("position_tiles", "channel_tiles")
        inner, outer = f"tl.program_id(0) % {order[0]}", f"tl.program_id(0) // {order[0]} % {order[1]}"
        position, channel = (outer, inner) if form.by_channel else (inner, outer)
        # Lanes run along a tile's last dimension.
        row, column = ("[:, None]", "[None, :]") if form.by_channel else ("[None, :]", "[:, None]")
        lines = [
            f"position = ({position} * BLOCK_P + tl.arange(0, BLOCK_P)){row}",
            f"channel = ({channel} * BLOCK_C + tl.arange(0, BLOCK_C)){column}",
            *(["channel = tl.broadcast_to(channel, (BLOCK_P, BLOCK_C))"] if form.by_channel else []),
            f"batch = (tl.program_id(0) // {order[0]} // {order[1]}).to(tl.int64)",
            "channel_mask = channel < channels",
            "inside = channel_mask & (position < n_positions)",
        ]
        rest = "position"
        for dim in reversed(form.dims):
            size = f"groups_{dim}" if dim == form.walked else f"result_{dim}"
            own = rest if dim == form.dims[0] else f"{rest} % {size}"
            rest = f"{rest} // {size}"
            if dim != form.walked:
                lines.append(f"at_{dim} = {own}")
            elif form.spacing == 1:
                lines.append(f"at_{dim} = {own} * {form.rows}")
            else:
                lines.append(f"group = {own}")
                span = form.rows * form.spacing
                lines.append(f"at_{dim} = group // {form.spacing} * {span} + group % {form.spacing}")
        for dim in form.dims:
            lines.append(f"first_{dim} = {_times(f'at_{dim}', form.stride(dim))}{self._margin(dim)}")
        return lines

    def _margin(self, dim: int) -> str:
        return f" - {self.form.padding(dim)}" if self.form.padding(dim) else ""

    def _offsets(self, name: str, moves: Mapping[int, int], places: Mapping[int, str]) -> str:
        """Pointers to an operand's elements at ``places`` (text by dimension; batch and channel are the lane's own)."""
        terms = [f"{name}_ptr"]
        for dim in moves:
            stride = f"stride_{name}_{dim}"
            if dim == 0:
                terms.append(f"batch * {stride}")
            elif dim == 1:
                terms.append(f"channel.to(INDEX) * {stride}")
            else:
                terms.append(f"{places[dim]}.to(INDEX) * {stride}")
        text = _plus(terms)
        whole = set(moves) - {0} and 1 not in moves
        return f"tl.broadcast_to({text}, {self._tile})" if whole else text

    def _mask(self, moves: Mapping[int, int]) -> str:
        """The mask of what does not vary along the walked dimension."""
        return "inside" if set(moves) - {0, 1} else "channel_mask" if 1 in moves else ""

    def _load(self, name: str, pointers: str, mask: str, dtype: str) -> str:
        kind = kind_of(dtype)
        masked = f", mask={mask}, other={'0.0' if kind == 'float' else '0'}" if mask else ""
        return f"{name} = tl.load({pointers}{masked}){'.to(tl.float32)' if kind == 'float' else ''}"

    def _sum_lines(self) -> list[str]:
        """The loops over the window, which leave ``sums``, or the result's own name with one row."""
        form, names, rank = self.form, self.names, self.form.rank
        firsts = {dim: f"first_{dim}" for dim in form.dims}
        lines: list[str] = []
        moving: list[Operand] = []
        for item in self.region.pooled:
            moves, name = self._moves(item, range(rank)), names[item.value]
            if set(moves) & set(form.dims):
                lines.append(f"{name}_ptrs = {self._offsets(name, moves, firsts)}")
                moving.append(item)
            else:
                lines.append(self._load(name, self._offsets(name, moves, {}), self._mask(moves), item.meta.dtype))
        taps = f"channel * {form.taps}" if not form.by_channel else "channel"
        lines.append(f"{self._taps}_ptrs = {self._taps}_ptr + {taps}")
        zeros = f"tl.zeros({self._tile}, dtype=tl.float32)"
        lines += [f"zeros = {zeros}", f"sums = (zeros,) * {form.rows}"] if form.rows > 1 else [f"sums = {zeros}"]
        indent, valid = "", "inside"
        for dim in (*form.before, *([form.walked] if form.walked is not None else []), *form.after):
            lines.append(f"{indent}{self._loop(dim)}")
            indent += "    "
            step = f"{_times(f'k_{dim}', form.dilation(dim))}"
            if self._checked(dim):
                # A negative index is a large one without a sign.
                check = f"((first_{dim} + {step}).to(tl.uint32) < size_{dim})"
                last = dim == form.dims[-1]
                lines.append(f"{indent}{'valid' if last else f'inside_{dim}'} = {valid} & {check}")
                valid = "valid" if last else f"inside_{dim}"
        lines += [indent + line for line in self._product_lines(moving, valid)]
        return lines

    def _loop(self, dim: int) -> str:
        form = self.form
        count = form.size(dim)
        if dim == form.walked:
            count += (form.rows - 1) * form.step
        static = form.unrolled or (dim == form.dims[-1] and count <= INNER_LOOP)
        return f"for k_{dim} in {'tl.static_range' if static else 'range'}({count}):"

    def _product_lines(self, moving: Sequence[Operand], valid: str) -> list[str]:
        """Within all loops: load an element, multiply it into the results whose window holds it."""
        form, lines = self.form, []
        for item in moving:
            name = self.names[item.value]
            terms = [f"{name}_ptrs"]
            for dim in self._moves(item, range(form.rank)):
                if dim in form.dims and form.size(dim) > 1:
                    terms.append(f"{_times(f'k_{dim}', form.dilation(dim))} * stride_{name}_{dim}")
            lines.append(self._load(name, _plus(terms), valid, item.meta.dtype))
        nodes = self.early.region.nodes
        for node in nodes:
            if node.bare_op == "contiguous":  # a layout is nothing to a lane
                self.early.rename(node.name, tidy(self.early.text(node.args[0], self.early.kind(node.name))))
            else:
                lines += self.early.statements([node])
        taken = tidy(self.early.text(Ref(self.window.source), "float"))
        if any(node.bare_op not in _KEEP_ZERO for node in nodes):
            lines.append(f"taken = tl.where({valid}, {taken}, 0.0)")
            taken = "taken"
        if form.rows == 1:
            return [*lines, f"sums += {taken} * {self._tap(None)}"]
        walked, size = f"k_{form.walked}", form.size(form.walked or 0)
        start = _times("row", form.step)
        sums = f"sums[:row] + (sums[row] + {taken} * {self._tap(start)},) + sums[row + 1:]"
        return [
            *lines,
            f"for row in tl.static_range({form.rows}):",
            f"    if {walked} >= {start} and {walked} < {start} + {size}:",
            f"        sums = {sums}",
        ]

    def _tap(self, start: str | None) -> str:
        """Load of the tap for the loops' present place, for the result whose window begins at ``start``."""
        form, place = self.form, ""
        for dim in form.dims:
            own = f"k_{dim}" if dim != form.walked else f"(k_{dim} - {start})"
            place = f"({place}) * {form.size(dim)} + {own}" if place else own
        place = f"({place}) * channels" if form.by_channel else place
        return f"tl.load({self._taps}_ptrs + {tidy(place)}, mask=channel_mask, other=0.0).to(tl.float32)"

    def _result_lines(self, after: Sequence[Node]) -> list[str]:
        """Bias, what stands behind the window, and the stores, for each of a lane's results."""
        form, names = self.form, self.names
        places = {dim: f"at_{dim}" if dim != form.walked else f"out_{dim}" for dim in form.dims}
        lines: list[str] = []
        inner: list[str] = []
        own = "sums[row]" if form.rows > 1 else "sums"
        if self.window.bias is not None:
            bias = names[self.window.bias]
            own += f" + {bias}"
            lines.append(f"{bias} = tl.load({bias}_ptr + channel, mask=channel_mask, other=0.0).to(tl.float32)")
        for item in self.region.inputs:
            moves, name = self._moves(item, self.region.order), names[item.value]
            by_row = form.walked in moves
            mask = "mask" if by_row else self._mask(moves)
            load = self._load(name, self._offsets(name, moves, places), mask, item.meta.dtype)
            (inner if by_row else lines).append(load)
        inner.append(f"{self.result} = {own}")
        inner += self.late.statements(after)
        for item in self.region.outputs:
            name, moves = f"out_{names[item.value]}", self._moves(item, self.region.order)
            value = tidy(self.late.text(Ref(item.value), kind_of(item.meta.dtype)))
            inner.append(f"tl.store({self._offsets(name, moves, places)}, {value}, mask=mask)")
        if form.rows == 1:
            return [*lines, "mask = inside", *inner]
        walked = form.walked
        head = [
            f"out_{walked} = at_{walked} + {_times('row', form.spacing)}",
            f"mask = inside & (out_{walked} < result_{walked})",
        ]
        loop = f"for row in tl.static_range({form.rows}):"
        return [*lines, loop, *(f"    {line}" for line in [*head, *inner])]

    # -- launcher

    def launch_lines(self, name: str, values: Sequence[str]) -> list[str]:
        """Sizes, outputs, the choice of the tile's sides, the launch."""
        form, names = self.form, self.names
        whole = names[next(item.value for item in self.region.pooled if all(item.varies))]
        assert self.window.weight is not None
        weight = names[self.window.weight]
        taps = f"{weight}.flatten(1).t().contiguous()  # lanes are channels"
        lines = [f"{self._taps} = {taps if form.by_channel else f'{weight}.contiguous()'}"]
        lines += [f"channels = {whole}.shape[1]", *(f"size_{dim} = {whole}.shape[{dim}]" for dim in form.dims)]
        lines += [f"result_{dim} = {self._result_size(dim)}" for dim in form.dims]
        sizes = ", ".join([f"{whole}.shape[0]", "channels", *(f"result_{dim}" for dim in form.dims)])
        for output in self.region.outputs:
            options = [f"({sizes})", f"device={whole}.device", f"dtype=torch.{output.meta.dtype}"]
            options += [layout] if (layout := memory_format(output)) else []
            lines.append(f"out_{names[output.value]} = torch.empty({', '.join(options)})")
        if form.walked is not None:
            span = form.rows * form.spacing
            groups = _times(f"triton.cdiv(result_{form.walked}, {span})", form.spacing)
            lines.append(f"groups_{form.walked} = {groups}")
        first = f"out_{names[self.region.outputs[0].value]}"
        counts = (f"groups_{dim}" if dim == form.walked else f"result_{dim}" for dim in form.dims)
        return [
            *lines,
            f"n_positions = {' * '.join(counts)}",
            *self._side_lines(),
            "position_tiles = triton.cdiv(n_positions, block_p)",
            "channel_tiles = triton.cdiv(channels, block_c)",
            f"index_type = tl.int32 if max({whole}.numel(), {first}.numel()) < 2**31 else tl.int64",
            *call_lines(
                f"{name}_kernel",
                f"({whole}.shape[0] * position_tiles * channel_tiles,)",
                values,
                ["INDEX=index_type", "BLOCK_P=block_p", "BLOCK_C=block_c", f"num_warps={form.num_warps}"],
            ),
            result_line(self.late),
        ]

    def _side_lines(self) -> list[str]:
        """The tile's sides: as many elements as the program has lanes, times what each has side by side."""
        form = self.form
        elements = form.num_warps * 32 * form.width
        if form.by_channel:
            return [
                f"block_c = min({form.side}, triton.next_power_of_2(channels))",
                f"block_p = {elements} // block_c",
            ]
        return [
            f"block_p = min({form.side}, triton.next_power_of_2(n_positions))",
            f"block_c = min({elements} // block_p, triton.next_power_of_2(channels))",
            f"block_p = {elements} // block_c",
        ]

    def _result_size(self, dim: int) -> str:
        form = self.form
        stride = form.stride(dim)
        margin = 2 * form.padding(dim) - form.dilation(dim) * (form.size(dim) - 1) - (stride > 1)
        span = f"size_{dim} {'-' if margin < 0 else '+'} {abs(margin)}" if margin else f"size_{dim}"
        return span if stride == 1 else f"({span}) // {stride} + 1"
