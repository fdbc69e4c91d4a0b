# SPDX-License-Identifier: Apache-2.0
"""`nvhook install`: a private, root-owned copy of nvhook whose hooks start without pip's environment.

PREFIX/lib/nvhook holds the three packages, the one module of cffi that they need, NVML's binding, and the
entry script; PREFIX/bin the launchers. The launcher's copy gets the interpreter's path written into it:
a versioned one, since cffi's module is bound to one minor version of Python.
"""

from __future__ import annotations

import compileall
import ctypes
import importlib.util
import os
import py_compile
import shutil
import stat
import sys
from pathlib import Path

from hook import codefile
from ldcache import kernel
from ldcache.errors import NvhookError

PACKAGES = codefile.PACKAGES
MODULES = ("_cffi_backend", "pynvml")
LAUNCHERS = ("nvhook-prestart", "nvhook-create-container", "nvhook-runtime")
# By NVIDIA's names, for those who want them.
NVIDIA_LAUNCHERS = (
    "nvidia-cdi-hook",
    "nvidia-container-runtime",
    "nvidia-container-runtime.cdi",
    "nvidia-container-runtime.legacy",
    "nvidia-container-runtime-hook",
    "nvidia-container-toolkit",
)
NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.c", "*.h", "_*_build.py", "bin", ".*")
MARK_BYTES = 256
RENAME_EXCHANGE = 2
REMEDY = "run this as root, and see what is there"

ENTRY = """\
# SPDX-License-Identifier: Apache-2.0
import sys
sys.path[:0] = [{library!r}]
from hook.start import main
main()
"""


def install(prefix: Path, nvidia_names: bool = False) -> list[Path]:
    """Copy nvhook below `prefix`; the launchers' paths come back. Replaces an older copy whole.

    With `nvidia_names` the launchers have NVIDIA's names besides their own.

    Raises NvhookError if a part is missing or the prefix can't be written.
    """
    launcher = origin("hook").parent / "bin/launch"
    if not launcher.is_file():
        remedy = "a packaged or installed copy needs no `nvhook install`; in a checkout run packaging/build.py"
        raise NvhookError(f"there is no {launcher} to install from", remedy)
    top = prefix.resolve()
    library = top / "lib/nvhook"
    beside = library.with_name(".nvhook.new")
    try:
        for folder in (top / "lib", top / "bin"):
            make_folder(folder)
        remove(beside)
        try:
            # Nobody else may enter before all modes are right: a file opened for writing stays so.
            beside.mkdir(mode=0o700)
            fill(beside, library)
            swap(beside, library)
        finally:
            remove(beside)
        names = LAUNCHERS + NVIDIA_LAUNCHERS if nvidia_names else LAUNCHERS
        return link_launchers(top / "bin", library, names)
    except shutil.Error as error:
        # All failures of a tree, each with source, target and reason.
        source, target, reason = error.args[0][0]
        raise NvhookError(f"cannot copy {source} to {target}: {reason}", REMEDY) from error
    except OSError as error:
        raise NvhookError(f"cannot write {error.filename or library}: {error.strerror or error}", REMEDY) from error


def make_folder(folder: Path) -> None:
    """A folder that everybody can read, whatever the umask, and its parents; one that is there stays as it is."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir()
    folder.chmod(0o755)


def remove(path: Path) -> None:
    """Take a folder away, or a link or file in its place, never what a link leads to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def fill(folder: Path, final: Path) -> None:
    """Write everything into `folder`, as it will stand in `final`."""
    for name in PACKAGES:
        # Bytes alone: extended attributes can be an ACL that lets others write.
        shutil.copytree(origin(name).parent, folder / name, ignore=NOT_COPIED, copy_function=shutil.copyfile)
    for name in MODULES:
        shutil.copyfile(origin(name), folder / origin(name).name)
    # For CDI files; and before 3.11 the standard library has no reader for the configuration file.
    for name in ("yaml", "tomli") if sys.version_info < (3, 11) else ("yaml",):
        shutil.copytree(origin(name).parent, folder / name, ignore=NOT_COPIED, copy_function=shutil.copyfile)
    programs = folder / "bin"
    programs.mkdir()
    for name in ("launch", "cuda-check"):
        shutil.copyfile(origin("hook").parent / "bin" / name, programs / name)
    (programs / "entry").write_text(ENTRY.format(library=str(final)))
    write_marks(programs / "launch", {"@PYTHON@": interpreter(), "@ENTRY@": str(final / "bin/entry")})
    # By hash and unchecked: image builders reset times, and a start would then compile 1,300 lines each time.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    if not compileall.compile_dir(folder, quiet=1, invalidation_mode=mode, stripdir=folder, prependdir=final):
        raise NvhookError(f"cannot byte-compile {folder}", f"install for this Python again: {sys.version.split()[0]}")
    codefile.write(folder, final)
    set_modes(folder)


def set_modes(folder: Path) -> None:
    """Readable by all, writable by the owner, whatever the sources' modes were."""
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)


def origin(name: str) -> Path:
    """The file that an import of `name` would load; in an editable install that is the source tree's."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise NvhookError(
            f"the Python module {name} is not installed", "install the nvhook wheel with its dependencies"
        )
    return Path(spec.origin)


def interpreter() -> str:
    """The running interpreter by its versioned name, outside of any virtual environment.

    Raises NvhookError if root's hooks would run what others can change.
    """
    path = os.path.realpath(sys.executable)
    if os.geteuid() == 0:
        # The standard library may lie elsewhere, in /usr/local/lib as against /usr/local/bin.
        for file in (Path(path), Path(os.path.realpath(os.__file__))):
            for place in (file, *file.parents):
                if others_can_write(place):
                    what = f"others than root can write {place}, and hooks would run {file} as root"
                    remedy = "install with an interpreter that belongs to root, such as /usr/bin/python3"
                    raise NvhookError(what, remedy)
    return path


def others_can_write(path: Path) -> bool:
    """Whether others than root can change a file, or put another into a folder in the place of root's."""
    status = path.stat()
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return status.st_uid != 0 or (status.st_mode & 0o022 != 0 and not sticky)


def write_marks(launcher: Path, values: dict[str, str]) -> None:
    """Write paths over the marks in the launcher, each in a field of 256 bytes that ends in NUL."""
    content = launcher.read_bytes()
    for mark, value in values.items():
        field = mark.encode().ljust(MARK_BYTES, b"\0")
        text = value.encode()
        if content.count(field) != 1:
            raise NvhookError(f"{launcher} has no single mark {mark}", "build nvhook's native parts anew")
        if len(text) >= MARK_BYTES:
            raise NvhookError(f"{value} is longer than {MARK_BYTES - 1} bytes", "install below a shorter prefix")
        content = content.replace(field, text.ljust(MARK_BYTES, b"\0"))
    launcher.write_bytes(content)
    launcher.chmod(0o755)


def swap(new: Path, final: Path) -> None:
    """Put the new folder in the old one's place, at one moment where the file system can; a hook that is just
    starting keeps the files it has open. What was there may lie in `new` afterwards."""
    if exchange(new, final):
        return
    old = final.with_name(".nvhook.old")
    remove(old)
    if final.is_symlink():
        final.unlink()
    elif final.exists():
        final.rename(old)
    new.rename(final)
    remove(old)


def exchange(one: Path, other: Path) -> bool:
    """renameat2(2) with RENAME_EXCHANGE. False where only one is there, and where libc (glibc before 2.28), the
    kernel or the file system does not know it."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    if call is None:
        return False
    names = (kernel.AT_FDCWD, os.fsencode(one), kernel.AT_FDCWD, os.fsencode(other))
    return bool(call(*names, RENAME_EXCHANGE) == 0)


def link_launchers(folder: Path, library: Path, names: tuple[str, ...]) -> list[Path]:
    """The names that hooks are registered under, each a link to the launcher."""
    made = []
    for name in names:
        link = folder / name
        temporary = folder / f".{name}.new"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(library / "bin/launch", folder))
        temporary.rename(link)
        made.append(link)
    return made
