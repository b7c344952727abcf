"""The text of a ``torch.autograd.Function``: a segment's forward and backward steps with the kernels they launch.

``forward`` runs the segment's kernels and torch operators and keeps what ``backward`` reads: inputs, outputs, and
values that are dear to compute again. ``backward`` returns one gradient for each input. A step that serves one input's
gradient alone is skipped where that gradient is not wanted.

Left out: second derivatives (``once_differentiable`` refuses them) and forward-mode derivatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drk.assistant.synth.backward_graph import Reverse, Segment
from drk.assistant.synth.backward_tape import SHARE
from drk.assistant.synth.body import KernelText, indent
from drk.assistant.synth.module_writer import Step
from drk.assistant.synth.size_constants import size_constants
from drk.assistant.synth.torch_source import torch_call
from drk.gym.graph import Graph, Node


@dataclass(frozen=True)
class Passes:
    """Both passes of a segment: graphs, steps and names of values."""

    segment: Segment
    reverse: Reverse
    forward_graph: Graph
    forward_steps: Sequence[Step]
    forward_names: Mapping[str, str]
    backward_steps: Sequence[Step]
    backward_names: Mapping[str, str]


def write_function(passes: Passes, name: str, class_name: str) -> KernelText:
    """Return kernels, launchers and the autograd function as one text; ``name`` is what the module calls."""
    segment, names = passes.segment, passes.forward_names
    kernels = [step.kernel for step in (*passes.forward_steps, *passes.backward_steps) if step.kernel is not None]
    parts = [f"{kernel.kernel.rstrip()}\n\n\n{kernel.launcher.rstrip()}" for kernel in kernels]
    parts.append(_class_source(passes, class_name))
    arguments = ", ".join(names[value] for value in segment.inputs)
    typed = ", ".join(f"{names[value]}: torch.Tensor" for value in segment.inputs)
    returned = "torch.Tensor" if len(segment.outputs) == 1 else "tuple[torch.Tensor, ...]"
    launcher = (
        f"def {name}({typed}) -> {returned}:\n"
        f'    """Run :class:`{class_name}`, whose gradients are kernels too."""\n'
        f"    return {class_name}.apply({arguments})\n"
    )
    formula = "; ".join(kernel.formula for kernel in kernels)
    return KernelText(name, "\n\n\n".join(parts) + "\n", launcher, segment.inputs, segment.outputs, formula)


def _class_source(passes: Passes, class_name: str) -> str:
    segment, names = passes.segment, passes.forward_names
    made = [kernel.name for step in passes.forward_steps if (kernel := step.kernel) is not None]
    back = [kernel.name for step in passes.backward_steps if (kernel := step.kernel) is not None]
    told = f"{_listed(made) or 'torch operators'}; its gradients by {_listed(back) or 'torch operators'}"
    kept = ", ".join(names[value] for value in segment.inputs)
    return (
        f"class {class_name}(torch.autograd.Function):\n"
        f'    """{told[:1].upper()}{told[1:]}."""\n\n'
        "    @staticmethod\n"
        f"    def forward(ctx, {kept}):\n{indent(_forward_lines(passes), 8)}\n\n"
        "    @staticmethod\n"
        "    @torch.autograd.function.once_differentiable\n"
        f"    def backward(ctx, {', '.join(_cotangent_names(passes))}):\n{indent(_backward_lines(passes), 8)}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"``{name}``" for name in names)


def _cotangent_names(passes: Passes) -> list[str]:
    """One parameter for each output; outputs without a gradient get an unused one."""
    differentiable = [name for name in passes.segment.outputs if name in passes.segment.needing]
    given = dict(zip(differentiable, passes.reverse.cotangents, strict=True))
    return [
        passes.backward_names[given[name]] if name in given else f"_{passes.forward_names[name]}"
        for name in passes.segment.outputs
    ]


def _forward_lines(passes: Passes) -> list[str]:
    segment, names = passes.segment, passes.forward_names
    lines = [line for line, _ in _step_lines(passes.forward_graph, passes.forward_steps, names)]
    if passes.reverse.saved:
        lines.append(f"ctx.save_for_backward({', '.join(names[value] for value in passes.reverse.saved)})")
    still = [value for value in segment.outputs if value not in segment.needing]
    if still:
        lines.append(f"ctx.mark_non_differentiable({', '.join(names[value] for value in still)})")
    return [*lines, f"return {', '.join(names[value] for value in segment.outputs)}"]


def _backward_lines(passes: Passes) -> list[str]:
    reverse, names = passes.reverse, passes.backward_names
    lines = []
    if reverse.saved:
        comma = "," if len(reverse.saved) == 1 else ""
        lines.append(f"{', '.join(names[value] for value in reverse.saved)}{comma} = ctx.saved_tensors")
    served = _served(passes)
    for line, results in _step_lines(reverse.graph, passes.backward_steps, names):
        wanted = served.get(results[0]) if len(results) == 1 else None
        lines.append(line if wanted is None else f"{line} if ctx.needs_input_grad[{wanted}] else None")
    gradients = [names[value] if value is not None else "None" for value in reverse.gradients]
    return [*lines, f"return {', '.join(gradients)}"]


def _served(passes: Passes) -> dict[str, int]:
    """For each value that only one input's gradient needs: the input's position."""
    serving: dict[str, set[int]] = {}
    for index, value in enumerate(passes.reverse.gradients):
        if value is not None:
            serving.setdefault(value, set()).add(index)
    for step in reversed(passes.backward_steps):
        results = step.kernel.outputs if step.kernel is not None else (step.nodes[0].name,)
        wanted = {index for name in results for index in serving.get(name, ())}
        read = step.kernel.inputs if step.kernel is not None else step.nodes[0].inputs()
        for name in read:
            serving.setdefault(name, set()).update(wanted)
    several = len([value for value in passes.reverse.gradients if value is not None]) > 1
    return {name: min(items) for name, items in serving.items() if several and len(items) == 1}


def _step_lines(graph: Graph, steps: Sequence[Step], names: Mapping[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Each step as a statement, with the values it makes."""
    metas, sizes = graph.metas(), size_constants(graph)
    tensors = [item for item in graph.placeholders if item.meta.shape] or list(graph.placeholders)
    device = f"{names[tensors[0].name]}.device"
    lines: list[tuple[str, tuple[str, ...]]] = []
    for step in steps:
        if step.kernel is None:
            node = step.nodes[0]
            share = node.op == f"aten.{SHARE}"
            text = _share_text(node, names) if share else torch_call(node, names, metas, device, sizes)
            lines.append((f"{names[node.name]} = {text}", (node.name,)))
            continue
        results = ", ".join(names[name] for name in step.kernel.outputs)
        arguments = ", ".join(names[name] for name in step.kernel.inputs)
        lines.append((f"{results} = {step.kernel.name}({arguments})", tuple(step.kernel.outputs)))
    return lines


def _share_text(node: Node, names: Mapping[str, str]) -> str:
    value, tensor, dims = node.args
    count = " * ".join(f"{names[tensor.name]}.shape[{dim}]" for dim in dims)
    return f"{names[value.name]} / {count}" if len(dims) == 1 else f"{names[value.name]} / ({count})"
