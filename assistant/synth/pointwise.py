"""Writes kernels for pointwise regions: a flat walk over the output, broadcast operands addressed by folded indices.

Each program handles ``BLOCK`` elements of the row-major output. Operands of the full shape are read in the same order,
so that loads and stores coalesce; broadcast and strided ones are addressed through division and remainder.

Left out: outputs in other memory formats than row-major.
"""

from __future__ import annotations

from collections.abc import Mapping

from drk.assistant.synth.body import Body, KernelText
from drk.assistant.synth.domain import index_lines
from drk.assistant.synth.launcher import (
    allocation_lines,
    call_lines,
    function_source,
    index_type_line,
    kernel_source,
    layout_lines,
    pointer_arguments,
    result_line,
    shape_arguments,
)
from drk.assistant.synth.regions import Region
from drk.gym.graph import TensorMeta


def write_pointwise(
    region: Region, name: str, names: Mapping[str, str], metas: Mapping[str, TensorMeta], owned: frozenset[str]
) -> KernelText:
    """Return kernel and launcher of a pointwise region; ``owned`` values are known to be contiguous."""
    body = Body(region, names, metas, two_dimensional=False)
    pointers, shapes = pointer_arguments(body), shape_arguments(body)
    outputs = tuple(operand.value for operand in region.outputs)
    formula = body.formula(outputs)
    lines = [
        "index = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)",
        "mask = index < n_elements",
        *index_lines(body.domain.rows, "index"),
        *(body.load(operand) for operand in region.inputs),
        *body.statements(region.nodes),
        *(body.store(operand) for operand in region.outputs),
    ]
    parameters = [*pointers.parameters, "n_elements", *shapes.parameters, "INDEX: tl.constexpr", "BLOCK: tl.constexpr"]
    kernel = kernel_source(f"{name}_kernel", parameters, ["One pass over the output, elementwise:", *formula], lines)
    first_output = f"out_{names[outputs[0]]}"
    values = [*pointers.values, "n_elements", *shapes.values]
    launch = [
        *layout_lines(body, owned),
        *allocation_lines(body),
        f"n_elements = {first_output}.numel()",
        index_type_line(body),
        *call_lines(
            f"{name}_kernel",
            "(triton.cdiv(n_elements, 1024),)",
            values,
            ["INDEX=index_type", "BLOCK=1024", "num_warps=4"],
        ),
        result_line(body),
    ]
    inputs = tuple(operand.value for operand in region.inputs)
    doc = f"Launch ``{name}_kernel``."
    launcher = function_source(name, [names[value] for value in inputs], doc, launch, len(outputs))
    return KernelText(name, kernel, launcher, inputs, outputs, "; ".join(formula))
