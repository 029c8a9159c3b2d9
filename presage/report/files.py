"""The files of a report: `metrics.json`, `report.html`, `report.md` and the pictures of the Markdown.

The page fetches nothing and runs nothing: style, drawings and data are in the file. Every file is written under another
name and renamed, so a full disk leaves the earlier file.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Final
from xml.etree.ElementTree import tostring

from presage.atomic_file import write_file
from presage.errors import OutputError
from presage.predictor_kinds import KINDS
from presage.predictors.common.artefact import CONFIG_FILE
from presage.report import replay, study
from presage.report.blocks import Block, Document, Facts, Folded, Metrics, Picture, Section, Table, Text
from presage.report.plot import COLOURS, standalone, stylesheet
from presage.wording import counted

METRICS_FILE: Final = "metrics.json"
PAGE_FILE: Final = "report.html"
MARKDOWN_FILE: Final = "report.md"


def write_metrics(folder: Path, metrics: Metrics) -> Path:
    """Write `metrics.json` into a folder, created if it does not exist; raises OutputError if it cannot be written."""
    text = json.dumps(metrics, indent=1, ensure_ascii=False, allow_nan=False)
    return write_file(Path(folder) / METRICS_FILE, text.encode() + b"\n")


def write_report(folder: Path, metrics: Metrics) -> list[Path]:
    """Write page, Markdown and pictures into a folder, from the metrics alone; raises OutputError if that fails."""
    pages = document(metrics)
    folder = Path(folder)
    files = {f"{picture.name}.svg": standalone(picture) for picture in pages.pictures()}
    files |= {MARKDOWN_FILE: markdown(pages), PAGE_FILE: page(pages)}
    return [write_file(folder / name, text.encode()) for name, text in files.items()]


def report_files(folder: Path) -> list[Path]:
    """The files of the report in a folder: page, Markdown, pictures."""
    return [folder / PAGE_FILE, folder / MARKDOWN_FILE, *sorted(folder.glob("*.svg"))]


def check_folder(folder: Path, option: str, force: bool = True) -> None:
    """Raise OutputError unless results can be written there: it is a file, lies in one, or is protected; without
    `force`, also if it holds results of an earlier run."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise OutputError(f"{option} {folder}: {there} is a file; a folder is wanted: choose another name")
    if not os.access(there, os.W_OK):
        raise OutputError(f"{option} {folder}: {there} cannot be written to: choose another folder")
    earlier = [name for name in (CONFIG_FILE, METRICS_FILE, PAGE_FILE) if (folder / name).exists()]
    if earlier and not force:
        raise OutputError(
            f"{option} {folder}: holds {' and '.join(earlier)} of an earlier run: give --force to replace them, or "
            "choose another folder"
        )


def document(metrics: Metrics) -> Document:
    """The report of a training, an evaluation or a study, opened by the comparisons lost if there are any."""
    others = {"study": study.document, "replay": replay.document}
    kind = metrics["kind"]
    make = others[kind] if kind in others else KINDS[kind].report
    made: Document = make(metrics)
    lost = metrics.get("behind")
    if not lost:
        return made
    rows = [
        [
            comparison["baseline"],
            comparison["at"],
            f"{comparison['by']:.4g}",
            f"{comparison['ci95'][0]:.4g} to {comparison['ci95'][1]:.4g}",
        ]
        for comparison in lost
    ]
    text = (
        "Each row is a baseline that beats this predictor: the paired 95 % interval of the difference, by bootstrap, "
        "lies above 0. Use the baseline there, or improve the predictor first."
    )
    table = Table(["baseline", "where", "better by", "95 %"], rows, frozenset({0, 1}))
    names = ", ".join(dict.fromkeys(comparison["baseline"] for comparison in lost))
    times = counted(len(lost), "comparison")
    lead = f"LOST: in {times} a baseline ({names}) is better beyond the 95 % interval. {made.lead}"
    section = Section("Where a baseline is better", [Text(text), table])
    return dataclasses.replace(made, lead=lead, parts=[section, *made.parts])


def page(document: Document) -> str:
    """The whole page; every name in it is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("presage.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # ElementTree has escaped the names inside.
    environment.filters["drawing"] = lambda svg: Markup(tostring(svg, encoding="unicode"))
    environment.filters["width"] = lambda svg: svg.attrib["viewBox"].split()[2]
    template = environment.get_template("page.html.j2")
    return template.render(document=document, colours=COLOURS, style=Markup(stylesheet()))


def markdown(document: Document) -> str:
    """The whole report; pictures are files beside it."""
    cards = [f"- **{_plain(card.value)}** {_plain(card.label)}; {_plain(card.beside)}" for card in document.cards]
    verdict = f"**{_plain(document.verdict)}**" if document.verdict else ""
    parts = [f"# {_plain(document.title)}", verdict, _plain(document.lead), "\n".join(cards)]
    for section in document.sections:
        parts.append(f"## {_plain(section.title)}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block) -> str:
    match block:
        case Text():
            return _plain(block.text)
        case Table():
            return _table(block)
        case Facts():
            return "\n".join(f"- {_plain(label)}: {_plain(value)}" for label, value in block.facts.items())
        case Picture():
            return f"![{_plain(block.caption)}]({block.name}.svg)"
        case Folded():
            return "\n\n".join([f"### {_plain(block.title)}", *map(_block, block.blocks)])


def _table(table: Table) -> str:
    rule = ["---" if column in table.words else "---:" for column in range(len(table.head))]
    rows = [table.head, rule, *table.rows]
    return "\n".join("| " + " | ".join(_cell(cell, row[0] in table.marked) for cell in row) + " |" for row in rows)


def _cell(text: str, marked: bool) -> str:
    plain = _plain(text).replace("|", "\\|")
    return f"**{plain}**" if marked and plain else plain


def _plain(text: str) -> str:
    """Text without HTML, links or line breaks, whatever the name of an agent."""
    line = " ".join(text.split())
    for character, harmless in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("](", "]\\("), ("`", "\\`")):
        line = line.replace(character, harmless)
    return line
