"""What would the policies have done: recorded workflows through vLLM's own scheduler in virtual time, without a GPU.

`workload` turns a trace into jobs, `arrivals` says when they come, `prompts` makes their tokens, `engine_file` and
`cost` describe the engine, `engine` runs it around vLLM's scheduler (`vllm_scheduler`, `stretches`), with the host's
memory behind it (`host_tier`, `host_cache`). `policies` and `forecasts` name what is compared; `foresight` with
`foreseen_blocks`, and `sweep` are those that the hooks do not have. `metrics` and `runs` measure it.

docs/replay.md says what of this is real and what is modelled.
"""
