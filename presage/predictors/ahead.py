"""What a next-agent predictor expects to follow a step, as numbers for a predictor of lengths.

A workflow that is about to end has little left to write, one that will call its writer twice has much. The numbers come
from forecasts at prefill, before the step's output, by ids and sizes alone: hidden states are at hand in an engine, but
not wherever a length is asked for, and one definition has to serve both.

With p_k the probability of END at k steps ahead, given that the workflow goes that far, a workflow goes as far as k
with s_k = (1 − p_1) … (1 − p_(k−1)) (PBKV eq. 2). Then, over the K steps of the horizon:

    llm_steps_ahead      Σ_k s_k Σ_a P_k(a) · share of a's calls that are LLM steps: those still to come, this one not
    end_k                s_k p_k, the workflow ends right before step k ahead
    calls_ahead_a        Σ_k s_k P_k(a), calls of an agent that the length encoder tracks; 0 for one never forecast
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.features.lengths import LengthEncoder
from presage.features.prefixes import prefixes_of
from presage.features.states import StateSource
from presage.predictors.artefact import artefact_digest
from presage.predictors.next_agent import NextAgentPredictor
from presage.predictors.steps import log_tokens


@dataclass(frozen=True, eq=False)
class GivenModel:
    """A trained next-agent predictor and where it came from.

    Attributes:
        predictor: fitted.
        called: what people know it by, such as "next-agent version 3".
        digest: of its artefact.
    """

    predictor: NextAgentPredictor
    called: str
    digest: str

    @classmethod
    def load(cls, folder: Path, called: str) -> Self:
        """Reads an artefact.

        Raises:
            ArtefactError: the folder is no sound artefact of a next-agent predictor.
        """
        return cls(NextAgentPredictor.load(folder), called, artefact_digest(folder))


@dataclass(frozen=True, eq=False)
class AgentsAhead:
    """See `presage.features.lengths.Ahead`.

    Attributes:
        given: whose forecasts these are; K and V are its horizon and its agents.
        counted: agents whose expected calls are told one by one, by name.
        llm: float32 [V], the share of each agent's steps that are LLM steps; 1 where training has none.
    """

    given: GivenModel
    counted: tuple[str, ...]
    llm: NDArray[np.float32]

    @classmethod
    def fit(cls, given: GivenModel, table: pa.Table, encoder: LengthEncoder) -> Self:
        """For rows of this encoder; which agents are tools is learnt from a training trace."""
        vocabulary = given.predictor.vocabulary
        agent = vocabulary.encode_agents(table["agent"])
        is_llm = pc.equal(table["kind"], "llm").to_numpy().astype(np.float64)
        calls, of_llm = (
            np.bincount(agent, weights, vocabulary.outcomes)[:-1] for weights in (np.ones(len(agent)), is_llm)
        )
        llm = np.divide(of_llm, calls, out=np.ones_like(calls), where=calls > 0).astype(np.float32)
        return cls(given, tuple(encoder.vocabulary.agents[index] for index in encoder.tracked), llm)

    @property
    def names(self) -> tuple[str, ...]:
        """What the A = 1 + K + C numbers are."""
        ends = tuple(f"end_{k}" for k in range(1, self.given.predictor.horizon + 1))
        return ("llm_steps_ahead", *ends, *(f"calls_ahead_{place}" for place in range(len(self.counted))))

    def of_table(self, table: pa.Table) -> NDArray[np.float32]:
        """Of every step of a trace in canonical order, float32 [rows, A]."""
        predictor = self.given.predictor
        of = prefixes_of(table, predictor.vocabulary, predictor.horizon)
        return self._expected(predictor.without_states(of.offsets, of.workflow_type, of.agent, of.sizes))

    def of_steps(self, steps: Sequence[Mapping[str, Any]]) -> NDArray[np.float32]:
        """Of the last of the given steps of one workflow, checked, float32 [A]; its output is not looked at.

        Raises:
            InputError: a negative or no number of tokens, or a text that is none.
        """
        vocabulary = self.given.predictor.vocabulary
        sizes = np.zeros((len(steps), 2), np.float32)
        for row, step in zip(sizes, steps, strict=True):
            row[0] = log_tokens(step, "input")
        for row, step in zip(sizes, steps[:-1], strict=False):
            row[1] = log_tokens(step, "output")
        forecast = self.given.predictor.without_states(
            np.array([0, len(steps)]),
            np.array([vocabulary.workflow_type(steps[-1]["workflow_type"])], np.int32),
            np.array([vocabulary.agent(step["agent"]) for step in steps], np.int32),
            sizes,
            last=True,
        )
        told: NDArray[np.float32] = self._expected(forecast)[0]
        return told

    def open(self, workflow_type: str) -> NDArray[np.float32]:
        """A workflow before its first step."""
        return self.given.predictor.open(workflow_type)

    def begun(self, workflow: NDArray[np.float32], step: Mapping[str, Any]) -> NDArray[np.float32]:
        """A step begins: what `of_steps` says of it, float32 [A].

        Raises:
            InputError: a negative or no number of tokens, or a text that is none.
        """
        predictor = self.given.predictor
        out = np.empty((1, predictor.horizon, predictor.vocabulary.outcomes), np.float32)
        tokens = log_tokens(step, "input")
        predictor.prefilled(workflow, predictor.vocabulary.agent(step["agent"]), tokens, _NOTHING, out[0])
        told: NDArray[np.float32] = self._expected(out)[0]
        return told

    def completed(self, workflow: NDArray[np.float32], step: Mapping[str, Any]) -> None:
        """Its output is complete.

        Raises:
            InputError: a negative or no number of tokens, or a text that is none.
        """
        predictor = self.given.predictor
        unread = np.empty((predictor.horizon, predictor.vocabulary.outcomes), np.float32)
        predictor.completed(workflow, log_tokens(step, "output"), _NOTHING, unread)

    def _expected(self, forecasts: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [n, A] from probabilities float32 [n, K, V+1]."""
        end = forecasts[:, :, -1]
        reached = np.cumprod(np.concatenate([np.ones_like(end[:, :1]), 1 - end[:, :-1]], axis=1), axis=1)
        calls = (reached[:, :, None] * forecasts[:, :, :-1]).sum(axis=1)
        vocabulary = self.given.predictor.vocabulary
        padded = np.concatenate([calls, np.zeros_like(calls[:, :1])], axis=1)  # the column of the unknown agent
        columns = [vocabulary.agent(name) for name in self.counted]
        steps = (calls * self.llm).sum(axis=1, keepdims=True)
        return np.concatenate([steps, reached * end, padded[:, columns]], axis=1, dtype=np.float32)

    def to_artefact(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Configuration and tensors; the states' source, which nothing here asks, stays behind."""
        config, tensors = self.given.predictor.to_artefact()
        told = {
            "model": self.given.called,
            "digest": self.given.digest,
            "counted": list(self.counted),
            "config": {**config, "states": StateSource.none().to_config()},
        }
        kept = {name: array for name, array in tensors.items() if not name.startswith("states/")}
        return told, {**kept, "ahead/llm": self.llm}

    @classmethod
    def from_artefact(cls, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]) -> Self:
        """Inverse of `to_artefact`.

        Raises:
            LookupError, TypeError, ValueError: they are not those of a whole predictor.
        """
        predictor = NextAgentPredictor.from_artefact(config["config"], tensors)
        ahead = cls(
            GivenModel(predictor, config["model"], config["digest"]), tuple(config["counted"]), tensors["ahead/llm"]
        )
        if ahead.llm.shape != (len(predictor.vocabulary.agents),):
            raise ValueError("the next-agent model inside has other agents than the shares of their LLM steps")
        return ahead


_NOTHING: Final = np.empty(0, np.float32)
