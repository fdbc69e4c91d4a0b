# SPDX-License-Identifier: Apache-2.0
"""`nvidia-cdi-hook`: CDI files as several releases of NVIDIA's toolkit write them start containers, and each verb."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cdi import reader
from ldcache import VERSION
from tests import roots
from tests.containers import Bundle, Hook, hook
from tests.needs import needs_program
from tests.simhost import SimulatedHost, elfwriter
from tests.system import cdifiles
from tests.system.prestart import MULTIARCH, output, proc_hook, reported, tree_of

pytestmark = needs_program("runc")

DATA = Path(__file__).resolve().parents[1] / "data/h200"
NAMES = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"]
COMPAT = "usr/local/cuda/compat"

# Which hooks a release writes, by which program and with which environment (cmd/nvidia-ctk and pkg/nvcdi of NVIDIA's
# toolkit at these tags). Until 1.17 the soname's links were left to ldconfig.
EVERY = (
    "create-symlinks",
    "enable-cuda-compat",
    "update-ldcache",
    "disable-device-node-modification",
    "update-application-profile",
)
RELEASES: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "1.14": ("nvidia-ctk", ("create-symlinks", "chmod", "update-ldcache"), False),
    "1.16": ("nvidia-cdi-hook", ("create-symlinks", "chmod", "update-ldcache"), False),
    "1.17": ("nvidia-cdi-hook", ("create-symlinks", "enable-cuda-compat", "update-ldcache"), False),
    "1.18-rc": ("nvidia-cdi-hook", ("create-symlinks", "create-soname-symlinks", "update-ldcache"), True),
    "1.18": (
        "nvidia-cdi-hook",
        ("create-symlinks", "enable-cuda-compat", "update-ldcache", "disable-device-node-modification"),
        True,
    ),
    "1.20": ("nvidia-cdi-hook", EVERY, True),
    # The device plugin writes a kind of its own, with the toolkit's generator.
    "device plugin": ("nvidia-cdi-hook", EVERY, True),
}
OPTIONS = ["ro", "nosuid", "nodev", "bind"]


class Names:
    """Programs of NVIDIA's names, as the companion package has them: links to the launcher."""

    def __init__(self, folder: Path, prefix: Path, host: SimulatedHost) -> None:
        self.folder = folder
        self.host = host
        self.report = folder / "report"
        for name in ("nvidia-cdi-hook", "nvidia-ctk"):
            (folder / name).symlink_to(prefix / "lib/nvhook/bin/launch")
        self.image = roots.make_root(folder / "image")
        self.count = 0

    def hook(self, *words: str, name: str = "nvidia-cdi-hook", quiet: bool = True) -> Hook:
        """A hook entry; with `quiet` False what it says is in `report`."""
        made = hook(self.folder / name, *words)
        return made if quiet else reported([made], self.report)[0]

    def bundle(self, script: str, *hooks: Hook, **others: Any) -> Bundle:
        self.count += 1
        arguments = ["/bin/sh", "-c", script]
        others = {"prestart": [proc_hook()], "create_container": list(hooks)} | others
        return Bundle(self.folder / f"bundle-{self.count}", self.image, arguments, **others)

    def identity(self, soname: str) -> str:
        status = self.host.library("libcuda.so.1" if soname == "libcuda.so" else soname).stat()
        return f"{status.st_dev}:{status.st_ino}"


@pytest.fixture
def names(tmp_path: Path, prefix: Path, host: SimulatedHost) -> Names:
    return Names(tmp_path, prefix, host)


def arguments(verb: str, host: SimulatedHost) -> list[str]:
    """The options of a verb, as NVIDIA's generator gives them."""
    version = host.host.version
    if verb == "create-symlinks":
        return ["--link", f"libcuda.so.1::{MULTIARCH}/libcuda.so", "--link", f"../x::{MULTIARCH}/gbm/y.so"]
    if verb in ("update-ldcache", "create-soname-symlinks"):
        return ["--folder", MULTIARCH, "--folder", f"{MULTIARCH}/vdpau"]
    if verb == "enable-cuda-compat":
        return [f"--host-driver-version={version}"]
    return ["--mode", "755", "--path", "/dev/dri"] if verb == "chmod" else []


def toolkits_file(release: str, names: Names) -> dict[str, Any]:
    """A CDI file of one release for the simulated host."""
    program, verbs, with_env = RELEASES[release]
    hooks = []
    for verb in verbs:
        words = [program, *(["hook"] if program == "nvidia-ctk" else []), verb, *arguments(verb, names.host)]
        entry: dict[str, Any] = {"hookName": "createContainer", "path": str(names.folder / program), "args": words}
        hooks.append(entry | ({"env": ["NVIDIA_CTK_DEBUG=false"]} if with_env else {}))
    mounts = [
        {"hostPath": library.path, "containerPath": library.path, "options": OPTIONS}
        for library in names.host.libraries
        if library.bits == 64
    ]
    nodes = [{"path": f"/dev/{name}"} for name in ("nvidia-uvm", "nvidia-uvm-tools", "nvidiactl")]
    devices = [
        {"name": str(i), "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{i}"}]}}
        for i in range(len(names.host.host.gpus))
    ]
    edits = {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "deviceNodes": nodes, "mounts": mounts, "hooks": hooks}
    return {"cdiVersion": "0.5.0", "kind": kind_of(release), "devices": devices, "containerEdits": edits}


def kind_of(release: str) -> str:
    return "k8s.device-plugin.nvidia.com/gpu" if release == "device plugin" else "nvidia.com/gpu"


@pytest.mark.parametrize("release", RELEASES)
def test_a_file_of_the_toolkit(names: Names, release: str) -> None:
    """Unchanged but for where its programs and the simulated host's files are."""
    spec = cdifiles.on_this_machine(toolkits_file(release, names), names.host.root)
    folder = names.folder / "cdi"
    folder.mkdir()
    (folder / "nvidia.json").write_text(json.dumps(spec))
    edits = cdifiles.edits(folder, f"{kind_of(release)}=1")
    script = f"resolve -s {' '.join(NAMES)}; ls /dev | grep nvidia; cat /proc/driver/nvidia/params /etc/nvidia/*/*"
    script += f"; readlink {MULTIARCH}/gbm/y.so"
    bundle = names.bundle(f"{{ {script}; }} 2>/dev/null; ldconfig; resolve -s {NAMES[0]}", edits=edits)
    lines = output(bundle).splitlines()
    assert [line.split()[-1] for line in lines[:4]] == [names.identity(name) for name in NAMES]
    assert lines[4:8] == ["nvidia-uvm", "nvidia-uvm-tools", "nvidia1", "nvidiactl"]
    assert lines[-2] == "../x"
    assert lines[-1].split()[-1] == names.identity(NAMES[0])
    assert ("EGLVisibleDGPUDevices" in " ".join(lines)) == (RELEASES[release][1] is EVERY)


def test_the_toolkits_own_file(names: Names) -> None:
    """What nvidia-ctk 1.20 wrote on a machine with an H200: every hook runs, with its words as they are."""
    text = (DATA / "peer-cdi-default.yaml").read_text()
    spec = reader.parse(text)
    hooks = [
        {**entry, "path": str(names.folder / entry["args"][0])}
        for entry in spec["containerEdits"]["hooks"]
        if entry["hookName"] == "createContainer"
    ]
    assert len(hooks) > 4
    folder = "/usr/local/nvidia/lib64"
    library = names.host.library("libcuda.so.1")
    mount = {"destination": f"{folder}/{library.name}", "source": str(library), "type": "bind", "options": OPTIONS}
    words = [{key: entry[key] for key in ("path", "args", "env")} for entry in hooks]
    script = f"resolve -s libcuda.so.1 libcuda.so; readlink {folder}/gbm/nvidia-drm_gbm.so"
    lines = output(names.bundle(script, *words, mounts=[mount])).splitlines()
    assert [line.split()[-1] for line in lines] == [names.identity("libcuda.so.1")] * 2 + [
        "../libnvidia-allocator.so.1"
    ]


def add_compat(names: Names, branches: list[int]) -> None:
    """A newer libcuda in the image that names the branches it works on."""
    text = json.dumps({"format": 1, "CUDA version": "13.9", "driver": branches, "device": []}).encode()
    library = elfwriter.shared_object("libcuda.so.1")
    library = elfwriter.with_note(library, ".note.cuda.fwd_compatibility", b"NVIDIA Corporation", text)
    folder = names.image / COMPAT
    folder.mkdir(parents=True)
    (folder / "libcuda.so.595.54.14").write_bytes(library)
    (folder / "libcuda.so.1").symlink_to("libcuda.so.595.54.14")


@pytest.mark.parametrize("branches", [[580], [575]])
@pytest.mark.parametrize("with_cache", [True, False])
def test_forward_compatibility(names: Names, branches: list[int], with_cache: bool) -> None:
    """With the hook for the loader cache, which has to agree, and without; also after an ldconfig of the image's."""
    add_compat(names, branches)
    library = names.host.library("libcuda.so.1")
    mount = {
        "destination": f"{MULTIARCH}/{library.name}",
        "source": str(library),
        "type": "bind",
        "options": OPTIONS,
    }
    hooks = [names.hook("enable-cuda-compat", "--host-driver-version=580.159.04")]
    if with_cache:
        hooks.append(names.hook("update-ldcache", "--folder", MULTIARCH))
    lines = output(
        names.bundle("resolve libcuda.so.1; ldconfig; resolve libcuda.so.1", *hooks, mounts=[mount])
    ).splitlines()
    used = branches == [580]
    if not used and not with_cache:
        # Nothing was done; ldconfig finds what is mounted.
        lines = lines[1:]
    assert all((f"/{COMPAT}/" in line) == used for line in lines)


@pytest.mark.parametrize("cuda", ["13.8", "13.9"])
@pytest.mark.parametrize("with_cache", [True, False])
def test_forward_compatibility_by_the_cuda_version(names: Names, cuda: str, with_cache: bool) -> None:
    """As in a file for Orin."""
    add_compat(names, [])
    own = names.image / f"{COMPAT}_orin"
    (names.image / COMPAT).rename(own)
    words = [f"--host-cuda-version={cuda}", f"--cuda-compat-container-root=/{COMPAT}_orin"]
    hooks = [names.hook("enable-cuda-compat", *words)]
    if with_cache:
        hooks.append(names.hook("update-ldcache", "--folder", MULTIARCH))
    text = output(names.bundle("resolve libcuda.so.1 || true", *hooks))
    assert (f"/{COMPAT}_orin/" in text) == (cuda == "13.8")


# Verbs


@pytest.mark.parametrize("words", [["time-travel", "--far", "1"], ["--frobnicate"], ["noop"], ["--debug", "noop"]])
def test_unknown_verbs_are_no_error(names: Names, words: list[str]) -> None:
    """Nobody need give a state, and nothing is read."""
    command = [str(names.folder / "nvidia-cdi-hook"), *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert ("is no hook that this version knows; nothing is done" in done.stderr) == ("noop" not in words)


@pytest.mark.parametrize(
    ("words", "stdout", "stderr"),
    [
        (["--help"], "usage: nvidia-cdi-hook ", ""),
        (["-h"], "usage: nvidia-cdi-hook ", ""),
        (["--quiet", "help"], "usage: nvidia-cdi-hook ", ""),
        (["--version"], f"nvhook {VERSION}\n", ""),
        (["-v"], f"nvhook {VERSION}\n", ""),
        ([], "", "usage: nvidia-cdi-hook "),
    ],
)
@pytest.mark.parametrize("program", [["nvidia-cdi-hook"], ["nvidia-ctk", "hook"]])
def test_what_a_person_asks(names: Names, program: list[str], words: list[str], stdout: str, stderr: str) -> None:
    command = [str(names.folder / program[0]), *program[1:], *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for said, expected in ((done.stdout, stdout), (done.stderr, stderr)):
        assert said.startswith(expected) and bool(said) == bool(expected)
        assert not expected.startswith("usage") or "update-ldcache" in said


def test_links(names: Names) -> None:
    """Values between commas, one dash or two, a place without a slash in front; an absolute target; over a file."""
    hooks = [
        names.hook("-debug", "create-symlinks", "-link", "a::/opt/one,b::opt/two", "--link=/abs::/opt/three"),
        names.hook("create-symlinks", "--link", "a::/opt/one", "--newer", "x", quiet=False),
    ]
    assert output(names.bundle("for i in one two three; do readlink /opt/$i; done", *hooks)).split() == [
        "a",
        "b",
        "/abs",
    ]
    assert "left out what this version does not know: --newer x" in names.report.read_text()


@pytest.mark.parametrize("word", ["no-separator", "a::b::c", "::/x", "x::"])
def test_what_is_no_link(names: Names, word: str) -> None:
    before = tree_of(names.image)
    done = names.bundle("true", names.hook("create-symlinks", "--link", "y::/made", "--link", word)).run()
    assert done.returncode != 0
    assert "is no link" in done.stderr
    assert "made" not in set(tree_of(names.image)) - set(before)


def test_links_stay_inside(names: Names, tmp_path: Path) -> None:
    """CVE-2024-0134: the link's folder is a link of the image's to a folder of the host's."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (names.image / "evil").symlink_to(victim)
    names.bundle("true", names.hook("create-symlinks", "--link", "x::/evil/made")).run()
    assert list(victim.iterdir()) == []


def test_sonames_without_a_cache(names: Names) -> None:
    library = names.host.library("libcuda.so.1")
    mount = {"destination": f"/opt/{library.name}", "source": str(library), "type": "bind", "options": OPTIONS}
    hooks = [names.hook("create-soname-symlinks", "--folder", "/opt")]
    before = (names.image / "etc/ld.so.cache").read_bytes()
    assert output(names.bundle("readlink /opt/libcuda.so.1", *hooks, mounts=[mount])).strip() == library.name
    assert (names.image / "etc/ld.so.cache").read_bytes() == before


PARAMS = "grep Modify /proc/driver/nvidia/params; ls /proc/driver/nvidia; grep -c driver/nvidia /proc/self/mountinfo"


def driver_in_proc(names: Names, text: str) -> Hook:
    """Gives the container's proc a driver's parameters, from inside its namespaces."""
    root = f"{names.image}/proc/driver/nvidia"
    program = f"mount -t tmpfs none {root} && printf '{text}' > {root}/params && touch {root}/version"
    return hook("/bin/sh", "-c", program)


@pytest.mark.parametrize("twice", [False, True])
def test_parameters(names: Names, twice: bool) -> None:
    """One mount over one file, once; what else is there stays."""
    hooks = [driver_in_proc(names, "Other: 1\\nModifyDeviceFiles: 1\\n")]
    hooks += [names.hook("disable-device-node-modification")] * (2 if twice else 1)
    lines = output(names.bundle(PARAMS, *hooks)).split("\n")
    assert lines == ["ModifyDeviceFiles: 0", "params", "version", "2", ""]


@pytest.mark.parametrize("text", ["ModifyDeviceFiles: 0\\n", "Other: 1\\n", "xModifyDeviceFiles: 1\\n"])
def test_parameters_that_are_right(names: Names, text: str) -> None:
    hooks = [driver_in_proc(names, text), names.hook("disable-device-node-modification")]
    assert output(names.bundle(f"{PARAMS} | tail -1", *hooks)).split()[-1] == "1"


def test_no_parameters(names: Names) -> None:
    """No driver is loaded, or the container has no proc."""
    shutil.rmtree(names.image / "proc")
    done = names.bundle("true", names.hook("disable-device-node-modification"), prestart=[]).run()
    assert done.returncode == 0, done.stderr


def test_modes(names: Names, tmp_path: Path) -> None:
    """The container's own, and nothing of a volume's; what is not there is passed over."""
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o700)
    (names.image / "evil").symlink_to("/volume")
    (names.image / "own").mkdir(mode=0o700)
    mount = {"destination": "/volume", "source": str(volume), "type": "bind", "options": ["rbind", "rw"]}
    hooks = [
        hook("/bin/sh", "-c", f"mkdir -m 700 {names.image}/dev/dri"),
        names.hook("chmod", "--mode", "755", "--path", "/dev/dri,/none", "--path=/own", "--path", "/evil", quiet=False),
    ]
    script = "stat -c %a /dev/dri /own /volume"
    assert output(names.bundle(script, *hooks, mounts=[mount])).split() == ["755", "755", "700"]
    assert "the mode of /evil stays as it is: /volume in the container is a mount from elsewhere" in (
        names.report.read_text()
    )


@pytest.mark.parametrize("mode", ["9", "", "-1", "77777"])
def test_what_is_no_mode(names: Names, mode: str) -> None:
    done = names.bundle("true", names.hook("chmod", f"--mode={mode}", "--path", "/opt")).run()
    assert done.returncode != 0 and "is no mode" in done.stderr


def test_a_state_in_a_file(names: Names) -> None:
    """NVIDIA's hidden --container-spec."""
    state = names.folder / "state.json"
    words = ["create-symlinks", "--container-spec", str(state), "--link", "x::/made"]
    program = f"cat > {state}; exec {names.folder}/nvidia-cdi-hook {' '.join(words)} </dev/null"
    assert output(names.bundle("readlink /made", hook("/bin/sh", "-c", program))).strip() == "x"
    command = [str(names.folder / "nvidia-cdi-hook"), "update-ldcache", "--container-spec", "/nowhere"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, "cannot open /nowhere" in done.stderr) == (1, True)


def test_nvidia_ctk_is_for_hooks(names: Names) -> None:
    command = [str(names.folder / "nvidia-ctk"), "hook", "noop"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
