"""Programs that run on a host beside the role: `python -m deploy.host.NAME`, started by the units in deploy/systemd.

    boot            at each boot: fetches the host's CURVE keys from Parameter Store, registers its name in Cloud Map
    results         every ten minutes: copies metrics and pictures to the bucket; fetches them to a host that has none
    report_health   once a minute: reports the end of the run, health, memory and disk, for the alarms
    aws             AWS clients

All are configured by the environment file /etc/apex-jax/environment. On a machine outside AWS, whose file does not set
APEX_JAX_KEY_PATH, APEX_JAX_SERVICE_ID and APEX_JAX_STORAGE, boot and results do nothing.
"""
