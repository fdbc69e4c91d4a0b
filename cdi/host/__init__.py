# SPDX-License-Identifier: Apache-2.0
"""What this host has of NVIDIA's: the inventory, and how it is kept fresh.

Cold, each one question to the host: `driver`, `gpus`, `nodes`, `libraries`, `files`, `nvml`; `table` is what
is known of the driver's files beforehand; `inventory` puts the answers together. Hot: `store` reads the kept
inventory and `fingerprint` judges whether it still holds.

Every path is looked up inside a root (`ldcache.root`): the host's, which `--host-root` moves, or the driver's.
"""
