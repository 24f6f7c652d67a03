"""The page: what it holds, what it shows in a browser, and that its clock is ours."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cbasync.devices.costs import ARTICLE, LAPTOP, WAITS, CostModel, PhaseCost
from cbasync.page import page_html, steady, write_page
from cbasync.palette import PHASE_COLOURS
from cbasync.simulate import SimulatedRun, simulate
from cbasync.timeline import Timeline
from cbasync.trace import LANES, PHASES, Work

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic", "--no-first-run",
]  # fmt: skip
SLIDERS = ("batch", "host", "compute", "transfer", "depth")

Params = dict[str, Any]

# ------------------------------------------------------------------ the file


def presets_of(html: str) -> list[dict[str, Any]]:
    line = html.split("const PRESETS = ")[1].split(";\n")[0]
    presets: list[dict[str, Any]] = json.loads(line)
    return presets


def test_page_is_small_and_names_no_other_place() -> None:
    html = page_html()
    assert len(html.encode()) < 60_000
    # The one address is the name of SVG's elements; nothing is loaded from it.
    assert set(re.findall(r"\w+://[^\"'\s]*", html)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in html
    for word in ('<link rel="stylesheet', "src=", "@import", "fetch(", "url(http"):
        assert word not in html


def test_page_opens_with_the_given_machine() -> None:
    presets = presets_of(page_html(LAPTOP, batch=5, depth=3))
    assert [preset["name"] for preset in presets] == ["laptop", "article"]
    assert (presets[0]["batch"], presets[0]["depth"]) == (5, 3)
    assert [preset["name"] for preset in presets_of(page_html())] == [
        "article", "laptop",
    ]  # fmt: skip
    mine = presets_of(page_html(replace(ARTICLE, name="mine")))
    assert [preset["name"] for preset in mine] == ["mine", "article", "laptop"]
    assert "99.4 % and 234.5 s" in mine[1]["remark"]
    assert mine[0]["remark"] == ""


def test_what_a_cost_file_says_stays_text() -> None:
    nasty = replace(ARTICLE, name="</script><script>alert(1)", note="a < b & 'c'")
    html = page_html(nasty)
    assert html.count("<script>") == html.count("</script>") == 1
    assert presets_of(html)[0]["name"] == nasty.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"batch": 0}, "max_num_seqs is 0"), ({"depth": 4}, "depth is 4, at most 3")],
)
def test_settings_that_cannot_be_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        page_html(**arguments)


def test_page_has_the_packages_colours() -> None:
    assert set(PHASE_COLOURS) == set(PHASES)
    assert json.dumps(PHASE_COLOURS) in page_html()


def test_template_goes_into_the_wheel() -> None:
    import tomllib

    root = Path(__file__).parents[1]
    tool = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    patterns = tool["setuptools"]["package-data"]["cbasync"]
    found = {path.name for p in patterns for path in (root / "cbasync").glob(p)}
    assert "page_template.html" in found


def test_steady_costs_are_those_of_a_decode_step() -> None:
    # The last of 99 steps: each request has 99 tokens in the cache.
    timeline = simulate(LAPTOP, steps=99, batch=6, prompt=1).sync.timeline
    model = steady(LAPTOP, context=99)
    for phase in PHASES:
        (last,) = (s for s in timeline.spans if (s.phase, s.batch) == (phase, 98))
        want = model.duration_us(phase, Work(num_requests=6))
        assert last.duration_us == pytest.approx(want), phase
    assert model.compute == PhaseCost(6000.0, 30.0 + 0.3 * 99)
    assert steady(ARTICLE) == ARTICLE


# ------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no chromium found")
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page on disk."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page(path)
    return path.as_uri()


@pytest.fixture(scope="module")
def tab(browser: Browser) -> tuple[Page, list[str], list[str]]:
    """A tab, what it asks for and what it complains about."""
    page = browser.new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    return page, requests, complaints


@pytest.fixture
def page(tab: tuple[Page, list[str], list[str]], address: str) -> Iterator[Page]:
    """The page as it opens; any request beside it and any complaint is a failure."""
    page, requests, complaints = tab
    requests.clear()
    complaints.clear()
    page.set_viewport_size({"width": 1300, "height": 900})
    page.mouse.move(0, 0)
    page.goto(address)
    yield page
    assert requests == [address]
    assert complaints == []


def params_of(costs: CostModel, batch: int, depth: int, steps: int) -> Params:
    """A cost model as the page's clock takes it."""
    phases = {phase: getattr(costs, phase) for phase in PHASES}
    return {
        "batch": batch,
        "depth": depth,
        "steps": steps,
        "costs": {name: getattr(costs, name) for name in WAITS}
        | {
            phase: {"fixed_us": c.fixed_us, "per_request_us": c.per_request_us}
            for phase, c in phases.items()
        },
    }


def model_of(params: Params) -> CostModel:
    """The other way round."""
    costs = dict(params["costs"])
    waits = {name: costs.pop(name) for name in WAITS}
    phases: dict[str, Any] = {phase: PhaseCost(**cost) for phase, cost in costs.items()}
    return CostModel("page", **phases, **waits)


def cases() -> list[Params]:
    """Machines of every kind: each depth, host-bound and GPU-bound, slow copies."""
    host_bound = ARTICLE.with_host_us(40_000.0)
    slow_copies = replace(
        ARTICLE, h2d=PhaseCost(12_000.0, 10.0), d2h=PhaseCost(9_000.0), launch_us=50.0
    )
    models = [ARTICLE, steady(LAPTOP), host_bound, slow_copies]
    fixed = [
        params_of(model, batch, depth, steps=14)
        for model in models
        for depth in range(4)
        for batch in (1, 32)
    ]
    draw = random.Random(7)
    return fixed + [_random_case(draw) for _ in range(40)]


def _random_case(draw: random.Random) -> Params:
    def cost() -> PhaseCost:
        return PhaseCost(draw.choice([0.0, 50.0, 700.0 * draw.random()]), draw.random())

    phases: dict[str, Any] = {phase: cost() for phase in PHASES}
    waits: dict[str, Any] = {n: draw.choice([0.0, 20.0, 90.0]) for n in WAITS}
    model = CostModel("random", **phases, **waits)
    return params_of(model, draw.randint(1, 40), draw.randint(0, 3), draw.randint(1, 9))


def check_run(mine: dict[str, Any], run: SimulatedRun) -> None:
    """The page's bars and gaps against those of the engine."""
    assert len(mine["spans"]) == len(run.timeline.spans)
    for lane in LANES:
        theirs = [
            (s.phase, s.batch, s.slot, s.start_us, s.end_us)
            for s in _by_content(run.timeline, lane)
        ]
        ours = sorted(
            (s for s in mine["spans"] if s["lane"] == lane),
            key=lambda s: (s["start_us"], s["end_us"], s["batch"]),
        )
        for one, other in zip(ours, theirs, strict=True):
            assert (one["phase"], one["batch"], one["slot"]) == other[:3]
            assert (one["start_us"], one["end_us"]) == pytest.approx(other[3:])
    gaps = [g for g in mine["idle"] if g["end_us"] - g["start_us"] > 1e-6]
    wanted = [g for g in run.timeline.idle_gaps() if g.duration_us > 1e-6]
    for gap, want in zip(gaps, wanted, strict=True):
        assert (gap["cause"], gap["batch"]) == (want.cause, want.batch)
        assert (gap["start_us"], gap["end_us"]) == pytest.approx(want[:2])


def _by_content(timeline: Timeline, lane: str) -> list[Any]:
    return sorted(timeline.lane(lane), key=lambda s: (s.start_us, s.end_us, s.batch))


@pytest.mark.browser
def test_page_has_the_engines_schedule(page: Page) -> None:
    given = cases()
    ours = page.evaluate("cases => cases.map(window.cbasync.simulate)", given)
    for params, result in zip(given, ours, strict=True):
        steps, batch, depth = (params[name] for name in ("steps", "batch", "depth"))
        model = model_of(params)
        want = simulate(model, steps=steps, batch=batch, depth=depth, prompt=1)
        check_run(result["sync"], want.sync)
        check_run(result["async"], want.overlapped)


def steady_numbers(timeline: Timeline, batch: int) -> dict[str, str]:
    """What the page should show for a run of 60 steps: its last 12, as text."""
    compute = timeline.lane("compute")
    step_us = (compute[-1].end_us - compute[-13].end_us) / 12
    active = sum(span.duration_us for span in compute[-12:]) / 12 / step_us
    return {
        "active": f"{100 * active:.1f} %",
        "tokens": f"{batch / step_us * 1e6:.0f}",
        "total": f"{8192 * step_us / 1e6:.1f} s",
    }


@pytest.mark.browser
@pytest.mark.parametrize("preset", ["article", "laptop"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"batch": "End"},
        {"host": "End"},
        {"host": "End", "depth": "Home"},
        {"transfer": "End", "depth": "ArrowRight"},
        {"compute": "PageDown", "transfer": "PageUp", "depth": "End"},
    ],
)
def test_numbers_shown_are_those_of_the_engines(
    page: Page, preset: str, keys: dict[str, str]
) -> None:
    page.get_by_role("button", name=preset, exact=True).click()
    for slider, key in keys.items():
        page.press(f"#{slider}", key)
    params: Params = page.evaluate("window.cbasync.params()")
    batch, depth = params["batch"], params["depth"]
    want = simulate(model_of(params), steps=60, batch=batch, depth=depth, prompt=1)
    for name, run in (("sync", want.sync), ("async", want.overlapped)):
        for number, text in steady_numbers(run.timeline, batch).items():
            assert page.inner_text(f"#{name}-{number}") == text


@pytest.mark.browser
def test_page_opens_with_the_published_figures(page: Page) -> None:
    assert page.inner_text("#sync-active") == "76.0 %"
    assert page.inner_text("#sync-step") == "36.70 ms"
    assert page.inner_text("#sync-total") == "300.6 s"
    assert page.inner_text("#async-active") == "100.0 %"
    assert page.inner_text("#async-total") == "228.5 s"
    assert page.inner_text("#speedup") == "1.32"
    assert "99.4 % and 234.5 s" in page.inner_text("#remark")


@pytest.mark.browser
@pytest.mark.parametrize("slider", SLIDERS)
def test_every_slider_redraws_by_keyboard(page: Page, slider: str) -> None:
    page.get_by_role("button", name="laptop", exact=True).click()

    def seen() -> tuple[str, str, str]:
        return (
            page.inner_html("#chart"),
            page.inner_text(f"#{slider}-value"),
            page.get_attribute(f"#{slider}", "aria-valuetext") or "",
        )

    at_first = seen()
    assert at_first[1] == at_first[2]
    page.press(f"#{slider}", "ArrowRight")
    moved = seen()
    page.press(f"#{slider}", "ArrowLeft")
    for before, after in zip(at_first, moved, strict=True):
        assert before != after
    assert page.locator("#presets [aria-pressed=true]").count() == 0


@pytest.mark.browser
def test_sliders_can_be_reached_by_keyboard_and_have_names(page: Page) -> None:
    reached = []
    for _ in range(2 + len(SLIDERS)):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert reached[2:] == list(SLIDERS)
    names = page.eval_on_selector_all(
        "input[type=range]", "all => all.map(one => one.labels[0].textContent)"
    )
    assert len(set(names)) == len(SLIDERS)


@pytest.mark.browser
def test_idle_gpu_is_hatched_in_turns_and_not_ahead(page: Page) -> None:
    def causes() -> set[str]:
        fills = page.eval_on_selector_all(
            "#chart .idle", "all => all.map(one => one.getAttribute('fill'))"
        )
        return {fill.removeprefix("url(#idle-").removesuffix(")") for fill in fills}

    assert causes() == {"schedule", "prepare", "update"}
    drawn = page.text_content("#chart") or ""
    assert "idle 8.81 ms" in drawn
    assert "update, schedule, prepare" in drawn
    assert drawn.count("no gap: the GPU never waits") == 1
    page.get_by_role("button", name="Slow copies", exact=True).click()
    assert {"h2d", "sync"} < causes()
    assert "no gap" not in (page.text_content("#chart") or "")


@pytest.mark.browser
@pytest.mark.parametrize(
    ("button", "said"),
    [
        ("Slow host", "One batch ahead, it does not wait at all"),
        ("Host-bound", "no depth can hide that, only less work for the host"),
        ("Slow copies", "depth 2 would hide all of it"),
        ("Slow copies, deeper", "Two batches ahead, it does not wait at all"),
        ("Depth 0", "Depth 0 is taking turns again"),
    ],
)
def test_each_trial_shows_what_it_says(page: Page, button: str, said: str) -> None:
    page.press("#batch", "End")  # a trial starts from the preset again
    page.get_by_role("button", name=button, exact=True).click()
    assert said in page.inner_text("#verdict")
    assert page.inner_text("#batch-value") == "32"
    assert page.inner_text("#remark") == ""
    page.get_by_role("button", name="article", exact=True).click()
    assert page.inner_text("#speedup") == "1.32"


@pytest.mark.browser
def test_pointing_at_a_bar_picks_its_batch(page: Page) -> None:
    page.locator("#chart .bar[data-batch='1']").last.hover()
    picked = page.eval_on_selector_all(
        "#chart .bar.same", "all => all.map(one => one.dataset.batch)"
    )
    assert set(picked) == {"1"}
    assert len(picked) >= 6
    page.hover("h1")
    assert page.get_attribute("#chart", "class") == ""


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 800, 400])
def test_page_fits_its_window(page: Page, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 900})
    # A new size is drawn in the next frame.
    page.evaluate("() => new Promise(done => setTimeout(done, 100))")
    page.get_by_role("button", name="Slow copies", exact=True).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.evaluate(
        """() => {
          const box = document.querySelector("#chart").getBoundingClientRect();
          return [...document.querySelectorAll("#chart > text, #chart .bar text")]
            .map(text => text.getBoundingClientRect())
            .filter(t => t.left < box.left - 1 || t.bottom > box.bottom + 1).length;
        }"""
    )
    assert outside == 0
    # Labels lie inside their bars.
    overflowing = page.evaluate(
        """() => [...document.querySelectorAll("#chart .bar")].filter(bar => {
             const text = bar.querySelector("text");
             return text && text.getBoundingClientRect().width >
               bar.querySelector("rect").getBoundingClientRect().width;
           }).length"""
    )
    assert overflowing == 0
