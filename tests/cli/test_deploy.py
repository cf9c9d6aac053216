"""What `deploy/` and the page of operations name is there: flags, routes, ports, variables, volumes."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from octavo.cli.layers import PREFIX, from_file
from octavo.cli.main import app
from octavo.engine.config import EngineConfig
from octavo.serve.apis import probes
from octavo.serve.config import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
ROUTES = {route.path for route in probes.routes(None)}  # type: ignore[arg-type]
ADDED = 5  # seconds that the supervisor adds to --shutdown-timeout


def flags(command: str) -> set[str]:
    found = get_command(app).commands[command]  # type: ignore[attr-defined]
    return {spelled for parameter in found.params for spelled in parameter.opts}


def settings() -> set[str]:
    return {flag[2:].replace("-", "_") for flag in flags("serve")}


def test_the_unit_is_hardened_and_waits_for_the_drain() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "octavo.service")
    service = unit["Service"]
    assert service["Type"] == "notify" and service["KillMode"] == "mixed"
    for name in ("NoNewPrivileges", "DynamicUser", "PrivateTmp", "ProtectKernelTunables", "LockPersonality"):
        assert service[name] == "yes"
    assert service["ProtectSystem"] == "strict" and "MemoryMax" in (DEPLOY / "octavo.service").read_text()
    program, command, *arguments = shlex.split(service["ExecStart"])
    assert Path(program).name == "octavo" and command == "serve"
    assert {word for word in arguments if word.startswith("--")} <= flags("serve")
    assert int(service["TimeoutStopSec"]) > 30 + ADDED and service["RestartPreventExitStatus"] == "2"


def test_the_image_runs_as_nobody_much_and_asks_the_readiness_route() -> None:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    steps = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    names = [name for name, _ in steps]
    assert names.count("FROM") == 2
    last = steps[len(names) - 1 - names[::-1].index("FROM") :]
    rest = dict(last)
    assert int(rest["USER"]) > 0
    variables = dict(word.split("=") for word in rest["ENV"].split())
    ours = {name[len(PREFIX) :].lower() for name in variables if name.startswith(PREFIX)}
    assert ours <= settings() | {"home"}
    assert rest["EXPOSE"] == variables["OCTAVO_PORT"] == str(ServeConfig.port)
    assert variables["OCTAVO_HOME"] == rest["VOLUME"]
    assert "/health/ready" in rest["HEALTHCHECK"] and "/health/ready" in ROUTES
    for word in shlex.split(dict(steps[:7])["COPY"])[:-1]:
        assert (ROOT / word).exists()


def rendered(name: str) -> Any:
    """A template with each action's line left out and each value a 1."""
    text = (DEPLOY / "octavo" / "templates" / name).read_text()
    assert text.count("{{") == text.count("}}")
    opened, closed = len(re.findall(r"\{\{- (?:if|range) ", text)), text.count("{{- end }}")
    assert opened == closed
    kept = [line for line in text.splitlines() if not re.fullmatch(r"\s*\{\{- .*\}\}", line)]
    return yaml.safe_load(re.sub(r"\{\{.*?\}\}", "1", "\n".join(kept)))


def test_the_chart_names_routes_ports_and_volumes_that_are_there(tmp_path: Path) -> None:
    pod = rendered("deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in ROUTES and asked["port"] == container["ports"][0]["name"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    arguments = container["args"]
    assert {word for word in arguments if word.startswith("--")} <= flags("serve")
    assert arguments[arguments.index("--port") + 1] == str(container["ports"][0]["containerPort"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and security["allowPrivilegeEscalation"] is False
    assert pod["securityContext"]["runAsNonRoot"] and pod["enableServiceLinks"] is False
    assert rendered("service.yaml")["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert rendered("secret.yaml")["stringData"].keys() == {"keys"}
    assert {rendered(f"{name}.yaml")["apiVersion"] for name in ("configmap", "secret", "service")} == {"v1"}


def test_the_settings_of_the_chart_are_ours(tmp_path: Path) -> None:
    values = yaml.safe_load((DEPLOY / "octavo" / "values.yaml").read_text())
    file = tmp_path / "octavo.yaml"
    file.write_text(yaml.safe_dump(values["config"]))
    given = from_file(file, settings() | {"model"})
    assert set(given) == {name.replace("-", "_") for name in values["config"]}
    assert values["service"]["port"] == ServeConfig.port and EngineConfig(kv_memory=given["kv_memory"].text)
    used = set(re.findall(r"\.Values\.(\w+)", "".join(f.read_text() for f in (DEPLOY / "octavo/templates").iterdir())))
    assert used == set(values)


def test_every_flag_on_the_page_is_one() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    known = flags("serve") | flags("doctor") | {f"--{word}" for word in ("read-only", "tmpfs", "help")}
    assert named and named <= known, named - known
