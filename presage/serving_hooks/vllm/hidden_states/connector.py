"""A KV connector that transfers no cache: it sends requests for rows to the worker, and states back.

    --kv-transfer-config '{"kv_connector": "StatesConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "presage.serving_hooks.vllm.hidden_states.connector"}'

It is a producer, since vLLM holds blocks back for consumers. vLLM requires one class for both ends; each process uses
one of them. This file and its imports do not use numba: without Triton, vLLM's CPU worker inspects all loaded
modules at its start and fails at numba's.

A row is the model's output, after the final norm, at the last position that a request computes in a step; the next
token is sampled from it. The row that ends the prompt is the prefill state, and the row from which the last token was
sampled is the completion state, since no row is computed after the last token. If the last token is EOS, that row is at
the last token of the text. As the last token is not known in advance, a predictor gets the row of every token, and
drops it unless its token was the last.

Rows are projected on their device, so that 16 numbers are sent and not 5120, with the arithmetic of training
(`features/projection.py`): a predictor reads the bits that it was trained on.

Whole states are float16 and for a recorder only, which can wait. So the worker keeps the rows of the iterations whose
output the scheduler has not read, and sends the completion state of a request after it has ended, with the next
iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from presage.features.moment import COMPLETION, PREFILL, Moment
from presage.serving_hooks.vllm import engine
from presage.serving_hooks.vllm.engine import Iteration
from presage.serving_hooks.workflows.live import Projection

logger = logging.getLogger(__name__)

Rows = tuple[Sequence[str], NDArray[Any]]
"""Request ids, and a state of each: projected, float32 [n, p], or whole, float16 [n, d]."""

_MOST_KEPT: Final = 16
"""Iterations whose rows a worker keeps; more than a pipeline has under way."""


@dataclass
class Wanted(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's end sends to the worker's.

    Attributes:
        rows: ids of the requests whose rows of this step are requested, by moment.
        projections: the new projections; None keeps the old ones.
        whole: moments whose requested rows are also sent unprojected; read only if `projections` is given.
        iteration: number under which the worker keeps all rows of this step; 0 keeps none.
        last: ids of requests that have ended, by the number of the iteration that computed their last rows; these rows
            are requested now.
        read: rows up to this iteration are not requested later.
    """

    rows: Mapping[Moment, tuple[str, ...]] = field(default_factory=dict)
    projections: Mapping[Moment, Projection] | None = None
    whole: tuple[Moment, ...] = ()
    iteration: int = 0
    last: Mapping[int, Sequence[str]] = field(default_factory=dict)
    read: int = 0


class States(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the worker sends with the tokens of a step.

    vLLM's first model runner fetches this before the rows of the step exist and sends it after: so it is returned empty
    and filled later. On a GPU a state may still be copied to the host when it is added; reading or sending waits for
    it, after the tokens of the same step have come the same way.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Moment, bool, Sequence[str], Any, Any]] = []

    def add(self, moment: Moment, ids: Sequence[str], states: Any, ready: Any = None, *, whole: bool = False) -> None:
        """Adds states of these requests on the host, as `Rows`; `ready` is an event to wait for."""
        self._parts.append((moment, whole, ids, np.asarray(states) if ready is None else states, ready))

    def whole(self) -> Iterator[tuple[Moment, Rows]]:
        """The whole states."""
        for place, part in enumerate(self._parts):
            if part[1]:
                yield part[0], self._arrived(place)

    def rows(self, moment: Moment) -> Iterator[tuple[str, NDArray[Any]]]:
        """Request ids and their projected states of this moment."""
        for place in self._of(moment):
            yield from zip(*self._arrived(place), strict=True)

    def row(self, moment: Moment, request_id: str) -> NDArray[Any] | None:
        """The projected state of one request; None if there is none."""
        for place in self._of(moment):
            if request_id in self._parts[place][2]:
                ids, states = self._arrived(place)
                found: NDArray[Any] = states[ids.index(request_id)]
                return found
        return None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> States:
        """Merges the states of two workers."""
        if isinstance(other, States):
            self._parts += other._parts
        return self

    def _of(self, moment: Moment) -> list[int]:
        return [place for place, part in enumerate(self._parts) if part[0] == moment and not part[1]]

    def _arrived(self, place: int) -> Rows:
        moment, whole, ids, states, ready = self._parts[place]
        if ready is not None:
            ready.synchronize()
            states = np.asarray(states)
            self._parts[place] = (moment, whole, ids, states, None)
        return ids, states

    def __getstate__(self) -> dict[str, Any]:
        for place in range(len(self._parts)):
            self._arrived(place)
        return {"_parts": self._parts}


class WantedRows:
    """Chooses the rows of a step to request. Follows prompts through chunks, prefix hits and preemptions.

    Requests for which `step` returns None are ignored.
    """

    def __init__(self, step: Callable[[str], object]) -> None:
        self._step = step
        self._prompts: dict[str, int] = {}
        self._writing: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        """Whether it is a running step that has completed its prompt."""
        return request_id in self._writing

    def of(self, output: Iteration, moments: Collection[Moment]) -> dict[Moment, tuple[str, ...]]:
        """Request ids by moment for one scheduled step, for these moments only."""
        if not (output.scheduled_new_reqs or output.finished_req_ids or self._prompts or COMPLETION in moments):
            return {}
        prompts, writing, ended = self._prompts, self._writing, list[str]()
        for name in output.finished_req_ids:
            writing.discard(name)
            prompts.pop(name, None)
        for new in output.scheduled_new_reqs:
            name = new.req_id
            if name in writing or self._step(name) is None:  # a resumed request may be listed as new
                continue
            if new.num_computed_tokens + output.num_scheduled_tokens[name] < new.prompt_len:
                prompts[name] = new.prompt_len
            else:
                prompts.pop(name, None)
                ended.append(name)
        if prompts:
            ended += self._ended(output)
        writing.update(ended)
        wanted: dict[Moment, tuple[str, ...]] = {}
        if ended and PREFILL in moments:
            wanted[PREFILL] = tuple(ended)
        last = filter(writing.__contains__, output.num_scheduled_tokens) if COMPLETION in moments else ()
        if every := tuple(last):
            wanted[COMPLETION] = every
        return wanted

    def _ended(self, output: Iteration) -> list[str]:
        """The prompts in chunks that this step completes. Decoding requests come after them and are not looked at."""
        ended, left = list[str](), len(self._prompts)
        for name, reached in engine.reached(output):
            tokens = self._prompts.get(name)
            if tokens is None:
                continue
            if reached >= tokens:
                del self._prompts[name]
                ended.append(name)
            left -= 1
            if not left:
                break
        return ended


class Projector:
    """The projections of a predictor, W float32 [d, p] and b [p] by moment, moved to the device of the first rows."""

    def __init__(self, projections: Mapping[Moment, Projection]) -> None:
        self._projections = {
            moment: (torch.from_numpy(weights).double(), torch.from_numpy(bias).double())
            for moment, (weights, bias) in projections.items()
        }

    def __contains__(self, moment: Moment) -> bool:
        return moment in self._projections

    def project(self, moment: Moment, states: torch.Tensor) -> torch.Tensor:
        """Projected states float32 [n, p] of whole states float16 [n, d]."""
        weights, bias = self._projections[moment]
        if weights.device != states.device:
            weights, bias = self._projections[moment] = weights.to(states.device), bias.to(states.device)
        return torch.addmm(bias, states.double(), weights).float()


def states_of(rows: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
    """States float16 [n, d] of some rows [batch, d]; the row numbers are copied without synchronisation."""
    host = torch.tensor(which, dtype=torch.int64, pin_memory=rows.device.type == "cuda")
    return rows.index_select(0, host.to(rows.device, non_blocking=True)).half()


def _to_host(states: torch.Tensor) -> tuple[Any, Any]:
    """States on the host, and the event to wait for, or None."""
    if states.device.type != "cuda":
        return states.cpu().numpy(), None
    host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    host.copy_(states, non_blocking=True)
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return host, ready


class StatesConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both ends of the connector; idle until `request_states` is called on the scheduler's end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wanted: WantedRows | None = None
        self._to_send: Mapping[Moment, Projection] | None = None
        self._whole: tuple[Moment, ...] = ()
        self._moments: frozenset[Moment] = frozenset()
        self._keeps = False
        self._iteration = self._read = self._reading = 0
        self._last: dict[int, list[str]] = {}
        self._projector: Projector | None = None
        self.requested_rows: Mapping[Moment, tuple[str, ...]] = {}
        self._kept: dict[int, tuple[list[str], torch.Tensor]] = {}
        self._keep_as = 0
        self._states: States | None = None
        self._nothing = Wanted()

    @property
    def requires_kv_delivery(self) -> bool:
        """No cache is transferred."""
        return False

    # In the scheduler.

    def request_states(
        self,
        step: Callable[[str], object],
        projections: Mapping[Moment, Projection],
        whole: tuple[Moment, ...] = (),
    ) -> None:
        """From the next step on, steps of workflows get projected states, and whole ones at the moments `whole`.

        Requests for which `step` returns None get none. Another call replaces projections and moments.
        """
        self._wanted = self._wanted or WantedRows(step)
        self._keeps = COMPLETION in whole
        self._to_send, self._whole = projections, tuple(moment for moment in whole if moment != COMPLETION)
        self._moments = frozenset((*projections, *self._whole))

    def build_connector_meta(self, scheduler_output: Any, *_: Any, **__: Any) -> Wanted:
        """The rows to capture in this step."""
        if self._wanted is None:
            return self._nothing
        try:
            rows = self._wanted.of(scheduler_output, self._moments)
            projections, self._to_send = self._to_send, None
            last, self._last = self._last, {}
            iteration = 0
            if self._keeps and scheduler_output.num_scheduled_tokens and self._iteration - self._read < _MOST_KEPT:
                iteration = self._iteration = self._iteration + 1
            if not (rows or iteration or last or projections is not None):
                return self._nothing
            return Wanted(rows, projections, self._whole, iteration, last, self._read)
        except Exception as error:
            self._fails(error)
            return self._nothing

    def reads(self, scheduler_output: Any) -> None:
        """The output of this iteration is read now."""
        if self._keeps:
            own = scheduler_output.kv_connector_metadata
            self._reading = (own if type(own) is Wanted else next(engine.of_kind(Wanted, own))).iteration
            self._read = self._reading or self._read

    def ended(self, request_id: str) -> bool:
        """A request has ended with the iteration that is read; returns whether its whole completion state will come."""
        comes = self._reading > 0 and self._wanted is not None and request_id in self._wanted
        if comes:
            self._last.setdefault(self._reading, []).append(request_id)
        return comes

    def get_num_new_matched_tokens(self, *_: Any, **__: Any) -> tuple[int, bool]:
        """No cache comes from here."""
        return 0, False

    def request_finished_all_groups(self, *_: Any, **__: Any) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may be freed at once."""
        return False, None

    # In the worker.

    def bind_connector_metadata(self, connector_metadata: Any, *args: Any, **kwargs: Any) -> None:
        """Receives the rows to capture in this step, and those to send of earlier ones."""
        super().bind_connector_metadata(connector_metadata, *args, **kwargs)
        try:
            self._bound(connector_metadata)
        except Exception as error:
            self._fails(error)

    def _bound(self, wanted: Wanted) -> None:
        if wanted.projections is not None:
            self._projector, self._whole = Projector(wanted.projections), wanted.whole
        self.requested_rows, self._keep_as = wanted.rows, wanted.iteration
        self._states = States() if wanted.rows or wanted.last else None
        if self._kept:
            self._send_kept(wanted)

    def captured(self, ids: Sequence[str], rows: Callable[[], Any]) -> None:
        """The model has computed these requests' rows, [batch, d]; read only if some are requested. Does not raise."""
        wanted, self.requested_rows = self.requested_rows, {}
        iteration, self._keep_as = self._keep_as, 0
        if not (wanted or iteration) or self._projector is None:
            return
        try:
            hidden = rows()
            if len(hidden) != len(ids):
                raise ValueError  # several rows per request
            if iteration:
                self._kept[iteration] = list(ids), hidden.to(torch.float16, copy=True)
            if wanted and self._states is not None:
                self._add(self._states, wanted, ids, hidden)
        except Exception as error:
            self._fails(error)

    def _add(self, to: States, wanted: Mapping[Moment, Sequence[str]], ids: Sequence[str], hidden: Any) -> None:
        places = {name: place for place, name in enumerate(ids)}
        for moment, names in wanted.items():
            here = [name for name in names if name in places]
            if not here or self._projector is None:
                continue
            states = states_of(hidden, [places[name] for name in here])
            if moment in self._projector:
                to.add(moment, here, *_to_host(self._projector.project(moment, states)))
            if moment in self._whole:
                to.add(moment, here, *_to_host(states), whole=True)

    def _send_kept(self, wanted: Wanted) -> None:
        for iteration, names in wanted.last.items():
            ids, rows = self._kept.get(iteration, ([], torch.empty(0)))
            here = [name for name in names if name in ids]
            if here and self._states is not None:
                states = states_of(rows, [ids.index(name) for name in here])
                self._states.add(COMPLETION, here, *_to_host(states), whole=True)
        for iteration in [kept for kept in self._kept if kept <= wanted.read]:
            del self._kept[iteration]

    def build_connector_worker_meta(self, *_: Any, **__: Any) -> States | None:
        """The states of this step; those not yet computed are added later (see `States`)."""
        return self._states

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        """No cache comes from here, and none is kept."""

    wait_for_layer_load = save_kv_layer = wait_for_save = update_state_after_alloc = start_load_kv

    def _fails(self, error: Exception) -> None:
        """Switches hidden states off. Logs only the kind of the error, whose message might repeat a prompt."""
        self._wanted = self._projector = self._states = None
        self.requested_rows = {}
        self._kept.clear()
        logger.error("hidden states are switched off: %s", type(error).__name__)
