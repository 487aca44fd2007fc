# The program in a container; its arguments are those of apex-jax. docs/operations.md says how it is run.
#
#   docker build -t apex-jax .                            for CPUs
#   docker build -t apex-jax:gpu --build-arg EXTRA=gpu .  for NVIDIA GPUs, with driver 580 or newer
#
# EXTRA=export adds what the command export needs for ONNX.

FROM python:3.12.13-slim-trixie

# They draw the films of MuJoCo tasks. Debian keeps no older versions of them that could be named here.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libegl1 libgl1 \
    && rm -rf /var/lib/apt/lists/*

# A new volume gets the owner of its folder here. The uid is fixed: a volume outlives the image that filled it.
RUN useradd --uid 10001 --home-dir /runs --no-create-home --shell /usr/sbin/nologin apex-jax \
    && install --directory --owner=apex-jax --group=apex-jax /runs \
    && install --directory --owner=apex-jax --group=apex-jax --mode=0700 \
        /keys/replay /keys/learner /keys/actor /keys/evaluator

# Only a change of these files installs the dependencies again.
WORKDIR /opt/apex-jax
COPY requirements.txt requirements-film.txt requirements-video.txt requirements-storage.txt \
    requirements-gpu.txt requirements-export.txt ./
ARG EXTRA=film
RUN pip install --no-cache-dir -r requirements-film.txt -r requirements-storage.txt -r "requirements-${EXTRA}.txt"

COPY . .
RUN pip install --no-cache-dir --no-deps .

# Compiled programs are kept in the home folder, so a new container starts as fast as a second start.
ENV HOME=/runs
VOLUME /runs
# A run directory such as runs/Pong-v5-1 is therefore in the volume.
WORKDIR /
USER 10001
# Without a shell in between, SIGTERM reaches the program, which saves its state.
ENTRYPOINT ["apex-jax"]
