"""NCCL settings by name (--nccl-profile). A variable the user has set is never changed."""

from __future__ import annotations

from collections.abc import Mapping

PROFILES: dict[str, dict[str, str]] = {
    "none": {},
    "ib-adaptive-routing": {"NCCL_IB_ADAPTIVE_ROUTING": "1"},
}


def profile_environment(name: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of profile `name` that `env` does not set already."""
    return {key: value for key, value in PROFILES[name].items() if key not in env}
