"""A hook of mkdocs: each notebook becomes a page of the documentation, with the outputs that it is stored with."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page `notebooks/NAME.md` and its pictures for each `notebooks/NAME.ipynb`."""
    for path in sorted((Path(config.config_file_path).parent / "notebooks").glob("*.ipynb")):
        names = {"unique_key": path.stem, "output_files_dir": path.stem}
        text, resources = MarkdownExporter().from_filename(str(path), resources=names)
        text = text.replace(' border="1" class="dataframe"', "")  # the theme styles tables without a class
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, picture in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files
