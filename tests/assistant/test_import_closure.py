from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from drk.assistant import import_closure
from drk.assistant.errors import TargetError
from drk.assistant.import_closure import collect, decode_source

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "intake"


@pytest.fixture
def project(tmp_path):
    shutil.copytree(FIXTURES, tmp_path / "intake")
    return tmp_path / "intake"


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_package_with_relative_imports(project):
    closure = collect(project / "package/shapes/models/net.py")
    assert closure.root == project / "package"
    assert closure.entry == "shapes/models/net.py"
    assert sorted(closure.files) == [
        "shapes/__init__.py",
        "shapes/defaults.py",
        "shapes/late.py",
        "shapes/layers.py",
        "shapes/models/__init__.py",
        "shapes/models/blocks.py",
        "shapes/models/net.py",
    ]
    assert closure.external == {"torch"}


def test_project_with_a_src_folder(project):
    closure = collect(project / "project/src/wide/inner/net.py")
    assert closure.entry == "src/wide/inner/net.py"
    assert set(closure.files) == {
        f"src/wide/{name}" for name in ("__init__.py", "inner/__init__.py", "inner/net.py", "tools.py")
    }


def test_relative_imports_in_a_plain_folder(project):
    closure = collect(project / "loose/model.py")
    assert set(closure.files) == {"model.py", "parts/scale.py"}


def test_single_file_has_its_folder_as_root(project):
    closure = collect(project / "my-model.py")
    assert (closure.root, closure.entry, list(closure.files)) == (project, "my-model.py", ["my-model.py"])


def test_neighbours_namespaces_cycles_and_literal_names(tmp_path):
    write(
        tmp_path,
        model="import importlib, a, numpy.fft\nimport space.deep.b as b\nimportlib.import_module('named')\n",
        a="from model import x\nimport c.d\n",
        space__deep__b="",
        named="",
        c____init__="",
        c__d="",
        numpy="",
        stray="",
    )
    (tmp_path / "c/__init__.py").write_text("")
    closure = collect(tmp_path / "model.py")
    assert set(closure.files) >= {"model.py", "a.py", "space/deep/b.py", "named.py", "c/__init__.py", "c/d.py"}
    assert "stray.py" not in closure.files


def test_folders_named_like_installed_packages_are_not_taken(tmp_path):
    write(tmp_path, model="import torch\nfrom torch import nn\n", torch__nn="")
    closure = collect(tmp_path / "model.py")
    assert list(closure.files) == ["model.py"]
    assert closure.external == {"torch"}


def test_files_outside_the_root_are_not_taken(tmp_path):
    write(tmp_path, secret="", inner__model="from .. import secret\nimport secret\n")
    (tmp_path / "inner/pyproject.toml").write_text("")
    assert list(collect(tmp_path / "inner/model.py").files) == ["model.py"]


def test_a_broken_neighbour_travels_and_a_broken_entry_is_an_error(tmp_path):
    write(tmp_path, model="try:\n    import broken\nexcept SyntaxError:\n    pass\n", broken="class (\n")
    assert set(collect(tmp_path / "model.py").files) == {"model.py", "broken.py"}
    with pytest.raises(TargetError, match="not valid Python"):
        collect(tmp_path / "broken.py")


def test_limits(tmp_path, monkeypatch):
    write(tmp_path, model="import a\n", a="x = 1\n" * 100)
    monkeypatch.setattr(import_closure, "MAX_SOURCE_BYTES", 500)
    with pytest.raises(TargetError) as caught:
        collect(tmp_path / "model.py")
    assert (caught.value.kind, caught.value.file) == ("too-large", "a.py")
    (tmp_path / "a.py").write_text("x = 1\n" * 80)
    (tmp_path / "model.py").write_text("import a\n" + "#" * 100)
    with pytest.raises(TargetError, match="imports more than"):
        collect(tmp_path / "model.py")


def test_large_projects_are_followed_as_far_as_an_import_runs_them(tmp_path, monkeypatch):
    write(
        tmp_path,
        model="import near\ndef late():\n    import needed\n",
        near="class Net:\n    import body\n    def far(self):\n        import huge\n",
        body="",
        needed="",
        huge="#" * 3000,
    )
    assert "huge.py" in collect(tmp_path / "model.py").files
    monkeypatch.setattr(import_closure, "MAX_SOURCE_BYTES", 2000)
    assert set(collect(tmp_path / "model.py").files) == {"model.py", "near.py", "body.py", "needed.py"}


def test_imports_for_type_checkers_are_not_followed(tmp_path):
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import types_only\nelse:\n    import real\n"
    write(tmp_path, model=source, types_only="", real="")
    assert set(collect(tmp_path / "model.py").files) == {"model.py", "real.py"}


# --- encodings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xef\xbb\xbfx = 1\r\n", "x = 1\r\n"),
        ("x = 'ä'\n".encode(), "x = 'ä'\n"),
        ("# -*- coding: latin-1 -*-\nx = 'ä'\n".encode("latin-1"), "# -*- coding: utf-8 -*-\nx = 'ä'\n"),
        ("#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\nx='€'".encode("cp1252"), None),
        (b"# coding: utf8\nx = 1\n", "# coding: utf8\nx = 1\n"),
        (b"x = 1\n\n# coding: latin-1\n", "x = 1\n\n# coding: latin-1\n"),
    ],
)
def test_decoding(data, text):
    decoded = decode_source(data, "model.py")
    expected = text or "#!/usr/bin/python\n# vim: set fileencoding=utf-8 :\nx='€'"
    assert decoded == expected
    ours, theirs = {}, {}
    exec(compile(decoded.encode(), "model.py", "exec"), ours)
    exec(compile(data, "model.py", "exec"), theirs)
    assert ours["x"] == theirs["x"]


@pytest.mark.parametrize(
    ("data", "told"),
    [(b"\x00\x01", "binary"), (b"x = '\xff'\n", "cannot be decoded"), (b"# coding: nonsense\n", "cannot be decoded")],
)
def test_what_is_no_source(data, told):
    with pytest.raises(TargetError, match=told) as caught:
        decode_source(data, "model.py")
    assert caught.value.kind == "not-python"


def test_unreadable_files(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("x = 1\n")
    path.chmod(0)
    if os.access(path, os.R_OK):
        path.unlink()
    with pytest.raises(TargetError) as caught:
        import_closure.read_source(path, "model.py")
    assert caught.value.kind == "unreadable"
