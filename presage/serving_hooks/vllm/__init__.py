"""The policies inside vLLM's own scheduler and KV-cache manager.

`--scheduler-cls presage.serving_hooks.vllm.scheduler.PresageScheduler` is all the engine is told. Whatever goes wrong
in here, vLLM's own behaviour goes on.
"""
