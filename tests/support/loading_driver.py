"""Runs loading requests, each in a forked child, as a Runner would: JSON lines in, JSON lines out.

The parent only imports torch; every request gets a fresh process, since loading changes the interpreter (arguments,
standard input, search path, global defaults). Results go through a file of the request's own, not through stdout, which
user code may print to.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from drk.gym.runner import loading, structure, values


def perform(request: dict[str, Any]) -> dict[str, Any]:
    """Load, optionally build a candidate, draw and call."""
    meta, root = request["meta"], Path(request["root"])
    reference = loading.load_reference(meta, root, seed=request.get("seed", 0))
    module = reference.module
    result: dict[str, Any] = {
        "name": reference.namespace.__name__,
        "notes": reference.notes,
        "defaults": reference.defaults,
        "training": module.training,
        "argv": sys.argv,
        "module": type(module).__name__,
        "state": {key: [list(t.shape), str(t.dtype), float(t.sum())] for key, t in module.state_dict().items()},
    }
    if "candidate" in request:
        built = loading.build_candidate(Path(request["candidate"]), meta, reference, seed=request.get("seed", 0))
        result["candidate"] = {key: float(t.sum()) for key, t in built.state_dict().items()}
    if request.get("call"):
        args, kwargs = values.draw_inputs(meta["inputs"], 5, "cpu", reference=reference)
        with torch.no_grad():
            output = module(*args, **kwargs)
        result["inputs"] = structure.describe((args, kwargs))
        result["output"] = structure.describe(output)
    return result


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Perform, with a failure as data."""
    try:
        return perform(request)
    except loading.LoadFailure as failure:
        return {"failure": failure.as_json()}


def main() -> None:
    """Serve until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            Path(request["result"]).write_text(json.dumps(answer(request)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stderr.write(f"{status}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    main()
