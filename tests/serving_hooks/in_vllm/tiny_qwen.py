"""A model of random weights, made on the spot, that vLLM and Hugging Face both serve."""

from pathlib import Path


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
