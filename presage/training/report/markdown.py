"""A report as Markdown: for a terminal, a pull request, a diff against the last one."""

from __future__ import annotations

from presage.training.report.blocks import Block, Document, Facts, Folded, Picture, Row, Table, Text


def markdown(document: Document) -> str:
    """The whole report; pictures are files beside it."""
    parts = [f"# {_plain(document.title)}", _plain(document.lead)]
    if document.cards:
        parts.append(
            "\n".join(
                f"- **{_plain(card.value)}** {_plain(card.label)}; {_plain(card.beside)}" for card in document.cards
            )
        )
    for section in document.sections:
        parts.append(f"## {_plain(section.title)}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def picture_file(picture: Picture) -> str:
    """Name of the file of a picture."""
    return f"{picture.name}.svg"


def _block(block: Block) -> str:
    match block:
        case Text():
            return _plain(block.text)
        case Table():
            return _table(block)
        case Facts():
            return "\n".join(f"- {_plain(label)}: {_plain(value)}" for label, value in block.facts.items())
        case Picture():
            return f"![{_plain(block.caption)}]({picture_file(block)})"
        case Folded():
            return "\n\n".join([f"### {_plain(block.title)}", *map(_block, block.blocks)])


def _table(table: Table) -> str:
    rule = Row(["---" if column in table.words else "---:" for column in range(len(table.head))])
    rows = [Row(table.head), rule, *table.rows]
    return "\n".join("| " + " | ".join(_cell(cell, row.marked) for cell in row.cells) + " |" for row in rows)


def _cell(text: str, marked: bool) -> str:
    plain = _plain(text).replace("|", "\\|")
    return f"**{plain}**" if marked and plain else plain


def _plain(text: str) -> str:
    """Text that is nothing but text: no HTML, no link, no line of its own, whatever an agent is called."""
    line = " ".join(text.split())
    for character, harmless in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("](", "]\\("), ("`", "\\`")):
        line = line.replace(character, harmless)
    return line
