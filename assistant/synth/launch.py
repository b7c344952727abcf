"""What emitted files hold so that a launch costs the host little: the text of :mod:`~.launch_template`.

Every kernel that is launched stands under ``@Launch``. Writers name Triton's ``cdiv`` and ``next_power_of_2`` in
launchers as anybody would; :func:`host_arithmetic` puts plain functions of the file in their place, and
:func:`shapes_once` reads shapes that are asked for again and again.

Left out: what a launch costs beyond that (allocation, strides).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

DECORATOR = "@Launch\n"
"""Stands above ``@triton.jit`` of kernels that are launched, not above that of device functions."""
NAMES = ("Launch", "ceil_div", "power_of_2")
"""What the emitted text may define."""
OFTEN = 3
"""From so many readings on a shape gets a name."""
_PLAIN = {"triton.cdiv(": "ceil_div(", "triton.next_power_of_2(": "power_of_2("}


def host_arithmetic(text: str) -> str:
    """Return a launcher's text with the file's own functions for Triton's, which cost the host 3 us a call and more."""
    for slow, plain in _PLAIN.items():
        text = text.replace(slow, plain)
    return text


def shapes_once(lines: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """Return a launcher's lines with each tensor's shape read once, where it is read often.

    A shape is read after the tensor was laid out; torch makes a new object each time.
    """
    found = list(lines)
    for name in parameters:
        read = re.compile(rf"\b{name}\.shape(?=\[-?\d+\])")
        using = [index for index, line in enumerate(found) if read.search(line)]
        first = max((index + 1 for index, line in enumerate(found) if line.startswith(f"{name} = ")), default=0)
        taken = re.search(rf"\b{name}_shape\b", "\n".join([*found, *parameters]))
        if taken or sum(len(read.findall(line)) for line in found) < OFTEN or using[0] < first:
            continue
        found = [read.sub(f"{name}_shape", line) for line in found]
        found.insert(first, f"{name}_shape = {name}.shape")
    return found


def launch_parts(texts: Iterable[str]) -> list[str]:
    """Return the source of each class and function that ``texts`` name, in a fixed order."""
    used = "\n".join(texts)
    return [text for name, text in _definitions().items() if re.search(rf"@{name}\b|\b{name}\(", used)]


def without_launch(source: str) -> str:
    """Return an emitted file as Triton's documentation would write it: its own launches and arithmetic."""
    for text in _definitions().values():
        source = source.replace(f"{text}\n\n", "")
    for slow, plain in _PLAIN.items():
        source = re.sub(rf"\b{re.escape(plain)}", slow, source)
    return source.replace(DECORATOR, "")


@functools.cache
def _definitions() -> dict[str, str]:
    text = Path(__file__).with_name("launch_template.py").read_text(encoding="utf-8")
    text = re.split(r"^# --- drk launch -+\n", text, maxsplit=1, flags=re.MULTILINE)[1]
    text = re.sub(r"  # type: ignore\[[^\]]*\]", "", text).strip()
    return dict(zip(NAMES, (f"{part}\n" for part in text.split("\n\n\n")), strict=True))
