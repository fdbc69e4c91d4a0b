# SPDX-License-Identifier: Apache-2.0
"""The command `ldcache`.

`ldcache print [-C FILE]` shows a cache as `ldconfig -p -C FILE` does, byte for byte and with the same exit status, but
neither crashes on a damaged one nor passes on what a hostile one holds: a character that isn't printable, or a byte
that is no UTF-8, is shown as `\\xNN`. A cache outside the limits of `ldcache.cache` is an error here.

`ldcache build` writes the cache that ldconfig with the same options writes, the name of its generator aside. `ldcache
check` tells what in a cache doesn't hold, one line each, and leaves with 3 if there is anything. `ldcache merge` puts
the libraries of one folder into a cache.

What ldconfig does and prints differs by its version; `--like` picks one. Without it the ldconfig of this machine is
asked, and where there is none, it is 2.41.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

from ldcache import VERSION, build, cache, check, fold, text
from ldcache.cache import Cache, InvalidLdCache
from ldcache.errors import NvhookError
from ldcache.merge import InvalidEntry
from ldcache.output import until_closed
from ldcache.rules import Rules, Version, ldconfig_version, version_of
from ldcache.tree import Tree, opened

DEFAULT_CACHE = "/etc/ld.so.cache"
DEFAULT_CONFIGURATION = "/etc/ld.so.conf"


def main(argv: list[str] | None = None) -> int:
    """Run `ldcache`. 0 done, 1 failed, 3 something found by `check`; argparse leaves with 2 on wrong usage."""
    return until_closed(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    arguments = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except NvhookError as error:
        print(f"nvhook: error: {_shown(error.what)}\n  remedy: {_shown(error.remedy)}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    parser = argparse.ArgumentParser(prog="ldcache", description="Read and write glibc loader caches.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}", help="print the version")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    show = _verb(verbs, "print", _print, "print a cache as `ldconfig -p` does", root=False)
    _add_like(show, "print what ldconfig of this glibc prints")

    make = _verb(verbs, "build", _build, "write the cache that ldconfig would write, and make its links")
    make.add_argument("-f", dest="conf", metavar="CONF", default=DEFAULT_CONFIGURATION, help="default: %(default)s")
    make.add_argument("-X", dest="links", action="store_false", help="neither make nor remove links")
    make.add_argument("-N", dest="write", action="store_false", help="make the links, but write no cache")
    _add_like(make, "do what ldconfig of this glibc does")
    make.add_argument("folders", metavar="DIR", nargs="*", help="folders to list before those of CONF")

    _verb(verbs, "check", _check, "tell what in a cache does not hold; exit status 3 if anything")

    merge = _verb(verbs, "merge", _merge, "put the libraries of one folder into a cache, before all others")
    merge.add_argument("--folder", required=True, metavar="DIR", help="the folder, by its absolute path")
    merge.add_argument("--win", action="store_true", help="drop every other entry of the same soname and flags")
    merge.add_argument(
        "libraries",
        metavar="LIB",
        nargs="*",
        help="files of DIR. If the cache lists DIR already, only these are added or replaced, and all else of DIR "
        "stays; a DIR that is new to it is taken whole. Without any, DIR is taken whole and replaces "
        "what was listed of it",
    )
    return parser


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    about: str,
    *,
    root: bool = True,
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    verb.set_defaults(run=run)
    verb.add_argument("-C", dest="cache", metavar="FILE", default=DEFAULT_CACHE, help="the cache; %(default)s")
    if root:
        verb.add_argument("-r", dest="root", metavar="ROOT", default="/", help="every name is one inside this folder")
    return verb


def _add_like(verb: argparse.ArgumentParser, about: str) -> None:
    about += ", such as 2.36; that of the ldconfig at hand, else 2.41"
    verb.add_argument("--like", metavar="VERSION", type=_version, help=about)


def _version(words: str) -> Version:
    try:
        return version_of(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _print(arguments: argparse.Namespace) -> int:
    path: str = arguments.cache
    data = _read(path, lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    # ldconfig prints nothing at all for an empty file, and is content.
    if not data:
        return 0
    known = _parse(path, data)
    if known.marked and known.byteorder != sys.byteorder:
        what = f"the loader cache {path} is of a {known.byteorder}-endian machine"
        raise NvhookError(what, "print it on such a machine")
    lines = text.lines(known, data, os.fsencode(path), arguments.like or ldconfig_version())
    sys.stdout.buffer.write(b"".join(lines))
    return 0


def _read(path: str, opener: Callable[[], int]) -> bytes:
    try:
        fd = opener()
        try:
            return cache.read(fd) if os.fstat(fd).st_size else b""
        finally:
            os.close(fd)
    except OSError as error:
        what = f"cannot read the loader cache {path}: {error.strerror}"
        raise NvhookError(what, "name a readable cache with -C") from error
    except InvalidLdCache as error:
        what = f"cannot read the loader cache {path}: {error}"
        raise NvhookError(what, "name a loader cache with -C") from error


def _parse(path: str, data: bytes) -> Cache:
    try:
        return cache.parse(data)
    except InvalidLdCache as error:
        remedy = "rebuild the cache with ldconfig, or name another file with -C"
        raise NvhookError(f"cannot read the loader cache {path}: {error}", remedy) from error


def _build(arguments: argparse.Namespace) -> int:
    rules = Rules(arguments.like or ldconfig_version())
    with opened(arguments.root) as tree:
        built, warnings = build.build(
            tree,
            rules,
            configuration=os.fsencode(arguments.conf),
            folders=[os.fsencode(folder) for folder in arguments.folders],
            with_links=arguments.links,
            for_cache=arguments.write,
        )
        _warn(warnings)
        if arguments.write:
            _write(tree, arguments.cache, cache.serialize(built))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    with opened(arguments.root) as tree:
        data = _read(arguments.cache, lambda: tree.open_file(os.fsencode(arguments.cache)))
        known = _parse(arguments.cache, data) if data else cache.empty()
        written = tree.status(os.fsencode(arguments.cache)).st_mtime_ns
        found = list(check.problems(tree, known, written, Rules(check.version_of(known) or ldconfig_version())))
    sys.stdout.buffer.write(b"".join([text.quoted(line) + b"\n" for line in found]))
    return 3 if found else 0


def _merge(arguments: argparse.Namespace) -> int:
    path: str = arguments.cache
    with opened(arguments.root) as tree:
        data = _read(path, lambda: tree.open_file(os.fsencode(path)))
        known = _parse(path, data) if data else cache.empty()
        folder = fold.Folder(
            tree, known, os.fsencode(arguments.folder), Rules(check.version_of(known) or ldconfig_version())
        )
        try:
            merged = folder.merged([os.fsencode(name) for name in arguments.libraries], win=arguments.win)
        except (InvalidLdCache, InvalidEntry) as error:
            what = f"the loader cache {path} cannot be kept whole: {error}"
            raise NvhookError(what, "rebuild it with ldconfig or `ldcache build`") from error
        _warn(folder.warnings)
        _write(tree, path, cache.serialize(merged))
    return 0


def _write(tree: Tree, path: str, data: bytes) -> None:
    try:
        tree.replace_file(os.fsencode(path), data)
    except OSError as error:
        what = f"cannot write the loader cache {path}: {error.strerror}"
        raise NvhookError(what, "name a file in an existing, writable folder with -C") from error


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        print(f"nvhook: warning: {_shown(warning)}", file=sys.stderr)


def _shown(line: str) -> str:
    return text.quoted(os.fsencode(line)).decode("utf-8", "surrogateescape")
