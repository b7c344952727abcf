"""Device functions: dependencies and text."""

import ast

from drk.assistant.synth.device_math import FUNCTIONS, closure


def test_callees_come_first_and_docstrings_call_nothing():
    assert closure(["y = mish(x)"]) == ["high_bits", "exp", "near_inverse", "mish"]
    assert closure(['"""Computes tanh(x)."""\ny = x']) == []
    assert closure(["y = tl.exp(x) + my_tanh(x)"]) == []


def test_every_function_is_documented_jitted_and_named():
    for name, source in FUNCTIONS.items():
        (function,) = ast.parse(source).body
        assert function.name == name
        assert ast.get_docstring(function)
        assert ast.unparse(function.decorator_list[0]) == "triton.jit"
