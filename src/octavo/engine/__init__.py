"""The engine: offline LLM, InferenceEngine, AsyncEngine, ModelRunner.

llm.py            `LLM`: prompts in, answers out
async_engine.py   `AsyncEngine`: an engine thread and any number of readers
inference.py      `InferenceEngine`: submit, stream, cancel; standard library only
core.py           `EngineCore`: plan, execute, commit or roll back
runner.py         `ModelRunner`: a decision to arrays, the model, the sampler; slots.py its per-branch state
output.py         events to text deltas; stop strings end choices
loader.py         a model's name to a running engine; parts.py the putting together; fixture.py tiny models in JSON
config.py         `EngineConfig`; memory.py the memory plan; identity.py what must be equal for bytes to be equal
recorder.py       recordings as files, written and read
metrics.py        times, utilization, pages; stats.py the same for operators; tenants.py core-seconds
scenario.py       fixtures' scenarios; driver.py prints or runs one; schema.py and schemas/ the JSON schemas
"""
