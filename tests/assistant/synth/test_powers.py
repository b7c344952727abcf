"""Powers with any exponent: C's special cases, accuracy against float64, tensors and 0-d parameters as exponents."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import Function

from drk.assistant.synth.propose import compile_graph, variants

INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor(
    [
        0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 0.5, -0.5, 1.5, -1.5, INF, -INF, NAN, 1e-40, -1e-40, 1e38, -1e38,
        2.0**24, 2.0**24 + 2, 1 - 2.0**24, 1e20, -1e20, 1e-6, 7.0, -7.0, 1 / 3, 1 + 2.0**-23, 1 - 2.0**-24, 3.4e38,
        2.0**31, -(2.0**31), 127.0, 128.0, -126.0, -127.0, -149.0, -150.0, -151.0,
    ]
)  # fmt: skip
ELEMENTWISE = Function(lambda _, x, y: torch.pow(x, y) * 1.0)


def emitted(graph_of, module, *args):
    graph = graph_of(module, *args)
    compiled = compile_graph(graph, variants(graph)[0])
    assert "aten.pow" not in compiled.source.split("class ModelNew")[1]
    return compiled.source


def agree(got, x, y):
    truth = torch.pow(x.double(), y.double()).float()
    # Results that are no normal numbers may be 0.
    torch.testing.assert_close(got, truth, rtol=3e-7, atol=1.2e-38, equal_nan=True)
    zero = truth == 0
    assert torch.equal(torch.signbit(got[zero]), torch.signbit(truth[zero]))


def test_every_pair_of_special_values(interpreter, graph_of):
    x, y = (side.reshape(-1).contiguous() for side in torch.meshgrid(SPECIAL, SPECIAL, indexing="ij"))
    (outputs,) = interpreter.run(emitted(graph_of, ELEMENTWISE, x, y), {}, [[x, y]])
    agree(outputs[0], x, y)


def test_special_bases_with_an_exponent_in_a_parameter(interpreter, graph_of):
    module = Function(lambda s, x: torch.pow(x, s.p) * 1.0, p=torch.tensor(3.0))
    source = emitted(graph_of, module, SPECIAL)
    for number in (3.0, -2.5, -0.0, INF, NAN):
        exponent = torch.tensor(number)
        (outputs,) = interpreter.run(source, {"p": exponent}, [[SPECIAL]])
        agree(outputs[0], SPECIAL, exponent)


def test_special_values_and_a_number(interpreter, graph_of):
    module = Function(lambda _, x: (torch.pow(x, -2.5) * 1.0, torch.pow(2.5, x) * 1.0, torch.pow(x, 7) * 1.0))
    (outputs,) = interpreter.run(emitted(graph_of, module, SPECIAL), {}, [[SPECIAL]])
    pairs = (SPECIAL, -2.5), (2.5, SPECIAL), (SPECIAL, 7.0)
    for got, (x, y) in zip(outputs, pairs, strict=True):
        agree(got, torch.as_tensor(x), torch.as_tensor(y))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.floats(-1.0, 6.0), st.floats(-1.0, 9.0), st.integers(0, 2**31))
def test_accuracy_at_any_scale(interpreter, graph_of, spread, steepness, seed):
    """Within two units in the last place wherever the result is a normal number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.exp(torch.randn(512, generator=generator) * 10.0**-spread * 20)
    y = torch.randn(512, generator=generator) * 10.0**steepness * 10.0**-3
    source = SOURCES.setdefault("elementwise", emitted(graph_of, ELEMENTWISE, x, y))
    (outputs,) = interpreter.run(source, {}, [[x, y]])
    truth = torch.pow(x.double(), y.double())
    normal = (truth > 1.2e-38) & (truth < 3.4e38)
    apart = ((outputs[0].double() - truth) / truth)[normal].abs()
    assert not len(apart) or apart.max() < 2.5 * 2.0**-23


SOURCES = {}


def test_reductions_around_a_power_with_a_learnt_exponent_are_one_kernel(check):
    module = Function(
        lambda s, x: (x.clamp(min=1e-6).pow(s.p).mean(-1).pow(1.0 / s.p), x.amax(-1), x.std(-1), (x * x).sum(-1)),
        p=torch.tensor(3.0),
    )
    x = torch.rand(4, 6, 50)
    compiled = check(module, x, calls=[[torch.rand(3, 5, 50)]])
    assert len(compiled.kernels) == compiled.launches == 1


def test_half_precision_and_broadcast_exponents(check):
    module = Function(lambda s, x: torch.pow(x.abs() + 0.1, s.p) * 2, p=torch.rand(6, 1) * 3)
    check(module, torch.randn(4, 6, 20))
    check(module.half(), torch.randn(4, 6, 20).half())


def test_rows_whose_padding_would_cost_are_walked_in_blocks(check, interpreter, graph_of):
    module = Function(lambda s, x: (x.clamp(min=1e-6).pow(s.p).mean(-1), x.amax(-1), x.std(-1)), p=torch.tensor(2.7))
    x = torch.rand(5, 600)
    compiled = check(module, x, calls=[[torch.rand(3, 256)], [torch.rand(2, 1300)], [torch.rand(2, 3)]])
    assert "for start in range(" in compiled.source
    x[0, 3], x[1, 599], x[2, 0] = NAN, INF, -INF
    (outputs,) = interpreter.run(compiled.source, module.state_dict(), [[x]])
    for got, truth in zip(outputs, module.double()(x.double()), strict=True):
        torch.testing.assert_close(got.double(), truth.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_whole_rows_stay_in_registers_where_they_fill_them(graph_of):
    module = Function(lambda s, x: x.pow(s.p).mean(-1), p=torch.tensor(2.7))
    graph = graph_of(module, torch.rand(5, 1024))
    assert "for start in range(" not in compile_graph(graph, variants(graph)[0]).source
