from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drk.assistant.errors import TargetError
from drk.assistant.source_edit import add_kernels, added_lines, drop_lines, read_source, unified_diff

PLAIN = b'"""Doc."""\nfrom __future__ import annotations\nimport torch\n\n\nclass Net(torch.nn.Module):\n    pass\n'


def edit(data: bytes, target: str = "Net", module: str = "m_kernels") -> bytes:
    return add_kernels(data, target=target, kernels_module=module, name="m.py")


def test_two_lines_are_added() -> None:
    after = edit(PLAIN)
    assert added_lines(PLAIN, after) == ["from m_kernels import optimized", "@optimized"]
    assert after.decode().splitlines()[3] == "from m_kernels import optimized"
    compile(after, "m.py", "exec")


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"class Net: pass\n", b"from m_kernels import optimized\n@optimized\nclass Net: pass\n"),
        (b"#!/usr/bin/python\n# x\nclass Net: pass", b"#!/usr/bin/python\n# x\nfrom m_kernels import optimized\n@opti"),
        (b"import a; import b\nclass Net: pass\n", b"import a; import b\nfrom m_kernels"),
        (b"from a import (\n  b,\n)\nclass Net: pass\n", b"  b,\n)\nfrom m_kernels"),
        (b"@deco\n@other(1)\nclass Net: pass\n", b"from m_kernels import optimized\n@optimized\n@deco\n@other"),
        (b"import a\nif a:\n    class Net: pass\n", b"if a:\n    @optimized\n    class Net"),
        (b"import a\ndef f(x):\n\treturn x\nclass Net:\n\tpass\n", b"@optimized\nclass Net:\n\tpass\n"),
        (b"optimized = 1\nclass Net: pass\n", b"@drk_optimized\nclass Net"),
    ],
)
def test_where_lines_go(data: bytes, where: bytes) -> None:
    after = edit(data)
    assert where in after
    compile(after, "m.py", "exec")
    assert drop_lines(after, added_lines(data, after)) == data


def test_bom_crlf_and_cookies_stay() -> None:
    crlf = b"\xef\xbb\xbf" + PLAIN.replace(b"\n", b"\r\n")
    after = edit(crlf)
    assert after.startswith(b"\xef\xbb\xbf")
    assert after.count(b"\r\n") == after.count(b"\n") == PLAIN.count(b"\n") + 2
    latin = b"# -*- coding: latin-1 -*-\nname = '\xe9'\nclass Net: pass\n"
    assert b"'\xe9'" in edit(latin)
    assert edit(latin).count(b"\n") == latin.count(b"\n") + 2
    assert drop_lines(edit(crlf), added_lines(crlf, edit(crlf))) == crlf


def test_line_separators_inside_strings_do_not_shift_lines() -> None:
    data = "x = 'a\u2028b\x0cc\x1d'\n\x0cclass Net:\n    pass\n".encode()
    after = edit(data)
    compile(after, "m.py", "exec")
    assert drop_lines(after, added_lines(data, after)) == data


def test_nested_last_and_imported_targets() -> None:
    nested = b"class A:\n    class Net:\n        pass\n"
    assert b"    @optimized\n    class Net" in edit(nested, "A.Net")
    twice = b"class Net: a = 1\nclass Net: a = 2\n"
    assert b"@optimized\nclass Net: a = 2" in edit(twice)
    imported = b"from blocks import Net\n\nuse = Net\n"
    after = edit(imported)
    assert b"from blocks import Net\n\nfrom m_kernels import optimized\nNet = optimized(Net)\n" in after
    assert b"from .m_kernels import optimized" in edit(PLAIN, module=".m_kernels")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"class Net(:\n", "not valid Python"),
        (b"# coding: no-such\nclass Net: pass\n", "encoding"),
        (b"\xff\xfe\nclass Net: pass\n", "encoding"),
        (b"Net = make()\n", "neither defines nor imports"),
        (b"from m_kernels import x\nclass Net: pass\n", "already"),
    ],
)
def test_refusals(data: bytes, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        edit(data)


@pytest.mark.parametrize("data", [PLAIN, PLAIN.rstrip(b"\n"), PLAIN.replace(b"\n", b"\r\n"), b"class Net: pass"])
def test_git_applies_the_diff(tmp_path: Path, data: bytes) -> None:
    after = edit(data)
    (tmp_path / "m.py").write_bytes(data)
    (tmp_path / "m.diff").write_bytes(unified_diff(data, after, "m.py"))
    subprocess.run(["git", "apply", "m.diff"], cwd=tmp_path, check=True)
    assert (tmp_path / "m.py").read_bytes() == after


def test_drop_lines_refuses_what_is_not_there_once() -> None:
    after = edit(PLAIN)
    lines = added_lines(PLAIN, after)
    assert drop_lines(after + b"\nimport x\n", lines) == PLAIN + b"\nimport x\n"
    assert drop_lines(after.replace(b"@optimized", b"@optimized  # mine"), lines) is None
    assert drop_lines(after + b"@optimized\nclass B: pass\n", lines) is None


@given(st.text(alphabet="ab\r\n\x0c\u2028'é ", max_size=40))
def test_reading_and_writing_is_the_identity(text: str) -> None:
    data = text.encode()
    source = read_source(data)
    assert source.encode(source.lines) == data
