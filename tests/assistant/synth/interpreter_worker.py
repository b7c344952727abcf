"""Runs emitted modules under Triton's interpreter: one request per line on stdin, one answer per line on stdout.

A request names a folder with ``candidate.py`` and ``request.pt`` (state and argument lists); outputs go to
``outputs.pt`` in it, the module's state after the calls to ``state.pt``. With ``gradients`` in the request the module
is in train mode, and what each call hands back are results and gradients by name.
"""

import importlib.util
import sys
import traceback
from pathlib import Path

import torch
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parent))

from gradients import gradients

from drk.gym.triton_operations import generic_reduce, generic_scan


def serve(folder: Path) -> str:
    spec = importlib.util.spec_from_file_location(f"candidate_{folder.name}", folder / "candidate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    request = torch.load(folder / "request.pt", weights_only=True)
    model = module.ModelNew()
    model.load_state_dict(request["state"])
    if request.get("gradients"):
        torch.save([gradients(model, args) for args in request["calls"]], folder / "outputs.pt")
        torch.save(model.state_dict(), folder / "state.pt")
        return "ok"
    model.eval()
    outputs = []
    with torch.no_grad():
        for args in request["calls"]:
            result = model(*args)
            outputs.append(list(result) if isinstance(result, tuple) else [result])
    torch.save(outputs, folder / "outputs.pt")
    torch.save(model.state_dict(), folder / "state.pt")
    return "ok"


def main() -> None:
    torch.set_num_threads(1)
    # By doubling, as the gym has it: as exact as on a GPU, and quick.
    interpreter.ScanOps.generic_scan = generic_scan
    interpreter.ReduceOps.generic_reduce = generic_reduce
    for line in sys.stdin:
        try:
            answer = serve(Path(line.strip()))
        except Exception:  # noqa: BLE001 - whatever an emitted module raises goes to the test
            answer = repr(traceback.format_exc())
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
