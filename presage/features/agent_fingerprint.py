"""Fingerprints of system prompts: the same for all requests of an agent, whatever user, date or path stands in them.

Identifiers are masked (`text_tokens.py`), and so are names: capitalised words within a sentence, unless they
name the role (`You are the Planner`). What remains is compared

- exactly, by a digest of the masked text;
- by its head, the first `HEAD_TOKENS` tokens, where prompts name the role;
- by similarity: the Jaccard index of three-token shingles, estimated from the `SKETCH` smallest hashes of each
  (bottom-k sketch: Cohen and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007);
- by its plain words, since two roles with one boilerplate differ in a few of them.

Fingerprints have no key: names of agents must be the same after a restart, on each replica and in an artefact of
names. So a guessed system prompt can be tested, but none can be read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from secrets import token_bytes
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from presage.features.text_tokens import KIND, tokens_of_chunk

LONGEST_SYSTEM: Final = 4096
"""Characters of a system prompt that are read: its head."""
HEAD_TOKENS: Final = 16
SKETCH: Final = 64
LEAST_SIMILARITY: Final = 0.7
"""Of two prompts of one agent. Prompts of one template with other users, dates and paths have .8 and more."""
FEW_WORDS: Final = 6
"""Two prompts that differ in so few plain words, and in no more, are of two roles."""

_MOST_PIECES: Final = 8192
_KEY: Final = token_bytes(16)
_BULLETS: Final = frozenset({"-", "*", "#", "##", "###", ">", "|"})
_ROLE_WORDS: Final = frozenset({"are", "as", "role", "named", "called", "agent"})
_ROLE_REACH: Final = 5
"""Chunks after such a word whose capitals are kept."""
_DAYS: Final = re.compile(
    r"(mon|tues?|wed(nes)?|thu(rs)?|fri|sat(ur)?|sun)(day)?|am|pm|utc"
    r"|(jan|febr?)(uary)?|mar(ch)?|apr(il)?|june?|july?|aug(ust)?|(sept?|octo?|nov|dec)(em)?(ber)?"
)
_LONGEST_DAY: Final = 9
_NUMBER: Final = re.compile(rf"\d|{KIND}number .*")
_NAME: Final = KIND + "name"
_DAY: Final = KIND + "time"
_A: Final = np.uint64(0x9E3779B97F4A7C15)
_B: Final = np.uint64(0xC2B2AE3D27D4EB4F)


@dataclass(frozen=True)
class Fingerprint:
    """What is kept of a system prompt.

    Attributes:
        exact: digest of the masked text, 12 hexadecimal digits.
        head: digest of its head, 12 hexadecimal digits.
        sketch: at most SKETCH smallest hashes of its shingles, 32 bits, rising.
        words: hashes of its plain words.
    """

    exact: str
    head: str
    sketch: tuple[int, ...]
    words: frozenset[int] = frozenset()

    @cached_property
    def _hashes(self) -> frozenset[int]:
        return frozenset(self.sketch)

    def similarity(self, other: Fingerprint) -> float:
        """Estimated Jaccard index of the shingles."""
        if self.exact == other.exact:
            return 1.0
        union = sorted(self._hashes | other._hashes)[:SKETCH]
        both = self._hashes & other._hashes
        return sum(shingle in both for shingle in union) / max(1, len(union))

    def same_agent(self, other: Fingerprint) -> bool:
        """Whether both are of one agent, as far as two prompts show."""
        if self.exact == other.exact:
            return True
        return self.resembles(other) and not 0 < len(self.words ^ other.words) <= FEW_WORDS

    def resembles(self, other: Fingerprint) -> bool:
        """Whether both have one head and similar text."""
        return self.head == other.head and self.similarity(other) >= LEAST_SIMILARITY


Pieces = dict[bytes, tuple[tuple[int, ...], tuple[int, ...]]]
"""Hashes of the tokens of a sentence, and of its plain words, by its digest."""


@dataclass(frozen=True, eq=False)
class MaskedPrompt:
    """A system prompt as hashes of its masked tokens.

    Attributes:
        exact, head: as in a fingerprint.
        hashes: of all tokens, in order, 32 bits.
    """

    exact: str
    head: str
    hashes: NDArray[np.uint64]
    words: frozenset[int]

    def fingerprint(self) -> Fingerprint:
        """Its fingerprint."""
        return Fingerprint(self.exact, self.head, _sketch(self.hashes), self.words)


def masked_prompt(system: str, known: Pieces) -> MaskedPrompt:
    """Masks a system prompt.

    Args:
        known: sentences seen before; prompts of one template differ in few. Sentences are added.
    """
    if len(known) >= _MOST_PIECES:
        known.clear()
    head: list[str] = []
    hashes: list[int] = []
    words: set[int] = set()
    text = system[:LONGEST_SYSTEM].replace(". ", ".\n").replace("! ", "!\n").replace("? ", "?\n")
    for piece in text.split("\n"):
        if len(head) < HEAD_TOKENS:
            tokens = masked(piece, role=True)
            head += tokens
            piece_hashes = _hashed(tokens)
        else:
            digest = blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=12, key=_KEY).digest()
            remembered = known.get(digest)
            piece_hashes = known[digest] = _hashed(masked(piece)) if remembered is None else remembered
        hashes += piece_hashes[0]
        words.update(piece_hashes[1])
    sequence = np.array(hashes, np.uint64)
    exact = blake2b(sequence.tobytes(), digest_size=6).hexdigest()
    return MaskedPrompt(exact, _hex("\0".join(head[:HEAD_TOKENS])), sequence, frozenset(words))


def masked(sentence: str, *, role: bool = False) -> list[str]:
    """Lower-case tokens of a sentence, each identifier, date and name as its kind.

    Args:
        role: the sentence may name the agent's role, so capitals after `are`, `as` and the like stay.
    """
    tokens: list[str] = []
    starts, reach = True, 0
    for chunk in sentence.split():
        lower = chunk.lower()
        if chunk in _BULLETS:
            tokens.append(chunk)
            continue
        bare = lower if lower.isalpha() else lower.strip(".,;:!?()[]\"'*`")
        token = ""
        if len(bare) <= _LONGEST_DAY and _DAYS.fullmatch(bare):
            token = _DAY
            while tokens and _NUMBER.fullmatch(tokens[-1]):  # the day before its month
                tokens.pop()
        elif bare[:1].isdigit() and (tokens_of_chunk(bare) == [_DAY] or (tokens[-1:] == [_DAY] and bare.isdigit())):
            token = _DAY
        elif not starts and reach <= 0 and chunk[0].isupper():
            token = _NAME
        if not token:
            tokens += tokens_of_chunk(lower)
        elif tokens[-1:] != [token]:  # names and dates have several words
            tokens.append(token)
        reach = _ROLE_REACH if role and bare in _ROLE_WORDS else reach - 1
        starts = False
    return tokens


def _hashed(tokens: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    hashes = tuple(crc32(token.encode("utf-8", "surrogatepass")) for token in tokens)
    words = (token_hash for token_hash, token in zip(hashes, tokens, strict=True) if len(token) > 1 and token.isalpha())
    return hashes, tuple(words)


def tools_digest(tools: Sequence[str]) -> str:
    """Digest of a set of tools, 12 hexadecimal digits."""
    return _hex("\0".join(sorted(set(tools))))


def _sketch(hashes: NDArray[np.uint64]) -> tuple[int, ...]:
    padded = np.concatenate([np.zeros(2, np.uint64), hashes])
    mixed = ((padded[:-2] * _A + padded[1:-1]) * _B + padded[2:]) * _A
    short = np.unique((mixed ^ (mixed >> np.uint64(29))) * _B >> np.uint64(32))
    return tuple(short[:SKETCH].tolist())


def _hex(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
