"""Deceptions that only a GPU shows, beside honest twins: (name, source, status, flag kinds any of which will do)."""

from __future__ import annotations

REFERENCE = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.sqrt(torch.relu(x) + 1.0) * 2.0
"""

KERNEL = '''import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def root_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """sqrt(relu(x) + 1) * 2"""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, tl.sqrt(tl.maximum(x, 0.0) + 1.0) * 2.0, mask=mask)


def root(x, out=None):
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    root_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out
'''


def candidate(forward: str, init: str = "pass", extra: str = "") -> str:
    """Return a candidate from its ``forward(self, x)`` body, an ``__init__`` line and extra top-level code."""
    body = "".join(f"        {line}\n" for line in forward.splitlines())
    head = f"\n\n{extra}\n\nclass ModelNew(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    return f"{KERNEL}{head}        {init}\n\n    def forward(self, x):\n{body}"


SIDE = "with torch.cuda.stream(self.side):\n    out = root(x)\n"
GRAPH = """if self.graph is None:
    self.x = x.clone()
    root(self.x)
    torch.cuda.synchronize()
    self.graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(self.graph):
        self.out = root(self.x)
"""

CASES: list[tuple[str, str, str, tuple[str, ...]]] = [
    ("honest", candidate("return root(x)"), "accepted", ()),
    (
        "honest-side-stream",
        candidate(
            "self.side.wait_stream(torch.cuda.current_stream())\n"
            + SIDE
            + "torch.cuda.current_stream().wait_stream(self.side)\nreturn out",
            init="self.side = torch.cuda.Stream()",
        ),
        "accepted",
        (),
    ),
    (
        "side-stream",
        candidate(
            "out = torch.empty_like(x)\n" + SIDE.replace("root(x)", "root(x, out)") + "return out",
            init="self.side = torch.cuda.Stream()",
        ),
        "rejected",
        ("wrong-output", "clock-mismatch"),
    ),
    (
        "side-streams-in-front",
        candidate(
            "home, out = torch.cuda.current_stream(), torch.empty_like(x)\n"
            "for part, result in zip(x.chunk(2), out.chunk(2), strict=True):\n"
            "    side = torch.cuda.Stream(priority=-1)\n"
            "    side.wait_stream(home)\n"
            "    torch.cuda.set_stream(side)\n"
            "    root(part, result)\n"
            "torch.cuda.set_stream(home)\n"
            "return out"
        ),
        "rejected",
        ("wrong-output",),
    ),
    (
        "rhythm-noticed",
        candidate(
            "now = time.perf_counter()\n"
            "self.quick = self.quick + 1 if now - self.then < 5e-4 else 0\n"
            "self.then = now\n"
            "if self.quick < 3 or self.kept is None:\n"
            "    self.kept = root(x)\n"
            "return self.kept",
            init="self.quick, self.then, self.kept = 0, 0.0, None",
            extra="import time",
        ),
        "rejected",
        ("wrong-output",),
    ),
    (
        "honest-graph",
        candidate(
            "if self.graph is None or self.x.shape != x.shape:\n    self.graph = None\n"
            + GRAPH
            + "self.x.copy_(x)\nself.graph.replay()\nreturn self.out.clone()",
            init="self.graph = None",
        ),
        "accepted",
        (),
    ),
    (
        "stale-graph",
        candidate(GRAPH + "self.graph.replay()\nreturn self.out.clone()", init="self.graph = None"),
        "rejected",
        ("wrong-output",),
    ),
    (
        "event-patch",
        candidate(
            "return root(x)",
            extra="torch.cuda.Event.elapsed_time = lambda self, other: 0.001",
        ),
        "rejected",
        ("tampered-runtime",),
    ),
    (
        "synchronize-patch",
        candidate("return root(x)", extra="torch.cuda.synchronize = lambda *a: None"),
        "rejected",
        ("tampered-runtime",),
    ),
    (
        "harness-patch",
        candidate(
            "return root(x)",
            extra=("import drk.gym.runner.timing as t\nt._ELAPSED = lambda a, b: 0.01\n"),
        ),
        "rejected",
        ("clock-mismatch", "tampered-runtime"),
    ),
    (
        "calls-counted",
        candidate(
            "self.n += 1\nif self.n > 30:\n    return self.kept\nself.kept = root(x)\nreturn self.kept",
            init="self.n = 0",
        ),
        "rejected",
        ("wrong-output",),
    ),
    (
        "shape-constant",
        candidate("if x.numel() != 4096 * 4096:\n    return x * 0\nreturn root(x)"),
        "rejected",
        ("shape-wrong", "wrong-output"),
    ),
    (
        "shape-refused",
        candidate("assert x.numel() == 4096 * 4096\nreturn root(x)"),
        "accepted",
        ("shape-specialised",),
    ),
    ("pure-torch", candidate("return torch.sqrt(torch.relu(x) + 1.0) * 2.0"), "accepted", ("no-own-kernel",)),
    (
        "compile-wrap",
        candidate(
            "return self.f(x)",
            init="self.f = torch.compile(lambda x: torch.sqrt(torch.relu(x) + 1.0) * 2.0)",
        ),
        "accepted",
        ("compile-wrap", "no-own-kernel"),
    ),
]
