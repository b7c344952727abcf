"""How a worker's one Gym times some jobs and not others. (What jobs come to: test_up.)"""

from __future__ import annotations

import json

import pytest

from drk.gym.devices import Gpu
from drk.gym.engine import Gym
from drk.gym.schema import Call, Task, TensorSpec
from drk.gym.serve.jobs import Job
from drk.gym.serve.judging import Bench
from drk.gym.serve.settings import WorkerSettings
from drk.gym.serve.worker import gym_settings, threads_of
from drk.gym.settings import GymSettings, Timing
from drk.gym.wire import task_to_json

TASK = Task("t", {"m.py": "class Model: ..."}, "m.py", "Model", inputs=Call((TensorSpec((2,)),)))


@pytest.mark.parametrize(
    ("wish", "field", "enabled", "compiled"),
    [(True, "1", True, True), (False, "0", False, True), ("eager", "eager", True, False)],
)
def test_jobs_are_timed_as_they_say(wish, field, enabled, compiled) -> None:
    gym = Gym(GymSettings(device="cuda:0", timing=Timing(max_s=0.5)))
    gym.gpu = Gpu("GPU-test", "NVIDIA H200", 0)
    bench = Bench(gym)
    job = Job("a", "evaluation", "t", "", "gpu.any", 6, 0.0, 1.0, timing=wish)
    assert job.fields()["timing"] == field
    chosen = bench._gyms[job.fields()["timing"]]
    assert (chosen.settings.timing.enabled, chosen.settings.timing.compile_baseline) == (enabled, compiled)
    assert chosen.settings.timing.max_s == 0.5
    assert chosen._measuring().timing == chosen.settings.timing
    assert chosen._measuring().turns is gym._measuring().turns, "one turn at the GPU, however a job is timed"
    assert chosen._slots is gym._slots
    assert chosen._sessions is gym._sessions


async def test_what_is_no_candidate_or_no_task_is_the_jobs_fault() -> None:
    bench = Bench(Gym(GymSettings(device="interpret")))
    fields = {"kind": "evaluation", "run_s": "5", "timing": "1"}
    outcome = await bench.run({**fields, "candidate": "{}"}, '{"name": 1}')
    assert (outcome.state, outcome.fault.code, outcome.fault.infrastructure) == ("failed", "bundle", False)
    outcome = await bench.run(fields, json.dumps(task_to_json(TASK)))
    assert (outcome.state, outcome.fault.message) == ("failed", "an evaluation needs a candidate")


def test_a_gpu_takes_more_than_its_slots() -> None:
    assert threads_of(WorkerSettings(device="interpret", slots=3)) == 3
    assert threads_of(WorkerSettings(device="cuda:0", slots=14)) == 21
    settings = gym_settings(WorkerSettings(slots=14, timing={"max_s": 0.25}, limits={"run_s": 7.0}))
    assert (settings.parallel, settings.timing.max_s, settings.limits.run_s) == (14, 0.25, 7.0)
