"""What a launch of emitted kernels costs the host: ``python tests/benchmarks/bench_launch.py [FIXTURE] [TARGET]``.

Needs no GPU: a driver that stands for one compiles for it and starts nothing, so what is left out is the C function
that hands a kernel to CUDA. A module of ``tests/fixtures/twelve`` is compiled by the builtin proposer and its launchers
are timed one by one as they are emitted and as Triton's documentation would write them (no ``Launch``, Triton's own
``cdiv`` and ``next_power_of_2``). The rest of forward is all but launchers and convolutions: reading of parameters,
views. Below are the parts that launchers consist of. Each figure is processor time in microseconds, the best of many
short rounds; a table and a JSON line are printed, ``-o FILE`` writes the JSON.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton

from drk.assistant.synth.launch import without_launch
from drk.assistant.synth.launch_template import ceil_div, power_of_2
from drk.assistant.synth.propose import compile_graph, variants
from drk.gym.devices import device_facts
from drk.gym.graph import graph_from_json
from drk.gym.runner.capture import capture
from drk.gym.triton_driver import TargetDriver, active_driver

TWELVE = Path(__file__).parents[1] / "fixtures" / "twelve"
ROUNDS, CALLS = 120, 20


def best_us(functions: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the least microseconds that a call of each took, as the mean over one round; rounds take turns."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            begin = time.thread_time()
            for _ in range(CALLS):
                function()
            best[name] = min(best[name], (time.thread_time() - begin) / CALLS * 1e6)
    return {name: round(value, 2) for name, value in best.items()}


def load(path: Path) -> Any:
    """Import a file by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def replaced(owner: Any, replacements: dict[str, Any]) -> Iterator[None]:
    """Set attributes for the length of a block."""
    before = {name: getattr(owner, name) for name in replacements}
    for name, value in replacements.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def calls_of(source: str, kernels: list[str], inputs: tuple[Any, ...], path: Path) -> dict[str, Callable[[], Any]]:
    """Return calls of an emitted file's launchers, and of its forward with their results in their place."""
    path.write_text(source)
    module = load(path)
    model = module.ModelNew()
    seen: dict[str, Any] = {}

    def recording(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            result = function(*args)
            seen[name] = (functools.partial(function, *args), lambda *_args: result)
            return result

        return call

    with replaced(module, {name: recording(name, getattr(module, name)) for name in kernels}):
        model(*inputs)
    calls = {name: call for name, (call, _) in seen.items()}
    rest = load(path.rename(path.with_name(f"{path.stem}_rest.py")))
    for name, (_, answer) in seen.items():
        setattr(rest, name, answer)
    if hasattr(rest, "F"):
        rest.F = types.SimpleNamespace(conv2d=convolutions(rest.F))
    model = rest.ModelNew()
    return {**calls, "rest of forward": lambda: model(*inputs)}


def convolutions(functional: Any) -> Callable[..., Any]:
    """Return a convolution that computes each result once."""
    made: dict[tuple[int, int], Any] = {}

    def convolution(x: Any, weight: Any, *options: Any) -> Any:
        key = (id(x), weight.data_ptr())
        if key not in made:
            made[key] = functional.conv2d(x, weight, *options)
        return made[key]

    return convolution


def part_times() -> dict[str, float]:
    """Return microseconds of what a launcher does."""
    x = torch.randn(2, 64, 16, 16)
    last = x.contiguous(memory_format=torch.channels_last)
    return best_us(
        {
            "contiguous() of what is": x.contiguous,
            "contiguous(channels_last) of what is": lambda: last.contiguous(memory_format=torch.channels_last),
            "new_empty": lambda: x.new_empty((2, 64, 16, 16)),
            "torch.empty(channels_last)": lambda: torch.empty(x.shape, memory_format=torch.channels_last),
            "shape[0]": lambda: x.shape[0],
            "stride(0)": lambda: x.stride(0),
            "numel()": x.numel,
            "triton.cdiv": lambda: triton.cdiv(1000, 64),
            "ceil_div": lambda: ceil_div(1000, 64),
            "triton.next_power_of_2": lambda: triton.next_power_of_2(1000),
            "power_of_2": lambda: power_of_2(1000),
        }
    )


def launch_times(module: Any, inputs: tuple[Any, ...]) -> dict[str, float]:
    """Return microseconds of the first launch of a call: by Triton, by ``Launch`` once it is known, and bare."""
    seen: list[tuple[Any, ...]] = []
    start = module.Launch.start
    with replaced(module.Launch, {"start": lambda *call: seen.append(call) or start(*call)}):
        module.ModelNew()(*inputs)
    kernel, grid, args, options = seen[0]
    compiled = kernel[grid](*args, **options)
    constants = [options[name] for name in kernel.kernel.arg_names[len(args) :]]
    return best_us(
        {
            "JITFunction.run": lambda: kernel.kernel[grid](*args, **options),
            "Launch, known": lambda: kernel[grid](*args, **options),
            "CompiledKernel": lambda: compiled[(*grid, 1, 1)[:3]](*args, *constants),
        }
    )


def measure(fixture: str, target: str) -> dict[str, Any]:
    """Return all figures as a JSON-able dict."""
    user = load(TWELVE / f"{fixture}.py")
    reference = getattr(user, target)().eval()
    torch.manual_seed(0)
    small = [one[:2, ..., :16, :16] if one.dim() == 4 else one[:2] for one in user.example_inputs()]
    inputs = tuple(one.contiguous() for one in small)
    with torch.no_grad():
        graph = graph_from_json(json.loads(json.dumps(capture(reference, inputs))))
        compiled = compile_graph(graph, variants(graph)[0])
    names = [kernel.name for kernel in compiled.kernels]
    driver = TargetDriver(device_facts("sm_90"), torch.cuda)
    with tempfile.TemporaryDirectory() as folder, active_driver(driver), torch.no_grad():
        plain = calls_of(without_launch(compiled.source), names, inputs, Path(folder, "launch_plain.py"))
        emitted = calls_of(compiled.source, names, inputs, Path(folder, "launch_emitted.py"))
        forms = {"plain_us": plain, "emitted_us": emitted}
        times = best_us({f"{form} {name}": call for form, calls in forms.items() for name, call in calls.items()})
        return {
            **{form: {name: times[f"{form} {name}"] for name in calls} for form, calls in forms.items()},
            "launch_us": launch_times(sys.modules["launch_emitted"], inputs),
            "parts_us": part_times(),
        }


def main() -> None:
    """Measure, print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fixture", nargs="?", default="conv_block")
    parser.add_argument("target", nargs="?", default="ResBlock")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.fixture, options.target)
    lines = [f"{'launcher':40} plain_us emitted_us"]
    for name, plain in found["plain_us"].items():
        lines.append(f"{name:40} {plain:8.1f} {found['emitted_us'][name]:10.1f}")
    sums = [sum(found[key].values()) for key in ("plain_us", "emitted_us")]
    lines.append(f"{'all':40} {sums[0]:8.1f} {sums[1]:10.1f}")
    lines += [f"{name:40} {value:8.2f}" for key in ("launch_us", "parts_us") for name, value in found[key].items()]
    text = json.dumps(found)
    sys.stdout.write("\n".join([*lines, text, ""]))
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
