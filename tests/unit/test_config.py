# SPDX-License-Identifier: Apache-2.0
"""The configuration files: each key, what is wrong in them, what an inventory makes of them, and `nvhook config`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cdi.host import config, configfile, inventory, settings, store
from cdi.host.store import Options
from hook import cli
from ldcache import root
from ldcache.errors import NvhookError
from tests.simhost import Host, SimulatedHost, build

TREE = Path(__file__).resolve().parents[2]


def place(host: Path, path: str, text: str) -> Path:
    """Write a host's file."""
    file = host / path[1:]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def read(host: Path) -> dict[str, Any]:
    """The configuration of the host below a folder."""
    fd = root.open_root(str(host))
    try:
        return config.read(fd)
    finally:
        os.close(fd)


def values(host: Path, path: str, text: str) -> dict[str, Any]:
    """What a file with that text sets, which must have nothing to be warned of."""
    place(host, path, text)
    found = read(host)
    assert (found["source"], found["warnings"]) == (path, [])
    return dict(found["values"])


# --- ours


def test_every_key_has_a_default_and_a_line_in_the_manual() -> None:
    assert set(config.KEYS) == set(settings.DEFAULTS)
    manual = (TREE / "docs/configuration.md").read_text()
    assert [name for name in config.KEYS if f"`{name}`" not in manual] == []
    assert [name for name in config.NVIDIA if f"`{name}`" not in manual] == []
    for name, default in settings.DEFAULTS.items():
        assert config.KEYS[name].convert(default) == default


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("disable-require = true", {"disable-require": True}),
        ('swarm-resource = "A, B,"', {"swarm-resource": ["A", "B"]}),
        ('swarm-resource = ["A"]', {"swarm-resource": ["A"]}),
        (
            "accept-nvidia-visible-devices-as-volume-mounts = true",
            {"accept-nvidia-visible-devices-as-volume-mounts": True},
        ),
        (
            "accept-nvidia-visible-devices-envvar-when-unprivileged = false",
            {"accept-nvidia-visible-devices-envvar-when-unprivileged": False},
        ),
        ('supported-driver-capabilities = "ngx,compute"', {"supported-driver-capabilities": ["compute", "ngx"]}),
        ('supported-driver-capabilities = "all"', {"supported-driver-capabilities": list(settings.CAPABILITIES)}),
        ('supported-driver-capabilities = ""', {"supported-driver-capabilities": []}),
        ('[compat]\ncapabilities = "all"', {"compat.capabilities": "all"}),
        ('[compat]\nunknown-capability = "warn"', {"compat.unknown-capability": "warn"}),
        ('compat.requirements = "off"', {"compat.requirements": "off"}),
        ("[compat]\nforward-compatibility = false", {"compat.forward-compatibility": False}),
        ('[driver]\nroot = "/run//nvidia/driver/"', {"driver.root": "/run/nvidia/driver"}),
        ("[features]\nignore-imex-channel-requests = true", {"features.ignore-imex-channel-requests": True}),
        ("[prestart]\nno-cgroups = true", {"prestart.no-cgroups": True}),
        ("[prestart]\nno-devbind = true", {"prestart.no-devbind": True}),
        ('[log]\nfile = "/var/log/nvhook.log"', {"log.file": "/var/log/nvhook.log"}),
        ('[log]\nfile = "/dev/null"\nlevel = "debug"', {"log.file": "", "log.level": "debug"}),
        ("", {}),
    ],
)
def test_our_keys(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    assert values(tmp_path, settings.OURS, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("disable-require = 1", "disable-require is 1; it must be true or false"),
        ("disable-require = {}", "disable-require is {}; it must be true or false"),
        ('supported-driver-capabilities = "compute,bogus"', "not bogus"),
        ("swarm-resource = 7", "it must be a string"),
        ("swarm-resource = [7]", "it must be a list of strings"),
        ('compat.requirements = "of"', "it must be one of enforce, warn, off"),
        ("compat.requirements = []", "it must be one of enforce, warn, off"),
        ('driver.root = "run"', "it must be an absolute path"),
        ('log.file = "nvhook.log"', "it must be an absolute path of a file"),
        ('log.file = "/var/log/"', "it must be an absolute path of a file"),
        ('log.level = "trace"', "it must be one of error, warning, info, debug"),
        ("compat = 7", "compat is 7; it must be a table"),
        ("[[compat]]\nrequirements = 'off'", "compat is [{'requirements': 'off'}]; it must be a table"),
        ("disable-require = tru", "is no TOML"),
        ("a = 1\na = 2", "is no TOML"),
    ],
)
def test_what_is_wrong_is_an_error(tmp_path: Path, text: str, expected: str) -> None:
    place(tmp_path, settings.OURS, text)
    with pytest.raises(NvhookError) as caught:
        read(tmp_path)
    assert expected in caught.value.what and settings.OURS in caught.value.what


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    place(tmp_path, settings.OURS, "").write_bytes(b"\xff\xfe")
    with pytest.raises(NvhookError, match="is no TOML"):
        read(tmp_path)


def test_a_file_that_cannot_be_read_is_not_passed_over(tmp_path: Path) -> None:
    place(tmp_path, settings.NVIDIAS, "disable-require = true")
    (tmp_path / settings.OURS[1:]).mkdir(parents=True)
    with pytest.raises(NvhookError, match="cannot read /etc/nvhook/config.toml"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("disable-requires = true", "disable-requires is no key of it; did you mean disable-require?"),
        ('[compat]\nrequirement = "off"', "compat.requirement is no key of it; did you mean compat.requirements?"),
        ("no-cgroups = true", "no-cgroups is no key of it; did you mean prestart.no-cgroups?"),
        ("[nvidia-container-cli]\nroot = '/'", "nvidia-container-cli is no key of it"),
        ("zzz = 1", "zzz is no key of it"),
    ],
)
def test_unknown_keys_are_warned_of(tmp_path: Path, text: str, expected: str) -> None:
    place(tmp_path, settings.OURS, text)
    found = read(tmp_path)
    assert found["values"] == {}
    (warning,) = found["warnings"]
    assert warning.startswith(f"{settings.OURS}: {expected}")


@pytest.mark.parametrize("path", [settings.OURS, settings.NVIDIAS])
@pytest.mark.parametrize(
    ("text", "far"),
    [
        ('swarm-resource = "A,B"', ""),
        ('swarm-resource=["A","B"] # and so on', ""),
        ('swarm-resource = [\n  "A",\n  "B"\n]', "A, B"),
        ('swarm-resource = ["A",\n"B"]', "B"),
        ('swarm-resource = """A,\nB"""', "B"),
        ('# swarm-resource is A and B\nswarm-resource = ["A",\n"B"]', "B"),
        ('swarm-resource = ["AB",\n"A", "B"]', "A, B"),
    ],
)
def test_swarm_resources_on_other_lines(tmp_path: Path, path: str, text: str, far: str) -> None:
    """Just those that a start does not see, where nothing else asks for a GPU, are warned of."""
    place(tmp_path, path, text)
    found = read(tmp_path)
    names = found["values"]["swarm-resource"]
    unseen = [name for name in names if not settings.names_swarm_resource(str(tmp_path), {name: "GPU-1"})]
    assert ", ".join(unseen) == far
    expected = f"{path}: swarm-resource has {far} on another line, where no start looks; write all on the key's"
    assert found["warnings"] == ([expected] if far else [])


# --- NVIDIA's


NVIDIA_KEYS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "accept-nvidia-visible-devices-as-volume-mounts",
        "true",
        {"accept-nvidia-visible-devices-as-volume-mounts": True},
    ),
    (
        "accept-nvidia-visible-devices-envvar-when-unprivileged",
        "false",
        {"accept-nvidia-visible-devices-envvar-when-unprivileged": False},
    ),
    ("disable-require", "true", {"disable-require": True}),
    ("supported-driver-capabilities", '"video,utility"', {"supported-driver-capabilities": ["utility", "video"]}),
    ("swarm-resource", '"DOCKER_RESOURCE_GPU"', {"swarm-resource": ["DOCKER_RESOURCE_GPU"]}),
    ("features.allow-cuda-compat-libs-from-container", "true", {}),
    ("features.allow-ldconfig-from-container", "true", {}),
    ("features.allow-unknown-oci-spec-fields", "true", {}),
    ("features.disable-cuda-compat-lib-hook", "true", {}),
    ("features.disable-imex-channel-creation", "true", {}),
    ("features.ignore-imex-channel-requests", "true", {"features.ignore-imex-channel-requests": True}),
    ("features.no-additional-gids-for-device-nodes", "true", {"features.no-additional-gids-for-device-nodes": True}),
    ("nvidia-container-cli.debug", '"/var/log/cli.log"', {"log.file": "/var/log/cli.log", "log.level": "debug"}),
    ("nvidia-container-cli.environment", '["A=1"]', {}),
    ("nvidia-container-cli.ldcache", '"/etc/ld.so.cache"', {}),
    ("nvidia-container-cli.ldconfig", '"@/sbin/ldconfig.real"', {}),
    ("nvidia-container-cli.load-kmods", "false", {"driver.load-kmods": False}),
    ("nvidia-container-cli.no-cgroups", "true", {"prestart.no-cgroups": True}),
    ("nvidia-container-cli.no-pivot", "true", {}),
    ("nvidia-container-cli.path", '"/usr/bin/nvidia-container-cli"', {}),
    ("nvidia-container-cli.root", '"/run/nvidia/driver"', {"driver.root": "/run/nvidia/driver"}),
    ("nvidia-container-cli.user", '"root:video"', {}),
    (
        "nvidia-container-runtime.debug",
        '"/x.log"',
        {"log.file": "/x.log", "log.level": "info"},
    ),
    ("nvidia-container-runtime.log-level", '"debug"', {}),
    ("nvidia-container-runtime.mode", '"legacy"', {"runtime.mode": "legacy"}),
    (
        "nvidia-container-runtime.modes.cdi.annotation-prefixes",
        '["a/"]',
        {"runtime.annotation-prefixes": ["a/"]},
    ),
    (
        "nvidia-container-runtime.modes.cdi.default-kind",
        '"nvidia.com/gpu"',
        {"runtime.default-kind": "nvidia.com/gpu"},
    ),
    (
        "nvidia-container-runtime.modes.cdi.spec-dirs",
        '["/etc/cdi"]',
        {"runtime.spec-dirs": ["/etc/cdi"]},
    ),
    ("nvidia-container-runtime.modes.csv.compat-container-root", '""', {}),
    ("nvidia-container-runtime.modes.csv.mount-spec-path", '"/etc/x.d"', {}),
    (
        "nvidia-container-runtime.modes.jit-cdi.nvcdi-disable-hooks",
        '["all"]',
        {"compat.forward-compatibility": False, "shim.proc-mask": "never"},
    ),
    ("nvidia-container-runtime.modes.jit-cdi.nvcdi-feature-flags", "[]", {}),
    (
        "nvidia-container-runtime.modes.legacy.cuda-compat-mode",
        '"disabled"',
        {"compat.forward-compatibility": False},
    ),
    ("nvidia-container-runtime.runtimes", '["crun"]', {"runtime.runtimes": ["crun"]}),
    ("nvidia-container-runtime-hook.path", '"nvidia-container-runtime-hook"', {}),
    ("nvidia-container-runtime-hook.skip-mode-detection", "true", {}),
    ("nvidia-ctk.path", '"nvidia-ctk"', {}),
]


@pytest.mark.parametrize(("name", "value", "expected"), NVIDIA_KEYS, ids=[key[0] for key in NVIDIA_KEYS])
def test_nvidias_keys(tmp_path: Path, name: str, value: str, expected: dict[str, Any]) -> None:
    table, _, key = name.rpartition(".")
    text = f"[{table}]\n{key} = {value}\n" if table else f"{key} = {value}\n"
    assert values(tmp_path, settings.NVIDIAS, text) == expected
    # And none takes a value of any kind.
    place(tmp_path, settings.NVIDIAS, text.replace(f"= {value}", "= 1.5"))
    with pytest.raises(NvhookError, match=name):
        read(tmp_path)


def test_each_of_nvidias_keys_has_its_test() -> None:
    assert [key[0] for key in NVIDIA_KEYS] == list(config.NVIDIA)


@pytest.mark.parametrize(("mode", "expected"), [("auto", "auto"), ("jit-cdi", "auto"), ("csv", "csv")])
def test_nvidias_modes_that_look_at_the_host(tmp_path: Path, mode: str, expected: str) -> None:
    text = f'[nvidia-container-runtime]\nmode = "{mode}"'
    assert values(tmp_path, settings.NVIDIAS, text) == {"runtime.mode": expected}
    text, warnings = configfile.text(os.open(tmp_path, os.O_PATH), {})
    assert 'mode = "auto"' in text and warnings == [configfile.NO_LONGER]


@pytest.mark.parametrize(
    ("path", "mode", "lenient"),
    [
        (settings.NVIDIAS, "auto", True),
        (settings.NVIDIAS, "cdi", True),
        (settings.NVIDIAS, "csv", False),
        (settings.NVIDIAS, "legacy", False),
        (settings.OURS, "auto", False),
        (None, "auto", False),
    ],
)
def test_the_runtimes_own_defaults(path: str | None, mode: str, lenient: bool) -> None:
    """All other keys are the same, and what a file sets comes before any default."""
    made = settings.of_runtime({"log.level": "info"}, path, mode)
    assert {key: made[key] for key in settings.NOT_ENFORCED} == (
        {"compat.capabilities": "all", "compat.requirements": "warn", "compat.unknown-capability": "warn"}
        if lenient
        else {"compat.capabilities": "honour", "compat.requirements": "enforce", "compat.unknown-capability": "error"}
    )
    others = {key for key in made if key not in settings.NOT_ENFORCED}
    assert {key: made[key] for key in others} == {
        key: value for key, value in settings.DEFAULTS.items() if key in others
    } | {"log.level": "info"}
    assert settings.of_runtime({"compat.requirements": "off"}, path, mode)["compat.requirements"] == "off"


@pytest.mark.parametrize("mode", ["hook", "ldconfig", "mount"])
def test_nvidias_compat_modes(tmp_path: Path, mode: str) -> None:
    text = f'[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = "{mode}"'
    assert values(tmp_path, settings.NVIDIAS, text) == {"compat.forward-compatibility": True}


@pytest.mark.parametrize("mode", ["", "Hook", "enabled"])
def test_a_compat_mode_that_is_none_is_disabled(tmp_path: Path, mode: str) -> None:
    """As in NVIDIA's hook, and no start fails."""
    place(tmp_path, settings.NVIDIAS, f'[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = "{mode}"')
    found = read(tmp_path)
    assert found["values"] == {"compat.forward-compatibility": False}
    key = "nvidia-container-runtime.modes.legacy.cuda-compat-mode"
    assert found["warnings"] == [
        f"{settings.NVIDIAS}: {key} is {mode!r}; taken for disabled; the modes are disabled, hook, ldconfig, mount"
    ]


@pytest.mark.parametrize("key", ["nvidia-container-cli", "nvidia-container-runtime"])
@pytest.mark.parametrize("path", ["nvidia.log", "var/log/nvidia.log", "/var/log/"])
def test_a_log_that_is_no_absolute_file_is_none(tmp_path: Path, key: str, path: str) -> None:
    place(tmp_path, settings.NVIDIAS, f'[{key}]\ndebug = "{path}"')
    found = read(tmp_path)
    assert not found["values"].get("log.file")
    expected = f"{key}.debug is {path!r}; no log is written there; it must be an absolute path of a file"
    assert found["warnings"] == [f"{settings.NVIDIAS}: {expected}"]


@pytest.mark.parametrize(
    ("mode", "hooks", "expected"),
    [
        ("auto", ["enable-cuda-compat"], {"compat.forward-compatibility": False}),
        (
            "jit-cdi",
            ["disable-device-node-modification"],
            {"compat.forward-compatibility": True, "shim.proc-mask": "never"},
        ),
        ("jit-cdi", ["create-symlinks", "update-ldcache", "chmod"], {"compat.forward-compatibility": True}),
        ("cdi", ["all"], {"compat.forward-compatibility": True}),
        ("legacy", ["enable-cuda-compat"], {"compat.forward-compatibility": True}),
    ],
)
def test_disabled_hooks(tmp_path: Path, mode: str, hooks: list[str], expected: dict[str, Any]) -> None:
    """In the modes that make devices of what is on the host; NVIDIA's default file has a compat mode besides."""
    text = f'[nvidia-container-runtime]\nmode = "{mode}"\nmodes.jit-cdi.nvcdi-disable-hooks = {hooks}\n'
    found = values(tmp_path, settings.NVIDIAS, text + 'modes.legacy.cuda-compat-mode = "ldconfig"')
    del found["runtime.mode"]
    assert found == expected


def test_a_disabled_hook_that_is_none(tmp_path: Path) -> None:
    text = '[nvidia-container-runtime.modes.jit-cdi]\nnvcdi-disable-hooks = ["cuda-compat", "enable-cuda-compat"]'
    place(tmp_path, settings.NVIDIAS, text)
    found = read(tmp_path)
    assert found["values"] == {"compat.forward-compatibility": False}
    assert found["warnings"][0].endswith("; no hook is called cuda-compat")


@pytest.mark.parametrize(
    ("cli", "runtime", "level", "expected"),
    [
        ("/c.log", "/r.log", "error", ("/c.log", "debug")),
        ("/dev/null", "/r.log", "error", ("/r.log", "error")),
        ("", "/r.log", "warn", ("/r.log", "warning")),
        ("", "/r.log", "trace", ("/r.log", "debug")),
        ("", "/r.log", "bogus", ("/r.log", "info")),
        ("", "/dev/null", "debug", ("", None)),
    ],
)
def test_nvidias_two_logs_are_one(
    tmp_path: Path, cli: str, runtime: str, level: str, expected: tuple[str, str | None]
) -> None:
    text = f'[nvidia-container-cli]\ndebug = "{cli}"\n[nvidia-container-runtime]\n'
    found = values(tmp_path, settings.NVIDIAS, f'{text}debug = "{runtime}"\nlog-level = "{level}"\n')
    assert (found["log.file"], found.get("log.level")) == expected


def test_the_default_file_of_nvidia(tmp_path: Path) -> None:
    """As the toolkit's packages write it. It changes nothing."""
    text = """\
#accept-nvidia-visible-devices-as-volume-mounts = false
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
environment = []
ldconfig = "@/sbin/ldconfig"
load-kmods = true
#root = "/run/nvidia/driver"

[nvidia-container-runtime]
log-level = "info"
mode = "auto"
runtimes = ["runc", "crun"]

[nvidia-container-runtime.modes.legacy]
cuda-compat-mode = "ldconfig"

[nvidia-container-runtime-hook]
path = "nvidia-container-runtime-hook"
skip-mode-detection = false
"""
    found = values(tmp_path, settings.NVIDIAS, text)
    assert {name: value for name, value in found.items() if settings.DEFAULTS.get(name, value) != value} == {}


def test_ours_alone_counts_where_there_are_both(tmp_path: Path) -> None:
    place(tmp_path, settings.NVIDIAS, 'disable-require = true\nswarm-resource = "A"')
    assert read(tmp_path)["source"] == settings.NVIDIAS
    assert values(tmp_path, settings.OURS, "") == {}
    (tmp_path / settings.OURS[1:]).unlink()
    shutil.rmtree(tmp_path / "etc/nvidia-container-runtime")
    assert read(tmp_path) == {"source": None, "values": {}, "warnings": []}


# --- in the inventory


@pytest.fixture
def host(tmp_path: Path) -> SimulatedHost:
    return build(tmp_path / "host", Host(graphics=False))


def test_the_inventory_has_it(host: SimulatedHost) -> None:
    found = inventory.gather(Options(str(host.root), nvml="never"))
    assert found["config"] == {"source": None, "values": {}, "warnings": []}
    assert settings.of(found) == settings.DEFAULTS
    place(host.root, settings.OURS, "disable-require = true\nbogus = 1")
    found = inventory.gather(Options(str(host.root), nvml="never"))
    assert settings.of(found) == settings.DEFAULTS | {"disable-require": True}
    assert "bogus is no key" in found["warnings"][0]


@pytest.mark.parametrize("path", [settings.OURS, settings.NVIDIAS])
def test_a_changed_file_makes_another_inventory(host: SimulatedHost, path: str) -> None:
    fd = root.open_root(str(host.root))
    try:
        for text, expected in (("disable-require = true", True), ("disable-require = false", False)):
            place(host.root, path, text)
            assert settings.of(store.inventory(fd, str(host.root)))["disable-require"] is expected
        (host.root / path[1:]).unlink()
        assert store.inventory(fd, str(host.root))["config"]["source"] is None
        place(host.root, path, "disable-require = 7")
        with pytest.raises(NvhookError, match="disable-require is 7; it must be true or false"):
            store.inventory(fd, str(host.root))
    finally:
        os.close(fd)


def test_the_configured_driver_root(tmp_path: Path) -> None:
    host = build(tmp_path, Host(driver_root="/drv", dev_root="/drv", graphics=False))
    place(host.root, settings.NVIDIAS, '[nvidia-container-cli]\nroot = "/drv"')
    fd = root.open_root(str(host.root))
    try:
        found = store.inventory(fd, str(host.root))
        assert found["options"]["driver_root"] == found["options"]["dev_root"] == "/drv"
        assert all(item["path"].startswith("/drv/") for item in found["libraries"])
        # Fresh, though its reader names no root.
        status = host.path("/run/nvhook/inventory.json").stat()
        assert store.inventory(fd, str(host.root)) == found
        assert host.path("/run/nvhook/inventory.json").stat().st_ino == status.st_ino
    finally:
        os.close(fd)
    assert inventory.gather(Options(str(host.root), driver_root="/drv", nvml="never"))["options"] == found["options"]


# --- nvhook config


def nvhook_config(host: Path, *words: str) -> int:
    return cli.main(["config", "--host-root", str(host), *words])


def test_printed_it_is_a_file_of_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nvhook_config(tmp_path) == 0
    text = capsys.readouterr().out
    assert values(tmp_path, settings.OURS, text) == {}
    uncommented = "\n".join(line.removeprefix("#") for line in text.splitlines() if not line.startswith("# "))
    assert values(tmp_path, settings.OURS, uncommented) == settings.DEFAULTS


def test_set_and_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "etc").mkdir()
    words = ["--set", "compat.requirements=warn", "--set", "disable-require", "--set", "swarm-resource=A,B"]
    assert nvhook_config(tmp_path, *words) == 0
    assert not (tmp_path / "etc/nvhook").exists()
    printed = capsys.readouterr().out
    assert nvhook_config(tmp_path, *words, "--in-place") == 0
    file = tmp_path / settings.OURS[1:]
    assert file.read_text() == printed
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o644, 0o755)
    expected = {"compat.requirements": "warn", "disable-require": True, "swarm-resource": ["A", "B"]}
    assert read(tmp_path)["values"] == expected


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """In a container the process has the same number each time."""
    left = place(tmp_path, f"{settings.OURS.rpartition('/')[0]}/.config.toml.{os.getpid()}", "half")
    assert nvhook_config(tmp_path, "--set", "disable-require", "--in-place") == 0
    assert read(tmp_path)["values"] == {"disable-require": True}
    assert left.read_text() == "half"


def test_a_file_that_is_there_keeps_its_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = '# mine\ndisable-require = false  # why not\n\n[compat]\n# and this\nrequirements="off"\n'
    file = place(tmp_path, settings.OURS, before)
    assert nvhook_config(tmp_path) == 0
    assert capsys.readouterr().out == before
    assert nvhook_config(tmp_path, "--in-place") == 0
    assert file.read_text() == before
    changes = ["--set=disable-require=true", "--set=driver.root=/drv", "--set=compat.capabilities=all"]
    assert nvhook_config(tmp_path, "--in-place", *changes, "--set=swarm-resource=A") == 0
    after = file.read_text()
    assert "# mine\ndisable-require = true  # why not\n" in after and "# and this\n" in after
    assert read(tmp_path)["values"] == {
        "disable-require": True,
        "swarm-resource": ["A"],
        "compat.requirements": "off",
        "compat.capabilities": "all",
        "driver.root": "/drv",
    }


def test_nvidias_file_is_carried_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'disable-require = true\n[nvidia-container-cli]\nroot = "/drv"\n'
    text += 'user = "root"\n[nvidia-container-runtime]\ndebug = "/x"\nmode = "cdi"'
    place(tmp_path, settings.NVIDIAS, text)
    assert nvhook_config(tmp_path, "--in-place") == 0
    assert read(tmp_path)["values"] == {
        "disable-require": True,
        "driver.root": "/drv",
        "log.file": "/x",
        "log.level": "info",
        "runtime.mode": "cdi",
    }
    assert capsys.readouterr().err == f"nvhook: warning: {configfile.NO_LONGER}\n"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("compat.requirement=warn", "did you mean compat.requirements?"),
        ("disable-require=perhaps", "it must be true or false"),
        ("compat.requirements=never", "it must be one of enforce, warn, off"),
        ("=1", "is no key"),
    ],
)
def test_what_set_refuses(tmp_path: Path, word: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert nvhook_config(tmp_path, "--set", word, "--in-place") == 1
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["--set", "compat.requirements=warn"], ["--set", "disable-require"]])
def test_a_value_where_a_table_belongs(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    file = place(tmp_path, settings.OURS, "compat = 3\n")
    assert nvhook_config(tmp_path, *words, "--in-place") == 1
    error, remedy = capsys.readouterr().err.splitlines()
    assert error == f"nvhook: error: {settings.OURS}: compat is 3; it must be a table"
    assert "docs/configuration.md" in remedy
    assert file.read_text() == "compat = 3\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("nvidia-container-cli = true", "nvidia-container-cli"),
        ("[nvidia-container-runtime]\nmodes = []", "nvidia-container-runtime.modes"),
        ("[nvidia-container-runtime.modes]\nlegacy = 'x'", "nvidia-container-runtime.modes.legacy"),
    ],
)
def test_a_value_where_nvidias_file_has_a_table(tmp_path: Path, text: str, name: str) -> None:
    place(tmp_path, settings.NVIDIAS, text)
    with pytest.raises(NvhookError, match=rf"^{settings.NVIDIAS}: {name} is .*; it must be a table$"):
        read(tmp_path)


def test_a_broken_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = place(tmp_path, settings.OURS, "disable-require = ")
    assert nvhook_config(tmp_path, "--set", "disable-require", "--in-place") == 1
    assert "is no TOML" in capsys.readouterr().err
    assert file.read_text() == "disable-require = "
