from __future__ import annotations

import pytest

from drk.assistant.verified_source import same_code

BEFORE = '''"""Doc."""
import torch
from torch import nn

torch.set_float32_matmul_precision("high")
SCALE = 2.0
OTHER = 3


def gain(x):
    return x * SCALE


class Net(nn.Module):
    def forward(self, x):
        return gain(x)


class Unused(nn.Module):
    pass


if __name__ == "__main__":
    print(Net())
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Doc."""', '"""Another."""\n# a comment'),
        ("OTHER = 3", "OTHER = 4"),
        ("    pass", "    x = 1"),
        ("print(Net())", "print(1)"),
        ("return x * SCALE", "return (x  *  SCALE)  # scaled"),
        ("class Unused", "def more():\n    return 1\n\n\nclass Unused"),
    ],
)
def test_edits_elsewhere_do_not_matter(old: str, new: str) -> None:
    assert same_code(BEFORE.encode(), BEFORE.replace(old, new).encode(), "Net")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return gain(x)", "return gain(x) + 1"),
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("return x * SCALE", "return x + SCALE"),
        ('"high"', '"highest"'),
        ("from torch import nn", "import other as nn"),
        ("class Net", "class Not"),
        ("SCALE = 2.0", "SCALE = 2.0\ntry:\n    import fast as gain\nexcept ImportError:\n    pass"),
        ("OTHER = 3", "from somewhere import *"),
        ("class Net", "clas Net"),
    ],
)
def test_edits_of_what_the_target_uses_matter(old: str, new: str) -> None:
    after = BEFORE.replace(old, new)
    assert after != BEFORE
    assert not same_code(BEFORE.encode(), after.encode(), "Net")


def test_encoding_and_newlines_do_not_matter() -> None:
    text = BEFORE.replace("\n", "\r\n")
    assert same_code(BEFORE.encode(), b"\xef\xbb\xbf" + text.encode(), "Net")
    assert not same_code(BEFORE.encode(), b"# coding: nonsense\n", "Net")
