from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drk.assistant.errors import UsageError
from drk.assistant.input_language import (
    DTYPES,
    format_argument,
    format_call,
    is_integer,
    parse_argument,
    parse_arguments,
)
from drk.gym.schema import Call, Nested, Scalar, TensorSpec

F32 = TensorSpec((2, 3))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32[128,1024]", TensorSpec((128, 1024))),
        ("float32[ 2 , 3 ]", F32),
        ("f32[2,3,]", F32),
        ("f32[]", TensorSpec(())),
        ("bf16[8,64,56,56]:channels_last", TensorSpec((8, 64, 56, 56), "bfloat16", layout="channels_last")),
        ("i64[4,128]{0..50257}", TensorSpec((4, 128), "int64", low=0, high=50257, fill="integers")),
        ("i8[2]{-5..5}", TensorSpec((2,), "int8", low=-5, high=5, fill="integers")),
        ("f32[2,3]{0..1}", TensorSpec((2, 3), low=0, high=1, fill="uniform")),
        ("f16[2]{-.5..1e-3}", TensorSpec((2,), "float16", low=-0.5, high=0.001, fill="uniform")),
        ("bool[4]", TensorSpec((4,), "bool", fill="bernoulli")),
        ("bool[4]:ones", TensorSpec((4,), "bool", fill="ones")),
        ("i64[4]:zeros", TensorSpec((4,), "int64", fill="zeros")),
        ("f32[4,8]:strides(1,4)", TensorSpec((4, 8), strides=(1, 4))),
        ("f32[4,8]:strides(0,1):grad", TensorSpec((4, 8), strides=(0, 1), requires_grad=True)),
        ("3", Scalar(3)),
        ("-1_000", Scalar(-1000)),
        ("0.5", Scalar(0.5)),
        ("1e-5", Scalar(1e-5)),
        ("true", Scalar(True)),
        ("None", Scalar(None)),
        ('"a \\"b\\" \\n"', Scalar('a "b" \n')),
        ("'it\\'s \"x\"'", Scalar('it\'s "x"')),
        ("(f32[2,3], f32[2,3])", Nested("tuple", (F32, F32))),
        ("[1, [2], ()]", Nested("list", (Scalar(1), Nested("list", (Scalar(2),)), Nested("tuple")))),
        ("{a: f32[2,3], 'b c': 3}", Nested("dict", (F32, Scalar(3)), ("a", "b c"))),
    ],
)
def test_forms(text, expected):
    parsed = parse_argument(text)
    assert parsed == expected
    assert type(getattr(parsed, "value", None)) is type(getattr(expected, "value", None))


def test_names_positions_and_several_in_one_text():
    call = parse_arguments(["f32[2,3], f32[2,3]", "scale = 2, act='relu'"])
    assert call == Call((F32, F32), {"scale": Scalar(2), "act": Scalar("relu")})


@pytest.mark.parametrize(
    ("text", "message", "column", "advice"),
    [
        ("x=f3[3,64]", "unknown dtype 'f3'", 2, "'f32'"),
        ("x=f32[3,]64", "between arguments", 9, ""),
        ("x=f32[3,-4]", "a dimension must be a whole number", 8, ""),
        ("x=f32[3.5]", "a dimension must be a whole number", 6, ""),
        ("x=f32[3", "the text ends", 7, ""),
        ("x=f32", "f32 needs a shape", 5, "f32[128,1024]"),
        ("x=", "the text ends", 2, ""),
        ("x=relu", "neither a number nor a tensor", 2, '"relu"'),
        ("i64[4]", "needs the range", 6, "i64[4]{0..100}"),
        ("i64[4]{0..0.5}", "whole ends", 6, ""),
        ("i64[4]{5..5}", "range is empty", 6, ""),
        ("i64[4]{0-5}", "expected '..'", 8, ""),
        ("bool[4]{0..1}", "have no range", 7, ""),
        ("f32[2]:chanels_last", "unknown suffix", 7, "'channels_last'"),
        ("f32[2]:channels_last", "needs 4 dimensions, not 1", 7, ""),
        ("f32[2]:strides(1,2)", "2 strides for 1 dimensions", 7, ""),
        ("f32[1,1,2,2]:channels_last:strides(1,1,1,1)", "exclude each other", 27, ""),
        ("i64[2]{0..4}:grad", "only floating tensors", 13, ""),
        ('"abc', "has no end", 0, ""),
        ("{a: 1, a: 2}", "stands twice", 7, ""),
        ("{a 1}", "expected ':'", 3, ""),
        ("a=1, a=2", "given twice", 5, ""),
        ("a=1, 2", "without a name follows", 5, ""),
        ("1e999", "too large", 0, ""),
        ("", "is empty", 0, ""),
        ("@", "expected a value, found '@'", 0, ""),
        ("(" * 50, "nested deeper", 32, ""),
    ],
)
def test_errors_have_a_caret_and_a_next_step(text, message, column, advice):
    with pytest.raises(UsageError) as caught:
        parse_arguments([text])
    assert message in caught.value.message
    shown, caret = caught.value.cause.split("\n")
    assert shown == text
    assert caret.index("^") == column
    assert caught.value.help
    assert advice in caught.value.help


dimensions = st.lists(st.integers(0, 4096), max_size=5).map(tuple)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def tensor_specs(draw):
    dtype = draw(st.sampled_from(sorted(DTYPES.values())))
    shape = draw(dimensions)
    found = {"shape": shape, "dtype": dtype, "fill": "bernoulli" if dtype == "bool" else "normal"}
    if is_integer(dtype):
        low, high = sorted(draw(st.lists(st.integers(-(2**40), 2**40), min_size=2, max_size=2, unique=True)))
        found.update(fill="integers", low=float(low), high=float(high))
    elif dtype.startswith(("float", "bfloat")) and draw(st.booleans()):
        low, high = sorted(draw(st.lists(finite, min_size=2, max_size=2, unique=True)))
        found.update(fill="uniform", low=low, high=high)
    elif draw(st.booleans()):
        found["fill"] = draw(st.sampled_from(["zeros", "ones"]))
    if len(shape) == 4 and draw(st.booleans()):
        found["layout"] = "channels_last"
    elif draw(st.booleans()):
        found["strides"] = tuple(draw(st.lists(st.integers(0, 9999), min_size=len(shape), max_size=len(shape))))
    if dtype.startswith(("float", "bfloat")):
        found["requires_grad"] = draw(st.booleans())
    return TensorSpec(**found)


scalars = st.one_of(st.none(), st.booleans(), st.integers(), finite, st.text()).map(Scalar)
arguments = st.recursive(
    st.one_of(tensor_specs(), scalars),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: Nested("list", tuple(items))),
        st.lists(inner, max_size=3).map(lambda items: Nested("tuple", tuple(items))),
        st.dictionaries(st.text(), inner, max_size=3).map(lambda d: Nested("dict", tuple(d.values()), tuple(d))),
    ),
    max_leaves=6,
)


@given(arguments)
def test_format_is_the_inverse_of_parse(argument):
    assert parse_argument(format_argument(argument)) == argument


names = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)


@given(st.lists(arguments, max_size=3), st.dictionaries(names, arguments, max_size=3))
def test_calls_survive_the_command_line(args, kwargs):
    call = Call(tuple(args), kwargs)
    assert parse_arguments(format_call(call)) == call


@given(st.text(alphabet="fi32[](){}:.,=0a\"' -e", max_size=20))
def test_any_text_parses_or_is_a_usage_error(text):
    try:
        parsed = parse_arguments([text])
    except UsageError as error:
        assert "^" in error.cause
    else:
        assert parse_arguments(format_call(parsed)) == parsed
