"""Triangular and banded products, against float64, and that what is zero is skipped."""

import torch
import torch.nn.functional as F
from modules import Each, Function

from drk.assistant.synth.propose import compile_graph, variants

A, B = torch.randn(150, 150), torch.randn(150, 70)


MASKED = [
    lambda _, a, b: torch.tril(a) @ b,
    lambda _, a, b: torch.triu(a, -3) @ b + 1,
    lambda _, a, b: torch.triu(torch.tril(a, 40), -9) @ b,
    lambda _, a, b: torch.tril(a @ b),
    lambda _, a, b: torch.triu(torch.triu(a) @ b, 2).relu(),
    lambda _, a, b: torch.tril(a, -200) @ b,
    lambda _, a, b: a @ torch.triu(b, -90),
    lambda _, a, b: torch.tril(a) @ torch.tril(b) - 1,
    lambda _, a, b: b.mT @ torch.triu(torch.tril(a, 20), -9),
    lambda _, a, b: F.linear(b.mT, torch.triu(a, 5)),
    lambda _, a, b: torch.triu(a) @ torch.triu(a),
    lambda _, a, b: torch.tril(torch.stack([a, b @ b.mT])) @ torch.stack([b, b]),
]


def test_masked_products_in_one_kernel_each(check):
    pairs = [item for _ in MASKED for item in (torch.randn(150, 150), torch.randn(150, 70))]
    compiled = check(Each(MASKED, 2), *pairs, factor=3.0)
    assert "aten.tri" not in compiled.source
    assert compiled.source.count("for start in range(first_inner, last_inner, BLOCK_K)") == len(MASKED)


def test_masks_that_something_else_reads_stay(graph_of):
    def forward(_, a, b):
        lower = torch.tril(a)
        return lower @ b, lower

    graph = graph_of(Function(forward), A, B)
    assert "tril" in compile_graph(graph, variants(graph)[0]).source
    flat = graph_of(Function(lambda _, a, b: torch.tril(a) @ b), torch.randn(2, 150, 150), B)
    assert "range(0, n_inner" in compile_graph(flat, variants(flat)[0]).source
