"""The network of the transformer scorer: a transformers encoder with one linear layer of M logits.

Ni et al., "Chimera", §3.3: a ModernBERT encoder, the pooled first token h, logits l_m = w_m·h + b_m. This is sequence
classification of transformers with M labels, except for the loss, which does not handle missing labels
(`presage.training.router.finetune` has ours). ModernBERT adds a dense layer before the logits; its
`classifier_pooling` is the first token or the mean.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from presage.errors import ConfigurationError
from presage.features.text_encoder import load_error

if TYPE_CHECKING:
    import torch
    from torch import nn

Precision = Literal["fp32", "bf16", "int8"]
"""Of the weights while serving: as trained, bfloat16, or 8-bit linear layers with dynamic activation scaling. Artefacts
hold fp32."""

Pooling = Literal["cls", "mean"]

ROLE: Final = "encoder"
_OF_THE_MACHINE: Final = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "architectures")
_OF_THE_LABELS: Final = ("id2label", "label2id", "problem_type")


def from_folder(folder: Path, models: int, pooling: Pooling | None, seed: int) -> Any:
    """An encoder with untrained logits, float32, on the CPU.

    Args:
        folder: with config.json and safetensors weights.
        models: M.
        pooling: for encoders with that setting; None keeps theirs.
        seed: of the new weights.

    Raises:
        ConfigurationError: unreadable, or its logits are not a linear layer.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    chosen = {} if pooling is None else {"classifier_pooling": pooling}
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForSequenceClassification.from_pretrained(
                str(folder),
                num_labels=models,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # the head may have another size
                dtype=torch.float32,
                **chosen,
            )
    except Exception as error:  # the libraries may raise anything for a foreign configuration
        raise load_error(folder, ROLE, error) from error
    if not isinstance(getattr(model, "classifier", None), torch.nn.Linear):
        raise ConfigurationError(
            f"{ROLE} {folder}: the logits of a {type(model).__name__} are not a linear layer `classifier`; expected an "
            "encoder such as ModernBERT, BERT or DeBERTa"
        )
    return model.eval()


def to_config(model: Any) -> dict[str, Any]:
    """Configuration of the network as JSON values, without facts of the training machine."""
    left_out = (*_OF_THE_MACHINE, *_OF_THE_LABELS)
    return {key: value for key, value in model.config.to_dict().items() if key not in left_out}


def from_config(config: Mapping[str, Any], models: int, weights: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild the network from the values of `to_config` and its weights; needs no folder and no hub.

    Raises:
        ValueError: weights and configuration do not match, or transformers does not know the configuration.
    """
    import torch
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig

    try:
        known = AutoConfig.for_model(**config, num_labels=models)
        kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(known)]
        with quiet():
            model, loading = kind.from_pretrained(
                None, config=known, state_dict=dict(weights), dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # transformers raises its own error types
        raise ValueError(f"transformers cannot build the network ({type(error).__name__})") from error
    if wrong := [name for names in loading.values() for name in names]:
        raise ValueError(f"weights do not belong to the network, such as {wrong[0]!r}")
    return model.eval()


def with_models(model: Any, places: Sequence[int | None], seed: int) -> Any:
    """A copy with logits for M' other models, each copied from an old one or untrained.

    Args:
        model: a network of this file.
        places: index of each new logit among the M old ones; None for a new model.
        seed: of the new weights.
    """
    import torch

    old = model.classifier
    widened = copy.deepcopy(model)
    widened.classifier = torch.nn.Linear(old.in_features, len(places), bias=old.bias is not None)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        spread = getattr(model.config, "initializer_range", None) or 0.02
        widened.classifier.weight.normal_(0.0, spread, generator=generator)
        if old.bias is not None:
            widened.classifier.bias.zero_()
        for new, place in enumerate(places):
            if place is not None:
                widened.classifier.weight[new] = old.weight[place]
                if old.bias is not None:
                    widened.classifier.bias[new] = old.bias[place]
    widened.config.num_labels = widened.num_labels = len(places)
    return widened.eval()


def at_precision(model: Any, precision: Precision) -> Any:
    """A copy at another precision; the layer of the logits is never quantised to 8 bits.

    Raises:
        ConfigurationError: there is no such precision.
    """
    import torch

    if precision not in get_args(Precision):
        raise ConfigurationError(f"precision is {precision!r}; expected one of {', '.join(get_args(Precision))}")
    changed = copy.deepcopy(model)
    if precision == "bf16":
        return changed.to(torch.bfloat16)
    if precision == "int8":
        with warnings.catch_warnings():
            # The pinned torch announces torchao as the successor, one more dependency for the same kernels today.
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*torch.ao.quantization")
            warnings.filterwarnings("ignore", category=UserWarning, message=".*quantized tensor creation")
            encoder: nn.Module = torch.ao.quantization.quantize_dynamic(
                changed.base_model, {torch.nn.Linear}, dtype=torch.qint8
            )
        setattr(changed, changed.base_model_prefix, encoder)
    return changed


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
