"""A Runner's life: commands from the Judge, one at a time, answered with JSON.

Reference and Candidate Runners speak the same commands, so that what is measured is symmetric:

========== ==========================================================================================
load       import the reference (and, in a Candidate Runner, the candidate) and build the module
state_out  lay out the reference's state for copying; ``write`` then puts it into sealed memory
state_in   copy weights from sealed memory into the candidate (or convert, or keep the seeded ones)
run        draw inputs from the key, call once, keep the leaves, answer their layout
write      write what the last command laid out to the descriptor that comes along
========== ==========================================================================================

``prepare``, ``go`` (:mod:`drk.gym.runner.timing`), ``profile``, ``capture`` and ``compile`` join them. Nothing that
this process says is trusted; the Judge checks lengths, shapes and values, and reads its own clock.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drk.gym.runner import capture as graph_capture
from drk.gym.runner import execute, loading, structure, transfer, values
from drk.gym.runner.audit import Audit
from drk.gym.runner.autocast_casts import autocast_everywhere, write_casts
from drk.gym.runner.burst import call_often
from drk.gym.runner.census import launch_census
from drk.gym.runner.execute import CallOptions, StateSnapshot
from drk.gym.runner.function_passes import run_both_passes
from drk.gym.runner.parts import record_parts
from drk.gym.runner.recipes import apply_recipe
from drk.gym.runner.remap import DeviceRemap, on_device
from drk.gym.runner.rungs import set_precision
from drk.gym.runner.sampling import shrink
from drk.gym.runner.side_streams import SideStreamDelay
from drk.gym.runner.suppress import ablated, poison_free_memory
from drk.gym.runner.threads import follow_threads
from drk.gym.runner.tripwires import Tripwires
from drk.gym.triton_adapter import watch_launches

QUEUE_CYCLES = 4_000_000
TIDY_BYTES = 2 * 2**30
MAX_ATTRIBUTES = 1000  # more than any module keeps counters

Handler = Callable[[dict[str, Any], list[int]], dict[str, Any]]


class Session:
    """State of one Runner. ``role`` is ``reference`` or ``candidate``."""

    def __init__(self, mode: str, role: str, scratch: Path, arena_fd: int) -> None:
        self.mode = mode
        self.role = role
        self.scratch = scratch
        self.arena_fd = arena_fd
        self.device = "cpu"
        self.seed = 0
        self.meta: dict[str, Any] = {}
        self.reference: loading.Reference | None = None
        self.module: torch.nn.Module | None = None
        self.snapshot = StateSnapshot({})
        self.truth: torch.nn.Module | None = None
        self.truth_snapshot = StateSnapshot({})
        self.reduce: dict[str, Any] | None = None
        self.pending: list[tuple[str, torch.Tensor]] = []
        self.layout: list[dict[str, Any]] = []
        self.extra: dict[str, Any] = {}
        self.last_inputs: tuple[list[Any], dict[str, Any]] = ([], {})
        self.held_first: list[tuple[str, torch.Tensor]] | None = None
        self.convolutions: str | None = None
        self.remap: DeviceRemap | None = None
        self.tripped: Callable[[], list[str]] = list
        self.audit: Audit | None = None
        self.timing_autocast: str | None = None
        self.stack = contextlib.ExitStack()
        self.before_run: Callable[[], None] = lambda: None

    # --- loading -----------------------------------------------------------------------------------------

    def load(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Import and build. ``message``: ``meta`` (task without sources), ``device``, ``seed``."""
        self.meta, self.device = message["meta"], message["device"]
        set_precision(message.get("precision", "match"))
        source_root = self.scratch / "src"
        seed = self.seed = int(message["seed"])
        if self.role == "reference":
            self.reference = loading.load_reference(self.meta, source_root, seed=seed, device=self.device)
            self.adopt(self.reference.module)
            if self.mode != "gpu" and message.get("precision") == "match" and torch.backends.cudnn.allow_tf32:
                self.convolutions = "tf32"  # what a GPU does with these flags, which a CPU ignores
            if message.get("precision") == "bf16":
                self.timing_autocast = "bfloat16"
        else:
            self.reference = loading.load_namespace(self.meta, source_root)
            follow_threads(self.stack)
            self.tripped = Tripwires().tripped  # bound now: who replaces it on the class is seen by it
            self.audit = Audit(self.scratch)
            self.audit.watch()
            self.adopt(
                loading.build_candidate(
                    self.scratch / "candidate.py", self.meta, self.reference, seed=seed, device=self.device
                )
            )
        if not values.inputs_vary(self.meta["inputs"], self.device, reference=self.reference):
            # A function that returns the same values every time would let cached answers pass.
            self.meta["inputs"] = {**self.meta["inputs"], "permute": True}
        return {"state": self.state_layout(), "kind": type(self.built).__name__, "notes": self.reference.notes}

    def adopt(self, module: torch.nn.Module) -> None:
        """Make ``module`` the one under test, in the task's mode."""
        module.train(self.meta.get("mode") == "train")
        self.module = module
        self.snapshot = StateSnapshot.take(module)
        if self.role == "candidate":
            self.snapshot.restorable = frozenset()  # until the Judge names attributes that the reference changes too
        self.truth = None

    @property
    def built(self) -> torch.nn.Module:
        """The module under test."""
        if self.module is None:
            raise RuntimeError("nothing is loaded yet")
        return self.module

    def state_layout(self) -> list[dict[str, Any]]:
        """Describe the module's ``state_dict``: key, shape, dtype."""
        rows, _ = transfer.plan_layout(
            [(key, value) for key, value in self.built.state_dict().items() if isinstance(value, torch.Tensor)]
        )
        return rows

    # --- weights -----------------------------------------------------------------------------------------

    def state_out(self, _message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Lay out the state for :meth:`write`."""
        state = self.built.state_dict()
        return self.offer([(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)])

    def state_in(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Give the candidate the reference's weights; say how: ``copied``, ``converted`` or ``seeded``.

        ``ModelNew.from_reference`` is preferred wherever it is defined: it alone can bring what no state dict holds
        (buffers that are not saved, tensors in attributes). Where its state is the reference's, that is ``copied``.
        What a candidate's state holds beyond the reference's (a table, a workspace) stays as it was made.
        """
        layout = message["layout"]
        state = transfer.read_state(fds[0], layout, message["bytes"])
        converts = callable(getattr(type(self.built), "from_reference", None))
        if converts:
            self.adopt(self.convert(state))
        own = {row["name"]: (row["shape"], row["dtype"]) for row in self.state_layout()}
        theirs = {row["name"]: (row["shape"], row["dtype"]) for row in layout}
        fits = (own == theirs and not self.differs(state)) if converts else theirs.items() <= own.items()
        if fits:
            how = "copied"
            if state and not converts:
                brought = {key: value.to(self.device) for key, value in state.items()}
                self.built.load_state_dict(brought, strict=own.keys() == theirs.keys())
        else:
            how = "converted" if converts else "seeded"
        self.adopt(self.built)
        return {
            "weights": how,
            "missing": sorted(set(theirs) - set(own))[:20],
            "unexpected": sorted(set(own) - set(theirs))[:20],
            "mismatched": sorted(key for key in set(own) & set(theirs) if own[key] != theirs[key])[:20],
        }

    def differs(self, state: dict[str, torch.Tensor]) -> bool:
        """Say whether the module's state, of the same layout, has other values than ``state``."""
        own = self.built.state_dict()
        return any(not torch.equal(own[key].cpu().nan_to_num(), value.nan_to_num()) for key, value in state.items())

    def convert(self, state: dict[str, torch.Tensor]) -> torch.nn.Module:
        """Build the reference with ``state`` here and let the candidate's class convert it."""
        reference = loading.load_reference(self.meta, self.scratch / "src", seed=self.seed, device=self.device).module
        reference.load_state_dict({key: value.to(self.device) for key, value in state.items()}, strict=True)
        converted = type(self.built).from_reference(reference)  # type: ignore[attr-defined]
        if not isinstance(converted, torch.nn.Module):
            raise TypeError("ModelNew.from_reference did not return a module")
        return converted.to(self.device)

    # --- running -----------------------------------------------------------------------------------------

    def draw(self, key: int) -> tuple[list[Any], dict[str, Any]]:
        """Draw this key's inputs on the device."""
        return values.draw_inputs(
            self.meta["inputs"], key, self.device, reference=self.reference, reduce=self.reduce, tensors=self.tensors()
        )

    def draw_whole(self, key: int) -> tuple[list[Any], dict[str, Any]]:
        """Draw this key's inputs at the user's own sizes."""
        reduce, self.reduce = self.reduce, None
        try:
            return self.draw(key)
        finally:
            self.reduce = reduce

    def tensors(self) -> Path | None:
        """Return the safetensors file that came with the task, if any."""
        path = self.scratch / "tensors.safetensors"
        return path if path.exists() else None

    def run(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Call once.

        ``message``: ``key``; ``variant`` (``native``, ``float64`` or a rung); ``grad``; ``log_operators``; ``recipe``
        (see :mod:`drk.gym.runner.recipes`); ``sample`` (how large leaves are shown); ``poison`` (shapes and dtypes to
        spoil in free memory first); ``ablate`` (true, or the name of one kernel: launch nothing of the candidate's);
        ``restore`` (a candidate's plain attributes that the reference changes too; holds until told otherwise);
        ``both_passes`` (backward kernels too, without autograd).
        """
        options = self.options(message)
        exact = options.variant == "float64"
        module, snapshot = self.truth_module() if exact else (self.built, self.snapshot)
        if "restore" in message:
            snapshot.restorable = frozenset((str(part), str(key)) for part, key in message["restore"])
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            # What follows queues behind this: a kernel on another stream that does not wait for its inputs, or whose
            # result is not waited for, now sees or leaves old memory.
            torch.cuda._sleep(QUEUE_CYCLES)  # type: ignore[no-untyped-call]
        recipe = message.get("recipe") or {}
        inputs = apply_recipe(recipe, self.draw(options.key), self.last_inputs)
        self.last_inputs = inputs if self.role == "candidate" else ([], {})  # nobody writes into the reference's
        self.before_run()
        with contextlib.ExitStack() as stack:
            suppressed = self.suppress(message.get("ablate"), stack)
            if message.get("both_passes"):
                run_both_passes(stack)
            if message.get("poison"):
                poison_free_memory([(tuple(s), transfer.dtype_of(d)) for s, d in message["poison"]], self.device)
            census = stack.enter_context(launch_census({str(self.scratch / "candidate.py")}))
            delay = SideStreamDelay(self.device if self.role == "candidate" else "cpu")
            stack.enter_context(watch_launches(lambda _handle, _name: delay.note()))
            stack.enter_context(on_device(self.remap, [*structure.tensors(inputs), *execute.named_state(module)]))
            outcome = execute.call(module, snapshot, inputs, options, delay.note)
        small = [(name, tensor) for name, tensor in outcome.held if tensor.numel() <= options.whole]
        if self.role == "candidate" and self.held_first is None:
            self.held_first = small
        return {
            **self.offer(outcome.leaves),
            "description": outcome.description,
            "operators": outcome.operators,
            "aliased": outcome.aliased,
            "tf32_convolutions": self.device != "cpu" and torch.backends.cudnn.allow_tf32,
            "attributes": outcome.attributes[:MAX_ATTRIBUTES],
            "suppressed": sorted(set(suppressed)),
            "launched": census.owned_launches() if options.log_operators else None,
            **self.seen(),
            "inputs": [{"path": p, **structure.describe_tensor(t)} for p, t in structure.tensors(inputs)],
            "peak_bytes": self.tidied(),
        }

    def options(self, message: dict[str, Any]) -> CallOptions:
        """Return how :meth:`run` is to call for ``message``."""
        return CallOptions(
            variant=message.get("variant", "native"),
            grad=bool(message.get("grad")),
            autocast=message.get("autocast") or self.meta.get("autocast"),
            convolutions=self.convolutions,
            device=self.device,
            key=int(message["key"]),
            log_operators=bool(message.get("log_operators")),
            weights_factor=(message.get("recipe") or {}).get("weights"),
            sample=message.get("sample"),
        )

    def tidied(self) -> int:
        """Return the most GPU memory that the call took, in bytes; where it was much, give back what is free now."""
        if self.device == "cpu":
            return 0
        peak = torch.cuda.max_memory_allocated()
        if peak > TIDY_BYTES:
            torch.cuda.empty_cache()
        return peak

    def forget_calls(self) -> None:
        """Drop inputs and outputs of earlier calls."""
        self.last_inputs = ([], {})
        self.held_first, self.pending = [], []

    def suppress(self, which: bool | str | None, stack: contextlib.ExitStack) -> list[str]:
        """Silence the candidate's kernels (all, or one by name) until ``stack`` closes."""
        if not which:
            return []
        files = frozenset({str(self.scratch / "candidate.py")})
        return stack.enter_context(ablated(files, which if isinstance(which, str) else None))

    def held_outputs(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Lay out the tensors that the first call returned, as they are now; very large ones are not kept.

        With ``key`` more calls are made before, on inputs drawn from it: buffers that take turns come round again.
        """
        if "key" in message:
            call_often(self, int(message["key"]))
        return self.offer(shrink(self.held_first or [], message.get("sample")))

    def seen(self, _message: dict[str, Any] | None = None, _fds: list[int] | None = None) -> dict[str, Any]:
        """Return what tripwires and audit hook have seen until now."""
        return {
            "tripped": self.tripped(),
            "attempts": list(self.audit.notes) if self.audit is not None else [],
        }

    def truth_module(self) -> tuple[torch.nn.Module, StateSnapshot]:
        """Return the float64 copy of the module, made at first use."""
        if self.truth is None:
            self.snapshot.restore(self.built)
            self.truth = copy.deepcopy(self.built).double()
            self.truth_snapshot = StateSnapshot.take(self.truth)
        return self.truth, self.truth_snapshot

    def plan_reduction(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Find how inputs can shrink for the interpreter (Reference Runner)."""
        args, kwargs = self.draw(int(message["key"]))
        compiled = self.device != "cpu"
        module, snapshot = self.built, self.snapshot
        if compiled and structure.has_indices((args, kwargs)):
            # An index beyond a narrowed dimension is an exception on a CPU; on a GPU it ends the process's context.
            module = copy.deepcopy(self.built).cpu()
            snapshot = StateSnapshot.take(module)
            args, kwargs = structure.map_tensors(lambda _path, tensor: tensor.cpu(), (args, kwargs))

        def forward(*call_args: Any, **call_kwargs: Any) -> Any:
            snapshot.restore(module)
            with torch.no_grad():
                return module(*call_args, **call_kwargs)

        budget = int(message["elements"])
        plan = values.reduce_plan(forward, args, kwargs, budget, compiled=compiled)
        given = structure.elements((args, kwargs))
        if not plan and module is self.built and 0 < given <= budget:
            made = structure.elements(forward(*args, **kwargs))
            if made > budget:  # few indices, wide rows: the work is in the outputs
                smaller = max(budget * given // made, 1)
                plan = values.reduce_plan(forward, args, kwargs, smaller, compiled=compiled)
        self.snapshot.restore(self.built)
        return {"plan": plan}

    def set_reduction(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Use a reduction plan from now on."""
        self.reduce = message["plan"]
        return {}

    def capture(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Return the ATen graph of one call at full size."""
        args, kwargs = self.draw_whole(int(message["key"]))
        self.snapshot.restore(self.built)
        try:
            with torch.no_grad(), self.under_autocast():
                graph = graph_capture.capture(self.built, args, kwargs)
        except graph_capture.CaptureError as error:
            raise loading.LoadFailure("load", "capture", str(error)) from error
        autocast = self.meta.get("autocast")
        return {"graph": write_casts(graph, autocast) if autocast else graph}

    def under_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the task's autocast, or nothing."""
        autocast = self.meta.get("autocast")
        if not autocast:
            return contextlib.nullcontext()
        return autocast_everywhere(getattr(torch, autocast))

    def parts(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        """Return how the module's parts are called in one call at full size (:mod:`drk.gym.runner.parts`)."""
        inputs = self.draw_whole(int(message["key"]))
        rounds = 1 if self.device == "cpu" else 2  # the first call on a GPU loads libraries
        rows: list[dict[str, Any]] = []
        for _ in range(rounds):
            self.snapshot.restore(self.built)
            with torch.no_grad(), self.under_autocast():
                rows = record_parts(self.built, *inputs, device=self.device)
        self.snapshot.restore(self.built)
        return {"parts": rows}

    # --- transfer ----------------------------------------------------------------------------------------

    def offer(self, named: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Keep tensors for :meth:`write` and answer their layout and strides."""
        self.pending = named
        self.layout, size = transfer.plan_layout(named)
        strides = [list(tensor.stride()) for _, tensor in named]
        return {"layout": self.layout, "bytes": size, "strides": strides}

    def write(self, _message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Write the pending tensors to the arena, or to the descriptor that came along."""
        transfer.write_tensors(fds[0] if fds else self.arena_fd, self.pending, self.layout)
        self.pending = []
        return {}
