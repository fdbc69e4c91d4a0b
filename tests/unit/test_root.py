# SPDX-License-Identifier: Apache-2.0
"""Opening inside a root: openat2 and the walk that stands in for it find the same object, and never one outside."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ldcache import kernel, root

TREE = Path(__file__).resolve().parents[2]

Opener = Callable[[int, str], int]

NAMES = ("a", "b", "c", "d")
PARTS = (*NAMES, *NAMES, "..", "..", ".", "")
LONGEST = "n" * 255


def openat2(top: int, path: str, follow: bool = True) -> int:
    """The kernel's own look-up, without what root.open_path puts around it."""
    flags = root.PATH if follow else root.PATH | os.O_NOFOLLOW
    while True:
        try:
            return kernel.openat2(top, path, flags, 0, root.INSIDE)
        except BlockingIOError:
            # A rename anywhere on the machine while the kernel went over a `..`.
            continue


def counted(top: int, path: str, follow: bool = True) -> int:
    """As for one of many paths of an image."""
    return root.open_path(top, path, follow, root.Budget())


def within(top: int, path: str, follow: bool = True) -> int:
    """As a name of a folder that was opened before."""
    place, _, name = path.rpartition("/")
    folder = root.Folder(top, place or "/", root.Budget())
    try:
        return folder.open(name) if follow else counted(folder.fd, name, False)
    finally:
        folder.close()


OPENERS: dict[str, Opener] = {"openat2": root.open_path, "walk": root.walk, "counted": counted, "within": within}


@pytest.fixture(autouse=True)
def no_descriptor_is_left_open() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def top(tmp_path: Path) -> Iterator[int]:
    """An empty root, tmp_path/root, with tmp_path/outside beside it."""
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").mkdir()
    fd = root.open_root(str(tmp_path / "root"))
    yield fd
    os.close(fd)


def same_object(fd: int) -> tuple[int, int, int]:
    """What tells two files apart; closes the descriptor."""
    try:
        status = os.fstat(fd)
        return status.st_dev, status.st_ino, kernel.mount_id(fd)
    finally:
        os.close(fd)


def outcome(opener: Callable[[int, str, bool], int], top: int, path: str, follow: bool) -> object:
    """The object, or the errno's name."""
    try:
        return same_object(opener(top, path, follow))
    except OSError as error:
        return errno.errorcode[error.errno or 0]


# Random hostile trees


def plant(seed: int, folder: Path) -> None:
    """A tree that nobody would build by accident: links up, out, around and into each other."""
    chance = random.Random(seed)
    folders = [folder]
    for _ in range(chance.randint(10, 40)):
        path = chance.choice(folders) / chance.choice(NAMES)
        if os.path.lexists(path):
            continue
        match chance.randint(0, 7):
            case 0 | 1 | 2:
                path.mkdir()
                folders.append(path)
            case 3:
                path.touch()
            case 4:
                os.mkfifo(path)
            case _:
                path.symlink_to(random_path(chance) or ".")
    for i in range(chance.randint(0, 45)):
        folder.joinpath(f"chain{i}").symlink_to(f"chain{i + 1}")


def random_path(chance: random.Random) -> str:
    parts = chance.choices(PARTS, k=chance.randint(1, 8))
    if chance.random() < 0.05:
        parts.append(chance.choice([LONGEST, f"{LONGEST}n", f"chain{chance.randint(0, 45)}"]))
    return (
        chance.choice(["", "", "/", "//", "../", "/proc/self/"])
        + "/".join(parts)
        + chance.choice(["", "", "", "/", "/."])
    )


def compare(seed: int, folder: Path, paths: int) -> dict[str, int]:
    """Looks up random paths in one random tree both ways; how often each kind of outcome was seen."""
    chance = random.Random(-seed)
    folder.mkdir()
    plant(seed, folder)
    top = root.open_root(str(folder))
    seen: dict[str, int] = {}
    try:
        for _ in range(paths):
            path = random_path(chance)
            for follow in (True, False):
                expected = outcome(openat2, top, path, follow)
                assert outcome(root.walk, top, path, follow) == expected, (seed, path, follow)
                assert outcome(counted, top, path, follow) == expected, (seed, path, follow)
                if path and follow and expected not in ("ENOTDIR", "ELOOP"):
                    # Where two things are wrong, the folder's error is the first to be seen.
                    assert outcome(within, top, path, follow) == expected, (seed, path, follow)
                kind = expected if isinstance(expected, str) else "found"
                seen[kind] = seen.get(kind, 0) + 1
    finally:
        os.close(top)
    return seen


def test_the_walk_and_the_kernel_agree(tmp_path: Path) -> None:
    seen: dict[str, int] = {}
    for seed in range(40):
        for kind, count in compare(seed, tmp_path / str(seed), 150).items():
            seen[kind] = seen.get(kind, 0) + count
    # Equal answers prove little if all of them are ENOENT.
    assert min(seen[kind] for kind in ("found", "ENOENT", "ENOTDIR", "ELOOP", "ENAMETOOLONG")) >= 20, seen
    assert seen["found"] > 1_500, seen


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_walk_and_the_kernel_agree_on_many_more(tmp_path: Path) -> None:
    for seed in range(1_000, 1_500):
        compare(seed, tmp_path / str(seed), 200)


@pytest.mark.parametrize("links", [39, 40, 41, 42])
def test_the_same_number_of_links_is_too_many(tmp_path: Path, top: int, links: int) -> None:
    for i in range(links):
        (tmp_path / f"root/l{i}").symlink_to(f"l{i + 1}")
    (tmp_path / f"root/l{links}").mkdir()
    expected = outcome(openat2, top, "l0", True)
    assert isinstance(expected, str) == (links > root.LINKS_MAX)
    assert outcome(root.walk, top, "l0", True) == expected


@pytest.mark.parametrize("path", ["", "\0", "a\0b", "./" * 2_047 + ".", "./" * 2_048, "x" * 4_096])
def test_paths_that_are_no_paths(top: int, path: str) -> None:
    expected = outcome(openat2, top, path, True)
    assert outcome(root.walk, top, path, True) == expected
    assert outcome(root.open_path, top, path, True) == expected


# Escapes, one by one, with both ways of looking up

openers = pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)


@openers
@pytest.mark.parametrize(
    ("link", "path"),
    [
        ("../outside", "link/secret"),
        ("../../../../../../outside", "link/secret"),
        ("{outside}", "link/secret"),
        ("{outside}/secret", "link"),
        ("sub/../../outside/secret", "link"),
        ("/", "link/../../outside/secret"),
        (".", "link/../outside/secret"),
    ],
)
def test_no_link_leads_out(tmp_path: Path, top: int, opener: Opener, link: str, path: str) -> None:
    outside = tmp_path / "outside"
    (outside / "secret").touch()
    (tmp_path / "root/sub").mkdir()
    (tmp_path / "root/link").symlink_to(link.format(outside=outside))
    with pytest.raises(FileNotFoundError):
        opener(top, path)


@openers
def test_an_absolute_link_starts_at_the_root(tmp_path: Path, top: int, opener: Opener) -> None:
    (tmp_path / "root/etc").mkdir()
    (tmp_path / "root/etc/passwd").write_text("inside")
    (tmp_path / "root/link").symlink_to("/etc/passwd")
    inside = os.stat(tmp_path / "root/etc/passwd")
    for path in ("link", "/link", "../../link", "etc/../link", "etc//./passwd"):
        assert same_object(opener(top, path))[:2] == (inside.st_dev, inside.st_ino)


@openers
@pytest.mark.parametrize("path", ["/proc/self/fd/0", "/proc/self/root", "/proc/self/cwd/x", "/proc/self/exe"])
def test_magic_links_are_refused(opener: Opener, path: str) -> None:
    with root_of_this_machine() as top, pytest.raises(OSError) as caught:
        opener(top, path)
    assert caught.value.errno == errno.ELOOP


@contextlib.contextmanager
def root_of_this_machine() -> Iterator[int]:
    fd = root.open_root("/")
    try:
        yield fd
    finally:
        os.close(fd)


# A kernel before 5.6, or a container engine's filter of old, has no openat2. 437 on every architecture.
WITHOUT_OPENAT2 = """
import ctypes, struct, sys
sys.path.insert(0, {tree!r})
load, equal, answer = (0x20, 0, 0, 0), (0x15, 0, 1, 437), ((0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000))
filter = b"".join(struct.pack("=HBBI", *one) for one in (load, equal, *answer))
memory = ctypes.create_string_buffer(filter)
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()

from ldcache import root
top = root.open_root({top!r})
try:
    root.kernel.openat2(top, "link", root.PATH, 0, root.INSIDE)
except OSError as error:
    assert error.errno == 38, error
for _ in range(2):
    assert root.read_file(top, "link/file") == b"inside"
    assert root.real_path(top, "../link") == "/folder"
    assert root.readlink(top, "link") == "/folder"
    assert not root.exists(top, "out")
"""


def test_without_openat2(tmp_path: Path, top: int) -> None:
    (tmp_path / "root/folder").mkdir()
    (tmp_path / "root/folder/file").write_text("inside")
    (tmp_path / "root/link").symlink_to("/folder")
    (tmp_path / "root/out").symlink_to("../outside")
    program = WITHOUT_OPENAT2.format(tree=str(TREE), top=str(tmp_path / "root"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Races: another process swaps what a path names, in a loop

# A folder and a link that leads out take turns under one name.
SWAP_LINK = """
import os
while True:
    os.rename("root/x", "root/folder"); os.rename("root/link", "root/x")
    os.rename("root/x", "root/link"); os.rename("root/folder", "root/x")
"""
# A folder is moved out of the root and back, so that `..` in it leads elsewhere.
MOVE_OUT = """
import os
while True:
    os.rename("root/a/b", "outside/b"); os.rename("outside/b", "root/a/b")
"""


def by_name(top: int, path: str) -> int:
    """The look-up without a defence: the path joined to the root's."""
    return os.open(f"/proc/self/fd/{top}/{path}", root.PATH)


def step_by_step(top: int, path: str) -> int:
    """A walk that opens `..` like any other name, and refuses links."""
    here = os.dup(top)
    for name in path.split("/"):
        try:
            deeper = os.open(name, root.PATH | os.O_NOFOLLOW, dir_fd=here)
        finally:
            os.close(here)
        here = deeper
    return here


def race(where: Path, swap: str, path: str, control: Opener, tries: int) -> None:
    """Looks a path up while it is swapped: the control is led out of the root, our openers never are."""
    top = root.open_root(str(where / "root"))
    secrets = {same_object(os.open(secret, root.PATH)) for secret in where.glob("**/secret-outside")}
    assert secrets
    escapes: dict[Opener, int] = dict.fromkeys([control, *OPENERS.values()], 0)
    swapper = subprocess.Popen([sys.executable, "-I", "-S", "-c", swap], cwd=where)
    try:
        done = 0
        # How soon the control is led out depends on the machine's mood; without it the test would prove nothing.
        while done < tries or (not escapes[control] and done < 500_000):
            done += 1
            for opener in escapes:
                with contextlib.suppress(OSError):
                    escapes[opener] += same_object(opener(top, path)) in secrets
    finally:
        swapper.kill()
        swapper.wait()
        os.close(top)
    assert escapes[control] > 0
    assert not any(escapes[opener] for opener in OPENERS.values())


def swapped_link(tmp_path: Path, tries: int) -> None:
    for folder in ("root/x", "root/outside", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "outside/secret-outside").touch()
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    race(tmp_path, SWAP_LINK, "x/secret-outside", by_name, tries)


def moved_folder(tmp_path: Path, tries: int) -> None:
    for folder in ("root/a/b/c/d", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "secret-outside").touch()
    race(tmp_path, MOVE_OUT, "a/b/c/d/../../../../secret-outside", step_by_step, tries)


def test_a_link_swapped_in_does_not_lead_out(tmp_path: Path) -> None:
    swapped_link(tmp_path, 3_000)


def test_a_folder_moved_out_does_not_lead_out(tmp_path: Path) -> None:
    moved_folder(tmp_path, 3_000)


@pytest.mark.long
def test_a_link_swapped_in_does_not_lead_out_for_long(tmp_path: Path) -> None:
    swapped_link(tmp_path, 300_000)


@pytest.mark.long
def test_a_folder_moved_out_does_not_lead_out_for_long(tmp_path: Path) -> None:
    moved_folder(tmp_path, 300_000)


# Reading


@pytest.mark.timeout(10)
def test_a_fifo_is_not_waited_for(tmp_path: Path, top: int) -> None:
    os.mkfifo(tmp_path / "root/fifo")
    with pytest.raises(OSError, match="not a regular file") as caught:
        root.open_file(top, "fifo")
    assert caught.value.errno == errno.EINVAL


def test_a_device_and_a_folder_are_not_read() -> None:
    with root_of_this_machine() as top:
        for path in ("/dev/null", "/dev", "/"):
            with pytest.raises(OSError, match="not a regular file"):
                root.open_file(top, path)


def test_a_link_out_is_not_read(tmp_path: Path, top: int) -> None:
    (tmp_path / "outside/secret").write_text("secret")
    (tmp_path / "root/link").symlink_to(tmp_path / "outside/secret")
    with pytest.raises(FileNotFoundError):
        root.read_file(top, "link")


def test_the_limit_of_a_read(tmp_path: Path, top: int) -> None:
    (tmp_path / "root/file").write_bytes(b"x" * 1_000)
    assert root.read_file(top, "/file", limit=1_000) == b"x" * 1_000
    with pytest.raises(OSError) as caught:
        root.read_file(top, "/file", limit=999)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, "/file")


def test_an_empty_file(tmp_path: Path, top: int) -> None:
    (tmp_path / "root/file").touch()
    assert root.read_file(top, "/file", limit=0) == b""


def test_a_file_that_claims_to_be_empty() -> None:
    """procfs gives 0 as the size of each file."""
    with root_of_this_machine() as top:
        assert root.stat(top, "/proc/version").st_size == 0
        assert root.read_file(top, "/proc/version").startswith(b"Linux version")


@pytest.mark.timeout(10)
def test_a_file_that_claims_to_be_huge(tmp_path: Path, top: int) -> None:
    with open(tmp_path / "root/sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError) as caught:
        root.read_file(top, "sparse")
    assert caught.value.errno == errno.EFBIG


def test_a_descriptor_is_reopened_though_its_name_is_another_files_now(tmp_path: Path, top: int) -> None:
    (tmp_path / "root/file").write_text("first")
    named = root.open_path(top, "file")
    (tmp_path / "root/file").unlink()
    (tmp_path / "root/file").write_text("second")
    fd = root.reopen(named, os.O_RDONLY)
    assert root.read(fd, 100, "file") == b"first"
    assert not os.get_inheritable(fd)
    os.close(fd)
    os.close(named)


# Facts and names


def test_listing_and_links(tmp_path: Path, top: int) -> None:
    folder = tmp_path / "root/sub"
    folder.mkdir()
    for name in ("b", "a", "\udcff"):
        (folder / name).touch()
    (folder / "link").symlink_to("/nowhere")
    assert root.listdir(top, "/sub") == ["a", "b", "link", "\udcff"]
    assert root.readlink(top, "sub/link") == "/nowhere"
    assert root.stat(top, "sub/link", follow=False).st_mode & root.S_IFMT == root.S_IFLNK
    assert root.exists(top, "sub/\udcff")
    assert not root.exists(top, "sub/link")
    with pytest.raises(NotADirectoryError):
        root.listdir(top, "sub/a")
    with pytest.raises(OSError) as caught:
        root.readlink(top, "sub/a")
    assert caught.value.errno == errno.EINVAL


def test_the_name_without_links(tmp_path: Path, top: int) -> None:
    (tmp_path / "root/usr/lib").mkdir(parents=True)
    (tmp_path / "root/lib").symlink_to("usr/lib")
    (tmp_path / "root/usr/lib/x").touch()
    assert root.real_path(top, "/lib/x") == "/usr/lib/x"
    assert root.real_path(top, "lib/../..") == "/"
    with root_of_this_machine() as machine:
        assert root.real_path(machine, "/proc/version") == "/proc/version"


def test_a_file_outside_has_no_name_inside(tmp_path: Path, top: int) -> None:
    (tmp_path / "root-beside").mkdir()
    for folder in (tmp_path / "outside", tmp_path / "root-beside", tmp_path):
        fd = root.open_root(str(folder))
        with pytest.raises(OSError) as caught:
            root.name_of(top, fd)
        assert caught.value.errno == errno.EXDEV
        os.close(fd)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/usr/lib/libcuda.so", ("/usr/lib", "libcuda.so")),
        ("/usr/lib/", ("/usr", "lib")),
        ("/usr", ("/", "usr")),
        ("usr", ("/", "usr")),
    ],
)
def test_split(path: str, parts: tuple[str, str]) -> None:
    assert root.split(path) == parts


@pytest.mark.parametrize("path", ["", "/", "/usr/..", "/usr/.", ".."])
def test_what_has_no_last_name(path: str) -> None:
    with pytest.raises(OSError) as caught:
        root.split(path)
    assert caught.value.errno == errno.EINVAL


# Making folders


class Maker:
    """Makes folders for open_folder and keeps each one's name inside the root."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.names: list[str] = []

    def __call__(self, parent: int, name: str) -> None:
        self.names.append(f"{root.name_of(self.top, parent).rstrip('/')}/{name}")
        os.mkdir(name, dir_fd=parent)


def test_a_folder_is_made_with_its_parents(tmp_path: Path, top: int) -> None:
    (tmp_path / "root/usr").mkdir()
    (tmp_path / "root/lib").symlink_to("/usr")
    maker = Maker(top)
    fd = root.open_folder(top, "/lib/x/y", maker)
    assert root.name_of(top, fd) == "/usr/x/y"
    assert maker.names == ["/usr/x", "/usr/x/y"]
    os.close(fd)
    os.close(root.open_folder(top, "/lib/x/y", maker))
    assert len(maker.names) == 2


def test_a_folder_is_not_made_outside(tmp_path: Path, top: int) -> None:
    (tmp_path / "root/up").symlink_to("../outside")
    (tmp_path / "root/far").symlink_to(tmp_path / "outside")
    maker = Maker(top)
    for path in ("/up/x", "/far/x", "/up"):
        with pytest.raises(FileNotFoundError):
            os.close(root.open_folder(top, path, maker))
    assert os.listdir(tmp_path / "outside") == []


def test_a_file_where_a_folder_should_be(tmp_path: Path, top: int) -> None:
    (tmp_path / "root/file").touch()
    maker = Maker(top)
    for path in ("/file", "/file/x"):
        with pytest.raises(NotADirectoryError):
            root.open_folder(top, path, maker)
    assert maker.names == []


def test_a_folder_that_another_makes_meanwhile(tmp_path: Path, top: int) -> None:
    def late(parent: int, name: str) -> None:
        os.mkdir(name, dir_fd=parent)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)

    os.close(root.open_folder(top, "/x/y", late))
    assert (tmp_path / "root/x/y").is_dir()


def test_a_folder_where_none_can_be_made(top: int) -> None:
    """A failing callback, or a failing mkdir, leaves no descriptor open."""
    with pytest.raises(OSError) as caught:
        root.open_folder(top, f"/{LONGEST}n/x", Maker(top))
    assert caught.value.errno == errno.ENAMETOOLONG
