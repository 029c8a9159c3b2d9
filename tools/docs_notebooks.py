"""A hook of mkdocs: each notebook becomes a page of the documentation, with the outputs that it is stored with.

Links between pages and notebooks are those of the repository, where people read them too; here they lead to pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page `notebooks/NAME.md` and its pictures for each `notebooks/NAME.ipynb`."""
    for path in sorted((Path(config.config_file_path).parent / "notebooks").glob("*.ipynb")):
        names = {"unique_key": path.stem, "output_files_dir": path.stem}
        text, resources = MarkdownExporter().from_filename(str(path), resources=names)
        text = text.replace(' border="1" class="dataframe"', "")  # the theme styles tables without a class
        text = text.replace("](../docs/", "](../")
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, picture in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to notebooks to their pages."""
    return re.sub(r"\]\(\.\./(notebooks/\w+)\.ipynb", r"](\1.md", markdown)
