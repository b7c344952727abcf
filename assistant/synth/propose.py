"""The builtin proposer: from a graph to an ordered list of candidates. Deterministic, no model, no network.

The variants of a graph and their order stand in :mod:`drk.assistant.synth.variants`; what their preference cannot know
the loop measures. With verdicts in ``history`` candidates that were tried are skipped, and further variants leave out
what the faulty line belongs to; where one was wrong at a shape that the task does not show (a number in it was a size,
and could not be told from another), further ones refuse other shapes.

Where the caller can measure on a GPU, modules that are bound by launches get variants in a CUDA graph as well
(:mod:`drk.assistant.synth.graphed_choice`).

Left out: shapes beyond the captured one; the emitted code itself reads sizes at run time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drk.assistant.synth.attention import write_attention
from drk.assistant.synth.backward_sums import write_sums
from drk.assistant.synth.body import KernelText
from drk.assistant.synth.depthwise import write_depthwise
from drk.assistant.synth.gathers import made_values
from drk.assistant.synth.graphed import NOTE, why_not_graphed
from drk.assistant.synth.graphed_choice import starting_us, with_graphs, without_docstring
from drk.assistant.synth.grid_sampling import write_grid_sample
from drk.assistant.synth.layouts import LARGE, adds_large_bias
from drk.assistant.synth.mapped import write_mapped
from drk.assistant.synth.matmul import write_matmul
from drk.assistant.synth.module_writer import Step, UnsupportedGraph, write_module
from drk.assistant.synth.naming import NameTable, kernel_words, value_names
from drk.assistant.synth.ordered_sums import write_ordered
from drk.assistant.synth.ordering import write_order
from drk.assistant.synth.patches import write_patches
from drk.assistant.synth.plans import Memo
from drk.assistant.synth.pointwise import write_pointwise
from drk.assistant.synth.pooling import write_pooling
from drk.assistant.synth.ragged import write_bags
from drk.assistant.synth.regions import Region
from drk.assistant.synth.resampling import write_resampling
from drk.assistant.synth.row_reduction import write_row
from drk.assistant.synth.running_places import write_places
from drk.assistant.synth.scan import write_scan
from drk.assistant.synth.scattering import write_scatter
from drk.assistant.synth.scatters import NOTE as NO_ORDER
from drk.assistant.synth.split_reduction import write_split
from drk.assistant.synth.tiles import Tile, ranked_tiles
from drk.assistant.synth.variants import Variant, variants
from drk.gym.graph import Graph, references
from drk.gym.graph_cost import VIEWS
from drk.gym.schema import Candidate


@dataclass(frozen=True)
class Written:
    """What a module was written from: the graph as captured and as rewritten, forward's steps, names of values."""

    captured: Graph
    graph: Graph
    steps: tuple[Step, ...]
    names: Mapping[str, str]
    variant: Variant


@dataclass(frozen=True)
class Compiled:
    """A variant's source with the kernels in it, and a note that says how it was made.

    ``written`` holds what the source was written from; ``launches`` counts kernels and operators that one call starts,
    and ``host_us`` is about what starting them takes.
    """

    source: str
    kernels: tuple[KernelText, ...]
    regions: tuple[Region, ...]
    note: str = ""
    launches: int = 0
    host_us: float = 0.0
    written: Written | None = None


def compile_graph(
    graph: Graph, variant: Variant, *, multiprocessors: int = 132, memo: Memo[Variant, Compiled] | None = None
) -> Compiled:
    """Return the module that ``variant`` makes of ``graph``; ``memo`` remembers plans of this graph.

    Raises:
        UnsupportedGraph: nothing can be fused, or the graph cannot be written as a module.
    """
    plan = (memo or Memo(graph, multiprocessors)).plan(variant.rules, channels_last=variant.channels_last)
    rewritten, planned = plan.graph, plan.regions
    if plan.thin:
        variant = replace(variant, note=f"{variant.note}; algebra: a summed product is a thin one")
    if any(item.scatter is not None and not item.scatter.ordered for item in planned):
        variant = replace(variant, note=f"{variant.note}; {NO_ORDER}")
    names = value_names(rewritten)
    possible = [region for region in planned if region.outputs or region.attention]
    metas = rewritten.metas()
    several = [item for item in possible if item.kind != "pointwise" or len(item.nodes) > 1 or _gathers_much(item)]
    regions = [*several, *(item for item in possible if item not in several and adds_large_bias(item.nodes, metas))]
    regions = regions or possible
    # A torch operator would hand its input's layout on to the module's caller.
    regions = possible if variant.channels_last else regions
    if not regions:
        raise UnsupportedGraph("no operators that a kernel could take together")
    steps = write_steps(rewritten, regions, names, NameTable(names.values()), variant, multiprocessors=multiprocessors)
    steps = without_unread(rewritten, steps)
    kernels = tuple(step.kernel for step in steps if step.kernel is not None)
    source = write_module(rewritten, steps, names, _summary(kernels, variant), exact_shapes=variant.exact_shapes)
    launches = sum(step.kernel is not None or step.nodes[0].bare_op not in VIEWS for step in steps)
    written = Written(graph, rewritten, tuple(steps), names, variant)
    host_us = starting_us(step.nodes[0] if step.kernel is None else None for step in steps)
    return Compiled(source, kernels, tuple(regions), variant.note, launches, host_us, written)


def _gathers_much(region: Region) -> bool:
    """Whether a region gathers so much that a kernel of its own is worth it: the library's takes twice as long."""
    return bool(region.gathers) and math.prod(region.shape) >= LARGE


def in_cuda_graph(compiled: Compiled) -> Compiled | None:
    """Return the same kernels replayed by a CUDA graph, or None where there can be none."""
    made = compiled.written
    if made is None or why_not_graphed(made.captured, made.graph):
        return None
    variant = replace(made.variant, note=f"{compiled.note}, {NOTE}")
    summary, exact = _summary(compiled.kernels, variant), variant.exact_shapes
    source = write_module(made.graph, made.steps, made.names, summary, exact_shapes=exact, graphed=True)
    return replace(compiled, source=source, note=variant.note)


def write_steps(
    graph: Graph,
    regions: Sequence[Region],
    names: Mapping[str, str],
    table: NameTable,
    variant: Variant,
    *,
    multiprocessors: int = 132,
    words: Callable[[Region], str] = kernel_words,
) -> list[Step]:
    """Write a kernel for each of ``regions``; what they leave stays single torch operators.

    Args:
        graph: the graph that was planned.
        regions: what to write kernels for.
        names: readable names of values.
        table: unique names for kernels are claimed here.
        variant: tiles and blocks.
        multiprocessors: of the device, for the choice of tiles.
        words: names a region's kernel.

    Raises:
        UnsupportedGraph: the regions depend on one another in a circle.
    """
    metas = graph.metas()
    owned: set[str] = set()
    steps: list[Step] = []
    for group in _ordered(graph, regions):
        if not isinstance(group, Region):
            steps.append(Step((group,)))
            continue
        name = table.claim(words(group))
        table.claim(f"{name}_kernel")
        known = frozenset(owned)
        if group.kind == "attention":
            kernel = _attention(group, name, names, graph, known, variant)
        elif group.kind == "matmul":
            kernel = write_matmul(group, name, names, metas, known, _tile(group, metas, variant, multiprocessors))
        else:
            write = _WRITERS[group.kind]
            kernel = write(group, name, names, metas, known, variant.block)
        owned |= set(kernel.outputs) if group.kind != "attention" else set()
        steps.append(Step(group.nodes, kernel))
    return steps


def without_unread(graph: Graph, steps: Sequence[Step]) -> list[Step]:
    """Leave out torch operators that only make integers which the kernels know by themselves."""
    made = made_values(graph)
    wanted = {*references(graph.output), *graph.mutations.values()}
    kept: list[Step] = []
    for step in reversed(steps):
        if step.kernel is None and step.nodes[0].name in made and step.nodes[0].name not in wanted:
            continue
        wanted |= {*(step.nodes[0].inputs() if step.kernel is None else step.kernel.inputs)}
        kept.append(step)
    return kept[::-1]


def _attention(
    region: Region, name: str, names: Mapping[str, str], graph: Graph, owned: frozenset[str], variant: Variant
) -> KernelText:
    """Heads become features again where a transposition of dimensions 1 and 2 is all that reads the result."""
    result = region.products[1].node.name
    readers = [node for node in graph.nodes if result in node.inputs()]
    turned = [node.bare_op == "transpose" and {*node.args[1:]} in ({1, 2}, {-2, -3}) for node in readers]
    turned += [node.bare_op == "permute" and node.args[1] == (0, 2, 1, 3) for node in readers]
    features_next = len(region.shape) == 4 and len(readers) == 1 and any(turned)
    return write_attention(region, name, names, graph.metas(), owned, variant.tile_rank, features_next=features_next)


_WRITERS = {
    "row": write_row,
    "split": write_split,
    "pointwise": write_pointwise,
    "mapped": write_mapped,
    "pool": write_pooling,
    "resample": write_resampling,
    "depthwise": write_depthwise,
    "scan": write_scan,
    "scatter": write_scatter,
    "bags": write_bags,
    "order": write_order,
    "ordered": write_ordered,
    "places": write_places,
    "patches": write_patches,
    "grid": write_grid_sample,
    "sums": write_sums,
}


def _tile(region: Region, metas: Any, variant: Variant, multiprocessors: int) -> Tile:
    product = region.products[0]
    channels, inner = metas[product.left].shape[:2] if product.of_pixels else (1, metas[product.left].shape[-1])
    rows = channels if product.of_pixels else math.prod(region.shape[:-1])
    tiles = ranked_tiles(
        rows,
        math.prod(region.shape) // rows,
        inner,
        half=product.node.meta.dtype != "float32",
        pair=len(region.products) > 1,
        multiprocessors=multiprocessors,
    )
    return tiles[min(variant.tile_rank, len(tiles) - 1)]


def _ordered(graph: Graph, regions: Sequence[Region]) -> list[Any]:
    """Regions and loose nodes in an order in which every value exists before it is read."""
    owner = {name: region for region in regions for name in region.names}
    pending: list[Any] = []
    for node in graph.nodes:
        item = owner.get(node.name, node)
        if not any(item is other for other in pending):
            pending.append(item)
    available = {item.name for item in graph.placeholders}
    result: list[Any] = []
    while pending:
        for index, item in enumerate(pending):
            nodes = item.nodes if isinstance(item, Region) else (item,)
            inside = {node.name for node in nodes}
            if all(name in available or name in inside for node in nodes for name in node.inputs()):
                result.append(pending.pop(index))
                available |= inside
                break
        else:
            raise UnsupportedGraph("the fusion plan has a cycle")
    return result


def _summary(kernels: Sequence[KernelText], variant: Variant) -> str:
    lines = [f"{variant.note}.", "", "Fused, so that intermediate results stay in registers:"]
    lines += [f"- ``{kernel.name}_kernel``: {kernel.formula}" for kernel in kernels]
    return "\n".join(lines) + "\n"


class BuiltinProposer:
    """The fusion compiler behind the proposer interface."""

    name = "builtin"

    def __init__(self) -> None:
        self._memo: Memo[Variant, Compiled] | None = None

    def propose(
        self,
        graph: Graph,
        *,
        hardware: Any = None,
        history: Sequence[Any] = (),
        limit: int = 8,
        graphs: bool = False,
    ) -> list[Candidate]:
        """Return up to ``limit`` candidates, most promising first; those already in ``history`` are left out.

        ``hardware`` may be a mapping or object with ``sm_count``; ``history`` holds turns with ``candidate``
        and ``verdict``; ``graphs`` lets modules that are bound by launches have CUDA graphs, which only a GPU can
        judge. An empty list means that nothing (more) can be proposed.
        """
        multiprocessors = _fact(hardware, "sm_count", 132)
        tried = {
            without_docstring(turn.candidate.source) for turn in history if getattr(turn, "candidate", None) is not None
        }
        found: list[Candidate] = []
        memo = self._memo
        if memo is None or memo.graph is not graph or memo.multiprocessors != multiprocessors:
            memo = self._memo = Memo(graph, multiprocessors)
        blamed = blamed_nodes(graph, history, multiprocessors, memo)
        again = (
            [replace(item, rules=replace(item.rules, excluded=blamed)) for item in variants(graph)] if blamed else []
        )
        first = [replace(item, exact_shapes=True) for item in variants(graph)] if wrong_elsewhere(history) else []
        plain = Forms(memo, [*first, *variants(graph), *again])
        for compiled in with_graphs(plain, in_cuda_graph, graph, history, hardware) if graphs else plain:
            code = without_docstring(compiled.source)
            if code in tried:
                continue
            tried.add(code)
            found.append(Candidate(compiled.source, proposer=self.name, note=compiled.note))
            if len(found) >= limit:
                break
        return found


class Forms:
    """What variants of one graph compile to, those that do; each is compiled when it is first asked for, and once."""

    def __init__(self, memo: Memo[Variant, Compiled], variants: Sequence[Variant]) -> None:
        self._memo = memo
        self._variants = variants

    def __iter__(self) -> Iterator[Compiled]:
        """Yield the compiled variants in order."""
        for variant in self._variants:
            made = self._memo.compiled(variant, self._compiled)
            if made is not None:
                yield made

    def _compiled(self, variant: Variant) -> Compiled | None:
        memo = self._memo
        try:
            return compile_graph(memo.graph, variant, multiprocessors=memo.multiprocessors, memo=memo)
        except UnsupportedGraph:
            return None


def wrong_elsewhere(history: Sequence[Any]) -> bool:
    """Say whether a candidate was right at the task's shapes and wrong at another."""
    verdicts = [turn.verdict for turn in history if getattr(turn, "verdict", None) is not None]
    return any(flag.kind == "shape-wrong" for verdict in verdicts for flag in getattr(verdict, "flags", ()))


def blamed_nodes(
    graph: Graph, history: Sequence[Any], multiprocessors: int = 132, memo: Memo[Variant, Compiled] | None = None
) -> frozenset[str]:
    """Names of the nodes whose kernels hold the line at which candidates of this proposer failed."""
    blamed: set[str] = set()
    forms = Forms(memo or Memo(graph, multiprocessors), variants(graph))
    for turn in history:
        error = getattr(getattr(turn, "verdict", None), "error", None)
        if error is None or error.line is None:
            continue
        kernel = _kernel_at(turn.candidate.source, error.line)
        for compiled in forms:
            if without_docstring(compiled.source) == without_docstring(turn.candidate.source):
                outputs = {
                    name
                    for item in compiled.kernels
                    if kernel in (item.name, f"{item.name}_copy")
                    for name in item.outputs
                }
                blamed |= {name for region in compiled.regions if region.names & outputs for name in region.names}
                break
    return frozenset(blamed)


def _kernel_at(source: str, line: int) -> str:
    """Name of the launcher whose code, or whose kernel's code, stands at ``line`` (1-based), or an empty string."""
    for above in reversed(source.splitlines()[:line]):
        if above.startswith("def "):
            return re.sub(r"(_pass\d+)?(_kernel)?$", "", above[4:].split("(")[0])
    return ""


def _fact(hardware: Any, name: str, default: int) -> int:
    value = hardware.get(name, default) if isinstance(hardware, dict) else getattr(hardware, name, default)
    return int(value)
