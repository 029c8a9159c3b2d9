"""vLLM takes the request of a prefill ahead, and reads a beginning of the prompt, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from presage.gateway.prefill.messages import PlainMessage
from presage.gateway.prefill.planning import PrefillPlan
from presage.testing.models import WORDS, save_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHATML = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }} [end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TRIMMED = CHATML.replace("message.content", "message.content | trim")


@pytest.mark.parametrize("template", [CHATML, TRIMMED], ids=["as it is", "trimmed"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_what_is_sent_begins_the_prompt_token_by_token(tmp_path: Path, template: str, role: str) -> None:
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    save_tokenizer(tmp_path, [" ".join(WORDS)])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    whole = [("system", WORDS[:40]), ("user", WORDS[40:200]), (role, WORDS[200:400])]
    messages = [PlainMessage(who, " ".join(said)) for who, said in whole]

    def ids(given: dict[str, Any]) -> list[int]:
        request = ChatCompletionRequest(**given)
        text = tokenizer.apply_chat_template(
            request.messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        found: list[int] = tokenizer(text, add_special_tokens=request.add_special_tokens)["input_ids"]
        return found

    real = ids({"model": "m", "messages": [{"role": one.role, "content": one.content} for one in messages]})
    for known in (200, 120, 1):
        cut = [*messages[:-1], PlainMessage(role, " ".join(WORDS[200 : 200 + known]))]
        plan = PrefillPlan("w", "t", "a", "u", tuple(cut), {"model": "m"}, "salt", 1, 1)
        sent = ids(plan.body())
        assert real[: len(sent)] == sent
        assert len(sent) > 200 + known
