"""Checks a candidate's logic without a GPU: Triton's interpreter, mended, counted and kept within a budget.

For the Runner of the ``interpret`` zygote, where ``TRITON_INTERPRET=1`` was set before triton was imported.
:func:`interpret` (or :func:`install` for the rest of the process) applies the patches of
:mod:`drk.gym.triton_interpreter`, makes a driver active that answers for the compile target, and returns an
:class:`InterpreterLog`: the launch census, the precision of the dots, and the budget of programs. Use it together with
:func:`drk.gym.runner.remap.device_remap` for the same target.

Honest limits: programs run one after the other, so races, shared memory and alignment are not checked; rounding of
tensor cores is not modelled; an autotuned kernel runs with its first configuration only; an out-of-bounds access kills
the process (SIGSEGV), which the isolated Runner turns into a diagnosis.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from drk.gym import triton_adapter, triton_driver
from drk.gym.devices import device_facts
from drk.gym.triton_adapter import ErrorFacts
from drk.gym.triton_interpreter import patch_interpreter

DEFAULT_PROGRAM_BUDGET = 5000
MAX_META_CHARS = 80


class ProgramBudgetExceeded(RuntimeError):
    """A launch would run more programs than are left; nothing of it was run. ``kind`` is for the verdict."""

    kind = "program_budget"

    def __init__(self, name: str, grid: tuple[int, int, int], programs: int, left: int, budget: int) -> None:
        size = "x".join(str(extent) for extent in grid)
        super().__init__(
            f"{name} would run {programs} programs (grid {size}); {left} of this trial's {budget} are left "
            "in the interpreter"
        )
        self.programs = programs
        self.left = left
        self.budget = budget


@dataclass
class LaunchRow:
    """Launches of one kernel function, told apart by the function object."""

    function: Callable[..., Any]
    launches: int = 0
    programs: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class InterpreterLog:
    """What was interpreted. ``exceeded`` stays set when a candidate catches the budget's exception."""

    program_budget: int = DEFAULT_PROGRAM_BUDGET
    programs: int = 0
    launches: int = 0
    exceeded: ProgramBudgetExceeded | None = None
    dots: dict[tuple[str, str], int] = field(default_factory=dict)
    _rows: dict[int, LaunchRow] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start_trial(self, program_budget: int | None = None) -> None:
        """Give the next trial a full budget; counts of launches go on."""
        self.program_budget = self.program_budget if program_budget is None else program_budget
        self.programs = 0
        self.exceeded = None

    def before_launch(self, function: Callable[..., Any], grid: tuple[int, int, int], meta: dict[str, Any]) -> None:
        """Charge a launch to the budget and count it.

        Raises:
            ProgramBudgetExceeded: it does not fit; the launch must not happen.
        """
        programs = grid[0] * grid[1] * grid[2]
        left = self.program_budget - self.programs
        if programs > left:
            self.exceeded = ProgramBudgetExceeded(function.__name__, grid, programs, left, self.program_budget)
            raise self.exceeded
        self.programs += programs
        self.launches += 1
        row = self._rows.setdefault(id(function), LaunchRow(function))
        row.launches += 1
        row.programs += programs
        row.grid = grid
        row.meta = {name: value[:MAX_META_CHARS] if isinstance(value, str) else value for name, value in meta.items()}

    def saw_dot(self, operand: str, precision: str) -> None:
        """Count a ``tl.dot`` by its operands' type and the precision asked for."""
        self.dots[operand, precision] = self.dots.get((operand, precision), 0) + 1

    def rows(self, owned_files: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
        """Return one JSON-able row for each kernel function that was launched, in the order of first launch."""
        return [self._row(row, owned_files) for row in self._rows.values()]

    def dot_rows(self) -> list[dict[str, Any]]:
        """Return the dots that ran: operand type (``fp32``, ``bf16``), precision (``TF32``, ``IEEE``) and count.

        A float32 dot at ``TF32`` is a precision downgrade on a GPU which the interpreter, by default, does not show.
        """
        return [{"operand": key[0], "precision": key[1], "count": count} for key, count in self.dots.items()]

    def describe(self, error: BaseException, owned_files: frozenset[str] = frozenset()) -> ErrorFacts:
        """Classify an exception; kinds ``unsupported`` and ``program_budget`` are limits here, not faults."""
        return triton_adapter.describe_error(error, owned_files)

    def uninstall(self) -> None:
        """Take the patches back."""
        self._stack.close()

    def _row(self, row: LaunchRow, owned_files: frozenset[str]) -> dict[str, Any]:
        code = row.function.__code__
        return {
            "name": row.function.__name__,
            "file": code.co_filename,
            "line": code.co_firstlineno,
            "identity": f"{code.co_filename}:{code.co_firstlineno}:{row.function.__qualname__}",
            "owned": code.co_filename in owned_files,
            "launches": row.launches,
            "programs": row.programs,
            "grid": list(row.grid),
            "num_warps": row.meta.get("num_warps"),
            "num_stages": row.meta.get("num_stages"),
            "meta": row.meta,
        }


def install(
    target: str = "sm_90", *, program_budget: int = DEFAULT_PROGRAM_BUDGET, emulate_tf32: bool = False
) -> InterpreterLog:
    """Interpret kernels from now on; :meth:`InterpreterLog.uninstall` ends it.

    ``program_budget`` is the number of programs that one trial may run; ``emulate_tf32`` truncates float32 operands of
    dots that ask for TF32.

    Raises:
        DeviceError: the target is unknown.
        RuntimeError: ``TRITON_INTERPRET`` was not set before triton was imported.
    """
    if not triton_adapter.interpreting():
        raise RuntimeError("TRITON_INTERPRET=1 must be in the environment before triton is imported")
    facts = device_facts(target)
    log = InterpreterLog(program_budget=program_budget)
    log._stack.enter_context(triton_driver.active_driver(triton_driver.TargetDriver(facts, torch.cuda)))
    log._stack.enter_context(patch_interpreter(log, emulate_tf32=emulate_tf32))
    return log


@contextlib.contextmanager
def interpret(
    target: str = "sm_90", *, program_budget: int = DEFAULT_PROGRAM_BUDGET, emulate_tf32: bool = False
) -> Iterator[InterpreterLog]:
    """Interpret kernels inside the block. Arguments and errors are those of :func:`install`."""
    log = install(target, program_budget=program_budget, emulate_tf32=emulate_tf32)
    try:
        yield log
    finally:
        log.uninstall()
