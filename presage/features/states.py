"""The semantic state of a step, in training and in serving alike.

Three sources: hidden states the engine captured, a sketch of the texts, or a transformer encoder over them. At prefill
it is the state of the step's input, at completion that of its output. `StateSource.states` (a whole trace) and
`StateSource.of_step` (one step) use the same arithmetic; captured states are rounded to float16 as the trace keeps
them. The source of a predictor is chosen on held-out tasks (`training/next_agent/semantic_state.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit
from numpy.typing import NDArray

from presage.errors import ArtefactError, ConfigurationError, InputError
from presage.features.moment import COMPLETION, MOMENTS, PREFILL, Moment
from presage.features.prefixes import Prefixes
from presage.features.sketch import Corpus, Sketch
from presage.features.text_encoder import TextEncoder

States = Literal["auto", "captured", "text", "none"]
Candidate = Literal["captured", "text", "relevant text", "none"]
Kind = Literal["captured", "sketch", "encoder", "none"]

SKETCH: Final = "sketch"
"""The text encoder fitted on the training texts; any other name is a folder or a name on the hub."""

STATE_COLUMN: Final[Mapping[Moment, str]] = {PREFILL: "prefill_state", COMPLETION: "completion_state"}
TEXT_COLUMN: Final[Mapping[Moment, str]] = {PREFILL: "input_text", COMPLETION: "output_text"}

_MOST_TARGETS: Final = 12
"""Targets of a kind that terms are tested against."""

Progress = Callable[[int], None]
"""Called with the number of texts embedded since its last call."""


@dataclass(frozen=True, eq=False)
class StateSource:
    """A fitted source of states.

    Attributes:
        sizes: width d of the states at each moment; a moment without states in training is absent.
        encoder_name, encoder_digest: of kind "encoder": folder or hub name, and digest of the files.
        served_model: of kind "captured": the model of the states; None where the traces name none, or several.
        layer: of kind "captured": the transformer layer of the states, counted from 1; None after the final norm.
        cache: of kind "encoder": folder of the embeddings kept on disk; None for the user's cache.
    """

    kind: Kind
    sizes: Mapping[Moment, int] = field(default_factory=dict)
    sketch: Sketch | None = None
    encoder_name: str | None = None
    encoder_digest: str | None = None
    served_model: str | None = None
    layer: int | None = None
    cache: Path | None = None

    @property
    def reads_text(self) -> bool:
        """Whether states come from texts."""
        return self.kind in ("sketch", "encoder")

    def states(self, table: pa.Table, progress: Progress | None = None) -> dict[Moment, NDArray[np.float32]]:
        """States of every step of a valid trace: float32 [n, d] by moment, NaN rows where a step has none.

        A moment without any state is left out. Raises InputError if a captured state has another width or is of another
        layer than in training, or is not finite.
        """
        if self.kind == "captured":
            if set(layers := _of_steps_with_state(table, "state_layer")) - {self.layer}:
                raise InputError(
                    f"the states of these traces are those {_after(layers)}; the predictor was trained with those "
                    f"{_after([self.layer])}: record that layer (presage.state_layer), or train anew"
                )
            return {
                moment: _captured(table[STATE_COLUMN[moment]], size, STATE_COLUMN[moment])
                for moment, size in self.sizes.items()
                if _has_values(table, STATE_COLUMN[moment])
            }
        moments = [moment for moment in self.sizes if _has_values(table, TEXT_COLUMN[moment])]
        if not moments:
            return {}
        # In one call: the input of a step is often an earlier output, and each distinct text is processed once.
        texts = [text for moment in moments for text in table[TEXT_COLUMN[moment]].to_pylist()]
        vectors = self.sketch.transform(texts) if self.sketch is not None else self._encoder.encode(texts, progress)
        return {moment: vectors[i * len(table) : (i + 1) * len(table)] for i, moment in enumerate(moments)}

    def of_step(self, step: Mapping[str, Any], moment: Moment) -> NDArray[np.float32] | None:
        """The state of one step at one moment, float32 [d]; None if it has none, or training had none.

        `step` is keyed by column names of traces. Raises InputError if a captured state has another width than in
        training or is not finite, or a text is no string.
        """
        column = (STATE_COLUMN if self.kind == "captured" else TEXT_COLUMN)[moment]
        value = step.get(column) if moment in self.sizes else None
        if value is None:
            return None
        if self.kind == "captured":
            return _captured_one(value, self.sizes[moment], column)
        if not isinstance(value, str):
            raise InputError(f"{column} is a {type(value).__name__}; expected a string, or null where there is none")
        return self.sketch.transform_one(value) if self.sketch is not None else self._encoder.encode_one(value)

    @cached_property
    def _encoder(self) -> TextEncoder:
        """Loaded at the first text: an artefact is read in milliseconds, a transformer is not."""
        assert self.encoder_name is not None
        encoder = TextEncoder.load(self.encoder_name, cache=self.cache)
        if encoder.digest != self.encoder_digest:
            raise ArtefactError(
                f"text encoder {self.encoder_name!r} has digest {encoder.digest[:19]}…; the predictor was trained with "
                f"{str(self.encoder_digest)[:19]}…: put the files it was trained with back, or train anew"
            )
        return encoder

    def to_config(self) -> dict[str, Any]:
        """JSON values of an artefact."""
        config: dict[str, Any] = {"kind": self.kind, "sizes": dict(self.sizes)}
        if self.kind == "encoder":
            config |= {"encoder": self.encoder_name, "encoder_digest": self.encoder_digest}
        if self.served_model is not None:
            config["served_model"] = self.served_model
        if self.layer is not None:
            config["layer"] = self.layer
        return config

    def to_tensors(self) -> dict[str, NDArray[Any]]:
        """Tensors of an artefact: the sketch's. An encoder is kept by name and digest only."""
        return self.sketch.to_tensors() if self.sketch is not None else {}

    @classmethod
    def from_artefact(
        cls, config: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]], cache: Path | None = None
    ) -> StateSource:
        """Inverse of `to_config` and `to_tensors`, else ArtefactError; an encoder is loaded when needed."""
        kind, sizes = config.get("kind"), _sizes(config.get("sizes"))
        if kind not in ("captured", "sketch", "encoder", "none") or sizes is None:
            raise ArtefactError(
                f"state source of kind {kind!r} with sizes {config.get('sizes')!r}; wanted captured, sketch, "
                "encoder or none, and a width for each moment: use the version of Presage that wrote it, or train anew"
            )
        name, digest = config.get("encoder"), config.get("encoder_digest")
        if kind == "encoder" and not (isinstance(name, str) and isinstance(digest, str)):
            raise ArtefactError("state source of kind 'encoder' without the encoder's name and digest: train anew")
        sketch = Sketch.from_tensors(tensors) if kind == "sketch" else None
        if sketch is not None and set(sizes.values()) - {sketch.size}:
            raise ArtefactError(f"state sizes {sizes} and a text sketch of {sketch.size} dimensions: train anew")
        served, layer = config.get("served_model"), config.get("layer")
        served = served if isinstance(served, str) else None
        return cls(kind, sizes, sketch, name, digest, served, layer if isinstance(layer, int) else None, cache)


def candidates(table: pa.Table, states: States, text_encoder: str = SKETCH) -> tuple[Candidate, ...]:
    """The sources of states that a training trace permits, the simplest first; "auto": all that it has, and none.

    Raises ConfigurationError if the trace lacks the requested source.
    """
    captured = any(_has_values(table, column) for column in STATE_COLUMN.values())
    written = bool(_written(table))
    for wanted, there, columns, remedy in (
        (
            "captured",
            captured,
            "a prefill_state or completion_state",
            "hidden states while serving, or use --states text",
        ),
        ("text", written, "an input_text or output_text", "texts, or use --states captured"),
    ):
        if states == wanted and not there:
            raise ConfigurationError(
                f"--states {wanted}, but no step of the training traces has {columns}: record {remedy} or none"
            )
    sources: list[Candidate] = ["none"] if states in ("auto", "none") else []
    if captured and states in ("auto", "captured"):
        sources.append("captured")
    if written and states in ("auto", "text"):
        sources += ["relevant text", "text"] if text_encoder == SKETCH else ["text"]
    return tuple(sources)


def captured_source(table: pa.Table) -> StateSource:
    """The hidden states of a training trace as a source; raises InputError if they are of several layers."""
    sizes = {m: table.schema.field(c).type.list_size for m, c in STATE_COLUMN.items() if _has_values(table, c)}
    models, layers = (_of_steps_with_state(table, column) for column in ("model", "state_layer"))
    if len(layers) > 1:
        raise InputError(
            f"captured states of several layers in one trace: those {_after(layers)}; keep traces of different layers "
            "apart, or use --states text or none"
        )
    model = models[0] if len(models) == 1 else None
    return StateSource("captured", sizes, served_model=model, layer=layers[0] if layers else None)


def encoder_source(
    table: pa.Table, text_encoder: str, *, progress: Progress | None = None, cache: Path | None = None
) -> StateSource:
    """A transformer over the texts of a training trace, which it embeds; `states` then reads them from the cache.

    Raises ConfigurationError if the encoder cannot be loaded.
    """
    encoder = TextEncoder.load(text_encoder, cache=cache)
    encoder.encode([text for moment in _written(table) for text in table[TEXT_COLUMN[moment]].to_pylist()], progress)
    return StateSource(
        "encoder",
        dict.fromkeys(_written(table), encoder.size),
        encoder_name=encoder.name,
        encoder_digest=encoder.digest,
        cache=cache,
    )


@dataclass(frozen=True, eq=False)
class StepTexts:
    """The texts of a training trace, to fit sketches on: rows moment by moment, in each the steps of the trace."""

    moments: tuple[Moment, ...]
    corpus: Corpus

    @classmethod
    def of(cls, table: pa.Table, prefixes: Prefixes) -> StepTexts:
        """From a trace and its prefixes; a relevant term predicts what follows a step better than its agent alone."""
        moments = tuple(_written(table))
        sides = np.repeat(np.arange(len(moments)), prefixes.steps)
        task, agent, targets = prefixes.task[prefixes.workflow], prefixes.agent, _what_follows(prefixes)
        return cls(
            moments,
            Corpus.of(
                [text for moment in moments for text in table[TEXT_COLUMN[moment]].to_pylist()],
                np.tile(task, len(moments)),
                np.tile(agent, len(moments)),
                sides.astype(np.int8),
                np.tile(targets, (len(moments), 1)),
            ),
        )

    def fit(
        self, steps: NDArray[np.bool_], fold: NDArray[np.int64], *, relevant: bool, seed: int
    ) -> tuple[StateSource, dict[Moment, NDArray[np.float32]]]:
        """A sketch of the texts of some steps, bool [n].

        `fold` is int64 [n], equal for steps of one task; `relevant` keeps only terms associated with what follows.
        Returns the source, and the states of all n steps, float32 [n, d] by moment; out of fold for the fitted ones.
        Raises InputError if the texts are insufficient for a sketch.
        """
        rows, folds = np.tile(steps, len(self.moments)), np.tile(fold, len(self.moments))
        part = self.corpus.take(rows)
        sketch, known_terms = Sketch.fit(part, folds[rows], relevant=relevant, seed=seed)
        vectors = np.empty((len(rows), sketch.size), np.float32)
        vectors[rows] = sketch.out_of_fold(part, folds[rows], known_terms)
        vectors[~rows] = sketch.rows(self.corpus.take(~rows))
        source = StateSource("sketch", dict.fromkeys(self.moments, sketch.size), sketch)
        return source, dict(zip(self.moments, np.split(vectors, len(self.moments)), strict=True))


def _what_follows(prefixes: Prefixes) -> NDArray[np.float32]:
    """Targets of relevant terms, 0 or 1, NaN where unknown: the outcomes one and K steps ahead, and the agents still to
    come in the workflow; of each the most frequent. float32 [n, O]."""
    blocks = []
    for k in dict.fromkeys((0, prefixes.horizon - 1)):
        outcome = prefixes.outcomes[:, k]
        known_outcome = (outcome >= 0) & (outcome < prefixes.vocabulary.outcomes)
        block = (outcome[:, None] == _frequent(outcome[known_outcome])).astype(np.float32)
        block[~known_outcome] = np.nan
        blocks.append(block)
    called = prefixes.agent[:, None] == _frequent(prefixes.agent)
    so_far = np.cumsum(called, axis=0)
    last = np.repeat(prefixes.offsets[1:] - 1, np.diff(prefixes.offsets))
    blocks.append((so_far[last] > so_far).astype(np.float32))
    return np.concatenate(blocks, axis=1)


def _frequent(values: NDArray[np.int32]) -> NDArray[np.int32]:
    distinct, counts = np.unique(values, return_counts=True)
    return np.asarray(distinct[np.argsort(-counts, kind="stable")[:_MOST_TARGETS]], np.int32)


def _written(table: pa.Table) -> list[Moment]:
    """Moments that a trace has texts for."""
    return [moment for moment, column in TEXT_COLUMN.items() if _has_values(table, column)]


def _has_values(table: pa.Table, column: str) -> bool:
    return column in table.column_names and table[column].null_count < len(table)


def _of_steps_with_state(table: pa.Table, column: str) -> list[Any]:
    """Distinct values of a column over the steps with a captured state; none if the column is absent."""
    states = [pc.is_valid(table[state]) for state in STATE_COLUMN.values() if state in table.column_names]
    if not states or column not in table.column_names:
        return []
    distinct: list[Any] = pc.unique(table[column].filter(functools.reduce(pc.or_, states))).to_pylist()
    return distinct


def _after(layers: Iterable[int | None]) -> str:
    return " and ".join("after the final norm" if layer is None else f"after layer {layer}" for layer in layers)


def _sizes(value: object) -> dict[Moment, int] | None:
    """Widths by moment, in the order of moments; None if the value is something else."""
    if not isinstance(value, dict) or set(value) - set(MOMENTS):
        return None
    if not all(type(size) is int and size > 0 for size in value.values()):
        return None
    return {moment: value[moment] for moment in MOMENTS if moment in value}


def _captured(column: pa.ChunkedArray, size: int, name: str) -> NDArray[np.float32]:
    """A column of fixed_size_list<float16>[d] as float32 [n, d], NaN rows for nulls."""
    if column.type.list_size != size:
        raise _wrong_width(name, column.type.list_size, size)
    out = np.empty((len(column), size), np.float32)
    start = 0
    for chunk in column.chunks:
        rows = out[start : start + len(chunk)]
        halves = chunk.flatten().to_numpy(zero_copy_only=False).reshape(-1, size)  # without the null rows
        valid = chunk.is_valid().to_numpy(zero_copy_only=False)
        if len(halves) == len(chunk):
            rows[:] = halves
        else:
            rows[valid] = halves
            rows[~valid] = np.nan
        broken = valid & ~_finite(rows)
        if broken.any():
            raise _not_finite(f"row {start + int(np.argmax(broken))}, {name}")
        start += len(chunk)
    return out


def _captured_one(value: Any, size: int, name: str) -> NDArray[np.float32]:
    """One captured state, any sequence of numbers, as float32 [d]."""
    try:
        numbers = np.asarray(value)
    except ValueError:  # rows of unequal length
        numbers = np.empty((), object)
    if numbers.dtype.kind not in "fiu":
        raise InputError(f"{name} is not a list of numbers; expected {size} numbers, or null")
    if numbers.shape != (size,):
        raise _wrong_width(name, "×".join(map(str, numbers.shape)) or "no", size)
    if numbers.dtype == np.float32:
        state: NDArray[np.float32] = _rounded(np.ascontiguousarray(numbers))
    else:
        with np.errstate(over="ignore"):
            state = numbers.astype(np.float16).astype(np.float32)
    if not _finite(state):
        raise _not_finite(name)
    return state


@njit(cache=True)
def _rounded(state: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 [d] rounded as float16 would, NaN past its range: NumPy's way through float16 takes 20 times as long."""
    out = np.empty_like(state)
    bits, out_bits = state.view(np.uint32), out.view(np.uint32)
    for i in range(len(state)):
        # The lower 13 bits go, to the nearest, ties to even.
        tie = (bits[i] >> np.uint32(13)) & np.uint32(1)
        out_bits[i] = (bits[i] + tie + np.uint32(0xFFF)) & np.uint32(0xFFFFE000)
    for i in range(len(state)):
        if abs(state[i]) < np.float32(2**-14):  # subnormal in float16: multiples of 2^-24, as float32 has above 0.5
            out[i] = (state[i] + np.float32(0.75)) - np.float32(0.75)
        elif not abs(state[i]) < np.float32(65520):
            out[i] = np.nan
    return out


def _finite(states: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which states are finite throughout: as their sums, for float16 values cannot overflow a float32 sum."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.isfinite(states.sum(axis=-1)))


def _wrong_width(name: str, width: object, wanted: int) -> InputError:
    return InputError(
        f"{name} has {width} numbers; the predictor was trained with {wanted}: states of another model cannot be "
        "read, record them from the same model or train anew"
    )


def _not_finite(where: str) -> InputError:
    return InputError(
        f"{where}: NaN, infinity, or a number past ±65504; expected finite numbers within float16: record the hidden "
        "state after the last norm, or leave this one out"
    )
