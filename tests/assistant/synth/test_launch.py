"""What emitted files hold for their launches, and the same files without it."""

import ast

import torch
from modules import GatedMLP

from drk.assistant.synth.launch import NAMES, host_arithmetic, launch_parts, shapes_once, without_launch
from drk.assistant.synth.propose import compile_graph, variants


def emitted(graph_of):
    graph = graph_of(GatedMLP(), torch.randn(2, 5, 48))
    return compile_graph(graph, variants(graph)[0]).source


def test_every_launched_kernel_is_remembered_and_no_device_function(graph_of):
    tree = ast.parse(emitted(graph_of))
    launched = {node.value.id for node in ast.walk(tree) if isinstance(node, ast.Subscript) and called(node.value)}
    decorated = {node.name: [ast.unparse(one) for one in node.decorator_list] for node in tree.body if jitted(node)}
    assert launched
    assert {name for name, found in decorated.items() if found == ["Launch", "triton.jit"]} == launched
    assert {name for name, found in decorated.items() if found == ["triton.jit"]}


def called(node):
    return isinstance(node, ast.Name) and node.id.endswith("_kernel")


def jitted(node):
    return isinstance(node, ast.FunctionDef) and bool(node.decorator_list)


def test_no_launcher_uses_tritons_arithmetic(graph_of):
    source = emitted(graph_of)
    assert "triton.cdiv" not in source
    assert "triton.next_power_of_2" not in source
    assert "ceil_div(" in source


def test_without_launches_a_file_is_as_documentation_has_it(graph_of):
    source = emitted(graph_of)
    plain = without_launch(source)
    names = {node.name for node in ast.parse(plain).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert names.isdisjoint(NAMES)
    assert "Launch" not in plain.replace('"""Launch', "")
    assert "triton.cdiv(" in plain
    assert names == {
        node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    } - {*NAMES}


def test_only_what_is_named_is_defined():
    assert launch_parts(["def f():\n    return 1"]) == []
    (part,) = launch_parts([host_arithmetic("n = triton.next_power_of_2(m)")])
    assert part.startswith("def power_of_2(")
    assert [part.split()[1].split("(")[0].rstrip(":") for part in launch_parts(["@Launch", "ceil_div(1, 2)"])] == [
        "Launch",
        "ceil_div",
    ]


def test_shapes_that_are_read_often_are_read_once():
    lines = ["x = x.contiguous()", "n = x.shape[0] * x.shape[1]", "m = x.shape[2] + out_x.shape[0]", "k = y.shape[0]"]
    assert shapes_once(lines, ["x", "y"]) == [
        "x = x.contiguous()",
        "x_shape = x.shape",
        "n = x_shape[0] * x_shape[1]",
        "m = x_shape[2] + out_x.shape[0]",
        "k = y.shape[0]",
    ]


def test_shapes_are_left_where_a_name_is_taken_or_the_tensor_changes():
    often = ["n = x.shape[0] * x.shape[1] * x.shape[2]"]
    for lines, parameters in (
        (often, ["x", "x_shape"]),
        (["x_shape = 1", *often], ["x"]),
        ([*often, "x = x.contiguous()"], ["x"]),
    ):
        assert shapes_once(lines, parameters) == lines
