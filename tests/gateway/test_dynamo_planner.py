"""The predictor for Dynamo's planner, asked over gRPC by a client that plays the planner."""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import pytest

from presage.gateway.exporters.demand import ModelDemand
from presage.gateway.hosts.dynamo_planner import MESSAGES, PACKAGE, RequestPredictor, serving

DEMAND = [
    ModelDemand("small", 0.0, {0.5: 4.0, 0.9: 4.0}),
    ModelDemand("small", 15.0, {0.5: 6.0, 0.9: 9.0}),
    ModelDemand("small", 30.0, {0.5: 5.0, 0.9: 8.0}),
    ModelDemand("large", 0.0, {0.5: 1.0, 0.9: 1.0}),
    ModelDemand("large", 15.0, {0.5: 4.0, 0.9: 5.0}),
]


def predictor(demand: Iterable[ModelDemand] = DEMAND) -> RequestPredictor:
    return RequestPredictor(lambda: demand, lambda: 100.0)


def traffic(requests: float, interval_s: float) -> Any:
    """What the planner sends: the traffic of its last interval."""
    asked = MESSAGES["PredictStageRequest"]()
    found = asked.context.observations.traffic
    found.num_req, found.duration_s, found.isl, found.osl = requests, interval_s, 1000, 200
    return asked


def asked(of: RequestPredictor, *requests: Any) -> list[Any]:
    async def run() -> list[Any]:
        async with serving(of, "127.0.0.1:0") as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            predict = channel.unary_unary(
                f"/{PACKAGE}.PredictPlugin/Predict",
                request_serializer=lambda one: one if isinstance(one, bytes) else one.SerializeToString(),
                response_deserializer=MESSAGES["PredictStageResponse"].FromString,
            )
            return [await predict(one, timeout=20) for one in requests]

    return asyncio.run(run())


def test_the_requests_of_the_next_interval_grow_with_the_requests_in_flight() -> None:
    assert predictor(DEMAND[:3]).predicted(120.0, 60.0) == pytest.approx(120 * 6 / 4)
    assert predictor(DEMAND[3:]).predicted(120.0, 60.0) == pytest.approx(120 * 4 / 1)
    assert predictor().predicted(120.0, 60.0) == pytest.approx(120 * 10 / 5)


def test_requests_in_flight_are_averaged_over_the_interval() -> None:
    now, in_flight = [0.0], [8.0]

    def demands() -> list[ModelDemand]:
        return [ModelDemand("small", 0.0, {0.5: in_flight[0]}), ModelDemand("small", 30.0, {0.5: 6.0})]

    of = RequestPredictor(demands, lambda: now[0])
    for second in range(60):
        now[0], in_flight[0] = float(second), 8.0 if second < 50 else 2.0
        of.sample()
    assert of.predicted(100.0, 9.5) == pytest.approx(100 * 6 / 2)
    assert of.predicted(100.0, 1000.0) == pytest.approx(100 * 6 / 7, rel=0.05)


@pytest.mark.parametrize(
    ("demand", "requests"),
    [([], 120.0), (DEMAND, 0.0), (DEMAND[:1], 120.0), ([ModelDemand("small", 30.0, {0.5: 6.0})], 120.0)],
    ids=["no demand", "no traffic", "no forecast", "nothing in flight"],
)
def test_dynamos_own_predictor_is_left_alone_where_nothing_is_known(demand: list[ModelDemand], requests: float) -> None:
    (answer,) = asked(predictor(demand), traffic(requests, 60.0))
    assert not answer.HasField("predictions")


def test_the_planner_is_answered_over_grpc() -> None:
    found, unknown, odd = asked(predictor(DEMAND[:3]), traffic(120.0, 60.0), b"", b"\x0a\x02\x08\x01")
    assert found.predictions.predicted_num_req == 180
    assert found.predictions.source == "presage"
    for left in ("predicted_isl", "predicted_osl", "predicted_kv_hit_rate"):  # to Dynamo
        assert not found.predictions.HasField(left)
    assert not unknown.HasField("predictions")
    assert not odd.HasField("predictions")


def test_an_error_of_ours_is_an_empty_answer() -> None:
    def broken() -> Iterable[ModelDemand]:
        raise RuntimeError

    (answer,) = asked(RequestPredictor(broken, lambda: 0.0), traffic(120.0, 60.0))
    assert answer.ByteSize() == 0


def test_messages_have_the_bytes_of_dynamos_protocol() -> None:
    """Numbers and types as in plugin.proto of Dynamo 1.6: field 1 of the answer holds field 1, a float, and field 4."""
    answer = MESSAGES["PredictStageResponse"]()
    answer.predictions.predicted_num_req, answer.predictions.source = 1.5, "presage"
    assert answer.SerializeToString() == b"\x0a\x0e\x0d\x00\x00\xc0\x3f\x22\x07presage"
    sent = b"\x0a\x14\x0a\x01r\x1a\x0f\x0a\x0d\x0d\x00\x00\x70\x42\x15\x00\x00\xf0\x42\x22\x01x"
    context = MESSAGES["PredictStageRequest"].FromString(sent).context
    assert (context.observations.traffic.duration_s, context.observations.traffic.num_req) == (60.0, 120.0)
    numbers = {
        "PredictionData": {"predicted_num_req": 1, "predicted_isl": 2, "predicted_osl": 3, "source": 4,
                           "predicted_kv_hit_rate": 5},
        "TrafficMetrics": {"duration_s": 1, "num_req": 2, "isl": 3, "osl": 4, "kv_hit_rate": 5},
    }  # fmt: skip
    for name, fields in numbers.items():
        assert {one.name: one.number for one in MESSAGES[name].DESCRIPTOR.fields} == fields
