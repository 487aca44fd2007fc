#!/usr/bin/env bash
# User data of the instance that makes an image. An agent of Session Manager that starts before its role's policy can be
# seen sleeps for half an hour: it is woken until Packer has come in through it.
set -u

for _ in $(seq 20); do
    sleep 90
    if pgrep -f ssm-session-worker >/dev/null; then
        exit 0
    fi
    for unit in snap.amazon-ssm-agent.amazon-ssm-agent.service amazon-ssm-agent.service; do # Ubuntu's is a snap
        systemctl try-restart "$unit" 2>/dev/null
    done
done
