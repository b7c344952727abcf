"""Fusion candidates: neighbouring operations of one module that could be one kernel, with what that saves at least.

A chain is a run of slices within one call of one module (or of its parts), each pointwise, a normalisation or a
reduction, optionally begun by a matrix product or convolution (whose epilogue the rest becomes). Fused, what lies
between two operations stays on the chip: the smaller of what one writes and the next reads is not moved.

That is an estimate from names and shapes: data flow is not looked at, so a neighbour may read something else; the
builtin proposer, which has the graph, decides what really fuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from drk.assistant.profile_costs import bare_name, operands
from drk.assistant.profile_rows import Ground
from drk.assistant.profile_trace import Slice
from drk.assistant.profile_work import amdahl
from drk.assistant.report import Figure, FusionCandidate
from drk.gym.graph_cost import VIEWS

MAX_CANDIDATES = 20
MAX_CHAIN = 12

# fmt: off
_POINTWISE = frozenset((
    "add", "sub", "rsub", "mul", "div", "pow", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid",
    "tanh", "relu", "gelu", "silu", "elu", "selu", "mish", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu",
    "clamp", "clamp_min", "clamp_max", "where", "masked_fill", "dropout", "native_dropout", "softplus", "log_sigmoid",
    "square", "sin", "cos", "erf", "maximum", "minimum", "addcmul", "addcdiv", "lerp", "to", "_to_copy", "type_as",
    "float", "half", "bfloat16", "copy", "glu", "threshold", "logsigmoid",
))
_NORMS = frozenset((
    "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "native_group_norm", "softmax",
    "_softmax", "log_softmax", "_log_softmax", "batch_norm", "native_batch_norm", "instance_norm", "sum", "mean",
    "amax", "amin", "var", "std", "norm", "linalg_vector_norm", "logsumexp", "normalize",
))
_STARTS = frozenset(("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "conv1d", "conv2d", "conv3d", "convolution",
                     "_convolution", "cudnn_convolution", "mkldnn_convolution", "conv_transpose2d"))
# fmt: on


def _name(piece: Slice) -> str:
    return bare_name(piece.op).removesuffix("_") or piece.op


def _chains(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Yield maximal runs of fusable slices; ``slices`` are in the order in which they ran, gaps are other phases."""
    chain: list[Slice] = []
    for piece in slices:
        name = _name(piece)
        if name in VIEWS:
            continue
        joins = name in _POINTWISE or name in _NORMS
        if joins and len(chain) < MAX_CHAIN and (not chain or _common(chain[0], piece)):
            chain.append(piece)
            continue
        yield chain
        chain = [piece] if joins or name in _STARTS else []
    yield chain


def _common(left: Slice, right: Slice) -> tuple[tuple[int, int], ...]:
    """Return the module calls around both, outermost first; none where phase or step differ."""
    if left.phase != right.phase or left.step != right.step:
        return ()
    shared = []
    for one, other in zip(left.calls, right.calls, strict=False):
        if one != other:
            break
        shared.append(one)
    return tuple(shared)


def fusion_candidates(slices: Sequence[Slice], ground: Ground) -> tuple[FusionCandidate, ...]:
    """Return candidates by what they save, the most first."""
    order = [piece for piece in sorted(slices, key=lambda item: item.host_us) if piece.phase == "forward"]
    groups: dict[tuple[tuple[str, ...], int | None, int | None], list[list[Slice]]] = {}
    for chain in _chains(order):
        if len(chain) >= 2:
            key = (tuple(_name(piece) for piece in chain), _owner(chain), chain[0].line)
            groups.setdefault(key, []).append(chain)
    found = [_candidate(ops, owner, chains, ground) for (ops, owner, _), chains in groups.items()]
    kept = [one for one in found if one.saved_us.value > 0]
    return tuple(sorted(kept, key=lambda one: -one.saved_us.value)[:MAX_CANDIDATES])


def _owner(chain: Sequence[Slice]) -> int | None:
    """Return the innermost module that all of a chain runs in."""
    shared = _common(chain[0], chain[-1])
    return shared[-1][0] if shared else None


def _moved_bytes(piece: Slice) -> tuple[int, int]:
    """Return (bytes of the largest operand, bytes of all operands and a result of that size)."""
    largest = everything = 0
    for call, _ in piece.works:
        sizes = [tensor.size_bytes for tensor in operands(call)]
        if sizes:
            largest = max(largest, *sizes)
            everything += sum(sizes)
    return largest, everything + largest


def _candidate(ops: tuple[str, ...], owner: int | None, chains: list[list[Slice]], ground: Ground) -> FusionCandidate:
    total = sum(piece.duration_us for chain in chains for piece in chain)
    saved = sum(_saved_us(chain, ground) for chain in chains)
    first = chains[0][0]
    words = "one kernel keeps what lies between them on the chip"
    if ops[0] in _STARTS:
        words = f"the rest can be the epilogue of {ops[0]}"
    return FusionCandidate(
        ops=ops,
        module=ground.names.get(owner) if owner is not None else None,
        place=ground.place(first.line),
        occurrences=len(chains),
        total_us=total,
        saved_us=Figure(saved, "estimated"),
        attainable_speedup=amdahl(ground.total_us, saved),
        reason=words,
    )


def _saved_us(chain: Sequence[Slice], ground: Ground) -> float:
    """Estimate what fusing saves: by bandwidth where the roof is the device's, else by the share of bytes moved."""
    sizes = [_moved_bytes(piece) for piece in chain]
    between = sum(2 * min(left[0], right[0]) for left, right in itertools.pairwise(sizes))
    light = [piece.duration_us for piece in chain if _name(piece) not in _STARTS]
    if ground.comparable and ground.roof is not None:
        return min(between / (ground.roof.bandwidth_gb_s * 1e3), sum(light))
    moved = sum(everything for piece, (_, everything) in zip(chain, sizes, strict=True) if _name(piece) not in _STARTS)
    return sum(light) * min(between / moved, 0.9) if moved else 0.0
