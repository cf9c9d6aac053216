"""Command-line flags out of configuration dataclasses: a field's default and help are the flag's."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import typer

__all__ = ["config_flags"]


def config_flags(**configs: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of dataclasses as flags.

    ``config_flags(engine=EngineConfig)`` turns ``command(engine, x)`` into a command with one flag for each field of
    ``EngineConfig`` besides its own parameter ``x``. A field named like one of the command's parameters is left to it;
    of two configs with a field of the same name, the first has the flag. A switch that is on by default becomes
    ``--no-...``: one name for each flag leaves the help room for it on a narrow terminal.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.name not in configs]
        taken = {parameter.name for parameter in own}
        flags: dict[str, list[inspect.Parameter]] = {}
        for name, kind in configs.items():
            flags[name] = _flags(name, kind, taken)
            taken |= {flag.name for flag in flags[name]}

        def run(**values: Any) -> None:
            built = {name: _build(configs[name], flags[name], values) for name in configs}
            command(**built, **values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
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


def _build(kind: Any, flags: list[inspect.Parameter], values: dict[str, Any]) -> Any:
    """The config from its flags, which leave `values`; a field that the command took over is read, and stays."""
    given = {flag.name: values.pop(flag.name) for flag in flags}
    fields = {field.name: field for field in dataclasses.fields(kind)}
    given = {name: not value if _is_on(fields[name]) else value for name, value in given.items()}
    return kind(**given, **{name: value for name, value in values.items() if name in fields})
