# SPDX-License-Identifier: Apache-2.0
"""`nvhook configure --status`: which files an engine's daemon reads, whether nvhook is in them, and whether the daemon
was started after they were last written.

Daemons are found by their name in /proc and by their arguments; a file is as new as its modification time says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hook.engines import containerd, crio, docker, k3s, podman
from hook.engines.files import Host
from hook.engines.jsonfile import JsonText
from hook.engines.registration import RUNTIME
from hook.engines.tomlfile import TomlText
from hook.engines.values import find, table, tables
from ldcache.errors import NvhookError

# The daemon's name in /proc, and the options that name its file.
DAEMONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dockerd": ("docker", ("--config-file",)),
    "containerd": ("containerd", ("--config", "-c")),
    "crio": ("crio", ("--config", "-c")),
}
DAEMONS |= {f"{name}{kind}": (name, ()) for name in k3s.RUNC for kind in ("", "-server", "-agent")}
MAIN = {"docker": docker.CONFIG, "containerd": containerd.CONFIG, "crio": crio.CONFIG, "podman": podman.FOLDER}
MAIN |= {name: k3s.made_by(name) for name in k3s.RUNC}
CRI = (*containerd.PLUGINS.values(), containerd.PLUGIN)


@dataclass(frozen=True)
class Row:
    """One daemon, or an engine without one (`pid` None). `names` are the runtimes that are nvhook's; `problem` says
    why they are not in force."""

    engine: str
    pid: int | None
    files: list[str]
    names: list[str]
    problem: str | None

    def line(self) -> str:
        """For people."""
        who = f"{self.engine} (process {self.pid})" if self.pid is not None else f"{self.engine} (not running)"
        if self.engine == "podman":
            who = self.engine
        files = ", ".join(self.files) or "no file"
        state = f"has nvhook as {', '.join(self.names)}" if self.names else "has no nvhook"
        return f"{who} reads {files}: {state}" + (f"; {self.problem}" if self.problem else "")


def rows(host: Host) -> list[Row]:
    """All engines that run or have a file. A file that can't be read is the row's problem."""
    daemons = list(_daemons()) if host.is_real() else []
    running = {(engine, path) for engine, path, _ in daemons}
    # k3s and rke2 have a containerd of their own, which is not the host's.
    idle = [(engine, path, None) for engine, path in MAIN.items() if (engine, path) not in running]
    return [_row(host, *one) for one in [*daemons, *(one for one in idle if _has_file(host, *one[:2]))]]


def _has_file(host: Host, engine: str, path: str) -> bool:
    if engine in k3s.RUNC:
        return any(host.exists(one) for one in (path, *k3s.templates(engine)))
    folders = {"crio": crio.files, "podman": podman.files}
    return bool(folders[engine](host)) if engine in folders else host.exists(path)


def as_json(found: list[Row]) -> list[dict[str, Any]]:
    """The rows as JSON has them."""
    return [asdict(row) for row in found]


def _daemons() -> Iterator[tuple[str, str, int]]:
    """Engine, main file and process id of each daemon that runs."""
    for name in sorted((one for one in os.listdir("/proc") if one.isdigit()), key=int):
        try:
            with open(f"/proc/{name}/comm") as comm, open(f"/proc/{name}/cmdline", "rb") as cmdline:
                daemon = DAEMONS.get(comm.read().strip())
                words = cmdline.read().decode("utf-8", "surrogateescape").split("\0")
        except OSError:
            # It has ended meanwhile.
            continue
        # A daemon in a container has files of its own, of the same names.
        if daemon is not None and _serves(daemon[0], words) and _same_root(name):
            yield daemon[0], _option(words, daemon[1]) or MAIN[daemon[0]], int(name)


def _serves(engine: str, words: list[str]) -> bool:
    """k3s and rke2 are kubectl, crictl and more besides, by their first argument."""
    return engine not in k3s.RUNC or words[1:2] in (["server"], ["agent"])


def _same_root(pid: str) -> bool:
    try:
        mine, its = os.stat("/proc/self/ns/mnt"), os.stat(f"/proc/{pid}/ns/mnt")
        return mine.st_ino == its.st_ino or os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/"))
    except OSError:
        return False


def _option(words: list[str], options: tuple[str, ...]) -> str | None:
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options:
            return value if equals else next(iter(words[place + 1 : place + 2]), None)
    return None


def _row(host: Host, engine: str, path: str, pid: int | None) -> Row:
    if engine in k3s.RUNC:
        return _template_row(host, engine, path, pid)
    try:
        files, runtimes = READERS[engine](host, path)
    except NvhookError as error:
        return Row(engine, pid, [path], [], error.what)
    late = _late(host, files, pid)
    problem = f"{late[-1]} was written after the daemon's start: restart it, or reload docker" if late else None
    return Row(engine, pid, files, _names(runtimes), problem)


def _template_row(host: Host, engine: str, path: str, pid: int | None) -> Row:
    """k3s and rke2 write the file that counts at each start; what is asked is whether it is of the template of now."""
    try:
        texts, blocks, runtimes = k3s.registered(host, engine)
    except NvhookError as error:
        return Row(engine, pid, [path], [], error.what)
    late = _late(host, list(texts), pid)
    names = _names(runtimes)
    gone = [] if any(RUNTIME in text for text in texts.values()) else names
    problem = None
    if late:
        problem = f"{late[-1]} was written after the daemon's start: restart {engine}"
    elif not blocks <= runtimes.keys():
        problem = f"{path} has no {', '.join(sorted(blocks - runtimes.keys()))} yet: restart {engine}"
    elif gone:
        problem = f"{path} still has {', '.join(gone)}: restart {engine}"
    files = [*texts, *([path] if host.exists(path) else [])]
    return Row(engine, pid, files, sorted({*names, *blocks}), problem)


def _names(runtimes: dict[str, Any]) -> list[str]:
    """The runtimes that are nvhook's."""
    return sorted(name for name, program in runtimes.items() if os.path.basename(str(program)) == RUNTIME)


def _late(host: Host, files: list[str], pid: int | None) -> list[str]:
    """The files that were written after a daemon's start."""
    if pid is None:
        return []
    started = _started(pid)
    try:
        return [one for one in files if host.place(one).stat().st_mtime > started]
    except OSError:
        # One that has just gone was written to, in a way.
        return files


# What an engine with this main file reads: the files that are there, and each runtime's program. Raise NvhookError.


def _docker(host: Host, path: str) -> tuple[list[str], dict[str, Any]]:
    text = host.read(path)
    entries = table(JsonText(path, text or "").value(), ("runtimes",), path, "object")
    return [path] if text is not None else [], {name: find(entry, ("path",)) for name, entry in entries.items()}


def _containerd(host: Host, path: str) -> tuple[list[str], dict[str, Any]]:
    config = containerd.Config(host, path)
    programs: dict[str, Any] = {}
    for one, value in config.files.items():
        for plugin in CRI:
            for name, entry in containerd.runtimes_of(value, ("plugins", plugin), one).items():
                programs[name] = find(entry, ("options", "BinaryName"))
    return list(config.files), programs


def _crio(host: Host, path: str) -> tuple[list[str], dict[str, Any]]:
    paths = crio.files(host, path)
    programs: dict[str, Any] = {}
    for one in paths:
        entries = tables(TomlText(one, host.read(one) or "").value(), crio.RUNTIMES, one)
        programs |= {name: entry.get("runtime_path") for name, entry in entries.items()}
    return paths, programs


def _podman(host: Host, path: str) -> tuple[list[str], dict[str, Any]]:
    paths = podman.files(host)
    programs: dict[str, Any] = {}
    for one in paths:
        entries = podman.runtimes_of(TomlText(one, host.read(one) or "").value(), one)
        programs |= {name: next(iter(entry), None) for name, entry in entries.items()}
    return paths, programs


READERS = {"docker": _docker, "containerd": _containerd, "crio": _crio, "podman": _podman}


def _started(pid: int) -> float:
    """When a process was started, as the clock on the wall says; 0.0 where it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # Behind the name in brackets, which may have any letters; proc(5) counts from 1.
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age
