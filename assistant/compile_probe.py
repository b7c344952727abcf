"""Does Triton work here? A one-kernel program that ``drk doctor`` runs in a process of its own.

It checks the kernel's result under Triton's interpreter (``interpret``) or compiles it for real, down to machine code
for an architecture that need not be present (``compile sm_90``), and prints one JSON line. It launches nothing on a
GPU, so it says nothing about drivers.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def scaled_add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201
    """``out = 2 x + y``."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, 2.0 * x + y, mask=mask)


def interpret() -> dict[str, Any]:
    """Run the kernel under the interpreter (TRITON_INTERPRET=1 must be set) and compare with torch."""
    x, y = torch.randn(100), torch.randn(100)
    out = torch.full_like(x, float("nan"))
    scaled_add_kernel[(2,)](x, y, out, 100, BLOCK=64)
    return {"correct": bool(torch.allclose(out, 2 * x + y))}


def compile_for(target: str) -> dict[str, Any]:
    """Compile the kernel to machine code for ``target`` and return its size in bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = ASTSource(scaled_add_kernel, signature=signature, constexprs={"BLOCK": 64})
    capability = int(target.removeprefix("sm_").removesuffix("a"))
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return {"cubin_bytes": len(compiled.asm["cubin"])}


def main() -> None:
    """Run the probe that the first argument names and print its answer."""
    start = time.perf_counter()
    answer = interpret() if sys.argv[1] == "interpret" else compile_for(sys.argv[2])
    sys.stdout.write(json.dumps({**answer, "seconds": round(time.perf_counter() - start, 3)}) + "\n")


if __name__ == "__main__":
    main()
