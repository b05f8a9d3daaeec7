"""A headless browser, for tests of pages and pictures."""

import json
import shutil
import subprocess
from urllib.parse import unquote

from helpers import need

CHROMIUM = "chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic"
CHROMIUM += " --no-first-run --disable-background-networking --disable-component-update --dump-dom"
# Put before the page's own script.
BEFORE = """<script>
const wrong = [], all = (selector, root = document) => [...root.querySelectorAll(selector)];
const texts = (selector) => all(selector).map((each) => each.textContent);
const lit = (selector) => all(selector).flatMap((each, i) => each.matches(".lit") ? [i] : []);
onerror = (message) => wrong.push(message);
document.onsecuritypolicyviolation = (event) => wrong.push(event.blockedURI);
</script><title>"""


def browse(file, script):
    """What ``script`` returns at the end of the page ``file``, on which nothing goes wrong."""
    need(shutil.which("chromium"), "Chromium", "chromium")
    page = file.with_name(f"{file.stem} watched.html")
    after = f"""<script>document.documentElement.textContent =
        "@" + encodeURIComponent(JSON.stringify([(() => {{{script}}})(), wrong])) + "@"</script>"""
    page.write_text(file.read_text("utf-8").replace("<title>", BEFORE, 1) + after, "utf-8")
    profile = f"--user-data-dir={file.with_name('profile')}"
    command = [*CHROMIUM.split(), profile, page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    result, wrong = json.loads(unquote(shown.split("@")[1]))
    assert wrong == []
    return result
