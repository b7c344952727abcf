"""Sums with a product, chains, powers and Kronecker products, against float64."""

import torch
from modules import Function


def test_products_added_to_a_tensor(check):
    module = Function(lambda _, x, y, z: torch.baddbmm(z, x, y).relu())
    check(module, torch.randn(2, 9, 20), torch.randn(2, 20, 17), torch.randn(2, 9, 17), kernels=["matmul_add_relu"])


def test_products_added_with_factors(check):
    def forward(_, added, x, y, v):
        empty = torch.full_like(added, float("nan"))
        return (
            torch.addmm(added, x[0], y[0], beta=0.5, alpha=2.0).relu(),
            torch.baddbmm(added, x, y, alpha=0.3).relu(),
            torch.addmm(empty, x[0], y[0], beta=0).relu(),
            torch.addmv(added[:, 0], x[0], v, alpha=-1),
        )

    compiled = check(Function(forward), *map(torch.randn, ((9, 17), (2, 9, 20), (2, 20, 17), (20,))), factor=3.0)
    assert "ops.aten" not in compiled.source


def test_products_of_several_matrices(check):
    def forward(_, a, b, c, x):
        chain, power = torch.linalg.multi_dot([a, b, c]), torch.matrix_power(x, 5)
        return chain.relu(), power + 1, torch.linalg.vecdot(x[0], x[1])

    shapes = ((4, 20), (20, 3), (3, 17), (2, 9, 9))
    tensors = [torch.randn(shape) * 0.3 for shape in shapes]
    compiled = check(Function(forward), *tensors, factor=4.0)
    assert "ops.aten" not in compiled.source


def test_kronecker_products(check):
    compiled = check(Function(lambda _, x, y: torch.kron(x, y) + 1), torch.randn(4, 5), torch.randn(3, 7))
    assert len(compiled.kernels) == 1
    assert "ops.aten" not in compiled.source
