"""Kernels that read through views, against float64 under the interpreter."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from modules import Each, Function
from torch import nn

from drk.assistant.synth.propose import compile_graph, variants
from drk.assistant.synth.regions import Rules


def shuffled(groups):
    def shuffle(x):
        n, c, h, w = x.shape
        return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)

    return shuffle


def both(check, module, *args, **options):
    """What is compiled row-major and channels last."""
    return [check(module, *args, variant=variant, **options) for variant in (0, 1)]


def kinds(compiled):
    return sorted(region.kind for region in compiled.regions)


def test_a_bias_a_pixel_shuffle_prelu_and_clamp_are_one_kernel(check):
    parts = {"conv": nn.Conv2d(3, 24, 3, padding=1), "act": nn.PReLU(6)}
    nn.init.uniform_(parts["act"].weight, -0.5, 0.5)
    module = Function(lambda s, x: s.act(F.pixel_shuffle(s.conv(x), 2)).clamp(-1, 1), **parts)
    last, plain = both(check, module, torch.randn(2, 3, 5, 7), calls=[[torch.randn(1, 3, 8, 6)]])
    assert kinds(last) == ["mapped", "pointwise"]
    assert kinds(plain) == ["mapped"]
    assert plain.launches == 2
    assert "reshape" not in plain.source.split("def forward")[1]


def test_a_channel_shuffle_before_a_norm(check):
    parts = {"conv": nn.Conv2d(12, 12, 1, groups=3), "norm": nn.BatchNorm2d(12)}
    nn.init.uniform_(parts["norm"].running_var, 0.5, 1.5)
    nn.init.normal_(parts["norm"].running_mean)
    module = Function(lambda s, x: s.norm(F.relu(shuffled(3)(s.conv(x)))), **parts)
    last, plain = both(check, module, torch.randn(2, 12, 9, 8), calls=[[torch.randn(3, 12, 5, 5)]])
    assert (last.launches, plain.launches) == (3, 2)


def test_halves_behind_a_bias(check):
    def forward(s, x):
        signal, gate = s.conv(x).chunk(2, 1)
        return x + torch.tanh(signal) * torch.sigmoid(gate)

    module = Function(forward, conv=nn.Conv1d(6, 12, 3, padding=2, dilation=2))
    last, plain = both(check, module, torch.randn(2, 6, 33), calls=[[torch.randn(1, 6, 70)]])
    assert (last.launches, plain.launches) == (3, 2)
    module = Function(lambda s, x: F.glu(s.conv(x), 1) * 2, conv=nn.Conv2d(3, 10, 3))
    both(check, module, torch.randn(2, 3, 9, 8), calls=[[torch.randn(3, 3, 6, 11)]])


def test_unequal_parts_behind_a_bias(check):
    def forward(s, x):
        a, b, c = s.conv(x).split([2, 4, 2], 1)
        return a * c.sigmoid() + b[:, 1:3].relu()

    module = Function(forward, conv=nn.Conv2d(3, 8, 3))
    assert check(module, torch.randn(2, 3, 9, 8), variant=1, calls=[[torch.randn(1, 3, 6, 11)]]).launches == 2


@pytest.mark.parametrize("factor", [2, 3])
def test_nearest_upsampling_and_a_skip(check, factor):
    module = Function(
        lambda s, x, y: F.elu(F.interpolate(s.conv(x), scale_factor=factor) + y, 0.7),
        conv=nn.Conv2d(4, 6, 3, padding=1),
    )
    calls = [[torch.randn(1, 4, 3, 7), torch.randn(1, 6, 3 * factor, 7 * factor)]]
    last, plain = both(check, module, torch.randn(2, 4, 5, 6), torch.randn(2, 6, 5 * factor, 6 * factor), calls=calls)
    assert (last.launches, plain.launches) == (3, 2)


def test_a_large_upsampling_in_both_layouts(check):
    module = Function(lambda s, x, y: (F.interpolate(s.conv(x), scale_factor=2) * y).relu(), conv=nn.Conv2d(3, 72, 1))
    both(check, module, torch.randn(1, 3, 5, 37), torch.randn(1, 72, 10, 74))


def test_a_shuffle_that_nothing_follows(check):
    module = Function(lambda s, x: F.pixel_shuffle(s.conv(x), 2), conv=nn.Conv2d(3, 8, 3, padding=1))
    assert check(module, torch.randn(2, 3, 5, 7), variant=1).launches == 2
    module = Function(lambda _, x, y: (x * y).transpose(1, 2).reshape(6, 20))
    assert check(module, torch.randn(6, 4, 5), torch.randn(6, 4, 5), calls=[[torch.randn(6, 4, 5)] * 2]).launches == 1


VIEWS = (
    lambda _, x: (x * 2).flip((1, 2)).sigmoid() + 1,
    lambda _, x: (x * 2).repeat(2, 3, 1).sigmoid() + 1,
    lambda _, x: (x * 2).repeat_interleave(3, 2).sigmoid() + 1,
    lambda _, x: (x * 2).permute(2, 0, 1).reshape(-1, 6).sigmoid() + 1,
    lambda _, x: F.pixel_unshuffle((x * 2).unsqueeze(1), 2).sigmoid() + 1,
    lambda _, x: (x.sigmoid() * x)[:, 1:].transpose(0, 2).flatten(0, 1).exp() * 2,
    lambda _, x: (lambda y: y.flip(1) + y * 3)((x * 2).transpose(1, 2).clone()),
    lambda _, x: torch.logical_and((x > 0).flip(1), x < 1).float() * 3,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_views_between_elementwise_operators(check, dtype):
    inputs = [torch.randn(4, 6, 8).to(dtype) for _ in VIEWS]
    compiled = check(Each(VIEWS), *inputs, factor=3.0)
    assert kinds(compiled).count("mapped") == len(VIEWS)


def test_one_image_at_capture_and_several_later(check):
    def forward(s, x, gate):
        return F.pixel_shuffle(s.conv(x), 2) * gate.sigmoid() + 1

    calls = [[torch.randn(3, 3, 4, 7), torch.randn(3, 2, 8, 14)], [torch.randn(2, 3, 1, 1), torch.randn(2, 2, 2, 2)]]
    both(
        check,
        Function(forward, conv=nn.Conv2d(3, 8, 1)),
        torch.randn(1, 3, 5, 6),
        torch.randn(1, 2, 10, 12),
        calls=calls,
    )


def test_every_other_column_of_an_odd_width(check):
    def forward(_, x, y):
        return (x * 2)[:, :, ::2].flip(1).relu() + y

    calls = [[torch.randn(2, 5, 9), torch.randn(2, 5, 5)]]
    compiled = check(Function(forward), torch.randn(3, 4, 8), torch.randn(3, 4, 4), calls=calls)
    assert kinds(compiled) == ["mapped"]


CUTS = (
    lambda _, x: (x * 2)[:, -1] + 1,
    lambda _, x: (x * 2)[:, -4:].sigmoid() + 1,
    lambda _, x: (x * 2)[:, 3:].sigmoid() + 1,
    lambda _, x: (x * 2).chunk(2, 1)[0][:, :2].sigmoid() + 1,
    lambda _, x: (x * 2).chunk(2, 1)[1][:, 2:].sigmoid() + 1,
    lambda _, x: (x * 2).chunk(3, 1)[2].sigmoid() + 1,
    lambda _, x: (x * 2).flip(1)[:, :4].sigmoid() + 1,
    lambda _, x: (x * 2).flip(1)[:, ::2].sigmoid() + 1,
    lambda _, x: (x * 2).flip(1).chunk(2, 1)[0].sigmoid() + 1,
    lambda _, x: (x * 2).unflatten(1, (2, -1))[:, 1].sigmoid() + 1,
    lambda _, x: (x * 2).flatten(1)[:, 12:].sigmoid() + 1,
    lambda _, x: (x * 2).narrow(1, 2, 6).sigmoid() + 1,
    lambda _, x: (x * 2).view(x.shape[0], 2, -1, 6).transpose(2, 3).contiguous().sigmoid(),
)


def test_cuts_are_where_they_are_in_longer_tensors_too(check):
    calls = [[torch.randn(3, size, 6) for _ in CUTS] for size in (10, 16)]
    compiled = check(Each(CUTS), *(torch.randn(2, 8, 6) for _ in CUTS), calls=calls)
    assert kinds(compiled).count("mapped") >= 4


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x, y: (x + y).transpose(1, 2).contiguous().sigmoid(),
        lambda _, x, y: (x * 2).sum() + (y * 2).flatten(0, 1).t().contiguous().sigmoid(),
    ],
)
def test_several_elements_where_there_was_one_are_refused(interpreter, graph_of, function):
    x, y = torch.randn(2, 8, 6), torch.randn(1, 8, 6)
    graph = graph_of(Function(function), x, y)
    source = compile_graph(graph, variants(graph)[0]).source
    (outputs,) = interpreter.run(source, {}, [[x, y]])
    torch.testing.assert_close(outputs[0], function(None, x, y))
    with pytest.raises(AssertionError, match="had one element when this was written"):
        interpreter.run(source, {}, [[x, x]])


def test_strided_inputs_are_read_where_they_lie(check):
    module = Function(lambda _, x, y: F.pixel_shuffle((x + 1) * y, 2).relu() * 2)
    x, y = torch.randn(2, 8, 3, 10)[..., ::2], torch.randn(2, 3, 5, 8).permute(0, 3, 1, 2)
    assert check(module, x, y, kernels=["add_mul_pixel_shuffle_relu"]).launches == 1


def test_a_value_that_is_read_elsewhere_too_is_written(check):
    def forward(s, x):
        y = s.conv(x)
        return F.pixel_shuffle(y, 2).relu() + 1, y.sum(1)

    both(check, Function(forward, conv=nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 9, 8))


def test_a_view_that_is_read_elsewhere_too(check):
    def forward(s, x):
        y = F.interpolate(s.a(x), scale_factor=2)
        return F.elu(s.b(y).sigmoid() * y)

    parts = {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(4, 4, 3, padding=1)}
    both(check, Function(forward, **parts), torch.randn(2, 3, 9, 8))


def test_prelu_of_one_and_of_many_channels(check):
    parts = {"one": nn.PReLU(), "many": nn.PReLU(5)}
    nn.init.uniform_(parts["many"].weight, -1, 1)
    compiled = check(
        Function(lambda s, x: s.many(s.one(x) * 2), **parts), torch.randn(3, 5, 7), calls=[[torch.randn(1, 5, 9)]]
    )
    assert compiled.launches == 1
    check(Function(lambda s, x: s.many(x * 2), **parts), torch.randn(4, 5))


def test_special_values_come_through(interpreter, graph_of):
    module = Function(lambda s, x: s.act(F.pixel_shuffle(x * 1.0, 2)), act=nn.PReLU(2))
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e38, -1e38, 3.0]).reshape(1, 8, 1, 1)
    graph = graph_of(module, x)
    ((got,),) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, module.state_dict(), [[x]])
    torch.testing.assert_close(got, module(x), equal_nan=True)


def test_a_view_whose_size_no_operand_tells_is_left_to_torch(check):
    module = Function(lambda _, x: (x * 2).unsqueeze(1).expand(-1, 7, -1).reshape(-1, 5).sigmoid())
    compiled = check(module, torch.randn(4, 5), calls=[[torch.randn(3, 5)]])
    assert "expand" in compiled.source.split("def forward")[1]
    assert kinds(compiled) == ["mapped"]


def test_a_bias_before_a_flattened_softmax_joins_the_row(check):
    def forward(s, x):
        heat = torch.softmax(s.conv(x).flatten(2) * 4.0, dim=-1)
        return (heat * s.grid).sum(-1)

    module = Function(forward, conv=nn.Conv2d(3, 5, 3, padding=1), grid=torch.randn(54))
    compiled = check(module, torch.randn(2, 3, 6, 9), variant=1, calls=[[torch.randn(3, 3, 6, 9)]])
    assert kinds(compiled) == ["row"]
    assert compiled.launches == 2


def test_patches_before_a_norm(check):
    def forward(s, x):
        y = s.conv(x).flatten(2).transpose(1, 2)
        return s.norm(y + s.places)

    module = Function(forward, conv=nn.Conv2d(3, 8, 2, stride=2), norm=nn.LayerNorm(8), places=torch.randn(1, 12, 8))
    compiled = check(module, torch.randn(2, 3, 6, 8), variant=1, calls=[[torch.randn(1, 3, 6, 8)]])
    assert compiled.launches == 2


def test_what_a_view_shows_in_part_stays_before_it(check):
    def forward(_, x, y):
        return torch.softmax((x * y).reshape(4, 15), -1), torch.softmax((x * 2 + y).relu().unsqueeze(1), -1)

    check(Function(forward), torch.randn(4, 3, 5), torch.randn(3, 1))


def test_both_layouts_compile_for_a_gpu(graph_of, offline_compile):
    module = Function(lambda s, x: F.pixel_shuffle(s.conv(x), 2).relu().flip(2), conv=nn.Conv2d(16, 64, 1)).eval()
    graph = graph_of(module, torch.randn(2, 16, 32, 32))
    compiled = compile_graph(graph, replace(variants(graph)[0], rules=Rules(matmul=False), channels_last=True))
    rows = offline_compile(compiled.source, [2, 16, 32, 32])
    assert [row["spill_bytes"] for row in rows] == [0, 0]


def test_parts_of_one_cut_in_two_kernels(check):
    def forward(s, x):
        skip = 0
        for conv in (s.one, s.two):
            part, more = conv(x).chunk(2, 1)
            x, skip = x + part, skip + more
        return (s.three(x).chunk(2, 1)[1] + skip).relu()

    parts = {name: nn.Conv1d(4, 8, 3, padding=1) for name in ("one", "two")} | {"three": nn.Conv1d(4, 8, 1)}
    plain = both(check, Function(forward, **parts), torch.randn(2, 4, 9), calls=[[torch.randn(1, 4, 7)]])[1]
    assert any(cut.name not in region.names for region in plain.regions for cut in region.cuts)


class LibraryAttention(nn.Module):
    """Attention by the library, whose result lies as the output projection reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(32, 32)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = (x.view(2, 9, 4, 8).transpose(1, 2) for x in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return nn.functional.gelu(self.out(mixed.transpose(1, 2).reshape(2, 9, 32)))


def test_what_attention_lays_out_for_nothing_is_not_copied(graph_of):
    graph = graph_of(LibraryAttention(), *(torch.randn(2, 9, 32) for _ in range(3)))
    for variant in variants(graph)[:2]:
        names = [kernel.name for kernel in compile_graph(graph, variant).kernels]
        assert "pointwise" not in names, names


def test_a_channel_shuffle_of_other_channels_than_captured(check):
    module = Function(lambda _, x: F.channel_shuffle(x, 4).relu() + 1)
    check(module, torch.randn(5, 16, 3, 7), kernels=["channel_shuffle_relu_add"], calls=[[torch.randn(2, 24, 2, 3)]])
