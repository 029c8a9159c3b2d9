"""The hidden-state tap: rows of the model's last layer, projected in the worker, brought to the scheduler.

`--worker-cls presage.serving_hooks.vllm.StatesWorker` sees the rows, the KV connector `StatesConnector` carries which
are wanted and what came of them. Without a predictor that reads the served model's states neither does anything.

| file | knows |
|---|---|
| `wanted.py` | which requests end their prompt in a step, and which produce a token |
| `messages.py` | what goes to the worker and what comes back |
| `rows.py` | rows of a step, projected on the device they are on |
| `connector.py` | vLLM's connector: both ends of the way |
| `worker.py` | the worker, whose model tells its rows |
| `steps.py` | whose states they are: the steps of workflows |
"""
