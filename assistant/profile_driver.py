"""Calls the user's target again and again under the recorder: the process behind ``drk profile model.py``.

``python -m drk.assistant.profile_driver FOLDER`` reads ``request.json`` and the task's sources in ``FOLDER``, enters
the sandbox (as a Runner does: the folder is its only writable place), builds the module, and calls it: warm-up and the
profiler's window first, then some steps without the profiler for the wall clock. In ``train`` mode a step is forward
and backward; there is no optimizer.

What goes wrong in the user's code is written to ``failure.json`` with the user's own line; recordings are those of
:mod:`drk.assistant.profile_hooks`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.profiler
from torch.utils import _pytree

import drk.gym
from drk.assistant.profile_hooks import ProfileRecorder, watch
from drk.assistant.profile_marks import own_work
from drk.assistant.profile_request import Request, read_request
from drk.gym.errors import GymError
from drk.gym.runner import loading, remap, values
from drk.gym.runner.entry import describe_exception
from drk.gym.runner.execute import CallOptions, call_context
from drk.gym.runner.failures import LoadFailure
from drk.gym.sandbox import Layers, Policy, enter, probe, require

WARMUP = 2
SEED = 20_260_101


def main(folder: Path) -> int:
    """Do it all; return the process's exit code."""
    request = read_request(folder)
    try:
        layers = probe()
        require(request.level, layers)
        if request.gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = request.gpu
        _enter(folder, request, layers)  # needs a process with one thread, and everything of drk imported
        torch.set_num_threads(request.threads)
        os.environ["KINETO_LOG_LEVEL"] = "99"  # its start and stop messages would stand among the user's own
    except (GymError, OSError) as error:
        return _fail(folder, {"kind": "sandbox", "message": str(error), "help": getattr(error, "help", "")})
    try:
        run(folder, request)
    except LoadFailure as failure:
        told = {name: getattr(failure, name) for name in ("kind", "message", "file", "line", "help")}
        return _fail(folder, told)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
        return _fail(folder, describe_exception(error, folder))
    return 0


def _enter(folder: Path, request: Request, layers: Layers) -> None:
    policy = Policy(
        scratch=folder,
        level=request.level,
        memory_bytes=request.memory_bytes,
        gpu=bool(request.gpu),
        keep_fds=(1, 2),
    )
    enter(policy, layers)
    os.chdir(folder)


def _fail(folder: Path, facts: dict[str, Any]) -> int:
    (folder / "failure.json").write_text(json.dumps(facts), encoding="utf-8")
    return 1


def run(folder: Path, request: Request) -> None:
    """Build the module and call it under the recorder.

    Raises:
        LoadFailure: the user's code cannot be loaded.
    """
    on_gpu = request.device != "cpu"
    library = (str(Path(next(iter(drk.gym.__path__))).resolve()),)
    recorder = ProfileRecorder(folder, WARMUP + request.steps, request.window_s, library, on_gpu=on_gpu)
    with contextlib.ExitStack() as stack:
        if not on_gpu:
            stack.enter_context(remap.device_remap(request.target))
        watch(torch.nn.Module, recorder)
        recorder.active = False
        reference = loading.load_reference(request.meta, folder / "src", seed=SEED, device=request.device)
        tensors = folder / loading.TENSORS_FILE
        args, kwargs = values.draw_inputs(
            request.meta["inputs"],
            SEED,
            request.device,
            reference=reference,
            tensors=tensors if tensors.exists() else None,
        )
        options = CallOptions(autocast=request.meta.get("autocast"), device=request.device)
        training = request.meta.get("mode") == "train"
        stack.enter_context(call_context(options))
        stack.enter_context(torch.enable_grad() if training else torch.no_grad())
        recorder.active = True

        def step() -> None:
            _step(reference.module, args, kwargs, training=training)
            if on_gpu:
                torch.cuda.synchronize()  # so that the wall time of a step holds its kernels

        _repeat(recorder, request, step)
    recorder.finish()


def _repeat(recorder: ProfileRecorder, request: Request, step: Any) -> None:
    """Call until the window has closed and the clock has seen enough; the last calls only show when steps end."""
    began = time.monotonic()
    for _ in range(WARMUP + request.steps + 1):
        step()
        if recorder.window.state != "open":
            break
    clean = 0
    while clean < request.steps + 2 and (clean < 1 or time.monotonic() - began < request.clean_s):
        step()
        clean += 1


def _step(module: Any, args: list[Any], kwargs: dict[str, Any], *, training: bool) -> None:
    output = module(*args, **kwargs)
    if not training:
        return
    leaves = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if leaves:
        with own_work():
            grads = [torch.ones_like(leaf) for leaf in leaves]
        torch.autograd.backward(leaves, grads)
    module.zero_grad(set_to_none=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
