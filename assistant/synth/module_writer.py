"""Puts a planned graph together as one Python file that defines ``ModelNew``.

The file holds the device functions that are used, what launches share, each kernel with its launcher, and the module:
parameters and buffers under the reference's ``state_dict`` keys, and a forward that calls launchers and torch operators
in graph order. It depends on torch and triton only.

New values of buffers are copied into them at the end of forward, as ``torch.export`` states them. Large tensors that no
``state_dict`` holds (buffers that are not saved, tensors in plain attributes) are taken over by ``from_reference``.

With ``graphed`` what forward did is ``launch``, which takes all tensors flat, and forward calls it through a CUDA graph
(:mod:`drk.assistant.synth.graphed`).

Left out: large tensors that forward makes itself from Python values, and outputs or inputs in forms that the graph
cannot state; :func:`write_module` raises for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drk.assistant.synth.body import KernelText, indent
from drk.assistant.synth.device_math import FUNCTIONS, closure
from drk.assistant.synth.graphed import ATTRIBUTE, IMPORTS, METHOD, graphed_calls
from drk.assistant.synth.launch import launch_parts
from drk.assistant.synth.size_constants import size_constants
from drk.assistant.synth.torch_source import kept_sizes, rooted_sizes, torch_call
from drk.gym.graph import Graph, Node, Pack, Parameter, Placeholder, Ref, State, Symbol, references

_WEIGHTS = ("parameter", "buffer")
_RESHAPING = frozenset({"reshape", "view", "_unsafe_view", "unsqueeze", "flatten"})
"""Operators whose result, for contiguous tensors, lies where their input does, in the same order."""
_CHANNELS_LAST_ROW = "dimension 1 innermost"
"""Stands for the layout of a 1-D convolution's weights, which PyTorch has no memory format for."""


class UnsupportedGraph(Exception):
    """The graph cannot be written as a module; the message says why."""


@dataclass(frozen=True)
class Step:
    """One line of forward: a kernel with the nodes it computes, or a single torch operator."""

    nodes: tuple[Node, ...]
    kernel: KernelText | None = None


def write_module(
    graph: Graph,
    steps: Sequence[Step],
    names: Mapping[str, str],
    summary: str,
    *,
    exact_shapes: bool = False,
    graphed: bool = False,
) -> str:
    """Return the source of the candidate; with ``exact_shapes`` it refuses inputs of other shapes than the captured.

    ``graphed``: its kernels are replayed by a CUDA graph; whether that may be is for the caller to know.

    Raises:
        UnsupportedGraph: see the module's docstring.
    """
    kernels = [step.kernel for step in steps if step.kernel is not None]
    forward = _forward(graph, steps, names, exact_shapes=exact_shapes, graphed=graphed)
    texts = [kernel.kernel for kernel in kernels]
    functions = closure(texts)
    head = [f'"""{summary}"""', "", *(IMPORTS if graphed else ()), "import torch"]
    head += ["import torch.nn.functional as F"] if any("= F." in text for text in [forward, *texts]) else []
    head += ["import triton", "import triton.language as tl", ""]
    parts = ["\n".join(head)]
    parts += [FUNCTIONS[name].strip() + "\n" for name in functions]
    parts += launch_parts([*texts, *(kernel.launcher for kernel in kernels)])
    for kernel in kernels:
        parts += [kernel.kernel.rstrip() + "\n", kernel.launcher.rstrip() + "\n"]
    parts += [_declare_source(), *([graphed_calls()] if graphed else [])]
    parts.append(f"{_class_head(kernels)}\n{_init(graph, graphed=graphed)}\n{_from_reference(graph)}{forward}")
    return "\n\n".join(parts).rstrip() + "\n"


def _class_head(kernels: Sequence[KernelText]) -> str:
    called = ", ".join(f"``{kernel.name}``" for kernel in kernels)
    return (
        "class ModelNew(torch.nn.Module):\n"
        f'    """The reference module with {called or "no kernel"}; same parameters, same state_dict keys."""\n'
    )


def _declare_source() -> str:
    return '''def declare(root: torch.nn.Module, key: str, tensor: torch.Tensor, persistent: bool = True) -> None:
    """Register ``tensor`` under the dotted ``key``, making containers on the way."""
    *path, leaf = key.split(".")
    for name in path:
        if name not in root._modules:
            root.add_module(name, torch.nn.Module())
        root = root._modules[name]
    if isinstance(tensor, torch.nn.Parameter):
        root.register_parameter(leaf, tensor)
    else:
        root.register_buffer(leaf, tensor, persistent=persistent)
'''


# --- __init__ ------------------------------------------------------------------------------------------------


def _init(graph: Graph, *, graphed: bool) -> str:
    lines = ["super().__init__()"]
    formats = _memory_formats(graph)
    lines += [_declaration(entry, formats.get(entry.key, "")) for entry in graph.state]
    for item in graph.placeholders:
        if item.kind == "constant" and item.meta.shape:
            if item.value is None:
                lines.append(_empty_constant(item))
                continue
            value = f"torch.tensor({_nested(item.value)}, dtype=torch.{item.meta.dtype})"
            lines.append(f'self.register_buffer("constant_{item.name}", {value}, persistent=False)')
    lines += [f"self.{ATTRIBUTE} = GraphedCalls()"] if graphed else []
    return f"    def __init__(self, *args, **kwargs) -> None:\n{indent(lines, 8)}\n"


def _memory_formats(graph: Graph) -> dict[str, str]:
    """Layout by state key, for weights that forward reads in another layout: they are kept in it."""
    paths = {item.name: item.path for item in graph.placeholders if item.kind in _WEIGHTS}
    rows = {
        node.name: node.args[0].name
        for node in graph.nodes
        if node.bare_op == "unsqueeze"
        and node.args[0].name in paths
        and node.args[1] == 2
        and len(node.meta.shape) == 4
    }
    found: dict[str, str] = {}
    for node in graph.nodes:
        source = node.args[0].name if node.bare_op == "contiguous" and isinstance(node.args[0], Ref) else ""
        if source in paths:
            found[paths[source]] = f", memory_format=torch.{node.kwargs['memory_format'].name}"
        elif source in rows and node.kwargs.get("memory_format") == Symbol("memory_format", "channels_last"):
            found[paths[rows[source]]] = _CHANNELS_LAST_ROW
    return found


def _declaration(item: State, memory_format: str = "") -> str:
    if item.alias_of is not None:
        getter = "get_parameter" if item.kind == "parameter" else "get_buffer"
        return f'declare(self, "{item.key}", self.{getter}("{item.alias_of}"))'
    shape = f"({', '.join(str(size) for size in item.meta.shape)}{',' if len(item.meta.shape) == 1 else ''})"
    dtype = f"dtype=torch.{item.meta.dtype}"
    make = f"torch.empty({shape}, {dtype}{memory_format})"
    if memory_format == _CHANNELS_LAST_ROW:
        outer, middle, inner = item.meta.shape
        make = f"torch.empty({(outer, inner, middle)!r}, {dtype}).transpose(1, 2)"
    if item.kind == "parameter":
        grad = "" if item.requires_grad else ", requires_grad=False"
        return f'declare(self, "{item.key}", torch.nn.Parameter({make}{grad}))'
    if item.persistent:
        return f'declare(self, "{item.key}", {make})'
    if item.value is None:
        return f'declare(self, "{item.key}", {make}, persistent=False)'
    value = f"torch.tensor({_nested(item.value)}, dtype=torch.{item.meta.dtype})"
    return f'declare(self, "{item.key}", {value}, persistent=False)'


def _empty_constant(item: Placeholder) -> str:
    if not _is_attribute(item.path):
        raise UnsupportedGraph(f"the constant {item.path!r} is too large to be written down")
    make = f"torch.empty({item.meta.shape!r}, dtype=torch.{item.meta.dtype})"
    return f'self.register_buffer("constant_{item.name}", {make}, persistent=False)'


def _is_attribute(path: str) -> bool:
    """Say whether a constant is an attribute of the module, not a value that tracing made up a name for."""
    return not path.rpartition(".")[2].startswith(("lifted_tensor", "_tensor_constant", "_lifted"))


def _from_reference(graph: Graph) -> str:
    """Return the class method that takes over what no state_dict holds, or nothing where all can be written down."""
    lines = []
    for entry in graph.state:
        if not entry.persistent and entry.value is None and entry.alias_of is None:
            lines.append(f'{attribute(entry.key, "new")} = model.get_buffer("{entry.key}")')
    for item in graph.placeholders:
        if item.kind == "constant" and item.meta.shape and item.value is None:
            lines.append(f"new.constant_{item.name} = {attribute(item.path, 'model')}")
    if not lines:
        return ""
    body = ["new = cls()", "new.load_state_dict(model.state_dict(), assign=True)", *lines, "return new"]
    return (
        "    @classmethod\n"
        '    def from_reference(cls, model: torch.nn.Module) -> "ModelNew":\n'
        '        """Build it from the original module, which holds tensors that its state_dict does not."""\n'
        f"{indent(body, 8)}\n\n"
    )


def _nested(value: Any) -> str:
    return f"[{', '.join(_nested(item) for item in value)}]" if isinstance(value, tuple) else repr(value)


def attribute(path: str, text: str = "self") -> str:
    """Python expression of a state key: attributes of ``text``, with indices for numbered children."""
    for part in path.split(".")[:-1]:
        text = f"{text}.{part}" if part.isidentifier() else f'{text}._modules["{part}"]'
    return f"{text}.{path.split('.')[-1]}"


# --- forward -------------------------------------------------------------------------------------------------


def _forward(
    graph: Graph, steps: Sequence[Step], names: Mapping[str, str], *, exact_shapes: bool, graphed: bool
) -> str:
    tensors = [item for item in graph.placeholders if item.kind == "input"]
    checks = [line for parameter in graph.signature for line in _checks(parameter)]
    if exact_shapes:
        checks += [line for item in tensors for line in _shape_check(item)]
    else:
        checks += _ambiguous_sizes(graph, tensors)
    head = f"    def forward(self{_parameters(graph.signature)}):\n"
    if graphed:
        call = f"return self.{ATTRIBUTE}(self, {', '.join(item.path for item in tensors)})"
        inputs = ", ".join(names[item.name] for item in tensors)
        body = ['"""Start the kernels of one call."""', *_body(graph, steps, names)]
        launch = f"    def {METHOD}(self, {inputs}):\n{indent(body, 8)}\n"
        return f"{head}{indent([*checks, call], 8)}\n\n{launch}"
    body = _body(graph, steps, names)
    words = set(re.findall(r"\w+", "\n".join(body)))
    for item in tensors:  # also those that only tell a size
        if item.path != names[item.name] and names[item.name] in words:
            checks.append(f"{names[item.name]} = {item.path}")
    return f"{head}{indent([*checks, *body], 8)}\n"


def _body(graph: Graph, steps: Sequence[Step], names: Mapping[str, str]) -> list[str]:
    """Launches and torch operators in graph order, new values of buffers, and the result."""
    metas = graph.metas()
    table = dict(names)
    for item in graph.placeholders:
        if item.kind != "input":
            table[item.name] = _placeholder_text(item)
    sizes = size_constants(graph)
    tensors = [item for item in graph.placeholders if item.kind == "input"]
    device = f"{table[tensors[0].name]}.device" if tensors else '"cuda"'
    lines: list[str] = []
    bare = _bare_weights(graph, steps)
    for step in steps:
        if step.kernel is None:
            node = step.nodes[0]
            if node.name in bare:
                table[node.name] = table[bare[node.name]]
                continue
            lines.append(f"{table[node.name]} = {torch_call(node, table, metas, device, sizes)}")
            continue
        results = ", ".join(table[name] for name in step.kernel.outputs)
        arguments = ", ".join(table[name] for name in step.kernel.inputs)
        lines.append(f"{results} = {step.kernel.name}({arguments})")
    lines += [f"{attribute(key)}.copy_({table[name]})" for key, name in graph.mutations.items()]
    lines.append(f"return {_structure(graph.output, table)}")
    weights = [item for item in graph.placeholders if item.kind in _WEIGHTS]
    return _read_once(lines, {attribute(item.path): names[item.name] for item in weights})


def _bare_weights(graph: Graph, steps: Sequence[Step]) -> dict[str, str]:
    """Reshaped vectors that need not be made, with the weights they are of: kernels only take their addresses."""
    vectors = {
        item.name
        for item in graph.placeholders
        if item.kind in _WEIGHTS and item.meta.contiguous and sum(size != 1 for size in item.meta.shape) < 2
    }
    takers: dict[str, list[KernelText | None]] = {}
    for step in steps:
        for name in {name for node in step.nodes for name in node.inputs()}:
            takers.setdefault(name, []).append(step.kernel)
    kept = {*references(graph.output), *graph.mutations.values()}
    found = {}
    for step in steps:
        node = step.nodes[0]
        if step.kernel is not None or node.bare_op not in _RESHAPING or node.name in kept:
            continue
        source = node.args[0].name if isinstance(node.args[0], Ref) else ""
        if source in vectors and all(_takes_address(kernel, node.name) for kernel in takers.get(node.name, [])):
            found[node.name] = source
    return found


def _takes_address(kernel: KernelText | None, value: str) -> bool:
    """Whether a kernel's launcher does nothing with the tensor but pass it on."""
    if kernel is None or value not in kernel.inputs:
        return False
    head, body = kernel.launcher.split("\n", 1)
    parameter = head.split("(", 1)[1].split(", ")[kernel.inputs.index(value)].partition(":")[0]
    return re.search(rf"\b{parameter}\b(?!,\n)", body) is None


def _read_once(lines: Sequence[str], texts: Mapping[str, str]) -> list[str]:
    """Bind attributes that ``lines`` read several times to names: each reading takes the host a microsecond or two.

    ``texts`` are names by attributes' text.
    """
    found = list(lines)
    for text, name in texts.items():
        pattern = re.compile(rf"(?<![\w.]){re.escape(text)}(?![\w\[])")
        using = [index for index, line in enumerate(found) if pattern.search(line)]
        if sum(len(pattern.findall(line)) for line in found) > 1 and not any(
            f"{text}.copy_(" in line for line in found
        ):
            found = [pattern.sub(name, line) for line in found]
            found.insert(using[0], f"{name} = {text}")
    return found


def _placeholder_text(item: Placeholder) -> str:
    if item.kind != "constant":
        return attribute(item.path)
    if not item.meta.shape and isinstance(item.value, int | float):
        return repr(item.value)
    return f"self.constant_{item.name}"


def _parameters(signature: Sequence[Parameter]) -> str:
    text, keyword_only = "", False
    for parameter in signature:
        if parameter.kind == "var_positional":
            text, keyword_only = f"{text}, *{parameter.name}", True
            continue
        if parameter.kind == "var_keyword":
            text += f", **{parameter.name}"
            continue
        if parameter.kind == "keyword_only" and not keyword_only:
            text, keyword_only = f"{text}, *", True
        default = f"={_structure(parameter.default, {})}" if parameter.has_default else ""
        text += f", {parameter.name}{default}"
    return text


def _checks(parameter: Parameter) -> list[str]:
    """Plain arguments were fixed when the graph was captured: refuse others."""
    if not parameter.has_value or isinstance(parameter.value, Pack):
        if parameter.has_value or not parameter.has_default or isinstance(parameter.default, Pack):
            return []
        value = parameter.default
    else:
        value = parameter.value
    text = repr(value)
    operator = "is not" if value is None or isinstance(value, bool) else "!="
    test = f"{parameter.name} {operator} {text}"
    message = repr(f"{parameter.name} was {text} when these kernels were made")
    return [f"if {test}:", f"    raise ValueError({message})"]


def _shape_check(item: Placeholder) -> list[str]:
    message = repr(f"these kernels were made for {item.path} of shape {item.meta.shape}")
    return [f"if {item.path}.shape != {item.meta.shape!r}:", f"    raise ValueError({message})"]


def _ambiguous_sizes(graph: Graph, tensors: Sequence[Placeholder]) -> list[str]:
    """Refuse other sizes where the graph does not tell what depends on them."""
    sizes, metas = size_constants(graph), graph.metas()
    numbers = {number for node in graph.nodes for number in kept_sizes(node, metas, sizes)}
    roots = {number for node in graph.nodes for number in rooted_sizes(node)}
    cuts = [node for node in graph.nodes if node.bare_op == "chunk" and node.args[0].name in metas]
    dims = [node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0) for node in cuts]
    parts = {metas[node.args[0].name].shape[dim]: node.args[1] for node, dim in zip(cuts, dims, strict=True)}
    lines = []
    for item in tensors:
        for dim, size in enumerate(item.meta.shape):
            last = dim + 1 == len(item.meta.shape)
            if size in numbers or (last and size in roots):
                message = repr(f"these kernels were made for {item.path} with {size} in dimension {dim}")
                lines += [f"if {item.path}.shape[{dim}] != {size}:", f"    raise ValueError({message})"]
            elif size in parts and size % parts[size] == 0:
                message = repr(f"these kernels cut dimension {dim} of {item.path} into {parts[size]} equal parts")
                lines += [f"if {item.path}.shape[{dim}] % {parts[size]}:", f"    raise ValueError({message})"]
    return lines


def _structure(value: Any, names: Mapping[str, str]) -> str:
    if isinstance(value, Ref):
        return names[value.name]
    if isinstance(value, Pack):
        items = [_structure(item, names) for item in value.items]
        if value.form == "tuple":
            text = f"({', '.join(items)}{',' if len(items) == 1 else ''})"
            return f"torch.return_types.{value.keys[0]}({text})" if value.keys else text
        if value.form == "dict":
            pairs = [f"{key!r}: {item}" for key, item in zip(value.keys, items, strict=True)]
            return f"{{{', '.join(pairs)}}}"
        return f"[{', '.join(items)}]"
    return repr(value)
