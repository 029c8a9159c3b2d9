"""The whole predictor: kept and loaded again, repeatable, honest about what it never saw, better where order says."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tiny_model import WORKFLOWS, Tiny, steps_of

from presage.datasets.synthetic.workflows import generate
from presage.errors import ArtefactError, InputError
from presage.features.moment import MOMENTS, Moment
from presage.features.prefixes import MASKED, Prefixes, prefixes_of
from presage.features.states import States, StateSource, StepTexts, captured_source
from presage.features.vocabulary import Vocabulary
from presage.predictors.common.artefact import artefact_digest, write_artefact
from presage.predictors.common.probabilities import cross_entropy
from presage.predictors.next_agent.baselines import PublishedConfig, PublishedGraphSage
from presage.predictors.next_agent.boosting import BoostingConfig
from presage.predictors.next_agent.network_weights import NetworkConfig
from presage.predictors.next_agent.ngram import BackoffNgram
from presage.predictors.next_agent.parts import COMPONENTS, PATTERNS, NextAgentParts
from presage.predictors.next_agent.predictor import KIND, NextAgentConfig, NextAgentPredictor
from presage.testing.prefixes import prefixes_from

FAST = NextAgentConfig(network=NetworkConfig(epochs=2), boosting=BoostingConfig(rounds=4))
SOURCES: tuple[States, ...] = ("none", "captured", "text")


@cache
def drawn(states: States, horizon: int = 3) -> tuple[pa.Table, Prefixes, StateSource]:
    """Sixty workflows of a known law, cut ones among them, with states and texts."""
    table = generate("retry", 60, 0, state_size=16, censored=0.3).table
    prefixes = prefixes_of(table, Vocabulary.from_table(table), horizon)
    source = StateSource("none") if states == "none" else captured_source(table)
    if states == "text":
        every = np.ones(prefixes.steps, bool)
        source, _ = StepTexts.of(table, prefixes).fit(every, prefixes.workflow % 5, relevant=False, seed=0)
    return table, prefixes.with_states(source.states(table)), source


def parts(prefixes: Prefixes) -> tuple[Prefixes, Prefixes]:
    order = np.arange(prefixes.workflows)
    return prefixes.take(order[order % 5 > 0]), prefixes.take(order[order % 5 == 0])


def fit(states: States, horizon: int = 3, seed: int = 0, config: NextAgentConfig = FAST) -> NextAgentPredictor:
    _, prefixes, source = drawn(states, horizon)
    return NextAgentPredictor(config, seed).fit(*parts(prefixes), source=source)


@cache
def fitted(states: States, horizon: int = 3) -> NextAgentPredictor:
    return fit(states, horizon)


def assert_forecasts(found: NDArray[np.float32], prefixes: Prefixes) -> None:
    assert found.shape == (prefixes.steps, prefixes.horizon, prefixes.vocabulary.outcomes)
    assert found.dtype == np.float32
    assert (found > 0).all()
    np.testing.assert_allclose(found.sum(axis=-1), 1.0, atol=1e-5)


def words(
    drawn_words: Sequence[str], agents: str, config: NextAgentConfig = FAST, **more: Any
) -> tuple[NextAgentPredictor, Prefixes]:
    prefixes = prefixes_from(drawn_words, agents=agents, **more)
    return NextAgentPredictor(config).fit(*parts(prefixes)), prefixes


# --- kept, and repeatable ---


@pytest.mark.parametrize("states", SOURCES)
def test_what_is_loaded_forecasts_the_same_bits_and_saves_the_same_bytes(states: States, tmp_path: Path) -> None:
    model, (table, prefixes, _) = fitted(states), drawn(states)
    model.save(tmp_path / "first", {"digest": "sha256:0"})
    again = NextAgentPredictor.load(tmp_path / "first")
    again.save(tmp_path / "second", {"digest": "sha256:0"})
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert (again.config, again.seed, again.horizon) == (model.config, model.seed, 3)
    assert again.vocabulary == model.vocabulary
    steps = table.to_pylist()[: prefixes.offsets[1]]
    assert again.forecast(steps) == model.forecast(steps)
    for moment in MOMENTS:
        np.testing.assert_array_equal(again.predict(prefixes, moment), model.predict(prefixes, moment))


@pytest.mark.parametrize("states", SOURCES)
def test_a_seed_decides_the_artefact(states: States, tmp_path: Path) -> None:
    digests = []
    for i, model in enumerate((fitted(states), fit(states), fit(states, seed=1))):
        model.save(tmp_path / str(i))
        digests.append(artefact_digest(tmp_path / str(i)))
    assert digests[0] == digests[1] != digests[2]


def test_an_artefact_without_one_of_its_parts_is_refused(tmp_path: Path) -> None:
    fitted("captured").save(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())["config"]
    for missing in (
        "network/head",
        "trees.states.prefill/leaves",
        "n-gram/count",
        "mixture/shares",
        "projection.prefill/bias",
    ):
        left = {name: array for name, array in tensors.items() if name != missing}
        write_artefact(tmp_path / "part", kind=KIND, config=config, tensors=left, training_data={})
        with pytest.raises(ArtefactError, match="not a complete next-agent artefact"):
            NextAgentPredictor.load(tmp_path / "part")
    for missing in ("predictor", "vocabulary", "horizon", "seed", "states"):
        left = {name: value for name, value in config.items() if name != missing}
        write_artefact(tmp_path / "part", kind=KIND, config=left, tensors=tensors, training_data={})
        with pytest.raises(ArtefactError, match=f"not a complete next-agent artefact.*{missing}"):
            NextAgentPredictor.load(tmp_path / "part")
    unknown = config | {"predictor": config["predictor"] | {"colour": 1}}
    write_artefact(tmp_path / "part", kind=KIND, config=unknown, tensors=tensors, training_data={})
    with pytest.raises(ArtefactError, match="colour"):
        NextAgentPredictor.load(tmp_path / "part")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("network/head", lambda a: a[:, :-1]),
        ("network/kind", lambda a: a[:-1]),
        ("network/step_states", lambda a: a[1:]),
        ("trees.ids/feature", lambda a: a + np.int16(30_000)),
        ("trees.states.completion/feature", lambda a: a - np.int16(1_000)),
        ("trees.ids/feature", lambda a: a[0]),
        ("trees.ids/threshold", lambda a: a[:, 1:]),
        ("trees.states.completion/leaves", lambda a: a[:, 1:]),
        ("trees.tokens.prefill/leaves", lambda a: a[:, :, 1:]),
        ("trees.ids/base", lambda a: a[1:]),
        ("mixture/shares", lambda a: a[:, :, 1:]),
        ("mixture/evidence", lambda a: a[:, 1:]),
        ("mixture/evidence", lambda a: a[1:]),
        ("projection.prefill/matrix", lambda a: a[:, 1:]),
        ("projection.prefill/matrix", lambda a: a[1:]),
    ],
)
def test_parts_that_do_not_fit_each_other_never_reach_compiled_code(
    name: str, change: Callable[[NDArray[Any]], NDArray[Any]], tmp_path: Path
) -> None:
    fitted("captured").save(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())["config"]
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    write_artefact(tmp_path / "part", kind=KIND, config=config, tensors=tensors, training_data={})
    with pytest.raises(ArtefactError, match="not a complete next-agent artefact"):
        NextAgentPredictor.load(tmp_path / "part")


def test_an_artefact_without_a_projection_it_was_trained_with_is_refused(tmp_path: Path) -> None:
    fitted("captured").save(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())["config"]
    left = {name: array for name, array in tensors.items() if not name.startswith("projection.prefill/")}
    write_artefact(tmp_path / "part", kind=KIND, config=config, tensors=left, training_data={})
    with pytest.raises(ArtefactError, match="not a complete next-agent artefact"):
        NextAgentPredictor.load(tmp_path / "part")


# --- forecasts ---


@pytest.mark.parametrize(("states", "horizon"), [("none", 1), ("none", 5), ("captured", 1), ("captured", 5)])
def test_any_horizon(states: States, horizon: int, tmp_path: Path) -> None:
    model, (table, prefixes, _) = fitted(states, horizon), drawn(states, horizon)
    for moment in MOMENTS:
        assert_forecasts(model.predict(prefixes, moment), prefixes)
    said = model.forecast(table.to_pylist()[:2])
    assert len(said.agents) == len(said.end) == horizon
    model.save(tmp_path / "model")
    again = NextAgentPredictor.load(tmp_path / "model")
    np.testing.assert_array_equal(again.predict(prefixes, "prefill"), model.predict(prefixes, "prefill"))


@pytest.mark.parametrize("states", SOURCES)
def test_step_by_step_a_workflow_is_forecast_as_in_its_trace(states: States) -> None:
    model, (table, prefixes, _) = fitted(states), drawn(states)
    both = model.predict_both(prefixes)
    rows = table.to_pylist()
    # One state times a matrix rounds otherwise than many at once; without states every bit is the same.
    exact = {"atol": 0.0, "rtol": 0.0} if states == "none" else {"atol": 1e-4, "rtol": 1e-4}
    at_prefill = [
        name for name in rows[0] if name not in ("output_tokens", "output_text", "completion_state", "ended_at")
    ]
    for w in range(4):
        first, past = prefixes.offsets[w], prefixes.offsets[w + 1]
        for row in range(first, past):
            here = {name: rows[row][name] for name in at_prefill}
            for moment, steps in (("prefill", [*rows[first:row], here]), ("completion", rows[first : row + 1])):
                said = model.forecast(steps)
                assert said.moment == moment
                found = np.hstack([[list(a.values()) for a in said.agents], np.array(said.end)[:, None]])
                np.testing.assert_allclose(found, both[moment][row], **exact)  # type: ignore[index]
    assert list(said.agents[0]) == list(model.vocabulary.agents)


@pytest.mark.parametrize("case", WORKFLOWS)
def test_workflows_of_every_shape_are_answered(tiny: Tiny, case: str) -> None:
    said = tiny.training.predictor.forecast(WORKFLOWS[case])
    for agents, end in zip(said.agents, said.end, strict=True):
        assert sum(agents.values()) + end == pytest.approx(1.0, abs=1e-5)
        assert min(*agents.values(), end) > 0
    assert said.moment == ("completion" if "output_tokens" in WORKFLOWS[case][-1] else "prefill")
    other = case == "an unknown workflow type"  # which may be another application
    assert said.source == ("back-off" if said.evidence < 10 or other else "champion")
    assert (said.evidence == 0) == (case == "an unknown agent now")


def test_the_unknown_never_has_more_evidence_than_the_known(tiny: Tiny) -> None:
    model = tiny.training.predictor
    vocabulary, evidence = model.vocabulary, model.parts.evidence
    for agent in vocabulary.agents:
        known = {kind: model.forecast(steps_of([agent], workflow_type=kind)) for kind in vocabulary.workflow_types}
        renamed = model.forecast(steps_of([agent], workflow_type="other"))
        called = [said.evidence for said in known.values() if said.evidence]
        assert (renamed.source, renamed.evidence) == ("back-off", min(called))
        for kind, said in known.items():
            stranger = model.forecast(steps_of([f"{agent} (new)"], workflow_type=kind))
            assert (stranger.source, stranger.evidence) == ("back-off", 0)
            assert said.evidence == evidence[vocabulary.workflow_type(kind), vocabulary.agent(agent)]


def test_a_forecast_outlives_other_names_for_what_it_can_still_tell_apart() -> None:
    # after a or b comes c, and c's prompt has as many tokens as tell what comes next: a few for a, many for b
    rng = np.random.default_rng(0)
    drawn_words = ["".join(rng.choice(["ac", "bc"], 6)) for _ in range(300)]
    prefixes = prefixes_from(drawn_words, agents="abc")
    sizes = np.full((prefixes.steps, 2), np.nan, np.float32)
    sizes[:, 0] = np.where(prefixes.outcomes[:, 0] == 1, 9.0, 2.0) + rng.normal(0, 0.1, prefixes.steps)
    prefixes = replace(prefixes, sizes=sizes)
    config = replace(FAST, network=NetworkConfig(epochs=20), boosting=BoostingConfig(rounds=20))
    model = NextAgentPredictor(config).fit(*parts(prefixes))
    c = prefixes.agent == 2
    renamed = replace(
        prefixes,
        agent=np.where(c, prefixes.vocabulary.unknown, prefixes.agent).astype(np.int32),
        workflow_type=np.full_like(prefixes.workflow_type, len(prefixes.vocabulary.workflow_types)),
    )
    rows = c & (prefixes.outcomes[:, 0] < 2) & (prefixes.position > 0)
    for read in (prefixes, renamed):
        found = model.predict(read, "prefill")[rows, 0].argmax(axis=1)
        assert (found == prefixes.outcomes[rows, 0]).mean() > 0.95
    counted = model.parts.ngram.predict(renamed, "prefill")[rows, 0].argmax(axis=1)
    assert (counted == prefixes.outcomes[rows, 0]).mean() < 0.7


def test_a_model_without_weights_for_unknown_agents_leaves_the_network_out_of_them() -> None:
    model, prefixes = words(["abab", "aab", "abb", "ba"] * 8, "ab")
    tensors, half = model.parts.to_tensors(), PATTERNS // 2
    older = {**tensors, "mixture/shares": tensors["mixture/shares"][:half]}
    parts_ = NextAgentParts.from_tensors(older, prefixes.vocabulary, prefixes.horizon)
    np.testing.assert_array_equal(parts_.shares[:half], model.parts.shares[:half])
    network, trees, ngram = np.moveaxis(parts_.shares[half:], 2, 0)
    was_network, was_trees, was_ngram = np.moveaxis(parts_.shares[:half], 2, 0)
    np.testing.assert_array_equal(network, 0)
    np.testing.assert_array_equal(trees, was_trees)
    np.testing.assert_array_equal(ngram, was_network + was_ngram)


def test_an_agent_never_seen_is_marked_and_answered_from_the_rest_of_the_workflow(tiny: Tiny) -> None:
    model = tiny.training.predictor
    said = model.forecast(steps_of(["planner", "stranger"]))
    assert (said.source, said.evidence) == ("back-off", 0)
    other = model.forecast(steps_of(["planner", "another"]))
    assert said.agents == other.agents  # one stranger is like another: no name is guessed from


@pytest.mark.parametrize("rounds", [0, 5])
def test_below_the_threshold_of_evidence_the_network_is_left_out(rounds: int) -> None:
    drawn_words = ["abab", "aab", "abb", "ba"] * 8 + ["abc"] * 3
    config = replace(FAST, min_evidence=5, boosting=replace(FAST.boosting, rounds=rounds))
    model, prefixes = words(drawn_words, "abc", config)
    rare = prefixes.agent == 2
    found, counted = model.predict(prefixes, "prefill"), model.parts.ngram.predict(prefixes, "prefill")
    assert rare.sum() == 3
    if rounds == 0:  # without trees the n-gram is what is left
        np.testing.assert_allclose(found[rare], counted[rare], rtol=1e-5)
    assert not np.allclose(found[~rare], counted[~rare], rtol=1e-3)
    said = model.forecast([{"workflow_type": "t", "agent": agent} for agent in "abc"])
    assert (said.source, said.evidence) == ("back-off", 3)


# --- what is asked for is checked ---

STEP = {"workflow_type": "retry", "workflow_id": "w", "agent": "planner"}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "no steps; a forecast"),
        ([{"agent": "planner"}], 'step 0: "workflow_type" is None'),
        ([STEP, {**STEP, "agent": 3}], 'step 1: "agent" is 3; expected a name'),
        ([{**STEP, "agent": ""}], "expected a name"),
        ([STEP, {**STEP, "workflow_id": "v"}], "step 1 belongs to another workflow"),
        ([STEP, {**STEP, "workflow_type": "other"}], "step 1 belongs to another workflow"),
        ([{**STEP, "prefill_state": [0.0] * 3}], "3 numbers; the predictor was trained with 16"),
        ([{**STEP, "prefill_state": [float("nan")] * 16}], "finite numbers"),
        ([{**STEP, "prefill_state": "abc"}], "not a list of numbers"),
        ([{**STEP, "input_tokens": -1}], "input_tokens is -1; expected a number of tokens"),
        ([{**STEP, "output_tokens": float("nan")}], "output_tokens is nan"),
        ([{**STEP, "input_tokens": "12"}], "input_tokens is '12'"),
        ([{**STEP, "output_tokens": float("inf")}], "output_tokens is inf"),
    ],
)
def test_steps_that_make_no_sense_are_refused(tiny: Tiny, steps: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny.training.predictor.forecast(steps)


@pytest.mark.parametrize("sign", ["output_tokens", "output_text", "completion_state", "ended_at"])
def test_any_sign_of_an_output_makes_it_a_completion(tiny: Tiny, sign: str) -> None:
    values = {"output_tokens": 0, "output_text": "", "completion_state": [0.0] * 16, "ended_at": "2026-01-01T00:00:00Z"}
    assert tiny.training.predictor.forecast([{**STEP, sign: values[sign]}]).moment == "completion"
    assert tiny.training.predictor.forecast([{**STEP, sign: None}]).moment == "prefill"


# --- learning ---


@pytest.mark.slow
def test_where_order_says_what_comes_ours_is_right_and_those_blind_to_order_are_not() -> None:
    # "ab" or "ba", then five steps that tell nothing; the agent after them repeats the first.
    rng = np.random.default_rng(0)
    drawn_words = [
        start + "".join(rng.choice(list("cd"), 4)) + "c" + start[0] for start in rng.choice(["ab", "ba"], 300)
    ]
    prefixes = prefixes_from(drawn_words, agents="abcd")
    train, held = parts(prefixes)
    learn, stop = parts(train)
    config = NextAgentConfig(network=NetworkConfig(epochs=20), boosting=BoostingConfig(rounds=20))
    ours = NextAgentPredictor(config).fit(learn, stop)
    asked = held.position == 6
    right, nll = {}, {}
    models: dict[str, Any] = {
        "ours": ours,
        "markov-1": BackoffNgram(1).fit(train, stop),
        "markov-3": BackoffNgram(3).fit(train, stop),
        "published": PublishedGraphSage(PublishedConfig(epochs=15)).fit(learn, stop),
    }
    for name, model in models.items():
        found = model.predict(held, "prefill")
        right[name] = float((found[asked, 0].argmax(axis=1) == held.outcomes[asked, 0]).mean())
        nll[name] = cross_entropy(found[:, :1], held.outcomes[:, :1])
    assert right["ours"] > 0.95
    assert max(value for name, value in right.items() if name != "ours") < 0.75
    assert all(nll["ours"] < value - 0.05 for name, value in nll.items() if name != "ours")


def test_states_that_tell_the_next_agent_are_believed_at_their_moment() -> None:
    rng = np.random.default_rng(0)
    prefixes = prefixes_from(["".join(rng.choice(list("ab"), rng.integers(2, 6))) for _ in range(150)], agents="ab")
    states: dict[Moment, NDArray[np.float32]] = {
        "completion": (rng.normal(size=(prefixes.steps, 8)) + 4 * np.eye(8)[prefixes.outcomes[:, 0]]).astype(np.float32)
    }
    prefixes = prefixes.with_states(states)
    model = NextAgentPredictor(replace(FAST, boosting=BoostingConfig(rounds=20))).fit(*parts(prefixes))
    right = {m: (model.predict(prefixes, m)[:, 0].argmax(axis=1) == prefixes.outcomes[:, 0]).mean() for m in MOMENTS}
    assert right["completion"] > 0.95
    assert right["prefill"] < 0.8
    without = model.predict(prefixes.with_states({}), "completion")
    assert_forecasts(without, prefixes)


def test_shares_are_never_negative_and_one_a_component_horizon_and_moment() -> None:
    shares = fitted("none").parts.shares
    assert shares.shape == (PATTERNS, 2, len(COMPONENTS), 3)
    assert (shares >= 0).all()


def test_without_refit_what_was_held_out_teaches_only_when_to_stop() -> None:
    prefixes = prefixes_from(["aab", "abab", "ab", "ba"] * 10, agents="ab")
    train, validation = parts(prefixes)
    alone = NextAgentPredictor(replace(FAST, refit=False)).fit(train, validation)
    both = NextAgentPredictor(FAST).fit(train, validation)
    assert alone.parts.evidence[:-1].sum() == train.steps
    assert both.parts.evidence[:-1].sum() == prefixes.steps
    np.testing.assert_array_equal(alone.parts.shares, both.parts.shares)


def test_progress_is_told_in_shares() -> None:
    told: list[tuple[str, float]] = []
    prefixes = prefixes_from(["aab", "abab", "ab", "ba"] * 5, agents="ab")
    NextAgentPredictor(FAST).fit(*parts(prefixes), progress=lambda doing, share: told.append((doing, share)))
    assert {doing for doing, _ in told} >= {"learning", "learning again on all"}
    assert all(0 <= share <= 1 for _, share in told)


# --- little, odd and one-sided data ---


@pytest.mark.parametrize(
    ("drawn_words", "cut"),
    [
        (["ab", "ba", "a"], []),
        (["a", "b", "a"], []),
        (["ab", "b"], []),
        (["abab", "baab", "aa", "bb", "ab", "ba"], range(6)),
        (["a", "b", "a", "b", "a", "b"], range(6)),  # cut at once: not a single label
        (["ab", "abab", "aab", "ba", "b"], [0]),  # what is held out has no end
    ],
    ids=["three", "single steps", "two", "none complete", "no label", "validation cut"],
)
@pytest.mark.parametrize("with_states", [False, True])
def test_the_least_data_does_not_crash(
    drawn_words: list[str], cut: Sequence[int], with_states: bool, tmp_path: Path
) -> None:
    prefixes = prefixes_from(drawn_words, agents="ab", cut=cut)
    if with_states:
        rng = np.random.default_rng(0)
        states = rng.normal(size=(prefixes.steps, 30)).astype(np.float32)
        states[::2] = np.nan
        prefixes = prefixes.with_states({"prefill": states, "completion": states[::-1].copy()})
    model = NextAgentPredictor(FAST).fit(*parts(prefixes))
    for moment in MOMENTS:
        assert_forecasts(model.predict(prefixes, moment), prefixes)
    model.save(tmp_path / "model")
    NextAgentPredictor.load(tmp_path / "model")


def test_from_cut_workflows_alone_no_end_is_expected() -> None:
    rng = np.random.default_rng(0)
    drawn_words = ["".join(rng.choice(list("ab"), 6)) for _ in range(40)]
    model, prefixes = words(drawn_words, "ab", cut=range(40))
    assert (prefixes.outcomes != prefixes.vocabulary.end).all()
    assert model.predict(prefixes, "prefill")[:, 0, -1].mean() < 0.05


def test_a_second_workflow_type_is_told_apart_where_it_goes_another_way() -> None:
    drawn_words, types = ["abab", "cbcb"] * 30, ["t", "t"] * 30
    alone, _ = words(drawn_words, "abc", types=types, known_types=("t",))
    assert alone.open("t").shape == alone.open("u").shape
    both, prefixes = words(["aaab", "abbb"] * 30, "ab", types=["t", "u"] * 30, known_types=("t", "u"))
    first = prefixes.position == 0
    kind = prefixes.workflow_type[prefixes.workflow]
    found = both.predict(prefixes, "prefill")[first, 0]
    assert (found[kind[first] == 0, 0] > 0.8).all()
    assert (found[kind[first] == 1, 1] > 0.8).all()


@pytest.mark.parametrize("refit", [True, False])
def test_a_workflow_type_that_only_validation_has(refit: bool) -> None:
    types = ["u" if i % 5 == 0 else "t" for i in range(40)]
    model, prefixes = words(
        ["abab", "ba", "aab"] * 13 + ["ab"], "ab", replace(FAST, refit=refit), types=types, known_types=("t", "u")
    )
    assert_forecasts(model.predict(prefixes, "prefill"), prefixes)
    said = model.forecast([{"workflow_type": "u", "agent": "a"}])
    assert (said.source, said.evidence == 0) == (("champion", False) if refit else ("back-off", True))


def test_agents_the_vocabulary_lacks_teach_nothing_and_break_nothing() -> None:
    model, prefixes = words(["axb", "abx", "xab", "ab"] * 8, "ab")
    assert (prefixes.outcomes == prefixes.vocabulary.unseen).any()
    assert (prefixes.outcomes[:, 2] == MASKED).any()
    assert_forecasts(model.predict(prefixes, "completion"), prefixes)
    assert model.parts.evidence[0, -1] == 0
