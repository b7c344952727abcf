"""What the builtin proposer's first proposal does with every problem of a folder: captured, fused, compiled, correct.

    python tests/benchmarks/bench_coverage.py tests/fixtures/problems --out coverage
    TRITON_INTERPRET=1 python tests/benchmarks/bench_coverage.py tests/fixtures/problems --out coverage

The first form needs no data: reference and candidate run on the meta device, launches are compiled for ``--target`` at
the problem's full size. It prints one line per problem: launches, torch operators left, estimated share of
 the roofline time that the kernels take, registers and spills, and what failed. The second form runs the candidate
under Triton's interpreter at reduced sizes and holds it against float64. Results are kept in ``--out`` by the
candidate's text: what has not changed is not done again. Speeds are not measured here.
"""

import argparse
import copy
import hashlib
import importlib.util
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from drk.assistant.synth.propose import BuiltinProposer
from drk.gym.coverage_estimate import DEFAULT_PEAK_TFLOPS
from drk.gym.graph import graph_from_json
from drk.gym.graph_cost import VIEWS
from drk.gym.runner.capture import capture

BANDWIDTH_GBS = 4800.0
ELEMENTS = 40_000


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def reference_of(path, device):
    """The problem's module in eval mode and its inputs, on ``device``."""
    module = load(path, f"problem_{path.parent.name}_{path.stem}")
    torch.manual_seed(0)
    with torch.device(device):
        if hasattr(module, "get_init_inputs"):
            return module.Model(*module.get_init_inputs()).eval(), list(module.get_inputs())
        classes = [item for item in vars(module).values() if isinstance(item, type)]
        own = [c for c in classes if issubclass(c, torch.nn.Module) and c.__module__ == module.__name__]
        return own[-1]().eval(), list(module.example_inputs())


def graph_at(path):
    reference, inputs = reference_of(path, "meta")
    with torch.no_grad():
        return graph_from_json(json.loads(json.dumps(capture(reference, inputs))))


def static_check(path, source, target):
    """Compile all launches at full size on the meta device; rows of the kernels and the torch operators that ran."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from drk.gym.graph import TensorMeta
    from drk.gym.graph_cost import operator_cost
    from drk.gym.runner.stub_driver import compile_for

    left = {}

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            if not func.is_view and name not in VIEWS | {"empty", "empty_like", "empty_strided"}:
                flat = torch.utils._pytree.tree_leaves
                metas = [
                    [
                        TensorMeta(tuple(t.shape), str(t.dtype).removeprefix("torch."), tuple(t.stride()))
                        for t in flat(item)
                        if isinstance(t, torch.Tensor)
                    ]
                    for item in ((args, kwargs), made)
                ]
                cost = operator_cost(name, *metas).time_us(BANDWIDTH_GBS, DEFAULT_PEAK_TFLOPS)
                left[name] = left.get(name, 0.0) + cost
            last = name == "convolution" and args[0].dim() == 4 and not args[0].is_contiguous()
            # Libraries keep this layout; the meta device's convolution does not.
            return made.contiguous(memory_format=torch.channels_last) if last else made

    reference, inputs = reference_of(path, "meta")
    with torch.no_grad(), Operators():
        reference(*inputs)
    before = dict(left)
    left.clear()
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"coverage_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    file.write_text(source)
    module = load(file, file.stem)
    with torch.device("meta"):
        candidate = module.ModelNew().eval()
    with compile_for(target) as log, torch.no_grad(), Operators():
        got = candidate(*inputs)
    with torch.no_grad():
        expected = reference(*inputs)
    leaves = torch.utils._pytree.tree_leaves
    for own, other in zip(leaves(got), leaves(expected), strict=True):
        assert (own.shape, own.dtype) == (other.shape, other.dtype), f"{own.shape} {own.dtype}, not {other.shape}"
    return {
        "kernels": [
            {key: row[key] for key in ("name", "registers", "spill_bytes", "shared_bytes", "fits", "launches")}
            for row in log.rows()
        ],
        "left_us": left,
        "eager_us": before,
        "covered": 1 - sum(left.values()) / max(sum(before.values()), 1e-9),
    }


def interpreter_check(path, source):
    """Error of the candidate at reduced sizes relative to the reference's own, both against float64."""
    from drk.gym.runner import reduction
    from drk.gym.runner.interpreter import interpret
    from drk.gym.runner.remap import device_remap

    reference, inputs = reference_of(path, "cpu")
    plan = reduction.reduce_plan(reference, inputs, {}, ELEMENTS)
    inputs, _ = reduction.apply_plan(inputs, {}, plan)
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"coverage_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    file.write_text(source)
    leaves = torch.utils._pytree.tree_leaves
    with torch.no_grad():
        own = leaves(reference(*inputs))
        exact = copy.deepcopy(reference).double()
        truth = leaves(
            exact(*(t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs))
        )
        with device_remap("sm_90"), interpret("sm_90") as log:
            log.program_budget = 10**9
            candidate = load(file, file.stem).ModelNew().eval()
            candidate.load_state_dict(reference.state_dict())
            got = leaves(candidate(*inputs))
    worst = 0.0
    for mine, theirs, true in zip(got, own, truth, strict=True):
        if not isinstance(true, torch.Tensor):
            continue
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), (
            f"{mine.shape} {mine.dtype}, not {theirs.shape}"
        )
        if not true.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(mine, theirs) else 1e9)
            continue
        scale = true.square().mean().sqrt().item() + 1e-30
        errors = [(item.double() - true).square().mean().sqrt().item() / scale for item in (mine, theirs)]
        ratio = errors[0] / max(errors[1], 0.4 * torch.finfo(theirs.dtype).eps)
        assert math.isfinite(ratio), f"errors {errors}"
        worst = max(worst, ratio)
    return {"error_ratio": worst, "programs": log.programs}


def attempt(call, *args):
    began = time.monotonic()
    try:
        return {**call(*args), "seconds": round(time.monotonic() - began, 1)}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - every failure is a row of the table
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {str(error)[-600:]} ({Path(where.filename).name}:{where.lineno})"
        return {"failed": text, "seconds": round(time.monotonic() - began, 1)}


def proposal(path):
    candidates = BuiltinProposer().propose(graph_at(path), limit=1)
    return {"source": candidates[0].source if candidates else "", "note": candidates[0].note if candidates else ""}


def cached(folder, key, call, *args):
    place = folder / f"{key}.json"
    if place.exists():
        return json.loads(place.read_text())
    result = attempt(call, *args)
    place.write_text(json.dumps(result))
    return result


def row_text(name, found):
    if "failed" in found:
        return f"{name:48} FAILED {found['failed'][:300]}"
    if "error_ratio" in found:
        mark = "ok" if found["error_ratio"] <= 2.5 else "WRONG"
        return f"{name:48} {mark} error {found['error_ratio']:.2f}x  {found['seconds']} s"
    left = sorted(found["left_us"].items(), key=lambda item: -item[1])
    rest = ", ".join(f"{key} {value:.0f}" for key, value in left[:4])
    spills = [f"{row['name']} spills {row['spill_bytes']}" for row in found["kernels"] if row["spill_bytes"]]
    unfit = [f"{row['name']} does not fit" for row in found["kernels"] if not row["fits"]]
    launches = sum(row["launches"] for row in found["kernels"])
    eager = sum(found["eager_us"].values())
    return (
        f"{name:48} {launches:3} launches, {found['covered']:5.0%} of {eager:6.0f} us; left (us): {rest or '-'}"
        + "".join(f"; {item}" for item in (*spills, *unfit))
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("coverage"))
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--only", default="", help="part of a problem's name")
    parser.add_argument("--sources", action="store_true", help="print the proposals' source")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    files = [file for item in options.problems for file in (sorted(item.rglob("*.py")) if item.is_dir() else [item])]
    tally = {"done": 0, "failed": 0}
    for file in files:
        name = f"{file.parent.name}/{file.stem}"
        if options.only not in name:
            continue
        found = attempt(proposal, file)
        if "failed" in found or not found["source"]:
            tally["failed" if "failed" in found else "done"] += 1
            print(f"{name:48} {'NOT CAPTURED ' + found['failed'][:300] if 'failed' in found else 'nothing to fuse'}")
            continue
        if options.sources:
            print(found["source"])
        digest = hashlib.sha256((found["source"] + file.read_text()).encode()).hexdigest()[:20]
        if os.environ.get("TRITON_INTERPRET"):
            row = cached(options.out, f"interpret-{digest}", interpreter_check, file, found["source"])
        else:
            row = cached(options.out, f"static-{digest}", static_check, file, found["source"], options.target)
        tally["failed" if "failed" in row or row.get("error_ratio", 0) > 2.5 else "done"] += 1
        print(row_text(name, row), flush=True)
    print(tally)


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
