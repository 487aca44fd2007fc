#!/usr/bin/env bash
# Tries what provision.sh has installed, as the user that the roles run as: imports, a run of about ten seconds with all
# roles, and with --gpu the GPU. Run as root, on an image before it is kept.
set -euo pipefail

python=/opt/apex-jax/current/.venv/bin/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chown apex-jax: "$folder"

as_user() {
    (cd /opt/apex-jax/current && runuser -u apex-jax -- env HOME="$folder" XDG_CACHE_HOME="$folder" "$@")
}

as_user "$python" -c 'import botocore, envpool, flax, jax, zmq; import apex_jax; print("imports: JAX", jax.__version__)'
if [ "${1:-}" = --gpu ]; then
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    as_user "$python" -c 'import jax; assert jax.default_backend() == "gpu", jax.devices(); print(jax.devices())'
fi
as_user "$python" main.py --config configs/catch.yaml run_directory="$folder/run" total_minutes=0.17
ls "$folder"/run/checkpoints/*/ >/dev/null
echo "smoke test passed"
