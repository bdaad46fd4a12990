"""The page in a real browser: headless Chromium, on screens of a desktop and a phone.

Skipped where Chromium is missing; `apt-get install chromium` brings it.
"""

import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from decod.daemon.page.acting import Acting
from tests.integration.test_page import PAGE, port_of
from tests.support.cluster import Cluster, takes_part
from tests.support.pages import SimulatedRun, served
from tests.support.runs import make_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe_api = pytest.importorskip("axe_playwright_python.sync_playwright")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]

LOADED_WITHIN_S = 1.0
SHOWN_WITHIN_S = 3.0
SCREENS = {"desktop": (1280, 900), "phone": (390, 844)}
HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        options = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
        browser = playwright.chromium.launch(**options)
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab that fails a test whose page logs an error, or asks another host."""
    page = browser.new_page()
    faults: list[str] = []
    # A node that is gone is no fault of the page.
    page.on("console", lambda m: faults.append(m.text) if "ERR_CONNECTION" not in m.text else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "request",
        lambda asked: faults.append(asked.url) if "//127.0.0.1:" not in asked.url else None,
    )
    yield page
    page.close()
    assert not faults


def big_run() -> SimulatedRun:
    run = SimulatedRun(num_stages=5, num_per_stage=50)
    run.see()
    run.train(2000)
    return run


def open_page(tab: Any, port: int, token: str = "") -> None:
    tab.goto(f"http://127.0.0.1:{port}/" + (f"#token={token}" if token else ""))
    tab.wait_for_selector("#members-rows tr")


def drawn(tab: Any, chart: str) -> str:
    """Return what a chart's canvas shows, as data that can be compared."""
    data: str = tab.evaluate(f"document.querySelector('#{chart}-chart canvas').toDataURL()")
    return data


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_everybody_can_use_it(tab: Any, screen: str, mode: str) -> None:
    """axe-core finds nothing, tables included, and nothing is wider than the screen."""
    width, height = SCREENS[screen]
    tab.set_viewport_size({"width": width, "height": height})
    tab.emulate_media(color_scheme=mode)
    run = SimulatedRun(num_stages=4, num_per_stage=5, organisation="servers")
    run.see()
    run.train(60)
    run.lose("b0000001".ljust(52, "x"))
    with served(run) as port:
        open_page(tab, port)
        for details in tab.query_selector_all("details"):
            details.evaluate("element => { element.open = true; }")
        found = axe_api.Axe().run(tab)
        faults = [(one["id"], one["nodes"][0]["html"]) for one in found.response["violations"]]
        assert not faults
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator("main, header, nav, footer").count() == 4
        names = tab.eval_on_selector_all("#picture text", "all => all.map(e => e.textContent)")
        assert "stage 1" in names


def test_it_loads_in_a_second_with_200_members(tab: Any) -> None:
    with served(big_run()) as port:
        open_page(tab, port)  # Once, so that the browser itself has started.
        times_s = []
        for _ in range(3):  # Other work may slow one of them down.
            begin_s = time.monotonic()
            open_page(tab, port)
            tab.wait_for_selector("#picture circle")
            times_s.append(time.monotonic() - begin_s)
        loaded_s = median(times_s)
        assert tab.locator("#members-rows tr").count() == 201
        assert tab.locator("#picture .member").count() == 202
    print(f"loaded in {loaded_s:.2f} s")
    assert loaded_s < LOADED_WITHIN_S


def test_names_from_others_are_only_text(tab: Any) -> None:
    node_id = "b0000001".ljust(52, "x")
    run = SimulatedRun(num_stages=3, num_per_stage=3, names={node_id: HOSTILE})
    run.see()
    run.lose(node_id, HOSTILE)
    with served(run) as port:
        open_page(tab, port)
        assert tab.locator("img").count() == 0
        assert tab.title().startswith("tiny-stories")
        assert HOSTILE in tab.inner_text("#members-rows")
        assert HOSTILE in tab.inner_text("#events")


def test_it_keeps_up_by_itself_and_says_when_the_node_is_gone(tab: Any) -> None:
    run = SimulatedRun(num_stages=3, num_per_stage=3)
    run.see()
    run.train(3)
    with served(run) as port:
        open_page(tab, port)
        assert not tab.is_visible("#gone")
        run.train(1)
        tab.wait_for_selector("#facts div:first-child dd:text-is('4')", timeout=3000)
        run.lose("c0000002".ljust(52, "x"), "does not answer")
        tab.wait_for_selector("#events li:has-text('relay-2-2'):has-text('was lost')", timeout=3000)
        assert "relay-2-2 (stage 2) was lost" in tab.text_content("#news")
    tab.wait_for_selector("#gone:has-text('does not answer since')", timeout=3000)


def test_curves_are_shown_over_what_the_reader_chooses(tab: Any) -> None:
    run = SimulatedRun(num_stages=3, num_per_stage=3)
    run.see()
    run.train(120)
    run.lose("c0000002".ljust(52, "x"), "does not answer")
    run.train(40)
    with served(run) as port:
        open_page(tab, port)
        assert "8.0" not in tab.get_attribute("#rate-chart", "aria-label")
        assert tab.get_attribute("#loss-chart", "aria-label").startswith("Loss: 10.")
        assert "4 %: 160 of 4,000 iterations" in tab.inner_text("#bar-text")
        seen = {drawn(tab, "loss")}
        for choice in ("[value=tokens]", "[value=time]", "#log"):
            tab.check(choice)
            seen.add(drawn(tab, "loss"))
        assert len(seen) == 4, "each choice draws another picture"
        tab.check("[value=iteration]")
        over = tab.locator("#loss-chart .u-over").bounding_box()
        middle = over["y"] + over["height"] / 2
        tab.mouse.move(over["x"] + over["width"] * 119 / 159, middle)
        tab.wait_for_selector("#near:has-text('relay-2-2 (stage 2) was lost')")
        assert "Held-out loss" in tab.inner_text("#loss-chart .u-legend")
        whole = drawn(tab, "rate")
        tab.mouse.down()
        tab.mouse.move(over["x"] + over["width"] * 0.9, middle, steps=4)
        tab.mouse.up()
        tab.wait_for_function("document.querySelector('#loss-chart canvas').isConnected")
        assert drawn(tab, "rate") != whole, "both charts zoom"


def test_a_member_has_a_page_of_its_own(tab: Any) -> None:
    with served(big_run()) as port:
        open_page(tab, port)
        tab.click("#members-rows button:text-is('relay-2-7')")
        shown = tab.inner_text("#member")
        for known in ("NVIDIA GeForce RTX 4090", "24.0 GB", "Mbit/s", "by anybody", "computes"):
            assert known in shown
        faults = axe_api.Axe().run(tab).response["violations"]
        assert not [(one["id"], one["nodes"][0]["html"]) for one in faults]
        tab.keyboard.press("Escape")
        tab.wait_for_selector("#member", state="hidden")


def acting_run() -> tuple[SimulatedRun, Acting]:
    run = SimulatedRun(num_stages=3, num_per_stage=3)
    run.see()
    run.train(3)
    caps = {"name": "upload_max", "value": "none", "counts": "at once", "origin": "default"}
    token = {"id": "abcd", "role": "volunteer", "state": "live", "used": 1, "uses": 5}
    run.answers = {
        "set": {"settings": [caps]},
        "leaving": {"means": "the run ends for everybody"},
        "token_create": {"join_string": "decod1-secret", "command": "decod join decod1-secret"},
        "newcomer_list": {
            "newcomers": [
                {"id": "swift234", "name": "eel", "address": "192.0.2.7", "token": "abcd"}
            ]
        },
        "token_list": {"tokens": [token | {"expires_in_s": 900, "note": "friends"}]},
    }
    return run, Acting(run.answer)


def test_the_operator_acts_from_the_page(tab: Any) -> None:
    run, acting = acting_run()
    with served(run, acting) as port:
        open_page(tab, port)
        assert not tab.is_visible("#controls")
        assert "decod status" in tab.inner_text("#locked")
        tab.goto("about:blank")
        open_page(tab, port, acting.token)
        tab.wait_for_selector("#organiser")
        assert "token" not in tab.url, "others may read the address"
        tab.click("#settings-details summary")
        tab.fill("#settings [name=upload_max]", "20")
        tab.click("#settings button")
        tab.wait_for_selector("#acted:has-text('set: upload_max')")
        tab.click("#invite button")
        tab.wait_for_selector("#qr path")
        assert tab.input_value("#join-string") == "decod join decod1-secret"
        tab.click("#tokens-rows button")
        tab.wait_for_selector("#acted:has-text('lets nobody in')")
        tab.click("#newcomers button:text-is('Accept')")
        tab.wait_for_selector("#acted:has-text('eel may come in')")
        tab.click("#members-rows button:text-is('relay-1-1')")
        tab.click("#member-buttons button")
        tab.click("#question-yes")
        tab.wait_for_selector("#acted:has-text('is banned')")
        tab.click("#node-buttons button:text-is('End the run')")
        tab.wait_for_selector("#question-text:has-text('the run ends for everybody')")
        tab.click("#question button[value=no]")
        tab.wait_for_selector("#question", state="hidden")
        faults = axe_api.Axe().run(tab).response["violations"]
        assert not [(one["id"], one["nodes"][0]["html"]) for one in faults]
    looks = ("token_list", "newcomer_list", "leaving")
    asked = [one for one in run.asked if one["command"] not in looks]
    assert asked == [
        {"command": "set"},
        {"command": "set", "values": {"upload_max": "20"}},
        {"command": "set"},
        {"command": "token_create", "uses": 20, "ttl_s": 86_400, "note": ""},
        {"command": "token_revoke", "id": "abcd"},
        {"command": "newcomer_decide", "node": "swift234", "may_enter": True},
        {"command": "node_ban", "node": "b0000001"},
    ]


def test_the_public_page_has_nothing_of_the_node(tab: Any) -> None:
    run, _ = acting_run()
    with served(run, public=True) as port:
        open_page(tab, port)
        assert tab.is_visible("#loss-chart canvas")
        for hidden in ("#node", "#controls", "#organiser", "#locked", "a[href=metrics]"):
            assert not tab.is_visible(hidden)


def test_another_site_in_the_same_browser_can_not_act(browser: Any) -> None:
    """It even knows the token. It sends what browsers let it send without asking, and the rest."""
    run, acting = acting_run()
    attack = """async ([address, token, mode, type]) => {
      const headers = {"Content-Type": type, ...(mode === "cors" ? {Authorization: token} : {})};
      const body = JSON.stringify({command: "drain"});
      try { return (await fetch(address, {method: "POST", mode, headers, body})).status; }
      catch { return "refused"; }
    }"""
    with served(run, acting) as port, served(SimulatedRun(2, 1)) as elsewhere:
        page = browser.new_page(bypass_csp=True)
        page.goto(f"http://127.0.0.1:{elsewhere}/")
        for mode in ("cors", "no-cors"):
            for kind in ("application/json", "text/plain"):
                given = [f"http://127.0.0.1:{port}/do", f"Bearer {acting.token}", mode, kind]
                assert page.evaluate(attack, given) in ("refused", 0)
        page.close()
    assert not run.asked


def test_the_keyboard_reaches_everything(tab: Any) -> None:
    with served(big_run()) as port:
        open_page(tab, port)
        reached = []
        for _ in range(16):
            tab.keyboard.press("Tab")
            reached.append(tab.evaluate("document.activeElement.outerHTML.slice(0, 60)"))
    assert "Skip to the run" in reached[0]
    assert sum("<summary" in one for one in reached) == 2
    assert any('role="region"' in one for one in reached)


def test_a_browser_shows_a_kill_within_three_seconds(
    tab: Any, corpus: Path, tmp_path: Path
) -> None:
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        cluster.start_leader(*PAGE)
        cluster.start_relays(2)
        for daemon in cluster.daemons:
            cluster.wait_for(partial(takes_part, cluster, daemon), f"{daemon.name} in the run")
        port = cluster.wait_for(lambda: port_of(cluster.leader), "the page")
        open_page(tab, port)
        tab.wait_for_selector("#members-rows tr:nth-child(5)")
        begin_s = time.monotonic()
        cluster.daemons[-1].send(signal.SIGKILL)
        lost = "#events li:has-text('relay-2-1'):has-text('was lost')"
        tab.wait_for_selector(lost, timeout=30_000)
        shown_s = time.monotonic() - begin_s
        print(f"a browser shows a kill after {shown_s:.2f} s")
        assert shown_s < SHOWN_WITHIN_S
        cluster.leader.send(signal.SIGKILL)
        tab.wait_for_selector("#gone:has-text('does not answer since')", timeout=3000)
