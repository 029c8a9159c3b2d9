"""Any transformer from a folder becomes embeddings; the cache holds no text and never breaks a run."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_samples import LONGEST, save_bert, save_tokenizer

from presage.errors import ConfigurationError
from presage.features.text_encoder import TextEncoder, default_cache


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


def load(folder: Path, cache: Path) -> TextEncoder:
    return TextEncoder.load(str(folder), cache=cache)


def counting(encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts go through the model, call by call."""
    calls: list[int] = []
    embed = TextEncoder.embed

    def counted(self: TextEncoder, texts: Any, progress: Any) -> Any:
        calls.append(len(texts))
        return embed(self, texts, progress)

    monkeypatch.setattr(TextEncoder, "embed", counted)
    return calls


def test_an_embedding_is_the_mean_of_the_last_hidden_state(bert: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = ["plan search", "read", "verify read plan search verify unknown"]
    found = load(bert, tmp_path).encode(texts)
    model, tokenizer = AutoModel.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)
    for text, row in zip(texts, found, strict=True):
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            wanted = model(**inputs).last_hidden_state[0].mean(dim=0).numpy()
        np.testing.assert_allclose(row, wanted, atol=1e-5)


def test_a_decoder_is_read_too(tmp_path: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    GPT2Model(GPT2Config(vocab_size=9, n_embd=24, n_layer=1, n_head=2, n_positions=LONGEST)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, special=False)
    encoder = load(tmp_path, tmp_path / "cache")
    assert encoder.longest == LONGEST
    rows = encoder.encode(["plan search read", "plan", ""])
    np.testing.assert_allclose(rows[1], encoder.encode_one("plan"), atol=1e-6)
    assert not rows[2].any(), "no token at all"


def test_of_an_encoder_decoder_the_encoder_is_read(tmp_path: Path) -> None:
    from transformers import T5Config, T5Model

    T5Model(T5Config(vocab_size=9, d_model=24, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert np.isfinite(load(tmp_path, tmp_path / "cache").encode(["plan search"])).all()


def test_missing_texts_are_nan_and_order_is_kept(bert: Path, tmp_path: Path) -> None:
    encoder = load(bert, tmp_path)
    texts = ["read " * 9, None, "plan", "read " * 9, "", "lone \ud800 surrogate"]
    rows = encoder.encode(texts)
    assert rows.shape == (6, 24)
    assert rows.dtype == np.float32
    assert np.isnan(rows).any(axis=1).tolist() == [False, True, False, False, False, False]
    assert (rows[0] == rows[3]).all()
    np.testing.assert_allclose(load(bert, tmp_path / "other").encode_one("plan"), rows[2], atol=1e-5)


def test_a_long_text_keeps_head_and_tail(bert: Path, tmp_path: Path) -> None:
    encoder = load(bert, tmp_path)
    assert encoder.longest == LONGEST - 2, "the special tokens take their place"
    half = encoder.longest // 2
    short = "plan " * half + "read " * half
    long = "plan " * half + "search " * 50 + "read " * half
    np.testing.assert_allclose(encoder.encode_one(long), encoder.encode_one(short), atol=1e-6)


def test_progress_counts_every_distinct_text(bert: Path, tmp_path: Path) -> None:
    done: list[int] = []
    encoder = load(bert, tmp_path)
    encoder.encode(["plan", "read", None, "plan"], done.append)
    assert sum(done) == 2
    encoder.encode(["plan", "read", "search"], done.append)
    assert sum(done) == 5


def test_embeddings_are_kept_between_runs(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(bert, tmp_path).encode(["plan", "read search"])
    again = load(bert, tmp_path)
    calls = counting(again, monkeypatch)
    assert (again.encode(["read search", "plan"])[::-1] == first).all()
    assert (again.encode_one("plan") == first[0]).all()
    assert calls == []
    again.encode(["plan", "verify"])
    assert calls == [1]


def test_the_cache_holds_no_text(bert: Path, tmp_path: Path) -> None:
    encoder = load(bert, tmp_path)
    encoder.encode(["secretword plan"])
    content = encoder.cache_file.read_bytes()
    assert b"secretword" not in content
    assert hashlib.sha256(b"secretword plan").digest() in content
    assert [path.name for path in tmp_path.iterdir()] == [encoder.cache_file.name], "nothing half-written is left"


@pytest.mark.parametrize("damage", ["cut", "noise", "other width"])
def test_a_damaged_cache_is_made_anew(bert: Path, tmp_path: Path, damage: str) -> None:
    from safetensors.numpy import save_file

    encoder = load(bert, tmp_path)
    wanted = encoder.encode(["plan", "read"])
    if damage == "cut":
        encoder.cache_file.write_bytes(encoder.cache_file.read_bytes()[:-7])
    elif damage == "noise":
        encoder.cache_file.write_bytes(b"\x80\x04no safetensors")
    else:
        save_file({"keys": np.zeros((1, 32), np.uint8), "embeddings": np.zeros((1, 3), np.float32)}, encoder.cache_file)
    np.testing.assert_allclose(load(bert, tmp_path).encode(["plan", "read"]), wanted, atol=1e-6)
    assert load(bert, tmp_path).cached == 2


def test_a_cache_that_cannot_be_written_is_done_without(
    bert: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    rows = load(bert, tmp_path / "file").encode(["secretword plan"])
    assert np.isfinite(rows).all()
    assert "cannot write the embedding cache" in caplog.text
    assert "secretword" not in caplog.text


def test_other_weights_are_another_encoder(bert: Path, tmp_path: Path) -> None:
    other = save_bert(tmp_path / "other", seed=1)
    copy = shutil.copytree(bert, tmp_path / "copy")
    assert load(copy, tmp_path).digest == load(bert, tmp_path).digest != load(other, tmp_path).digest


def test_the_users_cache_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "presage" / "embeddings"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "presage" / "embeddings"


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", "no config.json"),
        ("*.safetensors", r"no weights \(\*\.safetensors\)"),
        ("tokenizer.json", "no tokenizer"),
        ("*", "no config.json and no weights .* and no tokenizer"),
    ],
)
def test_what_is_missing_is_named(bert: Path, tmp_path: Path, removed: str, message: str) -> None:
    folder = shutil.copytree(bert, tmp_path / "cut")
    for path in list(folder.glob(removed)):
        path.unlink()
    with pytest.raises(ConfigurationError, match=message):
        load(folder, tmp_path)


def test_pickled_weights_are_not_read(bert: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bert, tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="pickled weights are not supported"):
        load(folder, tmp_path)


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_file_is_one_clear_error(bert: Path, tmp_path: Path, broken: str) -> None:
    folder = shutil.copytree(bert, tmp_path / "broken")
    (folder / broken).write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        load(folder, tmp_path)


def test_a_model_with_code_of_its_own_is_not_run(bert: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bert, tmp_path / "code")
    config = '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}'
    (folder / "config.json").write_text(config)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        load(folder, tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_hub_name_offline_says_how_to_go_on(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigurationError, match=r"hub is set offline.*--text-encoder FOLDER"):
        TextEncoder.load("presage-tests/no-such-model", cache=tmp_path)


def test_a_hub_name_without_network_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host")

    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigurationError, match=r"ConnectionError.*--text-encoder FOLDER"):
        TextEncoder.load("presage-tests/no-such-model", cache=tmp_path)


def test_a_hub_name_is_its_snapshot(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot(name: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, allow_patterns))
        return str(bert)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    encoder = TextEncoder.load("org/model", cache=tmp_path)
    assert encoder.name == "org/model"
    assert encoder.digest == load(bert, tmp_path).digest
    [(name, patterns)] = asked
    assert name == "org/model"
    assert not any(pattern in ("*", "*.bin", "*.pt", "*.py") for pattern in patterns), "nothing that could execute"


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such folder"):
        load(tmp_path / "absent", tmp_path)
