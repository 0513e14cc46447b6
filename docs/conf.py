"""Configuration of the documentation site, which ``make docs`` builds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import pages

import relattn

project = "relattn"
author = "the relattn authors"
version = release = relattn.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "sphinx_book_theme"
html_title = "relattn"
html_static_path = ["static"]
html_css_files = ["site.css"]
# Light or dark as the reader's system is.
html_context = {"default_mode": "auto"}
html_theme_options = {
    "repository_url": pages.URL,
    # The sidebar has the search.
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_repository_button": True,
}

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# The notebooks are stored with their outputs.
nb_execution_mode = "off"

default_role = "py:obj"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Source"]
napoleon_use_ivar = True
napoleon_attr_annotations = False
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True


def setup(app):
    """Connects the functions that write pages and rewrite links."""
    app.connect("builder-inited", pages.write_pages)
    app.connect("source-read", pages.rewrite_source)
    app.connect("autodoc-process-docstring", pages.escape_docstring)
    app.connect("autodoc-process-signature", pages.shorten_signature)
