"""What would the policies have done: recorded workflows through vLLM's own scheduler in virtual time, without a GPU.

`workload` turns a trace into jobs, `arrivals` says when they come, `prompts` makes their tokens, `engine_file` has the
engine and its costs (`calibrate` fits them), `engine` runs it around vLLM's scheduler (`vllm_scheduler`,
`stretches`), with the host's memory behind it (`host_tier`). `policies` and `forecasts` name what is compared,
`vllm_policies` makes schedulers of them; `foresight` is Belady's rule, which the hooks do not have. `runs` and
`side_by_side` run it, `metrics` measures it.

docs/replay.md says what of this is real and what is modelled.
"""
