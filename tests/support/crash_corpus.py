"""Candidates that end badly, each with the verdict it must get: (name, source, status, stage, kind)."""

from __future__ import annotations

HEAD = """import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, *args):
        super().__init__()
"""
CONSTRUCTOR_RAISES = """from torch import nn
class ModelNew(nn.Module):
    def __init__(self, *args):
        raise RuntimeError("no")
"""
IS_SOCKET = """import os, stat


def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


"""


def forward(body: str) -> str:
    """Return a candidate whose forward is ``body`` (lines are indented)."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return f"{HEAD}\n    def forward(self, x):\n{lines}"


RIGHT = forward("return torch.relu(x) * 2")

CASES: list[tuple[str, str, str, str, str]] = [
    ("empty", "", "failed", "parse", "empty"),
    ("binary", "\x00\x01\x02", "failed", "parse", "syntax-error"),
    ("syntax", "class ModelNew(:\n", "failed", "parse", "syntax-error"),
    ("nesting", "x = " + "(" * 5000 + ")" * 5000, "failed", "parse", "syntax-error"),
    ("no-modelnew", "x = 1\n", "failed", "load", "no-modelnew"),
    ("not-a-class", "ModelNew = 3\n", "failed", "load", "not-a-class"),
    ("not-a-module", "class ModelNew:\n    pass\n", "failed", "load", "not-a-module"),
    ("import-raises", "raise ValueError('at import')\n", "failed", "load", "import-raised"),
    ("missing-import", "import not_there_at_all\n", "failed", "load", "missing-module"),
    ("import-exits", "import sys\nsys.exit(0)\n", "failed", "load", "exit"),
    ("import-os-exit", "import os\nos._exit(0)\n", "failed", "load", "early-exit"),
    ("import-hangs", "while True:\n    pass\n", "failed", "load", "timeout"),
    (
        "constructor-raises",
        CONSTRUCTOR_RAISES,
        "failed",
        "load",
        "constructor-raised",
    ),
    ("raises", forward("raise KeyError('inside')"), "failed", "run", "exception"),
    ("wrong-signature", forward("pass").replace("self, x", "self"), "failed", "run", "exception"),
    ("exits", forward("import os\nos._exit(3)"), "failed", "run", "early-exit"),
    ("sys-exits", forward("import sys\nsys.exit(3)"), "failed", "run", "exit"),
    ("segfaults", forward("import ctypes\nctypes.string_at(0)"), "failed", "run", "segfault"),
    ("aborts", forward("import os\nos.abort()"), "failed", "run", "signal"),
    ("kills-itself", forward("import os\nos.kill(os.getpid(), 9)"), "failed", "run", "signal"),
    ("hangs", forward("while True:\n    pass"), "failed", "run", "timeout"),
    ("sleeps", forward("import time\ntime.sleep(3600)"), "failed", "run", "timeout"),
    ("recurses", forward("return self.forward(x)"), "failed", "run", "recursion"),
    (
        "memory",
        forward("kept = []\nwhile True:\n    kept.append(torch.ones(2**24))"),
        "failed",
        "run",
        "out-of-memory",
    ),
    (
        "disk",
        forward("n = 0\nwhile True:\n    open(f'flood{n}', 'wb').write(b'x' * 2**24)\n    n += 1"),
        "failed",
        "run",
        "disk-flood",
    ),
    (
        "garbage-on-channel",
        IS_SOCKET + forward("[os.write(fd, b'\\xff' * 64) for fd in range(3, 20) if is_socket(fd)]\nreturn x"),
        "failed",
        "run",
        "protocol",
    ),
    ("returns-none", forward("return None"), "rejected", "check", "wrong-output"),
    ("returns-list", forward("return [x]"), "rejected", "check", "wrong-output"),
    ("returns-numpy", forward("return x.cpu().numpy()"), "rejected", "check", "wrong-output"),
    ("numpy-on-the-device", forward("return x.numpy()"), "failed", "run", "exception"),
    ("wrong-shape", forward("return x[:1]"), "rejected", "check", "wrong-output"),
    ("wrong-dtype", forward("return (torch.relu(x) * 2).double()"), "rejected", "check", "wrong-output"),
    ("wrong-values", forward("return torch.relu(x)"), "rejected", "check", "wrong-output"),
    ("nan", forward("return torch.relu(x) * float('nan')"), "rejected", "check", "wrong-output"),
    ("changes-input", forward("y = torch.relu(x) * 2\nx.zero_()\nreturn y"), "rejected", "check", "wrong-output"),
    (
        "prints-a-flood",
        forward("[print('x' * 1000) for _ in range(3000)]\nreturn torch.relu(x) * 2"),
        "accepted",
        "",
        "",
    ),
    ("fakes-json-on-stdout", forward("print('{\"ok\": true}')\nreturn torch.relu(x) * 2"), "accepted", "", ""),
    ("right", RIGHT, "accepted", "", ""),
]
