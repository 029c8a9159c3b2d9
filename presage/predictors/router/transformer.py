"""The transformer scorer: an encoder with one logit a model ("Chimera", §3.3 and appendix B.1).

`transformer_model` builds the network, `presage.training.router.finetune` trains it. An artefact is self-contained:
loading needs neither the hub nor the folder of the encoder. Of a long prompt only the first h and the last t tokens are
kept, because an agent's role comes first, its task last, and pasted text between them. The artefact stores h and t. Of
very long prompts only the ends are tokenised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from presage.errors import ArtefactError, ConfigurationError
from presage.features.text_encoder import find_transformer, load_error, special_tokens
from presage.predictors.router import transformer_model
from presage.predictors.router.transformer_model import Pooling, Precision

if TYPE_CHECKING:
    from tokenizers import Tokenizer


TOKENIZER_FILE: Final = "tokenizer.json"

_CHARACTERS_A_TOKEN: Final = 32  # more than a token of text has; runs of blanks may yield fewer tokens than requested


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """A tokenizer, stored as data, with the truncation of long prompts.

    Attributes:
        head, tail: tokens kept of the beginning and of the end.
        before, after: ids of the special tokens around a prompt.
        padding: id of padding tokens, which are masked.
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
            tokenizer: one backed by the `tokenizers` library.
            head, tail: tokens to keep of a long prompt.
            longest: the encoder's limit, special tokens included; None for no limit.
            padding: id of the padding token.

        Raises:
            ConfigurationError: another tokenizer, or head and tail exceed the limit.
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
                f"head_tokens {head} and tail_tokens {tail} of a prompt; expected 1 or more in all"
            )
        if room is not None and head + tail > room:
            raise ConfigurationError(
                f"head_tokens {head} and tail_tokens {tail} of a prompt are more than the {room} this encoder reads: "
                "choose smaller numbers"
            )
        return cls(head, tail, before, after, padding, _bare(backend.to_str()))

    def ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt, at most head + tail between the special tokens."""
        return [[*self.before, *self._cut(prompt), *self.after] for prompt in prompts]

    def batch(self, rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Padded ids and mask, int64 [n, L] each; L ≥ 1 is the length of the longest row."""
        length = max(1, *(len(row) for row in rows))
        ids = np.full((len(rows), length), self.padding, np.int64)
        mask = np.zeros((len(rows), length), np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
            mask[i, : len(row)] = 1
        return ids, mask

    def _cut(self, prompt: str) -> list[int]:
        # JSON can contain lone surrogates; tokenizers reject them.
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
        """JSON values beside the tokenizer."""
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
            ArtefactError: the tokenizer is missing or malformed.
        """
        path = folder / TOKENIZER_FILE
        try:
            tokenizer = _bare(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises Exception itself
            raise ArtefactError(
                f"{path}: found no tokenizer ({type(error).__name__}); expected the tokenizer the router was trained "
                "with. Copy the artefact again from its source, or train anew."
            ) from error
        before, after = tuple(config["before"]), tuple(config["after"])
        return cls(int(config["head"]), int(config["tail"]), before, after, int(config["padding"]), tokenizer)


def batches_of_like_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices of rows in batches, longest first; each has one row, or at most `tokens` tokens with padding."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True)
    done = 0
    while done < len(order):
        rows = order[done : done + max(1, tokens // max(1, lengths[order[done]]))]
        yield rows
        done += len(rows)


def _bare(text: str) -> Tokenizer:
    """A tokenizer without truncation and padding; `PromptTokens` does both."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


DEFAULT_ENCODER: Final = "answerdotai/ModernBERT-large"
HEAD_TOKENS: Final = 256
TAIL_TOKENS: Final = 254
"""With ModernBERT's two special tokens a prompt is 512 tokens at most."""

BATCH_TOKENS: Final = 8_192
"""Most tokens of a batch, padding included; bounds memory."""


@dataclass(frozen=True, eq=False)
class TransformerScorer:
    """An encoder with a logit for each of M models.

    Attributes:
        models: names, in the order of the logits.
        tokens: tokenizes prompts.
        network: a transformers model with M logits, in evaluation mode.
        encoder: its origin, for information: a hub name, or the name of a folder.
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
        """An encoder with untrained logits.

        Args:
            encoder: a folder with config.json, a tokenizer and safetensors weights; or a name on the hub.
            models: M names.
            head_tokens, tail_tokens: tokens kept of a long prompt.
            pooling: first token or mean, for encoders with that setting; None keeps theirs.
            seed: of the new weights.

        Raises:
            ConfigurationError: no such encoder, or a file is missing or unreadable.
        """
        folder = find_transformer(encoder, role=transformer_model.ROLE, option="--encoder")
        from transformers import AutoTokenizer

        network = transformer_model.from_folder(folder, len(models), pooling, seed)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the library may raise anything for a foreign configuration
            raise load_error(folder, transformer_model.ROLE, error) from error
        longest = getattr(network.config, "max_position_embeddings", None)
        padding = next((i for i in (network.config.pad_token_id, tokenizer.pad_token_id) if i is not None), 0)
        tokens = PromptTokens.of_pretrained(tokenizer, head_tokens, tail_tokens, longest, padding)
        name = Path(encoder).expanduser().resolve().name if Path(encoder).expanduser().is_dir() else encoder
        return cls(tuple(models), tokens, network, name)

    def logits(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """Log-odds float32 [n, M].

        The other prompts of a batch affect a row by rounding only: about 1e-6 in fp32, more at other precisions.
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
        """The encoder for other models, to train further: known models keep their logits, new ones are untrained."""
        self._trained_precision("trained further")
        known = {name: place for place, name in enumerate(self.models)}
        network = transformer_model.with_models(self.network, [known.get(name) for name in models], seed)
        return type(self)(tuple(models), self.tokens, network, self.encoder)

    def at_precision(self, precision: Precision, device: str = "cpu") -> Self:
        """A copy for serving.

        Args:
            precision: "fp32"; "bf16"; "int8", on a CPU only.
            device: torch device name.

        Raises:
            ConfigurationError: the precision is unknown, or the device does not support it.
        """
        self._trained_precision("converted")
        if precision == "int8" and device != "cpu":
            raise ConfigurationError(f"precision int8 on {device}; int8 runs on a CPU only: use bf16")
        network = transformer_model.at_precision(self.network, precision).to(device)
        return type(self)(self.models, self.tokens, network, self.encoder, precision)

    def to_config(self) -> dict[str, Any]:
        """JSON values; the configuration of the network is that of transformers."""
        return {
            "encoder": self.encoder,
            "models": list(self.models),
            "tokens": self.tokens.to_config(),
            "network": transformer_model.to_config(self.network),
        }

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """The weights, float32, by their names in transformers."""
        self._trained_precision("saved")
        return {name: tensor.detach().cpu().numpy() for name, tensor in self.network.state_dict().items()}

    def to_files(self) -> dict[str, bytes]:
        """The tokenizer."""
        return self.tokens.to_files()

    @classmethod
    def from_artefact(cls, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], folder: Path) -> Self:
        """Inverse of `to_config`, `to_tensors` and `to_files`, in fp32 on the CPU.

        Raises:
            ArtefactError: the tokenizer is malformed.
            LookupError, TypeError or ValueError: a part is missing, or the weights belong to another network.
        """
        import torch

        models = tuple(config["models"])
        tokens = PromptTokens.from_artefact(config["tokens"], folder)
        # Copied: arrays of a file may be read-only, and training modifies the network in place.
        weights = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
        return cls(
            models, tokens, transformer_model.from_config(config["network"], len(models), weights), config["encoder"]
        )

    def _trained_precision(self, wish: str) -> None:
        if self.precision != "fp32":
            raise ConfigurationError(
                f"a router at precision {self.precision} cannot be {wish}; load it at fp32, as it was trained"
            )
