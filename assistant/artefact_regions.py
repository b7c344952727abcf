"""The artefact of a module that was optimised region by region: one file a region, one that puts them together.

``<stem>_kernels.py`` has the same face as any artefact's module (``optimize``, ``restore``, ``stats``, ``@optimized``)
and a table of places; ``<stem>_kernels_<n>.py`` holds a region's kernels with its own guard and fallback
(:mod:`drk.assistant.artefact`). The edit of the user's file is the usual one.

Left out: see :mod:`drk.assistant.artefact`; a region for which no artefact can be written keeps the original code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from drk.assistant.artefact import (
    HEADER,
    Artefact,
    SourceFile,
    below_marker,
    build_lines,
    draw_lines,
    edit_source,
    kernels_stem,
    module_source,
    user_place,
)
from drk.assistant.artefact_record import ArtefactError, constants, init_source
from drk.assistant.artefact_test_template import SETTING
from drk.assistant.episode import Turn, describe_gain
from drk.assistant.runs import Run
from drk.assistant.source_edit import unified_diff
from drk.gym.graph import graph_from_json
from drk.gym.schema import Task


@dataclass(frozen=True)
class RegionWin:
    """A region's run folder, its winning turn, and the paths (relative to the target) where it goes."""

    run: Run
    turn: Turn
    paths: tuple[str, ...]


_TEST = Template(
    '''\
"""Holds $kernels.py against $entry_name: same results, unchanged state, clean removal. Written by drk.

Runs on a CUDA device where there is one, else under Triton's interpreter; the parts check their own shapes.
"""

'''
    + SETTING
    + '''\
INTERPRETER_ELEMENTS = 2**18


def build():
    """The original, on the device, in the verified mode."""
    torch.manual_seed(0)
$build
    return kernels.restore(model)


def call(model):
    """One call without gradients, from equal random states."""
    torch.manual_seed(1)
$draw
    tensors = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    if DEVICE == "cpu" and sum(one.numel() for one in tensors) > INTERPRETER_ELEMENTS:
        pytest.skip("too large for the interpreter; run this on a CUDA device")
    move = lambda one: one.to(DEVICE) if isinstance(one, torch.Tensor) else one
    args, kwargs = torch.utils._pytree.tree_map(move, (list(args), kwargs))
    with torch.no_grad():
        return torch.utils._pytree.tree_leaves(model(*args, **kwargs))


def test_results_are_the_originals():
    expected = call(build())
    model = kernels.optimize(build()$build_argument)
    actual = call(model)
    assert kernels.stats(model)["kernel_calls"] > 0, kernels.stats(model)
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        scale = theirs.double().square().mean().sqrt().clamp_min(1e-6)
        assert (ours.double() - theirs.double()).square().mean().sqrt() <= $tolerance * scale


def test_state_is_the_models_own_and_restore_brings_the_original_back():
    model = build()
    before = model.state_dict(keep_vars=True)
    after = kernels.optimize(model$build_argument).state_dict(keep_vars=True)
    assert list(before) == list(after)
    assert all(before[key] is after[key] for key in before)
    kernels.restore(model)
    assert not kernels.stats(model)["optimized"]
    actual, expected = call(model), call(copy.deepcopy(model))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))
'''
)


def build_regions_artefact(
    task: Task, best: Turn, wins: Sequence[RegionWin], source: SourceFile, run_dir: Path
) -> Artefact:
    """Return the artefact of an accepted whole candidate. Nothing is written.

    Args:
        task: the whole task.
        best: the accepted turn of the whole module.
        wins: the regions in it.
        source: the user's file.
        run_dir: where the files will lie at first.

    Raises:
        ArtefactError: none of the regions, or not the whole, can be written down.
    """
    if task.submodule:
        raise ArtefactError("a part of a module cannot be cut into parts of its own in the artefact; name the module")
    stem = kernels_stem(task.entry)
    places: dict[str, str] = {}
    files: list[tuple[str, bytes]] = []
    reasons: list[str] = []
    for number, win in enumerate(wins, start=1):
        name = f"{stem}_kernels_{number}"
        try:
            text = _region_module(win)
        except ArtefactError as error:
            reasons.append(f"{win.paths[0]}: {error.message}")
            continue
        files.append((f"{name}.py", text.encode()))
        places |= dict.fromkeys(win.paths, name)
    if not places:
        raise ArtefactError("; ".join(reasons) or "no region was won")
    edited = edit_source(task, source)
    return Artefact(
        module_name=f"{stem}_kernels.py",
        module=_places_module(task, best, places).encode(),
        test_name=f"test_{stem}_kernels.py",
        test=_test(task, source, run_dir).encode(),
        diff_name=f"{stem}.diff",
        diff=unified_diff(source.data, edited, source.entry),
        edited=edited,
        parts=tuple(files),
    )


def _region_module(win: RegionWin) -> str:
    task = win.run.task()
    data = json.loads((win.run.folder / "graph.json").read_text())
    verified = constants(task, graph_from_json(data["graph"]), win.turn.verdict, data["judged"])
    return module_source(task, win.turn, verified)


def _places_module(task: Task, best: Turn, places: dict[str, str]) -> str:
    args, kwargs, function = init_source(task)
    how = {"gpu": "measured on a GPU", "interpreter": "logic checked by Triton's interpreter"}
    evidence = how.get(best.verdict.evidence, best.verdict.evidence)
    table = "".join(f'    "{path}": "{name}",\n' for path, name in places.items())
    return (
        f"{HEADER} for parts of {task.target} in {task.entry}: optimize(model), restore(model), stats(model), "
        "@optimized.\n"
        f"# Evidence for the whole module: {evidence}; {describe_gain(best.verdict)}.\n"
        f'"""Kernels in {len(places)} parts of {task.target}; everything else is the original\'s own code."""\n\n'
        "from __future__ import annotations\n\n"
        "import functools\nimport importlib\nfrom collections.abc import Callable\nfrom typing import Any\n\n"
        f'_TARGET = "{task.target}"\n_KIND = "{task.target_kind}"\n'
        f'_INIT_ARGS = {args}\n_INIT_KWARGS = {kwargs}\n_INIT_FUNCTION = "{function}"\n'
        f"_PLACES: dict[str, str] = {{\n{table}}}\n\n\n"
        f"{below_marker('artefact_regions_template').strip()}\n"
    )


def _test(task: Task, source: SourceFile, run_dir: Path) -> str:
    stem = kernels_stem(task.entry)
    name, packaged = user_place(task)
    top = source.path.parents[name.count(".")]
    package = f"{name.rpartition('.')[0]}." if packaged else ""
    half = any(word in json.dumps(task.files) for word in ("bfloat16", "float16", ".half()"))
    return _TEST.substitute(
        kernels=f"{stem}_kernels",
        kernels_when_beside=f"{package}{stem}_kernels",
        entry_name=Path(task.entry).name,
        user_module=name,
        root_when_beside=os.path.relpath(top, source.path.parent),
        root_when_not=os.path.relpath(top, run_dir),
        build=build_lines(task),
        build_argument=f", build=inspect.unwrap(user.{task.target})" if task.target_kind == "factory" else "",
        draw=draw_lines(task),
        tolerance="3e-2" if half else "1e-3",
    )
