"""Where a transformer's files lie: a folder of one's own, or the snapshot of a name on the hub.

A hub name is resolved to its snapshot folder first, so there is one way to load; its network use is the hub client's,
and none where that is told to be offline. Weights are read from safetensors only.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

from presage.errors import ConfigurationError

WEIGHTS: Final = "*.safetensors"
TOKENIZERS: Final = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "*.model")
FILES: Final = (WEIGHTS, "*.safetensors.index.json", "config.json", *TOKENIZERS, "*token*.json")
"""Patterns of everything that decides what a transformer says of a text."""

_HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_transformer(name: str, *, role: str, option: str) -> Path:
    """The folder of a transformer, with config.json, weights and a tokenizer in it.

    Args:
        name: a folder, or a name on the hub.
        role: what the transformer is here, as errors call it ("text encoder").
        option: of a command, to name a folder by ("--text-encoder").

    Raises:
        ConfigurationError: there is no such folder or name, or a file is missing.
    """
    folder = _resolve(name, role, option)
    _check_files(folder, role)
    return folder


def load_error(folder: Path, role: str, error: Exception) -> ConfigurationError:
    """What a foreign configuration makes the libraries raise, as one sentence."""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return ConfigurationError(
        f"{role} {folder}: cannot be loaded ({reason[0]}); a transformer that AutoModel knows, with "
        "safetensors weights and no code of its own, is wanted"
    )


def special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a tokenizer puts before and after a text: asked by example, no other way is common to all of them."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return tuple(framed[:start]), tuple(framed[start + len(plain) :])
    return (), ()


def _resolve(name: str, role: str, option: str) -> Path:
    """The folder of an encoder: its own, or the snapshot of a hub name."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    advice = f"give a folder with config.json, a tokenizer and safetensors weights: {option} FOLDER"
    if not _HUB_NAME.fullmatch(name):
        raise ConfigurationError(f"{role} {name!r}: no such folder, and no name on the hub; {advice}")
    from huggingface_hub import snapshot_download

    offline = any(
        os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES), local_files_only=offline))
    except Exception as error:  # the hub client raises errors of its HTTP library, of its own and OSError
        how = (
            "not in the local hub cache, and the hub is set offline" if offline else f"not had ({type(error).__name__})"
        )
        raise ConfigurationError(
            f"{role} {name!r}: no such folder here, and from the hub {how}; where there is no network, copy the "
            f"model from a machine that has it and {advice}"
        ) from error


def _check_files(folder: Path, role: str) -> None:
    """The first thing missing is named, before a library describes its absence in its own words."""
    wanted = {"config.json": ("config.json",), "weights (*.safetensors)": (WEIGHTS,), "tokenizer": TOKENIZERS}
    missing = [what for what, patterns in wanted.items() if not any(any(folder.glob(p)) for p in patterns)]
    if missing:
        other = any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
        hint = "; its weights are pickled, which is not read: convert them to safetensors" if other else ""
        raise ConfigurationError(
            f"{role} {folder}: no {' and no '.join(missing)}{hint}; a folder as save_pretrained() of the model "
            "and of its tokenizer writes it is wanted"
        )
