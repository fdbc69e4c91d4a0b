# SPDX-License-Identifier: Apache-2.0
"""The inventory as it is kept: `/run/nvhook/inventory.json`, below the host root.

Hot. `inventory` gives one that is fresh. If the kept one is stale or absent, it starts the cold command that
gathers a new one as a child with a deadline, one at a time under a lock, and reads the file again: nothing
that discovery needs is ever imported here.

A caller who cannot write there (rootless) keeps it in `$XDG_RUNTIME_DIR/nvhook`. Whatever is read is trusted
by its owner and mode, never by its name.
"""

from __future__ import annotations

import errno
import fcntl
import posix
import sys
import time

from cdi import VERSION, jsontext
from cdi.host import fingerprint, settings
from ldcache import root
from ldcache.errors import NvhookError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SCHEMA = 1
FOLDER = "/run/nvhook"
FILE = "inventory.json"
# Who gathers what the kernel and the files tell; and who asks NVML, which may hang. Nobody waits for the second
# while holding the first, so a start that needs no NVML never waits for it.
LOCK = "lock"
NVML_LOCK = "nvml.lock"
INVENTORY_MAX = 16 << 20
STDERR_MAX = 65536
# Of a temporary file's name, which nobody can tell beforehand.
RANDOM_BYTES = 8

# Gathering takes about 0.1 s; asking NVML without persistence mode 2 s for each GPU.
DEADLINE = 30.0
# A library folder that apt is filling changes again while we look at it.
ATTEMPTS = 3

# What the child runs. Its sys.path comes as an argument, for -S leaves it none: our own, where we lie already.
CHILD = "import sys; sys.path[:0] = sys.argv.pop(1).split('\\n'); from cdi.host.inventory import main; sys.exit(main())"

REMEDY = "run `nvhook inventory --refresh` on the host and see what it says"


class Options:
    """What discovery is told: NVIDIA's meanings of the roots, and how far NVML is asked.

    `driver_root` None is the configuration's, `dev_root` None the driver root.
    `nvml`: `auto` asks it for UUIDs that the kernel does not tell, `facts` for architecture and brand besides,
    `health` about each GPU but those that it lately hung on, `always` about every GPU, `never` not at all.
    `nvml_timeout` is seconds for each of its answers. Neither is part of what makes an inventory stale.
    """

    __slots__ = ("dev_root", "driver_root", "host_root", "library_search_path", "nvml", "nvml_timeout")

    def __init__(
        self,
        host_root: str = "/",
        driver_root: str | None = None,
        dev_root: str | None = None,
        library_search_path: tuple[str, ...] = (),
        nvml: str = "auto",
        nvml_timeout: float = 10.0,
    ) -> None:
        self.host_root = host_root
        self.driver_root = driver_root
        self.dev_root = dev_root
        self.library_search_path = library_search_path
        self.nvml = nvml
        self.nvml_timeout = nvml_timeout

    def to_json(self, configured: dict[str, Any] = settings.DEFAULTS) -> dict[str, Any]:
        """As an inventory holds them, under its settings: what decides whether it answers the same question."""
        driver_root = configured["driver.root"] if self.driver_root is None else self.driver_root
        return {
            "driver_root": driver_root,
            "dev_root": driver_root if self.dev_root is None else self.dev_root,
            "library_search_path": list(self.library_search_path),
        }

    def arguments(self) -> list[str]:
        """As `nvhook inventory` takes them."""
        words = ["--host-root", self.host_root]
        for option, place in (("--driver-root", self.driver_root), ("--dev-root", self.dev_root)):
            if place is not None:
                words += [option, place]
        for folder in self.library_search_path:
            words += ["--library-search-path", folder]
        return [*words, "--nvml", self.nvml, "--nvml-timeout", str(self.nvml_timeout)]


def inventory(
    root_fd: int, host_root: str = "/", options: Options | None = None, deadline: float = DEADLINE
) -> dict[str, Any]:
    """An inventory that holds at this moment: the kept one, or a new one. `root_fd` is open on `host_root`.

    `deadline` is seconds for a renewal and for waiting until another process's is done. Raises NvhookError
    where there is none to be had: no driver, no place to keep it, the deadline passed.
    """
    wanted = options or Options(host_root, nvml="never")
    folder = find_folder(root_fd, wanted.host_root)
    if folder is not None:
        try:
            kept = load(folder)
        finally:
            posix.close(folder)
        if kept is not None and stale(root_fd, kept, wanted) is None:
            return kept
    return _renewed(root_fd, wanted, lambda kept: True, deadline)


def renew(
    root_fd: int,
    host_root: str = "/",
    nvml: bool = False,
    facts: bool = False,
    options: Options | None = None,
    deadline: float = DEADLINE,
) -> dict[str, Any]:
    """A new inventory, even where the kept one is fresh. With `nvml`, NVML is asked for what is not settled; a kept
    one that is fresh and settled, which another start may just have made, is as good. `facts`: likewise for
    each GPU's architecture and brand, and the CUDA version."""
    wanted = options or Options(host_root, nvml="facts" if facts else "auto" if nvml else "never")
    enough = has_facts if facts else settled if nvml else lambda kept: False
    return _renewed(root_fd, wanted, enough, deadline)


def settled(kept: dict[str, Any]) -> bool:
    """Whether the UUID of each GPU and MIG device is known, and none of the GPUs is `undivided`."""
    return all(entry["uuid"] is not None for entry in [*kept["gpus"], *(kept.get("mig") or ())]) and not undivided(kept)


def undivided(kept: dict[str, Any]) -> list[dict[str, Any]]:
    """The GPUs that are in MIG mode and have no MIG device, so that nothing runs there. Only NVML tells, and nothing of
    the kernel's that a fingerprint could hold changes when somebody turns the mode off."""
    divided = {entry["gpu"] for entry in kept.get("mig") or ()}
    return [gpu for gpu in kept["gpus"] if gpu.get("mig_mode") and gpu["bus_id"] not in divided]


def has_facts(kept: dict[str, Any]) -> bool:
    """Whether NVML has told all that requirements compare."""
    driver: dict[str, Any] = kept["driver"]
    return driver["cuda"] is not None and all(gpu.get("arch") and gpu.get("brand") for gpu in kept["gpus"])


def stale(root_fd: int, kept: dict[str, Any], options: Options) -> str | None:
    """Why a kept inventory is not to be used, or None: the first thing that changed, by its path."""
    if kept.get("schema") != SCHEMA or kept.get("nvhook") != VERSION:
        return "nvhook's version"
    try:
        if kept.get("options") != options.to_json(settings.of(kept)):
            return "the options"
        return fingerprint.changed(root_fd, kept["fingerprint"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return "the inventory's form"


def _renewed(
    root_fd: int, options: Options, enough: Callable[[dict[str, Any]], bool], deadline: float
) -> dict[str, Any]:
    folder = make_folder(root_fd, options.host_root)
    end = time.monotonic() + deadline
    try:
        lock = take_lock(folder, end, LOCK if options.nvml == "never" else NVML_LOCK)
        try:
            # Whoever held the lock before us may have made just what we need.
            kept = load(folder)
            if kept is not None and stale(root_fd, kept, options) is None and enough(kept):
                return kept
            return _by_child(root_fd, folder, options, end)
        finally:
            posix.close(lock)
    finally:
        posix.close(folder)


def _by_child(root_fd: int, folder: int, options: Options, end: float) -> dict[str, Any]:
    reason = None
    for _ in range(ATTEMPTS):
        _start_child(options, end)
        kept = load(folder)
        if kept is None:
            raise NvhookError("the renewed inventory is not in its place", REMEDY)
        reason = stale(root_fd, kept, options)
        if reason is None:
            return kept
    what = f"the host keeps changing while its inventory is made: {reason} changed again{owner(root_fd, str(reason))}"
    raise NvhookError(what, "start the container when the driver's installation is done, or end what changes that")


def owner(root_fd: int, path: str) -> str:
    """Words on whose a path is, for an error: of what is gone, the nearest folder above that is there; "" for a reason
    that is no path."""
    place = path if path.startswith("/") else ""
    while place:
        try:
            uid = root.stat(root_fd, place, follow=False).st_uid
        except OSError:
            place = place.rpartition("/")[0]
            continue
        return f"; {'it' if place == path else place} belongs to uid {uid}"
    return ""


def find_folder(root_fd: int, host_root: str) -> int | None:
    """A descriptor of the folder that holds the inventory, or None where there is none that we trust."""
    try:
        return _own(root.open_path(root_fd, FOLDER), 0o022)
    except OSError:
        pass
    place = _runtime_folder(host_root)
    if place is None:
        return None
    try:
        return _own(posix.open(f"{place}/nvhook", root.PATH | posix.O_DIRECTORY | posix.O_NOFOLLOW), 0o077)
    except OSError:
        return None


def make_folder(root_fd: int, host_root: str) -> int:
    """As `find_folder`, and made where it is missing. Raises NvhookError saying why neither place will do."""
    try:
        return _make_system_folder(root_fd)
    except OSError as error:
        reason, remedy = f"{FOLDER}: {error.strerror}", "run as root, or set XDG_RUNTIME_DIR"
        if error.errno == errno.ENOENT:
            reason = f"there is no {root.split(FOLDER)[0]}"
            remedy = f"make {host_root.rstrip('/')}/run, or give as --host-root the folder that is the host's /"
    place = _runtime_folder(host_root)
    if place is None:
        raise NvhookError(f"no place to keep the inventory: {reason}", remedy)
    path = f"{place}/nvhook"
    try:
        try:
            posix.mkdir(path, 0o700)
        except FileExistsError:
            pass
        return _own(posix.open(path, root.PATH | posix.O_DIRECTORY | posix.O_NOFOLLOW), 0o077)
    except OSError as error:
        what = f"no place to keep the inventory: {reason}; {path}: {error.strerror}"
        raise NvhookError(what, f"remove {path}, or make it your own with mode 0700") from error


def _make_system_folder(root_fd: int) -> int:
    made = False
    folder, name = root.split(FOLDER)
    parent = root.open_path(root_fd, folder)
    try:
        posix.mkdir(name, 0o755, dir_fd=parent)
        made = True
    except FileExistsError:
        pass
    finally:
        posix.close(parent)
    fd = _own(root.open_path(root_fd, FOLDER), 0o022)
    if made:
        # mkdir's mode went through the caller's umask.
        posix.chmod(f"/proc/self/fd/{fd}", 0o755)
    if not posix.access(f"/proc/self/fd/{fd}", posix.W_OK, effective_ids=True):
        posix.close(fd)
        raise OSError(errno.EACCES, posix.strerror(errno.EACCES))
    return fd


def _own(fd: int, forbidden: int) -> int:
    """`fd` if it is a folder of ours that nobody else may write, or, by `forbidden`, even see."""
    status = posix.fstat(fd)
    if root.file_type(status.st_mode) != root.S_IFDIR:
        reason = "no folder"
    elif status.st_uid != posix.geteuid():
        reason = f"belongs to uid {status.st_uid}, not to {posix.geteuid()}"
    elif status.st_mode & forbidden:
        reason = f"mode {status.st_mode & 0o7777:04o} lets others in"
    else:
        return fd
    posix.close(fd)
    raise OSError(errno.EPERM, reason)


def _runtime_folder(host_root: str) -> str | None:
    """$XDG_RUNTIME_DIR, where it may be trusted. Another host's inventory is not kept there."""
    place = posix.environ.get(b"XDG_RUNTIME_DIR", b"").decode("utf-8", "surrogateescape").rstrip("/")
    if host_root.rstrip("/") or not place.startswith("/"):
        return None
    try:
        posix.close(_own(posix.open(place, root.PATH | posix.O_DIRECTORY), 0o077))
    except OSError:
        return None
    return place


def load(folder: int) -> dict[str, Any] | None:
    """The inventory kept in a folder; None where there is none, or one that is not ours or no inventory."""
    content = read_own(folder, FILE, INVENTORY_MAX)
    if content is None:
        return None
    try:
        value = jsontext.loads(content)
    except jsontext.InvalidJson:
        return None
    return value if isinstance(value, dict) else None


def read_own(folder: int, name: str, limit: int) -> bytes | None:
    """The content of a file that we wrote and nobody else can have; None for any other."""
    flags = posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC
    try:
        fd = posix.open(name, flags, dir_fd=folder)
    except OSError:
        return None
    try:
        status = posix.fstat(fd)
        if root.file_type(status.st_mode) != root.S_IFREG or status.st_uid != posix.geteuid():
            return None
        if status.st_mode & 0o022:
            return None
        return root.read(fd, limit, name)
    except OSError:
        return None
    finally:
        posix.close(fd)


def save(folder: int, value: dict[str, Any]) -> None:
    """Keep an inventory. Raises OSError."""
    write_own(folder, FILE, jsontext.dumps(value).encode())


def write_own(folder: int, name: str, content: bytes) -> None:
    """Replace a file by rename, so that a reader sees the old one or the new one, whole. Raises OSError.

    /run is a tmpfs and what is kept there can be made anew: there is nothing to fsync. The folder may be one in which
    others write too: nobody can have put anything where the new file is made, and what can't be swept stays.
    """
    _sweep(folder, f".{name}.")
    temporary = f".{name}.{posix.urandom(RANDOM_BYTES).hex()}"
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC
    fd = posix.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        left = memoryview(content)
        while left:
            left = left[posix.write(fd, left) :]
        posix.fchmod(fd, 0o644)
        posix.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _unlink(folder, temporary)
        raise
    finally:
        posix.close(fd)


def _sweep(folder: int, beginning: str) -> None:
    """Remove what a writer that was killed has left; our caller holds the lock, so there is no other one. Not what is
    named alike by chance or is another user's: the folder may be everybody's."""
    length = len(beginning) + 2 * RANDOM_BYTES
    fd = root.reopen(folder, posix.O_RDONLY | posix.O_DIRECTORY)
    try:
        for name in posix.listdir(fd):
            if len(name) == length and name.startswith(beginning) and _is_own_file(fd, name):
                _unlink(fd, name)
    finally:
        posix.close(fd)


def _is_own_file(folder: int, name: str) -> bool:
    try:
        status = posix.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return root.file_type(status.st_mode) == root.S_IFREG and status.st_uid == posix.geteuid()


def _unlink(folder: int, name: str) -> None:
    try:
        posix.unlink(name, dir_fd=folder)
    except OSError:
        # Gone, or not ours to remove: neither matters to the file that is being written.
        pass


def take_lock(folder: int, end: float, name: str = LOCK) -> int:
    """A lock's descriptor, ours until it is closed; no child inherits it. `end` is on the monotonic clock.

    Raises NvhookError if it can't be had, naming the process that held it to the end.
    """
    flags = posix.O_RDWR | posix.O_CREAT | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC
    try:
        fd = posix.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        what = f"cannot open the inventory's lock {FOLDER}/{name}: {error.strerror}"
        raise NvhookError(what, "make room there, or remove what is in its place") from error
    try:
        pause = 0.001
        while not _try_lock(fd):
            if time.monotonic() >= end:
                holder = _holder(fd)
                what = f"another renewal of the inventory, by process {holder}, does not come to its end"
                raise NvhookError(what, f"see what process {holder} waits for: cat /proc/{holder}/stack")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        try:
            posix.ftruncate(fd, 0)
            posix.pwrite(fd, b"%d\n" % posix.getpid(), 0)
        except OSError:
            # The number is for people; a full /run does not stop a start.
            pass
    except BaseException:
        posix.close(fd)
        raise
    return fd


def _holder(fd: int) -> str:
    """The pid that the lock's file holds, as far as it does: it may be full, or a FIFO."""
    try:
        return posix.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
    except OSError:
        return "unknown"


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def command(options: Options) -> list[str]:
    """The argument vector of the child that renews the inventory while its parent holds the lock: with NVML,
    NVML's."""
    places = "\n".join(folder for folder in sys.path if folder.startswith("/"))
    words = [sys.executable, "-I", "-S", "-B", "-c", CHILD, places]
    return [*words, "--refresh", "--quiet", "--lock-held", str(posix.getpid()), *options.arguments()]


def _start_child(options: Options, end: float) -> None:
    """Run the cold command to its end. Raises NvhookError with the child's own error, or for the deadline."""
    words = command(options)
    read_end, write_end = posix.pipe2(posix.O_CLOEXEC)
    try:
        try:
            pid = _spawn(words, write_end)
        finally:
            posix.close(write_end)
        posix.set_blocking(read_end, False)
        status, said = _wait(pid, read_end, end)
    finally:
        posix.close(read_end)
    if status != 0:
        raise _error(status, said)


def _spawn(words: list[str], stderr: int) -> int:
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
    place = posix.environ.get(b"XDG_RUNTIME_DIR")
    if place is not None:
        environment["XDG_RUNTIME_DIR"] = place.decode("utf-8", "surrogateescape")
    null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
    copies = [(posix.POSIX_SPAWN_DUP2, null, 0), (posix.POSIX_SPAWN_DUP2, null, 1)]
    copies.append((posix.POSIX_SPAWN_DUP2, stderr, 2))
    try:
        # A process group of its own: at the deadline the child goes together with its NVML child.
        return posix.posix_spawn(words[0], words, environment, file_actions=copies, setpgroup=0)
    except OSError as error:
        raise NvhookError(f"cannot start {words[0]}: {error.strerror}", "install nvhook again") from error
    finally:
        posix.close(null)


def _wait(pid: int, stderr: int, end: float) -> tuple[int, bytes]:
    """Wait status and stderr. Nothing here can poll a process and the clock at once without importing select,
    so this looks every few milliseconds."""
    said = b""
    pause = 0.001
    while True:
        try:
            done, status = posix.waitpid(pid, posix.WNOHANG)
        except ChildProcessError:
            # SIGCHLD is ignored, so the kernel reaped it: whether it did its work, the file will tell.
            done, status = pid, 0
        said = (said + _read(stderr))[-STDERR_MAX:]
        if done:
            return status, said
        if time.monotonic() >= end:
            # Killed and given up: it may hang in the driver, where no signal reaches it.
            posix.kill(-pid, 9)
            what = f"renewing the inventory took too long: its process {pid} is given up"
            raise NvhookError(
                what, f"{REMEDY}, and, while process {pid} lives, what it waits for: cat /proc/{pid}/stack"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def _read(fd: int) -> bytes:
    try:
        return posix.read(fd, STDERR_MAX)
    except BlockingIOError:
        return b""


def _error(status: int, said: bytes) -> NvhookError:
    """The child's two lines as an error of ours."""
    what = remedy = ""
    for line in said.decode("utf-8", "replace").splitlines():
        if line.startswith("nvhook: error: "):
            what, remedy = line.partition("error: ")[2], ""
        elif line.startswith("  remedy: ") and what:
            remedy = line.partition(": ")[2]
    if what:
        return NvhookError(what, remedy or REMEDY)
    code = posix.waitstatus_to_exitcode(status)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return NvhookError(f"renewing the inventory failed: the command {how}" + (f": {last}" if last else ""), REMEDY)
