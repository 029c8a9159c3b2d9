"""System prompts in other words, as a release writes them: the same for each request of an agent.

A fifth of the sentences is left out, but never all; a fifth of the different words is replaced, wherever it stands, by
other words of the prompts at hand; lines come in another order. Synonyms would be kinder: they are words that no other
agent's prompt has. What is left out or replaced follows from the salt and the text itself, so that two prompts of one
template, with other users and tasks in them, stay two prompts of one template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final
from zlib import crc32

_SHARE: Final = 0.2
_RANGE: Final = 2**32


def rewording(prompts: Iterable[str], salt: int) -> Callable[[str], str]:
    """A function that rewords a prompt, by the words of all the prompts at hand."""
    words = sorted({word for prompt in prompts for word in prompt.split() if word.isalpha()})

    def drawn(text: str) -> float:
        return crc32(text.encode("utf-8", "surrogatepass"), salt) / _RANGE

    def replaced(word: str) -> str:
        return words[int(drawn(word + " ") * len(words))] if word.isalpha() and drawn(word) < _SHARE else word

    def reword(prompt: str) -> str:
        lines = []
        for line in prompt.split("\n"):
            sentences = line.split(". ")
            kept = [sentence for sentence in sentences if drawn(sentence) >= _SHARE] or [max(sentences, key=drawn)]
            lines.append(". ".join(" ".join(map(replaced, sentence.split(" "))) for sentence in kept))
        return "\n".join(sorted(lines, key=drawn))

    return reword
