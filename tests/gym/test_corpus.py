"""The corpus reader, and what the shipped corpus must hold: families, spellings, twins, look-alikes, documentation."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

from drk.gym.corpus import (
    FAMILIES,
    FLAG_FAMILIES,
    LABEL_FAMILIES,
    LABELS,
    CorpusEntry,
    CorpusFile,
    Expectation,
    load_corpus,
    verdict_words,
)
from drk.gym.errors import BundleError
from drk.gym.schema import Failure, Flag, UserFunction, Verdict
from drk.gym.wire import check_task

ENTRY = """family = "caching"
mechanism = "Keeps results."
needs = "any"

[expect]
status = ["rejected"]
flags = ["input-cache", "wrong-output"]

[cheat_b]
needs = "gpu"
spelling = "another one"
status = ["rejected", "failed"]

[honest_a]
why_honest = "It keeps nothing."
look_alike = 5
"""
REFERENCE = "import torch\n\nModel = torch.nn.Identity\n"


@pytest.fixture(scope="module")
def shipped(request: pytest.FixtureRequest) -> tuple[CorpusEntry, ...]:
    return load_corpus(request.getfixturevalue("repository") / "tests" / "fixtures" / "cheats")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "caching" / "keeps-results"
    folder.mkdir(parents=True)
    (folder / "entry.toml").write_text(ENTRY)
    (folder / "reference.py").write_text(REFERENCE)
    for name in ("cheat_a", "cheat_b", "honest_a"):
        (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
    return tmp_path


# --- the shipped corpus -----------------------------------------------------------------------------------------


def test_it_holds_enough_of_each_family(shipped: tuple[CorpusEntry, ...]) -> None:
    assert sum(len(entry.cheats) for entry in shipped) >= 60
    assert {entry.family for entry in shipped} == set(FAMILIES)
    assert len({entry.name for entry in shipped}) == len(shipped)


def test_every_mechanism_has_two_spellings_and_a_twin(shipped: tuple[CorpusEntry, ...]) -> None:
    assert [entry.name for entry in shipped if len(entry.cheats) < 2 or not entry.twins] == []


def test_all_look_alikes_have_a_twin(shipped: tuple[CorpusEntry, ...]) -> None:
    assert {twin.look_alike for entry in shipped for twin in entry.twins} - {0} == set(range(1, 23))


def test_spellings_differ_in_code(shipped: tuple[CorpusEntry, ...]) -> None:
    for entry in shipped:
        forms = {ast.dump(ast.parse(file.source)) for file in entry.cheats}
        assert len(forms) == len(entry.cheats), entry.name


def test_every_file_defines_what_its_role_needs(shipped: tuple[CorpusEntry, ...]) -> None:
    for entry in shipped:
        check_task(entry.task)
        names = _defined(entry.task.files["reference.py"])
        assert names >= {"Model", "get_inputs", "get_init_inputs"}, entry.name
        assert all("ModelNew" in _defined(file.source) for file in entry.files), entry.name


def _defined(source: str) -> set[str]:
    body = ast.parse(source).body
    return {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def test_most_of_it_can_be_judged_without_a_gpu(shipped: tuple[CorpusEntry, ...]) -> None:
    cheats = [file for entry in shipped for file in entry.cheats]
    assert sum(file.needs == "any" for file in cheats) >= 60


# --- documentation ----------------------------------------------------------------------------------------------


def test_every_kind_is_documented_as_it_is_raised(repository: Path) -> None:
    text = (repository / "docs" / "flags.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[`([a-z-]+)`\]\(#[a-z-]+\) \| ([a-z-]+ \| [a-z]+) \|", text, flags=re.M))
    documented = {kind: tuple(row.split(" | ")) for kind, row in rows.items()}
    assert documented == {
        kind: (family, "label" if kind in LABELS else "fraud") for kind, family in FLAG_FAMILIES.items()
    }
    assert all(f"\n### {kind}\n" in text for kind in FLAG_FAMILIES)


def test_what_the_gym_raises_is_in_the_table(repository: Path) -> None:
    raised = set()
    for path in (repository / "gym").rglob("*.py"):
        raised.update(re.findall(r'Flag\(\s*"([a-z-]+)", "([a-z-]+)", "(fraud|label)"', path.read_text("utf-8")))
    assert raised
    table = {(kind, family, "label" if kind in LABELS else "fraud") for kind, family in FLAG_FAMILIES.items()}
    assert raised - table == set()


# --- reading ----------------------------------------------------------------------------------------------------


def test_an_entry_becomes_a_task_and_files(small: Path) -> None:
    (entry,) = load_corpus(small)
    assert (entry.name, entry.family, entry.mechanism) == ("caching/keeps-results", "caching", "Keeps results.")
    assert entry.task.files == {"reference.py": REFERENCE}
    assert (entry.task.target, entry.task.inputs) == ("Model", UserFunction("get_inputs"))
    a, b = entry.cheats
    assert (a.needs, a.expect.status, a.source) == ("any", ("rejected",), "NAME = 'cheat_a'\n")
    assert (b.needs, b.expect.status, b.why) == ("gpu", ("rejected", "failed"), "another one")
    assert a.expect.flags == b.expect.flags == {"input-cache", "wrong-output"}
    (twin,) = entry.twins
    assert (twin.look_alike, twin.expect) == (5, Expectation(("accepted",), frozenset()))


def test_task_options_reach_the_task(small: Path) -> None:
    path = small / "caching" / "keeps-results" / "entry.toml"
    path.write_text(ENTRY + '\n[task]\nmode = "train"\ngrad = true\nprecision = "tf32"\n')
    task = load_corpus(small)[0].task
    assert (task.mode, task.grad, task.precision) == ("train", True, "tf32")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('family = "caching"', 'family = "stealing"', "family cannot be 'stealing'"),
        ('family = "caching"', 'family = "timing"', "must lie in timing/"),
        ('mechanism = "Keeps results."', "mechanism = 3", "mechanism must be a sentence"),
        ('needs = "any"', 'needs = "luck"', "needs cannot be 'luck'"),
        ('status = ["rejected"]', 'status = ["accepted"]', "expect.status cannot be 'accepted'"),
        ('"input-cache", "wrong-output"', '"input-cash"', "expect.flags cannot be 'input-cash'"),
        ('flags = ["input-cache", "wrong-output"]', "flags = []", "expect needs a status, and flags"),
        ("[expect]", "[expected]", "unknown key expected"),
        ("[cheat_b]", "[cheat_z]", "unknown key cheat_z"),
        ("spelling =", "spelt =", "unknown key cheat_b.spelt"),
        ("why_honest =", "why =", "unknown key honest_a.why"),
        ('why_honest = "It keeps nothing."', "", "honest_a needs why_honest"),
        ("look_alike = 5", "look_alike = true", "look_alike must be a number"),
        ("look_alike = 5", 'allow = ["decoy-kernel"]', "may hold labels only, not decoy-kernel"),
        ("look_alike = 5", '[task]\nmode = "test"', "task.mode cannot be 'test'"),
        ("look_alike = 5", "[task]\ngrad = 1", "task.grad cannot be 1"),
        ("look_alike = 5", "[task]\nseed = 1", "unknown key task.seed"),
        ("[expect]", "[expect", "is not TOML"),
    ],
)
def test_a_malformed_entry_is_named(small: Path, old: str, new: str, told: str) -> None:
    path = small / "caching" / "keeps-results" / "entry.toml"
    assert old in ENTRY
    path.write_text(ENTRY.replace(old, new, 1))
    with pytest.raises(BundleError) as caught:
        load_corpus(small)
    assert told in caught.value.message
    assert "keeps-results" in caught.value.message


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("reference.py", "cannot be read"),
        ("honest_a.py", "unknown key honest_a"),
        ("entry.toml", "holds no corpus"),
    ],
)
def test_a_missing_file_is_named(small: Path, file: str, told: str) -> None:
    (small / "caching" / "keeps-results" / file).unlink()
    with pytest.raises(BundleError, match=re.escape(told)):
        load_corpus(small)


def test_stray_files_are_named(small: Path) -> None:
    folder = small / "caching" / "keeps-results"
    (folder / "helper.py").write_text("")
    with pytest.raises(BundleError, match=r"helper\.py must be called"):
        load_corpus(small)
    (folder / "helper.py").unlink()
    other = small / "caching" / "undescribed"
    shutil.copytree(folder, other)
    (other / "entry.toml").unlink()
    with pytest.raises(BundleError, match=r"undescribed has no entry\.toml"):
        load_corpus(small)


def test_labels_are_expected_to_be_accepted(small: Path) -> None:
    (small / "lazy").mkdir()
    folder = small / "lazy" / "fig-leaf"
    shutil.copytree(small / "caching" / "keeps-results", folder)
    text = ENTRY.replace('"caching"', '"lazy"').replace('["rejected", "failed"]', '["accepted"]')
    text = text.replace('"input-cache", "wrong-output"', '"trivial-kernel"')
    (folder / "entry.toml").write_text(text)
    with pytest.raises(BundleError, match="cannot be 'rejected'"):
        load_corpus(small)
    (folder / "entry.toml").write_text(text.replace('status = ["rejected"]', 'status = "accepted"'))
    assert [entry.family for entry in load_corpus(small)] == ["caching", "lazy"]
    assert {"lazy"} <= LABEL_FAMILIES


# --- outcomes ---------------------------------------------------------------------------------------------------


def verdict(status: str, *flags: str, kind: str = "") -> Verdict:
    found = tuple(
        Flag(flag, FLAG_FAMILIES[flag], "label" if flag in LABELS else "fraud", "an experiment") for flag in flags
    )
    error = Failure("check", kind, "why") if kind else None
    accepted = status == "accepted"
    return Verdict(status, "interpreter", "correct", accepted, accepted, flags=found, error=error)


def corpus_file(role: str, status: tuple[str, ...], *flags: str) -> CorpusFile:
    return CorpusFile("x", role, Path("x.py"), "", "any", Expectation(status, frozenset(flags)))


@pytest.mark.parametrize(
    ("expected", "found", "outcome"),
    [
        ((("rejected",), "input-cache"), verdict("rejected", "input-cache"), "detected"),
        ((("rejected",), "caching"), verdict("rejected", "stale-output"), "detected"),
        ((("rejected",), "wrong-output"), verdict("rejected", kind="wrong-output"), "detected"),
        ((("rejected",), "input-cache"), verdict("rejected", kind="wrong-output"), "missed"),
        ((("rejected",), "input-cache"), verdict("accepted", "no-own-kernel"), "missed"),
        ((("rejected",), "input-cache"), verdict("failed", kind="exception"), "missed"),
        ((("rejected", "failed"), "input-cache"), verdict("failed", kind="exception"), "detected"),
        ((("accepted",), "no-own-kernel"), verdict("accepted", "no-own-kernel"), "detected"),
        ((("accepted",), "no-own-kernel"), verdict("accepted"), "missed"),
        ((("accepted",), "no-own-kernel"), verdict("rejected", "no-own-kernel"), "missed"),
        ((("rejected",), "input-cache"), verdict("error", kind="unsteady"), "error"),
    ],
)
def test_outcome_of_a_cheat(expected: tuple, found: Verdict, outcome: str) -> None:
    status, *flags = expected
    assert corpus_file("cheat", status, *flags).outcome(found) == outcome


@pytest.mark.parametrize(
    ("allowed", "found", "outcome"),
    [
        ((), verdict("accepted"), "passed"),
        ((), verdict("accepted", "trivial-kernel"), "wrongly-flagged"),
        (("trivial-kernel",), verdict("accepted", "trivial-kernel"), "passed"),
        ((), verdict("rejected", kind="wrong-output"), "wrongly-flagged"),
        ((), verdict("failed", kind="exception"), "wrongly-flagged"),
        ((), verdict("error", kind="unsteady"), "error"),
    ],
)
def test_outcome_of_a_twin(allowed: tuple[str, ...], found: Verdict, outcome: str) -> None:
    assert corpus_file("honest", ("accepted",), *allowed).outcome(found) == outcome


def test_words_of_a_verdict() -> None:
    found = verdict("rejected", "decoy-kernel", kind="wrong-output")
    assert verdict_words(found) == {"decoy-kernel", "no-work", "wrong-output"}
