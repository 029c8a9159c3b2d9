"""Embeddings of texts by any transformer from a local folder or the hub, kept on disk between runs.

An embedding is the mean of the last hidden state over the tokens of the text: it serves encoders and decoders alike. A
text past the model's length keeps its first and its last tokens, half each, because agents are called by name at the
end of a message.

A hub name is resolved to its snapshot folder first, so there is one way to load; its network use is the hub client's,
and none where the hub is offline. Weights are read from safetensors only.

No code of a model's own is run. Text is never stored: embeddings lie in the cache under the SHA-256 of their text.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from presage.errors import ConfigurationError

_log = logging.getLogger(__name__)

BATCH_TOKENS: Final = 8_192
"""Tokens of a batch, padding included: bounds memory whatever the lengths."""

SAVE_EVERY_TEXTS: Final = 10_000
"""An interrupted run loses at most so many embeddings."""

_ROLE: Final = "text encoder"
_LONGEST_TOKENS: Final = 1_000_000  # a tokenizer without a limit reports an astronomical one


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A loaded transformer and the cache of its embeddings.

    Attributes:
        name: folder (absolute) or hub name, as an artefact keeps it.
        digest: "sha256:…" over its configuration, tokenizer and weights.
        size: d, width of an embedding.
        longest: tokens of the longest text it reads whole, special tokens excluded.
        cache_file: where embeddings are kept.
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
        """How many embeddings it holds; texts among them are not embedded again."""
        return len(self._known)

    @classmethod
    def load(cls, name: str, *, cache: Path | None = None) -> TextEncoder:
        """Loads an encoder and what the cache has of it.

        Args:
            name: a folder with config.json, a tokenizer and safetensors weights; or a name on the hub.
            cache: folder of the cache; None for `default_cache()`.

        Raises:
            ConfigurationError: there is no such folder or name, a file is missing, or the model cannot be read.
        """
        folder = find_transformer(name, role=_ROLE, option="--text-encoder")
        import torch
        from transformers import AutoModel, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            model = AutoModel.from_pretrained(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
            )
        except Exception as error:  # whatever a foreign configuration makes these libraries raise
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

        Args:
            texts: any number.
            progress: called with the number of distinct texts done since its last call, those in the cache included.
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
        """The embedding of one text, float32 [d], for serving: from the cache if it is there, never added to it.

        Equal to its row of `encode` within 1e-5 of the largest entry: sums of a batch are ordered otherwise.
        """
        known = self._known.get(_key(text))
        return self.embed([text], None)[0] if known is None else known.copy()

    def embed(self, texts: Sequence[str], progress: Callable[[int], None] | None) -> NDArray[np.float32]:
        """Embeddings of texts, float32 [n, d], in batches of like length."""
        import torch

        tokens = [self._tokens(text) for text in texts]
        order = sorted(range(len(texts)), key=lambda i: len(tokens[i]), reverse=True)  # the greediest batch first
        out = np.zeros((len(texts), self.size), np.float32)  # a text without a token stays zero
        done = 0
        while done < len(order):
            length = max(1, len(tokens[order[done]]))
            rows = order[done : done + max(1, BATCH_TOKENS // length)]
            ids = np.zeros((len(rows), length), np.int64)
            mask = np.zeros((len(rows), length), np.int64)
            for i, row in enumerate(rows):
                ids[i, : len(tokens[row])] = tokens[row]
                mask[i, : len(tokens[row])] = 1
            if mask.any():
                with torch.inference_mode():
                    answer = self._model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
                    hidden = answer.last_hidden_state.numpy()
                total = (hidden * mask[:, :, None].astype(np.float32)).sum(axis=1)
                out[rows] = total / np.maximum(mask.sum(axis=1, keepdims=True), 1)
            done += len(rows)
            if progress is not None:
                progress(len(rows))
        return out

    def _tokens(self, text: str) -> list[int]:
        """Token ids of a text, cut in the middle, between the model's special tokens."""
        # A lone surrogate, which JSON can spell, is no text to a tokenizer.
        readable = text.encode("utf-8", "replace").decode("utf-8")
        ids: list[int] = self._tokenizer(readable, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) > self.longest:
            tail = self.longest // 2
            ids = ids[: self.longest - tail] + ids[len(ids) - tail :]
        return [*self._before, *ids, *self._after]


def default_cache() -> Path:
    """Where embeddings are kept unless a caller says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "presage" / "embeddings"


def _digest(folder: Path) -> str:
    """Over the names and bytes of everything that decides an embedding."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in FILES for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        digest.update(path.name.encode() + b"\0" + content)
    return f"sha256:{digest.hexdigest()}"


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _read_cache(path: Path, size: int) -> dict[bytes, NDArray[np.float32]]:
    """Embeddings by key; nothing where the file is absent or damaged, for it can always be made again."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        keys, embeddings = tensors["keys"], tensors["embeddings"]
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        _log.warning("%s: no readable cache of embeddings (%s); it is made anew", path, type(error).__name__)
        return {}
    if keys.shape != (len(embeddings), 32) or embeddings.shape[1:] != (size,) or not np.isfinite(embeddings).all():
        _log.warning("%s: not a cache of embeddings of width %d; it is made anew", path, size)
        return {}
    return {key.tobytes(): embedding for key, embedding in zip(keys, embeddings, strict=True)}


def _write_cache(path: Path, known: dict[bytes, NDArray[np.float32]], size: int) -> None:
    """Replaces the file at once; where that cannot be done, the run goes on without."""
    from safetensors.numpy import save_file

    keys = np.frombuffer(b"".join(known), np.uint8).reshape(-1, 32)
    fresh = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file({"keys": keys, "embeddings": np.stack(list(known.values())).reshape(-1, size)}, fresh)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    except Exception as error:  # safetensors wraps a full disk in an error of its own
        _log.warning("%s: embeddings are not kept (%s)", path, type(error).__name__)


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
    """What a tokenizer puts before and after a text: found by an example, the only way common to all tokenizers."""
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
