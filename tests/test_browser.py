"""A real JupyterLab in a headless Chromium: run all, move sliders, look at the bars."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TOKEN = "only-for-this-test"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--no-first-run",
]
ASKED: list[str] = []  # every address that the page has asked for
NEEDED = ("jupyterlab", "playwright", "plotly", "anywidget", "ipywidgets")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="JupyterLab, its widgets or playwright are not installed",
    ),
]

# The indicator says idle before the kernel is connected; run-all would then do nothing.
RUN_ALL = """async () => {
  const panel = jupyterapp.shell.currentWidget;
  await panel.revealed;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
  await jupyterapp.commands.execute("notebook:run-all-cells");
}"""

# Run-all may return a moment before the last counts have arrived.
ALL_COUNTED = """() => jupyterapp.shell.currentWidget.content.model.toJSON().cells
  .every(cell => cell.cell_type !== "code" || cell.execution_count)"""

# Widths and places of the bars of one figure, as they are on the screen.
BARS = """() => [...document.querySelectorAll(".js-plotly-plot")]
  .filter(plot => plot.querySelectorAll(".barlayer .trace").length >= 7)
  .map(plot => [...plot.querySelectorAll(".barlayer path")])
  .map(paths => paths.map(path => path.getAttribute("d")))
  .at(0)"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A JupyterLab on loopback, with settings of its own; its address."""
    home, port = tmp_path_factory.mktemp("lab"), free_port()
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    names = (*folders, "IPYTHONDIR", "JUPYTERLAB_WORKSPACES_DIR")
    env = os.environ | {name: str(home / name.lower()) for name in names}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shutil.copytree(ROOT / "notebooks", home / "copy" / "notebooks")
    shutil.copytree(ROOT / "data", home / "copy" / "data")
    overrides = home / "app" / "settings" / "overrides.json"
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1"]
    command += [f"--port={port}", f"--IdentityProvider.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={home / 'copy'}", "--expose-app-in-browser"]
    command += ["--allow-root"] if os.name == "posix" and os.geteuid() == 0 else []
    command += [f"--LabApp.app_settings_dir={overrides.parent}"]
    overrides.parent.mkdir(parents=True)
    # The news pop-up asks the network and covers the figure.
    quiet = {"checkForUpdates": False, "fetchNews": "false", "doNotDisturbMode": True}
    overrides.write_text(
        json.dumps({"@jupyterlab/apputils-extension:notification": quiet})
    )
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/api?token={TOKEN}", server, log.name)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(timeout=30)


def wait_for(address: str, server: subprocess.Popen[bytes], log: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(address, timeout=5).close()
        except (urllib.error.URLError, OSError):
            assert server.poll() is None, Path(log).read_text()
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"no answer: {Path(log).read_text()}")


@pytest.fixture(scope="module")
def page(lab: str) -> Iterator[Any]:
    """The explorer's notebook, opened and run; and every address that was asked for."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        width = int(os.environ.get("CBASYNC_BROWSER_WIDTH", "1300"))
        page = browser.new_page(viewport={"width": width, "height": 2400})
        page.set_default_timeout(60_000)
        ASKED.clear()
        page.on("request", lambda request: ASKED.append(request.url))
        path = "notebooks/11_timeline_explorer.ipynb"
        page.goto(f"{lab}/lab/tree/{path}?token={TOKEN}")
        page.wait_for_selector(".jp-Notebook")
        page.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.revealed")
        page.evaluate(RUN_ALL)
        page.wait_for_function(ALL_COUNTED)
        page.locator("text=See it").last.scroll_into_view_if_needed()
        page.wait_for_selector(".widget-slider")
        page.wait_for_function(f"() => (({BARS})() || []).length > 20")
        yield page
        browser.close()


def bars(page: Any) -> list[str]:
    found: list[str] = page.evaluate(BARS)
    return found


def slider(page: Any, words: str) -> Any:
    row = page.locator(".widget-slider", has=page.get_by_text(words)).first
    return row.locator(".noUi-handle").first


def press(page: Any, words: str, key: str, times: int = 1) -> None:
    """Move a slider by keyboard and wait until the figure has followed."""
    before = bars(page)
    handle = slider(page, words)
    handle.focus()
    for _ in range(times):
        handle.press(key)
    page.wait_for_function(
        f"before => JSON.stringify(({BARS})()) !== before",
        arg=json.dumps(before, separators=(",", ":")),
    )


def readout(page: Any, words: str) -> str:
    row = page.locator(".widget-slider", has=page.get_by_text(words)).first
    return str(row.locator(".widget-readout").inner_text())


def picture(page: Any, name: str) -> None:
    """A screenshot for people to look at, where they ask for it."""
    if folder := os.environ.get("CBASYNC_SCREENSHOTS"):
        page.wait_for_timeout(800)
        page.screenshot(path=f"{folder}/{name}.png")


def test_all_cells_have_run(page: Any) -> None:
    notebook = page.evaluate(
        "() => jupyterapp.shell.currentWidget.content.model.toJSON()"
    )
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 10
    failed = [
        cell["source"]
        for cell in code
        if any(output["output_type"] == "error" for output in cell["outputs"])
        and "raises-exception" not in cell["metadata"].get("tags", [])
    ]
    assert failed == []


def test_sliders_move_the_bars(page: Any) -> None:
    picture(page, "explorer")
    before = bars(page)
    press(page, "batch size", "ArrowLeft", 5)
    assert readout(page, "batch size") == "27"
    after = bars(page)
    assert sum(a != b for a, b in zip(before, after, strict=False)) > 10
    press(page, "prepare", "End")
    picture(page, "explorer-slow-host")
    assert "Async still waits" in page.inner_text(".jp-Notebook")


def test_taking_an_event_away_shows_a_race(page: Any) -> None:
    page.get_by_label("h2d_done").uncheck()
    page.wait_for_function(
        "() => document.querySelector('.jp-Notebook').innerText.includes("
        "'Race, nothing orders h2d_done')"
    )
    picture(page, "explorer-race")


def test_stepper_changes_its_tables(page: Any) -> None:
    row = page.locator(".widget-slider", has=page.get_by_text("batch", exact=True))
    handle = row.last.locator(".noUi-handle").first
    handle.focus()
    handle.press("ArrowRight")
    page.wait_for_function(
        "() => document.querySelector('.jp-Notebook').innerText.includes("
        "'Batch 1 lies in slot B')"
    )
    handle.scroll_into_view_if_needed()
    picture(page, "stepper")


def test_figures_of_recorded_runs_are_drawn(page: Any) -> None:
    plots = page.locator(".js-plotly-plot")
    assert plots.count() == 6  # explorer, blocks, activity, peer, recorded, gain
    plots.last.scroll_into_view_if_needed()
    for words in ("transformers-cpu-random-tiny", "sync", "predicted"):
        assert plots.filter(has_text=words).count() >= 1
    picture(page, "recorded")


def test_nothing_left_loopback(page: Any) -> None:
    assert page.url.startswith("http://127.0.0.1")
    local = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "about:")
    assert [url for url in ASKED if not url.startswith(local)] == []
    assert any("plotly" in url or "anywidget" in url for url in ASKED)
