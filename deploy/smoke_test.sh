#!/usr/bin/env bash
# Tests what provision.sh has installed, as the user that runs the roles: imports, and a run of about ten seconds with
# all roles; if systemd runs, also what the process of each unit must be able to do despite the unit's hardening; with
# --gpu also the GPU. Run as root, before an image is saved.
set -euo pipefail

python=/opt/apex-jax/current/.venv/bin/python
# Properties of a unit's start and end, which the tests leave out; the others restrict the unit's process.
not_hardening='Type|RemainAfterExit|EnvironmentFile|ExecStart|ExecStopPost|Standard[A-Za-z]+|[A-Za-z]+ExitStatus|Timeout[A-Za-z]+'
not_hardening+='|Kill[A-Za-z]+|Restart|RestartSec|RestartSteps|RestartMaxDelaySec|WatchdogSec|NotifyAccess'
gpu_check='import jax; assert jax.default_backend() == "gpu", jax.devices(); x = jax.numpy.ones((512, 512)); '
gpu_check+='print(jax.devices(), float((x @ x).sum()))'
health_check='from deploy.host.report_health import DATA, MEMINFO, client, disk_used_percent, is_finished, memory_used_percent; '
health_check+='assert not is_finished("replay"); memory_used_percent(MEMINFO.read_text()), disk_used_percent(DATA), client("cloudwatch", "us-east-1")'

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chown apex-jax: "$folder"

as_user() {
    (cd /opt/apex-jax/current && runuser -u apex-jax -- env HOME="$folder" XDG_CACHE_HOME="$folder" "$@")
}

as_unit() { # $1: the unit whose hardening applies; then options of systemd-run, if any, and a command
    local unit line properties=()
    unit=$(systemctl cat "$1")
    shift
    while IFS= read -r line; do
        properties+=("--property=$line")
    done < <(awk -v skip="^($not_hardening)=" '/^\[/ { service = /^\[Service\]/ } service && /^[A-Z]/ && $0 !~ skip' <<<"$unit")
    systemd-run --quiet --pipe --wait --collect "${properties[@]}" --setenv=HOME=/tmp --setenv=XDG_CACHE_HOME=/tmp "$@"
}

under_hardening() {
    local data=/var/lib/apex-jax key=/etc/apex-jax/keys/smoke-test
    as_unit apex-jax@actor.service --setenv=JAX_PLATFORMS=cpu \
        "$python" main.py --config configs/catch.yaml processes=many run_directory="$data/smoke-test" total_minutes=0.17
    ls "$data"/smoke-test/checkpoints/*/ >/dev/null
    rm -r "$data/smoke-test"
    as_unit apex-jax-boot.service "$python" -c 'from deploy.host.boot import client; client("ssm", "us-east-1")'
    as_unit apex-jax-boot.service install -o apex-jax -g apex-jax -m 0600 /dev/null "$key"
    rm "$key"
    as_unit apex-jax-results.service "$python" -c 'from deploy.host.results import client; client("s3", "us-east-1")'
    as_unit apex-jax-health.service "$python" -c "$health_check"
}

as_user "$python" -c 'import botocore, envpool, flax, jax, zmq; import apex_jax; print("imports: JAX", jax.__version__)'
if [ "${1:-}" = --gpu ]; then
    if [ -d /run/systemd/system ]; then # first: the later commands would create the GPU's devices for this unit
        as_unit apex-jax@learner.service --setenv=JAX_PLATFORMS=cuda "$python" -c "$gpu_check"
    fi
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    as_user JAX_PLATFORMS=cuda "$python" -c "$gpu_check"
fi
as_user "$python" main.py --config configs/catch.yaml processes=many run_directory="$folder/run" total_minutes=0.17
ls "$folder"/run/checkpoints/*/ >/dev/null
if [ -d /run/systemd/system ]; then
    under_hardening
fi
echo "smoke test passed"
