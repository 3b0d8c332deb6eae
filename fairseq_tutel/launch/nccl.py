"""NCCL settings by name (--nccl-profile). A variable the user has set is never changed.

Source of the variables' meaning: the section "Environment Variables" of NVIDIA's NCCL user guide.

``ib-adaptive-routing``: lets the switches of an InfiniBand fabric choose the path of every packet,
which is what all-to-all with hundreds of peers needs (Tutel's announcement of 22 November 2021
credits its all-to-all gain to CPU-GPU binding and adaptive routing). NCCL cannot switch it on in
the network. It can only send data in a form that may arrive out of order, and on the service level
for which the subnet manager has enabled adaptive routing (NVIDIA/nccl issue 1687):

NCCL_IB_ADAPTIVE_ROUTING=1      since 2.16; data is sent as RDMA writes that may be reordered, and
                                completion as a message of its own. Default: 1 on InfiniBand, 0 on
                                RoCE; stated so that it holds on both.
NCCL_IB_SL        (``sl=N``)    since 2.1.4; the service level, default 0. Ask the site which one
                                has adaptive routing: no value is right everywhere, so none is set.
NCCL_IB_TC        (``tc=N``)    since 2.1.15; traffic class, default 0; what RoCE fabrics use
                                where InfiniBand uses service levels.
NCCL_IB_GID_INDEX (``gid=N``)   since 2.1.4; the address to use on RoCE, as show_gids lists them.
NCCL_IB_QPS_PER_CONNECTION
                  (``qps=N``)   since 2.10, 1 to 128, default 1; more queue pairs spread the traffic
                                over more paths on fabrics of several levels.

Messages up to NCCL_IB_AR_THRESHOLD (since 2.6, 8192 bytes) are not split off; that is left alone.

``zero-sm``: leaves the streaming multiprocessors to the experts where NCCL can: copy engines move
what stays inside a node (since 2.28), and from 2.30.7 on all-to-alls between nodes, too, which then
are hierarchical inside NCCL (try --moe-a2a linear with it). Worth a try with overlapped exchanges,
which otherwise compete with the experts; this project has not measured it.

NCCL_CTA_POLICY=2               since 2.27; ZERO: no thread blocks wherever that is possible.
TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1
                                torch's own; registers its memory with NCCL, which the above needs.

Without a profile, too, several ranks on GPUs get NCCL_LAUNCH_ORDER_IMPLICIT=1 (since 2.26; older
ones do not read it): a rank with experts has several communicators (all ranks, those that exchange
tokens, the replicas of its experts, the parts of 2dh), and NCCL orders their operations as the host
launched them, so that ranks whose streams run differently do not wait for each other forever.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping

PROFILES: dict[str, dict[str, str]] = {
    "none": {},
    "ib-adaptive-routing": {"NCCL_IB_ADAPTIVE_ROUTING": "1"},
    "zero-sm": {"NCCL_CTA_POLICY": "2", "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"},
}
_OLDEST = {"zero-sm": (2, 28)}  # NCCL's version
_WITH_SETTINGS = ("ib-adaptive-routing",)
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_SETTINGS = {
    "sl": ("NCCL_IB_SL", range(16)),
    "tc": ("NCCL_IB_TC", range(256)),
    "gid": ("NCCL_IB_GID_INDEX", range(256)),
    "qps": ("NCCL_IB_QPS_PER_CONNECTION", range(1, 129)),
}


def profile_environment(profile: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``NAME[,sl=N][,tc=N][,gid=N][,qps=N]`` that ``env`` does not set already.

    Raises ValueError for an unknown name or setting, a number out of its range, or an NCCL that has
    not got what the profile is about.
    """
    name, *settings = profile.split(",")
    if name not in PROFILES:
        raise ValueError(f"--nccl-profile {name}: known are {', '.join(sorted(PROFILES))}")
    if settings and name not in _WITH_SETTINGS:
        raise ValueError(f"--nccl-profile {profile}: {name} takes no settings")
    version = installed_version() if name in _OLDEST else None
    if version is not None and version < _OLDEST[name]:
        raise ValueError(
            f"--nccl-profile {name} needs NCCL {'.'.join(map(str, _OLDEST[name]))} or newer, torch "
            f"has {'.'.join(map(str, version))} here"
        )
    variables = dict(PROFILES[name])
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in _SETTINGS:
            raise ValueError(
                f"--nccl-profile {profile}: {setting!r} is none of "
                f"{', '.join(k + '=N' for k in _SETTINGS)}"
            )
        variable, valid = _SETTINGS[key]
        if not value.isdigit() or int(value) not in valid:
            raise ValueError(
                f"--nccl-profile {profile}: {key} must be a number from {valid[0]} to {valid[-1]}"
            )
        variables[variable] = value
    return {key: value for key, value in variables.items() if key not in env}


def installed_version() -> tuple[int, ...] | None:
    """Of the NCCL that came with torch's wheel; None where it did not come as one."""
    for wheel in _WHEELS:
        try:
            words = re.match(r"\d+(\.\d+)*", importlib.metadata.version(wheel))
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(int(word) for word in words[0].split(".")) if words else None
    return None


def ordered_launches(env: Mapping[str, str]) -> dict[str, str]:
    """What several communicators on one GPU need, as the module's docstring says."""
    return {"NCCL_LAUNCH_ORDER_IMPLICIT": env.get("NCCL_LAUNCH_ORDER_IMPLICIT", "1")}


def overlap_warning(degree: str | None, env: Mapping[str, str]) -> str:
    """Why exchanges would not overlap with the experts; "" if nothing is known.

    With one hardware queue a kernel waits for whatever was launched before it, on whichever stream
    (NVIDIA/Megatron-LM pull request 6311 gained 3.7 % in place of 7.8 % for this reason).
    """
    if degree in (None, "1") or env.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return ""
    return (
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 lets a GPU run in launch order, so that exchanges hardly "
        f"overlap (overlap degree {degree}): unset it, or make it 8"
    )
