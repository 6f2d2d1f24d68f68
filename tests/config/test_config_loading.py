"""Precedence, sources in messages, the TOML file, legacy variables, JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.loading import build, from_json, load, to_json
from tandem.config.settings import ServerSettings, Settings
from tandem.errors import ConfigError
from tandem.launchers.hostfile import read_hostfile


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "tandem.toml"
        path.write_text(text)
        return str(path)

    return write


def refused(**arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**arguments)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_defaults_alone():
    loaded = load()
    assert loaded.settings == Settings()
    assert loaded.sources == {}
    assert loaded.warnings == ()


def test_precedence(toml):
    file = toml("[server]\nport = 1\n[model]\nmodel = 'f'\nserved_name = 'f'\nmax_context = 9\n")
    environment = {
        "TANDEM_PORT": "2", "TANDEM_MODEL": "e", "API_PORT": "3", "MODEL_REPO": "l", "MAX_SEQUENCE_LENGTH": "8",
    }  # fmt: skip
    loaded = load({"port": ["4"]}, environment=environment, config_file=file, profile="ring")
    assert loaded.settings.server.port == 4
    assert loaded.settings.model.model == "e"
    assert loaded.settings.model.max_context == 8
    assert loaded.settings.model.served_name == ("f",)
    assert loaded.given("model") == {"model": "e", "served_name": ("f",), "max_context": 8}


def test_file_and_profile_can_come_from_the_environment(toml):
    environment = {"TANDEM_CONFIG": toml("[server]\nport = 5\n"), "TANDEM_PROFILE": "ring", "MODEL_REPO": "org/name"}
    settings = load(environment=environment).settings
    assert (settings.server.port, settings.model.model) == (5, "org/name")


def test_legacy_variables_need_the_profile():
    assert load(environment={"MODEL_REPO": "a", "API_PORT": "3"}).settings == Settings()
    assert load(profile="ring").settings.server.port == 8100


def test_legacy_variables_without_effect_warn():
    environment = {"MODEL_CACHE_DIR": "/models/qwen", "WORKER_HOSTS": "", "WORKER_SSH": "a@b"}
    [cache, worker] = load({"hostfile": ["hosts.json"]}, environment=environment, profile="ring").warnings
    assert "MODEL_CACHE_DIR has no effect: it does not end in /hub" in cache
    assert "WORKER_SSH has no effect: the machines come from --hostfile" in worker


WORKERS = {"NUM_DEVICES": "3", "WORKER_HOSTS": "10.0.0.2, 10.0.0.3", "WORKER_SSH": "a@10.0.0.2,b@mac"}


def test_workers_of_the_ring_profile_are_a_hosts_list_in_memory_with_a_tensor_parallel_rank_on_each():
    for environment in (WORKERS, {**WORKERS, "NUM_DEVICES": ""}):
        loaded = load(environment=environment, profile="ring")
        parallel = loaded.settings.parallel
        assert (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, loaded.warnings) == (3, 1, ())
        hosts = read_hostfile(parallel.hostfile).hosts
        assert [(host.ssh, host.ips) for host in hosts] == [
            ("127.0.0.1", ()), ("a@10.0.0.2", ("10.0.0.2",)), ("b@mac", ("10.0.0.3",)),
        ]  # fmt: skip
    chosen = load({"pipeline_parallel_size": ["3"]}, environment=WORKERS, profile="ring").settings.parallel
    assert (chosen.tensor_parallel_size, chosen.pipeline_parallel_size) == (1, 3)
    assert chosen.hostfile == parallel.hostfile
    for place, sent in ((Path.home() / "hub", "~/hub"), ("/a/hub", "/a/hub")):
        cached = load(environment={**WORKERS, "MODEL_CACHE_DIR": str(place)}, profile="ring")
        assert read_hostfile(cached.settings.parallel.hostfile).envs == (("HF_HUB_CACHE", sent),)
        assert cached.warnings == ()
    elsewhere = load({"launcher": ["ray"]}, environment={"NUM_DEVICES": "2"}, profile="ring").settings.parallel
    assert (elsewhere.tensor_parallel_size, elsewhere.hostfile) == (2, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORKER_SSH": ""}, "WORKER_HOSTS has 2 address(es) and WORKER_SSH 0; set USER@HOST for each"),
        ({"WORKER_HOSTS": "10.0.0.2"}, "WORKER_HOSTS has 1 address(es) and WORKER_SSH 2"),
        ({"WORKER_HOSTS": "10.0.0.2,10.0.0.2"}, "10.0.0.2 is there twice; name each machine once"),
        ({"WORKER_SSH": "a@mac,a@mac"}, "a@mac is there twice"),
        ({"NUM_DEVICES": "2"}, "NUM_DEVICES=2: this machine and those of WORKER_HOSTS are 3; set NUM_DEVICES=3"),
    ],
)
def test_workers_that_do_not_fit_together_are_refused(changes, words):
    assert words in refused(environment={**WORKERS, **changes}, profile="ring")


def test_a_hosts_list_in_memory_is_checked_as_a_file_is():
    hosts = load(environment={**WORKERS, "WORKER_HOSTS": "mac-a,10.0.0.3"}, profile="ring").settings.parallel.hostfile
    with pytest.raises(ConfigError, match=r"hosts list: host 1 \(a@10.0.0.2\): ips has 'mac-a'; must be IPv4"):
        read_hostfile(hosts)


def test_former_names_work_and_say_the_new_one_once(toml):
    file = toml("[models]\nkeep = ['a']\n[models.a]\nmodel = 'm'\nlanes = 3\nkeep = true\n")
    loaded = load({"lanes": ["2"], "canary": ["false"]}, environment={"TANDEM_SPARES": "1"}, config_file=file)
    settings = loaded.settings
    assert (settings.parallel.micro_batches, settings.parallel.standby_ranks) == (2, 1)
    assert not settings.scheduler.self_check and settings.models.pinned_models == ("a",)
    assert settings.named[0].values == {"model": "m", "micro_batches": 3, "keep": True}
    renames = [warning.partition(";")[0] for warning in loaded.warnings if "is now called" in warning]
    assert renames == [
        "--lanes is now called --micro-batches",
        "--canary is now called --self-check",
        "TANDEM_SPARES is now called TANDEM_STANDBY_RANKS",
        f"{file} [models.a] lanes is now called micro_batches",
        f"{file} [models] keep is now called pinned_models",
    ]
    assert "[scheduler] lanes: no such setting; micro_batches belongs into [parallel]" in refused(
        config_file=toml("[scheduler]\nlanes = 2\n")
    )


def test_unknown_profile():
    assert "there is: ring" in refused(profile="rings")


def test_unknown_variable_warns_with_the_nearest():
    (warning,) = load(environment={"TANDEM_PROT": "80"}).warnings
    assert "TANDEM_PROT" in warning
    assert "TANDEM_PORT" in warning


def test_a_variable_that_is_like_no_other_is_not_guessed():
    assert load(environment={"TANDEM_FOO": "1"}).warnings == ("TANDEM_FOO is set but means nothing",)


def test_empty_variables_count_as_unset_unless_they_are_secrets():
    assert load(environment={"TANDEM_PORT": ""}).settings.server.port == 8000
    assert "enableServiceLinks: false" in refused(environment={"TANDEM_PORT": "tcp://10.96.12.3:80"})
    assert "TANDEM_API_KEY" in refused(environment={"TANDEM_API_KEY": ""})
    assert "TANDEM_API_KEY_FILE" in refused(environment={"TANDEM_API_KEY_FILE": " "})
    assert "must not be empty" in refused(flags={"api_key": [""]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprot = 1\n", "prot: no such setting; did you mean port?"),
        ("[servr]\nport = 1\n", "no table [servr]; did you mean server?"),
        ("port = 1\n", "port belongs into [server]"),
        ("[model]\nport = 1\n", "port belongs into [server]"),
        ("server = 1\n", "must be a table"),
        ("[server\n", "not valid TOML"),
        ("[server]\nport = 'x'\n", "[server] port: 'x' is not a whole number"),
    ],
)
def test_wrong_files(toml, text, said):
    assert said in refused(config_file=toml(text))


def test_missing_file():
    assert "cannot read /nowhere/tandem.toml" in refused(config_file="/nowhere/tandem.toml")


def test_messages_name_the_source(toml):
    assert refused(environment={"TANDEM_PORT": "70000"}).startswith("TANDEM_PORT: 70000")
    assert refused(flags={"port": ["-1"]}).startswith("--port: -1")
    assert "tandem.toml [server] port: 70000" in refused(config_file=toml("[server]\nport = 70000\n"))
    assert refused(environment={"API_PORT": "x"}, profile="ring").startswith("API_PORT")


def test_json_round_trip_and_secrets_out_of_repr():
    settings = load({"api_key": ["geheim"], "layer_split": ["3,4"], "pipeline_parallel_size": ["2"]}).settings
    line = to_json(settings)
    assert b"\n" not in line
    assert from_json(line) == settings
    assert "geheim" not in repr(settings)


def test_json_of_something_else():
    with pytest.raises(ConfigError):
        from_json(b'{"server": {"port": "x"}}')
    with pytest.raises(ConfigError):
        from_json(b"")


def test_build():
    assert build({"port": 1}).server == ServerSettings(port=1)
    with pytest.raises(ConfigError, match="did you mean port"):
        build({"prot": 1})
