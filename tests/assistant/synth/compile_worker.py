"""Compiles an emitted module's launches for sm_90 on a machine without a GPU and prints the kernels as JSON."""

import importlib.util
import json
import sys

import torch

from drk.gym.runner.remap import device_remap
from drk.gym.runner.stub_driver import compile_for


def main() -> None:
    path, shape, dtype = sys.argv[1], json.loads(sys.argv[2]), getattr(torch, sys.argv[3])
    spec = importlib.util.spec_from_file_location("emitted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with device_remap("sm_90"), compile_for("sm_90") as log, torch.no_grad():
        model = module.ModelNew()
        (model.to(dtype) if dtype.is_floating_point else model)(torch.zeros(shape, dtype=dtype))
    print(json.dumps(log.rows()))


if __name__ == "__main__":
    main()
