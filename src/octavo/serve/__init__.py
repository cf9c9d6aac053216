"""HTTP APIs over the engine: one Starlette app, OpenAI's shapes, one process for now.

    bytes -> body -> protocol -> params + prompts -> generate -> (chat | completions) -> sse or JSON

Nothing here is imported by `import octavo`; see `octavo.serve.app.create_app`.
"""
