"""From a command's options to its Task, also where that takes a run of the user's code: shared by the commands.

Three things cannot be read from the text alone: what a user's own command calls the target with (``--capture``), what a
module hands to one of its parts (recorded in a sandboxed Runner, when the whole module's inputs are known), and what a
pickled state dict holds (read in a sandboxed Runner). Everything else is :mod:`drk.assistant.intake`.

Left out: several kinds of captured calls in one search; the most frequent one is taken, the others are named.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from drk.assistant.errors import TargetError, UsageError
from drk.assistant.intake import call_inputs, constructor_inputs, locate_target, resolve_target
from drk.assistant.regions_choice import read_call
from drk.assistant.state_file import build_blob, read_state
from drk.assistant.target import Located
from drk.gym.schema import Inputs, Mode, Precision, Task, Tolerance
from drk.gym.settings import GymSettings

AUTOCAST = {"bf16": "bfloat16", "bfloat16": "bfloat16", "f16": "float16", "fp16": "float16", "float16": "float16"}
LONGEST_CAPTURE_S = 3600.0

InputTexts = Annotated[
    list[str] | None, typer.Option("--input", help="A call argument, such as 'x=f32[128,1024]'; repeatable.")
]
InitTexts = Annotated[
    list[str] | None, typer.Option("--init", help="A constructor argument, such as 'dim=1024'; repeatable.")
]
IsFactory = Annotated[
    bool | None, typer.Option("--factory/--no-factory", help="The named function returns a module, or does not.")
]
Captured = Annotated[
    str, typer.Option("--capture", metavar="COMMAND", help="Your own command: inputs as it calls the target.")
]
Trains = Annotated[
    bool, typer.Option("--train", help="It trains: train mode, and gradients are judged and get kernels too.")
]
Autocast = Annotated[str, typer.Option("--autocast", metavar="DTYPE", help="Call it under autocast: bf16 or f16.")]


@dataclass(frozen=True)
class TaskOptions:
    """What the command line says about the task. ``capture`` is the user's own command line.

    ``train`` stands for train mode and for gradients of inputs and parameters.
    """

    target: str
    inputs: Sequence[str] = ()
    init: Sequence[str] = ()
    mode: Mode = "eval"
    factory: bool | None = None
    state_dict: Path | None = None
    capture: str = ""
    autocast: str = ""
    train: bool = False

    @property
    def run_mode(self) -> Mode:
        """The module's mode."""
        return "train" if self.train else self.mode


def build_task(
    options: TaskOptions,
    gym: GymSettings,
    *,
    precision: Precision = "match",
    tolerance: Tolerance = "float64",
    tell: Callable[[str], None] = lambda _text: None,
) -> Task:
    """Return the task; ``gym`` says where user code runs, ``tell`` is told what was left out.

    Raises:
        TargetError: the target cannot be used, or its inputs are not known.
        UsageError: an option is wrong.
        drk.gym.errors.TaskError: the user's code failed while it was run for this.
    """
    autocast = autocast_name(options.autocast)
    if options.capture:
        return _captured(options, autocast, precision, tolerance, tell)
    convert = _converter(gym)
    facts = {"mode": options.run_mode, "precision": precision, "tolerance": tolerance, "factory": options.factory}
    inputs: Inputs | None = None
    located = locate_target(options.target, factory=options.factory)
    if located.target.submodule and not options.inputs:
        inputs = _part_inputs(options, gym, convert)
    task = resolve_target(
        options.target,
        inputs=options.inputs,
        init=options.init,
        state_dict=options.state_dict,
        convert_state=convert,
        known_inputs=inputs,
        **facts,  # type: ignore[arg-type]
    )
    return replace(task, autocast=autocast, grad=options.train)


def autocast_name(text: str) -> str | None:
    """Return the torch name of an autocast dtype, or null for none.

    Raises:
        UsageError: there is no such autocast.
    """
    if not text:
        return None
    if text not in AUTOCAST:
        raise UsageError(f"--autocast: {text} is none of bf16, f16", help="--autocast bf16")
    return AUTOCAST[text]


def _captured(
    options: TaskOptions,
    autocast: str | None,
    precision: Precision,
    tolerance: Tolerance,
    tell: Callable[[str], None],
) -> Task:
    if options.inputs:
        raise UsageError("--capture and --input exclude each other", help="leave one of them out")
    from drk.assistant.input_capture import capture_tasks

    state = options.state_dict
    if state is not None and state.suffix != ".safetensors":
        raise UsageError("--capture: --state-dict must be a .safetensors file", file=str(state))
    tasks = capture_tasks(
        options.target,
        options.capture,
        init=options.init,
        precision=precision,
        tolerance=tolerance,
        state_dict=state,
        timeout_s=LONGEST_CAPTURE_S,
    )
    first = replace(tasks[0], mode="train", grad=True) if options.train else tasks[0]
    if len(tasks) > 1:
        tell(f"captured {len(tasks)} kinds of calls; the most frequent one ({first.weight:.0%} of them) is taken")
    return replace(first, autocast=autocast) if autocast else first


def _part_inputs(options: TaskOptions, gym: GymSettings, convert: Callable[[Path], bytes]) -> Inputs:
    """Return what the whole module hands to its part in one call.

    Raises:
        TargetError: the whole module's inputs are not known, or it does not call the part in one way.
    """
    located = locate_target(options.target, factory=options.factory)
    part = located.target.submodule
    whole = replace(located, target=replace(located.target, submodule=""))
    task = whole.task(constructor_inputs(whole, options.init), _whole_inputs(whole, options))
    if options.state_dict is not None:
        task = replace(task, tensors=read_state(options.state_dict, None, convert))
    rows = asyncio.run(_parts(replace(task, mode=options.run_mode), gym))
    row = next((one for one in rows if one["path"] == part), None)
    call = read_call(row) if row is not None else None
    if call is None:
        why = f"{whole.target.label} never calls it" if row is None else "it is called in several ways"
        raise TargetError(
            f"the inputs of {located.target.label} are not known",
            kind="missing-inputs",
            file=located.file,
            cause=f"a run of the whole module was looked at: {why}",
            help=f"type them: {options.target} --input 'f32[8,128]'",
        )
    return call


def _whole_inputs(whole: Located, options: TaskOptions) -> Inputs:
    label = whole.target.label
    try:
        return call_inputs(whole, ())
    except TargetError as error:
        raise TargetError(
            f"the inputs of {options.target.rpartition(':')[2]} are not known",
            kind="missing-inputs",
            file=whole.file,
            cause=f"nor are those of {label}, from which they could be recorded",
            help=f"type them: {options.target} --input 'f32[8,128]'\nor define example_inputs() for {label}",
        ) from error


async def _parts(task: Task, gym: GymSettings) -> list[dict[str, Any]]:
    from drk.gym.engine import Gym

    async with Gym(replace(gym, offline_compile=False)) as opened:
        return await opened.parts(task)


def _converter(gym: GymSettings) -> Callable[[Path], bytes]:
    """Return what turns a pickled state dict into safetensors bytes, in a sandboxed process."""

    def convert(path: Path) -> bytes:
        return asyncio.run(_convert(path, gym))

    return convert


async def _convert(path: Path, gym: GymSettings) -> bytes:
    from drk.gym.engine import Gym
    from drk.gym.state_reading import read_pickled

    async with Gym(replace(gym, offline_compile=False)) as opened:
        return build_blob(await read_pickled(opened, path))
