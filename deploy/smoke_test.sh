#!/usr/bin/env bash
# Tries what provision.sh has installed, as the user that the roles run as: imports, a run of about ten seconds with all
# roles, and with --gpu the GPU, under the hardening of the learner's unit. Run as root, on an image before it is kept.
set -euo pipefail

python=/opt/apex-jax/current/.venv/bin/python
# What a unit says of its start and its end; the rest is what its process may do.
not_hardening='Type|EnvironmentFile|ExecStart|ExecStopPost|Standard[A-Za-z]+|[A-Za-z]+ExitStatus|Timeout[A-Za-z]+'
not_hardening+='|Kill[A-Za-z]+|Restart|RestartSec|RestartSteps|RestartMaxDelaySec|WatchdogSec|NotifyAccess'
gpu_check='import jax; assert jax.default_backend() == "gpu", jax.devices(); x = jax.numpy.ones((512, 512)); '
gpu_check+='print(jax.devices(), float((x @ x).sum()))'

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chown apex-jax: "$folder"

as_user() {
    (cd /opt/apex-jax/current && runuser -u apex-jax -- env HOME="$folder" XDG_CACHE_HOME="$folder" "$@")
}

as_learner() {
    local unit line properties=()
    unit=$(systemctl cat apex-jax@learner.service)
    while IFS= read -r line; do
        properties+=("--property=$line")
    done < <(awk -v skip="^($not_hardening)=" '/^\[/ { service = /^\[Service\]/ } service && /^[A-Z]/ && $0 !~ skip' <<<"$unit")
    systemd-run --quiet --pipe --wait --collect "${properties[@]}" --setenv=HOME=/tmp --setenv=XDG_CACHE_HOME=/tmp "$@"
}

as_user "$python" -c 'import botocore, envpool, flax, jax, zmq; import apex_jax; print("imports: JAX", jax.__version__)'
if [ "${1:-}" = --gpu ]; then
    if [ -d /run/systemd/system ]; then # first: what comes after it would make the GPU's devices for it
        as_learner --setenv=JAX_PLATFORMS=cuda "$python" -c "$gpu_check"
    fi
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    as_user JAX_PLATFORMS=cuda "$python" -c "$gpu_check"
fi
as_user "$python" main.py --config configs/catch.yaml run_directory="$folder/run" total_minutes=0.17
ls "$folder"/run/checkpoints/*/ >/dev/null
echo "smoke test passed"
