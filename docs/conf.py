"""How the documentation's site is built: ``make docs``. Text is in the pages; reference pages are made by
``generate_reference.py``."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

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

autodoc_typehints = "description"
autodoc_member_order = "bysource"
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "dtrain"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
