"""An encoder scores prompts whatever their length and company, and stands in its artefact alone."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import ArtefactError, ConfigurationError
from presage.features.text_encoder import batches_of_like_length
from presage.predictors.common.artefact import read_artefact, write_artefact
from presage.predictors.router.predictor import RouterConfig, RouterPredictor
from presage.predictors.router.transformer import TransformerScorer
from presage.testing.models import MODELS, WORDS, planted, save_encoder, save_tokenizer

PROMPTS = planted(40, seed=3)[0]
SHORT = {"head_tokens": 5, "tail_tokens": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder") / "tiny-bert")


@pytest.fixture(scope="module")
def scorer(folder: Path) -> TransformerScorer:
    return TransformerScorer.from_encoder(str(folder), models=MODELS, head_tokens=100, tail_tokens=100)


@pytest.fixture(scope="module")
def short(folder: Path) -> TransformerScorer:
    return TransformerScorer.from_encoder(str(folder), models=MODELS, **SHORT)


def save(scorer: TransformerScorer, folder: Path) -> Path:
    write_artefact(
        folder,
        kind="router",
        config=scorer.to_config(),
        tensors=scorer.to_tensors(),
        training_data={},
        files=scorer.to_files(),
    )
    return folder


def load(folder: Path) -> TransformerScorer:
    artefact = read_artefact(folder, kind="router")
    return TransformerScorer.from_artefact(artefact.config, artefact.tensors, folder)


def test_logits_are_those_of_the_classification_of_transformers(folder: Path, scorer: TransformerScorer) -> None:
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, row in zip(PROMPTS, scorer.logits(PROMPTS), strict=True):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            wanted = scorer.network(**inputs).logits[0].numpy()
        np.testing.assert_allclose(row, wanted, atol=1e-5)


@given(order=st.permutations(range(8)), size=st.integers(0, 8))
def test_a_prompt_scores_the_same_whatever_stands_beside_it(
    scorer: TransformerScorer, order: list[int], size: int
) -> None:
    chosen = [PROMPTS[place] for place in order[:size]]
    logits = scorer.logits(chosen)
    assert logits.shape == (size, len(MODELS))
    assert logits.dtype == np.float32
    for prompt, row in zip(chosen, logits, strict=True):
        np.testing.assert_allclose(row, scorer.logits([prompt])[0], atol=1e-5)


def test_what_is_no_proper_text_scores_too(scorer: TransformerScorer) -> None:
    assert np.isfinite(scorer.logits(["", " ", "\ud800", "\x00", "日本語 " * 500])).all()


@given(words=st.lists(st.sampled_from(WORDS), max_size=40))
def test_a_long_prompt_keeps_its_head_and_its_tail(short: TransformerScorer, words: list[str]) -> None:
    alone = {word: short.tokens.ids([word])[0][1] for word in set(words)}
    kept = words if len(words) <= 8 else words[:5] + words[-3:]
    assert short.tokens.ids([" ".join(words)]) == [[2, *(alone[word] for word in kept), 3]]


def test_only_what_stands_in_between_may_change_unnoticed(short: TransformerScorer) -> None:
    ends = ["word1 " * 5, " word2 word3 word4"]
    same = short.logits([ends[0] + "word7 " * 20 + ends[1], ends[0] + "word8 " * 10 + ends[1]])
    np.testing.assert_allclose(same[0], same[1], atol=1e-6)
    other = short.logits([ends[0] + "word7 " * 20 + " word2 word3 word5"])
    assert np.abs(other[0] - same[0]).max() > 1e-5


def test_of_a_huge_prompt_the_ends_alone_are_tokenised(short: TransformerScorer) -> None:
    head, tail = " ".join(WORDS[:5]), " ".join(WORDS[5:8])
    huge = f"{head} {' '.join(['middle'] * 1_000_000)} {tail}"
    assert short.tokens.ids([huge]) == short.tokens.ids([f"{head} middle {tail}"])


def test_no_tail_and_no_head_are_possible(folder: Path) -> None:
    words = " ".join(WORDS[:9])
    for keep, kept in (((4, 0), WORDS[:4]), ((0, 4), WORDS[5:9])):
        found = TransformerScorer.from_encoder(str(folder), models=MODELS, head_tokens=keep[0], tail_tokens=keep[1])
        assert found.tokens.ids([words]) == found.tokens.ids([" ".join(kept)])


@given(lengths=st.lists(st.integers(0, 50), max_size=30), tokens=st.integers(1, 120))
def test_batches_hold_every_row_once_and_their_budget(lengths: list[int], tokens: int) -> None:
    batches = list(batches_of_like_length(lengths, tokens))
    assert sorted(place for rows in batches for place in rows) == list(range(len(lengths)))
    assert all(len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= tokens for rows in batches)
    longest = [max(lengths[row] for row in rows) for rows in batches]
    assert longest == sorted(longest, reverse=True)


def test_the_artefact_answers_without_hub_cache_or_encoder(tmp_path: Path) -> None:
    encoder = save_encoder(tmp_path / "encoder")
    scorer = TransformerScorer.from_encoder(str(encoder), models=MODELS, **SHORT, seed=1)
    folder = save(scorer, tmp_path / "model")
    shutil.rmtree(encoder)
    code = (
        "import sys, json, pathlib\n"
        "from presage.predictors.common.artefact import read_artefact\n"
        "from presage.predictors.router.transformer import TransformerScorer\n"
        "folder = pathlib.Path(sys.argv[1]); artefact = read_artefact(folder)\n"
        "scorer = TransformerScorer.from_artefact(artefact.config, artefact.tensors, folder)\n"
        "print(json.dumps(scorer.logits(json.loads(sys.argv[2])).tolist()))\n"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "no-cache")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), json.dumps(PROMPTS[:5])],
        env=offline,
        capture_output=True,
        text=True,
        check=True,
    )
    np.testing.assert_allclose(json.loads(done.stdout), scorer.logits(PROMPTS[:5]), atol=1e-6)
    assert not (tmp_path / "no-cache").exists()
    assert str(tmp_path) not in (folder / "config.json").read_text() + (folder / "tokenizer.json").read_text()


def test_the_same_seed_gives_the_same_artefact_and_another_one_does_not(folder: Path, tmp_path: Path) -> None:
    made = [
        save(TransformerScorer.from_encoder(str(folder), models=MODELS, **SHORT, seed=seed), tmp_path / str(place))
        for place, seed in enumerate((7, 7, 8))
    ]
    names = ("config.json", "model.safetensors", "tokenizer.json")
    first, second, other = ([(path / name).read_bytes() for name in names] for path in made)
    assert first == second
    assert first[1] != other[1]


def test_what_was_read_is_written_the_same(short: TransformerScorer, tmp_path: Path) -> None:
    once = save(short, tmp_path / "once")
    again = save(load(once), tmp_path / "again")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (again / name).read_bytes() == (once / name).read_bytes()


def test_weights_of_another_network_and_a_broken_tokenizer_are_refused(
    short: TransformerScorer, tmp_path: Path
) -> None:
    config, tensors = short.to_config(), short.to_tensors()
    (tmp_path / "tokenizer.json").write_bytes(short.to_files()["tokenizer.json"])
    missing = {name: tensor for name, tensor in tensors.items() if "layers.2." not in name}
    narrow = {**tensors, "classifier.weight": tensors["classifier.weight"][:, :-1]}
    more = {**tensors, "classifier.other": tensors["classifier.bias"]}
    for wrong in (missing, narrow, more):
        with pytest.raises(ValueError, match=r"weights do not belong to the network|cannot build"):
            TransformerScorer.from_artefact(config, wrong, tmp_path)
    with pytest.raises(ValueError, match="transformers cannot build the network"):
        TransformerScorer.from_artefact(
            {**config, "network": {**config["network"], "model_type": "none-such"}}, tensors, tmp_path
        )
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ArtefactError, match=r"tokenizer\.json: found no tokenizer"):
        TransformerScorer.from_artefact(config, tensors, tmp_path)


def test_known_models_keep_their_logits_beside_new_ones(short: TransformerScorer) -> None:
    wider = short.with_models(["newcomer", MODELS[2], MODELS[0]], seed=5)
    np.testing.assert_allclose(wider.logits(PROMPTS)[:, 1:], short.logits(PROMPTS)[:, [2, 0]], atol=1e-6)
    assert wider.models == ("newcomer", MODELS[2], MODELS[0])
    assert load_again(wider).logits(PROMPTS).shape == (len(PROMPTS), 3)
    assert short.models == MODELS  # the one it came from is as it was


def load_again(scorer: TransformerScorer) -> TransformerScorer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return load(save(scorer, Path(folder) / "model"))


@pytest.mark.parametrize(("precision", "atol"), [("bf16", 0.1), ("int8", 0.1)])
def test_lower_precision_answers_nearly_the_same_and_is_never_saved(
    short: TransformerScorer, precision: str, atol: float
) -> None:
    lower = short.at_precision(precision)
    found, wanted = lower.logits(PROMPTS), short.logits(PROMPTS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=atol)
    assert not np.array_equal(found, wanted)
    for wish in (lower.to_tensors, lambda: lower.with_models(["a"]), lambda: lower.at_precision("fp32")):
        with pytest.raises(ConfigurationError, match="load it at fp32"):
            wish()


def test_an_unknown_precision_is_named(short: TransformerScorer) -> None:
    with pytest.raises(ConfigurationError, match="precision is 'fp8'; expected one of fp32, bf16, int8"):
        short.at_precision("fp8")
    with pytest.raises(ConfigurationError, match="int8 on cuda"):
        short.at_precision("int8", device="cuda")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return


def test_a_hub_name_without_network_says_how_to_point_to_a_folder(offline: None) -> None:
    with pytest.raises(ConfigurationError, match=r"encoder 'nobody/no-such-model': no such folder.*--encoder FOLDER"):
        TransformerScorer.from_encoder("nobody/no-such-model", models=MODELS)


def test_a_folder_that_is_no_encoder_is_told_what_it_lacks(folder: Path, tmp_path: Path) -> None:
    def broken(name: str) -> Path:
        return Path(shutil.copytree(folder, tmp_path / name))

    def refuse(place: Path, match: str, **options: int) -> None:
        with pytest.raises(ConfigurationError, match=match):
            TransformerScorer.from_encoder(str(place), models=MODELS, **(SHORT | options))

    lacking = broken("no-tokenizer")
    for path in lacking.glob("*token*"):
        path.unlink()
    refuse(lacking, "no tokenizer; expected a folder as save_pretrained")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", r"no config\.json and no weights .* and no tokenizer")
    strange = broken("strange")
    (strange / "config.json").write_text('{"name": "value"}')
    refuse(strange, "cannot be loaded")
    cut = broken("cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:1000])
    refuse(cut, "cannot be loaded")
    refuse(folder, "head_tokens 200 and tail_tokens 200 .* more than the 254", head_tokens=200, tail_tokens=200)
    refuse(folder, "expected 1 or more in all", head_tokens=0, tail_tokens=0)


def test_an_encoder_of_another_family_is_read_where_its_logits_are_linear(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for kind, config in ((BertModel, BertConfig), (RobertaModel, RobertaConfig)):
        place = tmp_path / kind.__name__
        kind(config(vocab_size=60, max_position_embeddings=64, **sizes)).save_pretrained(place)
        save_tokenizer(place, [" ".join(WORDS[:50])])
    bert = TransformerScorer.from_encoder(str(tmp_path / "BertModel"), models=MODELS, **SHORT)
    np.testing.assert_allclose(load_again(bert).logits(["word1 word2"]), bert.logits(["word1 word2"]), atol=1e-6)
    with pytest.raises(ConfigurationError, match="not a linear layer `classifier`"):
        TransformerScorer.from_encoder(str(tmp_path / "RobertaModel"), models=MODELS, **SHORT)


def routed(scorer: TransformerScorer, prompts: int = 240) -> RouterPredictor:
    """A router around an encoder that is not trained."""
    texts, correct = planted(prompts, seed=5)
    half = prompts // 2
    return RouterPredictor(RouterConfig(head="transformer")).fit(
        texts[:half], correct[:half], texts[half:], correct[half:], models=MODELS, scorer=scorer
    )


def test_beside_a_transformer_stands_a_linear_head_of_the_same_labels(short: TransformerScorer, tmp_path: Path) -> None:
    router = routed(short)
    router.save(tmp_path / "router")
    loaded = RouterPredictor.load(tmp_path / "router")
    for of in (router, loaded):
        assert of.fallback is not None
        assert of.fallback.models == of.models
        assert of.fallback.labels.tolist() == of.labels.tolist()
    texts, correct = planted(400, seed=6, unknown=0.0)
    found = loaded.fallback.probabilities(texts)
    assert found.tolist() == router.fallback.probabilities(texts).tolist()
    right = np.mean((found - correct) ** 2)
    assert right < 0.5 * np.mean((router.base - correct) ** 2)  # this encoder knows nothing; the linear head does
    assert loaded.probabilities(texts[:9]).tolist() == router.probabilities(texts[:9]).tolist()


def test_without_a_common_term_there_is_no_linear_head(short: TransformerScorer, tmp_path: Path) -> None:
    texts = [chr(ord("a") + n) * 3 for n in range(8)]
    correct = np.array([[n % 2, 1, 0] for n in range(8)], np.float32)[:, : len(MODELS)]
    router = RouterPredictor(RouterConfig(head="transformer", min_evidence=1))
    router.fit(texts[:4], correct[:4], texts[4:], correct[4:], models=MODELS, scorer=short)
    assert router.fallback is None
    router.save(tmp_path / "router")
    assert RouterPredictor.load(tmp_path / "router").fallback is None


def test_a_linear_head_of_other_models_is_refused(short: TransformerScorer, tmp_path: Path) -> None:
    router = routed(short)
    assert router.fallback is not None
    router.fallback.models = ("others", *router.models[1:])
    router.save(tmp_path / "router")
    with pytest.raises(ArtefactError, match="linear head"):
        RouterPredictor.load(tmp_path / "router")
