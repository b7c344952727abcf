from __future__ import annotations

import pytest

from drk.assistant.errors import TargetError, UsageError
from drk.assistant.signature import check_call, example_value, function_need
from drk.assistant.source_index import Parameter, index_source
from drk.gym.schema import Call, Scalar


def need(parameters):
    return function_need(index_source(f"def f({parameters}): ...\n", "model.py").functions["f"])


@pytest.mark.parametrize(
    ("parameters", "counts"),
    [
        ("", [0]),
        ("x", [1]),
        ("x, y=1", [1, 2]),
        ("x, *rest", [1, 2, 3, 4]),
        ("x, *, y", []),
        ("x, *, y=1, **more", [1]),
    ],
)
def test_how_many_positional_arguments_fill_it(parameters, counts):
    assert [count for count in range(5) if need(parameters).takes(count)] == counts


def test_calls_that_fit():
    wanted = need("x, /, y, *, z=1, **more")
    assert check_call(["1", "y=2", "other=3"], "--input", wanted, "model.py") == Call(
        (Scalar(1),), {"y": Scalar(2), "other": Scalar(3)}
    )


def test_what_nobody_gave_is_named_but_not_what_was_given():
    with pytest.raises(TargetError) as caught:
        check_call(["1"], "--input", need("x, y: int, z: 'bool'"), "model.py", "f")
    assert caught.value.message == "f needs y: int, z: bool, and nobody gave them"
    assert "model.py:f --input 'y=1024' --input 'z=true'" in caught.value.help


@pytest.mark.parametrize(
    ("parameters", "texts", "told"),
    [
        ("x, /", ["x=1"], "no parameter 'x'"),
        ("x", ["1", "2"], "takes 1 positional arguments"),
        ("x, y=1", ["1", "x=2"], "given twice"),
    ],
)
def test_calls_that_do_not_fit(parameters, texts, told):
    with pytest.raises(UsageError, match=told):
        check_call(texts, "--input", need(parameters), "model.py")


@pytest.mark.parametrize(
    ("annotation", "option", "example"),
    [
        ("int", "--init", "1024"),
        ("Optional[float]", "--init", "0.1"),
        ("str", "--input", '"text"'),
        ("torch.LongTensor", "--input", "i64[8,128]{0..1000}"),
        ("", "--input", "f32[8,128,1024]"),
        ("", "--init", "1024"),
    ],
)
def test_examples_follow_the_annotation(annotation, option, example):
    assert example_value(Parameter("x", annotation=annotation), option) == example
