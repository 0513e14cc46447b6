"""Checks of HTML pages: links and pictures that are missing, errors in Chromium."""

import html.parser
import re
import shutil
import subprocess
import tempfile
import urllib.parse
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DESKTOP, PHONE = 1400, 400
# A window of Chromium is at least 500 pixels wide, so a page is opened in a frame; its
# elements then replace those around the frame.
FRAME = """<iframe src="{page}" style="width: {width}px; height: 1600px; border: 0">
</iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => setTimeout(() => document.documentElement.replaceWith(
  frame.contentDocument.documentElement.cloneNode(true)), 3000);
</script>"""


class _Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.targets, self.names = [], set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.names |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        key = {"a": "href", "link": "href", "img": "src", "script": "src"}.get(tag)
        if attrs.get(key):
            self.targets.append(attrs[key])


def dead_links(pages):
    """Returns the links, pictures and scripts within a folder that do not exist."""
    parsed = {path.resolve(): _Page(path) for path in pages}
    dead = []
    for path, page in parsed.items():
        for target in page.targets:
            parts = urllib.parse.urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / urllib.parse.unquote(parts.path)).resolve()
            file = file if parts.path else path
            known = file not in parsed or parts.fragment in {"", *parsed[file].names}
            if not file.exists() or not known:
                dead.append(f"{path.name}: {target}")
    return dead


def open_page(path, width):
    """Opens a page in Chromium; its output is the page after its scripts have run."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += ["--window-size=1600,1600", "--allow-file-access-from-files"]
    command += ["--enable-logging=stderr", "--log-level=0"]
    command += ["--virtual-time-budget=5000", "--dump-dom"]
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        frame.write_text(FRAME.format(page=path.resolve().as_uri(), width=width))
        return subprocess.run(
            [*command, frame.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )


def console_errors(path, width):
    """Opens a page in Chromium; returns the messages on its console.

    Chromium does not say which are errors, and our pages write none.
    """
    result = open_page(path, width)
    assert "</html>" in result.stdout
    errors = re.findall(r"^.*:CONSOLE.*$", result.stderr, re.M)
    # The machine may be offline: MathJax comes from a server. The site's theme says
    # which color mode it chose.
    return [line for line in errors if not re.search(r"source: http|\[PST\]", line)]
