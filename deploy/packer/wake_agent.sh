#!/usr/bin/env bash
# User data of the instance that builds an image. If the agent of Session Manager starts before its role's policy is
# visible, it sleeps for half an hour; this restarts it until Packer has connected through it.
set -u

for _ in $(seq 20); do
    sleep 90
    if pgrep -f ssm-session-worker >/dev/null; then
        exit 0
    fi
    for unit in snap.amazon-ssm-agent.amazon-ssm-agent.service amazon-ssm-agent.service; do # a snap on Ubuntu
        systemctl try-restart "$unit" 2>/dev/null
    done
done
