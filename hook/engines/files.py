# SPDX-License-Identifier: Apache-2.0
"""Engines' files: read, compared, and replaced whole, with a record by which they get their old bytes back.

The record lies in `/var/lib/nvhook/engines`, one file for each file that nvhook changed: what stood there before,
what nvhook made of it, and for which runtimes. Taking the last one out gives the old bytes back if nobody has
written to the file since, and takes out just the keys otherwise.
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hook.engines.settings import Edit
from ldcache import root
from ldcache.errors import NvhookError

RECORDS = "/var/lib/nvhook/engines"
SIZE_MAX = 4 << 20


class Host:
    """The folder that stands for the host's `/`; links inside it lead inside it. Raises NvhookError."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)
        try:
            self.fd = root.open_root(self.folder)
        except OSError as error:
            raise NvhookError(
                f"cannot open {self.folder}: {error.strerror}", "give --root an existing folder"
            ) from error

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *others: object) -> None:
        os.close(self.fd)

    def is_real(self) -> bool:
        """Whether it is this machine's own root, whose processes and programs are the host's."""
        return self.folder == "/"

    def place(self, path: str) -> Path:
        """Where a path of the host lies for us, links resolved as the host would; a last one to nowhere likewise,
        so that it stays one when its file is made."""
        path = self._behind_links(path)
        missing: list[str] = []
        while path.strip("/"):
            try:
                return Path(self.folder + root.real_path(self.fd, path), *missing)
            except OSError:
                # Not there, or no /proc is, as where an image is made.
                path, _, name = path.rstrip("/").rpartition("/")
                missing.insert(0, name)
        return Path(self.folder, *missing)

    def _behind_links(self, path: str) -> str:
        for _ in range(root.LINKS_MAX):
            try:
                target = root.readlink(self.fd, path)
            except OSError:
                # No link, or nothing.
                break
            path = os.path.join(os.path.dirname(path), target)
        return path

    def refuse_dangling(self, path: str) -> None:
        """Raises NvhookError for a link to where no file can be made."""
        end = self._behind_links(path)
        if end != path and not self.exists(os.path.dirname(end)):
            what = f"{path} is a link to {end}, whose folder is not there"
            raise NvhookError(what, "make the folder, or take the link away; nothing was changed")

    def exists(self, path: str) -> bool:
        """Whether a path leads anywhere on the host."""
        try:
            os.close(root.open_path(self.fd, path))
        except OSError:
            return False
        return True

    def read(self, path: str) -> str | None:
        """A file's text; None where there is none. Raises NvhookError."""
        try:
            return root.read_file(self.fd, path, SIZE_MAX).decode()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NvhookError(f"cannot read {path}: {error.strerror}", "see what is there; run as root") from error
        except UnicodeDecodeError as error:
            what = f"{path} is no text: byte {error.start} is no UTF-8"
            raise NvhookError(what, "repair the file, or move it away; nothing was changed") from error

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Replace a file at one moment; its mode and owner stay, a new one is ours. Raises NvhookError."""
        place = self.place(path)
        temporary = place.with_name(f".{place.name}.{os.getpid()}.nvhook")
        try:
            _make_folder(place.parent)
            status = place.stat() if place.exists() else None
            temporary.unlink(missing_ok=True)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with open(fd, "w", encoding="utf-8", newline="") as file:
                    file.write(text)
                    file.flush()
                    if status is not None:
                        os.fchown(fd, status.st_uid, status.st_gid)
                    os.fchmod(fd, status.st_mode & 0o7777 if status is not None else mode)
                    os.fsync(fd)
                os.rename(temporary, place)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise NvhookError(
                f"cannot write {path}: {error.strerror}", "run this as root; see what is there"
            ) from error

    def remove(self, path: str) -> None:
        """Take a file away, where it is there. Raises NvhookError."""
        try:
            self.place(path).unlink(missing_ok=True)
        except OSError as error:
            raise NvhookError(f"cannot remove {path}: {error.strerror}", "run this as root") from error

    def missing_folders(self, path: str) -> list[str]:
        """The folders above a file that are not there, the lowest first."""
        found = []
        folder = os.path.dirname(path)
        while folder != "/" and not self.place(folder).exists():
            found.append(folder)
            folder = os.path.dirname(folder)
        return found

    def remove_folders(self, paths: list[str]) -> None:
        """Take empty folders away, up to one that somebody else uses."""
        for path in paths:
            try:
                self.place(path).rmdir()
            except OSError:
                return


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir()
    folder.chmod(0o755)


@dataclass(frozen=True)
class Change:
    """A file's text before and after; None is no file."""

    path: str
    old: str | None
    new: str | None

    def diff(self) -> str:
        """For people."""
        old, new = ((text or "").splitlines(keepends=True) for text in (self.old, self.new))
        old_name, new_name = (self.path if text is not None else "/dev/null" for text in (self.old, self.new))
        made = difflib.unified_diff(old, new, old_name, new_name)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in made)


def added(host: Host, edit: Edit) -> Change:
    """What putting an edit in changes. Raises NvhookError."""
    old = host.read(edit.path)
    if old is None:
        host.refuse_dangling(edit.path)
    new = edit.apply(old or "")
    return Change(edit.path, old, old if new == (old or "") else new)


def foreign(host: Host, edit: Edit, name: str) -> list[str]:
    """What somebody else has under our keys: no record says that it was put there for the runtime `name`.
    Raises NvhookError."""
    found = edit.conflicts(host.read(edit.path) or "")
    record = Record.read(host, edit.path) if found else None
    known = edit.conflicts(record.after or "") if record is not None and name in record.names else []
    return [line for line in found if line not in known]


def kept(host: Host, edit: Edit) -> Change:
    """That a file stays as it is; `take_out` forgets what its record says of the runtime all the same."""
    old = host.read(edit.path)
    return Change(edit.path, old, old)


def removed(host: Host, edit: Edit, name: str) -> Change:
    """What taking an edit out changes. Raises NvhookError."""
    old = host.read(edit.path)
    if old is None:
        return Change(edit.path, None, None)
    record = Record.read(host, edit.path)
    if record is None:
        new = edit.strip(old, "" if edit.ours else None)
    elif edit.ours and name not in record.names:
        return Change(edit.path, old, old)
    elif old == record.after and record.names == [name]:
        return Change(edit.path, old, record.before)
    else:
        new = edit.strip(old, record.before or "", shared=record.names != [name])
    ours = edit.ours or (record is not None and record.before is None)
    return Change(edit.path, old, None if ours and new.strip() in ("", "{}") else new)


@dataclass(frozen=True)
class Record:
    """What nvhook did to a file, for the runtimes `names`. `folders` were made for it, the lowest first."""

    path: str
    names: list[str]
    before: str | None
    after: str | None
    folders: list[str] = field(default_factory=list)

    @staticmethod
    def name(path: str) -> str:
        """Where the record of a file lies. A slash becomes a dash, and a dash two of them."""
        return f"{RECORDS}/{path.strip('/').replace('-', '--').replace('/', '-')}.json"

    @staticmethod
    def read(host: Host, path: str) -> Record | None:
        """The record of a file; one that can't be read counts as none."""
        try:
            value: Any = json.loads(host.read(Record.name(path)) or "null")
            folders = list(value.get("folders", []))
            return Record(value["path"], list(value["names"]), value["before"], value["after"], folders)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, host: Host) -> None:
        """Keep it. Raises NvhookError."""
        value = {"path": self.path, "names": self.names, "before": self.before, "after": self.after}
        value |= {"folders": self.folders} if self.folders else {}
        # An engine's file may hold secrets, and have a mode for that.
        host.write(self.name(self.path), json.dumps(value, indent=1) + "\n", mode=0o600)

    @staticmethod
    def forget(host: Host, path: str) -> None:
        """Remove it, and the folder with the last one."""
        host.remove(Record.name(path))
        host.remove_folders([RECORDS, os.path.dirname(RECORDS)])


def put_in(host: Host, edit: Edit, change: Change, name: str) -> None:
    """Write a change of `added`, its record first: after a crash between the two the old text is still known."""
    record = Record.read(host, edit.path)
    if record is not None and change.old == record.after:
        before, names = record.before, record.names
    elif record is not None:
        # Somebody wrote to it since; what is theirs is what is left without ours.
        before = None if change.old is None else edit.strip(change.old, record.before or "")
        names = record.names
    else:
        before, names = change.old, []
    folders = record.folders if record is not None else host.missing_folders(edit.path)
    Record(edit.path, sorted({*names, name}), before, change.new, folders).write(host)
    if change.new is not None:
        host.write(edit.path, change.new)


def join(host: Host, edit: Edit, name: str) -> None:
    """Remember that a file which is as it should be serves another runtime too."""
    record = Record.read(host, edit.path)
    if record is not None and name not in record.names:
        Record(edit.path, sorted([*record.names, name]), record.before, record.after, record.folders).write(host)


def take_out(host: Host, edit: Edit, change: Change, name: str) -> None:
    """Write a change of `removed`; the record goes with the last runtime."""
    if change.new is None:
        host.remove(edit.path)
    elif change.new != change.old:
        host.write(edit.path, change.new)
    record = Record.read(host, edit.path)
    if record is None:
        return
    names = [one for one in record.names if one != name]
    if names:
        Record(edit.path, names, record.before, change.new, record.folders).write(host)
    else:
        Record.forget(host, edit.path)
        if change.new is None:
            host.remove_folders(record.folders)
