"""A headless Chromium that looks at a report, for tests; skipped by name where there is none."""

import importlib.util
import json
import shutil
from pathlib import Path

from left_out import leave_out

LACKING = [
    *(name for name in ("chromium", "chromedriver") if shutil.which(name) is None),
    *(name for name in ("selenium",) if importlib.util.find_spec(name) is None),
]
DRAWN_S = 60
#: Opens before anything of the page runs: what it throws is seen, too.
WATCH = """
    window.thrown = [];
    addEventListener("error", (e) => thrown.push(String(e.message)));
    addEventListener("unhandledrejection", (e) => thrown.push(String(e.reason)));
    addEventListener("securitypolicyviolation", (e) => thrown.push(`blocked ${e.blockedURI}`));
"""
BOXES = """
    const marks = document.querySelectorAll(arguments[0]);
    return [...marks].map((each) => each.getBoundingClientRect())
                     .map((box) => [box.width, box.height]);
"""


def need_a_browser():
    """Skip where there is no browser; where everything must run, fail."""
    if not LACKING:
        return
    leave_out(f"this machine lacks {', '.join(LACKING)}")


class Browser:
    """Chromium, and what it asked the network for."""

    def __init__(self, profile):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        for each in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(each)
        options.binary_location = shutil.which("chromium")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(
            options=options, service=Service(executable_path=shutil.which("chromedriver"))
        )
        self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        self._shown = None

    def close(self):
        self.driver.quit()

    def show(self, path):
        """Open a report, unless it is open: drawing one takes seconds. What a test did to it
        stays, and `requests` has only what was asked for since they were asked for last."""
        if self._shown != (path, 1400, False):
            self.open(path)

    def open(self, path, *, width=1400, dark=False):
        """Open a report and wait until all its pictures are drawn."""
        from selenium.webdriver.support.wait import WebDriverWait

        self._shown = (path, width, dark)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.driver.get(Path(path).absolute().as_uri())
        WebDriverWait(self.driver, DRAWN_S).until(
            lambda driver: (
                driver.execute_script("return document.documentElement.dataset.drawn") == "yes"
                or driver.execute_script("return thrown.length")
            )
        )

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def text(self):
        return self.run("return document.body.innerText")

    def boxes(self, selector):
        """(width, height) of each mark that selector finds, px."""
        return [tuple(box) for box in self.run(BOXES, selector)]

    def pictures(self):
        """The ids of all pictures that are drawn."""
        return self.run(
            "return [...document.querySelectorAll('figure.picture')]"
            ".filter((f) => f.dataset.drawn === 'yes').map((f) => f.id)"
        )

    def requests(self):
        """Every address asked for since `open`, by any means."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

    def complaints(self):
        """What the console says and what was thrown."""
        return [each["message"] for each in self.driver.get_log("browser")] + self.run(
            "return thrown"
        )


def assert_stands_alone(browser):
    """Nothing was asked of anybody, and nothing went wrong."""
    asked = browser.requests()
    assert asked, "the performance log is empty, so it proves nothing"
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert browser.complaints() == []
