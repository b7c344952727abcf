from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from drk.gym.devices import device_facts
from drk.gym.errors import DeviceError
from drk.gym.runner.cuda_stand_in import CudaFeatureUnsupported
from drk.gym.runner.remap import DeviceRemap, device_remap, is_cuda_device


@pytest.fixture
def remap():
    with device_remap("sm_90") as mode:
        yield mode


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3", torch.device("cuda"), torch.device("cuda", 1), 0])
def test_factories_take_any_cuda_device(remap, device):
    x = torch.full((2, 3), 2.0, device=device)
    assert float(x.sum()) == 12.0
    assert torch.arange(4, device=device).sum().item() == 6
    assert torch.empty_like(x, device=device).shape == (2, 3)
    assert x.new_zeros(2, device=device).tolist() == [0.0, 0.0]
    assert torch.tensor([1.0], device=device, pin_memory=True).item() == 1.0


def test_tensors_say_that_they_are_on_the_gpu(remap):
    x = torch.ones(2)
    assert x.is_cuda is True
    assert x.is_cpu is False
    assert x.device.type == "cuda"
    assert x.device == torch.device("cuda:0")
    assert x.get_device() == 0
    assert nn.Parameter(x).is_cuda
    assert torch.empty(1, device="meta").device.type == "meta"
    assert str(torch.device("cuda")) == "cuda"


def test_a_tensor_device_can_be_given_back(remap):
    x = torch.ones(3)
    assert torch.zeros(3, device=x.device).tolist() == [0.0, 0.0, 0.0]
    with torch.cuda.device(x.device):
        assert torch.cuda.current_device() == 0


def test_moves(remap):
    x = torch.ones(2)
    assert x.cuda() is x
    assert x.to("cuda") is x
    assert x.to(0) is x
    assert x.to(device="cuda:0", non_blocking=True) is x
    assert x.to("cuda", torch.float16).dtype == torch.float16
    assert x.to(torch.float64).dtype == torch.float64
    assert x.pin_memory() is x
    assert x.type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.cuda.FloatTensor([1.0, 2.0]).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("move", [lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: x.to(torch.device("cpu"))])
def test_moving_down_copies_as_it_does_on_a_gpu(remap, move):
    x = torch.ones(2)
    move(x).add_(5)
    assert x.tolist() == [1.0, 1.0]


def test_modules_move_and_run_with_gradients(remap):
    model = nn.Sequential(nn.Linear(4, 8, device="cuda"), nn.LSTM(8, 3)).cuda().to("cuda")
    x = torch.ones(5, 4, device="cuda", requires_grad=True)
    out, _ = model(x)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert next(model.parameters()).is_cuda


def test_custom_backward_sees_the_gpu_too(remap):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert grad.is_cuda
            return grad * torch.full((1,), 2.0, device="cuda")

    x = torch.ones(3, requires_grad=True)
    Twice.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_default_device_and_device_context(remap):
    with torch.device("cuda"):
        assert torch.ones(2).sum().item() == 2.0
    torch.set_default_device("cuda")
    try:
        assert torch.ones(2).sum().item() == 2.0
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120", "h200"])
def test_properties_are_those_of_the_target(target):
    facts = device_facts(target)
    with device_remap(target):
        properties = torch.cuda.get_device_properties("cuda")
        assert torch.cuda.get_device_capability() == facts.capability
        assert (properties.major, properties.minor) == facts.capability
        assert properties.multi_processor_count == facts.sm_count
        assert torch.cuda.get_device_name(0) == facts.name


def test_streams_events_and_memory(remap):
    stream = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream):
        x = torch.ones(3, device="cuda") + 1
    x.record_stream(stream)
    torch.cuda.current_stream().wait_stream(stream)
    end.record(stream)
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    assert torch.cuda.max_memory_allocated() == 0
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(torch.cuda.Event(enable_timing=True))
    with torch.cuda.nvtx.range("x"):
        torch.cuda.nvtx.range_push("y")


def test_seeding_the_gpu_seeds_the_generator_that_is_used(remap):
    torch.cuda.manual_seed_all(7)
    first = torch.randn(4, device="cuda")
    torch.cuda.manual_seed(7)
    assert torch.equal(first, torch.randn(4, device="cuda"))
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.randn(2, generator=generator, device="cuda").shape == (2,)


def test_autocast_uses_half_as_on_a_gpu(remap):
    a = torch.ones(4, 4)
    with torch.autocast("cuda"):
        assert torch.is_autocast_enabled()
        assert (a @ a).dtype == torch.float16
    with torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
    with torch.autocast("cuda", enabled=False):
        assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize("device_types", ["cuda", None, ["cuda"]])
def test_custom_operators_registered_for_the_gpu_run_and_see_it(remap, device_types):
    name = f"drk_remap::twice_{len(device_types or [])}"

    @torch.library.custom_op(name, mutates_args=(), device_types=device_types)
    def twice(x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        return x * torch.full((1,), 2.0, device="cuda")

    assert twice(torch.ones(2)).tolist() == [2.0, 2.0]


def test_library_kernels_for_the_gpu_run_unless_the_cpu_has_its_own(remap):
    library = torch.library.Library("drk_remap_library", "DEF")
    for name in ("alone", "both"):
        library.define(f"{name}(Tensor x) -> Tensor")
    library.impl("alone", lambda x: x + 1, "CUDA")
    library.impl("both", lambda x: x + 2, "CPU")
    library.impl("both", lambda x: x + 3, "CUDA")
    x = torch.zeros(1)
    assert torch.ops.drk_remap_library.alone(x).item() == 1.0
    assert torch.ops.drk_remap_library.both(x).item() == 2.0


def test_saved_tensors_load_onto_the_gpu(remap, tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"x": torch.ones(2)}, path)
    assert torch.load(path, map_location="cuda:0", weights_only=True)["x"].is_cuda
    assert torch.load(path, torch.device("cuda"), weights_only=True)["x"].tolist() == [1.0, 1.0]


def test_checkpointing_and_forked_generators(remap):
    x = torch.randn(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    with torch.random.fork_rng(devices=[0]):
        before = torch.randn(2)
    assert torch.equal(before, torch.randn(2))


def test_compile_is_the_identity(remap):
    def double(x):
        return x * 2

    assert torch.compile(double) is double
    assert torch.compile(mode="max-autotune")(double) is double


def test_graphs_are_refused_as_the_machines_limit(remap):
    with pytest.raises(CudaFeatureUnsupported) as caught:
        torch.cuda.CUDAGraph()
    assert caught.value.kind == "unsupported"


def test_everything_is_restored():
    before = {name: getattr(torch.cuda, name) for name in ("is_available", "Stream", "device", "synchronize")}
    outer = (torch.Generator, torch.compile, torch.is_autocast_enabled, hasattr(torch._C, "_cuda_getCurrentRawStream"))
    with pytest.raises(ValueError, match="inner"), device_remap():
        assert torch.cuda.is_available()
        raise ValueError("inner")
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert outer == (
        torch.Generator,
        torch.compile,
        torch.is_autocast_enabled,
        hasattr(torch._C, "_cuda_getCurrentRawStream"),
    )
    assert torch.ones(1).is_cpu


def test_unknown_target_is_refused():
    with pytest.raises(DeviceError), device_remap("sm_1"):
        pass


def test_device_names():
    assert is_cuda_device("cuda:2")
    assert not is_cuda_device("cudax")
    assert not is_cuda_device(torch.device("cpu"))
    assert issubclass(DeviceRemap, torch.overrides.TorchFunctionMode)
