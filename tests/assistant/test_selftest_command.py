"""``drk selftest``: a small corpus judged by the real gym under the interpreter, and what is printed of results."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drk.assistant.cli import run
from drk.assistant.errors import ExitCode, UsageError
from drk.assistant.selftest_command import (
    Result,
    choose,
    default_corpus,
    exit_code,
    result_json,
    result_text,
    tally,
)
from drk.gym.corpus import CorpusEntry, load_corpus

Capture = pytest.CaptureFixture[str]

REFERENCE = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2


def get_inputs():
    return [torch.randn(8, 33)]


def get_init_inputs():
    return []
"""
KERNEL = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def relu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, tl.where(x < 0, 0.0, x) * 2.0, mask=offsets < n)


class ModelNew(nn.Module):
    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        relu_kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
        return out
"""
ZEROS = """
import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)
"""
ENTRY = """
family = "no-work"
mechanism = "Returns zeros."

[expect]
status = ["rejected"]
flags = ["wrong-output"]

[honest_a]
why_honest = "It computes."
"""


def write_entry(root: Path, name: str, files: dict[str, str], *, needs: str = "any") -> None:
    folder = root / "no-work" / name
    folder.mkdir(parents=True)
    (folder / "entry.toml").write_text(f'needs = "{needs}"\n{ENTRY}')
    (folder / "reference.py").write_text(REFERENCE)
    for stem, source in files.items():
        (folder / f"{stem}.py").write_text(source)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    write_entry(root, "right", {"cheat_a": ZEROS, "honest_a": KERNEL})
    write_entry(root, "swapped", {"cheat_a": KERNEL, "honest_a": ZEROS})
    write_entry(root, "unseen", {"cheat_a": ZEROS, "honest_a": KERNEL}, needs="gpu")
    return root


def selftest(corpus: Path, *words: str) -> int:
    return run(["selftest", "--corpus", str(corpus), "--device", "interpret", "--seeds", "2", *words])


@pytest.mark.slow
def test_hits_misses_and_false_flags_of_the_real_gym(corpus: Path, capsys: Capture) -> None:
    assert selftest(corpus, "--format", "json") == ExitCode.NOT_ACCEPTED
    found = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["standing"] for row in found["results"]} == {
        "no-work/right/cheat_a": "detected",
        "no-work/right/honest_a": "passed",
        "no-work/swapped/cheat_a": "missed",
        "no-work/swapped/honest_a": "wrongly-flagged",
        "no-work/unseen/cheat_a": "needs-gpu",
        "no-work/unseen/honest_a": "passed",
    }
    assert (found["status"], found["device"], found["schema_version"]) == ("failed", "interpret", 1)
    assert found["totals"] == {
        "cheats": 2,
        "detected": 1,
        "missed": 1,
        "honest": 3,
        "wrongly_flagged": 1,
        "needs_gpu": 1,
        "errors": 0,
    }
    assert found["families"] == {"no-work": found["totals"]}


def test_a_clean_corpus_exits_0(corpus: Path, capsys: Capture) -> None:
    assert selftest(corpus, "--only", "right", "--jobs", "1") == ExitCode.OK
    captured = capsys.readouterr()
    assert "under the interpreter: 1 of 1 cheats detected (100.0 %), 0 of 1 honest ones" in captured.out
    assert "judging 2 candidates of 1 entries" in captured.err


def test_a_broken_reference_is_an_error_not_a_hit(corpus: Path, capsys: Capture) -> None:
    (corpus / "no-work" / "right" / "reference.py").write_text("raise ValueError('broken')\n")
    assert selftest(corpus, "--only", "right/cheat_a", "--format", "json") == ExitCode.USAGE
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["totals"]["errors"], found["totals"]["detected"]) == ("error", 1, 0)


def test_a_malformed_corpus_exits_2(corpus: Path, capsys: Capture) -> None:
    (corpus / "no-work" / "right" / "entry.toml").write_text("family = 3\n")
    assert selftest(corpus) == ExitCode.USAGE
    assert "family cannot be 3" in capsys.readouterr().err
    assert selftest(corpus / "nothing") == ExitCode.USAGE
    assert "holds no corpus" in capsys.readouterr().err


# --- choosing ---------------------------------------------------------------------------------------------------


def test_the_checkouts_corpus_is_the_default(repository: Path) -> None:
    assert default_corpus() == repository / "tests" / "fixtures" / "cheats"


def names(entries: tuple[CorpusEntry, ...]) -> list[str]:
    return [f"{entry.name}/{file.name}" for entry in entries for file in entry.files]


@pytest.mark.parametrize(
    ("family", "only", "chosen"),
    [
        (None, "right", ["no-work/right/cheat_a", "no-work/right/honest_a"]),
        (None, "no-work/swapped", ["no-work/swapped/cheat_a", "no-work/swapped/honest_a"]),
        ("no-work", "right/honest_a", ["no-work/right/honest_a"]),
        (None, "no-work/unseen/cheat_a", ["no-work/unseen/cheat_a"]),
    ],
)
def test_choosing(corpus: Path, family: str | None, only: str, chosen: list[str]) -> None:
    assert names(choose(load_corpus(corpus), family, only)) == chosen


@pytest.mark.parametrize(
    ("family", "only", "told"),
    [
        ("no-wrok", None, "no such family: no-wrok"),
        ("timing", None, "nothing called timing"),
        (None, "rihgt", "nothing called rihgt"),
        (None, "right/cheat_z", "nothing called right/cheat_z"),
    ],
)
def test_choosing_nothing_is_an_error(corpus: Path, family: str | None, only: str | None, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        choose(load_corpus(corpus), family, only)


# --- printing ---------------------------------------------------------------------------------------------------


@pytest.fixture
def results(corpus: Path) -> list[Result]:
    right, swapped, unseen = load_corpus(corpus)
    return [
        Result(right, right.files[0], "detected", "rejected: wrong-output: RMS"),
        Result(right, right.files[1], "passed", "accepted"),
        Result(swapped, swapped.files[0], "missed", "accepted", ("trivial-kernel",)),
        Result(swapped, swapped.files[1], "wrongly-flagged", "rejected: decoy-kernel: why", ("decoy-kernel",)),
        Result(unseen, unseen.files[0], "needs-gpu"),
        Result(unseen, unseen.files[1], "error", "no Runner could be started"),
    ]


def test_text_names_every_miss_and_false_flag(results: list[Result]) -> None:
    lines = result_text(results, "interpret").splitlines()
    assert lines[0].split() == [
        "family",
        "cheats",
        "detected",
        "missed",
        "honest",
        "wrongly",
        "flagged",
        "needs",
        "a",
        "GPU",
        "errors",
    ]
    assert lines[1].split() == ["no-work", "2", "1", "1", "2", "1", "1", "1"]
    assert lines[2].split() == ["all", "2", "1", "1", "2", "1", "1", "1"]
    missed = lines.index("missed:")
    assert lines[missed + 1 : missed + 5] == [
        "  no-work/swapped/cheat_a",
        "    Returns zeros.",
        "    expected rejected by wrong-output",
        "    got accepted [trivial-kernel]",
    ]
    flagged = lines.index("wrongly flagged:")
    assert lines[flagged + 1 : flagged + 4] == [
        "  no-work/swapped/honest_a",
        "    It computes.",
        "    expected accepted, no flag",
    ]
    assert "error:" in lines
    assert lines[-1] == "1 show only on a GPU and were not judged"
    assert lines[-2].startswith("under the interpreter: 1 of 2 cheats detected (50.0 %)")


@pytest.mark.parametrize(
    ("kept", "code", "status"),
    [
        (("detected", "passed", "needs-gpu"), ExitCode.OK, "passed"),
        (("detected", "error"), ExitCode.USAGE, "error"),
        (("missed", "error"), ExitCode.NOT_ACCEPTED, "failed"),
        (("wrongly-flagged",), ExitCode.NOT_ACCEPTED, "failed"),
    ],
)
def test_exit_codes(results: list[Result], kept: tuple[str, ...], code: ExitCode, status: str) -> None:
    chosen = [result for result in results if result.standing in kept]
    assert exit_code(chosen) == code
    assert result_json(chosen, "cuda:0")["status"] == status


def test_an_empty_rate_is_no_division(results: list[Result]) -> None:
    unseen = [result for result in results if result.standing == "needs-gpu"]
    assert tally(unseen)["cheats"] == 0
    assert "0 of 0 cheats detected, 0 of 0 honest ones" in result_text(unseen, "interpret")


INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be inherited as ignored
from drk.assistant.cli import main
main()
"""


def test_ctrl_c_tells_what_was_judged_until_then(repository: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTIBLE, "selftest", "--device", "interpret", "--format", "json"]
    with subprocess.Popen(
        command, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert "judging" in process.stderr.readline()
            time.sleep(3.0)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    answer = json.loads(said)
    assert answer["not_judged"] > 100 and answer["not_judged"] + len(answer["results"]) > 200
    assert process.returncode == ExitCode.INTERRUPTED
