"""What the launchers of all kernels share: sizes, strides, output allocation, the shape of the source text.

A launcher takes tensors, makes sure of the layout its kernel presumes, reads all sizes from the tensors, allocates
outputs on the inputs' device and launches once. Nothing is tuned at call time; what was compiled is remembered
(:mod:`drk.assistant.synth.launch`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from drk.assistant.synth.body import Body, KernelText, indent
from drk.assistant.synth.domain import Operand, group_size_text, size_arguments, size_text, stride_arguments
from drk.assistant.synth.gathers import gather_arguments
from drk.assistant.synth.launch import DECORATOR, host_arithmetic, shapes_once
from drk.assistant.synth.row_joins import Joined, join_arguments


@dataclass(frozen=True)
class Arguments:
    """Kernel parameters and the launcher expressions they receive, in the same order."""

    parameters: tuple[str, ...]
    values: tuple[str, ...]


def pointer_arguments(body: Body) -> Arguments:
    """Pointers of inputs, then of outputs."""
    inputs = [operand.value for operand in body.region.inputs]
    outputs = [operand.value for operand in body.region.outputs]
    parameters = [*(body.pointer(name) for name in inputs), *(f"out_{body.pointer(name)}" for name in outputs)]
    values = [*(body.names[name] for name in inputs), *(f"out_{body.names[name]}" for name in outputs)]
    return Arguments(tuple(parameters), tuple(values))


def shape_arguments(body: Body, telling: Sequence[Operand] = ()) -> Arguments:
    """Inner group sizes and strides of strided operands; ``telling`` operands tell sizes instead of the body's."""
    operands = list(telling) or all_operands(body)
    groups = [*body.domain.rows, *body.domain.cols]
    sizes = size_arguments(body.domain)
    names = dict(body.names)
    values = [group_size_text(group, operands, names) for group in groups if group.size in sizes]
    for operand in (*body.region.inputs, *body.region.outputs):
        made = operand in body.region.outputs
        for parameter, value in stride_arguments(operand, names[operand.value], body.domain):
            sizes.append(parameter)
            values.append(f"out_{value}" if made else value)
    picked = dict(gather_arguments(body))
    for item in body.region.gathers:
        picked |= join_arguments(body, item) if isinstance(item, Joined) else {}
    for parameter, value in picked.items():
        sizes.append(parameter)
        values.append(value)
    return Arguments(tuple(sizes), tuple(values))


def all_operands(body: Body) -> list[Operand]:
    """Everything that exists before the launch and can tell a size."""
    places = [item.place for item in body.region.gathers if isinstance(item, Joined) and item.place is not None]
    return [*body.extra_operands, *body.region.inputs, *places]


def layout_lines(body: Body, owned: frozenset[str]) -> list[str]:
    """Make operands contiguous that a kernel addresses so; values in ``owned`` are known to be."""
    return operand_layout_lines(body.region.inputs, body.names, owned)


def operand_layout_lines(operands: Sequence[Operand], names: Mapping[str, str], owned: frozenset[str]) -> list[str]:
    """The same for ``operands``, whose values are called by ``names``."""
    lines = []
    for operand in operands:
        name = names[operand.value]
        if operand.order is not None and not operand.fixed and operand.value not in owned and operand.meta.shape:
            lines.append(f"{name} = {name}.contiguous({memory_format(operand)})")
    return lines


def row_major_lines(operand: Operand, names: Mapping[str, str], owned: frozenset[str]) -> list[str]:
    """The line that makes an operand contiguous for a kernel that counts in rows, unless it is known to be."""
    name = names[operand.value]
    return [] if operand.value in owned and operand.meta.contiguous else [f"{name} = {name}.contiguous()"]


def memory_format(operand: Operand) -> str:
    """Keyword argument that asks torch for a channels-last operand's layout, or an empty string."""
    if not operand.channels_last:
        return ""
    return f"memory_format=torch.channels_last{'_3d' if len(operand.meta.shape) == 5 else ''}"


def allocation_lines(body: Body) -> list[str]:
    """One allocation per output; ``new_empty`` is the cheapest that takes sizes, but knows no memory formats."""
    operands = all_operands(body)
    names = dict(body.names)
    first = names[operands[0].value]
    lines = []
    for output in body.region.outputs:
        same = next((item for item in operands if item.meta == output.meta and item.order and not item.fixed), None)
        name = f"out_{names[output.value]}"
        if same is not None and same.axes == output.axes:
            lines.append(f"{name} = torch.empty_like({names[same.value]})")
            continue
        dims = {axis: dim for dim, axis in enumerate(output.axes) if axis is not None}
        sizes = [size_text(dims[axis], operands, names) if output.varies[dims[axis]] else "1" for axis in sorted(dims)]
        shape = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
        dtype, layout = f"dtype=torch.{output.meta.dtype}", memory_format(output)
        if layout:
            lines.append(f"{name} = torch.empty({shape}, device={first}.device, {dtype}, {layout})")
        else:
            same_type = output.meta.dtype == operands[0].meta.dtype
            lines.append(f"{name} = {first}.new_empty({shape if same_type else f'{shape}, {dtype}'})")
    return lines


def index_type_line(body: Body) -> str:
    """Choose 64-bit offsets only where 32 bits could overflow."""
    largest = f"out_{body.names[body.region.outputs[0].value]}.numel()"
    if body.region.gathers and body.two_dimensional:
        largest = "n_rows * n_cols"  # indices may be more than results
    candidates = [operand for operand in body.region.inputs if all(operand.varies)]
    sizes = dict.fromkeys([f"{body.names[operand.value]}.numel()" for operand in candidates[:1]] or [largest])
    return f"index_type = tl.int32 if {next(iter(sizes))} < 2**31 else tl.int64"


def row_size_lines(body: Body) -> list[str]:
    """The number of rows and of columns."""
    operands, names = all_operands(body), dict(body.names)
    n_rows, n_cols = (
        " * ".join(group_size_text(group, operands, names) for group in groups)
        for groups in (body.domain.rows, body.domain.cols)
    )
    return [f"n_rows = {n_rows or '1'}", f"n_cols = {n_cols}"]


def row_blocks(
    body: Body,
    name: str,
    names: Mapping[str, str],
    title: str,
    kernel_lines: Callable[[Body], list[str]],
    launch_lines: Callable[[list[str]], list[str]],
    sizes: Sequence[str] = ("n_rows", "n_cols"),
) -> KernelText:
    """Kernel and launcher of programs that each take a block of rows; ``launch_lines`` receives the arguments.

    The launcher has ``sizes`` under the names by which the kernel takes them.
    """
    pointers, shapes = pointer_arguments(body), shape_arguments(body)
    outputs = tuple(operand.value for operand in body.region.outputs)
    inputs = tuple(operand.value for operand in body.region.inputs)
    formula = body.formula(outputs)
    constants = ["INDEX: tl.constexpr", "BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr"]
    parameters = [*pointers.parameters, *sizes, *shapes.parameters, *constants]
    kernel = kernel_source(f"{name}_kernel", parameters, [title, *formula, *body.remarks()], kernel_lines(body))
    launch = launch_lines([*pointers.values, *sizes, *shapes.values])
    doc = f"Launch ``{name}_kernel`` with one program for each block of rows."
    launcher = function_source(name, [names[value] for value in inputs], doc, launch, len(outputs))
    return KernelText(name, kernel, launcher, inputs, outputs, "; ".join(formula))


def result_line(body: Body) -> str:
    """The launcher's return statement."""
    return "return " + ", ".join(f"out_{body.names[operand.value]}" for operand in body.region.outputs)


def function_source(name: str, parameters: Sequence[str], docstring: str, lines: Sequence[str], results: int) -> str:
    """Source of a launcher function; ``lines`` are made quicker for the host (:mod:`drk.assistant.synth.launch`)."""
    body = host_arithmetic(indent(shapes_once(lines, parameters)))
    typed = ", ".join(f"{parameter}: torch.Tensor" for parameter in parameters)
    returned = "torch.Tensor" if results == 1 else f"tuple[{', '.join(['torch.Tensor'] * results)}]"
    return f'def {name}({typed}) -> {returned}:\n    """{docstring}"""\n{body}\n'


def kernel_source(name: str, parameters: Sequence[str], docstring: Sequence[str], lines: Sequence[str]) -> str:
    """Source of a kernel; ``parameters`` are full parameter texts, one per line."""
    head = f"{DECORATOR}@triton.jit\ndef {name}(\n{indent([f'{item},' for item in parameters])}\n):\n"
    first, *rest = docstring
    doc = f'    """{first}\n' + (f"\n{indent(rest)}\n" if rest else "") + '    """\n'
    if not rest:
        doc = f'    """{first}"""\n'
    return head + doc + indent(lines) + "\n"


def call_lines(kernel: str, grid: str, arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """The launch statement."""
    items = [*arguments, *options]
    return [f"{kernel}[{grid}](", *(f"    {item}," for item in items), ")"]
