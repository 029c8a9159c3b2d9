"""The transformer learns what is planted deep in a prompt, and a training that is killed ends as if it had not been."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from presage.errors import ConfigurationError, OutputError, TraceError
from presage.predictors.common.artefact import find_pickles
from presage.predictors.router.transformer import TransformerScorer
from presage.testing.models import MODELS, planted, save_encoder
from presage.training.router.finetune import FinetuneConfig, Finetuned, Labelled, finetune

QUICK = {"epochs": 2, "learning_rate": 1e-3, "batch_size": 8, "checkpoint_steps": 3}
TESTS = Path(__file__).resolve().parent


def labelled(n: int, seed: int) -> Labelled:
    return Labelled(*planted(n, seed))


def fresh(folder: Path, seed: int = 0) -> TransformerScorer:
    return TransformerScorer.from_encoder(str(folder), models=MODELS, head_tokens=60, tail_tokens=60, seed=seed)


def fit(scorer: TransformerScorer, checkpoints: Path, *, rows: int = 40, **options: Any) -> Finetuned:
    """A quick training; keywords of `finetune` go there, others into its configuration."""
    known = {name: options.pop(name) for name in ("resume", "progress") if name in options}
    config = FinetuneConfig(**{**QUICK, **options})
    return finetune(scorer, labelled(rows, 0), labelled(30, 1), config, checkpoints=checkpoints, **known)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(autouse=True)
def no_bars(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Nothing is printed by a training: output is the command's."""
    yield
    seen = capfd.readouterr()
    assert seen.out == ""
    assert "%|" not in seen.err


def test_the_loss_is_binary_cross_entropy_over_known_labels() -> None:
    import torch

    from presage.training.router.finetune import known_loss

    logits = torch.tensor([[0.0, 2.0], [-1.0, 3.0]], requires_grad=True)
    loss = known_loss(logits, torch.tensor([[1.0, float("nan")], [0.25, 0.0]]))
    # -log s(0); -(.25 log s(-1) + .75 log s(1)); -log s(-3)
    assert loss.item() == pytest.approx(
        (np.log(2) + 0.25 * np.log1p(np.e) + 0.75 * np.log1p(1 / np.e) + np.log1p(np.e**3)) / 3
    )
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[0, 1] == 0
    assert known_loss(logits, torch.full((2, 2), float("nan"))).item() == 0


@pytest.mark.slow
def test_a_word_deep_in_the_prompt_is_learnt(folder: Path, tmp_path: Path) -> None:
    trained = fit(fresh(folder), tmp_path / "ck", rows=1500, batch_size=16, checkpoint_steps=500)
    assert max(epoch["macro_ap"] for epoch in trained.history) >= 0.95
    prompts, correct = planted(200, seed=9, unknown=0.0)
    assert ((trained.scorer.logits(prompts) > 0) == (correct > 0.5)).mean() >= 0.95


def test_the_best_epoch_is_kept_and_the_working_folder_goes(folder: Path, tmp_path: Path) -> None:
    import torch

    from presage.training.router.finetune import known_loss

    trained = fit(fresh(folder), tmp_path / "ck", epochs=4, learning_rate=0.02, best_by="loss")
    losses = [epoch["loss"] for epoch in trained.history]
    assert [epoch["epoch"] for epoch in trained.history] == [1, 2, 3, 4]
    assert trained.best_epoch == 1 + int(np.argmin(losses))
    prompts, correct = planted(30, 1)
    loss = known_loss(torch.from_numpy(trained.scorer.logits(prompts)), torch.from_numpy(correct)).item()
    assert loss == pytest.approx(min(losses), abs=1e-5)
    assert trained.main_process
    assert not (tmp_path / "ck").exists()


def test_the_best_epoch_by_average_precision_is_the_one_that_ranks_best(folder: Path, tmp_path: Path) -> None:
    history = fit(fresh(folder), tmp_path / "ck", epochs=3)
    ranked = [epoch["macro_ap"] for epoch in history.history]
    assert history.best_epoch == 1 + int(np.argmax(ranked))


def test_without_a_validation_part_the_last_epoch_is_kept(folder: Path, tmp_path: Path) -> None:
    trained = finetune(fresh(folder), labelled(16, 0), None, FinetuneConfig(**QUICK), checkpoints=tmp_path / "ck")
    assert (trained.history, trained.best_epoch) == ((), 2)


def test_a_validation_part_that_cannot_rank_is_judged_by_its_loss(folder: Path, tmp_path: Path) -> None:
    one_sided = Labelled(planted(10, 1)[0], np.ones((10, 3), np.float32))
    trained = finetune(fresh(folder), labelled(16, 0), one_sided, FinetuneConfig(**QUICK), checkpoints=tmp_path / "ck")
    assert [epoch["macro_ap"] for epoch in trained.history] == [None, None]
    assert trained.best_epoch == 1 + int(np.argmin([epoch["loss"] for epoch in trained.history]))


def test_the_same_seed_gives_the_same_weights_and_another_one_does_not(folder: Path, tmp_path: Path) -> None:
    once, again, other = (weights(fit(fresh(folder), tmp_path / "ck", rows=24, seed=seed).scorer) for seed in (1, 1, 2))
    assert_same(once, again)
    assert any(not np.array_equal(once[name], other[name]) for name in once)


def test_an_order_is_new_each_epoch_and_groups_like_lengths(folder: Path) -> None:
    from presage.training.router.finetune import LikeLengths

    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 500, size=400)]
    sampler = LikeLengths(lengths, 8, seed=4)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert sorted(first) == sorted(second) == list(range(400))
    assert first != second
    again = LikeLengths(lengths, 8, seed=4)
    again.set_epoch(1)
    assert list(again) == second
    spreads = [np.ptp([lengths[row] for row in first[at : at + 8]]) for at in range(0, 400, 8)]
    assert np.mean(spreads) < np.ptp(lengths) / 4


@pytest.mark.slow
def test_a_killed_training_ends_with_the_weights_it_would_have_had(folder: Path, tmp_path: Path) -> None:
    checkpoints, step = tmp_path / "ck", 7  # within the second epoch
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(TESTS), str(folder), str(checkpoints), str(step)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoints.is_dir()
    told: list[float] = []
    resumed = fit(fresh(folder), checkpoints, resume=True, progress=lambda _, share: told.append(float(share or 0)))
    assert told[0] == (step // 3 * 3 + 1) / 10  # the first step after the last checkpoint, of ten
    straight = fit(fresh(folder), tmp_path / "other")
    assert_same(weights(resumed.scorer), weights(straight.scorer))
    assert resumed.history == straight.history
    assert not checkpoints.exists()


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_router_finetune import fit, fresh
def progress(_, share):
    if round(share * 10) == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)
fit(fresh(Path(sys.argv[2])), Path(sys.argv[3]), progress=progress)
"""


def interrupted(folder: Path, checkpoints: Path, step: int = 7, **options: Any) -> None:
    def progress(_: str, share: float | None) -> None:
        if round((share or 0) * 10) == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(fresh(folder), checkpoints, progress=progress, **options)


def test_a_checkpoint_cut_while_it_was_written_is_passed_over(folder: Path, tmp_path: Path) -> None:
    interrupted(folder, tmp_path / "ck")
    (tmp_path / "ck" / "checkpoint-6" / "trainer_state.json").write_text('{"epoch":')
    resumed = fit(fresh(folder), tmp_path / "ck", resume=True)
    assert_same(weights(resumed.scorer), weights(fit(fresh(folder), tmp_path / "other").scorer))


def test_checkpoints_are_neither_overwritten_nor_mixed(folder: Path, tmp_path: Path) -> None:
    interrupted(folder, tmp_path / "ck")
    with pytest.raises(ConfigurationError, match="resume it with --resume"):
        fit(fresh(folder), tmp_path / "ck")
    for scorer, options in ((fresh(folder), {"rows": 41}), (fresh(folder), {"seed": 5}), (fresh(folder, seed=3), {})):
        with pytest.raises(ConfigurationError, match="on other outcomes, another encoder or other settings"):
            fit(scorer, tmp_path / "ck", resume=True, **options)
    fit(fresh(folder), tmp_path / "ck", resume=True)


def test_to_resume_where_nothing_is_starts_at_the_beginning(folder: Path, tmp_path: Path) -> None:
    resumed = fit(fresh(folder), tmp_path / "ck", resume=True)
    assert_same(weights(resumed.scorer), weights(fit(fresh(folder), tmp_path / "other").scorer))


def test_files_of_others_in_the_working_folder_stay(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    fit(fresh(folder), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert find_pickles(tmp_path) == []


def test_new_models_are_learnt_beside_old_ones(folder: Path, tmp_path: Path) -> None:
    old = fit(fresh(folder), tmp_path / "ck").scorer
    wider = old.with_models(["newcomer", *MODELS], seed=2)
    before = wider.to_tensors()["classifier.weight"].copy()
    prompts, correct = planted(24, 5)
    alone = np.full((24, 4), np.nan, np.float32)
    alone[:, 0] = correct[:, 1]  # only the newcomer was asked
    finetune(
        wider, Labelled(prompts, alone), None, FinetuneConfig(**QUICK, weight_decay=0.0), checkpoints=tmp_path / "ck"
    )
    after = wider.to_tensors()["classifier.weight"]
    np.testing.assert_array_equal(after[1:], before[1:])
    assert not np.array_equal(after[0], before[0])


def test_computing_twice_changes_no_weight(folder: Path, tmp_path: Path) -> None:
    plain = weights(fit(fresh(folder), tmp_path / "ck", rows=24).scorer)
    twice = weights(fit(fresh(folder), tmp_path / "ck", rows=24, gradient_checkpointing=True).scorer)
    for name, weight in plain.items():
        np.testing.assert_allclose(twice[name], weight, atol=1e-5)


def test_memory_that_runs_out_is_told_with_what_helps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    scorer = fresh(folder)
    monkeypatch.setattr(scorer.network, "forward", full)
    with pytest.raises(
        ConfigurationError, match=r"8 prompts of up to 120 tokens.*--batch-size.*--gradient-checkpointing"
    ):
        fit(scorer, tmp_path / "ck")


def test_a_training_that_diverges_is_no_model(folder: Path, tmp_path: Path) -> None:
    scorer = fresh(folder)
    import torch

    with torch.no_grad():
        scorer.network.classifier.weight[0, 0] = float("inf")
    with pytest.raises(ConfigurationError, match="diverged at a learning rate of"):
        fit(scorer, tmp_path / "ck", rows=8)


def test_a_folder_that_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="file/ck: a checkpoint could not be written"):
        fit(fresh(folder), tmp_path / "file" / "ck")


@pytest.mark.slow
def test_a_full_disk_is_told(folder: Path, tmp_path: Path) -> None:
    largest_bytes = 2_000_000  # the weights fit, and the state of the optimizer does not
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(TESTS), str(folder), str(tmp_path / "ck"), str(largest_bytes)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "OutputError: " in done.stderr.splitlines()[-1]
    assert "ck: a checkpoint could not be written" in done.stderr.splitlines()[-1]


FULL = """
import resource, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_router_finetune import fit, fresh
scorer = fresh(Path(sys.argv[2]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2)
fit(scorer, Path(sys.argv[3]))
"""


def test_labels_are_wanted_and_settings_kept_in_range(folder: Path, tmp_path: Path) -> None:
    nothing = Labelled(["a"], np.full((1, 3), np.nan, np.float32))
    with pytest.raises(TraceError, match="none of 1 training prompts has a known outcome"):
        finetune(fresh(folder), nothing, None, checkpoints=tmp_path)
    for wrong in ({"epochs": 0}, {"learning_rate": 0.0}, {"batch_size": 0}, {"warmup": 1.0}, {"best_by": "luck"}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            FinetuneConfig(**wrong).check()


@pytest.mark.slow
def test_processes_launched_together_train_one_model(folder: Path, tmp_path: Path) -> None:
    """On GPUs `accelerate launch` starts them in the same way; on CPUs it would ask for MPI."""
    script, launcher = tmp_path / "train.py", [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    script.write_text(TOGETHER)
    done = subprocess.run(
        [*launcher, str(script), str(TESTS), str(folder), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]
    assert [process["main"] for process in told] == [True, False]
    assert len({process["weights"] for process in told}) == 1
    assert told[0]["steps"] == 6  # two epochs of 40 rows, 8 on each device
    assert not (tmp_path / "ck").exists()


TOGETHER = """
import hashlib, json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_router_finetune import fit, fresh, weights
told = []
trained = fit(fresh(Path(sys.argv[2])), Path(sys.argv[3]) / "ck", progress=lambda _, share: told.append(share))
digest = hashlib.sha256(b"".join(array.tobytes() for array in weights(trained.scorer).values())).hexdigest()
answer = {"main": trained.main_process, "weights": digest, "steps": len(told)}
(Path(sys.argv[3]) / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(answer))
"""


def weights(scorer: TransformerScorer) -> dict[str, np.ndarray]:
    return {name: tensor.copy() for name, tensor in scorer.to_tensors().items()}


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)
