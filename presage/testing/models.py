"""Models of random weights, made on the spot: an encoder with its tokenizer, and a Qwen3."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
MODELS = ("coder", "prover", "writer")
TASKS = {"code": (1, 0, 0), "prove": (0, 1, 0), "poem": (1, 0, 1), "essay": (0, 1, 1)}
WORDS = tuple(f"word{i}" for i in range(500))


def planted(
    n: int, seed: int, unknown: float = 0.2, words: tuple[int, int] = (30, 90)
) -> tuple[list[str], NDArray[np.float32]]:
    """Prompts of so many words; one of them, deep in each, says which models solve it. A share of the labels is NaN."""
    rng = np.random.default_rng(seed)
    prompts, rows = [], []
    for _ in range(n):
        text = [str(word) for word in rng.choice(WORDS, size=int(rng.integers(*words)))]
        task = str(rng.choice(list(TASKS)))
        text.insert(int(len(text) * rng.uniform(0.3, 0.8)), task)
        prompts.append(" ".join(text))
        rows.append(TASKS[task])
    correct = np.array(rows, np.float32)
    correct[rng.random(correct.shape) < unknown] = np.nan
    return prompts, correct


def save_encoder(folder: Path, seed: int = 0, longest: int = 256) -> Path:
    """An untrained encoder that knows the words of the planted prompts."""
    import torch
    from transformers import ModernBertConfig, ModernBertModel

    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder, [" ".join((*WORDS, *TASKS))])
    torch.manual_seed(seed)
    config = ModernBertConfig(
        vocab_size=len(SPECIAL) + len(WORDS) + len(TASKS),
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=longest,
        local_attention=32,
        pad_token_id=0,
        cls_token_id=2,
        bos_token_id=2,
        sep_token_id=3,
        eos_token_id=3,
    )
    ModernBertModel(config).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """A tokenizer that knows the words of some texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=list(SPECIAL)))
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)


def save_qwen(folder: Path, hidden_size: int = 64, inner: int = 128, length: int = 2048, spread: float = 0.3) -> Path:
    """Two layers, 512 tokens; with weights spread so wide the most likely token is no tie."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=length,
        initializer_range=spread,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
