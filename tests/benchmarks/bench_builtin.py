"""Rough timing of the builtin proposer's variants against eager PyTorch, on a CUDA machine.

    python tests/benchmarks/bench_builtin.py docs/examples/linear_gelu.py docs/examples/transformer_mlp.py

Each file defines one ``nn.Module`` and ``example_inputs``. Every proposal runs in this process, is compared with
float64, and is timed with CUDA events around interleaved calls: good for tuning tile tables, no evidence (that is what
``drk verify`` is for). Prints one line per proposal: median milliseconds, ratio to eager, error ratio, tile and note.
"""

import argparse
import copy
import importlib.util
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from drk.assistant.synth import BuiltinProposer
from drk.gym.graph import graph_from_json
from drk.gym.runner.capture import capture


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def reference_of(path):
    """The file's last module class, built without arguments, and its example inputs, on the GPU."""
    module = load(path, f"reference_{path.stem}")
    classes = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, nn.Module)]
    own = [item for item in classes if item.__module__ == module.__name__]
    return own[-1]().cuda().eval(), [item.cuda() for item in module.example_inputs()]


def timed(call, rounds):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(rounds):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / rounds


def compare(reference, candidate, inputs, pairs, rounds):
    """(median ms of eager, of candidate, median of ratios) over interleaved pairs."""
    for call in (reference, candidate) * 5:
        call(*inputs)
    torch.cuda.synchronize()
    both = [
        (timed(lambda: reference(*inputs), rounds), timed(lambda: candidate(*inputs), rounds)) for _ in range(pairs)
    ]
    ratios = [eager / own for eager, own in both]
    eager, own = (statistics.median(column) for column in zip(*both, strict=True))
    return eager, own, statistics.median(ratios)


def error_ratio(reference, candidate, inputs):
    truth = copy.deepcopy(reference).double()(*(item.double() for item in inputs))
    spread = [(call(*inputs).double() - truth).square().mean().sqrt().item() for call in (candidate, reference)]
    return spread[0] / max(spread[1], 1e-30)


def bench(path, limit, pairs, rounds):
    reference, inputs = reference_of(path)
    graph = graph_from_json(capture(reference, inputs))
    properties = torch.cuda.get_device_properties(0)
    hardware = {"sm_count": properties.multi_processor_count}
    with tempfile.TemporaryDirectory() as folder:
        for index, proposal in enumerate(BuiltinProposer().propose(graph, hardware=hardware, limit=limit)):
            file = Path(folder) / f"candidate_{index}.py"
            file.write_text(proposal.source)
            try:
                candidate = load(file, f"{path.stem}_{index}").ModelNew().cuda().eval()
                candidate.load_state_dict(reference.state_dict())
                eager, own, ratio = compare(reference, candidate, inputs, pairs, rounds)
                error = error_ratio(reference, candidate, inputs)
            except Exception as failure:  # noqa: BLE001 - one bad proposal must not end the table
                print(f"{path.stem:20} {index:2} failed: {type(failure).__name__}: {str(failure)[:90]}")
                continue
            line = f"{path.stem:20} {index:2} eager {eager:8.4f} ms, own {own:8.4f} ms, {ratio:5.2f}x"
            print(f"{line}, error {error:5.2f}x  {proposal.note}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    with torch.no_grad():
        for path in options.files:
            bench(path, options.limit, options.pairs, options.rounds)


if __name__ == "__main__":
    main()
