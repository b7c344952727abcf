from __future__ import annotations

import json
import os
from pathlib import Path

from lsp_parts import make_report, store_profile

from drk.assistant.report import InputKind, to_json
from drk.lsp.annotations import hover_text
from drk.lsp.diagnostics import file_diagnostics
from drk.lsp.positions import TextMap
from drk.lsp.profile_store import MAX_BYTES, ProfileStore


def test_rows_are_boiled_down_by_definition(project: Path) -> None:
    store_profile(project / "model.py")
    found = ProfileStore().for_file(project / "model.py")
    assert found is not None
    rows = {row.place.qualname: row for row in found.hotspots}
    assert set(rows) == {"Net", "Block", "Block.forward"}
    block = rows["Block"]
    assert (block.modules, round(block.share, 3), block.calls) == (2, 0.7, 40)
    assert block.target == f"{project / 'model.py'}:Net.first"
    assert rows["Block.forward"].target == block.target
    assert [row.name for row in rows["Net"].kernels] == ["void gemm<float, `32|x`>"]
    assert found.fusables[0].ops == ("aten::silu", "aten::mul")


def test_the_newest_counts_and_is_read_once(project: Path) -> None:
    store = ProfileStore()
    assert store.for_file(project / "model.py") is None
    store_profile(project / "model.py")
    first = store.for_file(project / "model.py")
    assert store.for_file(project / "model.py") is first
    assert store.for_file(project / "other.py") is None
    stamp = store.stamp(project / "model.py")
    store_profile(project / "model.py", "20260102T120000Z-net", device="GB200")
    assert store.stamp(project / "model.py") != stamp
    second = store.for_file(project / "model.py")
    assert second is not None
    assert second.device == "GB200"


def test_reports_that_cannot_be_read_are_told(project: Path) -> None:
    path = store_profile(project / "model.py")
    path.write_text("{")
    store = ProfileStore()
    assert store.for_file(project / "model.py") is None
    assert "cannot be read" in store.problem_for(project / "model.py")
    path.write_text(json.dumps({"schema_version": 99}))
    os.utime(path, ns=(1, 1))
    assert "schema version" in store.problem_for(project / "model.py")
    with path.open("r+b") as file:
        file.truncate(MAX_BYTES + 1)
    assert "too large" in store.problem_for(project / "model.py")
    assert store.for_file(project / "model.py") is None


def test_targets_with_saved_inputs_are_known(project: Path) -> None:
    report = make_report(project / "model.py")
    data = to_json(report)
    kind = InputKind("f32[16,32]", 20, "eval", False, task="000")
    data["modules"][1]["inputs"] = [{**to_json_kind(kind)}]
    path = store_profile(project / "model.py")
    path.write_text(json.dumps(data))
    found = ProfileStore().for_file(project / "model.py")
    assert found is not None
    assert found.saved_targets == {f"{project / 'model.py'}:Net.first"}


def test_a_whole_file_s_target_is_named_by_its_class(project: Path) -> None:
    file = project / "model.py"
    data = to_json(make_report(file))
    kind = InputKind("f32[16,32]", 20, "eval", False, task="000")
    data["modules"][0].update(target=str(file), inputs=[to_json_kind(kind)])
    store_profile(file).write_text(json.dumps(data))
    found = ProfileStore().for_file(file)
    assert found is not None
    assert {row.place.qualname: row.target for row in found.hotspots}["Net"] == f"{file}:Net"
    assert f"{file}:Net" not in found.saved_targets  # drk optimize --from-profile does not know it by that name


def to_json_kind(kind: InputKind) -> dict[str, object]:
    return {"text": kind.text, "count": kind.count, "mode": kind.mode, "grad": kind.grad, "task": kind.task}


def test_words_for_people(project: Path) -> None:
    store_profile(project / "model.py")
    found = ProfileStore().for_file(project / "model.py")
    assert found is not None
    text = TextMap((project / "model.py").read_text())
    told = {one.code: one for one in file_diagnostics(found, text, len, min_share=0.75)}
    assert set(told) == {"hotspot", "fusable"}
    assert told["hotspot"].message == "Net: 98 % of GPU time, 98 us a step"
    assert told["fusable"].message == (
        "silu, mul: one kernel could do these; saves about 150 us (estimated), 1.50x here"
    )
    block = next(row for row in found.hotspots if row.place.qualname == "Block")
    shown = hover_text(found, block, stale=True)
    assert "It changed since this was measured." in shown
    assert "would be 3.30x as fast; 61 % of the roof" in shown
    assert "| `void gemm<float, '32/x'>` | 20 | 500 us | 50 % | 2 MB (est.) | 61 % |" in shown
