"""Hooks of mkdocs: pages of the repository that stand outside of docs, and links that work both there and on the site.

README.md becomes the first page. A link to a file that is no page leads to the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {  # page of the site: file of the repository
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "examples/embedded/README.md": "examples/embedded/README.md",
}
LINK = re.compile(r"(!?\[[^\]]*\]\()(?![a-z]+:|#)([^)#\s]+)")


def repository() -> str:
    """The address that setup.py gives the project."""
    found = re.search(r'^REPOSITORY = "(.*)"$', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert found, "setup.py says no REPOSITORY"
    return found[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that stand outside of docs, and the pictures beside them."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for picture in sorted((ROOT / "examples" / "embedded").glob("*.png")):
        files.append(File.generated(config, picture.relative_to(ROOT).as_posix(), content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Every link of a page, from its place in the repository to that of the site."""
    here = page.file.src_uri
    source = PAGES.get(here, f"docs/{here}")
    pages = {file: name for name, file in PAGES.items()}

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        name = pages.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(name):
            return link[1] + posixpath.relpath(name, posixpath.dirname(here) or ".")
        if (ROOT / target).exists():
            return f"{link[1]}{repository()}/blob/HEAD/{target}"
        return link[0]  # mkdocs names it

    return LINK.sub(moved, markdown)
