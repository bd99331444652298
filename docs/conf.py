"""How Sphinx draws the site.  `make docs` prepares the pages and calls it: see tests/packaging/site.py."""

from __future__ import annotations

import tomllib
from pathlib import Path

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = _PROJECT["name"]
version = release = _PROJECT["version"]
copyright = f"{_PROJECT['authors'][0]['name']}, {_PROJECT['license']} licence"

extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 4  # as deep as pages link: errors.md#leaselosterror
highlight_language = "text"  # a block that does not say what it is in is in nothing
language = "en-GB"
smartquotes_action = "qe"  # quotes and ellipses; two hyphens begin an option

html_theme = "furo"
html_title = project
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}

copybutton_prompt_text = "$ "  # what is copied has none
