"""Remembered launches: what is started again is what Triton would choose, it is counted, and it can be silenced.

A driver that stands for a GPU compiles and starts nothing; the last test needs a GPU.
"""

import importlib.util
import itertools
import sys

import pytest
import torch
import triton
import triton.language as tl

from drk.assistant.synth.launch_template import Launch, ceil_div, power_of_2
from drk.gym import triton_driver
from drk.gym.devices import device_facts
from drk.gym.runner.census import launch_census
from drk.gym.runner.remap import device_remap
from drk.gym.runner.stub_driver import compile_for
from drk.gym.runner.suppress import ablated

SOURCE = """
import triton
import triton.language as tl

from drk.assistant.synth.launch_template import Launch


@Launch
@triton.jit
def scale_kernel(x_ptr, out_ptr, n, factor, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * factor, mask=i < n)
"""
OPTIONS = {"INDEX": tl.int32, "BLOCK": 32, "num_warps": 1}


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    path = tmp_path / "remembered.py"
    path.write_text(SOURCE)
    made = []

    def make():
        spec = importlib.util.spec_from_file_location("remembered", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["remembered"] = module
        spec.loader.exec_module(module)
        made.append(module.scale_kernel)
        return module.scale_kernel, str(path)

    yield make
    for launch in made:  # made-up handles of kernels that live on would be taken for other tests' kernels
        launch.known.clear()
        launch.kernel.device_caches.clear()


@pytest.fixture
def kernel(load):
    with device_remap(), compile_for("sm_90"):
        yield load()


def test_the_helpers_are_tritons():
    sizes = [1, 2, 3, 15, 16, 17, 1000, 1024, 2**31 - 1, 2**31, 2**40 + 1]
    assert [power_of_2(size) for size in sizes] == [triton.next_power_of_2(size) for size in sizes]
    assert power_of_2(0) == 1  # a block of nothing would divide by zero
    for size, part in itertools.product([0, *sizes], [1, 7, 64]):
        assert ceil_div(size, part) == triton.cdiv(size, part)


def test_what_is_started_again_is_what_triton_would_choose(kernel):
    launch, _ = kernel
    memory = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    tensors = [one[start:] for one in memory.values() for start in (0, 1, 8)]
    cases = [(x, tensors[0], n, 2) for x in tensors for n in (1, 16, 17)]
    cases += [(tensors[0], tensors[2], n, m) for n in (32, 2**31, 2**40) for m in (1, 2, 1.0, 2.5, True, None)]
    options = [OPTIONS, {**OPTIONS, "BLOCK": 64}, {**OPTIONS, "num_warps": 2}, {**OPTIONS, "INDEX": tl.int64}]
    every = [(case, OPTIONS) for case in cases if case[3] is not None]
    every += [(cases[0], option) for option in options]
    for case, option in every * 2:
        chosen = launch.kernel[(2,)](*case, **option)
        assert launch[(2,)](*case, **option) is chosen, (case[2:], option)
    assert len(launch.known) > 12


def test_a_known_launch_does_without_tritons_part(kernel, monkeypatch):
    launch, _ = kernel
    x = torch.zeros(64)
    launch[(2,)](x, x, 64, 2.0, **OPTIONS)
    monkeypatch.setattr(launch.kernel, "run", lambda *_args, **_kwargs: pytest.fail("Triton was asked again"))
    launch[(2,)](x, x, 64, 2.0, **OPTIONS)
    launch[(3,)](torch.ones(64), x, 64, 3.0, **OPTIONS)


def test_tensors_that_are_not_aligned_are_left_to_triton(kernel):
    launch, _ = kernel
    memory = torch.zeros(80)
    for x, out in ((memory[1:], memory), (memory, memory[1:]), (memory[1:], memory[3:])):
        for _ in range(2):
            assert launch[(2,)](x, out, 64, 2.0, **OPTIONS) is launch.kernel[(2,)](x, out, 64, 2.0, **OPTIONS)
    assert launch.known == {}


def test_the_launcher_gets_what_triton_gives_it(load, monkeypatch):
    given = []

    def launched(_launcher, *given_now):
        given.append(given_now)

    monkeypatch.setattr(triton_driver.TargetLauncher, "__call__", launched)
    x = torch.zeros(64)
    with device_remap(), compile_for("sm_90"):
        launch, _ = load()
        for _ in range(2):
            launch[(2,)](x, x, 64, 2.0, **OPTIONS)
    (by_triton, remembered) = given
    hooks = slice(0, 6), slice(7, None)  # between them: metadata for hooks, made anew each time
    for part in hooks:
        assert [repr(one) for one in by_triton[part]] == [repr(one) for one in remembered[part]]
    assert by_triton[6].data == remembered[6].data


def test_devices_and_streams_are_asked_for_at_each_launch(load):
    class TwoDevices(triton_driver.TargetDriver):
        device = 0

        def get_current_device(self):
            return self.device

        def get_current_stream(self, device):
            return 100 + device

    driver = TwoDevices(device_facts("sm_90"), torch.cuda)
    streams = []
    x = torch.zeros(64)
    with device_remap(), triton_driver.active_driver(driver):
        launch, _ = load()
        for TwoDevices.device in (0, 1, 1, 0):
            found = launch[(2,)](x, x, 64, 2.0, **OPTIONS)
            assert found is launch.kernel[(2,)](x, x, 64, 2.0, **OPTIONS)
        found._run = lambda *given: streams.append(given[3])
        launch[(2,)](x, x, 64, 2.0, **OPTIONS)
    assert len(launch.known) == 2
    assert streams == [100]


def test_only_so_many_launches_are_remembered(kernel):
    launch, _ = kernel
    x = torch.zeros(64)
    for n in range(2, 150):
        launch[(1,)](x, x, n, 2.0, **OPTIONS)
    assert len(launch.known) <= 64


def test_the_census_counts_every_launch(kernel):
    launch, path = kernel
    x = torch.zeros(64)
    with launch_census([path]) as census:
        for _ in range(5):
            launch[(2,)](x, x, 64, 2.0, **OPTIONS)
    (row,) = census.rows()
    assert (row["name"], row["owned"], row["launches"], census.compiles) == ("scale_kernel", True, 5, 1)
    assert census.decoys() == []


def test_a_remembered_launch_can_be_ablated(kernel):
    launch, path = kernel
    x = torch.zeros(64)
    launch[(2,)](x, x, 64, 2.0, **OPTIONS)
    with launch_census([path]) as census:
        with ablated(frozenset([path])) as suppressed:
            launch[(2,)](x, x, 64, 2.0, **OPTIONS)
            launch[(2,)](x[1:], x, 64, 2.0, **OPTIONS)
        assert census.launches == 0
        with ablated(frozenset([path]), "another"):
            launch[(2,)](x, x, 64, 2.0, **OPTIONS)
        launch[(2,)](x, x, 64, 2.0, **OPTIONS)
    assert suppressed == ["scale_kernel", "scale_kernel"]
    assert census.launches == 2


def test_whatever_is_no_compiled_kernel_is_left_to_triton(kernel):
    launch, _ = kernel

    class Interpreted:
        """As ``triton.jit`` makes it under ``TRITON_INTERPRET``."""

        def __getitem__(self, grid):
            return lambda *args, **options: (grid, args, options)

    assert Launch(Interpreted())[(2,)](1, BLOCK=2) == ((2,), (1,), {"BLOCK": 2})
    x = torch.zeros(64)
    launch.kernel.run = lambda *_args, **_kwargs: None  # as a hook may have it
    assert launch[(2,)](x, x, 64, 2.0, **OPTIONS) is None
    assert launch.known == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_results_on_a_gpu(load):
    launch, path = load()

    def scaled(x, factor):
        out = torch.full_like(x, float("nan"))
        launch[(ceil_div(x.numel(), 32),)](x, out, x.numel(), factor, **OPTIONS)
        return out

    memory = torch.randn(2000, device="cuda")
    with launch_census([path]) as census:
        for _ in range(3):
            for start, count in ((0, 1000), (1, 1000), (0, 1), (0, 1024), (3, 16)):
                for x in (memory[start : start + count], memory[start : start + count].half()):
                    assert torch.equal(scaled(x, 2), x * 2)
    assert census.owned_launches() == 30
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.equal(scaled(memory, 2), memory * 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled(memory, 2)
    memory.normal_()
    graph.replay()
    assert torch.equal(out, memory * 2)
