"""Hidden states of the served model, projected in the worker and sent to the scheduler.

`--worker-cls presage.serving_hooks.vllm.StatesWorker` (`worker.py`) captures rows; the KV connector `StatesConnector`
(`connector.py`) sends requests for rows to the worker and states back; `steps.py` assigns them to steps of workflows.
All are idle unless a predictor or the recorder reads states.
"""
