"""The engine: offline LLM, InferenceEngine, AsyncEngine, ModelRunner."""
