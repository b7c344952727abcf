"""The file of a generated module: imports, class, constructor, ``forward``, inputs, in the ways that people write them.

All choices here are of dress but two: whether the class is wrapped in another one (which changes the keys of its
state), and the class's name. What ``get_inputs`` and ``get_init_inputs`` say is what the task's own description says.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from drk.training.dressing import Dress
from drk.training.task_writer import InputSpec, Value, Writer, number_text

_PLAIN = re.compile(r"(self\.\w+(?:, self\.\w+)*) = ([\w.+-]+(?:, [\w.+-]+)*)")
_DTYPES = {"float16": "torch.float16", "bfloat16": "torch.bfloat16"}


def module_text(writer: Writer, results: Sequence[Value]) -> tuple[str, str]:
    """Return the file's text and the name of the class to be made faster."""
    name = writer.dress.name("class")
    wrapped = bool(writer.setup) and writer.rng.random() < 0.07
    outer = writer.dress.name("class") if wrapped else ""
    block = writer.dress.name("attribute") if wrapped else ""
    dress = writer.dress
    if writer.setup and not wrapped:
        writer.defaults = dress.defaults(len(writer.arguments))
        writer.given = len(writer.arguments) - (writer.defaults if dress.chance(0.5) else 0)
    returned = ", ".join(value.text for value in results)
    body = [*writer.lines, f"return {returned}"]
    parts = _helper(dress, writer, body) if not wrapped and "self." not in "\n".join(body) else []
    parts.append(_class(dress, name, writer, body))
    if wrapped:
        names = [one for one, _ in writer.arguments]
        inner = [f"self.{block} = {name}({', '.join(names)})"]
        call = f"return self.{block}({', '.join(one.name for one in writer.inputs)})"
        parts.append(_class(dress, outer, writer, [call], setup=inner))
    sizes, tail = _inputs_text(dress, writer)
    parts.append(tail)
    if sizes and dress.chance(0.3):
        parts.insert(0, "\n".join(sizes))
    elif sizes:
        parts[-1] = "\n".join(sizes) + "\n\n\n" + parts[-1]
    text = "\n\n\n".join(part.strip("\n") for part in parts)
    if dress.habit > 0.9:
        text = (
            text.replace("F.", "torch.nn.functional.") if dress.habit > 0.95 else text.replace("F.", "nn.functional.")
        )
    return f"{_imports(dress, text)}\n\n\n{text}\n", outer or name


def _imports(dress: Dress, text: str) -> str:
    lines = ["import math"] if "math." in text else []
    lines.append("import torch")
    lines.append(dress.rng.choice(("import torch.nn as nn", "import torch.nn as nn", "from torch import nn")))
    if re.search(r"\bF\.", text) or dress.chance(0.3):
        lines.append("import torch.nn.functional as F")
    return "\n".join(lines)


def _helper(dress: Dress, writer: Writer, body: list[str]) -> list[str]:
    """Sometimes move the statements into a function of the module; ``body`` then calls it."""
    if len(body) < 2 or not dress.chance(0.1):
        return []
    name = dress.local()
    names = ", ".join(one.name for one in writer.inputs)
    text = f"def {name}({names}):\n{textwrap.indent(chr(10).join(body), '    ')}"
    body[:] = [f"return {name}({names})"]
    return [text]


def _class(dress: Dress, name: str, writer: Writer, body: Sequence[str], setup: Sequence[str] | None = None) -> str:
    hints = dress.chance(0.35)
    lines = [f"class {name}({dress.rng.choice(('nn.Module', 'nn.Module', 'nn.Module', 'torch.nn.Module'))}):"]
    if dress.chance(0.4):
        lines += _docstring(dress, writer)
    setup = writer.setup if setup is None else setup
    if setup or dress.chance(0.35):
        shown = writer.arguments if setup else []
        plain = len(shown) - writer.defaults
        given = "".join(
            f", {_argument(one, value, hints=hints, default=place >= plain)}"
            for place, (one, value) in enumerate(shown)
        )
        call = "super().__init__()" if dress.habit < 0.6 else f"super({name}, self).__init__()"
        lines.append(f"    def __init__(self{given}){' -> None' if hints else ''}:")
        lines += [f"        {line}" for line in (call, *_together(dress, setup))] + [""]
    inputs = ", ".join(f"{one.name}: torch.Tensor" if hints else one.name for one in writer.inputs)
    lines.append(f"    def forward(self, {inputs}){' -> torch.Tensor' if hints else ''}:")
    if dress.chance(0.12):
        lines.append(f'        """{dress.docstring()}"""')
    return "\n".join([*lines, *(f"        {line}" for line in body)])


def _docstring(dress: Dress, writer: Writer) -> list[str]:
    if dress.chance(0.6):
        return [f'    """{dress.docstring()}"""', *([""] if dress.chance(0.8) else [])]
    lines = ['    """', f"    {dress.docstring()}", "", "    Args:"]
    lines += [f"        {name}: {dress.docstring().lower()}" for name, _ in writer.arguments[:4]]
    return [*(lines if writer.arguments else lines[:2]), '    """', ""]


def _argument(name: str, value: bool | int | float | str, *, hints: bool, default: bool) -> str:
    """Return one argument of a constructor, with its value as default where that is asked for."""
    kind = f": {type(value).__name__}" if hints else ""
    if not default:
        return f"{name}{kind}"
    shown = repr(value) if isinstance(value, str) else number_text(value)
    return f"{name}{kind} = {shown}" if hints else f"{name}={shown}"


def _together(dress: Dress, setup: Sequence[str]) -> list[str]:
    """Return a constructor's statements, sometimes with neighbouring plain ones as one assignment of several."""
    if not dress.chance(0.3):
        return list(setup)
    found: list[str] = []
    for line in setup:
        last = _PLAIN.fullmatch(found[-1]) if found else None
        this = _PLAIN.fullmatch(line)
        if last and this and last[1].count(",") < 2:
            found[-1] = f"{last[1]}, {this[1]} = {last[2]}, {this[2]}"
        else:
            found.append(line)
    return found


def _inputs_text(dress: Dress, writer: Writer) -> tuple[list[str], str]:
    """Return lines that name sizes, and the functions that make the inputs."""
    table: dict[int, str] = {}
    if dress.chance(0.6):
        for number in dict.fromkeys(size for one in writer.inputs for size in one.shape):
            table[number] = dress.rng.choice(
                (f"size_{len(table)}", "BCHWND"[len(table) % 6] + str(len(table)), dress.local())
            )
    lines = [f"{name} = {size}" for size, name in table.items()]
    made = [_make(dress, one, table) for one in writer.inputs]
    if dress.chance(0.5):
        body = [f"    {one.name} = {text}" for one, text in zip(writer.inputs, made, strict=True)]
        body.append(f"    return [{', '.join(one.name for one in writer.inputs)}]")
    else:
        body = [f"    return [{', '.join(made)}]"]
    given = writer.arguments[: writer.given] if writer.given is not None else writer.arguments
    values = ", ".join(table.get(v, repr(v)) if type(v) is int else repr(v) for _, v in given)
    init = f"def get_init_inputs():\n    return [{values if writer.setup else ''}]"
    return lines, "\n".join(["def get_inputs():", *body]) + "\n\n\n" + init


def _make(dress: Dress, one: InputSpec, table: dict[int, str]) -> str:
    sizes = ", ".join(table.get(size, str(size)) for size in one.shape)
    if one.fill == "integers":
        return f"torch.randint(0, {one.high}, ({sizes},))"
    if one.fill == "bernoulli":
        return f"(torch.rand({sizes}) > 0.5).float()"
    if one.fill == "uniform":
        span = one.high - one.low
        factor = f" * {span:g}" if span != 1 else ""
        return f"torch.rand({sizes}){factor}{f' + {one.low:g}' if one.low else ''}"
    if one.dtype in _DTYPES:
        if dress.chance(0.5):
            return f"torch.randn({sizes}, dtype={_DTYPES[one.dtype]})"
        return f"torch.randn({sizes}).{'half' if one.dtype == 'float16' else 'bfloat16'}()"
    return f"torch.randn({sizes})"
