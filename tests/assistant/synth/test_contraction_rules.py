"""Contractions of tensors as matrix products between views."""

import pytest
import torch
from modules import Function
from torch import nn

SIZES = {"b": 2, "h": 3, "i": 5, "j": 6, "l": 20, "k": 17, "q": 7, "d": 16, "n": 3, "c": 18, "o": 9, "w": 4, "s": 8}
EQUATIONS = (
    "bijl,lk->bijk",
    "bqhd,bkhd->bhqk",
    "bhqk,bhkd->bhqd",
    "nchw,oc->nohw",  # a view of (n, h, w, o), as the library has it
    "bhqk,bkhd->bqhd",
    "bij,bkj->bik",
    "ij,kj",
    "ihd,hdk->ik",  # two indices are summed over
    "bij,bjk->ki",
    "bi,oij,bj->bo",
    "bhdl,bhqd,bhq->bhql",  # linear attention: the middle one in the result's order
)


def _arguments(equation):
    sides = equation.split("->")[0].split(",")
    return [torch.randn([SIZES[index] for index in side]) for side in sides]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_contractions_are_products_of_views(check, equation):
    module = Function(lambda _, *args: torch.einsum(equation, *args) * 2)
    compiled = check(module, *_arguments(equation), factor=3.0)
    assert "einsum" not in compiled.source.split("class ModelNew")[1]
    assert any(region.kind == "matmul" for region in compiled.regions)


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("...id,jd->...ij", [(2, 3, 5, 16), (7, 16)]), ("... i j, ... j k -> ... i k", [(4, 5, 6), (4, 6, 7)])],
)
def test_leading_dimensions_may_be_dots(check, equation, shapes):
    compiled = check(
        Function(lambda _, *args: torch.einsum(equation, *args) * 2), *map(torch.randn, shapes), factor=3.0
    )
    assert "einsum" not in compiled.source.split("class ModelNew")[1]


def test_a_contraction_runs_at_other_sizes_too(check):
    module = Function(lambda s, x: torch.einsum("btc,oc->bto", x, s.weight).relu(), weight=torch.randn(9, 12))
    check(module, torch.randn(3, 7, 12), calls=[[torch.randn(2, 5, 12)]], kernels=["matmul_relu"])


@pytest.mark.parametrize(
    ("compute", "shapes"),
    [
        (lambda x, y: torch.tensordot(x, y, dims=([1, 2], [0, 1])).relu(), ((5, 6, 7), (6, 7, 20))),
        (lambda x, y: torch.inner(x, y).relu(), ((5, 6, 20), (17, 20))),
        (lambda x, y: torch.outer(x, y).relu(), ((20,), (33,))),
        (lambda x, y: torch.einsum("i,j->ij", x, y).relu(), ((20,), (33,))),
        (lambda x, y: torch.einsum("bi,bj->bij", x, y).relu(), ((4, 20), (4, 33))),
        (lambda x, y: (x.T @ y.T).relu(), ((20, 9), (11, 20))),
    ],
)
def test_other_words_for_products(check, compute, shapes):
    compiled = check(Function(lambda _, x, y: compute(x, y)), *map(torch.randn, shapes), factor=3.0)
    assert len(compiled.kernels) == 1
    assert "ops.aten" not in compiled.source


def test_bilinear_layers(check):
    module = Function(lambda s, x, y: torch.relu(s.mix(x, y)), mix=nn.Bilinear(20, 12, 7))
    compiled = check(module, torch.randn(9, 20), torch.randn(9, 12), factor=3.0)
    assert [kernel.name for kernel in compiled.kernels] == ["matmul", "mul_sum_add_relu"]


@pytest.mark.parametrize("equation", ["ab,ba->ab", "ii,i->i", "ij...,jk->ik...", "bjqi,bij->bq"])
def test_other_equations_stay_as_they_are(graph_of, equation):
    from drk.assistant.synth.rewrites import rewrite

    letters = {index: 4 for index in equation if index.isalpha()}
    sides = equation.replace("...", "b").split("->")[0].split(",")
    args = [torch.randn([letters.get(index, 4) for index in side]) for side in sides]
    graph = graph_of(Function(lambda _, x, y: torch.einsum(equation, x, y) * 2), *args)
    assert any(node.bare_op == "einsum" for node in rewrite(graph, by_channel=True).nodes)
