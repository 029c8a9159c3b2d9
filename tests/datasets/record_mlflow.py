"""An application traced by MLflow, in a process of its own: MLflow keeps store and experiment for the whole process.

python record_mlflow.py FOLDER makes FOLDER/mlflow.db and FOLDER/frame.jsonl.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mlflow
from mlflow.entities import SpanType


@mlflow.trace(span_type=SpanType.TOOL, name="search")
def search(query: str) -> str:
    return f"found {query}"


def request(model: str) -> None:
    with mlflow.start_span("ChatOpenAI", span_type=SpanType.CHAT_MODEL) as span:
        said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        span.set_inputs({"messages": said, "model": model})
        span.set_outputs({"choices": [{"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]})
        usage = {"input_tokens": 40, "output_tokens": 7, "total_tokens": 47, "cache_read_input_tokens": 32}
        span.set_attribute("mlflow.chat.tokenUsage", usage)
        span.set_attribute("mlflow.llm.model", model)


def support(session: str | None = None) -> None:
    with mlflow.start_span("support", span_type=SpanType.CHAIN):
        if session is not None:
            mlflow.update_current_trace(metadata={"mlflow.trace.session": session})
        with mlflow.start_span("planner", span_type=SpanType.AGENT):
            request("m")
            search("it")
        with mlflow.start_span("writer", span_type=SpanType.AGENT):
            request("m")


def main(folder: Path) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    artifacts = (folder / "artifacts").as_uri()
    for name, sessions in (("agents", (None, None)), ("sessions", ("s1", "s1"))):
        mlflow.set_experiment(experiment_id=mlflow.create_experiment(name, artifact_location=artifacts))
        for session in sessions:
            support(session)
    mlflow.create_experiment("nothing", artifact_location=artifacts)
    mlflow.flush_trace_async_logging()
    frame = mlflow.search_traces(locations=[mlflow.get_experiment_by_name("agents").experiment_id])
    frame.to_json(folder / "frame.jsonl", orient="records", lines=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
