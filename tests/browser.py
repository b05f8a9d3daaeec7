"""A headless Chromium, driven by the WebDriver protocol (W3C) that chromedriver speaks, as a user would: mouse and keys."""

import base64
import json
import re
import shutil
import subprocess
from urllib.error import HTTPError
from urllib.request import Request, urlopen

KEYS = {
    "Right": "\ue014",
    "Left": "\ue012",
    "Up": "\ue013",
    "Down": "\ue015",
    "Home": "\ue011",
    "End": "\ue010",
    "Tab": "\ue004",
    "Enter": "\ue007",
}
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's name for a reference to one


class Browser:
    def __init__(self):
        program = shutil.which("chromedriver")
        assert program, "these tests drive a browser: apt-get install chromium chromium-driver"
        self.driver = subprocess.Popen(
            [program, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        port = next(
            found[1]
            for line in self.driver.stdout
            if (found := re.search(r"successfully on port (\d+)", line))
        )
        self.address = f"http://127.0.0.1:{port}/session"
        options = {
            "args": [
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--window-size=1280,1000",
            ]
        }
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self.address += (
            "/" + self.send("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        )

    def send(self, how, where, content=None):
        body = None if content is None else json.dumps(content).encode()
        try:
            with urlopen(
                Request(
                    self.address + where, body, {"Content-Type": "application/json"}, method=how
                ),
                timeout=60,
            ) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def close(self):
        self.send("DELETE", "")
        self.driver.terminate()
        self.driver.wait()

    def open(self, file):
        self.send("POST", "/url", {"url": file.resolve().as_uri()})

    def script(self, text, *arguments):
        """What ``text``, the body of a function, returns."""
        return self.send("POST", "/execute/sync", {"script": text, "args": list(arguments)})

    def texts(self, selector):
        return self.script(
            "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)",
            selector,
        )

    def text(self, selector):
        return self.texts(selector)[0]

    def element(self, selector, number=0):
        return self.send("POST", "/elements", {"using": "css selector", "value": selector})[number][
            ELEMENT
        ]

    def click(self, selector, number=0):
        self.send("POST", f"/element/{self.element(selector, number)}/click", {})

    def hover(self, selector, number=0):
        element = self.element(selector, number)
        self.script("arguments[0].scrollIntoView({block: 'center'})", {ELEMENT: element})
        move = [
            {"type": "pointerMove", "duration": 0, "origin": {ELEMENT: element}, "x": 0, "y": 0}
        ]
        pointer = {
            "type": "pointer",
            "id": "mouse",
            "parameters": {"pointerType": "mouse"},
            "actions": move,
        }
        self.send("POST", "/actions", {"actions": [pointer]})

    def press(self, *names):
        keys = [
            {"type": kind, "value": KEYS[name]} for name in names for kind in ("keyDown", "keyUp")
        ]
        self.send("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": keys}]})

    def focus(self, selector, number=0):
        self.script("arguments[0].focus()", {ELEMENT: self.element(selector, number)})

    def dark(self, wanted):
        media = {
            "features": [{"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}]
        }
        self.send(
            "POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": media}
        )

    def complaints(self):
        """What the console has printed since the last time."""
        return [entry["message"] for entry in self.send("POST", "/se/log", {"type": "browser"})]

    def picture(self):
        return base64.b64decode(self.send("GET", "/screenshot"))
