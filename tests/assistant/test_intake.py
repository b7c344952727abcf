from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

from drk.assistant.errors import DrkError, TargetError, UsageError
from drk.assistant.intake import resolve_target, split_target
from drk.gym.schema import Call, Nested, Scalar, TensorSpec, UserFunction
from drk.gym.wire import task_from_json, task_to_json

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "intake"
X = TensorSpec((2, 4))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "intake"
    shutil.copytree(FIXTURES, folder)
    return folder


@pytest.fixture
def resolve(files):
    def run(target, **options):
        task = resolve_target(target, cwd=options.pop("cwd", files), **options)
        assert task_from_json(task_to_json(task)) == task
        return task

    return run


@pytest.fixture
def refuse(files):
    def run(target, error=TargetError, **options):
        with pytest.raises(error) as caught:
            resolve_target(target, cwd=options.pop("cwd", files), **options)
        return caught.value

    return run


def new_file(tmp_path, text, name="model.py"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


NET = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return x\n"


# --- targets ---------------------------------------------------------------------------------------------------------


def test_the_module_that_no_other_uses(resolve):
    task = resolve("bare_module.py", init=["dim=4"], inputs=["f32[2,4]"])
    assert (task.name, task.target, task.target_kind, task.entry) == (
        "bare_module:Net",
        "Net",
        "module",
        "bare_module.py",
    )
    assert task.init == Call((), {"dim": Scalar(4)})
    assert task.inputs == Call((X,))
    assert list(task.files) == ["bare_module.py"]


def test_the_benchmarks_form(resolve):
    task = resolve("bench_form.py")
    assert (task.target, task.init, task.inputs) == (
        "Model",
        UserFunction("get_init_inputs"),
        UserFunction("get_inputs"),
    )


def test_a_named_class_and_a_named_part(resolve):
    assert resolve("bare_module.py:Block", init=["4"], inputs=["f32[2,4]"]).target == "Block"
    task = resolve("bare_module.py:Net.blocks.0.linear", init=["4"], inputs=["f32[2,4]"])
    assert (task.target, task.submodule, task.name) == ("Net", "blocks.0.linear", "bare_module:Net.blocks.0.linear")
    assert resolve("factories.py:annotated.linear", inputs=["f32[2,4]"]).target_kind == "factory"


@pytest.mark.parametrize("name", ["annotated", "returning", "chained", "through"])
def test_factories_that_the_text_shows(resolve, name):
    assert resolve(f"factories.py:{name}", inputs=["f32[2,4]"]).target_kind == "factory"


def test_factories_that_only_the_user_knows(resolve, refuse):
    assert resolve("factories.py:hidden", inputs=["f32[2,4]"], factory=True).target_kind == "factory"
    assert "positional arguments (none)" in refuse("factories.py:hidden", UsageError, inputs=["f32[2,4]"]).message
    assert resolve("factories.py:scaled", inputs=["f32[2,4]"]).target_kind == "function"
    assert "no function" in refuse("factories.py:Net", UsageError, factory=True, init=["4"], inputs=["f32[1]"]).message


def test_the_only_function_of_a_file(resolve):
    task = resolve("one_function.py")
    assert (task.target, task.target_kind, task.inputs) == ("gelu_bias", "function", UserFunction("example_inputs"))


def test_a_module_made_at_the_top_level(resolve):
    task = resolve("module_value.py")
    assert (task.target, task.target_kind, task.init) == ("model", "module", Call())


def test_packages(resolve):
    task = resolve("package/shapes/models/net.py")
    assert (task.entry, task.target, task.init) == ("shapes/models/net.py", "Net", Call())
    assert resolve("project/src/wide/inner/net.py", inputs=["f32[2]"]).entry == "src/wide/inner/net.py"
    assert resolve("package/shapes/models/net.py:Norm", init=["4"], inputs=["f32[2,4]"]).target == "Norm"


def test_a_base_of_another_library(resolve, refuse):
    task = resolve("library_base.py", init=["4"], inputs=["f32[2,4]"])
    assert task.target == "Net"
    assert "needs dim" in refuse("library_base.py", inputs=["f32[2,4]"]).message


def test_ambiguous_files_list_the_lines_to_type(refuse):
    error = refuse("two_modules.py")
    assert error.kind == "ambiguous"
    assert error.help.split("\n")[1:] == [
        "two_modules.py:Encoder    (line 6)",
        "two_modules.py:Decoder    (line 11)",
    ]


def test_nested_classes_and_imported_names(resolve, tmp_path):
    text = "from torch import nn\nclass Outer:\n    class Inner(nn.Module):\n        def forward(self, x): return x\n"
    assert resolve(f"{new_file(tmp_path, text)}:Outer.Inner", inputs=["f32[1]"]).target == "Outer.Inner"


@pytest.mark.parametrize(
    ("target", "kind", "told"),
    [
        ("two_modules.py:Encodr", "no-target", "did you mean 'Encoder'"),
        ("two_modules.py:zzz", "no-target", "it defines: Encoder, Decoder, Config"),
        ("two_modules.py:Config", "not-a-module", "modules in this file: Encoder, Decoder"),
        ("two_modules.py:a..b", "no-target", ""),
        ("bare_modul.py", "not-found", "did you mean 'bare_module.py'"),
        ("nowhere/model.py", "not-found", "folder"),
        ("package", "folder", ""),
        (".", "folder", "name one of its files"),
        ("project/pyproject.toml", "not-python", ""),
        ("", "not-found", ""),
    ],
)
def test_targets_that_cannot_be(refuse, target, kind, told):
    error = refuse(target)
    assert error.kind == kind
    assert told in error.help


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"\x7fELF\x00", "not-python"),
        (b"class (:\n", "syntax"),
        (b"x = 1\n", "no-target"),
    ],
)
def test_files_that_cannot_be(refuse, tmp_path, data, kind):
    error = refuse(new_file(tmp_path, data))
    assert error.kind == kind
    assert error.file


def test_a_file_that_is_too_large(refuse, tmp_path):
    assert refuse(new_file(tmp_path, b"#" * (4 * 2**20 + 1))).kind == "too-large"


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + NET.encode(),
        NET.replace("\n", "\r\n").encode(),
        ("# -*- coding: latin-1 -*-\n# ä\n" + NET).encode("latin-1"),
    ],
)
def test_encodings(resolve, tmp_path, data):
    assert resolve(new_file(tmp_path, data), inputs=["f32[2]"]).target == "Net"


@pytest.mark.parametrize("name", ["my-model.py", "1.py", "random.py", "a b.py", "x:y.py"])
def test_odd_file_names(resolve, tmp_path, name):
    task = resolve(new_file(tmp_path, NET, name), inputs=["f32[2]"])
    assert (task.entry, task.target) == (name, "Net")


@pytest.mark.parametrize(
    ("text", "parts"),
    [("model.py", ("model.py", "")), ("model.py:Net.a.0", ("model.py", "Net.a.0")), ("a:b", ("a", "b"))],
)
def test_splitting(text, parts):
    assert split_target(text) == parts


def test_symbolic_links_are_kept(resolve, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "neighbour.py").write_text("")
    source = new_file(tmp_path / "real", f"import neighbour\n{NET}")
    (tmp_path / "linked" / "model.py").symlink_to(source)
    task = resolve(str(tmp_path / "linked" / "model.py"), inputs=["f32[2]"])
    assert set(task.files) == {"model.py", "neighbour.py"}


# --- inputs ----------------------------------------------------------------------------------------------------------


def test_missing_constructor_arguments_are_named_with_the_line_to_type(refuse):
    error = refuse("bare_module.py", inputs=["f32[2,4]"])
    assert (error.kind, error.line) == ("missing-init", 17)
    assert error.message == "Net needs dim: int, and nobody gave it"
    assert "bare_module.py:Net --init 'dim=1024'" in error.help


def test_missing_call_arguments_are_named_with_the_line_to_type(refuse):
    error = refuse("bare_module.py", init=["4"])
    assert error.kind == "missing-inputs"
    assert error.message == "Net.forward needs x: torch.Tensor, and nobody gave it"
    assert "--input 'x=f32[8,128,1024]'" in error.help
    error = refuse("keyword_only.py", inputs=["f32[4,8]"])
    assert error.message == "Net.forward needs mask, and nobody gave it"


def test_the_line_to_type_can_be_typed(refuse, resolve):
    """What the errors propose leads, step by step, to a task."""
    options: dict[str, list[str]] = {"inputs": [], "init": []}
    for _ in range(3):
        try:
            task = resolve("bare_module.py", **options)
        except TargetError as error:
            words = error.help.split("\n")[1].split(" ", 2)
            options["init" if words[1] == "--init" else "inputs"].append(words[2].strip("'"))
        else:
            break
    assert task.init == Call((), {"dim": Scalar(1024)})


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (["f32[1]", "2", "3"], "takes 2 positional arguments (x, scale), not 3"),
        (["f32[1]", "x=f32[1]"], "x is given twice"),
        (["f32[1]", "scal=3"], "has no parameter 'scal'"),
        (["f33[1]"], "unknown dtype"),
    ],
)
def test_inputs_that_do_not_fit(refuse, inputs, told):
    assert told in refuse("bare_module.py", UsageError, init=["4"], inputs=inputs).message


def test_inputs_on_the_command_line_come_first(resolve):
    task = resolve("bench_form.py", inputs=["bf16[8,24]"], init=["24", "slope=0.2"])
    assert task.inputs == Call((TensorSpec((8, 24), "bfloat16"),))
    assert task.init == Call((Scalar(24),), {"slope": Scalar(0.2)})


def test_the_files_inputs_must_fit_by_count(refuse, tmp_path):
    text = f"{NET}def get_inputs():\n    return [1, 2]\n"
    error = refuse(new_file(tmp_path, text))
    assert error.kind == "missing-inputs"
    assert "get_inputs() gives 2 arguments" in error.cause


def test_optional_keyword_and_nested_inputs(resolve):
    assert resolve("keyword_only.py").inputs == UserFunction("get_inputs")
    task = resolve("nested_inputs.py", inputs=["(f32[2,4], f32[2,4])", "extras={bias: f32[4]}"])
    assert task.inputs.args == (Nested("tuple", (X, X)),)
    assert task.inputs.kwargs == {"extras": Nested("dict", (TensorSpec((4,)),), ("bias",))}


def test_parts_and_unknown_signatures_need_their_inputs(refuse):
    assert refuse("bench_form.py:Model.linear").kind == "missing-inputs"
    error = refuse("factories.py:annotated")
    assert error.kind == "missing-inputs"
    assert "--input" in error.help


def test_functions_take_no_constructor_arguments(refuse):
    assert "--init" in refuse("one_function.py", UsageError, init=["3"]).message


def test_a_forward_without_arguments_needs_no_inputs(resolve, tmp_path):
    assert resolve(new_file(tmp_path, NET.replace("self, x", "self").replace("return x", "return 1"))).inputs == Call()


def test_modes_policies_and_weights(resolve, files):
    save_file({"linear.weight": torch.ones(4, 4)}, files / "weights.safetensors")
    task = resolve(
        "factories.py:annotated",
        inputs=["f32[2,4]"],
        mode="train",
        precision="tf32",
        tolerance="paper",
        state_dict=Path("weights.safetensors"),
    )
    assert (task.mode, task.precision, task.tolerance) == ("train", "tf32", "paper")
    assert torch.equal(load(task.tensors)["state.linear.weight"], torch.ones(4, 4))


# --- safety ----------------------------------------------------------------------------------------------------------


def test_nothing_is_run_and_torch_is_not_imported(tmp_path):
    flag = tmp_path / "ran"
    source = new_file(tmp_path, f"open({str(flag)!r}, 'w')\n{NET}")
    script = (
        "import sys\nfrom drk.assistant.intake import resolve_target\n"
        f"resolve_target({source!r}, inputs=['f32[2]'])\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert not flag.exists()


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.glob("*.py")))
def test_every_fixture_ends_in_a_task_or_in_an_error_with_a_next_step(files, name):
    try:
        task = resolve_target(name, cwd=files)
    except DrkError as error:
        assert error.help
        assert error.file == name
    else:
        assert task.entry == name
