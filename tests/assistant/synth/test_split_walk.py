"""Walks of rows in pieces: tiles inside inner groups, tall tiles, pieces that end early, against float64."""

import torch
import torch.nn.functional as F
from modules import Function

from drk.assistant.synth.body import Body
from drk.assistant.synth.propose import compile_graph, variants
from drk.assistant.synth.split_walk import Walk, walk_of


def walk_in(compiled):
    (region,) = [item for item in compiled.regions if item.kind == "split"]
    metas = compiled.written.graph.metas()
    return walk_of(Body(region, compiled.written.names, metas, two_dimensional=True))


def last(*shape):
    return torch.randn(shape).to(memory_format=torch.channels_last)


def test_tiles_stay_inside_the_innermost_group_of_columns(check):
    x = torch.randn(1, 60, 600)
    module = Function(lambda s, x: (x * s.gain + 1).var((1, 2)) + x.mean((1, 2)) * 2, gain=torch.randn(60, 1))
    compiled = check(module, x, calls=[[torch.randn(2, 60, 700)], [torch.randn(1, 60, 5)]], factor=4.0)
    assert walk_in(compiled) == Walk((), (2,))
    assert "% col_size" not in compiled.source


def test_short_groups_are_walked_as_one(check):
    module = Function(lambda s, x: (x * s.gain).sum((1, 2)), gain=torch.randn(900, 1))
    assert walk_in(check(module, torch.randn(2, 900, 40), factor=4.0)) == Walk()


def test_places_of_extremes_count_columns_of_the_whole_row(interpreter, graph_of):
    module = Function(lambda _, x: (x.argmax(), (x * 2).amin()))
    x = torch.randn(40_000)
    x[31_234] = 9.0
    compiled = compile_graph(graph := graph_of(module, x), variants(graph)[0])
    ((place, least),) = interpreter.run(compiled.source, {}, [[x]])
    assert place.item() == 31_234
    assert least == x.min() * 2


def test_channels_next_to_each_other_are_rows_of_tall_tiles(check):
    module = Function(lambda s, x: (x + s.bias).var((2, 3)) + x.mean((2, 3)), bias=torch.randn(40, 1, 1))
    compiled = check(module, last(2, 40, 36, 35), calls=[[last(3, 40, 5, 9)]], factor=4.0)
    assert walk_in(compiled) == Walk((1,), ())


def test_tall_tiles_inside_groups(check):
    def forward(s, x):
        return (x * s.mask).mean((0, 2, 3), keepdim=True) + (x * s.mask).var((0, 2, 3), keepdim=True)

    module = Function(forward, mask=torch.rand(1, 1, 16, 17))
    compiled = check(module, last(6, 5, 16, 17), calls=[[last(2, 5, 16, 17)]], factor=4.0)
    assert walk_in(compiled) == Walk((0,), (2, 3))


def test_values_without_reductions_are_written_by_the_first_pass(check):
    def forward(s, x):
        y = F.relu(x + s.bias)
        return y, y.mean((0, 2, 3)), y.amax((0, 2, 3))

    compiled = check(Function(forward, bias=torch.randn(4, 1, 1)), torch.randn(3, 4, 60, 60), factor=4.0)
    (kernel,) = compiled.kernels
    first, second = kernel.kernel.split("@triton.jit")[1:]
    assert "relu" in first
    assert "relu(" not in second.split('"""')[2]


def test_a_large_negative_mean_keeps_its_variance(check):
    # A piece's mean is rounded as numbers of its size are: to 1.5e-5, a 7000th of the deviation here.
    module = Function(lambda _, x: x.var((2, 3)))
    check(module, last(1, 3, 40, 41) * 0.1 - 300, factor=40.0)
    check(module, torch.randn(1, 2, 200, 190) * 0.1 - 300, factor=40.0)
