"""How an emitted file starts its kernels at little cost to the host: real code, copied as text.

Everything below the marker line goes into the emitted file (:mod:`drk.assistant.synth.launch`); it needs torch and
triton only. It is a module of its own so that type checker, linter and tests see it.

What Triton does at each launch (bind arguments, classify them, build a key as text) takes the host five times as long
as the launch itself, and its ``cdiv`` and ``next_power_of_2`` some microseconds a call
(``tests/benchmarks/bench_launch.py``).

Honest limits: a hook that is added to a kernel (``add_pre_run_hook``), a changed global or knob for compilation is not
seen by launches that are already known; launches on ROCm are always Triton's own, since it looks at more there.
"""

from __future__ import annotations

import torch
import triton


# --- drk launch -------------------------------------------------------------------------------------------------
class Launch:
    """A kernel that remembers what Triton compiled, and starts that again for a launch like an earlier one.

    Alike are launches on the same device with equal integers and constants and with tensors of the same types, all of
    them aligned to 16 bytes: Triton distinguishes no more. It gets all others, and everything under its interpreter.
    """

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel = kernel
        self.known: dict[tuple[object, ...], tuple[triton.JITFunction, list[object]]] = {}
        self.remembers = isinstance(kernel, triton.JITFunction) and torch.version.hip is None

    def __getitem__(self, grid: tuple[int, ...]) -> triton.JITFunction:
        """Return the function that launches, as Triton's own kernels do."""
        if not self.remembers or torch.compiler.is_compiling():
            return self.kernel[grid]
        return lambda *args, **options: self.start(grid, args, options)

    def start(self, grid: tuple[int, ...], args: tuple[object, ...], options: dict[str, object]) -> object:
        """Launch; ``args`` are tensors and numbers, ``options`` the kernel's constants and ``num_warps``."""
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        kinds, bits = [device, *options.values()], 0
        for arg in args:
            if type(arg) is int:
                kinds.append(arg)
            elif isinstance(arg, torch.Tensor):
                kinds.append(arg.dtype)
                bits |= arg.data_ptr()
            else:
                kinds.append(type(arg))
        key = tuple(kinds)
        compiled, constants = (None, []) if bits % 16 else self.known.get(key, (None, []))
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*args, *constants, stream=driver.get_current_stream(device))
            return compiled
        compiled = self.kernel[grid](*args, **options)
        if isinstance(compiled, triton.compiler.CompiledKernel) and bits % 16 == 0:
            if len(self.known) >= 64:  # sizes that change all the time
                self.known.clear()
            self.known[key] = compiled, [options[name] for name in self.kernel.arg_names[len(args) :]]
        return compiled


def ceil_div(size: int, part: int) -> int:
    """How many parts cover a size."""
    return -(-size // part)


def power_of_2(size: int) -> int:
    """The smallest power of 2 that is at least a size."""
    return 1 << max(size - 1, 0).bit_length()
