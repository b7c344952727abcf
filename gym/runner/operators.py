"""Which ATen operators one call dispatches, with shapes: the raw material of ``coverage_estimate``.

Recorded below autograd by a dispatch mode, for reference and candidate alike, so that what the candidate still leaves
to torch can be set against what the reference does. Triton launches are no operators and do not show; allocation,
metadata and the interpreter's own storage moves are left out. An operator that Python code defines is no more than a
name: what is logged is what its kernel dispatches.

Limits: switching modes off (a private interface) hides operators, as does work outside of torch; measured coverage,
where there is a GPU, sees both.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drk.gym.runner.structure import dtype_name

MAX_ROWS = 5000
_KERNEL_KEYS = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_FREE = {"set_", "resize_", "lift", "is_same_size", "_local_scalar_dense", "record_stream"}


class OperatorLog(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves __init_subclass__ bare
    """Collects one row per dispatched operator: name, operand and result shapes with dtypes.

    ``before`` is called ahead of each operator.
    """

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before = before
        self.rows: list[dict[str, Any]] = []
        self.interpreted = bool(os.environ.get("TRITON_INTERPRET"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Without this, torch imports all of dynamo (seconds) to keep it away from this mode.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and note it."""
        self.before()
        if defined_in_python(func):
            return self._inside(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not name.startswith(("empty", "new_empty")) and name not in _FREE and len(self.rows) < MAX_ROWS:
            row = {"op": name, "operands": _metas((args, kwargs)), "results": _metas(result)}
            if not (self.interpreted and _moves_storage(row)):
                self.rows.append(row)
        return result

    def _inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator's kernel with this log in force again, which is not while it handles an operator."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_gpu = not self.interpreted and any(leaf.is_cuda for leaf in tensors)
        backend = torch._C.DispatchKey.CUDA if on_gpu else torch._C.DispatchKey.CPU
        with self:
            return func.redispatch(torch._C.DispatchKeySet(backend), *args, **kwargs)

    def sibling(self) -> OperatorLog:
        """Return a log for another thread, which writes into the same rows."""
        other = OperatorLog(self.before)
        other.rows = self.rows
        return other


def defined_in_python(func: Any) -> bool:
    """Whether a program registered the operator's kernels from Python (``custom_op``, ``Library.impl``)."""
    if func.namespace in ("aten", "prims", "prim"):
        return False
    known: set[str] = getattr(torch.library, "_impls", set())
    name = f"{func.namespace}/{func._schema.name.partition('::')[2]}"
    names = {name, f"{name}.{func._schema.overload_name}"}
    return any(f"{name}/{key}" in known for name in names for key in _KERNEL_KEYS)


def _metas(value: Any) -> list[list[Any]]:
    return [[list(leaf.shape), dtype_name(leaf.dtype)] for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _moves_storage(row: dict[str, Any]) -> bool:
    """Whether this is the interpreter copying a storage, as bytes, before or after a launch."""
    return row["op"] == "copy_" and all(len(shape) == 1 and dtype == "uint8" for shape, dtype in row["operands"])
