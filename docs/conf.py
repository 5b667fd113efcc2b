"""How the documentation's site is built: ``make docs``. Text is in the pages; reference pages are made by
``generate_reference.py``, which is called here."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

from generate_reference import main as write_reference  # noqa: E402 - found by the line above

write_reference()
for _name in ("changelog", "contributing"):  # files of the repository's root, which `read_page` puts there
    (DOCS / f"{_name}.md").touch()

project = "dtrain"
author = "the authors of dtrain"
copyright = "the authors of dtrain; MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_site"]
nitpicky = False
"""Types of other libraries in signatures are no links: their inventories would need a network."""

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
suppress_warnings = ["myst.xref_ambiguous"]

default_role = "code"
"""What single backquotes in docstrings mean."""
autodoc_typehints = "description"
autodoc_member_order = "bysource"
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "dtrain"
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

_LINK = re.compile(r"\[([^\]]+)\]\(([^):#\s]+)(#[^)]*)?\)")
"""A link to a file, maybe to an anchor in it."""
_PAGES = {ROOT / "CONTRIBUTING.md": "contributing", ROOT / "CHANGELOG.md": "changelog", ROOT / "README.md": "index"}
"""Files of the repository that the site has as pages."""


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Take a page that is a file outside docs/ from there; and turn links to files beside docs/ into their names, since
    the site is read without the repository."""
    page = DOCS / f"{docname}.md"
    for file, name in _PAGES.items():
        if docname == name != "index":
            page = file
            source[0] = file.read_text()
            app.env.note_dependency(str(file))

    def words(match: re.Match[str]) -> str:
        label, anchor = match[1], match[3] or ""
        path = page.parent.joinpath(match[2]).resolve()
        if path in _PAGES:
            return f"[{label}]({_PAGES[path]}.md{anchor})"
        if path.is_relative_to(DOCS):
            return f"[{label}]({os.path.relpath(path, (DOCS / docname).parent)}{anchor})"
        if path.is_relative_to(ROOT):
            return f"{label} (`{path.relative_to(ROOT)}` in the repository)"
        return match[0]

    source[0] = _LINK.sub(words, source[0])


_ACCESSIBLE = (
    ('<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    ('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
    ('<aside class="toc-drawer', '<aside aria-label="On this page" class="toc-drawer'),
    ('<th class="head"><p></p></th>', "<td></td>"),
    ('<table class="docutils', '<table tabindex="0" class="docutils'),
    ("<pre>", '<pre tabindex="0">'),
    ('<noscript>\n<div class="admonition error">', '<h1>Search</h1>\n<noscript>\n<div class="admonition error">'),
)
"""What the theme's pages lack for screen readers (rules of axe), and what is written instead."""


_TEXTS = "_static/page_texts.js"
_SEARCHED_FROM_FILES = """
if (location.protocol === "file:") {
  window.fetch = async url => ({ text: async () => texts[url.replace(/^\\.\\//, "")] || "" });
}
"""
"""What the search page does where it is a file: a browser lets no file read another, and the search reads each
page that it has found for the lines around the word."""
_SEARCH_TOOLS = '<script src="_static/searchtools.js'


def complete_pages(app: Sphinx, error: Exception | None) -> None:
    """Add to the finished pages what the theme lacks for screen readers, and to the search what it reads from files."""
    if error is None and app.builder.format == "html":
        out, texts = Path(app.outdir), {}
        for page in sorted(out.rglob("*.html")):
            text = page.read_text()
            for lacking, complete in _ACCESSIBLE:
                text = text.replace(lacking, complete)
            if found := re.search(r'<article role="main".*?</article>', text, re.DOTALL):
                texts[page.relative_to(out).as_posix()] = found[0]
            if page.name == "search.html" and _TEXTS not in text:
                text = text.replace(_SEARCH_TOOLS, f'<script src="{_TEXTS}"></script>\n    {_SEARCH_TOOLS}')
            page.write_text(text)
        (out / _TEXTS).write_text(f"{{\nconst texts = {json.dumps(texts)};{_SEARCHED_FROM_FILES}}}\n")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read_page)
    app.connect("build-finished", complete_pages)
