"""Sends workflows with retry loops (retry_loops.py) to an OpenAI API: a closed loop of concurrent workflows.

Prompts are token ids, so no tokenizer changes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from openai import AsyncOpenAI
from retry_loops import TYPE, Planned, Style, Written

PAUSE_S = 0.004
"""Of one of the iterations in which pauses were drawn."""


@dataclass
class Served:
    """The result of a server.

    Attributes:
        prompt_tokens, cached_tokens: of all prompts, and of these found in the cache.
        answers: token ids by workflow and step.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answers: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Share of prompt tokens found in the cache."""
        return self.cached_tokens / self.prompt_tokens


def serve(
    url: str,
    model: str,
    workflows: Mapping[str, Sequence[Planned]],
    *,
    style: Style = "own",
    at_once: int = 24,
    key: str = "-",
    workflow_type: str = TYPE,
) -> Served:
    """Sends all workflows in a closed loop with `at_once` at a time.

    Args:
        url: of the server, without a path. It reports cached prompt tokens only if it was started with
            `--enable-prompt-tokens-details`.
        model: the served name.
        workflows: steps by workflow id.
        style: how prompts are written.
        at_once: concurrent workflows.
        key: for the API.
        workflow_type: that requests name.

    Raises:
        openai.OpenAIError: a request was refused or not answered.
    """
    return asyncio.run(_serve(url, model, workflows, style, at_once, key, workflow_type))


async def _serve(
    url: str,
    model: str,
    workflows: Mapping[str, Sequence[Planned]],
    style: Style,
    at_once: int,
    key: str,
    workflow_type: str,
) -> Served:
    served, coming = Served(), iter(workflows.items())
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=600) as client:

        async def line() -> None:
            for name, steps in coming:
                written = Written(style)
                for number, step in enumerate(steps):
                    last = number == len(steps) - 1
                    sent = {"workflow_type": workflow_type, "workflow_id": name, "agent": step.agent, "step": number}
                    answer = await client.completions.create(
                        model=model,
                        prompt=written.prompt(step),
                        max_tokens=step.answer,
                        temperature=0,
                        extra_body={
                            "ignore_eos": True,
                            "return_token_ids": True,
                            "vllm_xargs": {**sent, **({"workflow_end": 1} if last else {})},
                        },
                    )
                    usage, tokens = answer.usage, tuple(answer.choices[0].token_ids)  # type: ignore[attr-defined]
                    details = usage.prompt_tokens_details if usage is not None else None
                    served.prompt_tokens += usage.prompt_tokens if usage is not None else 0
                    served.cached_tokens += (details.cached_tokens or 0) if details is not None else 0
                    served.answers[name, number] = tokens
                    written.answered(step, tokens)
                    if not last:
                        await asyncio.sleep(step.pause * PAUSE_S)

        await asyncio.gather(*(line() for _ in range(at_once)))
    return served
