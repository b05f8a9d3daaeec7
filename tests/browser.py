"""A headless Chromium, driven as by a user: mouse and keys.

It speaks the WebDriver protocol (W3C) of chromedriver.
"""

import json
import re
import shutil
import subprocess
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from helpers import need

NAMES = ("Tab", "Enter", "End", "Home", "Left", "Up", "Right", "Down")
KEYS = dict(zip(NAMES, "\ue004\ue007\ue010\ue011\ue012\ue013\ue014\ue015"))
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's name for a reference to one
BROWSERS = "chromium", "chromium-browser", "chrome", "google-chrome"
FLAGS = "headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1280,1000"


class Browser:
    def __init__(self):
        found = shutil.which("chromedriver") and any(map(shutil.which, BROWSERS))
        need(found, "Chromium with chromedriver", "chromium chromium-driver")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], **pipes)
        said = (re.search(r"successfully on port (\d+)", line) for line in self.driver.stdout)
        self.address = f"http://127.0.0.1:{next(filter(None, said))[1]}/session"
        wanted = {"browserName": "chrome", "goog:loggingPrefs": {"browser": "ALL"}}
        wanted["goog:chromeOptions"] = {"args": [f"--{flag}" for flag in FLAGS]}
        session = self.send("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self.address += f"/{session['sessionId']}"

    def send(self, how, where, content=None):
        body = None if content is None else json.dumps(content).encode()
        request = Request(self.address + where, body, method=how)
        try:
            with urlopen(request, timeout=60) as answer:
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
        """What ``text``, the body of a function, returns; ``all`` finds elements there."""
        helper = "const all = (selector, root = document) => [...root.querySelectorAll(selector)];"
        content = {"script": helper + text, "args": list(arguments)}
        return self.send("POST", "/execute/sync", content)

    def texts(self, selector):
        return self.script("return all(arguments[0]).map((each) => each.textContent)", selector)

    def text(self, selector):
        return self.texts(selector)[0]

    def element(self, selector, number=0):
        found = self.send("POST", "/elements", {"using": "css selector", "value": selector})
        return found[number][ELEMENT]

    def click(self, selector, number=0):
        self.send("POST", f"/element/{self.element(selector, number)}/click", {})

    def hover(self, selector, number=0):
        element = {ELEMENT: self.element(selector, number)}
        self.script("arguments[0].scrollIntoView({block: 'center'})", element)
        move = {"type": "pointerMove", "duration": 0, "origin": element, "x": 0, "y": 0}
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}}
        self.send("POST", "/actions", {"actions": [pointer | {"actions": [move]}]})

    def press(self, *names):
        kinds = "keyDown", "keyUp"
        keys = [{"type": kind, "value": KEYS[name]} for name in names for kind in kinds]
        self.send("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": keys}]})

    def focus(self, selector, number=0):
        self.script("arguments[0].focus()", {ELEMENT: self.element(selector, number)})

    def keys(self, selector, *names):
        self.focus(selector)
        self.press(*names)

    def dark(self, wanted):
        feature = {"name": "prefers-color-scheme", "value": "dark" if wanted else "light"}
        media = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [feature]}}
        self.send("POST", "/goog/cdp/execute", media)

    def complaints(self):
        """What the console has printed since the last time."""
        return [entry["message"] for entry in self.send("POST", "/se/log", {"type": "browser"})]
