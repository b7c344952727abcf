"""Compile a module with Inductor without running it, so that the compiler's seconds need not hold the GPU.

``torch.compile`` compiles when it is first called, and then runs. Here the backend compiles and leaves by an exception;
what was compiled lies in Inductor's cache (in the Runner's scratch folder), where the real call finds it shortly after.

Left out: what follows a graph break (its inputs come from running what stands before; the real call compiles it), and
backward passes, which are compiled when they first run. A module of which nothing can be compiled is run. Where the
cache is switched off nothing is compiled ahead; a graph that the cache refuses is compiled twice. Honest limits: inputs
are drawn on the GPU, kernels are loaded onto it, and choosing whether to pad a matrix product times both ways there;
choosing among configurations of kernels does not happen here but at the real call.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class _Compiled(BaseException):
    """The graph is compiled. No Exception: neither user code nor the compiler is to catch it."""


def import_compiler() -> None:
    """Import what ``torch.compile`` needs, and have Inductor compute once what all its cache keys hold.

    Seconds that need neither a module nor (but for a look at its properties) the GPU.
    """
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch._inductor.compile_fx")
    codecache = importlib.import_module("torch._inductor.codecache")
    with contextlib.suppress(AttributeError, RuntimeError):  # otherwise named elsewhere, or no device: computed later
        codecache.torch_key()
        codecache.CacheBase.get_system()


def compile_ahead(module: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Compile the first graph of ``module`` as ``torch.compile`` would; say whether that was done.

    What fails here fails at the real call too, which says so.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    if not config.fx_graph_cache or config.force_disable_caches:
        return False

    def compile_only(graph: Any, inputs: Any) -> Any:
        compile_fx(graph, inputs)
        raise _Compiled

    try:
        torch.compile(module, backend=compile_only)(*args, **kwargs)
    except _Compiled:
        return True
    except Exception:  # noqa: BLE001 - user code and compilers raise anything; the real call reports it
        return False
    finally:
        torch._dynamo.reset()
    return False  # nothing to compile: it ran
