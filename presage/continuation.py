"""Which workflow a prompt goes on from, by hashes of token ids: no client has to name it.

A serving engine sees prompts and answers as token ids, and so does a log of requests. A request is the next step of the
only workflow that fits by the first of these rules that finds one:

1. Its prompt begins with a whole earlier prompt, or with an earlier prompt and its answer, and is longer. The longest
   such beginning counts. A prompt that only repeats an earlier one begins nothing and continues nothing.
2. It holds parts of answers that no other workflow was given, at any place: another agent's prompt that quotes them, a
   history that was edited or compacted. Of 16 tokens each, at least two, and two more than of any other workflow.

Parts of prompts identify nothing, since the template of an application looks unique while only one workflow has used
it; nor do parts of an answer that stand in its own prompt. Where several workflows fit, none is chosen.

Nothing is kept but keyed hashes, and nothing is found across scopes: tenants, cache salts and adapters. Beginnings are
looked up by the chained hashes of whole blocks, which the engine has computed already, and so are salted as its prefix
cache is. The measured shares of right links are `CONFIDENCE`.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress, count
from typing import Final, Generic, Literal, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

LinkedBy = Literal["answered", "prompt", "quoted"]
"""The beginning of the prompt is a prompt and its answer, or a prompt alone; or the prompt holds parts of answers."""

CONFIDENCE: Final[dict[LinkedBy, float]] = {"answered": 0.99, "prompt": 0.95, "quoted": 0.95}

MOST_KNOWN: Final = 20_000
"""Workflows known at a time, by default."""
REMEMBERED_S: Final = 6 * 3600.0
"""Seconds since its latest request within which a workflow may go on: people pause."""
MOST_ENDS: Final = 64
"""Beginnings of one workflow that are known, the latest ones."""
HEAD_TOKENS: Final = 64
"""Tokens by which an agent is known where nothing else tells it."""
NAMED_FROM: Final = 3
"""Workflows in which an agent must have been seen to be named, and begun to be judged."""
UNKNOWN: Final = "assistant"
"""The agent of requests that nothing tells apart, as at the gateway."""
UNKNOWN_TYPE: Final = "app"
WINDOW: Final = 16
"""Tokens of a part of an answer."""
LEAD: Final = 2
"""Parts that a workflow must have before any other."""
MOST_TRIED: Final = 256
"""Beginnings that a prompt is compared with: a client can prepare any number that nearly fit."""
MOST_SHARED: Final = 4
"""Workflows kept of a beginning that several have."""
_OWN_TOKENS: Final = 8192
"""Of a prompt's beginning, and of its end, where parts of its answer are searched that it only repeats: examples of its
template, and what it was told last."""

_NUMBERS: Final = 2**32 - 1

Ids = NDArray[np.int64]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """What is compared of a request.

    Attributes:
        scope: tenant, cache salt and adapter; nothing of another scope is compared with it.
        blocks: chained hashes of its whole blocks.
        tokens: all its token ids.
        media: first token, end and digest of each image and the like, whose tokens do not show what it is.
    """

    scope: Hashable
    blocks: Sequence[bytes]
    tokens: Sequence[int]
    media: Sequence[tuple[int, int, bytes]] = ()


@dataclass(slots=True, eq=False)
class PromptedWorkflow:
    """A workflow as its prompts show it.

    Attributes:
        scope: of its requests.
        number: its place in the order of all; 0 before it has one.
        steps: requests that were given to it.
        active_at: when one was, or was answered, in seconds.
        told_apart: whether one held an answer that no other workflow has: what it sends from then on is its own.
    """

    scope: Hashable
    number: int = 0
    steps: int = 0
    active_at: float = 0.0
    told_apart: bool = False
    ends: deque[tuple[bytes, int, bytes]] = field(default_factory=deque, repr=False)


Known = TypeVar("Known", bound=PromptedWorkflow)


@dataclass(slots=True)
class Beginning(Generic[Known]):
    """Whose a beginning is.

    Attributes:
        owners: known workflows that have it, `MOST_SHARED` at most.
        answered: whether it ends with an answer.
        shared: whether several workflows had it, or several prompts went on from it that cannot be told apart; it then
            stays so, since those that ended may have been right.
        told_apart: whether nobody else can have it, since it holds an answer. Without one it may be a system prompt
            that somebody has sent alone, to fill the cache.
        continued: the digest of the prompt that went on from it.
        request: of the workflow's requests, from 1, the one whose answer it ends with; 0 if nothing tells.
    """

    owners: list[Known]
    answered: bool
    shared: bool = False
    told_apart: bool = False
    continued: bytes | None = None
    request: int = 0


@dataclass(frozen=True, slots=True)
class Link(Generic[Known]):
    """The workflow that a request continues, by which rule, and from which beginning; None for parts of answers."""

    workflow: Known
    by: LinkedBy
    beginning: Beginning[Known] | None = None

    @property
    def confidence(self) -> float:
        """The share of such links that are right."""
        return CONFIDENCE[self.by]


@dataclass(slots=True)
class _Scope(Generic[Known]):
    """Beginnings known in one scope.

    Attributes:
        lengths: of what follows the last whole block of a beginning, and how many beginnings have it; by the hash of
            that block, b"" before the first.
        beginnings: by digest.
    """

    salt: int
    lengths: dict[bytes, dict[int, int]] = field(default_factory=dict)
    beginnings: dict[bytes, Beginning[Known]] = field(default_factory=dict)


class PromptIndex(Generic[Known]):
    """The prompts and answers of running workflows, as hashes.

    Args:
        key: of the hashes, 16 bytes or more: secret where prompts are.
        block_tokens: of the blocks whose hashes are passed.
        parts: slots for parts of answers, a power of two; 12 bytes each. A later part takes the slot of an earlier one.
        most: workflows known at a time; the one that was least recently active is forgotten first.
    """

    def __init__(self, key: bytes, block_tokens: int, parts: int = 2**18, most: int = MOST_KNOWN) -> None:
        if parts < 2 or parts & (parts - 1):
            raise ValueError(f"parts is {parts}; give a power of two")
        self._key, self._block, self._most = key[:64], block_tokens, most
        self._numbers = count(1)
        self._workflows: OrderedDict[int, Known] = OrderedDict()
        self._scopes: dict[Hashable, _Scope[Known]] = {}
        self._base, self._mixer = (number | 1 for number in self._drawn(b"windows", 2))
        self._shift = np.uint64(65 - parts.bit_length())
        self._parts = np.zeros(parts, np.uint64)
        self._part_owners = np.zeros(parts, np.uint32)  # 0: nobody, or several

    def __len__(self) -> int:
        return len(self._workflows)

    def __iter__(self) -> Iterator[Known]:
        return iter(self._workflows.values())

    def get(self, number: int) -> Known | None:
        """The workflow with this number, while it is known."""
        return self._workflows.get(number)

    def begin(self, of: Known) -> None:
        """A workflow begins; it gets its number."""
        of.number = next(self._numbers)
        self._workflows[of.number] = of
        while len(self._workflows) > self._most:
            self.forget(next(iter(self._workflows.values())))

    def find(self, prompt: TokenPrompt) -> Link[Known] | None:
        """The workflow that a prompt goes on from."""
        scope = self._scopes.get(prompt.scope)
        return self._begins_with(scope, prompt) or self._holds(scope, prompt.tokens) if scope is not None else None

    def asked(self, of: Known, prompt: TokenPrompt, now: float = 0.0, link: Link[Known] | None = None) -> None:
        """The workflow has sent this prompt, which was found to be its by this link."""
        of.steps += 1
        self._active(of, now)
        begun = link.beginning if link is not None else None
        of.told_apart |= link is not None and (begun is None or begun.told_apart)
        digest = self._add_end(of, prompt, answered=False, told_apart=of.told_apart)
        if begun is not None:
            begun.continued = begun.continued or digest

    def answered(self, of: Known, both: TokenPrompt, prompt_tokens: int, now: float = 0.0, request: int = 0) -> None:
        """A prompt of the workflow was answered: tokens and blocks are those of `both`, one after the other."""
        if of.number not in self._workflows or len(both.tokens) <= prompt_tokens:
            return
        self._active(of, now)
        told_apart = of.told_apart or len(both.tokens) - prompt_tokens >= WINDOW
        self._add_end(of, both, answered=True, told_apart=told_apart, request=request)
        salt, tokens = self._scope(of.scope).salt, both.tokens
        fresh = self._windows(as_ids(tokens[prompt_tokens:]), salt)
        last = max(_OWN_TOKENS, prompt_tokens - _OWN_TOKENS)
        for own in (tokens[: min(_OWN_TOKENS, prompt_tokens)], tokens[last:prompt_tokens]):
            fresh = _without(fresh, self._all_windows(as_ids(own), salt))
        places, mine = fresh >> self._shift, np.uint32(of.number & _NUMBERS)
        same, owners = self._parts[places] == fresh, self._part_owners[places]
        others = same & (owners != mine) & ((owners == 0) | self._are_known(owners))
        self._parts[places] = fresh
        self._part_owners[places] = np.where(others, np.uint32(0), mine)

    def expire(self, before: float) -> None:
        """Forgets the workflows that were last active before then."""
        while self._workflows and (first := next(iter(self._workflows.values()))).active_at < before:
            self.forget(first)

    def forget(self, of: Known) -> None:
        """The workflow has ended: nothing is linked to it any more."""
        if self._workflows.pop(of.number, None) is None:
            return
        while of.ends:
            self._drop_end(of)

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        return {
            "prompted workflows": len(self._workflows),
            "beginnings": sum(len(scope.beginnings) for scope in self._scopes.values()),
            "scopes": len(self._scopes),
        }

    # Rule 1: beginnings.

    def _begins_with(self, scope: _Scope[Known], prompt: TokenPrompt) -> Link[Known] | None:
        lengths, blocks, tokens = scope.lengths, prompt.blocks, prompt.tokens
        tried = 0
        for place in reversed([0, *compress(count(1), map(lengths.__contains__, blocks))]):
            last = blocks[place - 1] if place else b""
            start = place * self._block
            for length in sorted(lengths.get(last, ()), reverse=True):
                if start + length >= len(tokens):  # the whole prompt: a repeat
                    continue
                tried += 1
                if tried > MOST_TRIED:
                    return None
                begun = scope.beginnings.get(self._end(last, prompt, start, start + length))
                if begun is not None:
                    if begun.continued is not None and not begun.told_apart:
                        begun.shared |= begun.continued != self._last_end(prompt)[2]
                    if begun.shared:
                        return None
                    return Link(begun.owners[0], "answered" if begun.answered else "prompt", begun)
        return None

    def _last_end(self, prompt: TokenPrompt) -> tuple[bytes, int, bytes]:
        """Of a whole prompt the hash of its last whole block, the tokens behind that, and its digest."""
        blocks = prompt.blocks
        last, start = (blocks[-1], len(blocks) * self._block) if blocks else (b"", 0)
        return last, len(prompt.tokens) - start, self._end(last, prompt, start, len(prompt.tokens))

    def _add_end(
        self, workflow: Known, prompt: TokenPrompt, answered: bool, told_apart: bool, request: int = 0
    ) -> bytes:
        last, length, digest = self._last_end(prompt)
        scope = self._scope(workflow.scope)
        begun = scope.beginnings.setdefault(digest, Beginning([], answered, told_apart=told_apart, request=request))
        if any(owner is workflow for owner in begun.owners):
            return digest
        begun.shared = begun.shared or bool(begun.owners)
        if len(begun.owners) >= MOST_SHARED:
            return digest
        begun.owners.append(workflow)
        lengths = scope.lengths.setdefault(last, {})
        lengths[length] = lengths.get(length, 0) + 1
        workflow.ends.append((last, length, digest))
        if len(workflow.ends) > MOST_ENDS:
            self._drop_end(workflow)
        return digest

    def _drop_end(self, workflow: Known) -> None:
        last, length, digest = workflow.ends.popleft()
        scope = self._scopes[workflow.scope]
        begun = scope.beginnings[digest]
        begun.owners.remove(workflow)
        if not begun.owners:
            del scope.beginnings[digest]
        lengths = scope.lengths[last]
        lengths[length] -= 1
        if not lengths[length]:
            del lengths[length]
            if not lengths:
                del scope.lengths[last]
                if not scope.lengths:
                    del self._scopes[workflow.scope]

    def _end(self, last: bytes, prompt: TokenPrompt, start: int, end: int) -> bytes:
        """The digest of the beginning up to `end`, from the hash of its last whole block and what follows that."""
        digest = blake2b(last, digest_size=16, key=self._key)
        digest.update(as_ids(prompt.tokens[start:end]).tobytes())
        for first, behind, media in prompt.media:
            if first < end and start < behind:
                digest.update(media)
        return digest.digest()

    def _scope(self, scope: Hashable) -> _Scope[Known]:
        remembered = self._scopes.get(scope)
        if remembered is None:
            remembered = self._scopes[scope] = _Scope(self._drawn(repr(scope).encode(), 1)[0])
        return remembered

    # Rule 2: parts of answers.

    def _holds(self, scope: _Scope[Known], tokens: Sequence[int]) -> Link[Known] | None:
        windows = self._windows(as_ids(tokens), scope.salt)
        places = windows >> self._shift
        owners = self._part_owners[places][self._parts[places] == windows]
        numbers, times = np.unique(owners[owners != 0], return_counts=True)
        fits = [
            (n, self._workflows[number])
            for n, number in zip(times.tolist(), numbers.tolist(), strict=True)
            if number in self._workflows
        ]
        fits.sort(key=lambda fit: -fit[0])
        if not fits or fits[0][0] - (fits[1][0] if len(fits) > 1 else 0) < LEAD:
            return None
        return Link(fits[0][1], "quoted")

    def _windows(self, ids: Ids, salt: int) -> Hashes:
        """Distinct hashes of windows, in order: of each 16 neighbours the least, so that two texts with 31 tokens in
        common have one in common (Schleimer et al., "Winnowing", 2003)."""
        hashes = self._all_windows(ids, salt)
        reach = 1
        while reach < WINDOW and len(hashes) > reach:
            hashes = np.minimum(hashes[:-reach], hashes[reach:])
            reach *= 2
        return np.unique(hashes[np.flatnonzero(np.diff(hashes, prepend=~hashes[:1]))])

    def windows_of(self, prompt: TokenPrompt, part: slice, window: int) -> Hashes:
        """The hash of each window of a part of a prompt, of a power of two tokens."""
        return self._all_windows(as_ids(prompt.tokens[part]), self._scope(prompt.scope).salt, window)

    def _all_windows(self, ids: Ids, salt: int, window: int = WINDOW) -> Hashes:
        """The hash of each window."""
        if len(ids) < window:
            return np.empty(0, np.uint64)
        hashes, base = ids.astype(np.uint64), self._base
        reach = 1
        while reach < window:  # the hash of twice as many tokens, from those of the halves
            hashes = hashes[:-reach] * np.uint64(base) + hashes[reach:]
            base, reach = base * base % 2**64, 2 * reach
        hashes ^= np.uint64(salt)
        hashes *= np.uint64(self._mixer)
        hashes ^= hashes >> np.uint64(32)
        hashes *= np.uint64(self._mixer)
        return hashes

    def _active(self, workflow: Known, now: float) -> None:
        workflow.active_at = now
        if workflow.number in self._workflows:
            self._workflows.move_to_end(workflow.number)

    def _are_known(self, numbers: NDArray[np.uint32]) -> NDArray[np.bool_]:
        return np.fromiter(map(self._workflows.__contains__, numbers.tolist()), np.bool_, len(numbers))

    def _drawn(self, purpose: bytes, n: int) -> list[int]:
        drawn = blake2b(purpose, digest_size=8 * n, key=self._key).digest()
        return [int.from_bytes(drawn[8 * index : 8 * index + 8], "little") for index in range(n)]


def _without(some: Hashes, others: Hashes) -> Hashes:
    """The hashes in order, without those that are among the others, in any order."""
    if not len(some):
        return some
    places = np.minimum(np.searchsorted(some, others), len(some) - 1)
    return np.delete(some, places[some[places] == others])


def as_ids(tokens: Sequence[int]) -> Ids:
    """Token ids as an array."""
    return np.fromiter(tokens, np.int64, len(tokens))


def chained(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Chained hashes of the whole blocks, for logs of requests: an engine has its own."""
    ids = as_ids(tokens)
    hashes: list[bytes] = []
    last = b""
    for end in range(block_tokens, len(ids) + 1, block_tokens):
        last = blake2b(last + ids[end - block_tokens : end].tobytes(), digest_size=16).digest()
        hashes.append(last)
    return hashes


def head_of(tokens: Sequence[int], least: int = HEAD_TOKENS) -> str:
    """The first tokens of a prompt as 8 hexadecimal digits, without a key; "" for a prompt of fewer than `least`."""
    if len(tokens) < least:
        return ""
    return blake2b(as_ids(tokens[:HEAD_TOKENS]).tobytes(), digest_size=4).hexdigest()


_UNSPACED: Final = r"\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_PIECE: Final = re.compile(rf"[{_UNSPACED}]|[^\W\d_{_UNSPACED}]{{1,5}}|\d|\s+|.", re.DOTALL)


def text_tokens(text: str) -> list[int]:
    """Stands for an engine's tokenizer where logs hold texts only: five letters, a digit, a run of blanks or any other
    character are a token, and so is each character of scripts without blanks. Equal in every process."""
    return [crc32(piece.encode("utf-8", "surrogatepass")) for piece in _PIECE.findall(text)]
