"""The hidden-state tap: rows of the model's last layer, projected in the worker, brought to the scheduler.

`--worker-cls presage.serving_hooks.vllm.StatesWorker` sees the rows, the KV connector `StatesConnector` carries which
are wanted and what came of them. Without a predictor that reads the served model's states neither does anything.

| file | knows |
|---|---|
| `connector.py` | vLLM's connector: which rows are wanted, rows projected on their device, and what travels |
| `worker.py` | the worker, whose model tells its rows |
| `steps.py` | whose states they are: the steps of workflows |
"""
