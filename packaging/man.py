# SPDX-License-Identifier: Apache-2.0
"""Write the man pages into a folder: `python packaging/man.py DIRECTORY`.

Their source is the commands' own parsers and the configuration's table of keys, so that no page can lack an option.
Pages of hot entries, which have no such parser, are in ENTRIES below.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TREE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TREE))

from cdi import VERSION  # noqa: E402
from cdi import cli as cdi_cli  # noqa: E402
from cdi.host import config, settings  # noqa: E402
from hook import cli  # noqa: E402
from hook.names import containercli, ctk  # noqa: E402
from ldcache import cli as ldcache_cli  # noqa: E402

STATUS = "0: done. 1: failed. 2: wrong use. 3: stale or unhealthy."
TRADEMARK = "NVIDIA is a trademark of NVIDIA Corporation. nvhook is not NVIDIA's, and not endorsed by NVIDIA."


class Entry(NamedTuple):
    """A page of a program without a parser: section, what it is in a line, how it is called, and what it does."""

    section: int
    summary: str
    synopsis: str
    text: str


HOOK_TEXT = """\
A container runtime starts it on the host after the container's namespaces exist and before its program runs. It reads
the container's state on standard input and config.json in the bundle, and gives the container the GPUs that it asks for
by NVIDIA_VISIBLE_DEVICES: device nodes, driver files, loader cache, device rules. A failure leaves nothing behind and
fails the start. `nvhook plan` prints what it would do."""

ENTRIES = {
    "nvhook-prestart": Entry(
        8, "give a container its GPUs, as an OCI prestart hook", "nvhook-prestart [--host-root DIR] < STATE", HOOK_TEXT
    ),
    "nvhook-create-container": Entry(
        8,
        "finish what a CDI file began, as an OCI createContainer hook",
        "nvhook-create-container [--driver VERSION] [--link TARGET::LINK]... [--folder FOLDER]... < STATE",
        "The one hook that CDI files of `cdi generate` name. It makes links and puts the driver's libraries into the "
        "container's loader cache. A part that this version does not know is warned of and left out.",
    ),
    "nvhook-runtime": Entry(
        8,
        "a runtime that gives containers their GPUs, then is runc or crun",
        "nvhook-runtime [GLOBAL OPTIONS] VERB [OPTIONS] CONTAINER",
        "Container engines call it in the place of runc or crun, with the same arguments. For `create` and `run` it "
        "puts the GPUs that the container asks for into config.json; then, and for every other verb, it becomes the "
        "low-level runtime.",
    ),
    "nvidia-container-runtime-hook": Entry(
        8,
        "nvhook's prestart hook by NVIDIA's name",
        "nvidia-container-runtime-hook [-config FILE] [-debug] [-version] prestart|poststart|poststop",
        HOOK_TEXT + "\n\nFILE may be one of the two files that nvhook reads anyway; another is refused.",
    ),
    "nvidia-container-runtime": Entry(
        8,
        "nvhook's runtime by NVIDIA's name",
        "nvidia-container-runtime [GLOBAL OPTIONS] VERB [OPTIONS] CONTAINER",
        "As nvhook-runtime(8). Called as nvidia-container-runtime.cdi or nvidia-container-runtime.legacy the mode is "
        "cdi or legacy, whatever the configuration says.",
    ),
    "nvidia-cdi-hook": Entry(
        8,
        "the hooks that NVIDIA's CDI files name",
        "nvidia-cdi-hook HOOK [OPTIONS] < STATE | nvidia-cdi-hook --help|--version",
        "CDI files on disk name this program. Its hooks have the arguments of NVIDIA's; one that is not known is "
        "warned of and succeeds, so that a file of a newer version goes on working.",
    ),
}
# Names, and values that no parser lists, at the beginning of a help text.
LITERALS = ("config-file", "index", "libcuda", "nvhook's")
# Names at the beginning of a command's description.
PROPER = ("Container Device Interface", "NVIDIA")
# Further names of a page.
ALIASES = {
    "ldcache.1": "nvhook-ldcache.1",
    "nvidia-container-toolkit.8": "nvidia-container-runtime-hook.8",
    "nvidia-container-runtime.cdi.8": "nvidia-container-runtime.8",
    "nvidia-container-runtime.legacy.8": "nvidia-container-runtime.8",
}


def escaped(text: str) -> str:
    """Text as roff takes it for text: no control lines, hyphens that can be searched for and copied."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in text.splitlines())


def page(name: str, section: int, summary: str, parts: dict[str, str]) -> str:
    """A page; `parts` are roff by heading."""
    date = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", "1700000000"))))
    lines = [
        f'.TH "{name.upper()}" {section} {date} "nvhook {VERSION}"',
        ".SH NAME",
        f"{escaped(name)} \\- {escaped(summary)}",
    ]
    for heading, text in parts.items():
        lines += [f".SH {heading}", text]
    lines += [".SH NOTES", escaped(TRADEMARK)]
    return "\n".join(lines) + "\n"


def command_page(name: str, parser: argparse.ArgumentParser, others: list[str]) -> str:
    """The page of a command with a parser: each verb is a sub-section with its options."""
    summary = (parser.description or "").rstrip(".")
    parts = {
        "SYNOPSIS": synopsis(parser),
        "DESCRIPTION": escaped(
            f"{parser.description or ''} An error is two lines on standard error: what, and remedy."
        ),
    }
    top = "\n".join(options(parser))
    if top:
        parts["OPTIONS"] = top
    parts["COMMANDS"] = "\n".join(commands(parser, parser.prog))
    parts["EXIT STATUS"] = escaped(STATUS)
    parts["SEE ALSO"] = ", ".join(f"{escaped(other)}(1)" for other in others)
    first = summary[:1] if summary.startswith(PROPER) else summary[:1].lower()
    return page(name, 1, first + summary[1:], parts)


def synopsis(parser: argparse.ArgumentParser) -> str:
    """A parser's usage in one paragraph."""
    usage = parser.format_usage().removeprefix("usage: ")
    return escaped(" ".join(usage.split()))


def commands(parser: argparse.ArgumentParser, path: str) -> Iterator[str]:
    """Each verb below a parser, and those below it."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
        seen: set[int] = set()
        for name, verb in action.choices.items():
            if id(verb) in seen:
                continue
            seen.add(id(verb))
            yield f".SS {escaped(f'{path} {name}')}"
            yield escaped(sentence(texts.get(name, "")))
            yield from options(verb)
            yield from commands(verb, f"{path} {name}")


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A tagged paragraph for each option and argument."""
    for action in parser._actions:
        if isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)) or action.help == argparse.SUPPRESS:
            continue
        value = "" if action.nargs == 0 else value_of(action)
        names = ", ".join(f"{name} {value}".rstrip() for name in action.option_strings) or value
        yield ".TP"
        yield f".B {escaped(names)}"
        text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
        yield escaped(sentence(text)) or "\\&"


def value_of(action: argparse.Action) -> str:
    """What stands for an option's value."""
    if action.choices is not None and action.metavar is None:
        return "|".join(str(choice) for choice in action.choices)
    return str(action.metavar or action.dest.upper())


def sentence(text: str) -> str:
    """A line of help as a sentence. What is typed as it stands keeps its small letter."""
    word = re.split(r"[\s,;:]", text, maxsplit=1)[0]
    named = text[len(word) :].startswith((",", ";", ":", " or ", " and ")) and word in values()
    first = text[:1] if named or word in LITERALS else text[:1].upper()
    return f"{first}{text[1:]}." if text else ""


@functools.cache
def values() -> set[str]:
    """What some option of some command can be given, of those that list it."""
    return {str(value) for parser in parsers() for value in choices(parser)}


def choices(parser: argparse.ArgumentParser) -> Iterator[object]:
    """The choices of all options of a parser, and of the verbs below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from choices(verb)
        else:
            yield from action.choices or ()


def entry_page(name: str, entry: Entry) -> str:
    """The page of a hot entry."""
    parts = {
        "SYNOPSIS": escaped(entry.synopsis),
        "DESCRIPTION": escaped(entry.text).replace("\n\n", "\n.PP\n"),
        "EXIT STATUS": escaped(STATUS),
        "SEE ALSO": "nvhook(1), nvhook\\-config.toml(5)",
    }
    return page(name, entry.section, entry.summary, parts)


def configuration_page() -> str:
    """The page of the configuration file: every key, what it means, and its default."""
    lines = []
    for name in sorted(config.KEYS, key=lambda name: ("." in name, name)):
        value = settings.DEFAULTS.get(name)
        shown = json.dumps(",".join(value) if isinstance(value, list) else value)
        lines += [".TP", f".B {escaped(name)}", escaped(f"{config.KEYS[name].text}; default: {shown}")]
    text = (
        f"{settings.OURS} is TOML; a key's part before the last dot is a table. Where the file is absent, NVIDIA's "
        f"{settings.NVIDIAS} is obeyed. `nvhook config` prints the file, or where there is none one with every key, "
        "and changes it."
    )
    parts = {"DESCRIPTION": escaped(text), "KEYS": "\n".join(lines), "FILES": escaped(settings.OURS)}
    return page("nvhook-config.toml", 5, "configuration of nvhook", parts | {"SEE ALSO": "nvhook(1)"})


def parsers() -> tuple[argparse.ArgumentParser, ...]:
    """Of all commands that have one."""
    return (cli.parser(), cdi_cli.parser(), ldcache_cli.parser(), ctk.parser(), containercli.parser())


def pages() -> dict[str, str]:
    """All pages by file name."""
    made_of = parsers()
    # `cdi` and `ldcache` are names that other packages may have pages for.
    names = [f"nvhook-{parser.prog}" if parser.prog in ("cdi", "ldcache") else parser.prog for parser in made_of]
    made = {"nvhook-config.toml.5": configuration_page()}
    for name, parser in zip(names, made_of, strict=True):
        made[f"{name}.1"] = command_page(name, parser, [other for other in names if other != name])
    for name, entry in ENTRIES.items():
        made[f"{name}.{entry.section}"] = entry_page(name, entry)
    for alias, target in ALIASES.items():
        made[alias] = f".so man{target[-1]}/{target}\n"
    return made


def main() -> None:
    """The command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()
