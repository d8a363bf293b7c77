"""The page in a real browser: no errors, keyboard, a phone, the dark scheme, and how soon it is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.browser import browser, resize, why_not
from tests.report.test_report import DENSE, ROLES, made

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no browser: {why_not()}")


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("browser")
    made(folder, *DENSE, "--target", "sm_90", "--no-compile", "--prop", "fwd", "--schedule", ROLES)
    return (Path(folder) / "page.html").as_uri()


@pytest.fixture(autouse=True)
def opened(driver: Any, page: str) -> None:
    resize(driver, 1280, 900)
    driver.get("about:blank")
    driver.get(page)


def active(driver: Any, what: str = "tagName") -> str:
    return str(driver.execute_script(f"return document.activeElement.{what}"))


def press(driver: Any, key: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(key).perform()


def colour(driver: Any) -> str:
    return str(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))


@pytest.mark.slow
def test_it_opens_soon_and_says_nothing_to_the_console(driver: Any) -> None:
    assert driver.get_log("browser") == []
    spent = driver.execute_script(
        "const t = performance.getEntriesByType('navigation')[0];return t.domInteractive - t.startTime"
    )
    assert 0 < spent < 1000
    asked = driver.execute_script("return performance.getEntriesByType('resource').map(r => r.name)")
    assert [name for name in asked if not name.startswith("data:")] == []
    assert driver.execute_script("return document.querySelectorAll('svg.drawing').length") >= 8


@pytest.mark.slow
def test_a_keyboard_is_enough(driver: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    press(driver, Keys.TAB)
    assert active(driver, "className") == "skip"
    left = driver.execute_script("return document.activeElement.getBoundingClientRect().left")
    assert left >= 0, "the link is visible while it has the focus"
    press(driver, Keys.TAB)
    assert active(driver, "id") == "fold"
    width = driver.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert width == "solid"
    press(driver, Keys.TAB)
    press(driver, Keys.TAB)
    assert active(driver) == "A"
    for _ in range(40):
        press(driver, Keys.TAB)
        if active(driver) == "SUMMARY":
            break
    opened = "return document.activeElement.parentElement.open"
    assert driver.execute_script(opened) is False
    press(driver, Keys.ENTER)
    assert driver.execute_script(opened) is True
    press(driver, Keys.TAB)
    assert active(driver) == "PRE", "what was folded away can be scrolled by keyboard"


@pytest.mark.slow
def test_a_phone_needs_no_horizontal_scrolling(driver: Any) -> None:
    resize(driver, 360, 740)
    driver.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 360
    wide = driver.execute_script("""
        return [...document.querySelectorAll('main *')].filter(e => !e.closest('pre, .scroll, svg')
            && e.getBoundingClientRect().right > 361).map(e => e.outerHTML.slice(0, 80))""")
    assert wide == []
    assert driver.get_log("browser") == []


@pytest.mark.slow
def test_light_and_dark(driver: Any) -> None:
    light = colour(driver)
    resize(driver, 1280, 900, dark=True)
    dark = colour(driver)
    assert dark != light
    from selenium.webdriver.support.ui import WebDriverWait

    button = driver.find_element("id", "theme")  # told by an event, which may come later than the colour
    WebDriverWait(driver, 10).until(lambda _: button.text == "Light")
    driver.find_element("id", "theme").click()
    assert colour(driver) == light, "the button goes before the system"
    driver.find_element("id", "theme").click()
    assert colour(driver) == dark
    ratio = driver.execute_script("""
        const lum = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
            .map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
            return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
        const page = lum(getComputedStyle(document.body).backgroundColor);
        return Math.min(...[...document.querySelectorAll('p, .soft, h3, td')].map(e => {
            const ink = lum(getComputedStyle(e).color);
            return (Math.max(ink, page) + .05) / (Math.min(ink, page) + .05); }));""")
    assert ratio >= 4.5, "text stands out from the page"


@pytest.mark.slow
def test_it_can_be_read_without_scripts(driver: Any, page: str) -> None:
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.get(page)
        assert not driver.find_element("id", "tools").is_displayed()
        first = driver.find_element("css selector", "details > summary")
        first.click()
        assert driver.find_element("css selector", "details > pre").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
