"""Command-line flags out of configuration dataclasses: a field's default and help are the flag's."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import typer

from octavo.cli.layers import PREFIX, Given, converted, from_environment, from_file, label
from octavo.core.errors import InvalidInput

__all__ = ["Origins", "config_flags"]

Origins = dict[str, str]  # by flag's name with underscores: where its value is from, if not by default


def config_flags(*, layered: bool = False, **configs: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of dataclasses as flags.

    ``config_flags(engine=EngineConfig)`` turns ``command(engine, x)`` into a command with one flag for each field of
    ``EngineConfig`` besides its own parameter ``x``. A field named like one of the command's parameters is left to it;
    of two configs with a field of the same name, the first has the flag. A switch that is on by default becomes
    ``--no-...``: one name for each flag leaves the help room for it on a narrow terminal.

    ``layered``: what no flag says is looked up in the environment, then in the file of the command's parameter
    ``config``; the command's parameter ``origins`` gets where each value is from.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        built_here = {*configs, *(["origins"] if layered else [])}
        own = [parameter for parameter in signature.parameters.values() if parameter.name not in built_here]
        taken = {parameter.name for parameter in own}
        flags: dict[str, list[inspect.Parameter]] = {}
        for name, kind in configs.items():
            flags[name] = _flags(name, kind, taken)
            taken |= {flag.name for flag in flags[name]}

        def run(**values: Any) -> None:
            extra: dict[str, Any] = {}
            given: dict[str, Given] = {}
            if layered:
                extra["origins"], given = _settle(values, values.pop("context"), configs.values())
            built = {name: _build(configs[name], flags[name], values, given) for name in configs}
            command(**built, **extra, **values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        if layered:
            parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
        parameters += [flag for group in flags.values() for flag in group]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _flags(panel: str, kind: Any, taken: set[str]) -> list[inspect.Parameter]:
    return [_flag(field, hint, panel.capitalize()) for field, hint in _fields(kind) if field.name not in taken]


def _fields(kind: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(kind)
    return ((field, hints[field.name]) for field in dataclasses.fields(kind))


def _flag(field: dataclasses.Field[Any], hint: Any, panel: str) -> inspect.Parameter:
    spelled, text, default = field.name.replace("_", "-"), field.metadata.get("help", ""), field.default
    if _is_on(field):
        spelled, text, default = f"no-{spelled}", f"Do not {text[:1].lower()}{text[1:]}", False
    # an empty text means "decide for me": the help says so in words, and needs no [default: ] beside it
    shown = hint is not bool and default not in ("", None)
    option = typer.Option(
        default,
        f"--{spelled}",
        help=text,
        rich_help_panel=f"{panel} options",
        show_default=shown,
        metavar="" if hint is bool else None,
    )
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=hint)


def _is_on(field: dataclasses.Field[Any]) -> bool:
    return field.default is True


def _build(kind: Any, flags: list[inspect.Parameter], values: dict[str, Any], given: Mapping[str, Given]) -> Any:
    """The config from its flags, which leave `values`; a field that the command took over is read, and stays."""
    taken = {flag.name: values.pop(flag.name) for flag in flags}
    fields = {field.name: field for field in dataclasses.fields(kind)}
    taken = {name: not value if _is_on(fields[name]) else value for name, value in taken.items()}
    try:
        return kind(**taken, **{name: value for name, value in values.items() if name in fields})
    except InvalidInput as error:
        if error.field in given:
            raise InvalidInput(label(error.field, given[error.field]), error.value, error.remedy) from None
        raise


def _settle(values: dict[str, Any], context: typer.Context, configs: Iterable[Any]) -> tuple[Origins, dict[str, Given]]:
    """Put what the environment and the file say where no flag was given; and where all of it is from."""
    fields = {field.name: (_spelled(field), hint) for kind in configs for field, hint in _fields(kind)}
    names = {spelled for spelled, _ in fields.values()}
    file = values["config"] or os.environ.get(f"{PREFIX}CONFIG")
    given = {**(from_file(Path(file), names) if file else {}), **from_environment(os.environ, names)}
    origins: Origins = {}
    for name, (spelled, hint) in fields.items():
        if _is_typed(context, name) or (name == "model" and values.get("model_alias")):
            origins[spelled] = "flag"
            given.pop(spelled, None)
        elif spelled in given:
            values[name] = converted(spelled, given[spelled], hint)
            origins[spelled] = given[spelled].origin
    return origins, {name: given[spelled] for name, (spelled, _) in fields.items() if spelled in given}


def _spelled(field: dataclasses.Field[Any]) -> str:
    return f"no_{field.name}" if _is_on(field) else field.name


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
