"""Text embeddings from any transformer in a local folder or on the hub, cached on disk.

An embedding is the mean of the last hidden state over the tokens of the text. A text longer than the model's limit
keeps its first and its last tokens, half each, because messages often name the next agent at the end.

Only the hub client uses the network, unless the hub is set offline. Weights are read from safetensors only, and custom
model code is never run. Text is never stored: the cache keys embeddings by the SHA-256 of their text.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError

_log = logging.getLogger(__name__)

BATCH_TOKENS: Final = 8_192
"""Most tokens of a batch, padding included; bounds memory."""

SAVE_EVERY_TEXTS: Final = 10_000
"""Embeddings between two writes of the cache; an interrupted run loses at most so many."""

_ROLE: Final = "text encoder"
_LONGEST_TOKENS: Final = 1_000_000  # a tokenizer without a limit reports an astronomical one


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A loaded transformer and the cache of its embeddings.

    Attributes:
        name: absolute folder or hub name, as stored in artefacts.
        digest: "sha256:…" over its configuration, tokenizer and weights.
        size: d, width of an embedding.
        longest: tokens of the longest text read without truncation, special tokens excluded.
    """

    name: str
    digest: str
    size: int
    longest: int
    cache_file: Path
    _tokenizer: Any
    _model: Any
    _before: tuple[int, ...]
    _after: tuple[int, ...]
    _known: dict[bytes, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        """Number of cached embeddings; their texts are not embedded again."""
        return len(self._known)

    @classmethod
    def load(cls, name: str, *, cache: Path | None = None) -> TextEncoder:
        """Load an encoder, as `find_transformer` finds it, and its cache; `cache` is a folder or `default_cache()`.

        Raises ConfigurationError if the folder or name does not exist, a file is missing, or the model cannot be read.
        """
        folder = find_transformer(name, role=_ROLE, option="--text-encoder")
        import torch
        from transformers import AutoModel

        tokenizer = load_tokenizer(folder, _ROLE)
        try:
            model = AutoModel.from_pretrained(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
            )
        except Exception as error:  # the libraries may raise anything for an unknown configuration
            raise load_error(folder, _ROLE, error) from error
        if model.config.is_encoder_decoder:
            model = model.get_encoder()
        before, after = special_tokens(tokenizer)
        limits = [_LONGEST_TOKENS, tokenizer.model_max_length]
        limits += [getattr(model.config, "max_position_embeddings", None) or _LONGEST_TOKENS]
        digest = _digest(folder)
        cache_file = (cache or default_cache()) / f"{digest.removeprefix('sha256:')}.safetensors"
        return cls(
            name=str(Path(name).expanduser().resolve()) if Path(name).expanduser().is_dir() else name,
            digest=digest,
            size=int(model.config.hidden_size),
            longest=max(1, min(limits) - len(before) - len(after)),
            cache_file=cache_file,
            _tokenizer=tokenizer,
            _model=model.eval(),
            _before=before,
            _after=after,
            _known=_read_cache(cache_file, int(model.config.hidden_size)),
        )

    def encode(self, texts: Sequence[str | None], progress: Callable[[int], None] | None = None) -> NDArray[np.float32]:
        """Embeddings of texts, float32 [n, d], NaN rows for None; new ones are added to the cache.

        `progress` is called with the number of distinct texts finished since its last call, including cached ones.
        """
        keys = [None if text is None else _key(text) for text in texts]
        fresh = {key: text for key, text in zip(keys, texts, strict=True) if key is not None and text is not None}
        items = [(key, text) for key, text in fresh.items() if key not in self._known]
        if progress is not None and len(fresh) > len(items):
            progress(len(fresh) - len(items))
        for start in range(0, len(items), SAVE_EVERY_TEXTS):
            part = items[start : start + SAVE_EVERY_TEXTS]
            self._known.update(zip([key for key, _ in part], self.embed([t for _, t in part], progress), strict=True))
            _write_cache(self.cache_file, self._known, self.size)
        out = np.full((len(texts), self.size), np.nan, np.float32)
        for i, key in enumerate(keys):
            if key is not None:
                out[i] = self._known[key]
        return out

    def encode_one(self, text: str) -> NDArray[np.float32]:
        """The embedding of one text, float32 [d], for serving; reads the cache but does not add to it.

        Equals the row of `encode` within 1e-5 of the largest entry: batches sum in another order.
        """
        cached = self._known.get(_key(text))
        return self.embed([text], None)[0] if cached is None else cached.copy()

    def embed(self, texts: Sequence[str], progress: Callable[[int], None] | None) -> NDArray[np.float32]:
        """Embeddings of texts, float32 [n, d], in batches of similar length."""
        import torch

        tokens = [self._tokens(text) for text in texts]
        out = np.zeros((len(texts), self.size), np.float32)  # a text without a token stays zero
        for rows in batches_of_like_length([len(ids) for ids in tokens], BATCH_TOKENS):
            ids, mask = padded([tokens[row] for row in rows], 0)
            if mask.any():
                with torch.inference_mode():
                    answer = self._model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
                    hidden = answer.last_hidden_state.numpy()
                total = (hidden * mask[:, :, None].astype(np.float32)).sum(axis=1)
                out[rows] = total / np.maximum(mask.sum(axis=1, keepdims=True), 1)
            if progress is not None:
                progress(len(rows))
        return out

    def _tokens(self, text: str) -> list[int]:
        """Token ids of a text, truncated in the middle, between the model's special tokens."""
        ids: list[int] = self._tokenizer(readable(text), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > self.longest:
            tail = self.longest // 2
            ids = ids[: self.longest - tail] + ids[len(ids) - tail :]
        return [*self._before, *ids, *self._after]


def readable(text: str) -> str:
    """The text without lone surrogates, which JSON can contain and tokenizers reject."""
    return text.encode("utf-8", "replace").decode("utf-8")


def batches_of_like_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Indices of rows in batches, longest first; each has one row, or at most `tokens` tokens with padding."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True)
    done = 0
    while done < len(order):
        rows = order[done : done + max(1, tokens // max(1, lengths[order[done]]))]
        yield rows
        done += len(rows)


def padded(rows: Sequence[Sequence[int]], padding: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Padded ids and mask, int64 [n, L] each; L ≥ 1 is the length of the longest row."""
    length = max(1, *(len(row) for row in rows))
    ids = np.full((len(rows), length), padding, np.int64)
    mask = np.zeros((len(rows), length), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return ids, mask


def default_cache() -> Path:
    """Default folder of the embedding cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "presage" / "embeddings"


def _digest(folder: Path) -> str:
    """Digest of the names and contents of all files that affect an embedding."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in FILES for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        digest.update(path.name.encode() + b"\0" + content)
    return f"sha256:{digest.hexdigest()}"


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _read_cache(path: Path, size: int) -> dict[bytes, NDArray[np.float32]]:
    """Embeddings by key; empty if the file is absent or damaged, because they can be recomputed."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        keys, embeddings = tensors["keys"], tensors["embeddings"]
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        _log.warning("%s: embedding cache cannot be read (%s); starting a new one", path, type(error).__name__)
        return {}
    if keys.shape != (len(embeddings), 32) or embeddings.shape[1:] != (size,) or not np.isfinite(embeddings).all():
        _log.warning("%s: not an embedding cache of width %d; starting a new one", path, size)
        return {}
    return {key.tobytes(): embedding for key, embedding in zip(keys, embeddings, strict=True)}


def _write_cache(path: Path, cached: dict[bytes, NDArray[np.float32]], size: int) -> None:
    """Replace the file atomically; on failure, log a warning and continue without a cache."""
    from safetensors.numpy import save_file

    keys = np.frombuffer(b"".join(cached), np.uint8).reshape(-1, 32)
    fresh = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file({"keys": keys, "embeddings": np.stack(list(cached.values())).reshape(-1, size)}, fresh)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    except Exception as error:  # safetensors wraps a full disk in an error of its own
        _log.warning("%s: cannot write the embedding cache (%s)", path, type(error).__name__)


WEIGHTS: Final = "*.safetensors"
TOKENIZERS: Final = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "*.model")
FILES: Final = (WEIGHTS, "*.safetensors.index.json", "config.json", *TOKENIZERS, "*token*.json")
"""Patterns of the files that affect the output of a transformer."""

_HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_transformer(name: str, *, role: str, option: str) -> Path:
    """The folder of a transformer with config.json, weights and a tokenizer, or the snapshot of a hub name.

    Errors, a ConfigurationError if it does not exist or a file is missing, call it `role` ("text encoder") and name the
    command-line `option` that takes a folder ("--text-encoder").
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _snapshot(
            name, role, f"give a folder with config.json, a tokenizer and safetensors weights: {option} FOLDER"
        )
    wanted = {"config.json": ("config.json",), "weights (*.safetensors)": (WEIGHTS,), "tokenizer": TOKENIZERS}
    missing = [what for what, patterns in wanted.items() if not any(any(folder.glob(p)) for p in patterns)]
    if missing:
        other = any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
        hint = "; pickled weights are not supported: convert them to safetensors" if other else ""
        raise ConfigurationError(
            f"{role} {folder}: no {' and no '.join(missing)}{hint}; expected a folder as save_pretrained() "
            "of the model and of its tokenizer writes it"
        )
    return folder


def load_tokenizer(folder: Path, role: str) -> Any:
    """The tokenizer of a transformer; raises ConfigurationError if the libraries cannot load it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries may raise anything for an unknown configuration
        raise load_error(folder, role, error) from error


def load_error(folder: Path, role: str, error: Exception) -> ConfigurationError:
    """One-line error for a transformer that the libraries cannot load."""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return ConfigurationError(
        f"{role} {folder}: cannot be loaded ({reason[0]}); expected a transformer that AutoModel can "
        "load, with safetensors weights and no code of its own"
    )


def special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that a tokenizer adds before and after a text, found by example, which works for every tokenizer."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return tuple(framed[:start]), tuple(framed[start + len(plain) :])
    return (), ()


def _snapshot(name: str, role: str, advice: str) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise ConfigurationError(f"{role} {name!r}: no such folder, and not a valid hub name; {advice}")
    from huggingface_hub import snapshot_download

    offline = any(
        os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES), local_files_only=offline))
    except Exception as error:  # the hub client raises errors of its HTTP library, of its own and OSError
        how = (
            "the hub is set offline and its local cache lacks the model"
            if offline
            else f"it could not be downloaded ({type(error).__name__})"
        )
        raise ConfigurationError(
            f"{role} {name!r}: no such folder, and {how}; without a network, copy the "
            f"model from a machine that has it and {advice}"
        ) from error
