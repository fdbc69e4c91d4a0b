# SPDX-License-Identifier: Apache-2.0
"""Images for engines that take no plain folder: one layer, in the form that `docker save` writes.

`docker load`, `podman load` and `ctr images import` read it; no registry is asked.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

from tests.containers import PATH


def archive(root: Path, name: str, output: Path) -> Path:
    """Write the image `name` (with its tag), made of a container root, to `output`."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(root, arcname=".")
    content = layer.getvalue()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": [f"PATH={PATH}"], "Cmd": ["/bin/sh"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {"layer.tar": content, "config.json": encoded(config), "manifest.json": encoded(manifest)}
    with tarfile.open(output, "w") as tar:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return output


def encoded(value: object) -> bytes:
    """JSON text."""
    return json.dumps(value).encode()
