"""Prompts as token ids for an encoder: a long one keeps its head and its tail.

What is asked stands at the end of an agent's prompt, what the agent is at its beginning; between them lies what was
pasted in. So the first h and the last t tokens are kept and both numbers stand in the artefact: serving reads a prompt
as training did. Of a prompt far longer than that only the ends are tokenised at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.errors import ArtefactError, ConfigurationError
from presage.features.transformer_folder import special_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE: Final = "tokenizer.json"

_CHARACTERS_A_TOKEN: Final = 32  # more than the tokens of texts have; of runs of blanks less than asked may be kept


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """A tokenizer, data only, and how much of a prompt is kept.

    Attributes:
        head: tokens kept of the beginning of a prompt that is too long.
        tail: tokens kept of its end.
        before: ids of the special tokens put before every prompt.
        after: ids of those put after it.
        padding: id that fills a batch up; masked, so its embedding does not count.
    """

    head: int
    tail: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    padding: int
    _tokenizer: Tokenizer = field(repr=False)

    @classmethod
    def of_pretrained(cls, tokenizer: Any, head: int, tail: int, longest: int | None, padding: int) -> Self:
        """From a tokenizer of transformers.

        Args:
            tokenizer: any that stands on the `tokenizers` library.
            head, tail: tokens to keep of a long prompt.
            longest: tokens the encoder reads at most, special ones included; None for no limit.
            padding: id of the padding token.

        Raises:
            ConfigurationError: it does not stand on that library, or more is to be kept than the encoder reads.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigurationError(
                f"the tokenizer is a {type(tokenizer).__name__} and has no tokenizer.json; save it as a fast tokenizer "
                "(save_pretrained of a PreTrainedTokenizerFast) and give that folder"
            )
        before, after = special_tokens(tokenizer)
        room = None if longest is None else longest - len(before) - len(after)
        if head < 0 or tail < 0 or head + tail < 1:
            raise ConfigurationError(
                f"head_tokens {head} and tail_tokens {tail} of a prompt; 1 or more in all is wanted"
            )
        if room is not None and head + tail > room:
            raise ConfigurationError(
                f"head_tokens {head} and tail_tokens {tail} of a prompt are more than the {room} this encoder reads; "
                "smaller numbers are wanted"
            )
        return cls(head, tail, before, after, padding, _bare(backend.to_str()))

    def ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt, at most head + tail between the special tokens."""
        return [[*self.before, *self._cut(prompt), *self.after] for prompt in prompts]

    def batch(self, rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids and mask, int64 [n, L] each, L the longest of the n rows and 1 or more."""
        length = max(1, *(len(row) for row in rows))
        ids = np.full((len(rows), length), self.padding, np.int64)
        mask = np.zeros((len(rows), length), np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = 1
        return ids, mask

    def _cut(self, prompt: str) -> list[int]:
        # A lone surrogate, which JSON can spell, is no text to a tokenizer.
        text = prompt.encode("utf-8", "replace").decode("utf-8")
        first, last = self.head * _CHARACTERS_A_TOKEN, self.tail * _CHARACTERS_A_TOKEN
        if len(text) > first + last:
            beginning, end = self._encode(text[:first]), self._encode(text[len(text) - last :])
        else:
            beginning = end = self._encode(text)
            if len(beginning) <= self.head + self.tail:
                return beginning
        return beginning[: self.head] + end[max(0, len(end) - self.tail) :]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def to_config(self) -> dict[str, Any]:
        """All but the tokenizer itself."""
        return {
            "head": self.head,
            "tail": self.tail,
            "before": list(self.before),
            "after": list(self.after),
            "padding": self.padding,
        }

    def to_files(self) -> dict[str, bytes]:
        """The tokenizer, as JSON in a stable order."""
        text = json.dumps(json.loads(self._tokenizer.to_str()), sort_keys=True, ensure_ascii=False)
        return {TOKENIZER_FILE: text.encode()}

    @classmethod
    def from_artefact(cls, config: Mapping[str, Any], folder: Path) -> Self:
        """Inverse of `to_config` and `to_files`.

        Raises:
            ArtefactError: the tokenizer is missing or is none.
        """
        path = folder / TOKENIZER_FILE
        try:
            tokenizer = _bare(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises Exception itself
            raise ArtefactError(
                f"{path}: found no tokenizer ({type(error).__name__}); the tokenizer the router was trained with is "
                "wanted. Copy the artefact again from its source, or train anew."
            ) from error
        before, after = tuple(config["before"]), tuple(config["after"])
        return cls(int(config["head"]), int(config["tail"]), before, after, int(config["padding"]), tokenizer)


def batches_of_like_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Places of rows in batches, the longest first, each of at most `tokens` with its padding, or of one row."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True)
    done = 0
    while done < len(order):
        rows = order[done : done + max(1, tokens // max(1, lengths[order[done]]))]
        yield rows
        done += len(rows)


def _bare(text: str) -> Tokenizer:
    """A tokenizer that neither cuts nor pads: both are done here."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
