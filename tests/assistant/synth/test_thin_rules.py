"""Contractions with a thin side as sums of products that read the wide tensor where it lies."""

import pytest
import torch
from modules import Function

from drk.assistant.synth.propose import compile_graph, variants

EQUATIONS = {
    "c,bcn->bn": ((6,), (3, 6, 40)),
    "bcn,c->bn": ((3, 6, 40), (6,)),
    "bn,bcn->bc": ((3, 40), (3, 6, 40)),
    "bcn,bcn->b": ((3, 6, 40), (3, 6, 40)),
    "bhwc,c->bhw": ((2, 5, 7, 24), (24,)),
    "bcn,bn->bc": ((3, 6, 40), (3, 40)),
    "ij,j": ((8, 30), (30,)),
    "bcn,c->bcn": ((3, 6, 40), (6,)),
    "bchw,bc->bhw": ((2, 6, 5, 7), (2, 6)),
}


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum_with_a_thin_side(check, equation):
    module = Function(lambda _, x, y: torch.einsum(equation, x, y) * 2)
    compiled = check(module, *(torch.randn(shape) for shape in EQUATIONS[equation]), factor=3.0)
    assert "einsum" not in compiled.source.split("class ModelNew")[1]
    assert len(compiled.kernels) == 1


def test_the_wide_side_is_read_where_it_lies_at_other_sizes_too(check):
    module = Function(lambda s, x: torch.softmax(torch.einsum("c,bcn->bn", s.score, x), -1), score=torch.randn(6))
    compiled = check(module, torch.randn(3, 6, 40), calls=[[torch.randn(2, 6, 33)], [torch.randn(3, 40, 6).mT]])
    assert "permute" not in compiled.source


@pytest.mark.parametrize("equation", ["bij,bjk->bik", "ij,kj->ik", "ab,ba->ab", "cb,bcn->bn", "...c,c->...", "ii,i->i"])
def test_other_equations_stay_with_the_library(graph_of, equation):
    sizes = {"a": 4, "b": 4, "c": 4, "i": 4, "j": 4, "k": 4, "n": 4, ".": 4}
    sides = equation.replace("...", ".").split("->")[0].split(",")
    args = [torch.randn([sizes[index] for index in side]) for side in sides]
    graph = graph_of(Function(lambda _, x, y: torch.einsum(equation, x, y).relu() * 2), *args)
    source = compile_graph(graph, variants(graph)[0]).source
    assert "einsum" in source or "matmul" in source or "mul" in source


def test_batched_products_with_one_row_or_column(check):
    pooled = Function(lambda _, w, x: torch.bmm(w.softmax(-1).unsqueeze(1), x).squeeze(1) + 1)
    compiled = check(
        pooled, torch.randn(3, 20), torch.randn(3, 20, 12), calls=[[torch.randn(2, 9), torch.randn(2, 9, 12)]]
    )
    assert "bmm" not in compiled.source
    scored = Function(lambda _, x, v: (x @ v.unsqueeze(-1)).squeeze(-1).tanh())
    assert "matmul" not in check(scored, torch.randn(3, 20, 12), torch.randn(3, 12)).source


def test_a_batch_of_one_is_not_taken_for_a_single_row(graph_of):
    graph = graph_of(Function(lambda _, x, y: torch.bmm(x, y).relu() * 2), torch.randn(2, 1, 8), torch.randn(2, 8, 6))
    rules = [item for item in variants(graph) if not item.rules.matmul]
    assert "torch.bmm" in compile_graph(graph, rules[0]).source
