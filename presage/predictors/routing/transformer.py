"""The transformer scorer: an encoder reads the prompt, one logit a model says how likely that model solves it.

"Chimera", §3.3 and appendix B.1. What the network is stands in `transformer_model`, what it reads of a long prompt in
`transformer_tokens`; it is trained by `presage.training.router.finetune`. Rebuilt from an artefact alone: neither the
hub nor the folder the encoder came from is asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError
from presage.features.transformer_folder import find_transformer, load_error
from presage.predictors.routing import transformer_model
from presage.predictors.routing.transformer_model import Pooling, Precision
from presage.predictors.routing.transformer_tokens import PromptTokens, batches_of_like_length

DEFAULT_ENCODER: Final = "answerdotai/ModernBERT-large"
HEAD_TOKENS: Final = 256
TAIL_TOKENS: Final = 254
"""With ModernBERT's two special tokens a prompt is 512 tokens at most."""

BATCH_TOKENS: Final = 8_192
"""Tokens of a batch, padding included: bounds memory whatever the lengths."""


@dataclass(frozen=True, eq=False)
class TransformerScorer:
    """An encoder with a logit for each of M models.

    Attributes:
        models: names, in the order of the logits.
        tokens: what it reads of a prompt.
        network: of transformers, with the M logits; in evaluation mode.
        encoder: what it was made from, for the record: a hub name, or a folder's last part.
        precision: of the weights.
    """

    name: ClassVar[str] = "transformer"

    models: tuple[str, ...]
    tokens: PromptTokens
    network: Any = field(repr=False)
    encoder: str
    precision: Precision = "fp32"

    @classmethod
    def from_encoder(
        cls,
        encoder: str = DEFAULT_ENCODER,
        *,
        models: Sequence[str],
        head_tokens: int = HEAD_TOKENS,
        tail_tokens: int = TAIL_TOKENS,
        pooling: Pooling | None = None,
        seed: int = 0,
    ) -> Self:
        """An encoder with fresh logits, to be trained.

        Args:
            encoder: a folder with config.json, a tokenizer and safetensors weights; or a name on the hub.
            models: M names.
            head_tokens, tail_tokens: what is kept of a prompt longer than both together.
            pooling: first token or mean of all, of an encoder that has the choice; None keeps its own.
            seed: of the fresh weights.

        Raises:
            ConfigurationError: there is no such encoder, a file is missing, or it cannot be read.
        """
        folder = find_transformer(encoder, role=transformer_model.ROLE, option="--encoder")
        from transformers import AutoTokenizer

        network = transformer_model.from_folder(folder, len(models), pooling, seed)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a foreign configuration makes the library raise
            raise load_error(folder, transformer_model.ROLE, error) from error
        longest = getattr(network.config, "max_position_embeddings", None)
        padding = next((i for i in (network.config.pad_token_id, tokenizer.pad_token_id) if i is not None), 0)
        tokens = PromptTokens.of_pretrained(tokenizer, head_tokens, tail_tokens, longest, padding)
        name = Path(encoder).expanduser().resolve().name if Path(encoder).expanduser().is_dir() else encoder
        return cls(tuple(models), tokens, network, name)

    def logits(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """Log-odds float32 [n, M].

        A prompt's row depends on the prompts beside it by rounding only: about 1e-6 in fp32, more at other precisions.
        """
        import torch

        ids = self.tokens.ids(prompts)
        out = np.zeros((len(prompts), len(self.models)), np.float32)
        device = next(self.network.parameters()).device
        for rows in batches_of_like_length([len(row) for row in ids], BATCH_TOKENS):
            batch, mask = (torch.from_numpy(part).to(device) for part in self.tokens.batch([ids[row] for row in rows]))
            with torch.inference_mode():
                out[rows] = self.network(input_ids=batch, attention_mask=mask).logits.float().cpu().numpy()
        return out

    def with_models(self, models: Sequence[str], seed: int = 0) -> Self:
        """The same encoder for other models, to be trained further: known ones keep their logits, new are fresh."""
        self._trained_precision("trained further")
        known = {name: place for place, name in enumerate(self.models)}
        network = transformer_model.with_models(self.network, [known.get(name) for name in models], seed)
        return type(self)(tuple(models), self.tokens, network, self.encoder)

    def at_precision(self, precision: Precision, device: str = "cpu") -> Self:
        """A copy for serving.

        Args:
            precision: "fp32"; "bf16"; "int8", on a CPU only.
            device: as torch names it.

        Raises:
            ConfigurationError: no such precision, or not on that device.
        """
        self._trained_precision("converted")
        if precision == "int8" and device != "cpu":
            raise ConfigurationError(f"precision int8 on {device}; it is made for a CPU, bf16 is wanted there")
        network = transformer_model.at_precision(self.network, precision).to(device)
        return type(self)(self.models, self.tokens, network, self.encoder, precision)

    def to_config(self) -> dict[str, Any]:
        """JSON values; the configuration of the network is transformers' own."""
        return {
            "encoder": self.encoder,
            "models": list(self.models),
            "tokens": self.tokens.to_config(),
            "network": transformer_model.to_config(self.network),
        }

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """The weights, float32, by the names transformers gives them."""
        self._trained_precision("saved")
        return {name: tensor.detach().cpu().numpy() for name, tensor in self.network.state_dict().items()}

    def to_files(self) -> dict[str, bytes]:
        """The tokenizer."""
        return self.tokens.to_files()

    @classmethod
    def from_artefact(cls, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], folder: Path) -> Self:
        """Inverse of `to_config`, `to_tensors` and `to_files`, in fp32 on the CPU.

        Raises:
            ArtefactError: the tokenizer is none.
            LookupError, TypeError or ValueError: a part is missing, or the weights are those of another network.
        """
        import torch

        models = tuple(config["models"])
        tokens = PromptTokens.from_artefact(config["tokens"], folder)
        # Arrays out of a file may be read-only, and a network is trained further in place.
        weights = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
        return cls(
            models, tokens, transformer_model.from_config(config["network"], len(models), weights), config["encoder"]
        )

    def _trained_precision(self, wish: str) -> None:
        if self.precision != "fp32":
            raise ConfigurationError(
                f"a router at precision {self.precision} cannot be {wish}; load it at fp32, as it was trained"
            )
