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

from hook.engines import containerd, crio, docker, podman
from hook.engines.files import Host
from hook.engines.jsonfile import JsonText
from hook.engines.registration import RUNTIME
from hook.engines.tomlfile import TomlText, find
from ldcache.errors import NvhookError

# The daemon's name in /proc, and the options that name its file.
DAEMONS = {"dockerd": ("docker", ("--config-file",)), "containerd": ("containerd", ("--config", "-c"))}
DAEMONS["crio"] = ("crio", ("--config", "-c"))
MAIN = {"docker": docker.CONFIG, "containerd": containerd.CONFIG, "crio": crio.CONFIG}
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
    found = [_row(host, engine, path, pid) for engine, path, pid in _daemons()] if host.is_real() else []
    running = {row.engine for row in found}
    for engine, path in MAIN.items():
        if engine not in running and host.exists(path):
            found.append(_row(host, engine, path, None))
    if host.exists(podman.FOLDER):
        found.append(_row(host, "podman", podman.FOLDER, None))
    return found


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
        if daemon is not None and _same_root(name):
            yield daemon[0], _option(words, daemon[1]) or MAIN[daemon[0]], int(name)


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
    try:
        files, runtimes = _read(host, engine, path)
    except NvhookError as error:
        return Row(engine, pid, [path], [], error.what)
    names = sorted(name for name, program in runtimes.items() if os.path.basename(str(program)) == RUNTIME)
    problem = None
    if pid is not None:
        started = _started(pid)
        late = [one for one in files if host.place(one).stat().st_mtime > started]
        if late:
            problem = f"{late[-1]} was written after the daemon's start: restart it, or reload docker"
    return Row(engine, pid, files, names, problem)


def _read(host: Host, engine: str, path: str) -> tuple[list[str], dict[str, Any]]:
    """The files that are there, and each runtime's program. Raises NvhookError."""
    if engine == "docker":
        text = host.read(path)
        entries = find(JsonText(path, text or "").value(), ("runtimes",)) or {}
        return [path] if text is not None else [], {name: find(entry, ("path",)) for name, entry in entries.items()}
    programs: dict[str, Any] = {}
    if engine == "containerd":
        config = containerd.Config(host, path)
        for value in config.files.values():
            for plugin in CRI:
                for name, entry in (find(value, ("plugins", plugin, "containerd", "runtimes")) or {}).items():
                    programs[name] = find(entry, ("options", "BinaryName"))
        return list(config.files), programs
    paths = crio.files(host, path) if engine == "crio" else podman.files(host)
    for one in paths:
        value = TomlText(one, host.read(one) or "").value()
        if engine == "crio":
            entries = find(value, crio.RUNTIMES) or {}
            programs |= {name: find(entry, ("runtime_path",)) for name, entry in entries.items()}
        else:
            entries = find(value, ("engine", "runtimes")) or {}
            programs |= {name: next(iter(entry or []), None) for name, entry in entries.items()}
    return paths, programs


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
