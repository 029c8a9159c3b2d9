"""The transformer scorer: an encoder with one logit a model ("Chimera", §3.3 and appendix B.1).

A ModernBERT encoder, the pooled first token h, logits l_m = w_m·h + b_m: the sequence classification of transformers
with M labels, except for the loss (`presage.training.router.finetune`). ModernBERT adds a dense layer before
the logits; its `classifier_pooling` is the first token or the mean.

Loading an artefact needs neither the hub nor the folder of the encoder. Of a long prompt only the first h and the last
t tokens are kept, because an agent's role comes first, its task last, and pasted text between them.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from presage.errors import ArtefactError, ConfigurationError
from presage.features.text_encoder import (
    BATCH_TOKENS,
    batches_of_like_length,
    find_transformer,
    load_error,
    load_tokenizer,
    padded,
    readable,
    special_tokens,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn

Precision = Literal["fp32", "bf16", "int8"]
"""Of the weights while serving: as trained, bfloat16, or 8-bit linear layers with dynamic activation scaling. Artefacts
hold fp32."""

ROLE: Final = "encoder"
_LEFT_OUT: Final = (
    *("_name_or_path", "name_or_path", "transformers_version", "dtype", "architectures"),  # of the training machine
    *("id2label", "label2id", "problem_type"),
)

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
        """From a tokenizer of transformers; `longest` is the encoder's limit, special tokens included.

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

    def _cut(self, prompt: str) -> list[int]:
        text = readable(prompt)
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
        numbers = {"head": self.head, "tail": self.tail, "padding": self.padding}
        return {**numbers, "before": list(self.before), "after": list(self.after)}

    def to_files(self) -> dict[str, bytes]:
        """The tokenizer, as JSON in a stable order."""
        text = json.dumps(json.loads(self._tokenizer.to_str()), sort_keys=True, ensure_ascii=False)
        return {TOKENIZER_FILE: text.encode()}

    @classmethod
    def from_artefact(cls, config: Mapping[str, Any], folder: Path) -> Self:
        """Inverse of `to_config` and `to_files`; raises ArtefactError if the tokenizer is missing or malformed."""
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


@dataclass(frozen=True, eq=False)
class TransformerScorer:
    """An encoder with a logit for each of M models.

    Attributes:
        models: names, in the order of the logits.
        network: a transformers model with M logits, in evaluation mode.
        encoder: its origin, for information: a hub name, or the name of a folder.
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
        seed: int = 0,
    ) -> Self:
        """An encoder with untrained logits for M models.

        Args:
            encoder: a folder with config.json, a tokenizer and safetensors weights; or a name on the hub.
            models: M names.
            head_tokens, tail_tokens: tokens kept of a long prompt.
            seed: of the new weights.

        Raises:
            ConfigurationError: no such encoder, a file is missing or unreadable, or its logits are not a linear layer.
        """
        import torch
        from transformers import AutoModelForSequenceClassification

        folder = find_transformer(encoder, role=ROLE, option="--encoder")
        try:
            with quiet(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                network = AutoModelForSequenceClassification.from_pretrained(
                    str(folder),
                    num_labels=len(models),
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # the head may have another size
                    dtype=torch.float32,
                ).eval()
        except Exception as error:  # the libraries may raise anything for a foreign configuration
            raise load_error(folder, ROLE, error) from error
        if not isinstance(getattr(network, "classifier", None), torch.nn.Linear):
            raise ConfigurationError(
                f"{ROLE} {folder}: the logits of a {type(network).__name__} are not a linear layer `classifier`; "
                "expected an encoder such as ModernBERT, BERT or DeBERTa"
            )
        tokenizer = load_tokenizer(folder, ROLE)
        longest = getattr(network.config, "max_position_embeddings", None)
        padding = next((i for i in (network.config.pad_token_id, tokenizer.pad_token_id) if i is not None), 0)
        tokens = PromptTokens.of_pretrained(tokenizer, head_tokens, tail_tokens, longest, padding)
        name = Path(encoder).expanduser().resolve().name if Path(encoder).expanduser().is_dir() else encoder
        return cls(tuple(models), tokens, network, name)

    def logits(self, prompts: Sequence[str]) -> NDArray[np.float32]:
        """Log-odds float32 [n, M]; other prompts of a batch affect a row by rounding, in fp32 about 1e-6."""
        import torch

        ids = self.tokens.ids(prompts)
        out = np.zeros((len(prompts), len(self.models)), np.float32)
        device = next(self.network.parameters()).device
        for rows in batches_of_like_length([len(row) for row in ids], BATCH_TOKENS):
            batch, mask = (
                torch.from_numpy(part).to(device) for part in padded([ids[row] for row in rows], self.tokens.padding)
            )
            with torch.inference_mode():
                out[rows] = self.network(input_ids=batch, attention_mask=mask).logits.float().cpu().numpy()
        return out

    def with_models(self, models: Sequence[str], seed: int = 0) -> Self:
        """The encoder for other models, to train further: known models keep their logits, new ones are untrained."""
        import torch

        self._trained_precision("trained further")
        old = self.network.classifier
        network = copy.deepcopy(self.network)
        new = network.classifier = torch.nn.Linear(old.in_features, len(models), bias=old.bias is not None)
        with torch.no_grad():
            spread = getattr(network.config, "initializer_range", None) or 0.02
            new.weight.normal_(0.0, spread, generator=torch.Generator().manual_seed(seed))
            if old.bias is not None:
                new.bias.zero_()
            for place, name in enumerate(models):
                if name in self.models:
                    earlier_place = self.models.index(name)
                    new.weight[place] = old.weight[earlier_place]
                    if old.bias is not None:
                        new.bias[place] = old.bias[earlier_place]
        network.config.num_labels = network.num_labels = len(models)
        return type(self)(tuple(models), self.tokens, network.eval(), self.encoder)

    def at_precision(self, precision: Precision, device: str = "cpu") -> Self:
        """A copy for serving; the layer of the logits is never quantised to 8 bits.

        Raises ConfigurationError if there is no such precision, or the device does not support it.
        """
        import torch

        self._trained_precision("converted")
        if precision == "int8" and device != "cpu":
            raise ConfigurationError(f"precision int8 on {device}; int8 runs on a CPU only: use bf16")
        if precision not in get_args(Precision):
            raise ConfigurationError(f"precision is {precision!r}; expected one of {', '.join(get_args(Precision))}")
        network = copy.deepcopy(self.network)
        if precision == "bf16":
            network.to(torch.bfloat16)
        elif precision == "int8":
            with warnings.catch_warnings():
                # The pinned torch announces torchao as the successor, one more dependency for the same kernels today.
                warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*torch.ao.quantization")
                warnings.filterwarnings("ignore", category=UserWarning, message=".*quantized tensor creation")
                encoder: nn.Module = torch.ao.quantization.quantize_dynamic(
                    network.base_model, {torch.nn.Linear}, dtype=torch.qint8
                )
            setattr(network, network.base_model_prefix, encoder)
        return type(self)(self.models, self.tokens, network.to(device), self.encoder, precision)

    def to_config(self) -> dict[str, Any]:
        """JSON values; the network's are its transformers configuration without facts of the training machine."""
        network = self.network.config.to_dict().items()
        return {
            "encoder": self.encoder,
            "models": list(self.models),
            "tokens": self.tokens.to_config(),
            "network": {key: value for key, value in network if key not in _LEFT_OUT},
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

        Raises ArtefactError, LookupError, TypeError or ValueError for a missing or malformed part.
        """
        import torch
        from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

        models = tuple(config["models"])
        tokens = PromptTokens.from_artefact(config["tokens"], folder)
        # Copied: arrays of a file may be read-only, and training modifies the network in place.
        weights = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
        try:
            configuration = AutoConfig.for_model(**config["network"], num_labels=len(models))
            kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(configuration)]
            with quiet():
                network, loading = kind.from_pretrained(
                    None, config=configuration, state_dict=weights, dtype=torch.float32, output_loading_info=True
                )
        except Exception as error:  # transformers raises its own error types
            raise ValueError(f"transformers cannot build the network ({type(error).__name__})") from error
        if wrong := [name for names in loading.values() for name in names]:
            raise ValueError(f"weights do not belong to the network, such as {wrong[0]!r}")
        return cls(models, tokens, network.eval(), config["encoder"])

    def _trained_precision(self, wish: str) -> None:
        if self.precision != "fp32":
            raise ConfigurationError(
                f"a router at precision {self.precision} cannot be {wish}; load it at fp32, as it was trained"
            )


def checkpoint_activations(model: Any, on: bool) -> None:
    """Turn activation checkpointing on or off (recompute the forward pass instead of storing it)."""
    wish = "enable" if on else "disable"
    # Newer versions of transformers deprecate the second name; those that vLLM 0.32 supports know only that one.
    change = getattr(model, f"activation_checkpointing_{wish}", None) or getattr(
        model, f"gradient_checkpointing_{wish}"
    )
    change()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of transformers on new logits and its progress bars."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
