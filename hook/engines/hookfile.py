# SPDX-License-Identifier: Apache-2.0
"""The file by which podman and CRI-O run the prestart hook for every container (oci-hooks(5), version 1.0.0).

The hook itself looks whether a container asks for a GPU; the file can't tell, for a condition on the environment does
not exist there.
"""

from __future__ import annotations

from hook.engines.files import Host
from hook.engines.jsonfile import JsonText
from hook.engines.registration import HOOK, Registration
from hook.engines.settings import Edit, Setting
from hook.engines.values import find

# Read by default by both; /etc/containers/oci/hooks.d only where `hooks_dir` names it.
PATH = "/usr/share/containers/oci/hooks.d/nvhook.json"


def edits(host: Host, wanted: Registration) -> list[Edit]:
    """The file, where it is wanted, or there already."""
    text = host.read(PATH)
    if wanted.hook is None and text is None:
        return []
    path = wanted.hook or find(JsonText(PATH, text or "").value(), ("hook", "path"))
    if not isinstance(path, str) and not wanted.removing:
        return []
    # Where the hook runs twice, the second finds all done.
    values = {
        "version": "1.0.0",
        "hook": {"path": path, "args": [HOOK]},
        "when": {"always": True},
        "stages": ["prestart"],
    }
    return [Edit(PATH, JsonText, [Setting((key,), value) for key, value in values.items()], ours=True)]
