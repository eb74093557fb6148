"""Sphinx: `make docs` builds this folder into build/site; every warning is an error.

The pages are plain Markdown, and their links are those of a checkout, so that they can be read in
one. Pages that live elsewhere in it (`PAGES`) are copied into ``checkout/`` first, and `on_site`
turns each link into one between pages of the site. Notebooks are shown as they were committed.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

import dask_gpuipc

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
PAGES = {
    "CHANGELOG.md": "checkout/changelog.md",
    "CONTRIBUTING.md": "checkout/contributing.md",
    "benchmarks/README.md": "checkout/benchmarks.md",
    **{
        f"notebooks/{path.name}": f"checkout/notebooks/{path.name}"
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    },
}
SAME = {
    "README.md": "getting-started.md",
    "examples/cpp/README.md": "sharing-cpp.md",
    "benchmarks/results/README.md": "checkout/benchmarks.md",
}
"""Read on the site as another page."""
LINK = re.compile(r"\[([^\[\]]*)\]\(([^()#\s]+)(#[^()\s]*)?\)")

project = "dask-gpuipc"
author = copyright = "dask-gpuipc developers"  # noqa: A001 -- Sphinx's name
version = release = dask_gpuipc.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"dask-gpuipc {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
smartquotes = False  # options begin with two hyphens

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["cupy", "cuda"]
napoleon_google_docstring = False
napoleon_use_rtype = False


def copy_pages(_app: Sphinx) -> None:
    """Bring the pages of the rest of the checkout here; what has not changed keeps its time."""
    for old in {*(DOCS / "checkout").rglob("*.*")} - {DOCS / copy for copy in PAGES.values()}:
        old.unlink()
    for page, copy in PAGES.items():
        (DOCS / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / page, DOCS / copy)


def on_site(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Make the links of a page lead to where their targets are on the site."""
    homes = {copy.rpartition(".")[0]: ROOT / page for page, copy in PAGES.items()}
    folder = homes.get(docname, DOCS / docname).parent
    here = (DOCS / docname).parent

    def moved(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target:
            return link[0]
        path = (folder / target).resolve()
        name = str((path / "README.md" if path.is_dir() else path).relative_to(ROOT))
        place = {**PAGES, **SAME}.get(name)
        if place is None and path.is_dir():
            return text  # nothing to lead to: the site has no folders
        return f"[{text}]({os.path.relpath(DOCS / place if place else path, here)}{anchor})"

    source[0] = LINK.sub(moved, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("config-inited", lambda app, _config: copy_pages(app))
    app.connect("source-read", on_site)
