from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drk.gym.runner.loading import FunctionModule, LoadFailure, select_submodule

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "intake"
DRIVER = Path(__file__).resolve().parents[2] / "support" / "loading_driver.py"

X = {"kind": "tensor", "shape": [2, 4], "dtype": "float32"}


@pytest.fixture(scope="module")
def driver():
    process = subprocess.Popen(
        [sys.executable, str(DRIVER)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    yield process
    process.stdin.close()
    process.wait(30)
    process.stderr.close()


@pytest.fixture
def load(driver, tmp_path):
    """Load in a fresh process; the sources are a copy of one fixture, a folder, or given text."""

    def run(entry, *, source=None, folder=None, candidate=None, call=False, seed=0, tensors=None, **meta):
        root = tmp_path / "src"
        if folder is not None:
            shutil.copytree(FIXTURES / folder, root, dirs_exist_ok=True)
        else:
            root.mkdir(exist_ok=True)
            text = source if source is not None else (FIXTURES / entry).read_text()
            (root / entry).write_bytes(text if isinstance(text, bytes) else text.encode())
        if tensors is not None:
            save_file(tensors, tmp_path / "tensors.safetensors")
        meta = {"entry": entry, "target": "Net", "inputs": {"kind": "call", "args": [X]}, **meta}
        request = {"meta": meta, "root": str(root), "call": call, "seed": seed, "result": str(tmp_path / "result.json")}
        if candidate is not None:
            (tmp_path / "candidate.py").write_text(candidate)
            request["candidate"] = str(tmp_path / "candidate.py")
        driver.stdin.write(json.dumps(request) + "\n")
        driver.stdin.flush()
        status = driver.stderr.readline().strip()
        while not status.isdigit():
            status = driver.stderr.readline().strip()
        assert status == "0"
        return json.loads((tmp_path / "result.json").read_text())

    return run


def scalars(*values):
    return {"kind": "call", "args": [{"kind": "scalar", "value": value} for value in values]}


# --- importing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "name"),
    [("my-model.py", "drk_entry_my_model"), ("1.py", "drk_entry__1"), ("random.py", "drk_entry_random")],
)
def test_odd_file_names_get_unique_module_names(load, entry, name):
    result = load(entry, call=True)
    assert result["name"] == name
    assert result["output"]["shape"] == [2, 4]


def test_package_with_relative_imports(load):
    inputs = {"kind": "function", "name": "example_inputs"}
    result = load("shapes/models/net.py", folder="package", inputs=inputs, call=True)
    assert result["name"] == "shapes.models.net"
    assert result["output"]["shape"] == [4, 16]


def test_relative_imports_without_a_package(load):
    result = load("model.py", folder="loose", call=True)
    assert result["output"]["shape"] == [2, 4]


def test_absolute_imports_below_src(load):
    result = load("src/wide/inner/net.py", folder="project", call=True)
    assert result["name"] == "wide.inner.net"


def test_required_arguments_at_import_are_a_clear_failure(load):
    failure = load("parses_arguments.py")["failure"]
    assert failure["kind"] == "exit"
    assert (failure["file"], failure["line"]) == ("parses_arguments.py", 9)
    assert "__main__" in failure["help"]


def test_optional_arguments_and_prints_at_import_are_fine(load):
    result = load("optional_arguments_at_import.py", call=True)
    assert result["argv"] == ["optional_arguments_at_import.py"]


def test_standard_input_is_empty(load):
    failure = load("reads_stdin.py")["failure"]
    assert (failure["kind"], failure["line"]) == ("reads-stdin", 5)


def test_defaults_that_the_file_sets_stay_and_are_recorded(load):
    result = load("sets_defaults.py", inputs={"kind": "function", "name": "example_inputs"}, call=True)
    assert result["defaults"]["default_dtype"] == "bfloat16"
    assert result["state"]["linear.weight"][1] == "torch.bfloat16"
    assert result["output"]["dtype"] == "bfloat16"
    assert "initial_seed=7" in result["notes"][0]


@pytest.mark.parametrize(
    ("source", "kind", "line"),
    [
        ("import torch\nclass Net(:\n", "syntax", 2),
        ("import torch\n\nimport no_such_library\n", "missing-module", 3),
        ("open('weights.bin')\n", "missing-file", 1),
        ("x = 1\nx / 0\n", "import-raised", 2),
        ("raise RuntimeError\n", "import-raised", 1),
    ],
)
def test_failures_at_import_point_at_the_users_line(load, source, kind, line):
    failure = load("model.py", source=source)["failure"]
    assert (failure["kind"], failure["file"], failure["line"]) == (kind, "model.py", line)
    assert "drk" not in failure["message"]


def test_failure_inside_a_helper_names_the_helper(load, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "helper.py").write_text("\n\nraise ValueError('no')\n")
    failure = load("model.py", source="import helper\n")["failure"]
    assert (failure["file"], failure["line"], failure["message"].endswith("ValueError: no")) == ("helper.py", 3, True)


@pytest.mark.parametrize("raw", [b"\xef\xbb\xbf", b""])
def test_byte_order_mark_and_windows_line_ends(load, raw):
    text = (FIXTURES / "my-model.py").read_text().replace("\n", "\r\n").encode()
    assert load("model.py", source=raw + text, call=True)["output"]["shape"] == [2, 4]


# --- building ------------------------------------------------------------------------------------------------------


def test_class_is_built_from_its_arguments_in_the_mode(load):
    result = load("bare_module.py", init=scalars(4, 3), mode="train", call=True)
    assert result["training"] is True
    assert len(result["state"]) == 6
    assert load("bare_module.py", init=scalars(4))["training"] is False


def test_equal_seeds_give_equal_weights(load):
    first, again, other = (load("bare_module.py", init=scalars(4), seed=seed)["state"] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_init_from_the_users_function(load):
    functions = {
        "init": {"kind": "function", "name": "get_init_inputs"},
        "inputs": {"kind": "function", "name": "get_inputs"},
    }
    result = load("bench_form.py", target="Model", call=True, **functions)
    assert result["output"]["shape"] == [32, 24]


@pytest.mark.parametrize("target", ["annotated", "returning", "hidden"])
def test_factories(load, target):
    result = load("factories.py", target=target, target_kind="factory", call=True)
    assert result["module"] == "Net"


def test_factory_that_returns_no_module(load):
    failure = load("factories.py", target="scaled", target_kind="factory", init=scalars(1.0))["failure"]
    assert (failure["kind"], failure["line"]) == ("factory-no-module", 36)


def test_function_that_returns_a_module_names_the_option(load):
    failure = load("factories.py", target="hidden", target_kind="function", inputs=scalars(), call=True)["failure"]
    assert failure["kind"] == "function-returned-module"
    assert "--factory" in failure["help"]


def test_module_made_at_the_top_level(load):
    inputs = {"kind": "function", "name": "example_inputs"}
    assert load("module_value.py", target="model", inputs=inputs, call=True)["output"]["shape"] == [8, 8]


def test_submodule_path(load):
    result = load("bare_module.py", init=scalars(4), submodule="blocks.1.linear", call=True)
    assert result["module"] == "Linear"
    failure = load("bare_module.py", init=scalars(4), submodule="blocks.7")["failure"]
    assert "blocks has no submodule '7'; it has: 0, 1" in failure["message"]


def test_lazy_module_is_materialised(load):
    result = load("lazy_module.py", inputs={"kind": "function", "name": "get_inputs"})
    assert result["state"]["linear.weight"][0] == [4, 6]


def test_nested_inputs_and_outputs(load):
    pair = {"kind": "nested", "form": "tuple", "items": [X, X]}
    extras = {"kind": "nested", "form": "dict", "keys": ["bias"], "items": [X]}
    output = load("nested_inputs.py", inputs={"kind": "call", "args": [pair, extras]}, call=True)["output"]
    assert (output["form"], output["keys"]) == ("dataclass", [".total", ".parts"])
    assert output["items"][1]["items"][1]["items"][0]["shape"] == [2, 4]


def test_constructor_failure_has_the_users_line(load):
    failure = load("fails_in_constructor.py")["failure"]
    assert (failure["kind"], failure["line"]) == ("constructor-raised", 9)


@pytest.mark.parametrize(("target", "kind"), [("Nett", "missing-target"), ("nn.functional", "not-a-module")])
def test_wrong_targets(load, target, kind):
    assert load("bare_module.py", target=target)["failure"]["kind"] == kind


def test_state_dict_replaces_the_weights(load):
    weights = {"state.linear.weight": torch.ones(4, 4), "state.linear.bias": torch.zeros(4)}
    meta = {"target": "annotated", "target_kind": "factory"}
    result = load("factories.py", tensors=weights, **meta)
    assert result["state"]["linear.weight"][2] == 16.0
    prefixed = {key.replace("state.", "state.module."): value for key, value in weights.items()}
    assert load("factories.py", tensors=prefixed, **meta)["state"]["linear.weight"][2] == 16.0


def test_state_dict_that_does_not_fit_names_the_keys(load):
    weights = {"state.linear.weight": torch.ones(4, 5), "state.extra": torch.zeros(4)}
    failure = load("factories.py", tensors=weights, target="annotated", target_kind="factory")["failure"]
    assert failure["kind"] == "state-mismatch"
    for told in ("missing: linear.bias", "unexpected: extra", "of another shape: linear.weight"):
        assert told in failure["message"]


def test_tied_weights_may_be_saved_once(load):
    source = (
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a = nn.Linear(4, 4, bias=False)\n        self.b = nn.Linear(4, 4, bias=False)\n"
        "        self.b.weight = self.a.weight\n    def forward(self, x):\n        return self.b(self.a(x))\n"
    )
    result = load("tied.py", source=source, tensors={"state.a.weight": torch.ones(4, 4)})
    assert result["state"]["b.weight"][2] == 16.0


# --- candidates ----------------------------------------------------------------------------------------------------


CANDIDATE = (FIXTURES / "bare_module.py").read_text().replace("class Net", "class ModelNew")


def test_candidate_is_built_and_seeded_like_the_reference(load):
    result = load("bare_module.py", init=scalars(4), seed=3, candidate=CANDIDATE)
    assert result["candidate"] == {key: row[2] for key, row in result["state"].items()}


def test_candidate_without_parameters_is_built_with_none(load):
    source = "from torch import nn\nclass ModelNew(nn.Module):\n    def forward(self, x):\n        return x\n"
    assert load("bare_module.py", init=scalars(4), candidate=source)["candidate"] == {}


@pytest.mark.parametrize(
    ("source", "kind", "line"),
    [
        ("import torch\n", "no-modelnew", None),
        ("def ModelNew():\n    pass\n", "not-a-class", None),
        ("class ModelNew:\n    pass\n", "not-a-module", None),
        ("import torch\nclass ModelNew(\n", "syntax", 2),
        ("raise OSError('x')\n", "import-raised", 1),
        (
            "from torch import nn\nclass ModelNew(nn.Module):\n    def __init__(self, a, b, c):\n        pass\n",
            "bad-signature",
            3,
        ),
        (
            "from torch import nn\nclass ModelNew(nn.Module):\n    def __init__(self):\n        1 / 0\n",
            "constructor-raised",
            4,
        ),
        ("import sys\nsys.exit(0)\n", "exit", 2),
    ],
)
def test_candidate_failures(load, source, kind, line):
    failure = load("bare_module.py", init=scalars(4), candidate=source)["failure"]
    assert (failure["kind"], failure["line"]) == (kind, line)


# --- in this process -----------------------------------------------------------------------------------------------


def test_function_module_calls_and_refuses_modules():
    assert FunctionModule(lambda x, y=2: x * y, "f", "f.py")(3, y=4) == 12
    with pytest.raises(LoadFailure, match="returns a module"):
        FunctionModule(torch.nn.ReLU, "f", "f.py")()


def test_select_submodule_of_nothing_is_the_module():
    module = torch.nn.ReLU()
    assert select_submodule(module, "", "f.py") is module
