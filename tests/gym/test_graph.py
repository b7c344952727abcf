"""The trusted side's parser: what it accepts, what it refuses; costs from shapes."""

import copy

import pytest

from drk.gym.errors import BundleError
from drk.gym.graph import MAX_NODES, Ref, Symbol, TensorMeta, graph_from_json
from drk.gym.graph_cost import Cost, format_graph, graph_cost, node_cost


def tensor(*shape, dtype="float32"):
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return {"shape": list(shape), "dtype": dtype, "strides": strides}


def sample():
    return {
        "version": 1,
        "method": "export",
        "training": False,
        "signature": [{"name": "x", "kind": "positional_or_keyword", "value": {"input": "x"}}],
        "state": [
            {
                "key": "up.weight",
                "kind": "parameter",
                "persistent": True,
                "requires_grad": True,
                "alias_of": None,
                "meta": tensor(6, 4),
            }
        ],
        "placeholders": [
            {"name": "p_up_weight", "kind": "parameter", "path": "up.weight", "meta": tensor(6, 4)},
            {"name": "x", "kind": "input", "path": "x", "meta": tensor(2, 4)},
        ],
        "nodes": [
            {
                "name": "linear",
                "op": "aten.linear.default",
                "args": [{"ref": "x"}, {"ref": "p_up_weight"}],
                "kwargs": {},
                "meta": [tensor(2, 6)],
            },
            {
                "name": "clamp",
                "op": "aten.clamp.default",
                "args": [{"ref": "linear"}, {"float": "-inf"}, 2],
                "kwargs": {"dtype": {"dtype": "float32"}},
                "meta": [tensor(2, 6)],
            },
        ],
        "output": {"tuple": [{"ref": "clamp"}]},
        "mutations": {},
        "notes": [],
    }


def test_parses_values_of_every_kind():
    graph = graph_from_json(sample())
    linear, clamp = graph.nodes
    assert linear.args == (Ref("x"), Ref("p_up_weight"))
    assert clamp.args == (Ref("linear"), float("-inf"), 2)
    assert clamp.kwargs == {"dtype": Symbol("dtype", "float32")}
    assert linear.bare_op == "linear"
    assert graph.output.form == "tuple"


def test_users_and_metas():
    graph = graph_from_json(sample())
    assert graph.users() == {"p_up_weight": ("linear",), "x": ("linear",), "linear": ("clamp",), "clamp": ("output",)}
    assert graph.metas()["linear"].size_bytes == 2 * 6 * 4


def test_contiguity_ignores_dimensions_of_size_one():
    assert TensorMeta((2, 1, 3), "float32", (3, 77, 1)).contiguous
    assert not TensorMeta((2, 3), "float32", (1, 2)).contiguous


def mutated(change):
    data = copy.deepcopy(sample())
    change(data)
    return data


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["nodes"][0].update(name="x = 1; import os"),
        lambda d: d["nodes"][0].update(name="class"),
        lambda d: d["nodes"][0].update(op="aten.linear.default(); bad"),
        lambda d: d["nodes"][1]["args"].__setitem__(0, {"ref": "nothing"}),
        lambda d: d["nodes"][0]["args"].__setitem__(0, {"ref": "clamp"}),
        lambda d: d["nodes"][1].update(name="linear"),
        lambda d: d["nodes"][0]["meta"][0].update(shape=[2, -6]),
        lambda d: d["nodes"][0]["meta"][0].update(shape=[2.5, 6]),
        lambda d: d["nodes"][0]["meta"][0].update(shape=[2]),
        lambda d: d["nodes"][0]["meta"][0].update(dtype="float32; x"),
        lambda d: d["nodes"][1]["kwargs"].update(dtype={"dtype": "float32)"}),
        lambda d: d["nodes"][1]["args"].append({"eval": "1"}),
        lambda d: d["nodes"][1]["args"].append({"ref": "linear", "list": []}),
        lambda d: d["state"][0].update(key='up"]'),
        lambda d: d["signature"][0].update(name="x: int"),
        lambda d: d.update(output={"ref": "missing"}),
        lambda d: d.update(nodes=[d["nodes"][0]] * (MAX_NODES + 1)),
        lambda d: d.pop("nodes"),
        lambda d: d.update(placeholders=7),
    ],
)
def test_refuses_what_is_malformed(change):
    with pytest.raises(BundleError, match="not a valid graph"):
        graph_from_json(mutated(change))


@pytest.mark.parametrize("data", [None, [], "graph", 3, {}])
def test_refuses_other_forms(data):
    with pytest.raises(BundleError, match="not a valid graph"):
        graph_from_json(data)


def test_cost_counts_operands_results_and_flops():
    graph = graph_from_json(sample())
    linear, clamp = (node_cost(node, graph.metas()) for node in graph.nodes)
    assert linear == Cost(size_bytes=4 * (2 * 4 + 6 * 4 + 2 * 6), flops=2 * 2 * 6 * 4)
    assert clamp == Cost(size_bytes=4 * 2 * 12, flops=12)
    assert graph_cost(graph) == Cost(linear.size_bytes + clamp.size_bytes, linear.flops + clamp.flops)


def test_roofline_time_is_the_larger_of_traffic_and_arithmetic():
    assert Cost(size_bytes=8_000_000, flops=1).time_us(bandwidth_gbs=4000, peak_tflops=50) == pytest.approx(2.0)
    assert Cost(size_bytes=1, flops=100_000_000).time_us(bandwidth_gbs=4000, peak_tflops=50) == pytest.approx(2.0)


def test_printing_names_every_operator():
    text = format_graph(graph_from_json(sample()))
    assert text.count("\n") == 1
    assert "aten.linear.default" in text
    assert "float32[2, 6]" in text
