"""Numbers that were sizes: told apart from plain numbers, and right at other sizes."""

import pytest
import torch
import torch.nn.functional as F
from modules import Function

from drk.assistant.synth.propose import compile_graph, variants
from drk.assistant.synth.size_constants import size_constants


def test_only_what_one_dimension_explains_is_a_size(graph_of):
    module = Function(lambda s, x: (x @ s.weight) / x.shape[0], weight=torch.randn(33, 7))
    graph = graph_of(module, torch.randn(70, 33))
    sizes = size_constants(graph)
    names = {"args_0": "x"}
    assert sizes.text(70, names) == "x.shape[0]"
    assert sizes.text(33, names) is None, "a parameter's size"
    assert sizes.text(70 * 33, names, scalar=True) == "x.shape[0] * x.shape[1]"
    assert sizes.text(70.0, names) is None
    assert size_constants(graph_of(Function(lambda _, x: x + 1), torch.randn(9, 9))).text(9, names) is None


def test_divisions_by_sizes_hold_at_other_sizes(check):
    gram = Function(lambda _, x: x @ x.mT.contiguous() / (x.shape[1] * x.shape[2]))
    check(gram, torch.randn(3, 12, 20), calls=[[torch.randn(2, 9, 11)]], factor=3.0)
    kl = Function(lambda _, x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"))
    check(kl, torch.randn(70, 20), torch.randn(70, 20), calls=[[torch.randn(5, 20), torch.randn(5, 20)]], factor=4.0)


def test_a_buffer_that_was_cut_to_the_input_is_cut_again(check):
    def forward(s, x):
        hidden = s.mask[:, : x.shape[1], : x.shape[1]] == 0
        return (x @ x.mT * 0.1).masked_fill(hidden, float("-inf")).softmax(-1) + 1

    module = Function(forward)
    module.register_buffer("mask", torch.ones(1, 21, 21).tril())
    check(module, torch.randn(2, 21, 7), calls=[[torch.randn(3, 9, 7)]], factor=3.0)


def test_a_size_that_may_be_either_of_two_is_kept_to(interpreter, graph_of):
    def forward(_, x):
        rows = torch.linspace(-1, 1, x.shape[2], device=x.device)[:, None]
        return x * rows + torch.arange(x.shape[3], device=x.device)

    def compiled(shape):
        graph = graph_of(Function(forward), torch.randn(shape))
        return compile_graph(graph, variants(graph)[0]).source

    square = compiled((3, 2, 9, 9))
    (((first,),)) = interpreter.run(square, {}, [[torch.ones(5, 2, 9, 9)]])
    assert first.shape == (5, 2, 9, 9)
    with pytest.raises(AssertionError, match="with 9 in dimension 2"):
        interpreter.run(square, {}, [[torch.ones(3, 2, 5, 5)]])
    assert "raise ValueError" not in compiled((3, 2, 9, 12)).split("def forward")[1]


def test_a_quarter_may_have_been_computed(interpreter, graph_of):
    def source(cut):
        graph = graph_of(Function(lambda _, x: x[:, :cut].relu() + 1), torch.randn(5, 64, 3))
        return compile_graph(graph, variants(graph)[0]).source

    with pytest.raises(AssertionError, match="with 64 in dimension 1"):
        interpreter.run(source(16), {}, [[torch.ones(5, 48, 3)]])
    (((first,),)) = interpreter.run(source(10), {}, [[torch.ones(2, 48, 3)]])
    assert first.shape == (2, 10, 3)


@pytest.mark.parametrize(
    ("forward", "dims"),
    [
        (lambda _, x, y: F.interpolate(x, size=y.shape[2:], mode="bilinear") + y, (2, 3)),
        (lambda _, x, y: F.adaptive_max_pool2d(x, (None, 2)).relu() + y.sum(), (2,)),
        (lambda _, x, y: F.interpolate(x, scale_factor=0.5, mode="area").relu() + y.sum(), (2, 3)),
        (lambda _, x, y: F.adaptive_avg_pool2d(x, (7, 5)).relu() + y.sum(), ()),
    ],
)
def test_sizes_that_images_are_brought_to_are_kept(forward, dims, graph_of):
    graph = graph_of(Function(forward), torch.randn(2, 3, 32, 48), torch.randn(2, 3, 64, 64))
    checks = compile_graph(graph, variants(graph)[0]).source.split("def forward")[1]
    shown = {place for place in range(4) for item in (0, 1) if f"if args[{item}].shape[{place}] !=" in checks}
    assert shown == set(dims)


def test_roots_and_equal_parts_are_of_the_sizes_they_were_made_for(graph_of):
    def attend(_, q, k, v):
        half = v.shape[-1] // 2
        turned = torch.cat((-v[..., half:], v[..., :half]), -1)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ (v + turned)

    q, k, v = torch.randn(2, 3, 9, 64), torch.randn(2, 3, 9, 64), torch.randn(2, 3, 9, 80)
    graph = graph_of(Function(attend), q, k, v)
    checks = compile_graph(graph, variants(graph)[0]).source.split("def forward")[1]
    assert [f"if args[{place}].shape[3] != 64:" in checks for place in range(3)] == [True, True, False]
    assert "if args[2].shape[3] % 2:" in checks
    assert "shape[0] !=" not in checks
