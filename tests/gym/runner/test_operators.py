"""What the log of operators sees: inside operators that Python code defines, and in threads that a call starts."""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from drk.gym.runner.operators import OperatorLog, defined_in_python
from drk.gym.runner.remap import DeviceRemap, on_device
from drk.gym.runner.threads import follow_threads

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def followed() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        follow_threads(stack)
        yield


def names(log: OperatorLog) -> list[str]:
    return [row["op"] for row in log.rows]


@torch.library.custom_op("operators_test::product", mutates_args=())
def product(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ x)


def test_operators_of_python_code_are_what_they_dispatch() -> None:
    library = torch.library.Library("operators_test_two", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: product(x) + product(x), "CompositeExplicitAutograd")
    with OperatorLog() as log, torch.no_grad():
        value = torch.ops.operators_test_two.twice(X)
        torch.sin(X)
    assert names(log) == ["matmul", "relu", "matmul", "relu", "add", "sin"]
    assert torch.equal(value, 2 * torch.relu(X @ X))
    assert not defined_in_python(torch.ops.aten.relu.default)


def test_gradients_pass_through_what_is_looked_into() -> None:
    product.register_autograd(lambda _ctx, grad: grad * 3)
    x = X.clone().requires_grad_()
    with OperatorLog() as log:
        product(x).sum().backward()
    assert "matmul" in names(log)
    assert torch.equal(x.grad, torch.full_like(X, 3.0))


def test_threads_write_into_the_same_log(followed: None) -> None:
    done = threading.Event()

    def bare() -> None:
        torch.cos(X)
        done.set()

    with OperatorLog() as log, torch.no_grad():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.sin, X).result()
        _thread.start_new_thread(bare, ())
        assert done.wait(60)
    assert names(log) == ["sin", "cos"]


def test_threads_see_the_remapped_device(followed: None) -> None:
    found: list[torch.Tensor] = []
    with DeviceRemap():
        thread = threading.Thread(target=lambda: found.append(torch.ones(2, device="cuda")))
        thread.start()
        thread.join()
    assert found[0].device.type == "cpu"


def test_numpy_does_not_look_into_what_is_on_the_device() -> None:
    with DeviceRemap() as mode:
        with on_device(mode, [("x", X)]):
            for look in (X.numpy, X.detach().t().numpy, X.__array__, X.__dlpack__):
                with pytest.raises(TypeError, match="can't convert cuda:0"):
                    look()
            assert X.cpu().numpy().shape == (X * 2).numpy().shape == (4, 4)
        assert X.numpy().shape == (4, 4)
    with on_device(None, []):
        assert X.numpy().shape == (4, 4)
