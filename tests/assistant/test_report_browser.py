"""The page in a real browser: it renders, sorts, asks for nothing, stays safe, fits a phone, and prints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_pages import HOSTILE, full_page

from drk.assistant.report_html import report_html

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)"),
]


class Visit:
    """One page in the browser, with everything it asked for and complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def column(self, table: int, number: int) -> list[str]:
        rows = "[...document.querySelectorAll('table.sortable')[t].tBodies[0].rows]"
        script = f"([t, n]) => {rows}.map((row) => row.cells[n].textContent)"
        texts: list[str] = self.page.evaluate(script, [table, number])
        return texts


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # as root, as in containers, Chromium runs without its own sandbox; the pages are the test's own
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=120_000)
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    written = {"plain": folder / "plain.html", "hostile": folder / "hostile.html"}
    written["plain"].write_text(report_html(full_page()), encoding="utf-8")
    written["hostile"].write_text(report_html(full_page(HOSTILE)), encoding="utf-8")
    return written


@pytest.fixture
def visit(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    contexts = []

    def go(name: str = "plain", width: int = 1280, scheme: str = "light") -> Visit:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(120_000)
        contexts.append(context)
        found = Visit(context.new_page())
        found.page.goto(pages[name].as_uri())
        return found

    yield go
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", ["plain", "hostile"])
def test_it_renders_without_requests_or_complaints_and_names_stay_text(visit, pages, name) -> None:
    seen = visit(name)
    assert seen.requests == [pages[name].as_uri()]
    assert seen.complaints == []
    assert seen.page.locator("img").count() == 0
    assert seen.page.title().startswith("drk report: model.py:Net")
    assert seen.page.locator("svg circle").count() >= 40
    assert seen.page.evaluate("getComputedStyle(document.body).maxWidth") != "none"  # the style sheet was let through


def test_injected_code_would_not_run(visit) -> None:
    seen = visit()
    seen.page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'document.title = 1';"
        " document.body.append(s);"
        " document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=2\">'); }"
    )
    seen.page.wait_for_timeout(50)
    assert seen.page.title().startswith("drk report")
    assert any("Content Security Policy" in text for text in seen.complaints)


def test_headers_sort_by_click_and_by_key(visit) -> None:
    seen = visit()
    calls = seen.page.locator("table.sortable").nth(1).locator("th button", has_text="calls")
    calls.click()
    numbers = [int(text) for text in seen.column(1, 4)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1]
    calls.press("Enter")
    assert [int(text) for text in seen.column(1, 4)] == sorted(numbers)
    heads = seen.page.locator("table.sortable").nth(1).locator("th[aria-sort]")
    assert heads.count() == 1
    assert heads.first.get_attribute("aria-sort") == "ascending"
    seen.page.locator("table.sortable").nth(1).locator("th button", has_text="line").click()
    lines = seen.column(1, 11)
    assert lines[0].startswith("blocks/layer_39")


def test_a_phone_needs_no_sideways_scrolling_of_the_page(visit) -> None:
    for name in ("plain", "hostile"):
        seen = visit(name, width=400)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 400


def test_text_stands_out_in_light_and_dark(visit) -> None:
    """Every text's contrast with what is behind it is at least 4.5 (WCAG AA)."""
    script = """() => {
      const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
      const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
      const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
        if (c.length && c[3] !== 0) return c; } return [255, 255, 255]; };
      const low = [];
      const texts = 'p, h1, h2, h3, dt, dd, th, td, caption span, li, code, pre, pre span, summary, mark';
      for (const e of document.querySelectorAll(texts)) {
        const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
        if ((a + .05) / (b + .05) < 4.5) low.push(e.tagName + ' ' + e.className + ' ' + getComputedStyle(e).color);
      }
      return [...new Set(low)];
    }"""
    grounds = set()
    for scheme in ("light", "dark"):
        seen = visit(scheme=scheme)
        assert seen.page.evaluate(script) == []
        grounds.add(seen.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


def test_print_shows_everything_on_white(visit, tmp_path) -> None:
    seen = visit(scheme="dark")
    seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert seen.page.locator("details:not([open])").count() == 0
    seen.page.emulate_media(media="print")
    assert seen.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    wide = "[...document.querySelectorAll('.scroll')].every((one) => getComputedStyle(one).overflowX === 'visible')"
    assert seen.page.evaluate(wide)
    assert seen.page.pdf(format="A4")[:5] == b"%PDF-"
