"""Builds the module under test inside a sandboxed Runner: the user's reference, or a candidate's ``ModelNew``.

Classes are built from the task's constructor arguments, factories are called with them, functions are wrapped in
:class:`FunctionModule`; then come the state dict, the submodule, the mode and the device. A candidate is built with the
reference's constructor arguments, or with none when it takes none (a part of a module, a function).

Failures are :class:`~drk.gym.runner.failures.LoadFailure` with the user's own line. How files are imported is
:mod:`drk.gym.runner.importing`; copying weights into a candidate is not done here.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from drk.gym.runner import values
from drk.gym.runner.failures import LoadFailure, user_code
from drk.gym.runner.importing import Reference, import_file, load_namespace, neutralise_process

__all__ = [
    "FunctionModule",
    "LoadFailure",
    "Reference",
    "build_candidate",
    "candidate_arguments",
    "function_module",
    "init_arguments",
    "load_candidate",
    "load_namespace",
    "load_reference",
    "load_state",
    "select_submodule",
]

CANDIDATE_CLASS = "ModelNew"
CANDIDATE_MODULE = "drk_candidate"
TENSORS_FILE = "tensors.safetensors"
LAZY_KINDS = (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)


class FunctionModule(nn.Module):
    """A plain function as a stateless module.

    Raises:
        LoadFailure: kind ``function-returned-module``, when the function turns out to be a factory.
    """

    def __init__(self, function: Callable[..., Any], name: str, file: str) -> None:
        super().__init__()
        self.function = function
        self.name = name
        self.file = file

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        result = self.function(*args, **kwargs)
        if isinstance(result, nn.Module):
            raise LoadFailure(
                "load",
                "function-returned-module",
                f"{self.name}() returns a module ({type(result).__name__}): it is a factory, not the code to speed up",
                file=self.file,
                help=f"add --factory, or annotate it: def {self.name}(...) -> nn.Module",
            )
        return result


def function_module(function: Callable[..., Any], name: str, file: str) -> FunctionModule:
    """Wrap ``function`` in a :class:`FunctionModule` whose ``forward`` shows the function's own signature."""
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):
        return FunctionModule(function, name, file)

    def forward(self: FunctionModule, *args: Any, **kwargs: Any) -> Any:
        return FunctionModule.forward(self, *args, **kwargs)

    bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    if "self" in own.parameters:
        return FunctionModule(function, name, file)
    forward.__signature__ = own.replace(parameters=[bound, *own.parameters.values()])  # type: ignore[attr-defined]
    kind = type("FunctionModule", (FunctionModule,), {"forward": forward, "__doc__": FunctionModule.__doc__})
    return kind(function, name, file)  # type: ignore[no-any-return]


# --- building the reference -----------------------------------------------------------------------------------


def lookup(namespace: types.ModuleType, dotted: str, entry: str) -> Any:
    """Return the object that ``dotted`` names in the entry file.

    Raises:
        LoadFailure: kind ``missing-target``.
    """
    found: Any = namespace
    for part in dotted.split("."):
        if not hasattr(found, part):
            raise LoadFailure("load", "missing-target", f"{entry} defines no {dotted!r}", file=entry)
        found = getattr(found, part)
    return found


def init_arguments(reference: Reference, seed: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the constructor's arguments, drawn on the CPU from ``seed``.

    Raises:
        LoadFailure: the user's function for them raised.
    """
    spec = dict(reference.meta.get("init") or {"kind": "call"})
    if spec["kind"] == "function":
        spec["permute"] = False
    return values.draw_inputs(spec, seed, "cpu", reference=reference)


def _source_line(target: Any) -> int | None:
    code = getattr(inspect.unwrap(target), "__code__", None) if callable(target) else None
    return getattr(code, "co_firstlineno", None)


def _build(reference: Reference, seed: int) -> nn.Module:
    """Build the whole module that the target names: class, instance, factory or function."""
    meta, entry = reference.meta, reference.entry
    dotted, kind = str(meta["target"]), meta.get("target_kind", "module")
    target = lookup(reference.namespace, dotted, entry)
    if isinstance(target, nn.Module):
        return target
    if kind == "function":
        if not callable(target):
            raise LoadFailure("load", "not-callable", f"{dotted} is no function", file=entry)
        return function_module(target, dotted, entry)
    if kind == "module" and not (isinstance(target, type) and issubclass(target, nn.Module)):
        raise LoadFailure("load", "not-a-module", f"{dotted} is not a class derived from torch.nn.Module", file=entry)
    reference.init = init_arguments(reference, seed)
    args, kwargs = reference.init
    values.seed_everything(seed)
    with user_code("load", reference.source_root, kind="constructor-raised", what=f"{dotted}({_shown(args, kwargs)})"):
        built = target(*args, **kwargs)
    if not isinstance(built, nn.Module):
        raise LoadFailure(
            "load",
            "factory-no-module",
            f"{dotted}() returns {type(built).__name__}, not a torch.nn.Module",
            file=entry,
            line=_source_line(target),
        )
    return built


def _shown(args: list[Any], kwargs: dict[str, Any]) -> str:
    parts = [repr(value) for value in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    text = ", ".join(parts)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _unwrap_compiled(module: nn.Module, reference: Reference) -> nn.Module:
    inner = getattr(module, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        reference.notes.append("the file compiles the module itself (torch.compile); the uncompiled module is judged")
        return inner
    return module


def select_submodule(module: nn.Module, path: str, entry: str) -> nn.Module:
    """Return the part at a dotted ``path``; an empty path is the module itself.

    Raises:
        LoadFailure: kind ``missing-submodule``, naming the nearest part and its children.
    """
    current = module
    done: list[str] = []
    for part in path.split(".") if path else []:
        children = dict(current.named_children())
        if part not in children:
            where = ".".join(done) or type(module).__name__
            names = ", ".join(list(children)[:12]) or "none"
            raise LoadFailure(
                "load", "missing-submodule", f"{where} has no submodule {part!r}; it has: {names}", file=entry
            )
        current = children[part]
        done.append(part)
    return current


def _tied(own: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the missing keys whose tensor is tied to one that is there: files often hold tied weights once."""
    present = {own[key].data_ptr(): value for key, value in state.items() if key in own and own[key].numel()}
    lacking = [key for key in own if key not in state]
    return {key: present[own[key].data_ptr()] for key in lacking if own[key].data_ptr() in present}


def load_state(module: nn.Module, file: Path, entry: str) -> bool:
    """Load the tensors named ``state.<key>`` of a safetensors file into ``module``; return whether there were any.

    A common ``module.`` prefix (DataParallel) is dropped when the module's own keys do not have it.

    Raises:
        LoadFailure: kind ``state-mismatch``, naming missing, unexpected and misshapen keys.
    """
    with safe_open(file, framework="pt") as source:
        names = [name for name in source.keys() if name.startswith("state.")]  # noqa: SIM118 - not a mapping
        state = {name.removeprefix("state."): source.get_tensor(name) for name in names}
    if not state:
        return False
    own = module.state_dict()
    if all(key.startswith("module.") for key in state) and not any(key.startswith("module.") for key in own):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    state |= _tied(own, state)
    wrong = {
        "missing": sorted(set(own) - set(state)),
        "unexpected": sorted(set(state) - set(own)),
        "of another shape": sorted(k for k in set(own) & set(state) if tuple(own[k].shape) != tuple(state[k].shape)),
    }
    told = "; ".join(f"{what}: {', '.join(keys[:8])}" for what, keys in wrong.items() if keys)
    if told:
        raise LoadFailure("load", "state-mismatch", f"the state dict does not fit the module: {told}", file=entry)
    module.load_state_dict(state, strict=True)
    return True


def _materialise(reference: Reference, module: nn.Module) -> None:
    """Run lazy modules once where they were built, so that their parameters exist before the module is moved."""
    lazy = any(isinstance(part, LAZY_KINDS) for part in [*module.parameters(), *module.buffers()])
    if not lazy:
        return
    device = torch.get_default_device()
    captured = _tensors_file(reference.source_root)
    args, kwargs = values.draw_inputs(reference.meta["inputs"], 0, device, reference=reference, tensors=captured)
    values.seed_everything(0)
    told = "first call of a lazy module"
    with user_code("load", reference.source_root, kind="forward-raised", what=told), torch.no_grad():
        module(*args, **kwargs)


def _tensors_file(source_root: Path) -> Path | None:
    path = source_root.parent / TENSORS_FILE
    return path if path.is_file() else None


def load_reference(
    meta: Mapping[str, Any],
    source_root: Path,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    tensors: Path | None = None,
) -> Reference:
    """Import the entry file, build the target, load its state, select the submodule, set the mode, move it.

    Args:
        meta: the task's JSON without sources and tensors (``entry``, ``target``, ``target_kind``, ``submodule``,
            ``init``, ``inputs``, ``mode``).
        source_root: folder with the task's files.
        seed: every generator is seeded from it before the constructor runs.
        device: where the module goes.
        tensors: safetensors file with ``state.<key>``; by default ``tensors.safetensors`` beside ``source_root``.

    Raises:
        LoadFailure: anything in the user's code or the task failed.
    """
    reference = load_namespace(meta, source_root)
    whole = _unwrap_compiled(_build(reference, seed), reference)
    module = select_submodule(whole, str(meta.get("submodule") or ""), reference.entry)
    whole.eval()
    _materialise(reference, module)
    whole.train(meta.get("mode") == "train")
    with user_code("load", reference.source_root, kind="device-raised", what=f"moving the module to {device}"):
        whole.to(device)
    file = tensors or _tensors_file(reference.source_root)
    if file is not None and load_state(whole, file, reference.entry):
        reference.notes.append("the weights come from the given state dict")
    reference.built = module
    return reference


# --- the candidate --------------------------------------------------------------------------------------------


def load_candidate(path: Path, meta: Mapping[str, Any] | None = None) -> type[nn.Module]:
    """Import a candidate's file and return its ``ModelNew``.

    Raises:
        LoadFailure: kinds ``syntax``, ``import-raised``, ``no-modelnew``, ``not-a-class``, ``not-a-module``, ...
    """
    neutralise_process(str((meta or {}).get("entry", path.name)))
    root = path.resolve().parent
    with user_code("load", root, kind="import-raised", what="importing the candidate"):
        module = import_file(CANDIDATE_MODULE, path.resolve())
    found = getattr(module, CANDIDATE_CLASS, None)
    if found is None:
        classes = [name for name, value in vars(module).items() if isinstance(value, type)]
        told = f"; it defines: {', '.join(classes[:8])}" if classes else ""
        raise LoadFailure("load", "no-modelnew", f"the candidate defines no {CANDIDATE_CLASS}{told}", file=path.name)
    if not isinstance(found, type):
        kind = type(found).__name__
        raise LoadFailure("load", "not-a-class", f"{CANDIDATE_CLASS} is no class but a {kind}", file=path.name)
    if not issubclass(found, nn.Module):
        raise LoadFailure(
            "load", "not-a-module", f"{CANDIDATE_CLASS} is not derived from torch.nn.Module", file=path.name
        )
    return found


def candidate_arguments(
    kind: type[nn.Module], init: tuple[list[Any], dict[str, Any]], file: str
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that ``ModelNew`` is built with: the reference's, or none when it takes none.

    Raises:
        LoadFailure: kind ``bad-signature``.
    """
    if kind.__init__ is nn.Module.__init__:
        return [], {}  # Its signature says anything goes, and then it refuses.
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):
        return init
    for args, kwargs in (init, ([], {})):
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        return args, kwargs
    raise LoadFailure(
        "load",
        "bad-signature",
        f"{CANDIDATE_CLASS}{signature} takes neither the reference's arguments ({_shown(*init)}) nor none",
        file=file,
        line=_source_line(kind.__init__),
    )


def build_candidate(
    path: Path,
    meta: Mapping[str, Any],
    reference: Reference,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Import the candidate and build its ``ModelNew`` with the reference's constructor arguments, seeded alike.

    Raises:
        LoadFailure: see :func:`load_candidate`; kinds ``bad-signature`` and ``constructor-raised`` too.
    """
    kind = load_candidate(path, meta)
    plain = meta.get("target_kind", "module") != "function" and not meta.get("submodule")
    init = init_arguments(reference, seed) if plain else ([], {})
    args, kwargs = candidate_arguments(kind, init, path.name)
    values.seed_everything(seed)
    with user_code("load", path.resolve().parent, kind="constructor-raised", what=f"{CANDIDATE_CLASS}()"):
        built = kind(*args, **kwargs)
    built.train(meta.get("mode") == "train")
    with user_code("load", path.resolve().parent, kind="device-raised", what=f"moving the module to {device}"):
        return built.to(device)
