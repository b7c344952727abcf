"""A typed, seeded generator of tasks: small PyTorch modules over families of operations.

Each family is a grammar: ``pointwise`` chains, ``gated`` pairs of chains, ``row`` (softmax, norms and reductions over
the last dimension with chains around them), ``linear`` (a matrix product with an epilogue), ``residual`` (a norm inside
a skip connection). What varies besides the operations: spelling (nested or statement by statement, functions or
methods), where constants live, names (random syllables, so that copying must be learned), comments, shapes.

A task's *signature* is its family and operations without constants, names, spelling and shapes. Tasks are deduplicated
by content, and split by family or by a hash of the signature, so that no held-out composition is ever trained on.

Honest limits: no convolution, attention, pooling or indexing; one input (two for some ``gated``); float32 only.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from drk.gym.schema import Argument, Call, Scalar, Task, TensorSpec
from drk.gym.wire import task_id
from drk.training.errors import OptionError

Split = Literal["train", "held-out"]


@dataclass(frozen=True)
class TrainingTask:
    """A task with where it comes from. ``signature`` names its operations; ``seed`` repeats it."""

    task: Task
    family: str
    signature: str
    seed: int


@dataclass(frozen=True)
class PointwiseOp:
    """One operation on a value: ``form`` with ``{x}`` and ``{c}``, and the constants to draw from (empty: none)."""

    name: str
    form: str
    low: float = 0.0
    high: float = 0.0


POINTWISE: tuple[PointwiseOp, ...] = (
    PointwiseOp("relu", "torch.relu({x})"),
    PointwiseOp("sigmoid", "torch.sigmoid({x})"),
    PointwiseOp("tanh", "torch.tanh({x})"),
    PointwiseOp("silu", "F.silu({x})"),
    PointwiseOp("gelu", "F.gelu({x})"),
    PointwiseOp("gelu_tanh", 'F.gelu({x}, approximate="tanh")'),
    PointwiseOp("leaky_relu", "F.leaky_relu({x}, {c})", 0.01, 0.3),
    PointwiseOp("elu", "F.elu({x})"),
    PointwiseOp("softplus", "F.softplus({x})"),
    PointwiseOp("hardtanh", "F.hardtanh({x})"),
    PointwiseOp("abs", "torch.abs({x})"),
    PointwiseOp("square", "{x} * {x}"),
    PointwiseOp("exp", "torch.exp(-torch.abs({x}))"),
    PointwiseOp("sin", "torch.sin({x})"),
    PointwiseOp("add", "{x} + {c}", -2.0, 2.0),
    PointwiseOp("mul", "{x} * {c}", 0.2, 2.5),
    PointwiseOp("sub", "{x} - {c}", -1.5, 1.5),
    PointwiseOp("div", "{x} / {c}", 0.5, 4.0),
    PointwiseOp("clamp_min", "torch.clamp({x}, min={c})", -1.0, 0.5),
    PointwiseOp("clamp_max", "torch.clamp({x}, max={c})", 0.2, 3.0),
)

ROW_OPS: dict[str, str] = {
    "softmax": "torch.softmax({x}, dim=-1)",
    "log_softmax": "F.log_softmax({x}, dim=-1)",
    "layer_norm": "F.layer_norm({x}, {x}.shape[-1:])",
    "rms_norm": "{x} * torch.rsqrt(({x} * {x}).mean(dim=-1, keepdim=True) + 1e-6)",
    "centre": "{x} - {x}.mean(dim=-1, keepdim=True)",
    "row_sum": "{x}.sum(dim=-1)",
    "row_mean": "{x}.mean(dim=-1, keepdim=True)",
    "row_max": "{x}.amax(dim=-1)",
    "logsumexp": "torch.logsumexp({x}, dim=-1)",
}
_KEEPS_SHAPE = ("softmax", "log_softmax", "layer_norm", "rms_norm", "centre")
_SYLLABLES = tuple(
    re.findall(
        r"[a-z]+",
        "ba co du fe gi ho ka lu mi no pa que ri so ta vi wo xa ye zu bel dor fin gam kel mor nar pol rin sul tan",
    )
)
_WORDS = ("x", "h", "inputs", "hidden", "features", "value", "data", "act", "tokens", "state", "signal", "batch")
_COMMENTS = ("fuse me", "see the paper", "kept in full precision", "applied to every element", "order matters here")


class Writer:
    """Collects a module's statements, attributes and operations, with every choice from one generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.attributes: list[str] = []
        self.setup: list[str] = []
        self.lines: list[str] = []
        self.ops: list[str] = []
        self.names: set[str] = {"self", "torch", "nn", "F"}

    def name(self) -> str:
        """Return a name that is not taken: a common word, or syllables that nobody has seen before."""
        while True:
            if self.rng.random() < 0.4:
                word = self.rng.choice(_WORDS)
            else:
                parts = ["".join(self.rng.choices(_SYLLABLES, k=self.rng.randint(1, 2))) for _ in range(2)]
                word = self.rng.choice(("", "_")).join(parts[: self.rng.randint(1, 2)])
            word += self.rng.choice(("", "", "", str(self.rng.randint(0, 9))))
            if word not in self.names and not word.startswith("_"):
                self.names.add(word)
                return word

    def constant(self, low: float, high: float) -> str:
        """Return the text of a drawn constant: in place, or an attribute set in the constructor."""
        value = round(self.rng.uniform(low, high), self.rng.choice((1, 2))) or round(high, 1)
        if self.rng.random() < 0.3:
            name = self.name()
            self.attributes.append(f"self.{name} = {value}")
            return f"self.{name}"
        return repr(value)

    def apply(self, name: str, form: str, value: str, constant: str = "") -> str:
        """Return the value that holds ``form`` of ``value``, as a statement of its own or nested."""
        self.ops.append(name)
        again = form.count("{x}") > 1
        if not value.isidentifier() and (again or self.rng.random() < 0.6):
            value = self.assign(value)
        elif not value.isidentifier() and form.startswith("{x}"):
            value = f"({value})"
        return form.format(x=value, c=constant)

    def assign(self, expression: str) -> str:
        """Write ``name = expression`` and return the name."""
        if self.rng.random() < 0.1:
            self.lines.append(f"# {self.rng.choice(_COMMENTS)}")
        name = self.name()
        self.lines.append(f"{name} = {expression}")
        return name

    def chain(self, value: str, count: int) -> str:
        """Apply ``count`` drawn pointwise operations, never the same one twice in a row."""
        for _ in range(count):
            last = self.ops[-1] if self.ops else ""
            op = self.rng.choice([one for one in POINTWISE if one.name != last])
            constant = self.constant(op.low, op.high) if op.high else ""
            value = self.apply(op.name, op.form, value, constant)
        return value


Draw = Callable[[Writer, int], tuple[list[str], str, list[tuple[int, ...]], list[tuple[str, int]]]]
"""A family: from a writer and a row count (0: drawn) to input names, result, input shapes, constructor arguments."""


def _rows(writer: Writer, rows: int) -> int:
    return rows or writer.rng.choice((256, 512, 1024, 2048, 4096))


def _width(writer: Writer, rows: int) -> int:
    return writer.rng.choice((32, 48, 64) if rows else (256, 384, 512, 1000, 1024, 2048, 4096))


def _pointwise(writer: Writer, rows: int) -> tuple[list[str], str, list[tuple[int, ...]], list[tuple[str, int]]]:
    x = writer.name()
    shape: tuple[int, ...] = (_rows(writer, rows), _width(writer, rows))
    if writer.rng.random() < 0.25:
        shape = (shape[0], 8, shape[1] // 8)
    return [x], writer.chain(x, writer.rng.randint(2, 6)), [shape], []


def _gated(writer: Writer, rows: int) -> tuple[list[str], str, list[tuple[int, ...]], list[tuple[str, int]]]:
    x = writer.name()
    inputs = [x, writer.name()] if writer.rng.random() < 0.5 else [x]
    left = writer.assign(writer.chain(x, writer.rng.randint(1, 3)))
    writer.ops.append("|")
    right = writer.assign(writer.chain(inputs[-1], writer.rng.randint(1, 3)))
    sign = writer.rng.choice("*+-")
    writer.ops += ["|", sign]
    value = writer.assign(f"{left} {sign} {right}")
    shape = (_rows(writer, rows), _width(writer, rows))
    return inputs, writer.chain(value, writer.rng.randint(0, 2)), [shape] * len(inputs), []


def _row(writer: Writer, rows: int) -> tuple[list[str], str, list[tuple[int, ...]], list[tuple[str, int]]]:
    x = writer.name()
    value = writer.chain(x, writer.rng.randint(0, 3))
    op = writer.rng.choice(list(ROW_OPS))
    value = writer.assign(writer.apply(op, ROW_OPS[op], value))
    return [x], writer.chain(value, writer.rng.randint(0, 2)), [(_rows(writer, rows), _width(writer, rows))], []


def _linear(writer: Writer, rows: int) -> tuple[list[str], str, list[tuple[int, ...]], list[tuple[str, int]]]:
    x, layer, fan_in, fan_out = writer.name(), writer.name(), writer.name(), writer.name()
    writer.setup.append(f"self.{layer} = nn.Linear({fan_in}, {fan_out}, bias={writer.rng.random() < 0.8})")
    writer.ops.append("linear")
    value = writer.assign(f"self.{layer}({x})")
    value = writer.chain(value, writer.rng.randint(1, 4))
    sizes = (_width(writer, rows), _width(writer, rows))
    return [x], value, [(_rows(writer, rows), sizes[0])], [(fan_in, sizes[0]), (fan_out, sizes[1])]


def _residual(writer: Writer, rows: int) -> tuple[list[str], str, list[tuple[int, ...]], list[tuple[str, int]]]:
    x = writer.name()
    op = writer.rng.choice(_KEEPS_SHAPE)
    value = writer.assign(writer.apply(op, ROW_OPS[op], x))
    value = writer.assign(writer.chain(value, writer.rng.randint(1, 3)))
    writer.ops.append("skip")
    return [x], f"{x} + {value}", [(_rows(writer, rows), _width(writer, rows))], []


FAMILIES: dict[str, Draw] = {
    "pointwise": _pointwise,
    "gated": _gated,
    "row": _row,
    "linear": _linear,
    "residual": _residual,
}


def draw_task(family: str, seed: int, *, rows: int = 0) -> TrainingTask:
    """Return the task that ``family`` and ``seed`` stand for. ``rows`` fixes the leading size (0: drawn, GPU-sized).

    Raises:
        OptionError: no such family.
    """
    if family not in FAMILIES:
        raise OptionError(f"unknown family {family!r}", help=f"one of {', '.join(FAMILIES)}")
    writer = Writer(random.Random(f"{family}:{seed}"))
    inputs, result, shapes, sizes = FAMILIES[family](writer, rows)
    source = _module_text(writer, inputs, result, [name for name, _ in sizes])
    init: tuple[Argument, ...] = tuple(Scalar(size) for _, size in sizes)
    args: tuple[Argument, ...] = tuple(TensorSpec(shape) for shape in shapes)
    signature = f"{family}:{' '.join(writer.ops)}"
    task = Task(f"{family}-{seed}", {"model.py": source}, "model.py", "Model", init=Call(init), inputs=Call(args))
    return TrainingTask(task, family, signature, seed)


def _module_text(writer: Writer, inputs: Sequence[str], result: str, sizes: Sequence[str]) -> str:
    forward = [*writer.lines, f"return {result}"]
    body = [*writer.setup, *writer.attributes]
    lines = [
        "import torch",
        "import torch.nn.functional as F",
        "from torch import nn",
        "",
        "",
        "class Model(nn.Module):",
    ]
    if writer.rng.random() < 0.3:
        lines.append(f'    """A {writer.rng.choice(("small", "common", "custom"))} block."""')
        lines.append("")
    if body:
        arguments = "".join(f", {name}" for name in sizes)
        lines += [f"    def __init__(self{arguments}):", "        super().__init__()"]
        lines += [f"        {line}" for line in body] + [""]
    lines.append(f"    def forward(self, {', '.join(inputs)}):")
    return "\n".join(lines + [f"        {line}" for line in forward]) + "\n"


def split_of(task: TrainingTask, *, held_out_families: Sequence[str] = (), share: float = 0.1) -> Split:
    """Return where ``task`` belongs: held out by family, or by a hash of its signature (about ``share`` of them)."""
    if task.family in held_out_families:
        return "held-out"
    digest = int.from_bytes(hashlib.sha256(task.signature.encode()).digest()[:8], "big")
    return "held-out" if digest / 2**64 < share else "train"


def draw_tasks(
    count: int,
    *,
    families: Sequence[str] = (),
    seed: int = 0,
    rows: int = 0,
    split: Split = "train",
    held_out_families: Sequence[str] = (),
) -> list[TrainingTask]:
    """Return ``count`` distinct tasks of one split, families in turn.

    Raises:
        OptionError: an unknown family, or so few compositions that the count cannot be reached.
    """
    found: list[TrainingTask] = []
    seen: set[str] = set()
    tries = 0
    for task in _endless(families or tuple(FAMILIES), seed, rows):
        if len(found) >= count:
            return found
        tries += 1
        if tries > 200 + 50 * count:
            raise OptionError(f"only {len(found)} of {count} tasks could be drawn", help="add families")
        identifier = task_id(task.task)
        if identifier in seen or split_of(task, held_out_families=held_out_families) != split:
            continue
        seen.add(identifier)
        found.append(task)
    return found


def _endless(families: Sequence[str], seed: int, rows: int) -> Iterator[TrainingTask]:
    number = seed * 1_000_003
    while True:
        for family in families:
            yield draw_task(family, number, rows=rows)
        number += 1
