"""Tokenisation of texts that replaces every identifier by its kind.

Ticket numbers, UUIDs, commit hashes, paths, e-mail addresses and time stamps are new in every workflow: as terms they
would identify one workflow instead of generalising to the next. So `ticket 483920` reads `ticket <number of 6 digits>`.
A single digit stays, because `exit code 0` and `exit code 1` are different outcomes, and a path keeps the suffix of its
file. Identifiers that no pattern matches (a customer's name) are removed by the term counts of `sketch.py`.
"""

from __future__ import annotations

import re
from typing import Final

KIND: Final = "\0"
"""First character of a kind token; text is split at this character, so no text can forge such a token."""

_MOST_DIGITS: Final = 12
_LONGEST_SUFFIX: Final = 5

_CHUNK: Final = re.compile(r"[^\s\0]+|\n")
_HAS_IDENTIFIER: Final = re.compile(r"[\d/\\@]")
_SCRIPT: Final = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # written without spaces: a character is a token
_PLAIN: Final = rf"[{_SCRIPT}]|[^\W{_SCRIPT}]+|[^\w\s]+"
_WORD: Final = re.compile(_PLAIN)

# Matched within a chunk without white space, in lower case. The first alternative that matches wins. What may begin at
# each character has a bound and gives nothing back (`++`): a client's `1-1-1-...` took the square of its length.
_PART: Final = r"[\w.@+-]{1,96}+"  # of a path
_TOKEN: Final = re.compile(
    rf"""
      (?P<url>    [a-z][a-z0-9+.-]{{0,31}}+://[^<>"')\]]+ )
    | (?P<email>  [\w.+-]{{1,64}}+@[\w-]{{1,63}}+(?:\.[\w-]+)+ )
    | (?P<secret> \beyj[\w-]{{9,256}}+(?:\.[\w-]+){{1,2}}             # a JSON web token
                | (?<![\w+/])(?=[a-z+/]*\d)[\w+/]{{20,}}={{1,2}} )     # base64, where it is padded
    | (?P<uuid>   \b[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}\b )
    | (?P<time>   \b\d{{4}}-\d\d-\d\d(?:t\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:z|[+-]\d\d:?\d\d)?)?\b
                | \b\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?\b )
    | (?P<path>   (?:\b[a-z]:)?[\\/](?:{_PART}[\\/])+[\w.@+-]*        # absolute, at least one folder
                | \b{_PART}(?:[\\/]{_PART}){{2,}}                     # relative, at least two separators
                | \b{_PART}[\\/][\w@+-]{{1,96}}+\.[a-z]{{1,{_LONGEST_SUFFIX}}}\b )
    | (?P<hex>    \b0x[0-9a-f]+\b | \b(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{{6,}}\b )
    | (?P<id>     \b(?=\d*[^\W\d])(?:(?=(?:[^\W\d]*\d){{3}})\w{{5,}}|(?=[^\W\d]*\d)\w{{20,}})\b )
    | (?P<number> \b\d[\d,._]*\b )
    | {_PLAIN}
    """,
    re.VERBOSE,
)


def chunks_of(text: str) -> list[str]:
    """The lower-case text split at white space, line breaks kept; `tokens_of_chunk` splits further."""
    return _CHUNK.findall(text.lower())


def tokens_of_chunk(chunk: str) -> list[str]:
    """The tokens of a chunk; they depend on the chunk alone, so callers may cache them."""
    if chunk.isalpha() and chunk.isascii():
        return [chunk]
    if _HAS_IDENTIFIER.search(chunk) is None:
        return _WORD.findall(chunk) or [chunk]
    return [_token(match) for match in _TOKEN.finditer(chunk)]


def _token(match: re.Match[str]) -> str:
    kind, token = match.lastgroup, match.group()
    if kind is None or (kind == "number" and len(token) == 1):
        return token
    if kind == "number":
        return f"{KIND}number {min(len(token), _MOST_DIGITS)}"
    if kind == "path":
        name, _, suffix = token.rpartition(".")
        return f"{KIND}path {suffix if name and suffix.isalpha() and len(suffix) <= _LONGEST_SUFFIX else ''}"
    return KIND + kind
