"""Sphinx's settings for the documentation site: `make docs` builds it into build/docs."""

import gc
import sys
from pathlib import Path

# A build creates objects and keeps them: collecting garbage takes a quarter of its time and finds almost nothing.
gc.disable()
DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "site"))

import paceline  # noqa: E402

project = "Paceline"
author = "the Paceline authors"
version = release = paceline.__version__
html_title = f"Paceline {version}"
html_short_title = "Paceline"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "fences",
    "reference",
    "sources",
    "surroundings",
    "versions",
]
exclude_patterns = ["site", "static", "pictures"]

myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "off"
nb_merge_streams = True
maximum_signature_line_length = 100
smartquotes = False  # they make one dash of the two of a flag

autodoc_inherit_docstrings = False  # a hook that a callback defines is described once, at the base class
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
toc_object_entries_show_parents = "hide"

templates_path = ["site/templates"]
html_theme = "pydata_sphinx_theme"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "site" / "scorer.js")
html_js_files = ["site.js"]
html_logo = html_favicon = "static/logo.svg"
html_context = {"default_mode": "auto"}
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.output) > div.highlight > pre"
html_theme_options = {
    "logo": {"text": f"Paceline {version}", "alt_text": "Paceline"},
    "navbar_align": "left",
    "navbar_end": ["version-switch", "theme-switcher"],
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
