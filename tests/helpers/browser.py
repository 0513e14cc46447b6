"""Checks of HTML pages: links and pictures that are missing, errors in Chromium."""

import html.parser
import json
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


# Measures pages in one frame each.
WIDTHS = """<pre></pre><script>
(async () => {
  const found = [];
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style = "width: WIDTHpx; height: 800px; border: 0";
    frame.src = page;
    const loaded = new Promise(resolve => frame.onload = resolve);
    document.body.append(frame);
    await loaded;
    await new Promise(resolve => setTimeout(resolve, 300));
    found.push(frame.contentDocument.documentElement.scrollWidth);
    frame.remove();
  }
  document.querySelector("pre").textContent = JSON.stringify(found);
})();
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
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        frame.write_text(FRAME.format(page=path.resolve().as_uri(), width=width))
        return run_chromium(frame, milliseconds=5000)


def run_chromium(path, milliseconds):
    """Opens a page, without a frame, for some time of its scripts."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += ["--window-size=1600,1600", "--allow-file-access-from-files"]
    command += ["--enable-logging=stderr", "--log-level=0"]
    command += [f"--virtual-time-budget={milliseconds}", "--dump-dom"]
    return subprocess.run(
        [*command, path.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )


def widths(pages, width):
    """Opens pages one after another in Chromium; returns the widths of their contents.

    A page whose contents are wider than ``width`` scrolls sideways.
    """
    addresses = json.dumps([page.resolve().as_uri() for page in pages])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "widths.html"
        path.write_text(WIDTHS.replace("PAGES", addresses).replace("WIDTH", str(width)))
        found = run_chromium(path, milliseconds=2000 * len(pages)).stdout
    (found,) = re.findall(r"<pre>(\[.*?\])</pre>", found)
    return dict(zip(pages, json.loads(found), strict=True))


def console_errors(path, width):
    """Opens a page in Chromium; returns the messages on its console.

    Chromium does not say which are errors, and our pages write none.
    """
    result = open_page(path, width)
    assert "</html>" in result.stdout
    errors = re.findall(r"^.*:CONSOLE.*$", result.stderr, re.M)
    # The machine may be offline: MathJax comes from a server. The site's theme says
    # which color mode it chose. A slow machine uses what was preloaded late.
    ignored = re.compile(r"source: http|\[PST\]|was preloaded using link preload")
    return [line for line in errors if not ignored.search(line)]
