"""deploy/: files that can be read, whose commands, flags, variables, paths and times are those of the code."""

from __future__ import annotations

import configparser
import json
import plistlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cli.arguments import load_settings
from tandem.cli.main import build_parser
from tandem.cli.service import Service, launchd_agent, systemd_unit
from tandem.config.options import options
from tandem.config.settings import Settings
from tandem.server.gate import OPEN_PATHS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CACHE = "/home/tandem/.cache"
PORT = Settings().server.port

pytestmark = pytest.mark.skipif(not DEPLOY.is_dir(), reason="only in a checkout")


def settings_of(*words: str) -> Settings:
    """What the command would run with, but for its key file, which is not here. A wrong flag or value ends the test."""
    given = re.sub(r" --api-key-file[= ]\S+", "", shlex.join(words))
    return load_settings(build_parser().parse_args(shlex.split(given))).settings


def instructions() -> list[tuple[str, str]]:
    """Of the Containerfile, without comments."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def test_the_image_takes_what_is_there_and_runs_as_nobody_in_particular() -> None:
    made = instructions()
    sources = [name for word, rest in made if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]]
    taken = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert set(sources) == taken and all((ROOT / name).exists() for name in sources)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra for _, rest in made for extra in re.findall(r"--extra (\w+)", rest)}
    assert named and named <= set(extras)
    last = dict(made)  # the last of each kind
    assert last["USER"].isdigit() and last["USER"] != "0" and (last["EXPOSE"], last["VOLUME"]) == (str(PORT), CACHE)
    command = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    assert command[0] == "tandem" and settings_of(*command[1:]).model.model == "demo"
    assert re.findall(r"127\.0\.0\.1:(\d+)(/[\w/]+)", last["HEALTHCHECK"]) == [(str(PORT), "/health/ready")]
    variables = dict(word.split("=", 1) for word in shlex.split(last["ENV"]))
    assert {name for name in variables if name.startswith("TANDEM_")} <= {option.variable for option in options()}


def containers() -> list[tuple[dict[str, Any], float]]:
    """Of compose, and the seconds until each is killed."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    return [(service, float(service["stop_grace_period"].removesuffix("s"))) for service in services]


def test_compose_publishes_to_this_machine_asks_for_a_key_and_lets_requests_finish() -> None:
    assert len(containers()) == 2
    for service, grace in containers():
        words = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in service["command"]]
        settings = settings_of(*words)
        assert settings.process.log_format == "json" and settings.process.drain_timeout < grace
        assert service["ports"] == [f"127.0.0.1:{PORT}:{PORT}"] and service["volumes"] == [f"models:{CACHE}"]
        assert service["environment"]["TANDEM_API_KEY"].startswith("${TANDEM_API_KEY:?")
        build = service["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Containerfile"
        assert set(build.get("args", {})) <= {rest.split("=")[0] for word, rest in instructions() if word == "ARG"}


def test_kubernetes_probes_open_paths_and_waits_longer_than_the_drain() -> None:
    claim, deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    settings = settings_of(*container["args"])
    [pause] = [float(word) for word in container["lifecycle"]["preStop"]["exec"]["command"] if word.isdigit()]
    assert pause + settings.process.drain_timeout < pod["spec"]["terminationGracePeriodSeconds"]
    assert (service["metadata"]["name"], pod["spec"]["enableServiceLinks"]) == ("tandem", False)  # or it sets TANDEM_PORT
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {probe["path"] for probe in probes.values()} <= OPEN_PATHS
    assert probes["liveness"]["path"] == "/health/live" and probes["readiness"]["path"] == "/health/ready"
    assert container["ports"] == [{"name": "http", "containerPort": PORT}]
    assert {probe["port"] for probe in probes.values()} == {"http"} == {port["targetPort"] for port in service["spec"]["ports"]}
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert [volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"]] == [claim["metadata"]["name"]]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == [CACHE]
    assert str(pod["spec"]["securityContext"]["runAsUser"]) == dict(instructions())["USER"]


def test_alerts_ask_for_metrics_that_are_there() -> None:
    [group] = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    documented = set(re.findall(r"^\| `(tandem_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    named = {word.removesuffix("_bucket") for rule in group["rules"] for word in re.findall(r"tandem_\w+", rule["expr"])}
    assert len(named) >= 8 and named <= documented
    assert all(rule.keys() - {"for"} == {"alert", "expr", "annotations"} for rule in group["rules"])


SERVICE = Service("server", ("tandem", "serve"), Path("/"), Path("/log"), {})


@pytest.mark.parametrize("name", ["tandem", "tandem-agent"])
def test_units_of_systemd_are_like_those_that_the_command_installs(name: str) -> None:
    ours, made = configparser.ConfigParser(strict=False), configparser.ConfigParser(strict=False, interpolation=None)
    ours.read_string((DEPLOY / "systemd" / f"{name}.service").read_text())
    made.read_string(systemd_unit(SERVICE))
    for key in ("Restart", "RestartPreventExitStatus", "RestartSec", "KillMode", "LimitNOFILE"):
        assert ours["Service"][key] == made["Service"][key]
    program, *words = shlex.split(ours["Service"]["ExecStart"])
    assert Path(program).name == "tandem"
    if name == "tandem":
        assert settings_of(*words).process.drain_timeout < float(ours["Service"]["TimeoutStopSec"])
    else:
        assert build_parser().parse_args(words).log_format == "text"


def test_the_daemon_of_launchd_has_the_keys_that_the_command_writes() -> None:
    [file] = (DEPLOY / "launchd").iterdir()
    ours, made = plistlib.loads(file.read_bytes()), plistlib.loads(launchd_agent(SERVICE, UserName="tandem"))
    assert set(ours) == set(made) - {"EnvironmentVariables"} and f"{ours['Label']}.plist" == file.name
    for key in ("Label", "KeepAlive", "ThrottleInterval", "ProcessType", "SoftResourceLimits", "HardResourceLimits"):
        assert ours[key] == made[key]
    assert settings_of(*ours["ProgramArguments"][1:]).process.drain_timeout < ours["ExitTimeOut"]
