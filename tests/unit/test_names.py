# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's commands by their names: their arguments, what is printed, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hook import runtimehook
from hook.names import containercli, ctk
from ldcache.errors import NvhookError
from tests.needs import needs_program, needs_root
from tests.simhost import Fault, Host, Nvml, SimulatedHost, build, gpus

TREE = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedHost]:
    """Tests only read it."""
    description = Host(gpus=gpus(2), i386=True, persistenced="answering", fabricmanager="answering")
    built = build(tmp_path_factory.mktemp("host"), description)
    yield built
    built.close()


def translate(*words: str) -> list[list[str]]:
    return ctk.translated(ctk.parser().parse_args(words))


# nvidia-ctk: what each command becomes


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        ("cdi generate", [["cdi", "generate"]]),
        (
            "cdi generate --driver-root=/run/nvidia/driver --dev-root /",
            [["cdi", "generate", "--driver-root=/run/nvidia/driver", "--dev-root=/"]],
        ),
        (
            "cdi generate --device-name-strategy=uuid --device-name-strategy type-index --no-all-device",
            [
                [
                    "cdi",
                    "generate",
                    "--device-name-strategy=uuid",
                    "--device-name-strategy=type-index",
                    "--no-all-device",
                ]
            ],
        ),
        (
            "cdi generate --devices 0,GPU-1 --disable-hooks chmod,update-ldcache --class x --cdi-vendor v.com",
            [
                ["cdi", "generate", "--vendor=v.com", "--class=x", "--device-id=0", "--device-id=GPU-1"]
                + ["--disable-hook=chmod", "--disable-hook=update-ldcache"]
            ],
        ),
        ("cdi generate --mode=management", [["cdi", "generate", "--mode=management"]]),
        (
            "cdi generate --mode csv --csv.file a.csv,b.csv --csv.ignore-pattern=*.so",
            [["cdi", "generate", "--mode=csv", "--csv.file=a.csv", "--csv.file=b.csv", "--csv.ignore-pattern=*.so"]],
        ),
        ("cdi list --spec-dir /a --spec-dir /b", [["cdi", "list", "--spec-dir=/a", "--spec-dir=/b"]]),
        (
            "cdi transform root --from / --to /run/driver --input x.yaml --relative-to container",
            [["cdi", "transform", "root", "--from=/", "--to=/run/driver", "--input=x.yaml", "--relative-to=container"]],
        ),
        ("runtime configure", [["configure", "docker"]]),
        (
            "runtime configure --runtime=containerd --set-as-default --cdi.enabled --dry-run --config=/etc/c.toml",
            [["configure", "containerd", "--config=/etc/c.toml", "--set-default", "--cdi", "--dry-run"]],
        ),
        (
            "runtime configure --runtime crio --nvidia-runtime-name gpu --runtime-path /opt/shim",
            [["configure", "crio", "--name=gpu", "--runtime-path=/opt/shim"]],
        ),
        ("system create-device-nodes --control-devices", [["nodes", "create"]]),
        ("system create-device-nodes --load-kernel-modules --root /", [["nodes", "create", "--load-kmods"]]),
        ("system create-dev-char-symlinks --dry-run", [["nodes", "link", "--dry-run"]]),
        (
            "system create-dev-char-symlinks --create-all --dev-root /run/dev",
            [["nodes", "create", "--dev-root=/run/dev"], ["nodes", "link", "--dev-root=/run/dev"]],
        ),
        ("cdi generate --discovery-mode=management", [["cdi", "generate", "--mode=management"]]),
        (
            "cdi generate --mode csv --csv.file=/a.csv,/b.csv --csv.ignore-pattern **/x --csv.compat-container-root /c",
            [
                [
                    *("cdi", "generate", "--mode=csv", "--csv.compat-container-root=/c"),
                    *("--csv.file=/a.csv", "--csv.file=/b.csv", "--csv.ignore-pattern=**/x"),
                ]
            ],
        ),
        (
            "cdi generate --feature-flags disable-ipc-discoverer,disable-nvsandboxutils",
            [["cdi", "generate", "--feature-flag=disable-ipc-discoverer", "--feature-flag=disable-nvsandboxutils"]],
        ),
    ],
)
def test_each_command_becomes_ours(words: str, commands: list[list[str]]) -> None:
    assert translate(*words.split()) == commands


@pytest.mark.parametrize(
    "words",
    [
        "cdi generate --feature-flag=enable-coherent-annotations",
        "cdi generate --feature-flag=enable-explicit-driver-libraries",
        "cdi generate --config-search-path=/etc",
        "runtime configure --config-mode=oci-hook",
        "system create-dev-char-symlinks --dev-char-path=/tmp/char",
        "system create-device-nodes --load-kernel-modules --driver-root=/run/nvidia/driver",
    ],
)
def test_what_would_give_another_result_is_refused(words: str) -> None:
    with pytest.raises(NvhookError, match="is not supported"):
        translate(*words.split())


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("cdi generate --nvidia-ctk-path=/usr/bin/nvidia-ctk", "--nvidia-cdi-hook-path"),
        ("cdi generate --feature-flags a", "--feature-flag a"),
        ("runtime configure --drop-in-config=/etc/x.toml", "--drop-in-config"),
    ],
)
def test_what_changes_nothing_is_said(words: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    translate(*words.split())
    assert f"warning: {option} has no effect" in capsys.readouterr().err


def test_variables_stand_in_for_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NVIDIA_CTK_CDI_OUTPUT_FILE_PATH", f"{tmp_path}/a/nvidia.yaml")
    monkeypatch.setenv("NVIDIA_CTK_CDI_GENERATE_DEVICE_IDS", "0, 1")
    words = [f"--output={tmp_path}/a/nvidia.yaml", "--format=yaml"]
    assert translate("cdi", "generate") == [["cdi", "generate", "--device-id=0", "--device-id=1", *words]]
    assert translate("cdi", "generate", "--device-id=3", "--output=")[0] == ["cdi", "generate", "--device-id=3"]


@pytest.mark.parametrize(
    ("name", "form", "written"),
    [
        ("x.json", None, ["x.json", "json"]),
        ("x.yml", None, ["x.yml.yaml", "yaml"]),
        ("x", None, ["x.yaml", "yaml"]),
        ("x", "JSON", ["x.json", "json"]),
    ],
)
def test_a_name_without_an_end_gets_one(tmp_path: Path, name: str, form: str | None, written: list[str]) -> None:
    assert ctk.output(f"{tmp_path}/{name}", form) == [f"--output={tmp_path}/{written[0]}", f"--format={written[1]}"]


# nvidia-ctk: the whole


@needs_root
def test_generate_and_list(host: SimulatedHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new/nvidia.yaml"
    words = ["cdi", "generate", "--host-root", str(host.root), "--output", str(output)]
    assert ctk.main(words) == 0
    assert yaml.safe_load(output.read_text())["kind"] == "nvidia.com/gpu"
    capsys.readouterr()
    assert ctk.main(["cdi", "list", "--spec-dir", str(output.parent)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "nvidia.com/gpu=0"
    assert said.out.splitlines()[-1] == "nvidia.com/gpu=all"
    assert said.err.splitlines()[0] == f"Found {len(said.out.splitlines())} CDI devices"


@needs_root
def test_links_in_dev_char(tmp_path: Path) -> None:
    host = build(tmp_path / "host", Host(missing=frozenset({"nvidia-uvm"})))
    words = ["system", "create-dev-char-symlinks", "--create-all", "--host-root", str(host.root)]
    assert ctk.main(words) == 0
    assert os.readlink(host.path("/dev/char/508:0")) == "../nvidia-uvm"
    assert host.path("/dev/nvidia-uvm").is_char_device()


# nvidia-ctk config


def test_a_file_is_changed_and_the_rest_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text("# mine\n[nvidia-container-cli]\nload-kmods = true # so\n")
    words = ["--set", "nvidia-container-cli.no-cgroups", "--set", "nvidia-container-runtime.runtimes=crun:runc"]
    assert ctk.main(["config", "--config-file", str(path), *words, "--in-place"]) == 0
    text = path.read_text()
    assert text.startswith("# mine\n[nvidia-container-cli]\nload-kmods = true # so\nno-cgroups = true\n")
    assert 'runtimes = ["crun", "runc"]' in text
    assert ctk.main(["config", "-c", str(path), "--set", "nvidia-container-cli.no-cgroups=nil"]) == 0
    assert "no-cgroups" not in capsys.readouterr().out
    assert path.read_text() == text


def test_nothing_is_written_through_a_planted_link(tmp_path: Path) -> None:
    """In a folder that others may write too, where the process's number can be guessed."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / f".out.toml.{os.getpid()}").symlink_to(victim)
    assert ctk.main(["config", "-c", str(tmp_path / "none"), "--output", str(tmp_path / "out.toml")]) == 0
    assert not (tmp_path / "out.toml").is_symlink()
    assert victim.read_text() == "kept"


def test_defaults_are_comments(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctk.main(["config", "default"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "#accept-nvidia-visible-devices-as-volume-mounts = false" in lines
    assert [line for line in lines if line and line[0] not in "#["] == []


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("nvidia-container-cli.no-cgroup", "is no key of /etc/nvidia-container-runtime/config.toml; did you mean"),
        ("nvidia-container-cli.no-cgroups=perhaps", "it must be true or false"),
        ("nvidia-container-runtime.mode=fast", "it must be one of"),
    ],
)
def test_a_wrong_key_or_value_changes_nothing(
    tmp_path: Path, word: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.toml"
    assert ctk.main(["config", "--config-file", str(path), "--set", word, "--in-place"]) == 1
    assert reason in capsys.readouterr().err
    assert not path.exists()


def test_what_means_nothing_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    runtime = "nvidia-container-runtime.modes"
    words = [f"{runtime}.legacy.cuda-compat-mode=fast", f"{runtime}.jit-cdi.nvcdi-disable-hooks=all,chmod"]
    assert ctk.main(["config", "-c", str(path), "-i", *(word for one in words for word in ("--set", one))]) == 0
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0].partition(";")[0]) == (
        "",
        f"nvidia-ctk: warning: {path}: {runtime}.legacy.cuda-compat-mode is 'fast'",
    )
    assert 'nvcdi-disable-hooks = ["all", "chmod"]' in path.read_text()


def test_a_broken_file_is_named_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[broken")
    assert ctk.main(["config", "-c", str(path), "--set", "disable-require", "-i"]) == 1
    assert f"{path} is no TOML" in capsys.readouterr().err
    assert path.read_text() == "[broken"
    for text, name in (("nvidia-container-cli = 3", "nvidia-container-cli"), ("nvidia-container-cli.root = 3", "")):
        path.write_text(text)
        assert ctk.main(["config", "-c", str(path), "--set", "nvidia-container-cli.root=/x", "-i"]) == bool(name)
        assert not name or f"error: {path}: {name} is 3; it must be a table" in capsys.readouterr().err


# nvidia-container-cli

INFO = """\
NVRM version:   580.159.04
CUDA version:   13.0

Device Index:   0
Device Minor:   0
Model:          NVIDIA H200
Brand:          Nvidia
GPU UUID:       GPU-00000000-1111-2222-3333-444444444444
Bus Location:   00000000:10:00.0
Architecture:   9.0

Device Index:   1
"""

INFO_CSV = """\
NVRM version,CUDA version
580.159.04,13.0

Device Index,Device Minor,Model,Brand,GPU UUID,Bus Location,Architecture
0,0,NVIDIA H200,Nvidia,GPU-00000000-1111-2222-3333-444444444444,00000000:10:00.0,9.0
1,1,"""


def cli(host: SimulatedHost, *words: str) -> int:
    return containercli.main(["--host-root", str(host.root), *words])


def test_info(host: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(host, "info") == 0
    assert capsys.readouterr().out.startswith(INFO)
    assert cli(host, "info", "--csv") == 0
    assert capsys.readouterr().out.startswith(INFO_CSV)


def test_info_where_nvml_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = build(tmp_path / "host", Host(nvml=Nvml(faults=(Fault("nvmlInit", result=9),))))
    assert cli(host, "info") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Brand:         " in [line[:15] for line in lines]
    assert "GPU UUID:       GPU-00000000-1111-2222-3333-444444444444" in lines


@needs_root
def test_list_everything_in_order(host: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(host, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    head = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia0", "nvidia1"]
    assert lines[:6] == [f"/dev/{name}" for name in head]
    places = [
        lines.index(name)
        for name in (
            "/usr/bin/nvidia-smi",
            "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04",
            "/usr/lib/i386-linux-gnu/libcuda.so.580.159.04",
            "/run/nvidia-persistenced/socket",
        )
    ]
    assert places == sorted(places)
    assert lines[-1].startswith("/lib/firmware/nvidia/580.159.04/gsp") or "gsp" in lines[-1]
    assert len(lines) == len(set(lines))


@needs_root
@pytest.mark.parametrize(
    ("words", "there", "not_there"),
    [
        ("--device 1", ["/dev/nvidia1", "/dev/nvidiactl"], ["/dev/nvidia0", "/usr/bin/nvidia-smi"]),
        ("-d GPU-00000000-1111-2222-3333-444444444444", ["/dev/nvidia0"], ["/dev/nvidia1"]),
        ("-d 0,1 -d 0", ["/dev/nvidia0", "/dev/nvidia1"], []),
        ("--libraries", ["/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04"], ["/dev/nvidiactl"]),
        ("-l --compat32", ["/usr/lib/i386-linux-gnu/libcuda.so.580.159.04"], []),
        ("--binaries", ["/usr/bin/nvidia-smi"], ["/dev/nvidiactl"]),
        ("-i --no-persistenced", ["/run/nvidia-fabricmanager/socket"], ["/run/nvidia-persistenced/socket"]),
        ("--imex-channel=3", ["/dev/nvidia-caps-imex-channels/channel3"], []),
    ],
)
def test_list_a_part(
    host: SimulatedHost, capsys: pytest.CaptureFixture[str], words: str, there: list[str], not_there: list[str]
) -> None:
    assert cli(host, "list", *words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert set(there) <= set(lines)
    assert set(not_there).isdisjoint(lines)
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("words", ["--compat32", "--no-gsp-firmware"])
def test_an_option_alone_lists_nothing(host: SimulatedHost, capsys: pytest.CaptureFixture[str], words: str) -> None:
    """An option is there, so it is no longer everything that is asked for."""
    assert cli(host, "list", words) == 0
    assert capsys.readouterr().out == ""


def test_an_unknown_device_is_named(host: SimulatedHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(host, "list", "--device=7") == 1
    assert "no GPU '7' on this host" in capsys.readouterr().err


def test_paths_are_the_driver_roots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = build(tmp_path / "host", Host(driver_root="/run/nvidia/driver"))
    host.path("/etc/nvhook").mkdir(parents=True)
    host.path("/etc/nvhook/config.toml").write_text('[driver]\nroot = "/run/nvidia/driver"\n')
    words = ["--root=/run/nvidia/driver", "list", "--binaries"]
    assert cli(host, *words) == 0
    assert "/usr/bin/nvidia-smi" in capsys.readouterr().out.splitlines()
    assert cli(host, "--root=/elsewhere", "list") == 1
    assert "the configured driver root is /run/nvidia/driver" in capsys.readouterr().err


@needs_root
@needs_program("unshare")
def test_in_the_hosts_namespace_nothing_is_mounted(host: SimulatedHost, tmp_path: Path) -> None:
    """Process 1 has the host's; here it is a machine's of its own."""
    program = "import sys; from hook.names.containercli import main; sys.exit(main())"
    words = ["--host-root", str(host.root), "configure", "--device=all", "--utility", "--no-cgroups", str(tmp_path)]
    enter = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
    command = [*enter, sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TREE, check=False)
    assert done.returncode == 1
    assert "this is the host's own mount namespace, and there is no --pid" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rootfs", ["/", "relative/root"])
def test_a_root_must_be_another_than_the_hosts(
    host: SimulatedHost, capsys: pytest.CaptureFixture[str], rootfs: str
) -> None:
    assert cli(host, "configure", "--utility", rootfs) == 1
    assert "ROOTFS is" in capsys.readouterr().err


# nvidia-container-runtime-hook


def hook(*words: str) -> subprocess.CompletedProcess[str]:
    program = "from hook import start; start.main()"
    command = [sys.executable, "-c", program, "nvidia-container-runtime-hook", *words]
    return subprocess.run(command, input="", capture_output=True, text=True, cwd=TREE, check=False)


@pytest.mark.parametrize(("words", "status"), [("poststart", 0), ("-debug poststop", 0), ("", 2), ("x", 2), ("-x", 2)])
def test_the_hooks_command_line(words: str, status: int) -> None:
    done = hook(*words.split())
    assert (done.returncode, done.stderr) == (status, "" if status == 0 else f"{runtimehook.USAGE}\n")


def test_the_hooks_version() -> None:
    assert hook("--version").stdout.startswith("nvhook ")


@pytest.mark.parametrize("words", ["-config /opt/config.toml prestart", "--config=/opt/config.toml prestart"])
def test_another_configuration_is_refused(words: str) -> None:
    done = hook(*words.split())
    assert done.returncode == 1
    assert "-config /opt/config.toml, which nvhook does not read" in done.stderr


def test_the_usual_configuration_may_be_named() -> None:
    done = hook("-config", "/etc/nvidia-container-runtime/config.toml", "prestart")
    assert "the container state on stdin is no JSON" in done.stderr
