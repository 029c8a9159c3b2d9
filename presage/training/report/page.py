"""A report as one HTML page: nothing is fetched, nothing runs. Style, drawings and data are in the file."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from presage.training.report.blocks import Document
from presage.training.report.plot import COLOURS, stylesheet


def page(document: Document) -> str:
    """The whole page; every name in it is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def drawing(svg: Element) -> Markup:
        # ElementTree has escaped the names inside.
        return Markup(tostring(svg, encoding="unicode"))

    environment = Environment(
        loader=PackageLoader("presage.training.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["drawing"] = drawing
    environment.filters["width"] = lambda svg: svg.attrib["viewBox"].split()[2]
    template = environment.get_template("page.html.j2")
    return template.render(document=document, colours=COLOURS, style=Markup(stylesheet()))
