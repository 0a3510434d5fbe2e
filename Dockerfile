# syntax=docker/dockerfile:1
# docker build -t gsm8k-rlhf .        docker run --rm -v gsm8k-rlhf:/home/rlhf/project gsm8k-rlhf
# Arguments after the image's name are choices, as of `make run`: scale=smoke reward=mixture ppo.kl.coef=0.02
# compose.yaml runs the same image as MLflow server, Prefect server and worker.

FROM python:3.11-slim AS base
# DVC and workspaces want git. Debian keeps one version of a package, so there is none to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home rlhf

# The environment, exactly as the lock has it; uv comes from the lock as well.
FROM base AS environment
# `make lock-cpu` writes requirements-cpu.lock, without GPU libraries: --build-arg LOCK=requirements-cpu.lock
# --build-arg UV_TORCH_BACKEND=cpu
ARG LOCK=requirements.lock
ARG UV_TORCH_BACKEND
ENV UV_LINK_MODE=copy UV_CACHE_DIR=/cache/uv PIP_CACHE_DIR=/cache/pip
WORKDIR /home/rlhf/project
COPY ${LOCK} .venv.lock
RUN --mount=type=cache,target=/cache \
    python -m venv .venv \
    && sed -n '/^uv==/,/[^\\]$/p' .venv.lock > .venv/uv.txt \
    && .venv/bin/python -m pip install --quiet --require-hashes --no-deps -r .venv/uv.txt \
    && .venv/bin/uv pip sync --python .venv/bin/python --require-hashes .venv.lock

# The project at the commit that is checked out, with git's knowledge of it: runs are tracked with their commit.
FROM base AS project
COPY .git /home/source/.git
RUN git clone --quiet --depth 1 file:///home/source /home/rlhf/project \
    && git -C /home/rlhf/project remote remove origin \
    && mkdir -p /home/rlhf/project/.dvc/cache /home/rlhf/project/.state

FROM base
WORKDIR /home/rlhf/project
COPY --from=environment --chown=10001:10001 /home/rlhf/project/.venv .venv
COPY --from=project --chown=10001:10001 /home/rlhf/project .
RUN chown 10001:10001 .
USER 10001:10001
ENV HOME=/home/rlhf PATH=/home/rlhf/project/.venv/bin:$PATH DO_NOT_TRACK=true PYTHONUNBUFFERED=1
HEALTHCHECK --interval=60s --timeout=30s --start-period=60s CMD ["python", "-m", "flows.health"]
ENTRYPOINT ["python", "-m", "flows.pipeline"]
