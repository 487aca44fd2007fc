"""What runs on a host beside the role: `python -m deploy.host.NAME`, by the units in deploy/systemd.

    boot            at each boot: the host's CURVE keys from Parameter Store, its private name in Cloud Map
    results         each minute: metrics and pictures to the bucket, and back to a host that has none
    report_health   once a minute: healthy or not, memory, disk, for the alarms
    spot_watch      stops the role when the instance is about to be taken away
    aws             clients of AWS
    metadata        what the instance knows of itself

All are told by the environment file /etc/apex-jax/environment. On a machine outside of AWS, whose file leaves
APEX_JAX_KEY_PATH, APEX_JAX_SERVICE_ID and APEX_JAX_STORAGE out, boot and results do nothing.
"""
