"""The page at `/`: what the JSON routes tell, for a browser. It holds no data itself, so it needs no key.

Names in the data come from clients. The page writes them as text alone, and the browser may run, load and send nothing
but what is in the page and to the server that it came from.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse

_HTML: Final = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")


def _source(element: str) -> str:
    """The hash of the page's only such element, as the policy names it."""
    content = re.findall(rf"<{element}>(.*?)</{element}>", _HTML, re.DOTALL)
    (digest,) = (sha256(text.encode()).digest() for text in content)
    return f"{element}-src 'sha256-{b64encode(digest).decode()}'"


HEADERS: Final = {
    "content-security-policy": f"default-src 'none'; {_source('script')}; {_source('style')}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


async def overview_page(_: Request) -> HTMLResponse:
    """The page."""
    return HTMLResponse(_HTML, headers=HEADERS)
