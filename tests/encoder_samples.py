"""Tiny transformers, written on the spot: no weights are fetched for a test."""

from pathlib import Path

WORDS = ("plan", "search", "read", "verify", "secretword")
LONGEST = 16


def save_tokenizer(folder: Path, special: bool = True) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def save_bert(folder: Path, seed: int = 0) -> Path:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=9, max_position_embeddings=LONGEST, **sizes)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
