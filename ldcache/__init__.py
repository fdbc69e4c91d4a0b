# SPDX-License-Identifier: Apache-2.0
"""The glibc loader cache, `/etc/ld.so.cache`, without ldconfig.

Hot, for a container that starts: `cache` reads and writes the file, `order` is the order of its entries, `merge` puts
the libraries of one folder into it, `elf` reads the soname of a shared object; all are bytes in, bytes out, and treat
what they read as hostile. The lowest room, so it also holds what every room needs: `errors`, the compiled system calls
`_sys` behind `kernel`, and `root`, which opens paths inside a container's root.

Cold, for people: `build` makes a cache as ldconfig does, of what `conf` (ld.so.conf), `scan` (folders), `library` (one
file) and `links` find in a `tree`, by the `rules` of one glibc version; `check` judges a cache, `fold` is the verb
`merge`, `text` what `print` shows, and `cli` the command `ldcache`.

A container's cache becomes one that finds a driver's libraries so:

    fd = root.open(...)
    data = cache.read(fd)
    known = cache.parse(data) if data else cache.empty()
    ours = [cache.Entry(soname, folder + b"/" + soname, flags)]
    text = cache.serialize(merge.merge(known, folder, ours, whole_folder=False, win=False))

Names are bytes throughout, as the kernel and the loader have them: a name that is no UTF-8 needs no care.
Knows nothing of GPUs or containers.
"""

# Of all of nvhook, here because every room may look into the lowest. pyproject.toml has the same; a test compares them.
VERSION = "0.1.0"
