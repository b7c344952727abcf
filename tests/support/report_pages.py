"""Report pages for tests: a profile of a GPU with as many kernels as asked for, a finished run, hostile names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from profile_events import gpu_events, recording

from drk.assistant.profile_build import Asked, build_report
from drk.assistant.profile_trace import analyse
from drk.assistant.report import Figure, Method, PartRow, Place, Report, TimelineSpan
from drk.assistant.report_page import Excerpt, Page, RunReport, TurnRow
from drk.gym.schema import Cell, Flag, Interval, KernelRow, Latency, Speedups, Verdict

HOSTILE = "</script><img src=http://evil.example/x onerror=document.title='owned'>\"'&"


def gpu_report(**changes) -> Report:
    method = Method("command", "device", 0, command="python train.py --steps 20")
    told = recording(environment={"device": "NVIDIA H200", "torch": "2.13.0", "threads": 8, "python": "3.11.7"})
    report = build_report(
        told, analyse(gpu_events(6), 0), Asked("20260101T120000Z-net", "net", Path("/project"), method)
    )
    return replace(report, **changes)


def cpu_report() -> Report:
    events = [event for event in gpu_events(6) if event["cat"] == "cpu_op"]
    told = recording(environment={"device": "cpu", "torch": "2.13.0"})
    method = Method("command", "cpu", 0, command="python train.py")
    return build_report(
        told, analyse(events, 0), Asked("20260101T110000Z-net", "net", Path("/project"), method, "h100")
    )


def wide_report(kernels: int = 40, name: str = "") -> Report:
    """A report with that many kernel rows and modules, each with per-step times; ``name`` goes into every text."""
    base = gpu_report()
    first, module = base.kernels[0], base.modules[0]
    rows, modules = [], []
    for number in range(kernels):
        share = 0.4 / (number + 1)
        times = replace(first.times, share=share, total_us=share * base.total_us, calls=number + 6)
        times = replace(times, per_step_us=tuple(10.123456789 + step / 7 for step in range(60)))
        work = replace(
            first.work,
            size_bytes=Figure(2e6 * (number + 1), "estimated"),
            flops=Figure(10.0 ** (5 + number % 7), "estimated"),
        )
        place = Place(f"blocks/layer_{number}{name}.py", 10 + number, 40, 5, "Block.forward", "0" * 16)
        label = f"triton_poi_fused_add_mul_relu_{number}{name}<float, at::native::Functor<{number}>>(int, float*)"
        rows.append(
            replace(
                first,
                name=label,
                times=times,
                work=work,
                place=place,
                module=f"Net.blocks.{number}{name}",
                op=f"aten::op{number}",
            )
        )
        modules.append(
            replace(
                module,
                name=f"Net.blocks.{number}{name}",
                path=f"blocks.{number}",
                times=times,
                place=place,
                depth=number % 5,
            )
        )
    spans = [
        TimelineSpan(
            "device" if number % 2 else "module", f"span {number}{name}", number * 3.0, 0.1 + number % 9, number % 3
        )
        for number in range(600)
    ]
    return replace(
        base,
        kernels=tuple(rows),
        modules=tuple(modules),
        parts=(PartRow(f"AdamW.step{name}", first.times, first.place), PartRow(f"main{name}", first.times)),
        timeline=tuple(spans),
        title=f"net{name}",
        verdict=f"87 % of 4.2 ms is in 3 kernels{name}",
    )


def measured_verdict() -> Verdict:
    return Verdict(
        status="accepted",
        evidence="gpu",
        reached="measured",
        correct=True,
        honest=True,
        flags=(Flag("library-matmul", "delegation", "label", "census"),),
        speedups=Speedups(Interval(2.4, 2.31, 2.5, 40), Interval(1.53, 1.47, 1.6, 40)),
        headline="compile",
        latency_ms=Latency(0.412, 0.405, 0.42),
        baselines_ms={"eager": Latency(0.99, 0.97, 1.02), "compile": Latency(0.63, 0.62, 0.65)},
        coverage=0.93,
        kernels=(KernelRow("scaled_silu_kernel", True, 1, 380.0, 0.93, (64,), 4, 2, 32, 0, 1024),),
        cells=tuple(Cell(f"seed {n}, eval", True, "", 1e-7 * n, 3e-7 * n, 1e-7, 2e-7, 9e-7, 4e-6) for n in range(1, 6)),
        environment={"gpu": "NVIDIA H200", "torch": "2.13.0", "triton": "3.7.0"},
        weights="copied",
    )


def run_page(name: str = "") -> RunReport:
    turns = (
        TurnRow(1, 0, "failed", False, "builtin", f"tiled{name}", None, "compile: out of shared memory", 2.0),
        TurnRow(1, 1, "accepted", True, "builtin", "one kernel", Interval(1.2, 1.15, 1.26, 40), "", 3.0),
        TurnRow(2, 0, "accepted", True, "builtin", "wider tiles", Interval(1.53, 1.47, 1.6, 40), "", 3.1),
        TurnRow(3, 0, "rejected", False, "builtin", "fewer warps", None, "check: mismatch", 2.2),
    )
    return RunReport(
        name="20260101T130000Z-net",
        target=f"model.py:Net{name}",
        status="optimised",
        reason="1.53x over compile (95 % interval 1.47 to 1.60)",
        verdict=measured_verdict(),
        turns=turns,
        diff="--- a/model.py\n+++ b/model.py\n@@ -1,3 +1,5 @@\n import torch\n"
        "+from model_kernels import optimized\n \n+@optimized\n class Net(nn.Module):\n",
        code="import torch\n\nx = 1 < 2 & 3\n" * 20,
        explanation=("try: nothing more",),
        spending="3 model calls, 1000 + 200 tokens",
    )


def full_page(name: str = "") -> Page:
    lines = tuple(f"    x{n} = torch.relu(x{n - 1})  # {name}" for n in range(1, 12))
    excerpt = Excerpt(f"Net.forward{name}: 40.0 % of the time", f"net{name}.py", 20, 24, lines)
    return Page(wide_report(name=name), run_page(name), (excerpt,))
