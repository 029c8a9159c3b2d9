"""Running plans: values, order, sharing, failures, and going on after every kind of end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from batch_samples import ENGINE, Echo, reviews

from presage.batch import Plan, branch, call, function, given, join, map_each, template
from presage.batch.answers import Answers, ModelAnswer
from presage.batch.operators import Operator
from presage.batch.prefix_tree import field_tokens, tree_of
from presage.batch.run import BatchRun, RunReport, RunSettings
from presage.batch.schedule import soft_order
from presage.errors import ConfigurationError, EngineError


def ran(
    plan: Plan,
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    server: Echo,
    cache: Answers | None = None,
    engines: Sequence[str] = (ENGINE,),
    **settings: Any,
) -> tuple[RunReport, list[dict[str, Any]]]:
    order = soft_order(plan, tree_of(plan, field_tokens(plan, rows)), rows)
    chosen = RunSettings(**{"attempts": 1, **settings})
    run = BatchRun(plan, rows, engines, folder, order=order, settings=chosen, cache=cache, transport=server)
    try:
        return asyncio.run(run.run()), list(run.results())
    finally:
        run.close()


def test_every_operator_has_its_value(tmp_path: Path) -> None:
    def says(messages: list[dict[str, str]]) -> str:
        asked = messages[-1]["content"]
        return "short" if asked.startswith("shorten: short and") else f"{asked} and more, much more of the same"

    rows = [{"id": "a", "question": "why not", "check": True}, {"id": "b", "question": "how", "check": False}]
    report, results = ran(reviews(), rows, tmp_path / "r", Echo(says))
    assert [row["id"] for row in results] == ["a", "b"]
    first, second = results
    assert first["points"] == (
        "explain why and more, much more of the same|explain not and more, much more of the same"
    )
    assert first["check"].startswith("check ")
    assert second["check"] == "not checked"
    assert first["error"] is second["error"] is None
    assert report.failed == 0
    assert report.asked == report.output_tokens / 5 == report.cached_tokens / 4


def test_the_side_that_is_not_taken_is_not_asked_for(tmp_path: Path) -> None:
    plan = Plan("b", out=branch(given("yes"), call("x", "yes?"), call("y", "no?")))
    server = Echo()
    ran(plan, [{"yes": 1}], tmp_path / "r", server)
    assert server.prompts() == ["yes?"]


def test_equal_prompts_are_asked_once_over_all_rows_and_samples_each(tmp_path: Path) -> None:
    same = Plan("same", out=call("x", template("{q}", q=given("q"))))
    server = Echo(delay_s=0.01)
    report, results = ran(same, [{"q": "why"}] * 5 + [{"q": "how"}], tmp_path / "one", server)
    assert sorted(server.prompts()) == ["how", "why"]
    assert report.known == 4
    assert report.tokens_saved == 4 * (1 + 5)
    assert len({row["out"] for row in results}) == 2
    sampled = Plan("each", out=call("x", template("{q}", q=given("q")), temperature=0.7))
    server = Echo()
    ran(sampled, [{"q": "why"}] * 5, tmp_path / "each", server)
    assert server.prompts() == ["why"] * 5


def test_the_cache_serves_other_runs_of_its_tenant_alone(tmp_path: Path) -> None:
    plan = Plan("p", out=call("x", template("{q}", q=given("q"))))
    sampled = Plan("p", out=call("x", template("{q}", q=given("q")), temperature=1.0))
    cache = Answers(tmp_path / "cache.db", 10_000)
    server = Echo()
    ran(plan, [{"q": "why"}], tmp_path / "1", server, cache, tenant="a")
    assert ran(plan, [{"q": "why"}], tmp_path / "2", server, cache, tenant="a")[0].asked == 0
    assert ran(plan, [{"q": "why"}], tmp_path / "3", server, cache, tenant="b")[0].asked == 1
    assert ran(sampled, [{"q": "why"}], tmp_path / "4", server, cache, tenant="a")[0].asked == 1
    assert ran(sampled, [{"q": "why"}], tmp_path / "5", server, cache, tenant="a")[0].asked == 1
    cache.close()


def test_a_full_cache_forgets_what_was_used_least_recently(tmp_path: Path) -> None:
    cache = Answers(tmp_path / "cache.db", 3 * 110)
    for name in "abc":
        cache.put(name * 10, ModelAnswer("x" * 100))
    assert cache.get("a" * 10) is not None
    cache.put("d" * 10, ModelAnswer("x" * 100))
    assert [cache.get(name * 10) is not None for name in "abcd"] == [True, False, True, True]
    cache.close()
    reopened = Answers(tmp_path / "cache.db", 110)
    reopened.put("e" * 10, ModelAnswer("x" * 100))
    assert [reopened.get(name * 10) is not None for name in "abcde"] == [False, False, False, False, True]
    reopened.close()


def test_ready_calls_run_in_the_order_of_the_schedule(tmp_path: Path) -> None:
    text = given("t")
    roles = [call(f"r{n}", template("{t} {n}", t=text, n=str(n)), system=f"{n} is a role of its own") for n in range(2)]
    server = Echo(delay_s=0.001)
    rows = [{"t": letter} for letter in "abc"]
    ran(Plan("p", out=join(roles)), rows, tmp_path / "r", server, concurrency=1)
    order = [(agent, prompt[0]) for (_, _, agent), prompt in zip(server.names, server.prompts(), strict=True)]
    by_role = [agent for agent, _ in order[1:]]  # the first call went as soon as it was ready
    assert by_role == sorted(by_role) or by_role == sorted(by_role, reverse=True)
    alike = [call(f"r{n}", template("{t} {n}", t=text, n=str(n)), system="the same for all") for n in range(2)]
    server = Echo(delay_s=0.001)
    ran(Plan("p", out=join(alike)), rows, tmp_path / "s", server, concurrency=1)
    assert [prompt[0] for prompt in server.prompts()] == list("aabbcc")


def test_no_engine_gets_more_calls_than_it_may_have_and_all_are_named(tmp_path: Path) -> None:
    server = Echo(delay_s=0.002)
    rows = [{"question": f"question {n} of a longer kind", "check": True} for n in range(10)]
    ran(reviews(), rows, tmp_path / "batch7", server, concurrency=3)
    assert server.most == 3
    assert {(kind, name.split("%2F")[0]) for kind, name, _ in server.names} == {("reviews", "batch7")}
    assert {agent for _, _, agent in server.names} == {"lawyer", "doctor", "lister", "editor", "checker"}
    assert len(server.ended) == len(set(server.ended)) == 10


def conversations(turns: int, max_tokens: int = 256) -> Plan:
    prompt, talk, said = given("text"), list[tuple[str, Operator]](), given("text")
    for _ in range(turns):
        said = call("x", prompt, history=talk, max_tokens=max_tokens)
        talk += [("user", prompt), ("assistant", said)]
        prompt = template("and then {n}?", n=str(len(talk)))
    return Plan("talk", out=said)


def test_no_more_rows_are_under_way_than_the_engines_cache_holds(tmp_path: Path) -> None:
    rows = [{"text": f"{letter} {'word ' * 1000}"} for letter in "abcdefgh"]  # 1,250 tokens and answers, read twice
    for cache, most in ((0, 8), (40_000, 8), (5_000, 2), (100, 1)):
        server = Echo(delay_s=0.001, cache_tokens=cache)
        ran(conversations(3), rows, tmp_path / str(cache), server)
        assert server.most == most


def test_as_many_rows_are_under_way_as_fit_by_what_engines_count(tmp_path: Path) -> None:
    """Answers of 5 tokens where 4,096 were allowed: at first one row fits a cache of 4,500 tokens, in truth three of
    1,000. With hooks that evict rows that have ended first, a few more fit. The other way round, texts of more tokens
    than their characters say leave fewer rows under way."""
    rows = [{"text": f"{number:03d} {'word ' * 800}"} for number in range(40)]

    def most(plan: Plan, cache: int, name: str, tokens: float = 1.0, evicts: bool = False) -> list[int]:
        server = Echo(delay_s=0.001, cache_tokens=cache, tokens=tokens)
        if evicts:
            server.metrics += 'presage_policy_on{engine="0",policy="eviction"} 1.0\n'
        report, _ = ran(plan, rows, tmp_path / name, server)
        assert report.asked == 120
        return [max(server.under_way[:10]), max(server.under_way[60:])]

    assert most(conversations(3, 4096), 4_500, "long") == [1, 3]
    assert most(conversations(3, 4096), 4_800, "hooks", evicts=True) == [1, 4]
    assert most(conversations(3, 4096), 4_800, "none") == [1, 3]
    assert most(conversations(3, 10), 12_400, "dense", tokens=3.0) == [9, 3]


def test_engines_share_out_neighbours_and_take_over_what_is_left(tmp_path: Path) -> None:
    rows = [{"text": f"{letter} {'word ' * 300}"} for letter in "abcdefghij"]
    server = Echo(delay_s=0.002)
    hosts = ["http://one", "http://two"]
    report, _ = ran(conversations(2), rows, tmp_path / "r", server, engines=hosts, open_rows=2)
    assert report.asked == 20
    served = {"one": set[str](), "two": set[str]()}
    for body, host in zip(server.asked, server.hosts, strict=True):
        served[host].add(body["messages"][0]["content"][0])
    assert set("abc") <= served["one"]
    assert set("fgh") <= served["two"]
    assert not served["one"] & served["two"]
    slow = Echo(lambda messages: "x" * (1 + len(messages)), delay_s=0.001)
    few = [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    ran(
        conversations(1), few, tmp_path / "s", slow, engines=["http://one", "http://two", "http://three", "http://four"]
    )
    assert len(slow.asked) == 3


def test_a_row_that_fails_says_why_and_is_tried_again(tmp_path: Path) -> None:
    plan = Plan("p", out=call("x", template("{q}", q=given("q"))), size=function(len, given("n")))
    server = Echo(lambda messages: 400 if messages[-1]["content"] == "bad" else "fine")
    rows = [{"q": "good", "n": "abc"}, {"q": "bad", "n": "abc"}, {"q": "good", "n": 5}]
    report, results = ran(plan, rows, tmp_path / "r", server)
    assert report.failed == 2
    raised = "function len raised TypeError"
    wrong = [None, "call of x: HTTP 400: no", f"{raised}: object of type 'int' has no len()"]
    assert [row["error"] for row in results] == wrong
    assert report.failures == {"call of x: HTTP 400": 1, raised: 1}
    assert results[0]["out"] == "fine"
    assert results[1]["out"] is None
    report, results = ran(plan, rows, tmp_path / "r", Echo())
    assert report.kept == 1
    assert results[1]["out"] == "<bad>"


def test_an_engine_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    statuses: list[str | int] = [503, 429, "fine"]
    plan = Plan("p", out=call("x", "q"))
    server = Echo(lambda _: statuses.pop(0))
    assert ran(plan, [{}], tmp_path / "r", server, attempts=3)[1][0]["out"] == "fine"


def test_map_each_over_what_is_no_list_fails_the_row(tmp_path: Path) -> None:
    plan = Plan("p", out=map_each(given("q"), lambda item: call("x", item)))
    _, results = ran(plan, [{"q": "text"}, {"q": ["a", "b"]}, {"q": []}], tmp_path / "r", Echo())
    assert results[0]["error"] == "map_each: a list is wanted; came str"
    assert [row["out"] for row in results[1:]] == [["<a>", "<b>"], []]


def test_an_engine_that_is_not_there_or_has_no_such_model_is_said_so(tmp_path: Path) -> None:
    plan = Plan("p", out=call("x", "q", model="large"))
    with pytest.raises(EngineError, match="does not serve 'large'; it serves tiny"):
        ran(plan, [{}], tmp_path / "r", Echo())
    run = BatchRun(Plan("p", out=call("x", "q")), [{}], ["http://127.0.0.1:1"], tmp_path / "s")
    with pytest.raises(EngineError, match="no OpenAI-compatible server answers there"):
        asyncio.run(run.run())
    run.close()


def test_where_several_models_are_served_the_one_for_calls_that_name_none_is_named(tmp_path: Path) -> None:
    plan = Plan("p", out=join([call("x", "a"), call("y", "b", model="large")]))
    server = Echo()
    server.models = ["tiny", "large"]
    with pytest.raises(EngineError, match="it serves tiny, large; name the one for calls that name none"):
        ran(plan, [{}], tmp_path / "r", server)
    ran(plan, [{}], tmp_path / "r", server, model="tiny")
    assert sorted((body["model"], body["messages"][0]["content"]) for body in server.asked) == [
        ("large", "b"),
        ("tiny", "a"),
    ]


def test_a_folder_of_another_plan_or_other_rows_is_refused(tmp_path: Path) -> None:
    plan = Plan("p", out=call("x", template("{q}", q=given("q"))))
    ran(plan, [{"q": "a"}], tmp_path / "r", Echo())
    others: list[tuple[Plan, list[dict[str, str]], str]] = [
        (Plan("p", out=call("x", "y")), [{"q": "a"}], ""),
        (plan, [{"q": "b"}], ""),
        (plan, [{"q": "a"}], "large"),
    ]
    for other, rows, model in others:
        with pytest.raises(ConfigurationError, match="another plan or other rows, or with another --model"):
            ran(other, rows, tmp_path / "r", Echo(), model=model)


def test_two_runs_in_one_folder_are_refused_and_a_failed_one_leaves_it_free(tmp_path: Path) -> None:
    plan = Plan("p", out=call("x", "q"))
    running = BatchRun(plan, [{}], [ENGINE], tmp_path / "r", transport=Echo())
    with pytest.raises(ConfigurationError, match="another run works in this folder"):
        BatchRun(plan, [{}], [ENGINE], tmp_path / "r", transport=Echo())
    running.close()
    assert ran(plan, [{}], tmp_path / "r", Echo())[0].asked == 1
    with pytest.raises(ConfigurationError, match="another plan or other rows"):
        BatchRun(plan, [{"id": "other"}], [ENGINE], tmp_path / "r", transport=Echo())
    assert ran(plan, [{}], tmp_path / "r", Echo())[0].kept == 1


def test_a_run_without_a_result_leaves_its_folder_to_another_plan(tmp_path: Path) -> None:
    """A wrong address, or a plan whose rows all fail: what is mended runs in the same folder."""
    server = Echo()
    server.models = []
    with pytest.raises(EngineError):
        ran(Plan("p", out=call("x", "q")), [{}], tmp_path / "r", server)
    mended = Plan("p", out=call("x", "mended"))
    report, results = ran(mended, [{}], tmp_path / "r", Echo())
    assert (report.asked, report.failed) == (1, 0)
    assert "mended" in results[0]["out"]


def test_answers_that_were_cut_off_or_are_empty_are_counted(tmp_path: Path) -> None:
    plan = Plan("p", out=call("x", template("{q}", q=given("q"))))
    rows = [{"q": "a…"}, {"q": "b"}, {"q": ""}]
    report, results = ran(plan, rows, tmp_path / "r", Echo(lambda said: said[-1]["content"]))
    assert (report.truncated, report.empty, report.failed) == (1, 1, 0)
    assert [row["out"] for row in results] == ["a…", "b", ""]


CALLED = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("message", "reason", "wanted"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "stop", "ab"),
        ({"content": "cut \ud83d"}, "stop", "cut \ufffd"),
        ({"content": None, "tool_calls": CALLED}, "tool_calls", "calls a tool"),
        ({"content": "Let me look.", "tool_calls": CALLED}, "stop", "calls a tool"),
        ({"content": None, "refusal": "I cannot"}, "stop", "the model refused"),
        ({"content": [{"type": "refusal", "refusal": "I cannot"}]}, "stop", "the model refused"),
        ({"content": "half of"}, "content_filter", "content_filter"),
        ({"content": "half of"}, "abort", "abort"),
        ({"content": None}, "stop", "without text"),
        ({"content": [{"type": "image_url"}]}, "stop", "without text"),
        ({"content": "", "reasoning_content": "Hm."}, "length", "raise max_tokens"),
    ],
)
def test_an_answer_that_is_no_whole_text_is_its_rows_error(
    tmp_path: Path, message: dict[str, Any], reason: str, wanted: str
) -> None:
    server = Echo(lambda _: {**message, "finish_reason": reason})
    report, [row] = ran(Plan("p", out=call("reader", "q")), [{}], tmp_path / "r", server)
    if row["error"] is None:
        assert row["out"] == wanted
    else:
        assert row["error"].startswith("call of reader: ")
        assert wanted in row["error"]
        assert report.failures == {row["error"]: 1}


def test_half_a_surrogate_pair_is_a_replacement_character_wherever_it_stands(tmp_path: Path) -> None:
    half, whole = "cut \ud83d", "cut \ufffd"
    plan = Plan("p", out=call(f"x{half}", given("q"), stop=[half]), list=function(lambda text: [text], given("q")))
    server = Echo(lambda _: half)
    _, [row] = ran(plan, [{"id": half, "q": half}], tmp_path / "r", server)
    assert row == {"id": whole, "out": whole, "list": [whole], "error": None}
    assert server.asked[0]["messages"][0]["content"] == server.asked[0]["stop"][0] == whole


def test_values_that_are_no_json_fail_their_row_alone(tmp_path: Path) -> None:
    for wrong in (lambda _: {1, 2}, lambda _: iter("ab"), lambda _: {("a", "b"): 1}, lambda _: exit("over")):
        plan = Plan("p", out=function(lambda q, f=wrong: f(q) if q == "bad" else q, given("q")))  # type: ignore[misc]
        report, results = ran(plan, [{"q": "bad"}, {"q": "good"}], tmp_path / str(id(wrong)), Echo())
        assert (report.failed, results[1]["out"]) == (1, "good")
        assert results[0]["error"]


def test_ids_come_back_as_they_were_and_a_row_without_one_has_its_number(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": 0}, {"id": "one"}, {"id": None}, {}, {"id": 4.5}]
    _, results = ran(Plan("p", out=call("x", "q")), rows, tmp_path / "r", Echo())
    assert [row["id"] for row in results] == [0, "one", 2, 3, 4.5]


def test_a_sample_is_drawn_for_each_item_also_where_it_reads_none(tmp_path: Path) -> None:
    plan = Plan("p", out=map_each(given("n"), lambda _: call("x", "a joke", temperature=1.0)))
    server = Echo()
    ran(plan, [{"n": ["a", "b", "c"]}], tmp_path / "r", server)
    assert len(server.asked) == 3


def test_answers_that_do_not_fit_into_the_cache_are_counted(tmp_path: Path) -> None:
    plan = Plan("p", out=call("x", template("{q}", q=given("q"))))
    cache = Answers(tmp_path / "cache.db", 3 * 164)
    report, _ = ran(plan, [{"q": str(n)} for n in range(10)], tmp_path / "1", Echo(lambda _: "x" * 100), cache)
    assert report.evicted == 7
    cache.close()


def test_progress_counts_answers_where_all_rows_end_at_the_end(tmp_path: Path) -> None:
    first = call("a", given("q"))
    plan = Plan("p", out=call("b", template("{x} of {q}", x=first, q=given("q"))))
    shares: list[float | None] = []
    run = BatchRun(plan, [{"q": str(n)} for n in range(4)], [ENGINE], tmp_path / "r", transport=Echo(delay_s=0.001))
    asyncio.run(run.run(lambda _, share: shares.append(share)))
    run.close()
    assert shares[:4] == [0.125, 0.25, 0.375, 0.5]
    assert shares[-1] == 1.0


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from batch_samples import ENGINE, Echo, reviews
from presage.batch.run import BatchRun, RunSettings
asked = open({log!r}, "a", buffering=1)
def says(messages):
    asked.write(repr(messages) + "\\n")
    return "<" + messages[-1]["content"][:20] + ">"
rows = [{{"question": f"why {{n}} then", "check": n % 2}} for n in range(40)]
run = BatchRun(reviews(), rows, [ENGINE], Path({folder!r}), transport=Echo(says, delay_s=0.002),
               settings=RunSettings(concurrency=4))
asyncio.run(run.run())
run.close()
"""


def test_killed_again_and_again_every_result_is_there_once_and_little_is_asked_twice(tmp_path: Path) -> None:
    folder, log = tmp_path / "r", tmp_path / "asked"
    code = KILLED.format(tests=str(Path(__file__).parent), log=str(log), folder=str(folder))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(4):
        before = log.stat().st_size if log.exists() else 0
        process = subprocess.Popen([sys.executable, "-c", code], env=environment)
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            if log.exists() and log.stat().st_size > before + 1000:
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    rows = [{"question": f"why {n} then", "check": n % 2} for n in range(40)]
    again = Echo()
    report, results = ran(reviews(), rows, folder, again)
    assert report.failed == 0
    assert [row["id"] for row in results] == list(range(40))
    whole, expected = ran(reviews(), rows, tmp_path / "whole", Echo())
    assert results == expected
    asked = log.read_text().splitlines() + [repr(body["messages"]) for body in again.asked]
    assert len(set(asked)) == whole.asked
    assert len(asked) <= whole.asked + 4 * 4  # what was under way at each kill


def test_results_hold_lists_and_numbers(tmp_path: Path) -> None:
    plan = Plan("p", words=function(str.split, given("q")), count=function(len, given("q")))
    _, results = ran(plan, [{"q": "a b"}], tmp_path / "r", Echo())
    assert json.loads(json.dumps(results)) == [{"id": 0, "words": ["a", "b"], "count": 3, "error": None}]
