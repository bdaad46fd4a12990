"""How Sphinx makes a site of these pages. `scripts/docs` runs it.

The pages are plain Markdown and read the same on a code host. The site's navigation is what
`index.md` links to: each of its sections becomes one part, with the pages in the order of the
links. A page without a link there is a warning, and a warning fails the build.
"""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent

project = "decod"
root_doc = "index"
extensions = ["myst_parser"]

# Links to headings are those of code hosts.
myst_heading_anchors = 4

# A block without a language is output, and holds no code.
highlight_language = "none"

html_theme = "furo"
html_title = "decod"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


def navigation_of(page: str) -> str:
    """Return the hidden tables of contents that follow from a page's sections and links."""
    parts = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        pages = re.findall(r"\]\(([\w/-]+)\.md\)", text)
        lines = ["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"]
        parts.append("\n".join(lines))
    return "\n\n" + "\n\n".join(parts) + "\n"


def link_outside_pages(page: str, folder: Path) -> str:
    """Return a page whose links to Markdown outside of these pages lead to a copy of the file.

    To Sphinx, a link to Markdown is one to a page of the site. Other files are copied anyway.
    """

    def outside(found: re.Match[str]) -> str:
        inside = (folder / found[1]).resolve().is_relative_to(DOCS)
        return found[0] if inside else f"](path:{found[1]})"

    return re.sub(r"\]\(([\w./-]+\.md)\)", outside, page)


def _adapt(_: object, page_name: str, source: list[str]) -> None:
    source[0] = link_outside_pages(source[0], (DOCS / page_name).parent)
    if page_name == root_doc:
        source[0] += navigation_of(source[0])


def setup(app: Any) -> None:
    """Sphinx calls this once it has read the settings."""
    app.connect("source-read", _adapt)
