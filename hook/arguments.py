# SPDX-License-Identifier: Apache-2.0
"""The command line of a low-level runtime, as far as a shim has to understand it.

Hot. Engines write `[GLOBAL OPTION]… VERB [OPTION]… ID`. runc (1.0 to 1.4, Go's flags) takes options with one dash
or two; crun (1.8 to 1.24, argp) also short ones with their value attached. Which options take a value is what
matters: a container, a log file or a root folder may be called `create`. Nothing is changed but for our own option.
"""

from __future__ import annotations

from ldcache.errors import NvhookError

# Global options, those that take a value and those that do not. packaging/launcher.c has the same lists.
VALUED = ("log", "log-format", "log-level", "root", "criu", "rootless", "cgroup-manager")
PLAIN = ("debug", "systemd-cgroup", "help", "h", "version", "v")
# Ours; it does not reach the runtime.
HOST_ROOT = "host-root"

# Behind an option that neither list has, one of these is the verb, and anything else that option's value.
VERBS = (
    *("checkpoint", "create", "delete", "events", "exec", "features", "init", "kill", "list", "pause", "ps"),
    *("restore", "resume", "run", "spec", "start", "state", "update", "help"),
)
EDITING = ("create", "run")
# Options of create and run that take a value.
VERB_VALUED = ("bundle", "b", "config", "f", "console-socket", "pid-file", "preserve-fds")


class Arguments:
    """`words` are for the low-level runtime, `verb` "" where there is none. `log`, `log_format`, `bundle` and
    `root`, where the runtime keeps states, are None where the caller gave none; of several the last counts, as for the
    runtimes."""

    __slots__ = (
        "bundle",
        "config",
        "debug",
        "help",
        "host_root",
        "identity",
        "log",
        "log_format",
        "root",
        "verb",
        "words",
    )

    def __init__(self) -> None:
        self.words: list[str] = []
        self.verb = ""
        self.debug = False
        self.help = False
        self.host_root = "/"
        self.log: str | None = None
        self.log_format: str | None = None
        self.root: str | None = None
        self.bundle: str | None = None
        self.config: str | None = None
        self.identity = ""

    def edits(self) -> bool:
        """Whether a container is made, so that its configuration counts."""
        return self.verb in EDITING and not self.help


def parse(argv: list[str]) -> Arguments:
    """Read a command line, without the program's name. Raises NvhookError where --host-root or --bundle lacks its
    value."""
    made = Arguments()
    at = 0
    while at < len(argv):
        word = argv[at]
        if not word.startswith("-") or word in ("-", "--"):
            break
        name, equals, value = word.lstrip("-").partition("=")
        size = 1
        if not equals and (name in VALUED or name == HOST_ROOT or _is_value(argv, at, name)):
            size = 2
            value = argv[at + 1] if at + 1 < len(argv) else ""
        if name == HOST_ROOT:
            if not value.startswith("/"):
                raise NvhookError(f"{word}: names no absolute folder", "give --host-root the folder that stands for /")
            made.host_root = value
        else:
            made.words += argv[at : at + size]
        if name == "debug":
            made.debug = value != "false"
        elif name == "log":
            made.log = value
        elif name == "log-format":
            made.log_format = value
        elif name == "root":
            made.root = value
        at += size
    rest = argv[at:]
    made.words += rest
    if rest and not rest[0].startswith("-"):
        made.verb = rest[0]
        if made.verb in EDITING:
            _verb_options(made, rest)
    return made


def _is_value(argv: list[str], at: int, name: str) -> bool:
    """Whether what follows an unknown option is its value."""
    if name in PLAIN or at + 1 >= len(argv):
        return False
    return not argv[at + 1].startswith("-") and argv[at + 1] not in VERBS


def _verb_options(made: Arguments, words: list[str]) -> None:
    """Options of create and run; runc takes them behind the container's id too. Who asks for help makes no
    container."""
    at = 1
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":
            made.identity = made.identity or (words[at] if at < len(words) else "")
            return
        if not word.startswith("-") or word == "-":
            made.identity = made.identity or word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("--") and name[:1] in ("b", "f") and name not in VERB_VALUED:
            # argp's short option with its value attached; a flag of Go's can't be meant, as none begins so.
            name, equals, value = name[0], "=", word[2:]
        if name in ("help", "h"):
            made.help = True
        if name not in VERB_VALUED:
            continue
        if not equals:
            if at >= len(words):
                if name in ("bundle", "b"):
                    raise NvhookError(f"{word} has no value", "give the bundle's folder behind it")
                return
            value = words[at]
            at += 1
        if name in ("bundle", "b"):
            made.bundle = value
        elif name in ("config", "f"):
            made.config = value
