"""Recorded traces say whether retraining is due, of which workflow type, and why."""

import json

import numpy as np
import pyarrow as pa
from monitoring_samples import followed

from presage.datasets.synthetic.workflows import generate
from presage.features.moment import PREFILL
from presage.serving_hooks.monitoring.drift import DriftConfig
from presage.serving_hooks.monitoring.outcomes import END, Followed
from presage.serving_hooks.monitoring.retrain_check import TraceForecasts, followed_of, retrain_check


def test_due_is_what_has_changed_and_what_no_model_has_seen() -> None:
    changed = [followed("abc", workflow_type="changed")] * 400 + [followed("acb", workflow_type="changed")] * 100
    same = [followed("abc", workflow_type="same")] * 500
    new = [followed("abc", workflow_type="new")] * 300
    rare = [followed("abc", workflow_type="rare")] * 5
    found = retrain_check(changed + same + new + rare, None, {"changed", "same", "rare"})
    types = found["workflow_types"]
    assert {name: of["due"] for name, of in types.items()} == {
        "changed": True,
        "new": True,
        "rare": False,
        "same": False,
    }
    assert found["due"]
    assert (types["same"]["workflows"], types["same"]["watched"]) == (500, 200)
    assert (types["rare"]["watched"], types["new"]["never_seen"]) == (0, True)
    assert any(reason["figure"] == "transitions never seen" for reason in types["changed"]["alarm"]["reasons"])
    assert json.dumps(found, allow_nan=False)
    assert types["same"]["latest"]["version 1"]["moments"]["prefill"]["accuracy"] == [0.5]


def test_what_has_recovered_is_not_due() -> None:
    normal, other = followed("abc"), followed("axc")
    found = retrain_check([normal] * 300 + [other] * 60 + [normal] * 300, config=DriftConfig(recovery=50))
    (of,) = found["workflow_types"].values()
    assert (of["alarms_raised"], of["alarm"], of["due"], found["due"]) == (1, None, False, False)


def test_workflows_come_in_the_order_in_which_they_began_and_cut_ones_have_no_end() -> None:
    tables = [generate(law, 20, 1, state_size=16, censored=0.5).table for law in ("triage", "retry")]
    table = pa.concat_tables(tables)
    found = list(followed_of(table, TraceForecasts()))
    starts = table.filter(pa.array(table["step"].to_numpy() == 0))
    order = np.argsort(starts["started_at"].cast(pa.int64()).to_numpy(), kind="stable")
    assert [of.workflow_type for of in found] == [starts["workflow_type"][int(place)].as_py() for place in order]
    complete = [starts["complete"][int(place)].as_py() for place in order]
    assert [of.ended for of in found] == complete
    assert [any(after == END for _, after in of.transitions) for of in found] == complete


def test_an_unknown_count_leaves_lengths_unknown() -> None:
    table = generate("retry", 1, 0, state_size=16).table
    steps = table.num_rows
    assert steps > 3
    tokens = pa.array([None if row == 1 else 10 for row in range(steps)], pa.int32())
    schema = table.schema
    table = table.set_column(schema.get_field_index("output_tokens"), schema.field("output_tokens"), tokens)
    remaining = np.full((steps, 1), 10.0 * (steps - 1), np.float32)
    (unknown,) = followed_of(table, TraceForecasts(quantiles=(0.5,), tokens=remaining, lengths_version=3))
    assert unknown.lengths["version 3"].judged == steps - 2


def test_without_any_model_agents_and_call_graph_are_still_watched() -> None:
    table = generate("retry", 30, 0, state_size=16).table
    whole: list[Followed] = list(followed_of(table, TraceForecasts()))
    assert all(of.transitions and not of.next_agent and not of.lengths for of in whole)
    assert TraceForecasts().at(0, PREFILL).source == "none"
