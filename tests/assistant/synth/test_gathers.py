"""Gathers in kernels, against float64 under the interpreter: embeddings, selected rows, indices that forward makes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import Function
from torch import nn

from drk.assistant.synth import long_rows, regions
from drk.assistant.synth.gathers import Position, made_values
from drk.assistant.synth.propose import compile_graph, variants


class TextEmbeddings(nn.Module):
    """Words, positions and segments, as tests/fixtures/twelve/embedding_head.py has them."""

    def __init__(self, hidden=48):
        super().__init__()
        self.word = nn.Embedding(30, hidden, padding_idx=0)
        self.position = nn.Embedding(16, hidden)
        self.segment = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, ids, segment_ids=None):
        positions = torch.arange(ids.size(1), device=ids.device)
        if segment_ids is None:
            segment_ids = torch.zeros_like(ids)
        return self.norm(self.word(ids) + self.position(positions) + self.segment(segment_ids))


def ids_of(*shape, most=30, dtype=torch.int64):
    return torch.randint(0, most, shape, dtype=dtype)


def test_embeddings_of_words_positions_and_segments_are_one_launch(check):
    compiled = check(TextEmbeddings(), ids_of(3, 7), kernels=["embedding_layer_norm"], calls=[[ids_of(2, 11)]])
    assert compiled.launches == 1
    assert "arange" not in compiled.source.split("def forward")[1]
    assert "zeros" not in compiled.source.split("def forward")[1]


def test_embeddings_compile_for_hopper(graph_of, offline_compile):
    graph = graph_of(TextEmbeddings(768).eval(), ids_of(2, 16))
    (kernel,) = offline_compile(compile_graph(graph, variants(graph)[0]).source, [2, 16], "int64")
    assert kernel["launches"] == 1
    assert kernel["spill_bytes"] == 0


def test_given_segments_are_read(check):
    compiled = check(
        TextEmbeddings(), ids_of(3, 7), ids_of(3, 7, most=2), calls=[[ids_of(1, 16), ids_of(1, 16, most=2)]]
    )
    assert compiled.launches == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_tables_and_short_integers(check, dtype):
    module = Function(
        lambda s, x: s.table(x) * 8.0 + s.other(x), table=nn.Embedding(30, 40), other=nn.Embedding(30, 40)
    )
    check(module.to(dtype), ids_of(5, 3, dtype=torch.int32), kernels=["embedding_mul_add"])


def test_one_table_read_twice_and_used_by_a_product_too(check):
    def forward(s, x, y):
        z = s.table(x) * s.table(y)
        return F.linear(z, s.table.weight)

    compiled = check(Function(forward, table=nn.Embedding(30, 16)), ids_of(5), ids_of(5))
    assert compiled.launches == 2


def test_a_scaled_embedding_with_its_positions_by_the_caller(check):
    module = Function(
        lambda s, x, p: s.table(x) * 4.0 + s.places(p), table=nn.Embedding(30, 20), places=nn.Embedding(9, 20)
    )
    check(module, ids_of(4, 9), torch.arange(9).unsqueeze(0), kernels=["embedding_mul_add"])


def test_arithmetic_on_the_index_is_the_kernels(check):
    def forward(s, x):
        return s.table(x.abs() + 2) + s.places(torch.arange(x.shape[1]) + 2) + x.new_ones(()).float()

    module = Function(forward, table=nn.Embedding(40, 24), places=nn.Embedding(12, 24))
    compiled = check(module, ids_of(4, 9) - 5, calls=[[ids_of(2, 5)]])
    assert len(compiled.kernels) == 1
    module = Function(lambda s, x: s.table(x + 1).relu(), table=nn.Embedding(40, 24))
    assert check(module, ids_of(4, 9)).launches == 1


def test_an_index_that_something_else_reads_stays_outside(check):
    def forward(s, x):
        index = x + 1
        return s.table(index).relu(), index * 2

    check(Function(forward, table=nn.Embedding(40, 24)), ids_of(4, 9))


def test_selected_rows_of_a_computed_tensor(check):
    index = torch.tensor([3, 0, 3, 2])
    check(Function(lambda _, x, i: (x * 2).index_select(0, i).softmax(-1)), torch.randn(4, 33), index)
    check(Function(lambda _, x, i: x[i].relu() + 1), torch.randn(4, 3, 5), torch.tensor([[3, -1], [-4, 2]]))
    check(Function(lambda _, x, i: x.t()[i].exp()), torch.randn(6, 4), index)
    check(Function(lambda _, x, i: x[:, :3][i].exp() + 1), torch.randn(6, 4), index)
    check(Function(lambda _, x, y, i: x[i].relu() * y), torch.randn(9), torch.randn(2, 4), index)


def test_means_over_gathered_rows(check):
    module = Function(lambda s, x: s.table(x).mean(1) * 2, table=nn.Embedding(30, 24))
    assert check(module, ids_of(4, 9), calls=[[ids_of(2, 5)]]).launches == 1
    module = Function(lambda s, x: F.normalize(s.table(x), dim=-1), table=nn.Embedding(30, 24))
    assert check(module, ids_of(4, 9)).launches == 1


@pytest.mark.parametrize("outside", [30, 2**40, -1, -(2**62)])
def test_an_index_outside_of_its_table_reads_zeros_and_nothing_else(interpreter, graph_of, outside):
    module = Function(lambda s, x: s.table(x) * 3 + 1, table=nn.Embedding(30, 24))
    ids = ids_of(4, 5)
    graph = graph_of(module, ids)
    bad = ids.clone()
    bad[1, 2] = outside
    ((got,),) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, module.state_dict(), [[bad]])
    expected = module(ids)
    expected[1, 2] = 1.0
    torch.testing.assert_close(got, expected)


def test_longer_inputs_than_positions_read_zeros(interpreter, graph_of):
    module = Function(
        lambda s, x: s.table(x) + s.places(torch.arange(x.shape[1])),
        table=nn.Embedding(30, 24),
        places=nn.Embedding(8, 24),
    )
    graph = graph_of(module, ids_of(2, 7))
    ids = ids_of(2, 10)
    ((got,),) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, module.state_dict(), [[ids]])
    expected = module.table(ids)
    expected[:, :8] += module.places.weight
    torch.testing.assert_close(got, expected)


def test_special_values_come_through(interpreter, graph_of):
    module = Function(lambda s, x: s.table(x) + 1, table=nn.Embedding(4, 3))
    with torch.no_grad():
        module.table.weight[1] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    ids = torch.tensor([1, 3, 1])
    graph = graph_of(module, ids)
    ((got,),) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, module.state_dict(), [[ids]])
    torch.testing.assert_close(got, module(ids), equal_nan=True)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 40), st.integers(1, 70), st.booleans())
def test_any_shape(check, shape, rows, width, norm):
    def forward(s, x, y):
        z = s.table(x) * 2 + y
        return F.softmax(z, -1) if norm else z

    check(Function(forward, table=nn.Embedding(rows, width)), ids_of(*shape, most=rows), torch.randn(width), factor=3.0)


def test_what_only_gathers_is_a_kernel_where_there_is_no_other(check):
    check(Function(lambda s, x: s.table(x), table=nn.Embedding(30, 24)), ids_of(4), kernels=["embedding"])
    module = Function(lambda s, x: s.layer(s.table(x)).relu(), table=nn.Embedding(30, 24), layer=nn.Linear(24, 8))
    assert not any(region.gathers for region in check(module, ids_of(4)).regions)


def test_sparse_gradients_and_the_renormalising_of_a_table_stay_with_torch(check):
    module = Function(lambda s, x: s.table(x) * 2 + 1, table=nn.Embedding(30, 24, sparse=True))
    assert not any(region.gathers for region in check(module, ids_of(4)).regions)
    module = Function(lambda s, x: s.table(x) * 2 + 1, table=nn.Embedding(30, 24, max_norm=1.0))
    assert "torch.ops.aten.embedding_renorm" in check(module, ids_of(4)).source


def test_integers_that_forward_makes(graph_of):
    def forward(_, x):
        places = torch.arange(3, 8)
        return (
            x + places,
            x + places.unsqueeze(-1).expand(5, 5),
            x + torch.full((5,), 7) + torch.full((5,), 900),
            x + torch.arange(0, 10, 2),
        )

    made = made_values(graph_of(Function(forward), torch.arange(5)))
    assert sorted(made.positions.values(), key=lambda item: item.axis)[0] == Position(-2, 3)
    assert Position(-1, 3) in made.positions.values()
    assert set(made.numbers.values()) == {7, 900}
    assert not any(item.start == 0 for item in made.positions.values())


@pytest.mark.parametrize(
    ("kind", "module", "limit"), [("row", long_rows, "MAX_REGISTERS"), ("split", regions, "FEW_ROWS_COLUMNS")]
)
def test_rows_in_blocks_and_in_pieces(check, monkeypatch, kind, module, limit):
    def forward(s, x):
        z = s.table(x) + s.places(torch.arange(x.shape[1])) * 0.5
        return z.softmax(-1) * 2, s.norm(z)

    monkeypatch.setattr(module, limit, 0)
    parts = {"table": nn.Embedding(7, 5000), "places": nn.Embedding(5, 5000), "norm": nn.LayerNorm(5000)}
    compiled = check(Function(forward, **parts), ids_of(2, 3, most=7))
    assert [region.kind for region in compiled.regions] == [kind]
    assert ("blocks of columns" in compiled.source) == (kind == "row")


def test_the_index_of_a_column_picks_from_a_vector(check):
    module = Function(lambda s, x: (x * s.weight[torch.arange(x.shape[1]) + 1]).sum(-1) * 2, weight=torch.randn(20))
    compiled = check(module, torch.randn(4, 9), calls=[[torch.randn(3, 19)]])
    assert compiled.launches == 1


def test_positions_and_numbers_in_kernels_without_gathers(check):
    def forward(_, x, lengths):
        inside = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(-1)
        return torch.where(inside, x, torch.full_like(x, float("-inf"))).softmax(-1) + torch.zeros_like(x)

    calls = [[torch.randn(3, 21), torch.tensor([21, 1, 4])]]
    compiled = check(Function(forward), torch.randn(4, 9), torch.tensor([9, 1, 3, 8]), calls=calls)
    body = compiled.source.split("def forward")[1]
    assert len(compiled.kernels) == 1
    assert "arange" not in body
    assert "full" not in body
    assert "zeros" not in body


def test_positions_along_rows_and_as_floats(check):
    def forward(_, x):
        places = torch.arange(2, 2 + x.shape[1])
        decay = (places.float() * 0.25).unsqueeze(-1)
        return x * torch.exp(-decay) + places.view(1, -1, 1) * (1 << 33)

    check(Function(forward), torch.randn(2, 7, 5), calls=[[torch.randn(1, 9, 5)]])
    check(Function(lambda _, x: (x + torch.arange(x.shape[1])).sum((1, 2))), torch.randn(2, 7, 7))
    check(Function(lambda _, x: (x * 2 + torch.arange(7)).amax(0) * 2), torch.randn(5, 7))


def test_made_values_alone_make_no_kernel(check):
    check(Function(lambda _, x: (x.relu() + 1, torch.arange(9) + 1, torch.zeros(3, 3) + torch.ones(3))), torch.randn(4))
    check(Function(lambda _, x: torch.full((4, 5), 2.5).exp() * torch.ones(5) + x), torch.randn(5))
    check(Function(lambda _, x: (x + 1.5, torch.zeros(6, 4) + x * 2)), torch.randn(4))
    check(Function(lambda _, x: x.half() + torch.full((5,), 0.1, dtype=torch.float16)), torch.randn(5))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_equal_length(check, mode):
    module = Function(lambda s, x: s.bag(x).relu() * 2, bag=nn.EmbeddingBag(30, 24, mode=mode))
    compiled = check(module, ids_of(6, 5), calls=[[ids_of(3, 9)]])
    assert compiled.launches == 1
    assert "arange" not in compiled.source.split("def forward")[1]


def test_bags_with_padding_and_weights(check):
    for mode in ("sum", "mean"):
        module = Function(lambda s, x: s.bag(x).relu() * 2, bag=nn.EmbeddingBag(4, 24, padding_idx=0, mode=mode))
        assert "embedding_bag" not in check(module, torch.tensor([[0, 1, 3], [0, 0, 0], [2, 2, 1]])).source
    module = Function(lambda s, x, w: s.bag(x, None, w).relu() * 2, bag=nn.EmbeddingBag(30, 24, mode="sum"))
    assert "embedding_bag" not in check(module, ids_of(6, 5), torch.rand(6, 5)).source


def test_columns_and_single_elements_are_picked_too(check):
    x, ids = torch.randn(6, 7, 9), ids_of(4, most=6)
    columns = Function(lambda _, x, i: x[:, i].exp() + 1)
    assert check(columns, x, ids, calls=[[x[:2], ids[:1]]]).launches == 1
    assert check(Function(lambda _, x, i: x.index_select(-1, i).softmax(-1)), x, ids).launches == 1
    assert check(Function(lambda _, x, i: x.transpose(0, 2)[..., i] * 2), x, ids).launches == 1
    assert check(Function(lambda _, x, i, j: x[i, j].relu()), x, ids - 6, ids_of(3, 1, most=7)).launches == 1
    assert check(Function(lambda _, x, i: x[torch.arange(6), i].tanh()), x, ids_of(6, most=7)).launches == 1
    assert check(Function(lambda _, x, i: x[:, [0, 3, -1]] * i.sum()), x, ids).launches == 2


def test_an_integer_for_each_result(check):
    x, ids = torch.randn(5, 7, 4), ids_of(5, 9, 4, most=7)
    module = Function(lambda _, x, i: x.gather(1, i).sigmoid() - 1)
    assert check(module, x, ids, calls=[[x[:2], ids[:2, :3]]]).launches == 1
    module = Function(lambda _, x, i: torch.take_along_dim(x, i, -1).square().sum(-1))
    assert check(module, x, ids_of(5, 7, 6, most=4)).launches == 1
    module = Function(lambda _, x, i: x.gather(0, i.unsqueeze(-1).expand(-1, -1, 4)) * 3)
    check(module, x, ids_of(6, 7, most=5))


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_picks_along_any_dimensions(check, data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    first = data.draw(st.integers(0, len(shape) - 1))
    several = data.draw(st.integers(1, len(shape) - first))
    picked = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    ids = [torch.randint(-size, size, picked[data.draw(st.integers(0, len(picked) - 1)) :]) for size in shape[first:]]

    def forward(_, x, *ids):
        return x[(*(slice(None),) * first, *ids)] * 2 + 1

    check(Function(forward), torch.randn(shape), *ids[:several])


def test_made_tables_and_rows_from_the_end(check):
    check(Function(lambda _, x: torch.arange(20)[x] * 2 + torch.ones(20, dtype=torch.int64)[x]), ids_of(4, 5, most=20))
    check(Function(lambda s, x: x * s.table[torch.full((4,), -1)], table=torch.randn(6, 5)), torch.randn(4, 5))
    check(Function(lambda _, x, t: x * t[torch.full((4,), 2)] + 1), torch.randn(4, 5), torch.randn(6, 5))
    check(Function(lambda _, x, t: x * t[torch.full((4,), -3)] + 1), torch.randn(4, 5), torch.randn(6, 5))


def test_bits_seen_as_another_type_are_read(check):
    check(Function(lambda _, x: x + torch.ones(5).view(torch.int32)), torch.arange(5, dtype=torch.int32))
