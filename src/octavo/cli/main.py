"""`octavo`: the command line. Commands import what they need when they run, so that `--help` is quick.

Exit codes: 0 done, 1 it went wrong, 2 it was asked for wrongly, 130 it was stopped by Ctrl-C.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from octavo import __version__
from octavo.cli.bench import bench_app
from octavo.cli.errors import Refused
from octavo.cli.flags import Origins, config_flags
from octavo.cli.layers import shown_config
from octavo.cli.sampling import SamplingFlags
from octavo.core.errors import InvalidInput, OctavoError
from octavo.engine.config import EngineConfig
from octavo.serve.config import ServeConfig

__all__ = ["app", "main"]

_DEFAULT_MODEL = EngineConfig.model
_MODEL = "A known name (see octavo models), a hub id, a folder, or a .gguf file."

app = typer.Typer(
    name="octavo",
    help="Octavo runs large language models: serve one over HTTP, chat with it, or run a file of prompts.",
    epilog="Start with: octavo chat. Or serve: octavo serve, then POST to http://127.0.0.1:8000/v1/chat/completions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench_app, name="bench")

Model = Annotated[str, typer.Argument(help=_MODEL, show_default=True)]
CacheDir = Annotated[str, typer.Option(help="Folder of downloaded models; default: the user's cache.")]
Recording = Annotated[Path, typer.Argument(help="A file written by --record.", show_default=False)]
WhatIf = Annotated[int | None, typer.Option(help="What if: another bound.")]
EpochNumber = Annotated[int | None, typer.Option(help="Which process's run; default: the last one in the file.")]
ModelOption = Annotated[str, typer.Option("--model", "-m", help=_MODEL)]
ModelAlias = Annotated[str | None, typer.Option("--model", "-m", help="The same as MODEL.", show_default=False)]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, metavar="")
    ] = False,
) -> None:
    pass


@app.command()
@config_flags(layered=True, engine=EngineConfig, server=ServeConfig)
def serve(
    engine: EngineConfig,
    server: ServeConfig,
    origins: Origins,
    model: Model = _DEFAULT_MODEL,
    model_alias: ModelAlias = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML file of settings.")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show each setting and where it is from, and end.", metavar="")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the memory plan, without loading weights, and end.", metavar="")
    ] = False,
) -> None:
    """Serve a model over HTTP, on port 8000: the APIs of OpenAI, Anthropic and Ollama.

    What no flag says is taken from OCTAVO_<FLAG> in the environment, then from the file of --config.
    """
    engine = _with_alias(engine, model_alias)
    if print_config:
        typer.echo(shown_config((engine, server), origins))
        return
    if dry_run:
        from octavo.serve.dry_run import dry_run as show_plan

        show_plan(engine, server, typer.echo)
        return
    from octavo.serve.server import serve as run_server
    from octavo.serve.words import tell

    run_server(engine, server, tell)


@app.command()
@config_flags(sampling=SamplingFlags, engine=EngineConfig)
def chat(
    engine: EngineConfig,
    sampling: SamplingFlags,
    model: Model = _DEFAULT_MODEL,
    model_alias: ModelAlias = None,
    system: Annotated[str, typer.Option("--system", "-s", help="What the model is told first.")] = "",
) -> None:
    """Chat with a model in the terminal. Ctrl-C stops an answer, Ctrl-D leaves."""
    from octavo.cli.chat import run_chat

    run_chat(_with_alias(engine, model_alias), sampling, system)


@app.command()
@config_flags(sampling=SamplingFlags, engine=EngineConfig)
def run(
    engine: EngineConfig,
    sampling: SamplingFlags,
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads standard input.")] = "",
    model: ModelOption = _DEFAULT_MODEL,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Prompts, one JSON value a line.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File of answers; goes on where it ended.")] = None,
    system: Annotated[str, typer.Option("--system", "-s", help="What the model is told first.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands: no chat template.", metavar="")
    ] = False,
) -> None:
    """Answer one prompt, or a file of them.

    A line of the file is a string, or a body of /v1/completions or /v1/chat/completions: {"prompt": "..."} or
    {"messages": [...]}, with any of its parameters.
    """
    from octavo.cli.run import run_file, run_prompt

    if raw and system:
        raise Refused("--system and --raw: give one of the two; --system needs the chat template")
    if file is not None:
        if prompt:
            raise Refused("a prompt and --file: give one of the two")
        run_file(engine, sampling, file, out, system, raw)
    elif out is not None:
        raise Refused("--out works with --file; redirect the output of a single prompt with >")
    else:
        run_prompt(engine, sampling, prompt, system, raw)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", metavar="")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Check the cached models' SHA-256.", metavar="")] = False,
    server: Annotated[str, typer.Option("--server", help="Look at a running server, by its URL, instead.")] = "",
    cache_dir: CacheDir = "",
) -> None:
    """Say what was found on this machine: backend, instruction sets, memory, model cache, and what is missing."""
    from octavo.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(as_json, cache_dir, verify, server))


@app.command()
def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", metavar="")] = False,
    fetch: Annotated[str, typer.Option("--fetch", help="Fetch this model into the cache.")] = "",
    cache_dir: CacheDir = "",
) -> None:
    """List the models known by name: size, licence, where they come from and where they are cached."""
    from octavo.cli.models import run_models

    run_models(as_json, fetch, cache_dir)


@app.command()
def quantize(
    model: Model = _DEFAULT_MODEL,
    to: Annotated[str, typer.Option("--to", help="w8g64, w8pc, w4g32, w4g64, w4g128, w4a16g32, ...")] = "w8g64",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A new folder.")] = None,
    method: Annotated[str, typer.Option(help="rtn (round to nearest), gptq, awq or smoothquant.")] = "rtn",
    text: Annotated[Path | None, typer.Option(help="Text to measure on; default: a short one of our own.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Text that gptq, awq and smoothquant look at.")] = None,
    alpha: Annotated[float, typer.Option(help="smoothquant: how much moves into the weights, from 0 to 1.")] = 0.5,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each text.")] = 2048,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cache_dir: CacheDir = "",
) -> None:
    """Write a model in a format of fewer bytes, and say what that costs: errors, KL divergence, perplexity."""
    from octavo.cli.quantize import QuantizeOptions, run_quantize

    if out is None:
        raise Refused("--out is missing: name a new folder, as in: octavo quantize --to w8g64 --out smaller")
    run_quantize(QuantizeOptions(model, to, out, method, text, calibration, alpha, max_tokens, as_json, cache_dir))


@app.command()
def inspect(
    model: Model = _DEFAULT_MODEL,
    weight_format: Annotated[str, typer.Option("--format", help="The format that it would run in.")] = "auto",
    program: Annotated[bool, typer.Option("--program", help="Show the captured forward pass.")] = False,
    diff: Annotated[str, typer.Option(help="Two backends: name the first op that differs.")] = "",
    prompt: Annotated[str, typer.Option(help="What --diff runs.")] = "The first op that differs is",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    cache_dir: CacheDir = "",
) -> None:
    """Show each matrix: how it is stored, in which types it would be multiplied, and the bytes a token reads of it."""
    from octavo.cli.inspect import run_diff, run_inspect, run_program

    if diff:
        run_diff(model, diff, prompt, cache_dir)
    elif program:
        run_program(model, cache_dir)
    else:
        run_inspect(model, weight_format, as_json, cache_dir)


@app.command()
def replay(
    recording: Recording,
    run_model: Annotated[bool, typer.Option("--run-model", help="Draw the tokens again with the model.")] = False,
    model: Annotated[str, typer.Option("--model", "-m", help="Where the model is now, for --run-model.")] = "",
    policy: Annotated[str, typer.Option(help="What if: another order of service.")] = "",
    pages: Annotated[int | None, typer.Option(help="What if: so many pages.")] = None,
    max_batched_tokens: WhatIf = None,
    max_running_requests: WhatIf = None,
    max_prefill_chunk: WhatIf = None,
    max_token_gap_ms: WhatIf = None,
    epoch: EpochNumber = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a recording again: prove the same steps and tokens, or name the first difference (exit code 1).

    With another setting: say what its requests would have met with, in steps that cost what they cost then.
    """
    from octavo.cli.recordings import run_replay, run_what_if

    asked = {
        "policy": policy or None,
        "max_batched_tokens": max_batched_tokens,
        "max_running_requests": max_running_requests,
        "max_prefill_chunk": max_prefill_chunk,
        "max_token_gap_ms": max_token_gap_ms,
    }
    changes = {name: value for name, value in asked.items() if value is not None}
    if changes or pages is not None:
        if run_model:
            raise Refused("--run-model and another setting: give one of the two; the schedule would differ")
        run_what_if(recording, epoch, pages, changes, as_json)
        return
    raise typer.Exit(0 if run_replay(recording, epoch, run_model, model, as_json) else 1)


@app.command()
def explain(
    recording: Recording,
    request: Annotated[str, typer.Argument(help="A request's id, or its answer's; default: a table of all.")] = "",
    epoch: EpochNumber = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a request's time went into: named causes that add up to it, and who was served meanwhile."""
    from octavo.cli.recordings import run_explain

    run_explain(recording, epoch, request, as_json)


@app.command()
def timeline(
    recording: Recording,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page; default: beside the recording.")] = None,
    trace: Annotated[Path | None, typer.Option(help="The trace; default: beside the page.")] = None,
    epoch: EpochNumber = None,
) -> None:
    """Draw a recording: a page for the browser that needs nothing else, and a trace for Perfetto or Chrome."""
    from octavo.cli.recordings import run_timeline

    run_timeline(recording, epoch, out, trace)


def _with_alias(engine: EngineConfig, alias: str | None) -> EngineConfig:
    """The config with the model of --model, where that is how it was given."""
    if alias is None:
        return engine
    if engine.model not in (_DEFAULT_MODEL, alias):
        raise Refused(f"{engine.model} and --model {alias} are two models; give one of them")
    return replace(engine, model=alias)


def main() -> None:
    """Run the command line. What Octavo refuses is one message, not a traceback."""
    if sys.stdout is None:
        _fail("standard output is closed", 1)
    try:
        app()
    except InvalidInput as error:
        _fail(_spelled(error), 2)
    except Refused as error:
        _fail(str(error), 2)
    except OctavoError as error:
        _fail(str(error), 1)
    except OSError as error:
        _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 1)


def _spelled(error: InvalidInput) -> str:
    """The error with the field and what its remedy names as flags, where they are."""
    flags = {*EngineConfig.__dataclass_fields__, *ServeConfig.__dataclass_fields__, *SamplingFlags.__dataclass_fields__}

    def flag(name: str) -> str:
        return f"--{name.replace('_', '-')}" if name in flags else name

    remedy = re.sub(r"\b[a-z]+(_[a-z]+)+\b", lambda found: flag(found[0]), error.remedy)
    field = error.field if error.field == "model" else flag(error.field)
    return str(InvalidInput(field, error.value, remedy))


def _fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
