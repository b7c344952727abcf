"""Writes kernels for interpolation and adaptive pooling: each program computes a tile of results.

A tile's columns follow the innermost dimension in memory, its rows all others. Places and weights along a dimension are
computed once for each row or column of the tile; what is left for an element are its loads and their weighted sum.
What is read is read by its own strides, so that no layout has to be made; light operators before are repeated at each
place.

Left out: sharing of elements between neighbouring results beyond what the caches do, and splitting the large windows of
an adaptive pool to a few elements over several programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from drk.assistant.synth.body import Body, KernelText, tidy
from drk.assistant.synth.domain import Operand, index_lines, stride_arguments
from drk.assistant.synth.expression import kind_of
from drk.assistant.synth.launcher import (
    call_lines,
    function_source,
    kernel_source,
    layout_lines,
    memory_format,
    pointer_arguments,
    result_line,
)
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.regions import Region, leading_names
from drk.assistant.synth.resamples import Resample
from drk.gym.graph import Node, Ref, TensorMeta

MAX_WIDTH = 256
"""Widest tile."""
_CUBIC = ("cubic_outer({} + 1.0)", "cubic_inner({})", "cubic_inner(1.0 - {})", "cubic_outer(2.0 - {})")
"""Weights of the four places around a fraction."""


def write_resampling(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a resampling region; ``owned`` values are known to be contiguous."""
    assert region.resample is not None
    return _Writer(region, region.resample, names, metas, owned, block).write(name)


@dataclass(frozen=True)
class _Writer:
    region: Region
    made: Resample
    names: Mapping[str, str]
    metas: Mapping[str, TensorMeta]
    owned: frozenset[str]
    block: Block

    @property
    def whole(self) -> Operand:
        """What is read of the source's shape, and tells its sizes."""
        return next(operand for operand in self.region.pooled if all(operand.varies))

    @property
    def first(self) -> tuple[Node, ...]:
        """The operators before the resampling one."""
        before = leading_names([node for node in self.region.nodes if node is not self.made.node], self.made.source)
        return tuple(node for node in self.region.nodes if node.name in before)

    @property
    def result(self) -> str:
        return self.names[self.made.node.name]

    @property
    def rank(self) -> int:
        return len(self.region.shape)

    @property
    def resampled(self) -> range:
        return range(self.rank - self.made.rank, self.rank)

    def index(self, dim: int) -> str:
        """Index along a dimension of the result, a vector over the tile's rows or columns."""
        return "cols" if dim == self.region.order[-1] else f"at_{dim}"

    def spread(self, dim: int, text: str) -> str:
        """A vector of ``dim``'s side, shaped for the tile."""
        return f"{text}[None, :]" if dim == self.region.order[-1] else f"{text}[:, None]"

    # -- kernel

    def write(self, name: str) -> KernelText:
        body = Body(self.region, self.names, self.metas, two_dimensional=True)
        first = self.first
        after = [node for node in self.region.nodes if node is not self.made.node and node not in first]
        outputs = tuple(operand.value for operand in self.region.outputs)
        inputs = tuple(operand.value for operand in (*self.region.pooled, *self.region.inputs))
        lines = [
            *self._tile_lines(),
            *index_lines(body.domain.rows, "rows"),
            *(
                self._load(operand, {}, self._fixed_mask(operand))
                for operand in self.region.pooled
                if self._stays(operand)
            ),
            *(self._window_lines() if self.made.pools else self._tap_lines()),
            *body.loads(self.region.inputs),
            *body.statements(after),
            *(body.store(operand) for operand in self.region.outputs),
        ]
        parameters, values = self._arguments(body)
        formula = body.formula(outputs)
        kernel = kernel_source(f"{name}_kernel", parameters, ["A tile of results:", *formula], lines)
        words = f"Launch ``{name}_kernel`` over the result."
        launch = self._launch_lines(body, name, values)
        launcher = function_source(name, [self.names[value] for value in inputs], words, launch, len(outputs))
        return KernelText(name, kernel, launcher, inputs, outputs, "; ".join(formula))

    def _tile_lines(self) -> list[str]:
        """Where the program's tile lies: an index for each dimension of the result, masks, where the images begin."""
        lines = [
            "tiles_n = tl.cdiv(n_cols, BLOCK_N)",
            "rows = (tl.program_id(0) // tiles_n).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)",
            "cols = (tl.program_id(0) % tiles_n * BLOCK_N).to(INDEX) + tl.arange(0, BLOCK_N)",
            "row_mask = rows[:, None] < n_rows",
            "col_mask = cols[None, :] < n_cols",
            "mask = row_mask & col_mask",
        ]
        rest = "rows"
        for dim in reversed(self.region.order[1:-1]):
            lines.append(f"at_{dim} = {rest} % result_{dim}")
            rest = f"{rest} // result_{dim}"
        lines.append(f"at_{self.region.order[0]} = {rest}")
        return lines

    def _stays(self, operand: Operand) -> bool:
        """Whether an operand is the same for all places that a result comes from."""
        return not any(operand.varies[dim] for dim in self.resampled)

    def _fixed_mask(self, operand: Operand) -> str:
        inner = self.region.order[-1]
        by_row = any(moves for dim, moves in enumerate(operand.varies) if dim != inner)
        return {(True, True): "mask", (True, False): "row_mask", (False, True): "col_mask"}.get(
            (by_row, operand.varies[inner]), ""
        )

    def _load(self, operand: Operand, places: Mapping[int, str], mask: str) -> str:
        """Statement that loads an operand, at ``places`` along resampled dimensions."""
        name, kind = self.names[operand.value], kind_of(operand.meta.dtype)
        terms = [
            f"{places.get(dim) or self.spread(dim, self.index(dim))} * stride_{name}_{dim}"
            for dim, moves in enumerate(operand.varies)
            if moves
        ]
        masked = f", mask={mask}, other=0" if mask else ""
        cast = ".to(tl.float32)" if kind == "float" else ""
        return f"{name} = tl.load({' + '.join([f'{name}_ptr', *terms])}{masked}){cast}"

    def _taken(self, places: Mapping[int, str], mask: str) -> tuple[list[str], str]:
        """Statements that make an element of the source at ``places``, and its text."""
        first = self.first
        body = Body(
            replace(self.region, nodes=first, inputs=self.region.pooled, outputs=()), self.names, self.metas, True
        )
        lines = [self._load(operand, places, mask) for operand in self.region.pooled if not self._stays(operand)]
        return [*lines, *body.statements(first)], tidy(body.text(Ref(self.made.source), "float"))

    def _tap_lines(self) -> list[str]:
        """Loads of all places and their weighted sum, the innermost dimension first."""
        lines = [line for dim in self.resampled for line in self._place_lines(dim)]
        count, inner = {"linear": 2, "cubic": 4}.get(self.made.kind, 1), self.rank - 1
        sums: dict[tuple[int, ...], str] = {}
        for taps in product(range(count), repeat=self.made.rank):
            chosen = zip(self.resampled, taps, strict=True)
            statements, text = self._taken({dim: self.spread(dim, f"in_{dim}_{tap}") for dim, tap in chosen}, "mask")
            sums[taps] = f"tap_{taps[-1]}"
            lines += [*statements, f"tap_{taps[-1]} = {text}"]
            if taps[-1] == count - 1:
                lines += self._summed(inner, taps[:-1], count, sums)
        for dim in reversed(self.resampled[:-1]):
            for taps in product(range(count), repeat=dim - self.resampled[0]):
                lines += self._summed(dim, taps, count, sums)
        return lines

    def _summed(self, dim: int, taps: tuple[int, ...], count: int, sums: dict[tuple[int, ...], str]) -> list[str]:
        """The weighted sum along ``dim`` of what ``taps`` along the dimensions before it lead to."""
        label = "_".join(["part", str(dim), *map(str, taps)]) if taps else self.result
        terms = [sums[*taps, tap] for tap in range(count)]
        sums[taps] = label
        if count == 1:
            return [f"{label} = {terms[0]}"]
        weighed = [f"{self.spread(dim, f'share_{dim}_{tap}')} * {term}" for tap, term in enumerate(terms)]
        return [f"{label} = {' + '.join(weighed)}"]

    def _place_lines(self, dim: int) -> list[str]:
        """Offsets of the places along ``dim`` and their weights."""
        at, size = f"{self.index(dim)}.to(tl.float32)", f"size_{dim}"
        kind = self.made.kind
        if kind in {"nearest", "exact"}:
            middle = at if kind == "nearest" else f"({at} + 0.5)"
            nearest = f"tl.minimum(tl.floor({middle} * ratio_{dim}).to(tl.int32), {size} - 1)"
            return [f"in_{dim}_0 = {nearest}.to(INDEX)"]
        place = f"{at} * ratio_{dim}" if self.made.corners else f"({at} + 0.5) * ratio_{dim} - 0.5"
        if kind == "linear":
            place = place if self.made.corners else f"tl.maximum({place}, 0.0)"
            return [
                f"place_{dim} = {place}",
                f"first_{dim} = tl.minimum(place_{dim}.to(tl.int32), {size} - 1)",
                f"share_{dim}_1 = tl.minimum(place_{dim} - first_{dim}.to(tl.float32), 1.0)",
                f"share_{dim}_0 = 1.0 - share_{dim}_1",
                f"in_{dim}_0 = first_{dim}.to(INDEX)",
                f"in_{dim}_1 = tl.minimum(first_{dim} + 1, {size} - 1).to(INDEX)",
            ]
        lines = [
            f"place_{dim} = {place}",
            f"first_{dim} = tl.floor(place_{dim}).to(tl.int32)",
            f"share_{dim} = place_{dim} - first_{dim}.to(tl.float32)",
        ]
        lines += [f"share_{dim}_{tap} = {text.format(f'share_{dim}')}" for tap, text in enumerate(_CUBIC)]
        for tap in range(4):
            inside = f"tl.minimum(tl.maximum(first_{dim} + {tap - 1}, 0), {size} - 1)".replace("+ -1", "- 1")
            lines.append(f"in_{dim}_{tap} = {inside}.to(INDEX)")
        return lines

    def _window_lines(self) -> list[str]:
        """Walk over windows: dimension by dimension from the first place in it to the last one of the longest."""
        largest = self.made.kind == "largest"
        lines: list[str] = []
        for dim in self.resampled:
            at, size, result = f"{self.index(dim)}.to(tl.int64)", f"size_{dim}", f"result_{dim}"
            lines.append(f"first_{dim} = {at} * {size} // {result}")
            lines.append(f"count_{dim} = (({at} + 1) * {size} + {result} - 1) // {result} - first_{dim}")
        start = 'float("-inf")' if largest else "0.0"
        lines.append(f"{self.result} = tl.full((BLOCK_M, BLOCK_N), {start}, dtype=tl.float32)")
        places, checks = {}, ["mask"]
        for depth, dim in enumerate(self.resampled):
            lines.append("    " * depth + f"for k_{dim} in range(longest_{dim}):")
            lines.append("    " * (depth + 1) + f"inside_{dim} = k_{dim} < count_{dim}")
            lines.append("    " * (depth + 1) + f"in_{dim} = (first_{dim} + k_{dim}).to(INDEX)")
            checks.append(self.spread(dim, f"inside_{dim}"))
            places[dim] = self.spread(dim, f"in_{dim}")
        statements, text = self._taken(places, "inside")
        text = f"tl.where(inside, {text}, {start})"
        inner = [f"inside = {' & '.join(checks)}", *statements, f"{self.result} += {text}"]
        if largest:
            inner[-1] = f"{self.result} = tl.maximum({self.result}, {text}, propagate_nan=tl.PropagateNan.ALL)"
        lines += ["    " * self.made.rank + line for line in inner]
        if not largest:
            counts = " * ".join(self.spread(dim, f"count_{dim}") for dim in self.resampled)
            lines.append(f"{self.result} = {self.result} / ({counts}).to(tl.float32)")
        return lines

    # -- launcher

    def _arguments(self, body: Body) -> tuple[list[str], list[str]]:
        """The kernel's parameters and what the launcher hands over for them."""
        pointers = pointer_arguments(body)
        inner = [*self.region.order[1:-1], *((self.region.order[-1],) if self.made.pools else ())]
        needed = [dim for dim in inner if dim != self.region.order[-1] or dim in self.resampled]
        numbers = [
            *("n_rows", "n_cols"),
            *(f"size_{dim}" for dim in self.resampled),
            *(f"result_{dim}" for dim in dict.fromkeys(needed)),
            *(f"longest_{dim}" if self.made.pools else f"ratio_{dim}" for dim in self.resampled),
        ]
        early = [(item, self.names[item.value]) for item in self.region.pooled]
        strides = [
            (f"stride_{name}_{dim}", f"{name}.stride({item.axes[dim]})")
            for item, name in early
            for dim, moves in enumerate(item.varies)
            if moves
        ]
        strides += [pair for item in self.region.inputs for pair in self._strides(item, body)]
        strides += [(name, f"out_{value}") for item in self.region.outputs for name, value in self._strides(item, body)]
        groups = body.domain.rows[1:]
        constants = [f"{item}: tl.constexpr" for item in ("INDEX", "BLOCK_M", "BLOCK_N")]
        parameters = [
            *(f"{name}_ptr" for _, name in early),
            *pointers.parameters,
            *numbers,
            *(name for name, _ in strides),
            *(group.size for group in groups),
            *constants,
        ]
        values = [
            *(name for _, name in early),
            *pointers.values,
            *numbers,
            *(value for _, value in strides),
            *(" * ".join(f"result_{self.region.order[dim]}" for dim in group.dims) for group in groups),
        ]
        return parameters, values

    def _strides(self, operand: Operand, body: Body) -> list[tuple[str, str]]:
        return stride_arguments(operand, self.names[operand.value], body.domain)

    def _launch_lines(self, body: Body, name: str, values: list[str]) -> list[str]:
        *outer, inner = self.region.order
        source = self.names[self.whole.value]
        sizes = ", ".join(f"result_{dim}" for dim in range(self.rank))
        lines = [*layout_lines(body, self.owned), *self._size_lines()]
        for output in self.region.outputs:
            layout = memory_format(output)
            options = [f"({sizes})", f"device={source}.device", f"dtype=torch.{output.meta.dtype}"]
            made = ", ".join([*options, *([layout] if layout else [])])
            lines.append(f"out_{self.names[output.value]} = torch.empty({made})")
        first = f"out_{self.names[self.region.outputs[0].value]}"
        elements = self.block.elements
        per_warp = self.block.per_warp // (2 if self.made.kind == "cubic" else 1)  # for its registers
        return [
            *lines,
            f"n_rows = {' * '.join(f'result_{dim}' for dim in outer)}",
            f"n_cols = result_{inner}",
            f"index_type = tl.int32 if max({source}.numel(), {first}.numel()) < 2**31 else tl.int64",
            f"block_n = min({MAX_WIDTH}, triton.next_power_of_2(n_cols))",
            f"block_m = {elements} // block_n",
            *call_lines(
                f"{name}_kernel",
                "(triton.cdiv(n_rows, block_m) * triton.cdiv(n_cols, block_n),)",
                values,
                [
                    "INDEX=index_type",
                    "BLOCK_M=block_m",
                    "BLOCK_N=block_n",
                    f"num_warps={elements // per_warp}",
                ],
            ),
            result_line(body),
        ]

    def _size_lines(self) -> list[str]:
        """Sizes of source and result, and how many elements of the source an element of the result is."""
        outer, source = range(self.rank - self.made.rank), self.names[self.whole.value]
        lines = [f"result_{dim} = {source}.shape[{dim}]" for dim in outer]
        for place, dim in enumerate(self.resampled):
            fixed, scale = self.made.results[place], self.made.scales[place]
            lines.append(f"size_{dim} = {source}.shape[{dim}]")
            lines.append(f"result_{dim} = {fixed if fixed is not None else f'int(size_{dim} * {scale!r})'}")
            if self.made.pools:
                lines.append(f"longest_{dim} = -(-size_{dim} // result_{dim}) + (size_{dim} % result_{dim} > 0)")
            elif self.made.corners:
                lines.append(f"ratio_{dim} = (size_{dim} - 1) / max(result_{dim} - 1, 1)")
            else:
                ratio = f"size_{dim} / result_{dim}" if scale is None else repr(1.0 / scale)
                lines.append(f"ratio_{dim} = {ratio}")
        return lines
