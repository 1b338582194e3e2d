"""Hooks of mkdocs: the README is the first page of the site; names of pages become links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


# Pictures keep a size at which their labels can be read, and scroll within the page. The title of
# the navigation does not cover its first entries.
CSS = """
.md-typeset p:has(> img[src$=".svg"]) { overflow-x: auto }
.md-typeset img[src$=".svg"] { max-width: none; width: 100%; min-width: 37.5rem }
@media screen and (min-width: 76.25em) {
  .md-nav--primary > .md-nav__title { position: static }
  .md-sidebar--secondary { width: 8.5rem }
}
"""


def home() -> str:
    """Return the README with links relative to the folder of the pages."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.replace("](fxpart/docs/", "](")
    # Files outside the site keep their names without a link.
    return re.sub(r"\[([^\]]+)\]\((?:CONTRIBUTING|CHANGELOG)\.md\)", r"`\1`", text)


def on_files(files: Any, config: Any) -> Any:
    """Add the README as index.md."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "index.md", content=home()))
    files.append(File.generated(config, "site.css", content=CSS))
    config.extra_css.append("site.css")
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn names of pages in code quotes into links, outside of code blocks."""
    if "/" in page.file.src_uri:
        return markdown
    names = {f.src_uri.removesuffix(".md") for f in files.documentation_pages()}
    names -= {page.file.src_uri.removesuffix(".md"), "errors", "index"}

    def linked(found: re.Match[str]) -> str:
        name = found[1]
        return (
            f"[{name.replace('_', ' ')}]({name}.md)" if name in names and "_" in name else found[0]
        )

    blocks = re.split(r"(?ms)(^```.*?^```)", markdown)
    return "".join(
        block if block.startswith("```") else re.sub(r"(?<!\[)`(\w+)`", linked, block)
        for block in blocks
    )
