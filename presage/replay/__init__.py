"""Replays recorded workflows through vLLM's own scheduler in virtual time: what would each policy have done?

`workload` makes jobs of a trace, `arrivals` schedules them, `prompts` makes their tokens. `engine` runs them through
the scheduler that `vllm_scheduler` makes of a policy. `runs` compares policies, `metrics` measures runs. docs/replay.md
describes what is real and what is modelled.
"""
