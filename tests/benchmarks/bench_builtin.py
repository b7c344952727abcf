"""Rough timing of the builtin proposer's variants against eager PyTorch and torch.compile, on a CUDA machine.

    python tests/benchmarks/bench_builtin.py docs/examples/linear_gelu.py docs/examples/transformer_mlp.py
    python tests/benchmarks/bench_builtin.py tests/fixtures/problems/level2 --limit 3 --workers 12 --out suite.json

Files are in benchmark form (``Model``, ``get_inputs``, ``get_init_inputs``) or define one ``nn.Module`` and
``example_inputs``; folders mean their files. Each file has a process of its own: what compiles runs side by side, what
is timed holds a lock. Every form gets three times in microseconds: ``event`` (CUDA events around calls in a row),
``host`` (what the calls take to be enqueued while the device is busy) and ``device`` (the sum of its kernels by the
profiler), so that one sees at once whether kernels or launches lose. Good for tuning, no evidence: other processes
compile meanwhile and nothing is hidden from the candidate (that is what ``drk verify`` is for).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fcntl
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import nn

from drk.assistant.synth import BuiltinProposer
from drk.gym.devices import device_facts
from drk.gym.graph import graph_from_json
from drk.gym.runner.capture import capture

CALLS = 20
BUSY_CYCLES = 20_000_000
TOP_KERNELS = 12


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def reference_of(path):
    """The file's module, built, and its example inputs, on the GPU."""
    module = load(path, f"reference_{path.stem}")
    if hasattr(module, "get_inputs"):
        built, inputs = module.Model(*module.get_init_inputs()), module.get_inputs()
    else:
        classes = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, nn.Module)]
        own = [item for item in classes if item.__module__ == module.__name__]
        built, inputs = own[-1](), module.example_inputs()
    on_gpu = [item.cuda() if isinstance(item, torch.Tensor) else item for item in inputs]
    return built.cuda().eval(), on_gpu


@contextlib.contextmanager
def alone(lock):
    """Hold the GPU against the other processes of this benchmark."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def event_us(call):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(60_000)
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS * 1e3


def host_us(call):
    torch.cuda._sleep(BUSY_CYCLES)
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent / CALLS * 1e6


def kernels(call, runs=3):
    """Rows of (name, device microseconds a call, launches a call), longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    rows = [
        (event.key[:120], event.self_device_time_total / runs, event.count / runs) for event in profiler.key_averages()
    ]
    return sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])


def measured(call, lock, pairs):
    """The three times of a form that was called before."""
    with alone(lock):
        call()
        torch.cuda.synchronize()
        events = [event_us(call) for _ in range(pairs)]
        hosts = [host_us(call) for _ in range(3)]
        rows = kernels(call)
    return {
        "event_us": statistics.median(events), "host_us": min(hosts), "device_us": sum(row[1] for row in rows),
        "launches": sum(row[2] for row in rows), "kernels": rows[:TOP_KERNELS],
    }  # fmt: skip


def error_ratio(reference, candidate, inputs):
    truth = copy.deepcopy(reference).double()(*(item.double() for item in inputs))
    spread = [(call(*inputs).double() - truth).square().mean().sqrt().item() for call in (candidate, reference)]
    return spread[0] / max(spread[1], 1e-30)


def bench(path, options):
    """The measured forms of one file."""
    torch.manual_seed(0)
    with torch.no_grad():
        reference, inputs = reference_of(path)
        graph = graph_from_json(capture(reference, inputs))
        forms = {"eager": lambda: reference(*inputs)}
        if options.compile:
            compiled = torch.compile(reference)
            forms["compile"] = lambda: compiled(*inputs)
        kernels(forms["eager"], runs=1)  # the profiler's first start takes seconds, which need no lock
        found = {"file": path.stem, "level": path.parent.name, "forms": {}, "candidates": []}
        for name, call in forms.items():
            call()
            found["forms"][name] = measured(call, options.lock, options.pairs)
        proposals = BuiltinProposer().propose(
            graph, hardware=device_facts(torch.cuda.get_device_name()), limit=options.limit
        )
        for index, proposal in enumerate(proposals):
            found["candidates"].append(_candidate(path, index, proposal, reference, inputs, options))
    return found


def _candidate(path, index, proposal, reference, inputs, options):
    row = {"note": proposal.note}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"candidate_{index}.py"
        file.write_text(proposal.source)
        try:
            candidate = load(file, f"{path.stem}_{index}").ModelNew().cuda().eval()
            candidate.load_state_dict(reference.state_dict())
            for _ in range(2):
                candidate(*inputs)
            row |= measured(lambda: candidate(*inputs), options.lock, options.pairs)
            if options.errors:
                row["error_ratio"] = error_ratio(reference, candidate, inputs)
        except Exception as failure:  # noqa: BLE001 - one bad proposal must not end the table
            row["failed"] = f"{type(failure).__name__}: {str(failure)[:200]}"
    return row


def show(found):
    """Print a file's lines."""
    bases = found["forms"]
    print(f"{found['level']}/{found['file']}")
    fastest = min(one["event_us"] for one in bases.values())
    rows = [(name, one) for name, one in bases.items()] + [(one["note"], one) for one in found["candidates"]]
    for name, one in rows:
        if "failed" in one:
            print(f"  failed: {one['failed'][:110]}  {name[:60]}")
            continue
        times = f"event {one['event_us']:9.1f}  device {one['device_us']:9.1f}  host {one['host_us']:8.1f}"
        print(f"  {fastest / one['event_us']:5.2f}x  {times}  launches {one['launches']:4.0f}  {name[:70]}", flush=True)


def files_of(paths):
    """The files that the arguments mean."""
    found = []
    for path in paths:
        found += sorted(path.rglob("[0-9]*.py")) if path.is_dir() else [path]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=4, help="Candidates a file.")
    parser.add_argument("--pairs", type=int, default=7, help="Event times a form.")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--errors", action="store_true", help="Errors beside those of eager, against float64.")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--out", type=Path, help="JSON with every form's kernels; written after each file.")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    with tempfile.TemporaryDirectory() as folder:
        options.lock = Path(folder) / "gpu.lock"
        # A process for each file: compilers and caches of one do not slow the next one down.
        with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
            done, jobs = [], {pool.submit(bench, path, options): path for path in files_of(options.files)}
            for job in as_completed(jobs):
                if job.exception() is not None:
                    print(f"{jobs[job].stem} failed: {str(job.exception())[:200]}", flush=True)
                    continue
                done.append(job.result())
                show(done[-1])
                if options.out is not None:
                    options.out.write_text(json.dumps(done, indent=1) + "\n")


if __name__ == "__main__":
    main()
