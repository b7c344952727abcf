"""Which parts of a module become regions."""

from __future__ import annotations

from typing import Any

from drk.assistant.regions_choice import MAX_LEAVES, below, choose_regions, graph_shares, read_parts
from drk.gym.devices import device_facts
from drk.gym.graph import Graph, Node, Placeholder, Ref, TensorMeta
from drk.gym.schema import Call, TensorSpec

HARDWARE = device_facts("sm_90")
META = TensorMeta((1024, 1024), "float32", (1024, 1))


def row(path: str, time_us: float, *, leaf: bool = True, signature: str = "", known: bool = True) -> dict[str, Any]:
    tensor = {"kind": "tensor", "shape": [8, 4], "dtype": "float32", "strides": None}
    call = {"args": [tensor], "kwargs": {}} if known else None
    facts = {"path": path, "type": "T", "leaf": leaf, "calls": 1, "time_us": time_us, "kinds": 1, "call": call}
    return {**facts, "signature": signature or path}


def test_alike_parts_are_one_region_and_small_ones_are_left() -> None:
    rows = [
        row("", 100.0, leaf=False),
        row("blocks.0", 30.0, signature="block"),
        row("blocks.1", 30.0, signature="block"),
        row("head", 39.0),
        row("tiny", 1.0),
    ]
    regions = choose_regions(read_parts(rows, None, HARDWARE))
    assert [(region.paths, round(region.share, 2)) for region in regions] == [
        (("blocks.0", "blocks.1"), 0.6),
        (("head",), 0.39),
    ]
    assert regions[0].call == Call((TensorSpec((8, 4)),))


def test_parts_too_large_or_called_in_several_ways_are_looked_into() -> None:
    rows = [row("", 100.0, leaf=False), row("body", 90.0, leaf=False)]
    rows += [row(f"body.{index}", 4.0, signature=str(index)) for index in range(MAX_LEAVES + 1)]
    parts = read_parts(rows, None, HARDWARE)
    assert {path for region in choose_regions(parts) for path in region.paths} == set(parts) - {"", "body"}
    rows = [row("", 100.0, leaf=False), row("body", 90.0, leaf=False, known=False), row("body.inner", 80.0)]
    assert [region.paths for region in choose_regions(read_parts(rows, None, HARDWARE))] == [("body.inner",)]


def test_inside_of_a_region_that_cannot_be_taken() -> None:
    rows = [row("", 100.0, leaf=False), row("a", 90.0, leaf=False), row("a.x", 50.0), row("a.y", 40.0)]
    parts = read_parts(rows, None, HARDWARE)
    (whole,) = choose_regions(parts)
    assert whole.paths == ("a",)
    assert [region.paths for region in below(parts, whole)] == [("a.x",), ("a.y",)]
    assert below(parts, below(parts, whole)[0]) == []


def test_shares_of_a_captured_module_are_the_graphs() -> None:
    nodes = tuple(
        Node(f"n{index}", "aten.relu.default", (Ref("x"),), {}, (META,), module=module)
        for index, module in enumerate(["body.a", "body.a", "body.b", ""])
    )
    graph = Graph("export", False, (), (), (Placeholder("x", "input", "x", META),), nodes, Ref("n3"))
    shares = graph_shares(graph, HARDWARE)
    assert shares == {"": 1.0, "body": 0.75, "body.a": 0.5, "body.b": 0.25}
    parts = read_parts([row("", 1.0), row("body.a", 0.0), row("body.b", 1.0)], graph, HARDWARE)
    assert (parts["body.a"].share, parts["body.b"].share) == (0.5, 0.25)
