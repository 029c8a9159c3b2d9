"""The format of a recording, which an engine's recorder writes and ingestion reads: columns and file names.

    RECORDING/engine-INSTANCE/lock                        held while the engine records
                              steps-000001.arrows         whole
                              steps-000002.open.arrows    being written, or left by a killed engine
                              forecasts-…, ends-…, outcomes-…   likewise; files of one number were written together

Files are Arrow IPC streams, readable up to the last whole batch wherever they end (Parquet is not). States are raw
bytes, float16 in the byte order of this machine: lists of numbers would cost the engine's machine ten times as much.
"""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa

from presage.datasets.schema import STATE_COLUMNS, TIMESTAMP

VERSION: Final = "7"
ADDED: Final = {
    "1": (
        "model",
        "system_prompt",
        "decision",
        "tenant",
        "tools_called",
        "identity_confidence",
        "goes_on_from",
        "quotes",
    ),
    "2": ("tenant", "tools_called", "identity_confidence", "goes_on_from", "quotes"),
    "3": ("tools_called", "identity_confidence", "goes_on_from", "quotes"),
    "4": ("identity_confidence", "goes_on_from", "quotes"),
    "5": ("goes_on_from", "quotes"),
    "6": ("goes_on_from", "quotes"),
}
"""Versions that are read too, and the last columns of STEPS that they lack; none of them has outcomes."""
VERSION_KEY: Final = b"presage.recording_version"
INSTANCE_KEY: Final = b"presage.engine_instance"
MODEL_KEY: Final = b"presage.served_model"
LAYER_KEY: Final = b"presage.state_layer"

INSTANCE_FOLDER: Final = "engine-"
LOCK: Final = "lock"
OPEN: Final = ".open.arrows"
WHOLE: Final = ".arrows"
FILE_NAME: Final = re.compile(r"(steps|forecasts|ends|outcomes)-\d{6,}(\.open)?\.arrows")

RECORDED_FINISHED: Final = "finished"
"""How an end is recorded that the client reported."""
RECORDED_EXPIRED: Final = "expired"
"""How an end is recorded where no request came within the time to live."""
RECORDED_ENDS: Final = (RECORDED_FINISHED, RECORDED_EXPIRED, "said", "silent")
"""How an end is recorded; the last two by recorders of earlier versions."""

STEPS: Final = pa.schema(
    [
        pa.field("run", pa.int64(), False),
        pa.field("step", pa.int32(), False),
        ("client_step", pa.int32()),
        ("step_id", pa.string()),
        pa.field("workflow_type", pa.string(), False),
        pa.field("workflow_id", pa.string(), False),
        pa.field("agent", pa.string(), False),
        ("input_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("cached_input_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        pa.field("started_at", TIMESTAMP, False),
        ("ended_at", TIMESTAMP),
        ("input_text", pa.large_string()),
        ("output_text", pa.large_string()),
        *((state, pa.large_binary()) for state in STATE_COLUMNS),
        ("model", pa.string()),
        ("system_prompt", pa.large_string()),
        ("decision", pa.string()),
        ("tenant", pa.string()),
        ("tools_called", pa.list_(pa.string())),
        ("identity_confidence", pa.float32()),
        ("goes_on_from", pa.int32()),
        ("quotes", pa.list_(pa.int32())),
    ]
)
"""A finished step. `run` counts the workflows of an engine, `step` the steps of a run in the order they began, both
from 0; `client_step` is the client's number, `step_id` the engine's request id; `decision` is what a gateway decided on
the step, as JSON; `model` where one recorder serves several; `tenant` where the server has several API keys;
`tools_called` where the server has parsed the answer; `identity_confidence` where something else than its
client's names told which workflow it continues; `goes_on_from` the latest step whose prompt and answer begin its
prompt, `quotes` those whose answers stand in it otherwise, both where a gateway saw it."""

FORECASTS: Final = pa.schema(
    [
        pa.field("run", pa.int64(), False),
        pa.field("step", pa.int32(), False),
        pa.field("workflow_type", pa.string(), False),
        pa.field("workflow_id", pa.string(), False),
        pa.field("moment", pa.string(), False),
        pa.field("made_at", TIMESTAMP, False),
        ("source", pa.string()),
        ("version", pa.int32()),
        ("evidence", pa.int64()),
        ("reason", pa.string()),
        ("agents", pa.list_(pa.string())),
        ("probabilities", pa.list_(pa.float32())),
        ("remaining_source", pa.string()),
        ("remaining_version", pa.int32()),
        ("remaining_evidence", pa.int64()),
        ("remaining_reason", pa.string()),
        ("quantiles", pa.list_(pa.float64())),
        ("remaining_tokens", pa.list_(pa.float64())),
    ]
)
"""A forecast at a moment of a step; `probabilities` are K rows of len(agents) + 1 numbers, END last."""

ENDS: Final = pa.schema(
    [
        pa.field("run", pa.int64(), False),
        pa.field("workflow_type", pa.string(), False),
        pa.field("workflow_id", pa.string(), False),
        pa.field("steps", pa.int32(), False),
        pa.field("how", pa.string(), False),
        pa.field("ended_at", TIMESTAMP, False),
    ]
)
"""The end of a run, written after its last step."""

OUTCOMES: Final = pa.schema(
    [
        pa.field("run", pa.int64(), False),
        ("step", pa.int32()),
        pa.field("workflow_type", pa.string(), False),
        pa.field("workflow_id", pa.string(), False),
        pa.field("success", pa.bool_(), False),
        ("score", pa.float32()),
        pa.field("reported_at", TIMESTAMP, False),
    ]
)
"""What an application reported of an answer: the run, its step, and how right it was; or, without step and score, of
the whole run. Each is reported once, at any time after it began."""

TABLES: Final = {"steps": STEPS, "forecasts": FORECASTS, "ends": ENDS, "outcomes": OUTCOMES}


def described(schema: pa.Schema, instance: str, model: str | None, state_layer: int | None = None) -> pa.Schema:
    """The schema of a file, with the engine, its model and the layer of its states in the metadata."""
    facts = {VERSION_KEY: VERSION.encode(), INSTANCE_KEY: instance.encode()}
    if model is not None:
        facts[MODEL_KEY] = model.encode()
    if state_layer is not None:
        facts[LAYER_KEY] = str(state_layer).encode()
    return schema.with_metadata(facts)
