"""Where the prompts of workflows' steps came from: the cache of the engine, another tier, or computing.

vLLM counts the same of all requests together; here are those of steps of workflows alone, which the policies are for.
"""

from __future__ import annotations


class Tiers:
    """Tokens of prompts of steps that have begun."""

    __slots__ = ("external", "local", "prompt")

    def __init__(self) -> None:
        self.prompt = self.local = self.external = 0

    def begins(self, prompt: int, local: int, external: int) -> None:
        """A step begins: tokens of its prompt, those found in the cache, and those loaded from elsewhere."""
        self.prompt += prompt
        self.local += local
        self.external += external

    def status(self) -> dict[str, int]:
        """All tokens, and those that need not be computed by where they were."""
        return {"tokens": self.prompt, "local_tokens": self.local, "external_tokens": self.external}
