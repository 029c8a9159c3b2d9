"""A model of random weights, made on the spot, of convolutions and attention: LFM2."""

from pathlib import Path


def save_hybrid(folder: Path) -> Path:
    """Four layers of random weights, 512 tokens."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        layer_types=["conv", "full_attention"] * 2,
        initializer_range=0.3,
        # vLLM reads the names of the first release.
        conv_dim=64,
        conv_dim_out=64,
        block_dim=64,
        block_ff_dim=128,
        block_multiple_of=1,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    )
    Lfm2ForCausalLM(config).save_pretrained(folder)
    return folder
