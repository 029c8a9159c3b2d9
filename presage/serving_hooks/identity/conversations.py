"""The index of running conversations: which workflow a prompt continues.

Of each workflow it keeps digests of the prompts it sent (`prompts`), of beginnings of conversations that hold one of
its answers (`answered`), of ids that belong to it (`ids`), of its answers' sentences (`marks`), and of phrases of the
message that began it (`openings`). What a digest says that several workflows have is for the caller to decide.

No text is kept. Digests are BLAKE2b under a key drawn for this process, those of phrases Python's keyed hashes: they
leave it in no form, so no restart needs them again, and nobody who can read a dump of the index, or who sends prompts,
can test a guessed text or construct a collision. Each tenant has an index and a key of its own, so no digest of one can
be found in another's.

Memory: each workflow keeps its latest digests, at most `MOST_DIGESTS` of a kind; the index keeps `most` workflows, a
fourth of them of one tenant, the least recently active leave first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from secrets import token_bytes
from typing import Final, Literal

from presage.applications import Applications
from presage.serving_hooks.workflows import TENANT_SHARE

DIGEST_BYTES: Final = 12
CHUNK: Final = 256
"""Bytes of a completions prompt between two links of its chain."""

Kind = Literal["prompts", "answered", "ids", "marks", "openings"]
MOST_DIGESTS: Final[Mapping[Kind, int]] = {"prompts": 32, "answered": 32, "ids": 48, "marks": 128, "openings": 32}
MOST_COMMON: Final = 2**14
"""Phrases of system prompts and templates that are remembered."""
MOST_OWNERS: Final = 8
"""Workflows of one digest that are told apart; a digest of more stays one of several."""
_MOST_TAILS: Final = 512
"""Tails that one prompt is compared with."""


Digest = bytes | int
"""Of a phrase a number, else bytes."""


class Conversation:
    """What the index keeps of a running workflow.

    Attributes:
        agents: that have sent its requests.
        active_at: when its latest request arrived, seconds of the gateway's clock.
        digests: by kind, the latest last; with each of a prompt or answer, how often it was continued.
        tails: places of the latest prompts of the completions API.
        edges: of the message that began it, see `turns.edges`.
        went_on: by digest of a prompt, that of the prompt which first went on from it.
        requests: by digest of a prompt, of it with its answer or of a part of the answer, number and agent of the
            latest such request.
    """

    __slots__ = (
        *(
            "active_at",
            "agents",
            "digests",
            "edges",
            "requests",
            "tails",
            "tenant",
            "went_on",
            "workflow",
            "workflow_id",
            "workflow_type",
        ),
    )

    def __init__(self, tenant: str, workflow_type: str, workflow_id: str, workflow: str) -> None:
        self.tenant, self.workflow_type, self.workflow_id, self.workflow = tenant, workflow_type, workflow_id, workflow
        self.agents: dict[str, None] = {}
        self.active_at = 0.0
        self.digests: dict[Kind, dict[Digest, int]] = {kind: {} for kind in MOST_DIGESTS}
        self.tails: dict[tuple[bytes, int], None] = {}
        self.edges: tuple[Sequence[int], Sequence[int]] = (), ()
        self.went_on: dict[Digest, bytes] = {}
        self.requests: dict[Digest, tuple[int, str]] = {}


Owners = tuple[Conversation, ...]


class TenantIndex:
    """The conversations of one tenant, least recently active first.

    Attributes:
        applications: types of workflows that nobody named.
        common: phrases of system prompts and templates, and edges of templates, which tell no workflow.
    """

    def __init__(self) -> None:
        self.applications = Applications()
        self.common: dict[int, None] = {}
        self._edges: dict[int, None] = {}
        self.conversations: OrderedDict[str, Conversation] = OrderedDict()
        self._start = token_bytes(32)
        self._owners: dict[Kind, dict[Digest, Conversation | Owners]] = {kind: {} for kind in MOST_DIGESTS}
        self._tails: dict[bytes, dict[int, int]] = {}

    def digest(self, kind: str, value: bytes) -> bytes:
        """The digest of an id or a text, distinct by kind."""
        return blake2b(value, digest_size=DIGEST_BYTES, key=self._start, person=kind.encode()[:16]).digest()

    def chain(self, turns: Iterable[bytes], start: bytes | None = None) -> list[bytes]:
        """The digest of the conversation after each turn; goes on from `start`."""
        digest, digests = start or self._start, []
        for turn in turns:
            digest = blake2b(digest + turn, digest_size=DIGEST_BYTES).digest()
            digests.append(digest)
        return digests

    def owners(self, kind: Kind, digest: Digest) -> Owners:
        """The workflows that have a digest."""
        owners = self._owners[kind].get(digest, ())
        return (owners,) if isinstance(owners, Conversation) else owners

    def add(self, conversation: Conversation, kind: Kind, digest: Digest) -> None:
        """The workflow has this digest; it forgets its oldest of this kind where it has too many."""
        own, owners = conversation.digests[kind], self._owners[kind]
        times = own.pop(digest, None)
        own[digest] = times or 0  # now the latest
        if times is not None:
            return
        others = self.owners(kind, digest)
        owners[digest] = (*others[-MOST_OWNERS + 1 :], conversation) if others else conversation  # nearly always one
        if len(own) > MOST_DIGESTS[kind]:
            oldest = next(iter(own))
            del own[oldest]
            conversation.went_on.pop(oldest, None)
            conversation.requests.pop(oldest, None)
            self._discard(kind, oldest, conversation)

    def add_opening(
        self,
        conversation: Conversation,
        opening: Sequence[int],
        edges: tuple[Sequence[int], Sequence[int]],
        system: Sequence[int],
    ) -> None:
        """The workflow begins with this message, under this system prompt, both by phrases.

        What a part of an earlier opening has too is its template; a whole opening that comes again is none. Where the
        workflow has an opening already, this is what stood in it, and the rest was a template.
        """
        around = {*conversation.digests["openings"]} - {*opening}
        _remember(self.common, (phrase for phrase in around if isinstance(phrase, int)))
        self.forget_texts(conversation.workflow, ("openings",))
        half, conversation.edges = MOST_DIGESTS["openings"] // 2, edges
        seen = [phrase for phrase in opening if phrase in self._owners["openings"]]
        kept = dict.fromkeys([*opening[:half], *opening[half:][-half:]])
        common = list(system)
        if len(seen) < len(kept):
            ends = [*edges[0], *edges[1]]
            common += [*seen, *filter(self._edges.__contains__, ends)]
            _remember(self._edges, ends)
        _remember(self.common, common)
        for phrase in kept:
            self.add(conversation, "openings", phrase)

    def continued(self, conversation: Conversation, kind: Kind, digest: bytes) -> None:
        """A prompt went on from this digest: it becomes the latest."""
        own = conversation.digests[kind]
        own[digest] = own.pop(digest, 0) + 1

    def goes_on(self, conversation: Conversation, beginning: bytes, prompt: bytes) -> bool:
        """Whether no other prompt went on from this one without its answer, digests both.

        If two did, it may be a system prompt that somebody has sent alone, to fill a cache.
        """
        return conversation.went_on.setdefault(beginning, prompt) == prompt

    def links(self, text: bytes) -> list[bytes]:
        """The chain over a prompt of the completions API: a digest before each whole chunk, and after the last."""
        whole = (text[start : start + CHUNK] for start in range(0, len(text) - CHUNK + 1, CHUNK))
        return [self._start, *self.chain(whole)]

    def add_text(self, conversation: Conversation, kind: Kind, text: bytes, links: Sequence[bytes]) -> None:
        """The workflow has this prompt of the completions API, or this prompt and its answer."""
        link, tail = links[-1], len(text) % CHUNK
        place = link, tail
        if place not in conversation.tails:
            conversation.tails[place] = None
            lengths = self._tails.setdefault(link, {})
            lengths[tail] = lengths.get(tail, 0) + 1
            if len(conversation.tails) > MOST_DIGESTS["prompts"] + MOST_DIGESTS["answered"]:
                oldest = next(iter(conversation.tails))
                del conversation.tails[oldest]
                self._discard_tail(oldest)
        self.add(conversation, kind, _tail(link, text[len(text) - tail :]))

    def text_points(self, text: bytes, links: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Digests of beginnings of a prompt that may be known, the longest first, and their lengths in bytes."""
        points: list[tuple[bytes, int]] = []
        for place in range(len(links) - 1, -1, -1):
            link = links[place]
            for tail in sorted(self._tails.get(link, ()), reverse=True):
                length = place * CHUNK + tail
                if length <= len(text):
                    points.append((_tail(link, text[place * CHUNK : length]), length))
            if len(points) >= _MOST_TAILS:
                break
        return points

    def begin(self, conversation: Conversation) -> None:
        """A workflow begins to be known."""
        self.conversations[conversation.workflow] = conversation

    def forget(self, workflow: str) -> None:
        """Everything of a workflow."""
        self.forget_texts(workflow, (*MOST_DIGESTS,))
        self.conversations.pop(workflow, None)

    def forget_texts(self, workflow: str, kinds: Sequence[Kind] = ("prompts", "marks", "openings")) -> None:
        """What a workflow shares with others by chance; it may still go on from an answer, or with its ids."""
        conversation = self.conversations.get(workflow)
        if conversation is None:
            return
        for kind in kinds:
            for digest in conversation.digests[kind]:
                self._discard(kind, digest, conversation)
                conversation.requests.pop(digest, None)
            conversation.digests[kind] = {}
        if "answered" in kinds:
            for place in conversation.tails:
                self._discard_tail(place)

    def debug_state(self) -> tuple[int, int]:
        """(digests, tails)."""
        return sum(map(len, self._owners.values())) + len(self.common) + len(self._edges), sum(
            map(len, self._tails.values())
        )

    def _discard(self, kind: Kind, digest: Digest, conversation: Conversation) -> None:
        owners = self._owners[kind]
        left = tuple(owner for owner in self.owners(kind, digest) if owner is not conversation)
        if left:
            owners[digest] = left if len(left) > 1 else left[0]
        else:
            owners.pop(digest, None)

    def _discard_tail(self, place: tuple[bytes, int]) -> None:
        link, tail = place
        lengths = self._tails[link]
        lengths[tail] -= 1
        if not lengths[tail]:
            del lengths[tail]
        if not lengths:
            del self._tails[link]


def _tail(link: bytes, tail: bytes) -> bytes:
    return blake2b(link + tail, digest_size=DIGEST_BYTES, person=b"tail").digest()


def _remember(phrases: dict[int, None], latest: Iterable[int]) -> None:
    phrases.update(dict.fromkeys(latest))
    for phrase in list(islice(phrases, max(0, len(phrases) - MOST_COMMON))):
        del phrases[phrase]


class Conversations:
    """The indexes of all tenants.

    Args:
        most: workflows of all tenants together.
    """

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._tenants: dict[str, TenantIndex] = {}
        self._size = 0

    def of(self, tenant: str) -> TenantIndex:
        """The index of a tenant. It stays, since API keys bound the number of tenants."""
        index = self._tenants.get(tenant)
        if index is None:
            index = self._tenants[tenant] = TenantIndex()
        return index

    def begin(self, conversation: Conversation) -> None:
        """Takes a workflow in; another leaves if there is no room."""
        index = self.of(conversation.tenant)
        share = max(1, self._most // TENANT_SHARE) if conversation.tenant else self._most
        if conversation.workflow in index.conversations:
            self.forget(conversation.tenant, conversation.workflow)
        if len(index.conversations) >= share:
            self._evict(index)
        elif self._size >= self._most:
            self._evict(max(self._tenants.values(), key=lambda tenant: len(tenant.conversations)))
        index.begin(conversation)
        self._size += 1

    def forget(self, tenant: str, workflow: str, may_go_on: bool = False) -> None:
        """A workflow has ended; one that has only fallen silent may go on, after a human has answered for instance."""
        index = self._tenants.get(tenant)
        if index is None or workflow not in index.conversations:
            return
        if may_go_on:
            index.forget_texts(workflow)
            return
        index.forget(workflow)
        self._size -= 1

    def debug_state(self) -> dict[str, int]:
        """Entries of each table, to find leaks."""
        states = [index.debug_state() for index in self._tenants.values()]
        return {
            "conversations": self._size,
            "conversation_digests": sum(digests for digests, _ in states),
            "conversation_tails": sum(tails for _, tails in states),
            "conversation_tenants": len(self._tenants),
        }

    def _evict(self, index: TenantIndex) -> None:
        index.forget(next(iter(index.conversations)))
        self._size -= 1
