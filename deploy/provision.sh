#!/usr/bin/env bash
# Installs the project at one commit, with its systemd units, on Debian 12 or 13 or Ubuntu 24.04: on images
# (deploy/packer) and on other machines. Run as root; a second run with the same arguments changes nothing.
#
#   deploy/provision.sh ARCHIVE [--gpu] [--log-agent]
#
#   ARCHIVE      a .tar.gz of `git archive`, which names its commit
#   --gpu        installs JAX for NVIDIA GPUs, and lets the learner's unit open the GPU; the driver must be installed
#   --log-agent  also installs the CloudWatch agent, after a check of its signature
#
# It creates: the user apex-jax; /opt/apex-jax/versions/SHA with the project and its .venv, and the link
# /opt/apex-jax/current; /etc/apex-jax (environment, keys); the units in /etc/systemd/system. It starts nothing.
set -euo pipefail

home=/opt/apex-jax
user=apex-jax
agent_url=https://amazoncloudwatch-agent.s3.amazonaws.com
agent_fingerprint=937616F3450B7D806CBD9725D58167303B789C72

fail() {
    echo "error: $1" >&2
    exit "${2:-1}"
}

parse() {
    archive=${1:-} requirements=requirements.txt log_agent=no
    [ -f "$archive" ] || fail "the first argument is no file: give a .tar.gz of git archive" 2
    for option in "${@:2}"; do
        case $option in
            --gpu) requirements="requirements-gpu.txt" ;;
            --log-agent) log_agent=yes ;;
            *) fail "unknown argument $option: see the head of $0" 2 ;;
        esac
    done
    [ "$(id -u)" = 0 ] || fail "this needs root: sudo $0 ..."
}

apt_get() { # waits for the lock of another one: a fresh machine installs updates for some minutes
    DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@" || fail "apt-get $* failed, see above"
}

# Installs only missing packages, so that a complete machine needs no network.
install_packages() {
    local program missing=()
    for program in git curl logrotate; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    [ -e /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
    /usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    if [ "$log_agent" = yes ]; then
        command -v gpg >/dev/null || missing+=(gnupg)
    fi
    if [ ${#missing[@]} -gt 0 ]; then
        apt_get update
        apt_get install -y --no-install-recommends "${missing[@]}"
    fi
    /usr/bin/python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
        fail "/usr/bin/python3 is $(/usr/bin/python3 --version): the project needs 3.11, 3.12 or 3.13 (Debian 12 or 13, Ubuntu 24.04)"
}

make_user_and_folders() {
    id "$user" >/dev/null 2>&1 ||
        useradd --system --user-group --home-dir /var/lib/apex-jax --no-create-home --shell /usr/sbin/nologin "$user"
    install -d -m 0755 "$home" "$home/versions"
    install -d -m 0755 /etc/apex-jax
    install -d -m 0700 -o "$user" -g "$user" /etc/apex-jax/keys
    install -d -m 0750 -o "$user" -g "$user" /var/lib/apex-jax /var/log/apex-jax
}

find_version() {
    # git reads only the head of the archive, which gzip reports as an error
    commit=$({ gzip -dc "$archive" 2>/dev/null || true; } | git get-tar-commit-id || true)
    [[ $commit =~ ^[0-9a-f]{40}$ ]] || fail "$archive is not of git archive: it names no commit"
    version=$home/versions/$commit
}

install_version() {
    local stamp=$version/.venv/installed-$requirements
    if [ -e "$stamp" ]; then
        echo "commit $commit is installed"
        return
    fi
    rm -rf "$version" # an incomplete installation, or one with other requirements
    install -d -m 0755 "$version"
    tar -xzf "$archive" -C "$version" --no-same-owner
    [ -f "$version/main.py" ] || fail "$archive has no main.py: it is not this project"
    /usr/bin/python3 -m venv "$version/.venv"
    "$version/.venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        -r "$version/$requirements" -r "$version/requirements-video.txt" -r "$version/deploy/requirements-host.txt"
    "$version/.venv/bin/python" -m pip check --disable-pip-version-check
    "$version/.venv/bin/python" -m compileall -q "$version/apex_jax" "$version/deploy" "$version/main.py"
    touch "$stamp"
}

install_units() {
    local units=$version/deploy/systemd system=/etc/systemd/system
    install -C -m 0644 "$units"/*.service "$units"/*.timer "$system/" # -C: unchanged files stay
    install -C -D -m 0644 -t "$system/apex-.service.d" "$units"/apex-.service.d/*.conf
    install -d -m 0755 "$system/apex-jax@learner.service.d"
    if [ "$requirements" = requirements-gpu.txt ]; then
        install -C -m 0644 "$units/apex-jax@learner.service.d/gpu.conf" "$system/apex-jax@learner.service.d/"
    else
        rm -f "$system/apex-jax@learner.service.d/gpu.conf"
    fi
    install -C -D -m 0644 "$units/apex-jax.logrotate" /etc/logrotate.d/apex-jax
    if [ -d /run/systemd/system ]; then # systemd runs: not in an unpacked root file system
        systemctl daemon-reload
    fi
}

install_log_agent() {
    if [ -x /opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl ]; then
        return
    fi
    local folder package
    folder=$(mktemp -d)
    package=$agent_url/$(sed -n "s/^ID=//p" /etc/os-release)/$(dpkg --print-architecture)/latest/amazon-cloudwatch-agent.deb
    curl -fsS --proto '=https' -o "$folder/agent.deb" "$package"
    curl -fsS --proto '=https' -o "$folder/agent.deb.sig" "$package.sig"
    curl -fsS --proto '=https' -o "$folder/agent.gpg" "$agent_url/assets/amazon-cloudwatch-agent.gpg"
    install -d -m 0700 "$folder/gnupg"
    gpg --homedir "$folder/gnupg" --quiet --import "$folder/agent.gpg"
    # gpg's status line names the primary key of the signature; the rest of gpg's output is ignored.
    gpg --homedir "$folder/gnupg" --status-fd 1 --verify "$folder/agent.deb.sig" "$folder/agent.deb" 2>/dev/null |
        grep -q "VALIDSIG.* $agent_fingerprint\$" || fail "the CloudWatch agent's signature is not of the known key"
    apt_get install -y "$folder/agent.deb"
    rm -rf "$folder"
}

main() {
    parse "$@"
    install_packages
    make_user_and_folders
    find_version
    install_version
    install_units
    if [ "$log_agent" = yes ]; then
        install_log_agent
    fi
    if [ "$(readlink "$home/current")" != "$version" ]; then
        ln -sfn "$version" "$home/current.new" && mv -T "$home/current.new" "$home/current" # atomic
    fi
    echo "ready: $home/current is $commit"
}

main "$@"
