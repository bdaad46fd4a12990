"""The site of the documents: it builds, leads nowhere in vain, and asks no other host."""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from typing_extensions import override

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not all(find_spec(name) for name in ("sphinx", "myst_parser", "furo")),
        reason="no Sphinx with its theme: pip install -e '.[docs]'",
    ),
]

_LOADS = {"src", "srcset", "data", "poster", "action"}
"""Attributes by which a page loads something, or sends it somewhere."""

_LOADING_LINKS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "manifest"}

_NAMED_IN_STYLES = re.compile(r"""(?:url\(|@import|href=)\s*['"]?([^'")\s]+)""")
"""What styles and pictures load."""


class Page(HTMLParser):
    """What a built page loads, where it leads, and which places it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.navigation: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        self.loaded += [value for name, value in given.items() if name in _LOADS]
        if tag == "link" and set(given.get("rel", "").split()) & _LOADING_LINKS:
            self.loaded.append(given["href"])
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])
            if "reference" in given.get("class", "").split():
                self.navigation.add(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `scripts/docs` does."""
    out = tmp_path_factory.mktemp("site")
    script = (ROOT / "scripts/docs").read_text(encoding="utf-8")
    asked = re.search(
        r"^exec \.venv/bin/python (-m sphinx .+?) \"\$@\" docs build/docs$", script, re.M
    )
    assert asked, "scripts/docs has no line that runs Sphinx"
    command = [sys.executable, *asked[1].split(), str(DOCS), str(out)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def is_outside(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def test_no_page_loads_anything_from_outside(site: Path, pages: dict[Path, Page]) -> None:
    outside = [
        f"{path.relative_to(site)}: {address}"
        for path, page in pages.items()
        for address in page.loaded
        if is_outside(address)
    ]
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = path.read_text(encoding="utf-8")
        named = re.findall(_NAMED_IN_STYLES, text)
        outside += [f"{path.name}: {name}" for name in named if is_outside(name)]
    assert not outside


def _targets(site: Path, pages: dict[Path, Page]) -> Iterator[tuple[Path, str, Path, str]]:
    for path, page in pages.items():
        for link in page.links:
            address, place = urldefrag(link)
            if is_outside(address):
                continue
            goal = (path.parent / unquote(address)).resolve() if address else path
            yield path.relative_to(site), link, goal, unquote(place)


def test_every_link_within_the_site_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken, followed = [], 0
    for path, link, goal, place in _targets(site, pages):
        followed += 1
        if not goal.is_file() or (place and goal in pages and place not in pages[goal].places):
            broken.append(f"{path}: {link}")
    assert not broken
    assert followed > 1000


def test_every_page_is_in_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    """The navigation is on each page; the first page has that of all."""
    written = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    first = pages[site / "index.html"]
    named = {Path(urldefrag(link).url) for link in first.navigation if "#" not in link}
    assert written - {Path("index.html")} <= named
    text = (site / "index.html").read_text(encoding="utf-8")
    captions = re.findall(r'<span class="caption-text">(.+?)</span>', text)
    assert captions == ["Volunteer", "Organiser", "Developer"]
