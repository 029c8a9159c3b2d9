"""The head "linear" with a sentence encoder beside its terms."""

from pathlib import Path

import numpy as np
import pytest
from encoder_samples import save_bert
from router_samples import fit, fresh

from presage.errors import ArtefactError, ConfigurationError
from presage.predictors.router.predictor import RouterConfig, RouterPredictor


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_it_is_loaded_by_name_and_must_be_the_same(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "bert")
    router = fit(RouterConfig(encoder=str(folder)), prompts=200)
    router.save(tmp_path / "model")
    prompts = fresh(60).outcomes.prompts
    said = router.probabilities(prompts)
    np.testing.assert_array_equal(RouterPredictor.load(tmp_path / "model").probabilities(prompts), said)
    one = list(router.forecast(prompts[0]).probabilities.values())
    np.testing.assert_allclose(one, said[0], atol=1e-5)
    save_bert(folder, seed=1)
    with pytest.raises(ArtefactError, match="another version of the text encoder"):
        RouterPredictor.load(tmp_path / "model")
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ArtefactError, match="text encoder"):
        RouterPredictor.load(tmp_path / "model")


def test_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such folder"):
        fit(RouterConfig(encoder=str(tmp_path / "gone")), prompts=200)
