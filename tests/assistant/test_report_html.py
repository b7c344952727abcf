from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_pages import HOSTILE, cpu_report, full_page, gpu_report, run_page, wide_report

from drk.assistant.errors import UsageError
from drk.assistant.report import Attribution
from drk.assistant.report_html import report_html
from drk.assistant.report_page import Page, page_from_html, page_from_json, page_json


class Elements(HTMLParser):
    """Collects start tags, and checks that tags are closed in order."""

    VOID = frozenset({"meta", "rect", "line", "circle", "path", "br", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID or tag == "circle" or (tag == "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        while self.open and self.open[-1] in self.VOID and self.open[-1] != tag:
            self.open.pop()
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def full() -> str:
    return report_html(full_page())


@pytest.fixture(scope="module")
def hostile() -> str:
    return report_html(full_page(HOSTILE))


def test_forty_kernels_stay_under_100_kb() -> None:
    assert len(report_html(Page(wide_report(40))).encode()) < 100_000


def test_hostile_names_stay_text(hostile: str) -> None:
    tags = Elements(hostile).found
    assert "img" not in {tag for tag, _ in tags}
    assert sum(tag == "script" for tag, _ in tags) == 2
    assert not any(name.startswith("on") or name == "style" for _, attributes in tags for name in attributes)
    assert "evil.example" in hostile


def test_nothing_outside_is_named_and_the_policy_has_the_hashes(full: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', full)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert not any({"src", "href", "action"} & attributes.keys() for _, attributes in Elements(full).found)


def test_every_table_has_a_caption_and_every_chart_a_label(full: str) -> None:
    tags = Elements(full).found
    assert sum(tag == "table" for tag, _ in tags) == sum(tag == "caption" for tag, _ in tags) >= 7
    assert all(attributes.get("aria-label") for tag, attributes in tags if tag == "svg")
    sorted_columns = [attributes for tag, attributes in tags if tag == "th" and "aria-sort" in attributes]
    assert len(sorted_columns) == 5


def test_the_page_reads_back_as_what_it_shows() -> None:
    page = full_page(HOSTILE)
    back = page_from_html(report_html(page))
    assert back.run == page.run
    assert back.excerpts == page.excerpts
    assert back.report is not None
    assert page.report is not None
    assert [row.name for row in back.report.kernels] == [row.name for row in page.report.kernels]
    assert back.report.kernels[0].times.total_us == pytest.approx(page.report.kernels[0].times.total_us, rel=1e-4)
    assert page_from_json(json.loads(json.dumps(page_json(back)))) == back


def test_no_source_leaves_every_line_out(full: str) -> None:
    bare = report_html(full_page().without_sources())
    assert "torch.relu" in full
    assert "torch.relu" not in bare
    assert "from model_kernels import optimized" not in bare
    assert page_from_html(bare).excerpts == ()


def test_a_run_alone_shows_intervals_cells_and_turns() -> None:
    text = report_html(Page(run=run_page()))
    assert "1.53x [1.47, 1.60]" in text
    assert "5 of 5 cells passed" in text
    assert "out of shared memory" in text
    assert 'class="best"' in text
    assert "Kernels that ran" in text


def test_cpu_times_and_estimates_are_called_so() -> None:
    text = report_html(Page(cpu_report()))
    assert "CPU times (nothing ran on a GPU)" in text
    assert "Estimate, nothing ran on a GPU" in text
    assert '<h2 id="h-kernels">Operators' in text


def test_device_idle_and_roofs_are_shown() -> None:
    text = report_html(Page(gpu_report()))
    assert "short gaps between launches" in text
    assert 'class="roof"' in text
    assert "lane-device" in text


def test_what_runs_outside_of_modules_is_shown() -> None:
    known = Attribution(0.8, 1.0, 0.99, "", 0.95)
    text = report_html(Page(replace(wide_report(2), attribution=known)))
    assert '<h2 id="h-parts">Outside of modules' in text
    assert "AdamW.step" in text
    assert "80 % by module (95 % with what runs outside of modules), 100 % by line" in text


@pytest.mark.parametrize(
    "text",
    [
        "<html></html>",
        '<script type="application/json" id="drk-report">{"kind":"drk-report","schema_version":1}</script>',
        '<script type="application/json" id="drk-report">{"kind":"drk-report","schema_version":7}</script>',
        '<script type="application/json" id="drk-report">{"zlib":"AAAA"}</script>',
        '<script type="application/json" id="drk-report">[1</script>',
    ],
)
def test_other_pages_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        page_from_html(text)


def test_a_profile_names_the_next_command() -> None:
    report = gpu_report()
    with_target = replace(report.modules[0], target="net.py:Net")
    text = report_html(Page(replace(report, modules=(with_target,))))
    assert "next: <code>drk optimize net.py:Net</code>" in text
    assert "next:" not in report_html(Page(replace(report, modules=())))
