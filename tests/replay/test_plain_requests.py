"""Jobs of plain requests: sizes as they are, and what is repeated counted by ids and all before them."""

from presage.datasets.requests import PlainRequest
from presage.replay.prompts import PromptIds
from presage.replay.workload import PromptConvention, again_tokens, requests_workload

REQUESTS = (
    PlainRequest(0.0, 900, 5, (7, 8)),
    PlainRequest(1.0, 1500, 0, (7, 8, 9)),
    PlainRequest(2.0, 1500, 3, (6, 8, 9)),  # 8 and 9 behind another beginning are others
    PlainRequest(3.0, 0, 3),
)


def test_each_is_a_job_of_its_own() -> None:
    held = requests_workload(REQUESTS, 512)
    assert [job.arrives_s for job in held.jobs] == [0.0, 1.0, 2.0, 3.0]
    assert {job.workflow_type for job in held.jobs} == {""}
    sizes = [(job.steps[0].prompt_tokens, job.steps[0].output_tokens) for job in held.jobs]
    assert sizes == [(900, 5), (1500, 1), (1500, 3), (1, 3)]


def test_what_is_repeated_is_what_began_alike() -> None:
    jobs = requests_workload(REQUESTS, 512).jobs
    assert [again_tokens(job, 0) for job in jobs] == [0, 1024, 0, 0]
    same = requests_workload([REQUESTS[0]] * 2, 512).jobs
    assert again_tokens(same[1], 0) == 899  # the last is computed to be answered


def test_prompts_are_alike_as_far_as_their_ids_are() -> None:
    jobs = requests_workload(REQUESTS, 512).jobs
    prompts = PromptIds(jobs, PromptConvention())
    first, second, third, last = (prompts.prompt(number, 0) for number in range(4))
    assert [len(one) for one in (first, second, third, last)] == [900, 1500, 1500, 1]
    assert first == second[:900]
    assert second[512:] == third[512:]
    assert second[0] != third[0]
    assert len({first[0], first[512], second[1024], third[0], last[0]}) == 5


def test_tokens_that_no_id_stands_for_are_ones_own() -> None:
    jobs = requests_workload([PlainRequest(0.0, 1500, 1, (7,)), PlainRequest(0.0, 1500, 1, (7,))], 512).jobs
    one, other = (PromptIds(jobs, PromptConvention()).prompt(number, 0) for number in range(2))
    assert one[:512] == other[:512]
    assert not set(one[512:]) & set(other[512:])
