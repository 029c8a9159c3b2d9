"""The network in torch against the kernels that serve it, what a fit looks at, and what it leaves alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_samples import Sample, random_sample
from numpy.typing import NDArray

from presage.features.history import history_size
from presage.features.prefixes import MASKED, transition_matrix
from presage.predictors.next_agent.kernels import network_logits, step_prefix
from presage.predictors.next_agent.network import (
    ContinuedNetwork,
    Examples,
    ExampleTensors,
    NextAgentNetwork,
    WorkflowBatch,
    batches,
    export,
    fit_network,
    masked_cross_entropy,
    rows_and_padding,
)
from presage.predictors.next_agent.network_weights import ORDER, NetworkConfig, NetworkWeights
from presage.testing.prefixes import prefixes_from

CONFIG = NetworkConfig(agent_size=6, prefix_size=7, hidden_size=9, epochs=4, batch_steps=16)
WORDS = ["abcab", "b", "cca", "abxc", "aaaaabbb", "ca"]
HORIZON = 3


def sample(words: list[str] = WORDS, widths: tuple[int, int] = (3, 2), seed: int = 0) -> Sample:
    types = [("t", "u", "other")[i % 3] for i in range(len(words))]
    return random_sample(prefixes_from(words, agents="abc", types=types, known_types=("t", "u")), seed, widths=widths)


def examples_of(drawn: Sample) -> Examples:
    return Examples(drawn.prefixes.offsets, drawn.inputs(), drawn.prefixes.outcomes)


def network_of(drawn: Sample, seed: int = 0) -> tuple[NextAgentNetwork, NDArray[np.float32], NDArray[np.float32]]:
    """A network of random weights, none of them zero, and a random scaling of its inputs."""
    torch.manual_seed(seed)
    dense = drawn.inputs()[0].shape[1] - history_size(drawn.agents) - drawn.tools - 2
    transition = torch.from_numpy(transition_matrix(drawn.prefixes))
    network = NextAgentNetwork(transition, 2, dense, sum(drawn.widths), HORIZON, CONFIG, np.random.default_rng(seed))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    rng = np.random.default_rng(seed)
    return (
        network.eval(),
        rng.normal(size=dense).astype(np.float32),
        rng.uniform(0.5, 2, dense).astype(np.float32),
    )


def by_torch(
    network: NextAgentNetwork, drawn: Sample, mean: NDArray[np.float32], spread: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Logits [2, n, K (V+1)] of all workflows in one padded batch."""
    data, count = ExampleTensors(examples_of(drawn), drawn.agents, mean, spread), drawn.prefixes.workflows
    with torch.no_grad():
        logits = network(WorkflowBatch(data, drawn.prefixes.offsets, np.arange(count), np.zeros((count, 2), bool)))
    return np.asarray(logits.flatten(2).numpy())


def by_kernels(weights: NetworkWeights, drawn: Sample) -> NDArray[np.float32]:
    """The same, one step after the other."""
    engine, inputs, prefixes = replace(drawn, network=weights).engine, drawn.inputs(), drawn.prefixes
    out = np.empty((2, prefixes.steps, HORIZON * prefixes.vocabulary.outcomes), np.float32)
    for w in range(prefixes.workflows):
        hidden = np.zeros(weights.prefix_size, np.float32)
        for row in range(prefixes.offsets[w], prefixes.offsets[w + 1]):
            for moment in (0, 1):
                network_logits(inputs[moment][row], hidden, moment, engine, out[moment, row])
            step_prefix(inputs[1][row], hidden, engine)
    return out


@pytest.mark.parametrize("widths", [(3, 2), (0, 0), (4, 0), (0, 5)])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_serves_is_what_was_trained(widths: tuple[int, int], seed: int) -> None:
    drawn = sample(widths=widths, seed=seed)
    network, mean, spread = network_of(drawn, seed)
    trained = by_torch(network, drawn, mean, spread)
    served = by_kernels(export(network, mean, spread), drawn)
    assert trained.std() > 0.5
    # Half precision rounds each weight by 2^-11 of itself: of logits of size 1 to 10 no more than a hundredth is lost.
    np.testing.assert_allclose(served, trained, atol=0.02)


def test_a_step_does_not_see_its_own_completion_nor_the_future() -> None:
    drawn = sample()
    network, mean, spread = network_of(drawn)
    before = by_torch(network, drawn, mean, spread)
    here, has_here, done, has_done = drawn.states
    last = drawn.prefixes.offsets[1:] - 1
    changed = done.copy()
    changed[last] += 5
    after = by_torch(network, replace(drawn, states=(here, has_here, changed, has_done | True)), mean, spread)
    whole = by_torch(network, replace(drawn, states=(here, has_here, done, has_done | True)), mean, spread)
    np.testing.assert_array_equal(after[0], whole[0])  # no prefill knows it
    others = np.setdiff1d(np.arange(drawn.prefixes.steps), last)
    np.testing.assert_array_equal(after[1][others], whole[1][others])
    assert not np.allclose(after[1][last], whole[1][last])
    assert before.shape == after.shape


def test_a_prefix_is_seen_in_its_order() -> None:
    # The same agents, counts and latest five; only what lies six and seven steps back is swapped.
    drawn = sample(["abccccccc", "baccccccc"], widths=(0, 0))
    network, mean, spread = network_of(
        replace(drawn, prefixes=replace(drawn.prefixes, workflow_type=np.zeros(2, np.int32)))
    )
    with torch.no_grad():
        network.encoded.weight.zero_()  # counts and steps since would tell them apart as well
    same_sizes = replace(
        drawn,
        prefixes=replace(
            drawn.prefixes, workflow_type=np.zeros(2, np.int32), sizes=np.zeros_like(drawn.prefixes.sizes)
        ),
    )
    logits = by_torch(network, same_sizes, mean, spread)[0]
    assert np.abs(logits[8] - logits[17]).max() > 1e-4


def test_padding_changes_nothing() -> None:
    drawn = sample()
    network, mean, spread = network_of(drawn)
    together = by_torch(network, drawn, mean, spread)
    data = ExampleTensors(examples_of(drawn), drawn.agents, mean, spread)
    for w in range(drawn.prefixes.workflows):
        rows = slice(drawn.prefixes.offsets[w], drawn.prefixes.offsets[w + 1])
        with torch.no_grad():
            alone = network(WorkflowBatch(data, drawn.prefixes.offsets, np.array([w]), np.zeros((1, 2), bool)))
        for moment in (0, 1):
            np.testing.assert_allclose(alone[moment].flatten(1).numpy(), together[moment, rows], atol=1e-5)


def test_the_agents_are_eq_3_node_by_node() -> None:
    drawn = sample()
    network, _, _ = network_of(drawn)
    A, H = torch.from_numpy(transition_matrix(drawn.prefixes)), network.embedding.detach()
    for layer in network.graph.layers:
        # [H ‖ A H] W^T: torch-geometric holds the two halves of W apart.
        W = torch.cat([layer.lin_root.weight, layer.lin_rel.weight], dim=1).detach()
        nodes = []
        for v in range(len(H)):
            neighbours = sum((A[v, u] * H[u] for u in range(len(H))), torch.zeros(CONFIG.agent_size))
            nodes.append(torch.relu(W @ torch.cat([H[v], neighbours])))
        H = torch.stack(nodes)
    torch.testing.assert_close(network.agents().detach(), H)


def test_without_the_graph_an_agent_is_its_own_embedding() -> None:
    drawn = sample()
    dense = drawn.inputs()[0].shape[1] - history_size(drawn.agents) - drawn.tools - 2
    transition = torch.from_numpy(transition_matrix(drawn.prefixes))
    bare = replace(CONFIG, graph=False)
    network = NextAgentNetwork(transition, 2, dense, sum(drawn.widths), HORIZON, bare, np.random.default_rng(0))
    assert network.agents() is network.embedding


def test_a_dropped_source_is_as_if_it_had_never_been_there() -> None:
    drawn = sample()
    network, mean, spread = network_of(drawn)
    workflows = np.arange(drawn.prefixes.workflows)
    here, has_here, done, has_done = drawn.states
    nothing = (here, np.zeros_like(has_here), done, np.zeros_like(has_done))
    without = {
        (True, False): replace(drawn, prefixes=drawn.prefixes.without_tokens()),
        (False, True): replace(drawn, states=nothing),
        (True, True): replace(drawn, prefixes=drawn.prefixes.without_tokens(), states=nothing),
    }
    data = ExampleTensors(examples_of(drawn), drawn.agents, mean, spread)
    for dropped, bare in without.items():
        with torch.no_grad():
            found = network(
                WorkflowBatch(data, drawn.prefixes.offsets, workflows, np.tile(dropped, (len(workflows), 1)))
            )
        np.testing.assert_allclose(found.flatten(2).numpy(), by_torch(network, bare, mean, spread), atol=1e-5)


def test_an_input_that_training_never_saw_says_nothing_when_serving() -> None:
    """Traces without token counts, served by an engine that counts: the weights of the counts were never learnt."""
    drawn = sample(WORDS * 4)
    uncounted = replace(drawn, prefixes=drawn.prefixes.without_tokens())
    weights, _ = fit(uncounted, uncounted)
    np.testing.assert_array_equal(by_kernels(weights, drawn), by_kernels(weights, uncounted))


def test_the_loss_is_the_cross_entropy_of_known_labels_at_both_moments() -> None:
    logits = torch.randn(2, 4, 2, 3)
    labels = torch.tensor([[0, 2], [MASKED, 1], [3, MASKED], [1, 1]])  # 3: an agent out of the vocabulary
    wanted = 0.0
    for out in logits:
        given = [out[i, k].log_softmax(0)[labels[i, k]] for i in range(4) for k in range(2) if 0 <= labels[i, k] < 3]
        wanted -= float(sum(given)) / len(given)
    assert float(masked_cross_entropy(logits, labels)) == pytest.approx(wanted, rel=1e-5)
    nothing = masked_cross_entropy(logits.requires_grad_(), torch.full((4, 2), MASKED))
    nothing.backward()
    assert float(nothing.detach()) == 0.0
    assert not logits.grad.any()


def fit(train: Sample, validation: Sample, seed: int = 0, **more: object) -> tuple[NetworkWeights, int]:
    return fit_network(
        examples_of(train),
        examples_of(validation),
        transition_matrix(train.prefixes),
        2,
        sum(train.widths),
        more.pop("config", CONFIG),  # type: ignore[arg-type]
        seed,
        **more,  # type: ignore[arg-type]
    )


def assert_same(first: NetworkWeights, second: NetworkWeights) -> None:
    for name in ORDER:
        np.testing.assert_array_equal(first.arrays[name], second.arrays[name])


def test_a_seed_decides_the_weights_and_the_global_generator_is_left_alone() -> None:
    drawn = sample(WORDS * 4)
    torch.manual_seed(1)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first, _ = fit(drawn, drawn)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.manual_seed(2)
    assert_same(first, fit(drawn, drawn)[0])
    other, _ = fit(drawn, drawn, 1)
    assert any((first.arrays[name] != other.arrays[name]).any() for name in ORDER)
    assert set(first.arrays) == set(ORDER)
    assert all(array.dtype == np.float16 and np.isfinite(array).all() for array in first.arrays.values())


def test_a_number_of_epochs_is_obeyed_and_validation_not_looked_at() -> None:
    drawn, other = sample(WORDS * 4), sample(["cba", "bbb"], seed=5)
    first, epoch = fit(drawn, drawn, epochs=2)
    assert epoch == 2
    assert_same(first, fit(drawn, other, epochs=2)[0])


def test_the_epoch_that_is_kept_is_the_best_one_and_waiting_ends() -> None:
    drawn = sample(WORDS * 4)
    losses: list[float] = []
    _, epoch = fit(
        drawn,
        sample(["cba", "bcc"] * 5, seed=9),
        config=replace(CONFIG, epochs=40, patience=3, learning_rate=0.02),
        progress=lambda _, __, loss: losses.append(loss),
    )
    assert epoch == int(np.argmin(losses)) + 1 or losses[epoch - 1] <= min(losses) + 1e-5
    assert len(losses) == min(40, epoch + 3)


def test_workflows_longer_than_a_batch_do_not_outrun_the_schedule() -> None:
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abc"), int(length))) for length in rng.integers(10, 60, 12)]
    _, epoch = fit(sample(words), sample(), config=replace(CONFIG, epochs=12, patience=12, batch_steps=32))
    assert 1 <= epoch <= 12


@pytest.mark.slow
def test_it_learns_what_order_alone_says() -> None:
    # Counts, steps since each agent and the latest five are the same; what comes next is told by the first two steps.
    words = ["ababcdcdc" + "a", "baabcdcdc" + "b"] * 40
    drawn = random_sample(prefixes_from(words, agents="abcd", known_types=("t", "u")), 0, widths=(0, 0))
    drawn = replace(drawn, prefixes=replace(drawn.prefixes, sizes=np.zeros_like(drawn.prefixes.sizes)))
    config = NetworkConfig(epochs=60, dropout=0.0, input_dropout=0.0, batch_steps=50)
    weights, _ = fit(drawn, drawn, config=config)
    logits = by_kernels(weights, drawn)[0].reshape(drawn.prefixes.steps, HORIZON, -1)
    asked = drawn.prefixes.position == 8
    assert (logits[asked, 0].argmax(axis=1) == drawn.prefixes.outcomes[asked, 0]).mean() > 0.99


# --- batches of workflows of every length ---


def test_every_workflow_is_in_one_batch() -> None:
    lengths = np.array([3, 50, 1, 7, 7, 20, 2, 90])
    for rng in (None, np.random.default_rng(0)):
        parts = batches(lengths, 25, rng)
        assert sorted(np.concatenate(parts).tolist()) == list(range(8))
        assert len(parts) <= -(-lengths.sum() // 25)


def test_the_padded_view_has_every_row_once_in_its_place() -> None:
    rows, padded = rows_and_padding(np.array([0, 2, 5, 6]), np.array([1, 2]))
    assert rows.tolist() == [2, 3, 4, 5]
    assert padded.tolist() == [[0, 1, 2], [3, 4, 4]]


@pytest.mark.parametrize("widths", [(3, 2), (0, 0)])
def test_the_arrays_of_serving_train_further_from_where_they_are(widths: tuple[int, int]) -> None:
    drawn = sample(widths=widths)
    network, mean, spread = network_of(drawn)
    served = export(network, mean, spread)
    rng = np.random.default_rng(0)
    again = ContinuedNetwork(served, mean + 1, spread * 2, HORIZON, CONFIG, rng).eval()
    np.testing.assert_allclose(by_torch(again, drawn, mean + 1, spread * 2), by_kernels(served, drawn), atol=0.01)
    with torch.no_grad():
        back = export(again, mean + 1, spread * 2)
    for name, array in served.arrays.items():
        np.testing.assert_allclose(back.arrays[name], array, atol=0.005, err_msg=name)
