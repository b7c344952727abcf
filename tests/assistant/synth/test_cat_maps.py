"""Concatenations, stacks, paddings and rolls inside kernels, against float64 under the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from modules import Each, Function
from torch import nn

from drk.assistant.synth.propose import compile_graph, variants


def kinds(compiled):
    return sorted(region.kind for region in compiled.regions)


def rotated(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def sliced_rotation(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def interleaved_rotation(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


@pytest.mark.parametrize("turn", [rotated, sliced_rotation, interleaved_rotation])
def test_rotary_embeddings_are_one_kernel(check, turn):
    module = Function(lambda s, q: q * s.cos + turn(q) * s.sin, cos=torch.randn(6, 8), sin=torch.randn(6, 8))
    compiled = check(module, torch.randn(2, 3, 6, 8), calls=[[torch.randn(1, 1, 6, 8)]])
    assert kinds(compiled) == ["mapped"]
    assert compiled.launches == 1


def test_rotary_pairs_of_a_transposed_view(check):
    def forward(_, x, cos, sin):
        q = x.view(2, 5, 3, 8).transpose(1, 2)
        a, b = q[..., ::2], q[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)

    compiled = check(Function(forward), torch.randn(2, 5, 24), torch.randn(5, 4), torch.randn(5, 4))
    assert kinds(compiled) == ["mapped"]


JOINS = (
    lambda _, x, y: torch.cat([x, y], 1).relu() * 2,
    lambda _, x, y: torch.cat([x * 2, y.sigmoid(), x], 2).neg() + 1,
    lambda _, x, y: torch.cat([x + 1, y * 3], 0),
    lambda _, x, y: torch.stack([x + 1, y * 3, x], 0),
    lambda _, x, y: torch.stack([x + 1, y * 3], 1).exp(),
    lambda _, x, y: torch.stack([x + 1, y * 3], -1).exp(),
    lambda _, x, y: torch.cat([torch.cat([x.exp(), y], 1), y * 2], 1)[:, 1:].relu(),
    lambda _, x, y: F.channel_shuffle(torch.cat([x + 1, y * 3], 1), 4).relu(),
    lambda _, x, y: torch.cat([x.flip(1) + 1, (y * 3).repeat(1, 2, 1)], 1).transpose(1, 2).reshape(-1, 6).sigmoid(),
    lambda _, x, y: torch.hstack([x + 1, y]) + torch.vstack([x, y * 2]).view(2, 8, 6),
    lambda _, x, y: torch.dstack([x + 1, y]).tile((1, 1, 2)).exp(),
    lambda _, x, y: (
        torch.cat(
            [F.pixel_shuffle((x + y).unsqueeze(2).expand(2, 4, 3, 6), 2), y[:, :1, None, :].repeat(1, 1, 6, 2)], 1
        )
        * 2
    ),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joins_before_and_behind_elementwise_operators(check, dtype):
    inputs = [torch.randn(2, 4, 6).to(dtype) for _ in JOINS for _ in range(2)]
    compiled = check(Each(JOINS, arity=2), *inputs, factor=3.0)
    assert kinds(compiled) == ["mapped"] * len(JOINS)


PADS = (
    lambda _, x: F.pad(x * 2, (1, 2)),
    lambda _, x: F.pad(x.exp(), (0, 2, 3, 0), value=-1.5) * 2,
    lambda _, x: F.pad(x.exp(), (2, 1, 1, 2), mode="reflect") + 1,
    lambda _, x: F.pad(x.exp(), (2, 1, 1, 2), mode="replicate") + 1,
    lambda _, x: F.pad(x.exp(), (2, 1), mode="circular") + 1,
    lambda _, x: torch.roll(x * 2, (1, -2), (1, 2)).sigmoid(),
    lambda _, x: torch.roll(x * 2, 7, 1).sigmoid(),
    lambda _, x: torch.roll(x * 2, (-1, 2), (1, 2)).view(2, 2, 2, 3, 2).transpose(2, 3).reshape(2, 4, 6) + 1,
    lambda _, x: torch.roll((x * 2).view(2, 2, 2, 3, 2).transpose(2, 3).reshape(2, 4, 6), (1, 3), (1, 2)) + 1,
    lambda _, x: torch.cat([F.pad(x * 2, (0, 0, 1, 0))[:, :-1], x], 2) * 3,
    lambda _, x: F.pad((x * 2).movedim(1, 2).flip(1), (1, 1)).roll(1, 1) + 1,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_paddings_and_rolls(check, dtype):
    compiled = check(Each(PADS), *(torch.randn(2, 4, 6).to(dtype) for _ in PADS), factor=3.0)
    assert kinds(compiled) == ["mapped"] * len(PADS)


def test_other_sizes_than_those_captured(check):
    functions = (
        *JOINS[:6],
        lambda _, x, y: torch.cat([x.chunk(2, 1)[1] + 1, y], 1),
        lambda _, x, y: torch.cat([F.pad(x * 2, (1, 0)), F.pad(y, (0, 1), mode="replicate")], 1),
        lambda _, x, y: torch.cat([torch.roll(x, 3, 1) * 2, y], 1).view(2, 2, -1, 6).transpose(1, 2).reshape(2, -1, 6),
    )
    calls = [
        [item for _ in functions for item in (torch.randn(2, 6, 6), torch.randn(2, 6, 6))],
        [item for _ in functions for item in (torch.randn(2, 2, 6), torch.randn(2, 2, 6))],
    ]
    inputs = [item for _ in functions for item in (torch.randn(2, 4, 6), torch.randn(2, 4, 6))]
    compiled = check(Each(functions, arity=2), *inputs, calls=calls)
    assert kinds(compiled) == ["mapped"] * len(functions)


def test_pieces_of_other_lengths_at_the_next_call(check):
    module = Function(
        lambda s, x, y: (torch.cat([s.first.expand(x.shape[0], -1, -1), x, y], 1) + 1).relu(),
        first=torch.randn(1, 1, 6),
    )
    calls = [[torch.randn(3, 1, 6), torch.randn(3, 7, 6)], [torch.randn(1, 4, 6), torch.randn(1, 0, 6)]]
    compiled = check(module, torch.randn(2, 3, 6), torch.randn(2, 5, 6), calls=calls)
    assert kinds(compiled) == ["mapped"]
    module = Function(lambda _, x, y: torch.cat([x, y], 1) * 2)
    check(module, torch.randn(2, 1, 6), torch.randn(2, 1, 6), calls=[[torch.randn(1, 3, 6), torch.randn(1, 2, 6)]])


def test_whole_numbers_and_booleans(check):
    functions = (
        lambda _, x, y: torch.cat([x, y], 1) * 2,
        lambda _, x, y: torch.where(torch.cat([x > 1, F.pad(y > 2, (1, 0))[:, :-1]], 0), 3, 4),
        lambda _, x, y: F.pad(x + y, (1, 1), value=7),
    )
    inputs = [torch.randint(0, 5, (3, 4)) for _ in functions for _ in range(2)]
    assert kinds(check(Each(functions, arity=2), *inputs)) == ["mapped"] * 3


def test_special_values_stay_in_their_piece(interpreter, graph_of):
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 1e38, 2.0]).reshape(1, 6)
    module = Function(lambda _, x, y: torch.roll(F.pad(torch.cat([x * 1.0, y], 1), (1, 1)), 1, 1) * 1.0)
    graph = graph_of(module, special, torch.ones(1, 6))
    ((got,),) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[special, torch.ones(1, 6)]])
    torch.testing.assert_close(got, module(special, torch.ones(1, 6)), equal_nan=True)
    assert torch.equal(got.signbit(), module(special, torch.ones(1, 6)).signbit())


ALONE = (
    lambda _, x: F.pixel_shuffle(x, 2),
    lambda _, x: torch.cat([x, x.flip(3)], 1),
    lambda _, x: F.pad(x, (1, 1, 1, 1)),
    lambda _, x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    lambda _, x: x.permute(0, 2, 3, 1).contiguous(),
    lambda _, x: x.roll((1, 2), (2, 3)),
    lambda _, x: F.interpolate(x, scale_factor=2),
    lambda _, x: torch.cat([x, x], 0),
)


@pytest.mark.parametrize("function", ALONE)
def test_what_only_moves_elements_is_one_kernel(check, function):
    compiled = check(Function(function), torch.randn(2, 4, 3, 5), calls=[[torch.randn(1, 8, 4, 3)]])
    assert compiled.launches == 1


def test_joins_around_convolutions(check):
    def forward(s, x):
        a, b = s.one(x), s.two(x)
        return s.three(torch.cat([a.relu(), x, b.sigmoid()], 1)).relu()

    parts = {"one": nn.Conv2d(3, 4, 3, padding=1), "two": nn.Conv2d(3, 2, 1), "three": nn.Conv2d(9, 5, 1)}
    for variant in (0, 1):
        check(Function(forward, **parts), torch.randn(2, 3, 6, 5), variant=variant, calls=[[torch.randn(1, 3, 4, 7)]])


def test_a_dense_block_never_copies_what_it_keeps(check):
    def forward(s, x):
        for norm, conv in ((s.norm_1, s.conv_1), (s.norm_2, s.conv_2)):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return s.last(F.relu(s.norm_3(x)))

    norms = {f"norm_{place + 1}": nn.BatchNorm2d(channels) for place, channels in enumerate((3, 5, 7))}
    for norm in norms.values():
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
    convs = {"conv_1": nn.Conv2d(3, 2, 3, padding=1), "conv_2": nn.Conv2d(5, 2, 1), "last": nn.Conv2d(7, 3, 1)}
    for variant, launches in ((0, 9), (1, 6)):
        module = Function(forward, **norms, **convs)
        compiled = check(module, torch.randn(2, 3, 6, 5), variant=variant, calls=[[torch.randn(1, 3, 4, 7)]])
        assert "torch.cat" not in compiled.source
        assert compiled.launches <= launches


def test_joins_compile_for_a_gpu(graph_of, offline_compile):
    def forward(s, x):
        a, b = x.chunk(2, 1)
        y = F.pad(
            torch.cat([x.relu(), a.exp(), F.pad(b, (1, 1, 0, 0))[..., 1:-1] * s.gain], 1), (3, 3, 3, 3), mode="reflect"
        )
        z = torch.stack([a.roll((1, 2), (2, 3)), -b], 2).flatten(1, 2).permute(0, 2, 3, 1).contiguous()
        return y * 2, z, torch.cat([x.transpose(2, 3), s.first.expand(x.shape[0], -1, -1, -1)], 0) + 1

    module = Function(forward, gain=torch.ones(16, 1, 1), first=torch.ones(1, 32, 24, 24)).eval()
    compiled = compile_graph(graph := graph_of(module, torch.randn(2, 32, 24, 24)), variants(graph)[0])
    assert kinds(compiled) == ["mapped"] * 3
    assert all(row["spill_bytes"] == 0 for row in offline_compile(compiled.source, [2, 32, 24, 24]))


@pytest.mark.parametrize("shift", [2, -3])
def test_windows_put_together_and_rolled(check, shift):
    """Sizes of a rolled dimension that is two of the input's are one number where the shift is brought inside it."""

    def forward(_, windows):
        image = (windows * 2).view(-1, 2, 2, 4, 4, 3).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 8, 8, 3)
        return torch.roll(image, (shift, shift), (1, 2)) + 1

    check(Function(forward), torch.randn(12, 16, 3), calls=[[torch.randn(20, 16, 3)]])
