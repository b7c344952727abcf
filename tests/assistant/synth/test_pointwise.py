"""Pointwise kernels against float64 under the interpreter: operators, broadcasting, strides, several outputs."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import Function
from torch import nn

from drk.assistant.synth.propose import compile_graph, variants

OPERATORS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "mish": F.mish,
    "softplus": F.softplus,
    "softplus_beta": lambda x: F.softplus(x, beta=2.0, threshold=1.0),
    "elu": F.elu,
    "selu": F.selu,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "clamp_max": lambda x: x.clamp(max=0.1),
    "abs": torch.abs,
    "sqrt": lambda x: (x.abs() + 0.1).sqrt(),
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": lambda x: torch.log(x.abs() + 0.3),
    "log1p": lambda x: torch.log1p(x.abs()),
    "cube": lambda x: x**3,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "softshrink": F.softshrink,
    "where": lambda x: torch.where(x > 0.3, x, x * 0.1),
    "maximum": lambda x: torch.maximum(x, -x * 2),
    "minimum": lambda x: torch.minimum(x, -x * 2),
    "masked_fill": lambda x: x.masked_fill(x < 0, 2.0),
    "sin_cos": lambda x: torch.sin(x) + torch.cos(x),
    "reciprocal": lambda x: 1 / (x.abs() + 1),
    "sign": torch.sign,
    "rsub": lambda x: 2 - x,
    "add_alpha": lambda x: torch.add(x, x, alpha=3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "lerp": lambda x: torch.lerp(x, x * 2, x),
}


def test_every_operator_in_one_module(check):
    """All operators at once: one kernel, one output for each."""
    x = torch.randn(7, 133, generator=torch.Generator().manual_seed(1)) * 2
    half = list(OPERATORS.values())
    for part in (half[:20], half[20:]):
        compiled = check(Function(lambda _, x, part=tuple(part): tuple(f(x) * 1.5 for f in part)), x)
        assert len(compiled.kernels) == 1


@pytest.mark.parametrize("name", ["tanh", "expm1", "log1p", "exp", "sigmoid", "softplus", "mish", "gelu_tanh"])
def test_accurate_where_naive_forms_cancel(check, name):
    """Relative accuracy near zero and for large arguments."""
    x = torch.tensor([1e-6, -1e-4, 3e-3, -0.02, 0.3, -0.7]).repeat(9)
    check(Function(lambda _, x: OPERATORS[name](x) * 2.0), x)
    check(Function(lambda _, x: OPERATORS[name](x) * 2.0), torch.linspace(-30, 30, 101))


def test_infinities_and_nan_survive(interpreter, graph_of):
    from drk.assistant.synth.propose import compile_graph, variants

    module = Function(lambda _, x: (F.silu(x) * 1.0, torch.exp(x) * 2, F.relu(x) * 2, x.clamp(-1, 1) * 2, x.tanh() * 2))
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, 100.0, -100.0])
    graph = graph_of(module, x)
    (outputs,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x]])
    for got, expected in zip(outputs, module(x), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_round_once(check, dtype):
    # Triton's plain interpreter truncates bfloat16 where the GPU rounds: allow for that one rounding.
    check(Function(lambda _, x: F.silu(x) * x + 1), torch.randn(9, 65).to(dtype), factor=3.0)


def test_mixed_dtypes_follow_promotion(check):
    module = Function(lambda _, x, i, b: (x * i + (i > 2), torch.where(b, x, x * 0.5), i * 2 + 1, (x > 0) & b))
    check(module, torch.randn(5, 10), torch.arange(10), torch.rand(5, 10) > 0.5)


def test_neighbours_and_closeness(check):
    x = torch.randn(4, 9)
    y = x + torch.tensor([0.0, 1e-6, 1e-3, 1.0, float("inf"), -0.0, 1e-5, float("nan"), 2e-4])
    x[:2, 4] = float("inf")

    def forward(_, x, y):
        close = torch.isclose(x, y), torch.isclose(x, y, rtol=1e-2, atol=1e-3)
        return (*(item.float() for item in close), torch.diff(x, dim=0).relu(), torch.diff(y[:, :4]) * 2)

    compiled = check(Function(forward), x.nan_to_num(posinf=3e38), y.nan_to_num(posinf=3e38))
    assert "ops.aten" not in compiled.source


def test_infinities_are_close_to_themselves(interpreter, graph_of):
    x = torch.tensor([[1.0, float("inf"), float("-inf"), float("inf"), float("nan")]])
    y = torch.tensor([[1.0, float("inf"), float("inf"), 1.0, float("nan")]])
    module = Function(lambda _, x, y: torch.isclose(x, y))
    graph = graph_of(module, x, y)
    ((close,),) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x, y]])
    assert close.tolist() == torch.isclose(x, y).tolist()


def test_casts_inside_a_chain(check):
    x = torch.randn(5, 10).half()
    check(Function(lambda _, x: (x.float().sigmoid() * 2).half()), x)
    compiled = check(Function(lambda _, x: (x.float().sigmoid() * 2).type_as(x)), x)
    assert "type_as" not in compiled.source


def test_broadcast_operands(check):
    bias = torch.randn(1, 5, 1)
    module = Function(lambda s, x, y: (x + s.bias) * y.sigmoid(), bias=bias)
    check(module, torch.randn(3, 5, 17), torch.randn(3, 1, 17), kernels=["add_sigmoid_mul"])


def test_channel_scale_in_images(check):
    module = Function(
        lambda s, x: F.relu(x * s.scale + s.shift), scale=torch.randn(6, 1, 1), shift=torch.randn(6, 1, 1)
    )
    check(module, torch.randn(2, 6, 9, 11))


def test_outer_product_shapes(check):
    module = Function(lambda _, x, y: (x * y + 1, (x - y).relu() * 2))
    check(module, torch.randn(3, 5, 1), torch.randn(1, 5, 9))


def test_non_contiguous_inputs(check):
    check(Function(lambda _, x: F.silu(x) * x), torch.randn(9, 14).t())
    check(Function(lambda _, x, y: (x + y) * 2), torch.randn(6, 20)[:, ::2], torch.randn(10).expand(6, 10))
    check(Function(lambda _, x: x * torch.sigmoid(x)), torch.randn(4, 6, 5).permute(2, 0, 1))


def test_contiguous_at_capture_but_not_at_the_call(check):
    x = torch.randn(6, 8)
    check(Function(lambda _, x: F.silu(x) * x), x, calls=[[torch.randn(8, 6).t()], [torch.randn(6, 16)[:, ::2]]])


def test_halves_of_one_tensor_are_read_in_place(check):
    compiled = check(Function(lambda _, x: F.glu(x, -1)), torch.randn(4, 6, 20))
    assert ".contiguous()" not in compiled.source.split("class ModelNew")[1]
    check(Function(lambda _, x: (lambda a, b: a * F.gelu(b))(*x.chunk(2, -1))), torch.randn(4, 6, 20))


@pytest.mark.parametrize(("dim", "shape"), [(1, (2, 6, 5, 7)), (0, (6, 9)), (2, (2, 3, 8, 7))])
def test_gates_along_any_dimension(check, dim, shape):
    compiled = check(Function(lambda _, x: F.glu(x, dim)), torch.randn(shape))
    assert ".contiguous()" not in compiled.source.split("class ModelNew")[1]


def test_a_single_slope_for_vectors(check):
    assert len(check(Function(lambda s, x: s.m(x) * 2, m=nn.PReLU()), torch.randn(40)).kernels) == 1


def test_other_batch_sizes_than_captured(check):
    module = Function(lambda s, x: F.gelu(x + s.bias) * 2, bias=torch.randn(17))
    check(module, torch.randn(4, 3, 17), calls=[[torch.randn(1, 3, 17)], [torch.randn(9, 3, 17)]])


def test_batch_norm_in_eval_mode(check):
    module = Function(lambda s, x: F.relu(s.norm(x)), norm=nn.BatchNorm2d(3))
    with torch.no_grad():
        module.norm.running_mean.normal_()
        module.norm.running_var.uniform_(0.5, 2.0)
    check(module, torch.randn(4, 3, 7, 9), kernels=["batch_norm_relu"])


def test_instance_norm_by_running_statistics(check):
    module = Function(lambda s, x: F.relu(s.norm(x)), norm=nn.InstanceNorm2d(3, track_running_stats=True))
    with torch.no_grad():
        module.norm.running_mean.normal_()
        module.norm.running_var.uniform_(0.5, 2.0)
    assert len(check(module, torch.randn(4, 3, 7, 9)).kernels) == 1


def test_constants_are_written_as_literals(check):
    module = Function(lambda _, x: x * torch.tensor(3.0) + 1)
    assert "3.0" in check(module, torch.randn(10)).kernels[0].kernel


@st.composite
def broadcast_shapes(draw):
    full = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    full[-1] = draw(st.integers(1, 40))
    start = draw(st.integers(0, len(full) - 1))
    return full, [1 if draw(st.booleans()) else size for size in full[start:]]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(broadcast_shapes())
def test_any_broadcast_pattern(check, shapes):
    full, other = shapes
    module = Function(lambda _, x, y: (x - y) * torch.sigmoid(y) + x)
    check(module, torch.randn(full), torch.randn(other), factor=3.0)
