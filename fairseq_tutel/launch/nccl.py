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
"""

from __future__ import annotations

from collections.abc import Mapping

PROFILES: dict[str, dict[str, str]] = {
    "none": {},
    "ib-adaptive-routing": {"NCCL_IB_ADAPTIVE_ROUTING": "1"},
}
_SETTINGS = {
    "sl": ("NCCL_IB_SL", range(16)),
    "tc": ("NCCL_IB_TC", range(256)),
    "gid": ("NCCL_IB_GID_INDEX", range(256)),
    "qps": ("NCCL_IB_QPS_PER_CONNECTION", range(1, 129)),
}


def profile_environment(profile: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``NAME[,sl=N][,tc=N][,gid=N][,qps=N]`` that ``env`` does not set already.

    Raises ValueError for an unknown name or setting, or a number out of its range.
    """
    name, *settings = profile.split(",")
    if name not in PROFILES:
        raise ValueError(f"--nccl-profile {name}: known are {', '.join(sorted(PROFILES))}")
    if settings and not PROFILES[name]:
        raise ValueError(f"--nccl-profile {profile}: {name} takes no settings")
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
