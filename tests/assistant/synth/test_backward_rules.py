"""Every rule against autograd in float64: the backward graph is run by torch, so that only the formulas are tested."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from modules import Function

from drk.assistant.synth.backward_graph import Segment, differentiate, rule_of
from drk.assistant.synth.backward_rules import POINTWISE_RULES
from drk.assistant.synth.backward_segments import segments
from drk.assistant.synth.naming import value_names
from drk.assistant.synth.rewrites import rewrite
from drk.gym.graph import Node, Ref, Symbol, TensorMeta, graph_from_json
from drk.gym.runner.capture import capture

ONE = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": lambda x: torch.log(x * x + 0.5),
    "expm1": torch.expm1,
    "log1p": lambda x: torch.log1p(x * x),
    "log2": lambda x: torch.log2(x * x + 0.5),
    "sqrt": lambda x: torch.sqrt(x * x + 0.5),
    "rsqrt": lambda x: torch.rsqrt(x * x + 0.5),
    "reciprocal": lambda x: torch.reciprocal(x * x + 0.5),
    "square": torch.square,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "log_sigmoid": F.logsigmoid,
    "silu": F.silu,
    "relu": F.relu,
    "relu6": lambda x: F.relu6(x * 5),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "hardsigmoid": lambda x: F.hardsigmoid(x * 3),
    "hardswish": lambda x: F.hardswish(x * 3),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.8),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "softplus": lambda x: F.softplus(x, 2.0, 1.5),
    "softshrink": lambda x: F.softshrink(x, 0.4),
    "softsign": F.softsign,
    "clamp": lambda x: x.clamp(-0.4, 0.9),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "clamp_max": lambda x: torch.clamp_max(x, 0.1),
    "pow 3": lambda x: x**3,
    "pow 4": lambda x: x**4,
    "pow -1": lambda x: (x * x + 0.5) ** -1,
    "pow 0.5": lambda x: (x * x + 0.5) ** 0.5,
    "pow -0.5": lambda x: (x * x + 0.5) ** -0.5,
    "sum": lambda x: x.sum(-1),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean(0, keepdim=True),
    "mean of all": lambda x: x.mean() * x,
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(0, correction=0),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(0, keepdim=True) * x,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(0),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "reshape": lambda x: x.sin().reshape(2, 2, 6).tanh(),
    "transpose": lambda x: x.sin().transpose(0, 1).exp(),
    "permute": lambda x: x.sin().view(2, 2, 6).permute(2, 0, 1).exp(),
    "expand": lambda x: x.sin()[:, None].expand(4, 3, 6).sin(),
    "unsqueeze": lambda x: x.sin().unsqueeze(1).sin().squeeze(1),
}
TWO = {
    "add": lambda x, y: torch.add(x, y, alpha=3),
    "sub": lambda x, y: torch.sub(x, y, alpha=2),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=2),
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y * y + 0.5),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "where": lambda x, y: torch.where(x > 0.2, x * y, y),
    "masked_fill": lambda x, y: (x * y).masked_fill(x < y, 0.3),
    "lerp": lambda x, y: torch.lerp(x, x * y, y),
    "both sums": lambda x, y: (x * y).sum() * y,
    "mse": F.mse_loss,
    "kl": lambda x, y: F.kl_div(x, y.softmax(-1), reduction="sum"),
    "binary cross entropy": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="none").mean(-1),
    "smooth": lambda x, y: F.smooth_l1_loss(x, y * 2),
    "cosine": lambda x, y: F.cosine_similarity(x, y, dim=-1),
    "several results": lambda x, y: (x * y, (x * y).sum(-1), x.exp() + y),
}
PRODUCTS = {
    "mm": (lambda x, w: torch.mm(x, w).tanh(), (5, 3), (3, 4)),
    "matmul": (lambda x, w: (x @ w).tanh(), (2, 5, 3), (3, 4)),
    "addmm": (lambda x, w: torch.addmm(x.sum(-1, keepdim=True) * w.sum(0), x, w).tanh(), (5, 3), (3, 4)),
    "bmm": (lambda x, w: torch.bmm(x.sin(), w.sin()).softmax(-1), (2, 5, 3), (2, 3, 4)),
    "linear": (lambda x, w: F.gelu(F.linear(x, w, w.sum(-1))), (2, 5, 3), (4, 3)),
}


def evaluated(nodes, values):
    """Run nodes with torch from ``values``; return all values."""
    values = dict(values)

    def get(arg):
        if isinstance(arg, Ref):
            return values[arg.name]
        if isinstance(arg, Symbol):
            return torch.float64  # what kernels compute in float32 is computed in float64 here
        return [get(one) for one in arg] if isinstance(arg, tuple) else arg

    for node in nodes:
        args = [get(arg) for arg in node.args]
        if node.bare_op == "share":
            value, tensor, dims = args
            values[node.name] = value / math.prod(tensor.shape[dim] for dim in dims)
        else:
            _, name, overload = node.op.split(".")
            kwargs = {key: get(one) for key, one in node.kwargs.items()}
            values[node.name] = getattr(getattr(torch.ops.aten, name), overload)(*args, **kwargs)
        assert values[node.name].shape == node.meta.shape, node
    return values


def hold(function, inputs):
    """Compare the gradients of a segment's inputs with autograd's."""
    module = Function(lambda s, *args: function(*args))
    captured = capture(module, tuple(one.float() for one in inputs))
    graph = rewrite(graph_from_json(json.loads(json.dumps(captured))))
    (segment,) = [item for item in segments(graph) if isinstance(item, Segment)]
    reverse = differentiate(segment, graph.metas(), value_names(graph), exact_maxima=True)
    values = evaluated(graph.nodes, dict(zip((item.name for item in graph.placeholders), inputs, strict=True)))
    leaves = {name: values[name].detach().requires_grad_() for name in segment.inputs}
    results = evaluated(segment.nodes, leaves)
    outputs = [results[name] for name in segment.outputs]
    cotangents = [torch.randn_like(one) for one in outputs]
    expected = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    given = {name: results[name].detach() for name in reverse.saved}
    made = evaluated(reverse.graph.nodes, {**given, **dict(zip(reverse.cotangents, cotangents, strict=True))})
    for item, theirs in zip(reverse.graph.output.items, expected, strict=True):
        torch.testing.assert_close(made[item.name], theirs, rtol=1e-7, atol=1e-8)


def wide(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("name", ONE)
def test_of_one_operand(name):
    hold(ONE[name], [wide(4, 6)])


@pytest.mark.parametrize("name", TWO)
def test_of_two_operands(name):
    hold(TWO[name], [wide(4, 6), wide(4, 6)])


@pytest.mark.parametrize("name", ["add", "mul", "where", "maximum", "lerp"])
@pytest.mark.parametrize("shape", [(6,), (4, 1), (3, 1, 6), ()], ids=str)
def test_of_an_operand_that_is_repeated(name, shape):
    hold(TWO[name], [wide(4, 6), wide(*shape)])


@pytest.mark.parametrize("name", PRODUCTS)
def test_of_a_product(name):
    function, left, right = PRODUCTS[name]
    hold(function, [wide(*left), wide(*right)])


def test_every_rule_is_tried():
    tried = {name.split(" ")[0] for name in (*ONE, *TWO)}
    aliases = {"to", "_to_copy", "contiguous", "clone", "pow", "logical"}
    assert set(POINTWISE_RULES) - aliases <= tried


def test_bounds_that_are_tensors_are_left_to_torch():
    meta = TensorMeta((4,), "float32", (1,))
    node = Node("c", "aten.clamp.Tensor", (Ref("x"), Ref("y")), metas=(meta,))
    assert rule_of(node, {"x": meta, "y": meta, "c": meta}) is None
