"""The little language of ``--input`` and ``--init``: one argument, or several with commas between them.

::

    x=f32[128,1024]                     a float32 tensor, standard normal
    bf16[8,64,56,56]:channels_last      positional, memory format
    ids=i64[4,128]{0..50257}            integers from [0, 50257)
    f32[2,3]{0..1}                      uniform from [0, 1)
    mask=bool[4,128]                    coin flips
    f32[4,8]:strides(1,4)               strides in elements
    f32[4,8]:grad   f32[4]:ones         gradient wanted; a constant fill
    dim=1024   eps=1e-5   act="gelu"    numbers, true, false, none, quoted text
    (f32[2,3], f32[2,3])  [1, 2]  {a: f32[2], b: 3}

:func:`parse_arguments` yields :class:`drk.gym.schema.Call`; :func:`format_argument` is its inverse. Errors show the
text with a caret. Left out: expressions, names of Python objects, infinite numbers, and captured tensors (a capture is
a file, no text).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from drk.assistant.errors import UsageError, did_you_mean
from drk.gym.schema import Argument, Call, CapturedTensor, Nested, Scalar, TensorSpec

DTYPES: dict[str, str] = {
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "bf16": "bfloat16",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "bool": "bool",
    "c64": "complex64",
    "c128": "complex128",
}
"""Short name -> torch name; the torch names and ``half``, ``float``, ``double``, ``int``, ``long`` are read too."""

LONG_NAMES = {name: name for name in DTYPES.values()} | {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "long": "int64",
}
SHORT_NAMES = {name: short for short, name in DTYPES.items()}
LAYOUTS = ("channels_last", "channels_last_3d")
FILLS = ("zeros", "ones")
SUFFIXES = (*LAYOUTS, *FILLS, "strides(...)", "grad")
MAX_RANK = 16
MAX_NESTING = 32
RANKS = {"channels_last": 4, "channels_last_3d": 5}

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"' + r"|'(?:[^'\\]|\\.)*'", re.DOTALL)
_SPACE = re.compile(r"\s*")
_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "none": None, "null": None}

EXAMPLES = 'x=f32[128,1024]  ids=i64[4,128]{0..50257}  bf16[8,64,56,56]:channels_last  dim=1024  act="gelu"'


class _Reader:
    """A cursor over one text. ``option`` is what the user typed before it, for messages."""

    def __init__(self, text: str, option: str) -> None:
        self.text = text
        self.option = option
        self.at = 0
        self.depth = 0

    def fail(self, message: str, at: int | None = None, advice: str = "") -> UsageError:
        place = self.at if at is None else at
        shown = self.text.replace("\n", " ")
        return UsageError(
            f"{self.option}: {message}",
            cause=f"{shown}\n{' ' * place}^",
            help=advice or f"examples: {EXAMPLES}",
        )

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def peek(self) -> str:
        self.skip()
        return self.text[self.at : self.at + 1]

    def take(self, mark: str) -> bool:
        self.skip()
        if self.text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        return False

    def expect(self, mark: str, after: str) -> None:
        if not self.take(mark):
            found = self.peek()
            told = f"found {found!r}" if found else "the text ends"
            raise self.fail(f"expected {mark!r} {after}, but {told}")

    def match(self, pattern: re.Pattern[str]) -> str:
        self.skip()
        match = pattern.match(self.text, self.at)
        if match is None:
            return ""
        self.at = match.end()
        return match.group()

    # --- numbers -------------------------------------------------------------------------------------------------

    def number(self, what: str) -> int | float:
        self.skip()
        start = self.at
        text = self.match(_NUMBER)
        if not text:
            raise self.fail(f"expected {what}")
        # "0..5" is a range: the number ends before the first of two points.
        if text.endswith(".") and self.text.startswith(".", self.at):
            self.at -= 1
            text = text[:-1]
        try:
            value = int(text) if re.fullmatch(r"[+-]?[\d_]+", text) else float(text)
        except ValueError as error:
            raise self.fail(f"{text!r} is no number", start) from error
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            raise self.fail(f"{text} is too large for a float", start)
        return value

    def whole(self, what: str) -> int:
        self.skip()
        start = self.at
        value = self.number(what)
        if not isinstance(value, int) or value < 0:
            raise self.fail(f"{what} must be a whole number that is not negative", start)
        return value

    def wholes(self, end: str, what: str) -> tuple[int, ...]:
        found: list[int] = []
        while not self.take(end):
            if found:
                self.expect(",", f"or {end!r} after {what}")
                if self.take(end):
                    break
            found.append(self.whole(what))
        return tuple(found)

    # --- values --------------------------------------------------------------------------------------------------

    def value(self) -> Argument:
        mark = self.peek()
        if self.depth >= MAX_NESTING:
            raise self.fail(f"nested deeper than {MAX_NESTING} levels")
        if mark in "([{" and mark:
            self.at += 1
            self.depth += 1
            found = self.mapping() if mark == "{" else self.series(")" if mark == "(" else "]")
            self.depth -= 1
            return found
        if mark in "\"'" and mark:
            return Scalar(self.quoted())
        if _NUMBER.match(self.text, self.at):
            return Scalar(self.number("a number"))
        start = self.at
        word = self.match(_WORD)
        if not word:
            raise self.fail("expected a value" + (f", found {mark!r}" if mark else ", but the text ends"))
        if self.text.startswith("[", self.at):
            return self.tensor(word, start)
        if word.lower() in _CONSTANTS:
            return Scalar(_CONSTANTS[word.lower()])
        if word in DTYPES or word in LONG_NAMES:
            raise self.fail(
                f"{word} needs a shape", advice=f"{word}[128,1024], or {word}[] for a tensor without dimensions"
            )
        raise self.fail(f"{word} is neither a number nor a tensor", start, f'text needs quotes: "{word}"')

    def quoted(self) -> str:
        start = self.at
        raw = self.match(_QUOTED)
        if not raw:
            raise self.fail("the quoted text has no end", start)
        body = raw if raw[0] == '"' else '"' + raw[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
        try:
            return str(json.loads(body, strict=False))
        except ValueError as error:
            raise self.fail("the quoted text has a bad escape", start) from error

    def series(self, end: str) -> Nested:
        items: list[Argument] = []
        while not self.take(end):
            if items:
                self.expect(",", f"or {end!r} after a value")
                if self.take(end):
                    break
            items.append(self.value())
        return Nested("tuple" if end == ")" else "list", tuple(items))

    def mapping(self) -> Nested:
        keys: list[str] = []
        items: list[Argument] = []
        while not self.take("}"):
            if keys:
                self.expect(",", "or '}' after a value")
                if self.take("}"):
                    break
            start = self.at
            key = self.quoted() if self.peek() in ("'", '"') else self.match(_WORD)
            if not key and not self.text[start : self.at].strip():
                raise self.fail("expected a key", advice="a dict is written {a: f32[2], b: 3}")
            if key in keys:
                raise self.fail(f"the key {key!r} stands twice", start)
            self.expect(":", f"after the key {key!r}")
            keys.append(key)
            items.append(self.value())
        return Nested("dict", tuple(items), tuple(keys))

    # --- tensors -------------------------------------------------------------------------------------------------

    def tensor(self, word: str, start: int) -> TensorSpec:
        dtype = DTYPES.get(word) or LONG_NAMES.get(word)
        if dtype is None:
            near = did_you_mean(word, [*DTYPES, *LONG_NAMES])
            raise self.fail(f"unknown dtype {word!r}", start, near or f"dtypes: {', '.join(DTYPES)}")
        self.expect("[", "after the dtype")
        shape = self.wholes("]", "a dimension")
        if len(shape) > MAX_RANK:
            raise self.fail(f"more than {MAX_RANK} dimensions", start)
        found: dict[str, Any] = {"shape": shape, "dtype": dtype}
        found["fill"] = "bernoulli" if dtype == "bool" else "normal"
        if self.text.startswith("{", self.at):
            self.range(found)
        while self.take(":"):
            self.suffix(found)
        if is_integer(dtype) and found["fill"] == "normal":
            example = f"{SHORT_NAMES[dtype]}[{','.join(map(str, shape))}]{{0..100}}"
            raise self.fail("an integer tensor needs the range of its values", advice=f"{example} draws from 0 to 99")
        return TensorSpec(**found)

    def range(self, found: dict[str, Any]) -> None:
        start = self.at
        self.expect("{", "before a range")
        low = self.number("the lowest value")
        self.expect("..", "between the lowest value and the end of the range")
        high = self.number("the end of the range")
        self.expect("}", "after the range")
        if found["dtype"] == "bool" or found["dtype"].startswith("complex"):
            raise self.fail(f"{found['dtype']} tensors have no range", start)
        if is_integer(found["dtype"]):
            if not (isinstance(low, int) and isinstance(high, int)):
                raise self.fail("the range of an integer tensor has whole ends", start)
            found["fill"] = "integers"
        else:
            found["fill"] = "uniform"
        if low >= high:
            raise self.fail("the range is empty: its end does not belong to it", start)
        found["low"], found["high"] = float(low), float(high)

    def suffix(self, found: dict[str, Any]) -> None:
        start = self.at
        word = self.match(_WORD)
        rank = len(found["shape"])
        if word == "grad":
            if is_integer(found["dtype"]) or found["dtype"] == "bool":
                raise self.fail("only floating tensors have gradients", start)
            found["requires_grad"] = True
        elif word in LAYOUTS:
            if rank != RANKS[word]:
                raise self.fail(f"{word} needs {RANKS[word]} dimensions, not {rank}", start)
            found["layout"] = word
        elif word in FILLS:
            found["fill"] = word
        elif word == "strides":
            self.expect("(", "after 'strides'")
            strides = self.wholes(")", "a stride")
            if len(strides) != rank:
                raise self.fail(f"{len(strides)} strides for {rank} dimensions", start)
            found["strides"] = strides
        else:
            raise self.fail(f"unknown suffix {word!r}", start, did_you_mean(word, SUFFIXES) or ", ".join(SUFFIXES))
        if "strides" in found and "layout" in found:
            raise self.fail("strides and a memory format exclude each other", start)


def is_integer(dtype: str) -> bool:
    """Whether a torch dtype name is an integer's."""
    return dtype.startswith(("int", "uint"))


def parse_arguments(texts: Sequence[str], option: str = "--input") -> Call:
    """Parse the texts given to ``--input`` or ``--init`` (each may hold several arguments) into one call.

    Raises:
        UsageError: with the text and a caret at the fault.
    """
    args: list[Argument] = []
    kwargs: dict[str, Argument] = {}
    for text in texts:
        reader = _Reader(text, option)
        if not reader.peek():
            raise reader.fail("the argument is empty")
        while True:
            start = reader.at
            name = _named(reader)
            value = reader.value()
            if name in kwargs:
                raise reader.fail(f"{name} is given twice", start)
            if name:
                kwargs[name] = value
            elif kwargs and len(texts) == 1:
                raise reader.fail("an argument without a name follows one with a name", start)
            else:
                args.append(value)
            if not reader.peek():
                break
            reader.expect(",", "between arguments")
            if not reader.peek():
                break
    return Call(tuple(args), kwargs)


def _named(reader: _Reader) -> str:
    start = reader.at
    word = reader.match(_WORD)
    if word and reader.take("="):
        return word
    reader.at = start
    return ""


def parse_argument(text: str, option: str = "--input") -> Argument:
    """Parse one value without a name.

    Raises:
        UsageError: malformed, or followed by anything else.
    """
    reader = _Reader(text, option)
    value = reader.value()
    if reader.peek():
        raise reader.fail("unexpected text after the value")
    return value


# --- the inverse -------------------------------------------------------------------------------------------------


def format_argument(argument: Argument) -> str:
    """Return the text that :func:`parse_argument` reads as ``argument``; ``<captured NAME>`` for captured tensors."""
    if isinstance(argument, TensorSpec):
        return _format_tensor(argument)
    if isinstance(argument, Scalar):
        return _format_scalar(argument.value)
    if isinstance(argument, CapturedTensor):
        return f"<captured {argument.name}>"
    inner = [format_argument(item) for item in argument.items]
    if argument.form == "dict":
        pairs = zip(argument.keys, inner, strict=True)
        return "{" + ", ".join(f"{_format_key(key)}: {text}" for key, text in pairs) + "}"
    return f"({', '.join(inner)})" if argument.form == "tuple" else f"[{', '.join(inner)}]"


def _format_key(key: str) -> str:
    return key if _WORD.fullmatch(key) else json.dumps(key)


def _format_scalar(value: bool | int | float | str | None) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _format_tensor(spec: TensorSpec) -> str:
    text = f"{SHORT_NAMES.get(spec.dtype, spec.dtype)}[{','.join(map(str, spec.shape))}]"
    if spec.fill in ("uniform", "integers") and spec.low is not None and spec.high is not None:
        whole = spec.fill == "integers"
        low, high = (str(int(end)) if whole else repr(end) for end in (spec.low, spec.high))
        text += f"{{{low}..{high}}}"
    if spec.layout != "contiguous":
        text += f":{spec.layout}"
    if spec.fill in FILLS:
        text += f":{spec.fill}"
    if spec.strides is not None:
        text += f":strides({','.join(map(str, spec.strides))})"
    return text + (":grad" if spec.requires_grad else "")


def format_call(call: Call) -> list[str]:
    """Return one ``NAME=VALUE`` or ``VALUE`` text for each argument, positional ones first."""
    named = [f"{name}={format_argument(value)}" for name, value in call.kwargs.items()]
    return [*(format_argument(value) for value in call.args), *named]
